"""The only package that trains: MS-GRPO (msgrpo.py), the embedded model (nano/), the DQN baseline (dqn.py)."""

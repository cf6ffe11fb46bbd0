"""The only package that trains: MS-GRPO (msgrpo.py), the embedded model (nano.py), the DQN baseline (dqn.py)."""

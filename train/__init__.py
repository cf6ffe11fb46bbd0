"""The only package that trains: MS-GRPO (equations in msgrpo.py, loop in loop.py), nano (nano/), a DQN (dqn.py)."""

"""How much an answer depends on the state: the mutual information of state and action, by RAGEN-2's measure of
template collapse (arXiv 2604.06268), taken from the actions alone.

    I(S; A) = H(A) − H(A | S)        in nats

A policy whose answers have become one template plays the same in every state: I is 0, whether the template is one
action (H(A) is 0) or any action at all (H(A) is large). RAGEN-2 scores the texts with the model; here the action
counts, which needs no forward pass, so a text that ignores the state before an action that does not is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from msgrpo.episode import Turn

FEWEST = 20  # turns in states that were answered more than once; of fewer nothing is said
SHUFFLES = 20


def state_information(turns: Sequence[Turn]) -> dict[str, float]:
    """I(S; A) and H(A) of an update's turns; empty where too few of them share a state.

    Only states that were answered more than once say anything. Of few answers a state, I comes out too large: the
    mean of what it is with the answers shuffled over the turns, where it should be 0, is taken off.
    """
    visits = Counter(turn.state for turn in turns)
    compared = [turn for turn in turns if visits[turn.state] > 1]
    if len(compared) < FEWEST or len({turn.state for turn in compared}) < 2:
        return {}
    _, states = np.unique([turn.state for turn in compared], return_inverse=True)
    _, actions = np.unique([turn.action or str(turn.failure) for turn in compared], return_inverse=True)
    generator = np.random.default_rng(0)
    by_chance = np.mean([_information(states, generator.permutation(actions)) for _ in range(SHUFFLES)])
    return {
        "rollout/state_information": max(0.0, float(_information(states, actions) - by_chance)),
        "rollout/action_entropy": float(_entropy(np.bincount(actions))),
    }


def _information(states: np.ndarray, actions: np.ndarray) -> float:
    counts = np.zeros((states.max() + 1, actions.max() + 1))
    np.add.at(counts, (states, actions), 1)
    return _entropy(counts.sum(0)) + _entropy(counts.sum(1)) - _entropy(counts.ravel())


def _entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())

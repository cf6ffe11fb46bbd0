"""The temperature of rollouts: fixed, or adapted so that the policy's entropy stays near a target (`entropy=0.1`).

    T ← T · exp(RATE · clip((H* − H) / H*, −1, 1))        within a factor of two of the config's temperature

H is the entropy of the tokens that were sampled, in nats a token, estimated as −mean log p of those tokens: a policy
that has become too sure explores again. Rollouts and ratios use T; evaluations keep the config's temperature.
"""

from __future__ import annotations

import math

from msgrpo.train.collect import own_turns
from msgrpo.train.config import TrainConfig
from msgrpo.train.rollouts import Rollouts

RATE = 0.1


def entropy(rollouts: Rollouts) -> float:
    """−mean log p of all sampled tokens, in nats, by the engine's own log-probabilities."""
    turns = own_turns([*rollouts.episodes, *rollouts.branched])
    found = [value for turn in turns if turn.completion for value in turn.completion.logprobs]
    return -sum(found) / len(found) if found else 0.0


def following(temperature: float, found: float, config: TrainConfig) -> float:
    """The temperature of the next update's rollouts."""
    if config.entropy is None:
        return temperature
    pull = max(-1.0, min(1.0, (config.entropy - found) / config.entropy))
    return max(config.temperature / 2, min(config.temperature * 2, temperature * math.exp(RATE * pull)))

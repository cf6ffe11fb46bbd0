"""explore=entropy(target=0.1): the temperature of rollouts follows the policy's entropy.

    T ← T · exp(RATE · clip((H* − H) / H*, −1, 1))        within a factor of two of the config's temperature

H* is `target`, H the entropy of the tokens that were sampled, in nats a token, estimated as −mean log p of those
tokens: a policy that has become too sure explores again. Rollouts and ratios use T; evaluations keep the config's
temperature.
"""

from __future__ import annotations

import math

from pydantic import Field

from msgrpo.train.rivals.contract import Explore

RATE = 0.1


class Entropy(Explore):
    """The temperature of rollouts follows the policy's entropy."""

    name = "entropy"
    target: float = Field(gt=0, description="H*, nats a token that the rollouts' temperature aims at")

    def temperature(self, current: float, entropy: float, usual: float) -> float:
        pull = max(-1.0, min(1.0, (self.target - entropy) / self.target))
        return max(usual / 2, min(usual * 2, current * math.exp(RATE * pull)))

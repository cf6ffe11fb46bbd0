"""What a service takes for training: prices, and what a run has spent.

The prices are a table, each with its day and its source; those in `backend=tinker(prefill=…)` go before it. A service
that a person runs themselves (TINKER_BASE_URL names another host than Tinker's own) costs nothing without them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic_core import from_json

from msgrpo.errors import RunError, UsageError
from msgrpo.files import read_regular, replace_json
from msgrpo.train.config import TrainConfig

HOST = "tinker.thinkingmachines.dev"  # where the SDK goes unless TINKER_BASE_URL names another host
LEDGER = "cost.json"
WRITE_S = 5.0  # between two writings of the ledger: what a kill can make it forget
MOST_TOKENS = 10**15  # that a run may have spent; more is damage
KINDS = ("prefill", "sample", "train")
PRICED = "--backend 'tinker(prefill=…, sample=…, train=…)'"


@dataclass(frozen=True)
class ServicePrice:
    """US$ for a million tokens: of prompts read, of answers sampled, of turns trained on; and who says so."""

    prefill: float
    sample: float
    train: float
    source: str

    def of(self, tokens: Mapping[str, int]) -> float:
        """US$ for so many tokens of each kind."""
        return sum(float(getattr(self, kind)) * tokens.get(kind, 0) for kind in KINDS) / 1e6


# The newest that was found for each; the hosted list changes, so look at
# https://tinker-docs.thinkingmachines.ai/tinker/models/ before you rely on one.
PRICES = {
    "Qwen/Qwen3-4B-Instruct-2507": ServicePrice(0.07, 0.22, 0.22, "thinkingmachines.ai/tinker on 2026-01-05"),
    "Qwen/Qwen3-8B": ServicePrice(0.195, 0.60, 0.44, "tinker-docs.thinkingmachines.ai/tinker/models on 2026-10-07"),
}


def is_hosted() -> bool:
    """Whether the service is Tinker's own, which takes money."""
    url = os.environ.get("TINKER_BASE_URL", "").strip()
    return not url or urlsplit(url).hostname == HOST


def price_of(config: TrainConfig) -> ServicePrice:
    """The price that the settings name, else the table's. Raises UsageError where nobody knows one."""
    assert config.service is not None
    if config.service.prices is not None:
        return ServicePrice(*config.service.prices, source="--backend")
    if not is_hosted():
        if config.service.max_cost is not None:
            raise UsageError(
                "max_cost needs a price, and none is known for the server of TINKER_BASE_URL",
                fix=f"{PRICED} in US$ for a million tokens",
            )
        return ServicePrice(0.0, 0.0, 0.0, source="a server of your own: nothing is counted where no price is given")
    if config.base not in PRICES:
        raise UsageError(
            f"no price of {config.base!r} is known; known are those of {', '.join(PRICES)}",
            fix=f"{PRICED} in US$ for a million tokens, as the service's page of prices says",
        )
    return PRICES[config.base]


class LimitReachedError(RunError):
    """The next request could take a run beyond `max_cost`."""


@dataclass
class Meter:
    """What a run has spent, in US$ and tokens, over all its resumptions: `cost.json` in its folder.

    Before a request the most that it can cost is added, after it what was not used is taken off; a request that fails
    stays counted. So the real cost is never more than `spent`. Prompts count whole, although services take less for
    a beginning that they have cached.
    """

    price: ServicePrice
    limit: float | None = None
    file: Path | None = None
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    _written: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig, out: Path) -> Meter:
        """Goes on with what the folder's runs have spent."""
        assert config.service is not None
        meter = cls(price_of(config), config.service.max_cost, out / LEDGER)
        try:
            spent = from_json(read_regular(out / LEDGER))["tokens"]
            if not all(0 <= spent[kind] < MOST_TOKENS for kind in KINDS):
                raise ValueError("its counts are none")
            meter.tokens = {kind: int(spent[kind]) for kind in KINDS}
        except FileNotFoundError:
            pass  # nothing was spent yet
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{out / LEDGER} is damaged, so nobody knows what was spent: {error}",
                fix=f"look at the service's bill, and remove {out / LEDGER} to count from 0",
            ) from error
        return meter

    @property
    def spent(self) -> float:
        """US$, at most."""
        return self.price.of(self.tokens)

    def reserve(self, **tokens: int) -> None:
        """Count these tokens. Raises LimitReachedError where they could take the run beyond its limit."""
        after = self.spent + self.price.of(tokens)
        if self.limit is not None and after > self.limit:
            raise LimitReachedError(
                f"max_cost is ${self.limit:g}, ${self.spent:.4f} are spent, and the next request could cost "
                f"${after - self.spent:.4f}",
                fix="what was learned is saved; go on with --resume and --backend 'tinker(max_cost=…)'",
            )
        self._add(tokens, 1)

    def unused(self, **tokens: int) -> None:
        """Of what was reserved these tokens were not used."""
        self._add(tokens, -1)

    def _add(self, tokens: Mapping[str, int], sign: int) -> None:
        for kind, count in tokens.items():
            self.tokens[kind] += sign * count
        if time.monotonic() - self._written > WRITE_S:
            self.write()

    def write(self) -> None:
        """Write the ledger."""
        if self.file is not None and self.file.parent.is_dir():
            replace_json(self.file, self.summary())
            self._written = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """What was spent, and by which prices."""
        prices = {kind: getattr(self.price, kind) for kind in KINDS}
        return {"usd_at_most": round(self.spent, 6), "tokens": self.tokens, "usd_per_million": prices} | {
            "prices": self.price.source
        }

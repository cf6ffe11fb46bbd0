"""What a service takes for training: prices, what a run has spent, and what it will cost before it begins.

The prices are a table, each with its day and its source; `--price` overrides it. A service that a person runs
themselves (TINKER_BASE_URL names another host than Tinker's own) costs nothing unless `--price` says so.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic_core import from_json

from msgrpo.agent import Completion, OnText, Sampling
from msgrpo.errors import RunError, UsageError
from msgrpo.files import replace_text
from msgrpo.models.chat import ChatFormat
from msgrpo.prompt import Prompt
from msgrpo.rewards import Shaping
from msgrpo.text import as_json
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines.contract import ROWS, TOKENS
from msgrpo.train.ranks import ALONE
from msgrpo.train.rollouts import Play, Players, own_turns, whole

HOST = "tinker.thinkingmachines.dev"  # where the SDK goes unless TINKER_BASE_URL names another host
LEDGER = "cost.json"
WRITE_S = 5.0  # between two writings of the ledger: what a kill can make it forget
PLAYED = 32  # episodes that a random player plays for an estimate
LETTERS = 3.5  # characters of a prompt for one token, where no tokenizer is here
KINDS = ("prefill", "sample", "train")


@dataclass(frozen=True)
class Price:
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
    "Qwen/Qwen3-4B-Instruct-2507": Price(0.07, 0.22, 0.22, "thinkingmachines.ai/tinker on 2026-01-05"),
    "Qwen/Qwen3-8B": Price(0.195, 0.60, 0.44, "tinker-docs.thinkingmachines.ai/tinker/models on 2026-10-07"),
}


def is_hosted() -> bool:
    """Whether the service is Tinker's own, which takes money."""
    url = os.environ.get("TINKER_BASE_URL", "").strip()
    return not url or urlsplit(url).hostname == HOST


def price_of(config: TrainConfig) -> Price:
    """The price that `--price` names, else the table's. Raises UsageError where nobody knows one."""
    if config.price is not None:
        return Price(*config.prices, source="--price")
    if not is_hosted():
        if config.max_cost is not None:
            raise UsageError(
                "max_cost needs a price, and none is known for the server of TINKER_BASE_URL",
                fix="--price PREFILL,SAMPLE,TRAIN in US$ for a million tokens",
            )
        return Price(0.0, 0.0, 0.0, source="a server of your own: nothing is counted without --price")
    if config.base not in PRICES:
        raise UsageError(
            f"no price of {config.base!r} is known; known are those of {', '.join(PRICES)}",
            fix="--price PREFILL,SAMPLE,TRAIN in US$ for a million tokens, as the service's page of prices says",
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

    price: Price
    limit: float | None = None
    file: Path | None = None
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    _written: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig, out: Path) -> Meter:
        """Goes on with what the folder's runs have spent."""
        meter = cls(price_of(config), config.max_cost, out / LEDGER)
        try:
            spent = from_json((out / LEDGER).read_bytes())["tokens"]
            meter.tokens = {kind: max(0, int(spent[kind])) for kind in KINDS}
        except FileNotFoundError:
            pass  # nothing was spent yet
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{out / LEDGER} cannot be read, so nobody knows what was spent: {error}",
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
                fix="what was learned is saved; go on with --resume and a higher --max-cost",
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
            replace_text(self.file, as_json(self.summary(), indent=2) + "\n")
            self._written = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """What was spent, and by which prices."""
        prices = {kind: getattr(self.price, kind) for kind in KINDS}
        return {"usd_at_most": round(self.spent, 6), "tokens": self.tokens, "usd_per_million": prices} | {
            "prices": self.price.source
        }


@dataclass(frozen=True)
class Estimate:
    """What a whole run will take: its turns, and its tokens of each kind by what they are for."""

    updates: int
    episodes: int
    turns: int
    turns_at_most: int
    tokens: dict[str, int]
    parts: dict[str, dict[str, int]]  # rollouts, update, evaluations, film, canary
    prompt_tokens: float
    counted_by: str

    @property
    def most(self) -> float:
        """How many times the turns, where every episode lasts to its step limit."""
        return self.turns_at_most / max(self.turns, 1)


def estimate(config: TrainConfig, tokenizer: Any | None) -> Estimate:
    """Count a run's tokens before it begins; nothing is asked of any service.

    Episodes are taken to last as a random player's do, and answers to be as long as they may be.
    """
    players = Players.of(config, ALONE)
    model = _Random(tokenizer, config)
    played = [_played(players, model, scenario) for scenario in config.scenarios]
    turns = sum(share * one for share, (one, _) in zip(config.shares, played, strict=True))
    limit = sum(share * one for share, (_, one) in zip(config.shares, played, strict=True))
    first_turns = played[0][0]
    prompt = sum(model.read) / max(len(model.read), 1)
    group_count = config.steps * config.groups
    rollouts = group_count * config.group_size * turns
    kept = group_count * min(getattr(config.select, "keep", config.group_size), config.group_size) * turns
    evaluations = -(-config.steps // config.eval_every) + 1
    counted = {
        "rollouts": rollouts,
        "evaluations": evaluations * config.eval_episodes * first_turns,
        "film (first and last scene)": 2 * config.filmed.starts * first_turns,
    }
    parts = {
        name: {"prefill": round(n * prompt), "sample": round(n * config.max_tokens)} for name, n in counted.items()
    }
    parts["update"] = {"train": round(kept * (prompt + config.max_tokens))}
    rows = (config.steps + 1) * ROWS
    whole_row = prompt + TOKENS
    parts["canary"] = {
        "prefill": round(rows * (prompt + 2 * whole_row)),
        "sample": rows * (TOKENS + 2),
        "train": round(rows * whole_row),
    }
    all_turns = sum(counted.values())
    return Estimate(
        updates=config.steps,
        episodes=group_count * config.group_size,
        turns=round(all_turns),
        turns_at_most=round(all_turns * limit / max(turns, 1e-9)),
        tokens={kind: sum(part.get(kind, 0) for part in parts.values()) for kind in KINDS},
        parts=parts,
        prompt_tokens=prompt,
        counted_by=model.counted_by,
    )


def _played(players: Players, model: _Random, scenario: Any) -> tuple[float, float]:
    """Turns of the policy in one episode: of a random player's on average, and at most."""
    seeds = list(islice(scenario.starts("train"), PLAYED))
    plays = [Play(scenario, seed, seed, i, players.seats(scenario, i)) for i, seed in enumerate(seeds)]
    episodes = asyncio.run(players.play(model, players.config.sampling, plays, Shaping()))
    seats = sum(len(play.seats) for play in plays) / len(plays)
    return len(own_turns(whole(episodes))) / len(plays), scenario.step_limit * seats


class _Random:
    """A player that draws an action and counts what it read. No model."""

    name = "random"

    def __init__(self, tokenizer: Any | None, config: TrainConfig) -> None:
        self.extra_settings: dict[str, Any] = {}
        self.read: list[float] = []
        self._chat = None if tokenizer is None else ChatFormat(tokenizer, config.chat)
        named = [one.actions for one in config.scenarios if isinstance(one.actions, tuple)]
        self._words = [action for actions in named for action in actions] or ["pass"]
        self.counted_by = (
            f"about {LETTERS:g} characters a token: no tokenizer of {config.base} is here"
            if tokenizer is None
            else f"the tokenizer of {config.base}"
        )

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Completion:
        text = "".join(message["content"] for message in prompt.messages)
        self.read.append(len(text) / LETTERS if self._chat is None else len(self._chat.ids([prompt])[0]))
        action = random.Random(seed).choice(list(actions) or self._words)
        return Completion(f"<action>{action}</action>", "stop")

    async def close(self) -> None:
        """Nothing is open."""


def lines(config: TrainConfig, found: Estimate, price: Price) -> list[str]:
    """The estimate as a person reads it."""
    usd = price.of(found.tokens)
    tokens = ", ".join(f"{found.tokens[kind]:,} {kind}" for kind in KINDS)
    parts = ", ".join(f"{name} ${price.of(part):.2f}" for name, part in found.parts.items())
    return [
        f"{config.base} on {config.scenario}: {found.updates:,} updates, {found.episodes:,} episodes, "
        f"{found.turns:,} turns with evaluations and film",
        f"tokens: {tokens}",
        f"  a prompt has {found.prompt_tokens:.0f} tokens (by {found.counted_by}); an answer counts with all of its "
        f"max_tokens, {config.max_tokens}; episodes last as a random player's",
        f"about ${usd:,.2f}: {parts}",
        f"  ${usd * found.most:,.2f} if every episode lasts to its step limit; less where prompts are cached or "
        "answers short; storage of checkpoints not counted",
        f"prices in US$ for a million tokens: prefill {price.prefill:g}, sample {price.sample:g}, train "
        f"{price.train:g} ({price.source})",
        "nothing was sent to any service",
    ]

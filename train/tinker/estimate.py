"""What a run at a service will cost, before anything is asked of it: `msgrpo train --backend tinker --dry-run`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from msgrpo.agent import Completion, OnText, Sampling
from msgrpo.prompt import ChatFormat, Prompt
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines.contract import ROWS, TOKENS
from msgrpo.train.ranks import ALONE
from msgrpo.train.rollouts import Play, Players, check_lost, own_turns, with_result
from msgrpo.train.tinker.cost import KINDS, ServicePrice

PLAYED = 32  # episodes that a random player plays for an estimate
LETTERS = 3.5  # characters of a prompt for one token, where no tokenizer is here


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
        """The factor by which turns, tokens and cost grow where every episode lasts to its step limit."""
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
    of_group = [config.group_size, getattr(config.explore, "episodes", 0)]  # and branches, as if from the start
    again = config.group_size * getattr(config.explore, "rounds", 0)  # at most, in place of flat groups
    rollouts = group_count * (sum(of_group) + again) * turns
    kept = group_count * sum(min(getattr(config.select, "keep", size), size) for size in of_group) * turns
    evaluations = -(-config.steps // config.evaluation.every) + 1
    counted = {
        "rollouts": rollouts,
        "evaluations": evaluations * config.evaluation.starts * first_turns,
        "film (first and last scene)": 2 * config.evaluation.film * first_turns,
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
    episodes = asyncio.run(players.play(model, players.config.sampling, plays, 0.0))
    check_lost(episodes)
    seats = sum(len(play.seats) for play in plays) / len(plays)
    return len(own_turns(with_result(episodes))) / len(plays), scenario.step_limit * seats


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


def lines(config: TrainConfig, cost: Estimate, price: ServicePrice) -> list[str]:
    """The estimate as a person reads it."""
    usd = price.of(cost.tokens)
    tokens = ", ".join(f"{cost.tokens[kind]:,} {kind}" for kind in KINDS)
    parts = ", ".join(f"{name} ${price.of(part):.2f}" for name, part in cost.parts.items())
    return [
        f"{config.base} on {config.scenario}: {cost.updates:,} updates, {cost.episodes:,} episodes, "
        f"{cost.turns:,} turns with evaluations and film",
        f"tokens: {tokens}",
        f"  a prompt has {cost.prompt_tokens:.0f} tokens (by {cost.counted_by}); an answer counts with all of its "
        f"max_tokens, {config.max_tokens}; episodes last as a random player's",
        f"about ${usd:,.2f}: {parts}",
        f"  ${usd * cost.most:,.2f} if every episode lasts to its step limit; less where prompts are cached or "
        "answers short; storage of checkpoints not counted",
        f"prices in US$ for a million tokens: prefill {price.prefill:g}, sample {price.sample:g}, train "
        f"{price.train:g} ({price.source})",
        "nothing was sent to any service",
    ]

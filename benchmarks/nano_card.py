"""What the embedded model can do, for its card: play, format, reading the rules, and what its thought is for.

    python benchmarks/nano_card.py --episodes 200 --result benchmarks/results/nano-card.json

"Another's thought" puts what nano says in some other position of the scenario into its mouth, so that it acts on
words that are wrong here: what it then loses is what its own are worth. "Apples taken" is how often it moves onto an
apple that lies beside its head.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import facts

from evals.stats import bootstrap_mean, mcnemar_exact, wilson
from evals.suites import episode_seeds
from msgrpo_agent.agent import Agent, Completion, LanguageAgent, OnText, Sampling
from msgrpo_agent.episode import Episode
from msgrpo_agent.game import Scenario
from msgrpo_agent.games import SCENARIOS
from msgrpo_agent.games.snake import Snake, ahead
from msgrpo_agent.models.loading import nano
from msgrpo_agent.prompt import Prompt
from msgrpo_agent.references import OptimalAgent, RandomAgent
from msgrpo_agent.rollout import derive_seed, play_episode
from train.nano import rows_of

ANOTHERS = "nano, another's thought"


class AnothersThought:
    """nano that says what it would say elsewhere, and then acts."""

    name = ANOTHERS
    extra_settings: Mapping[str, Any] = {}

    def __init__(self, scenario: Scenario) -> None:
        self._model = nano()
        self._elsewhere = list(thoughts(scenario, 500))
        self._model.chat.ids = self._ids  # type: ignore[method-assign]

    def _thought(self, prompt: Prompt) -> str:
        return self._elsewhere[derive_seed("another", prompt.state) % len(self._elsewhere)]

    def _ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        chat = self._model.chat
        texts = [chat._head + p.prefix + p.state + chat._tail + self._thought(p) + "<action>" for p in prompts]
        encoded: list[list[int]] = chat.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return encoded

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Completion:
        completion = await self._model.complete(prompt, sampling, seed)
        return replace(completion, text=f"{self._thought(prompt)}<action>{completion.text}")

    async def close(self) -> None:
        await self._model.close()


def thoughts(scenario: Scenario, count: int) -> Iterator[str]:
    """What nano is taught to say, in the training positions that its own play comes through."""
    for row in rows_of(scenario, count, seed=0):
        yield row.answer.partition("<action>")[0]


def play(agent: Agent, scenario: Scenario, episodes: int) -> list[Episode]:
    async def everything() -> list[Episode]:
        return await asyncio.gather(
            *(
                play_episode(
                    scenario, dict.fromkeys(scenario.players, agent), start_seed=s, chance_seed=c, sampling_seed=d
                )
                for s, c, d in episode_seeds(scenario, episodes)
            )
        )

    return asyncio.run(everything())


def score(episodes: list[Episode]) -> dict[str, Any]:
    returns = [value for episode in episodes for value in episode.returns.values()]
    turns = [turn for episode in episodes for turn in episode.turns]
    found: dict[str, Any] = {
        "return": sum(returns) / len(returns),
        "return_interval": bootstrap_mean(returns, seed=0),
        "in_format": 1 - sum(turn.failure is not None for turn in turns) / len(turns),
        "turns": len(turns),
    }
    if episodes[0].success is not None:
        wins = sum(bool(episode.success) for episode in episodes)
        found |= {"success": wins / len(episodes), "success_interval": wilson(wins, len(episodes))}
    return found


def apples_taken(scenario: Scenario, episodes: list[Episode]) -> dict[str, Any]:
    """Of all turns with an apple beside the head: how often the move goes there. Episodes are played again."""
    beside = taken = 0
    for episode in episodes:
        game = scenario.new(episode.start_seed, episode.chance_seed)
        assert isinstance(game, Snake)
        for turn in episode.turns:
            head = game.bodies[turn.player][0]
            near = [a for a in game.actions if (item := game.item_at(ahead(head, a))) and item.name == "apple"]
            beside += bool(near)
            taken += turn.action in near
            game.step({turn.player: turn.action})
    return {"beside": beside, "taken": taken, "share": taken / beside, "interval": wilson(taken, beside)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--scenario", action="append", default=[], help="default: all but the longest")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    names = given.scenario or [name for name, s in SCENARIOS.items() if s.step_limit <= 20]
    model = nano()
    agents = {
        "nano": LanguageAgent("nano", model, Sampling(max_tokens=48)),
        "nano, greedy": LanguageAgent("nano", model, Sampling(temperature=0, max_tokens=48)),
        "random": RandomAgent(),
        "optimal": OptimalAgent(),
    }
    result: dict[str, Any] = {"machine": facts(), "episodes": given.episodes, "scenarios": {}}
    for name in names:
        another = LanguageAgent("nano", AnothersThought(SCENARIOS[name]), Sampling(max_tokens=48))
        playing = agents | {ANOTHERS: another}
        played = {label: play(agent, SCENARIOS[name], given.episodes) for label, agent in playing.items()}
        rows: dict[str, Any] = {label: score(episodes) for label, episodes in played.items()}
        if SCENARIOS[name].goal:
            wins = [[bool(e.success) for e in played[label]] for label in ("nano", ANOTHERS)]
            rows["thought, McNemar p"] = mcnemar_exact(*wins)
        if name in ("snake", "snake-poison-apple"):
            rows["nano"]["apples_taken"] = apples_taken(SCENARIOS[name], played["nano"])
        result["scenarios"][name] = rows
        print(name, *(f"{label} {rows[label]['return']:.3f}" for label in playing), sep="  ", flush=True)
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

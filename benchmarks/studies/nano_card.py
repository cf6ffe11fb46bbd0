"""What the embedded model can do, for its card: play, format, reading the rules, and what its thought is for.
Whether its words are true, and what the best use of them would give, is in `words.py`.

    PYTHONPATH=benchmarks python benchmarks/studies/nano_card.py --episodes 200 \\
        --result benchmarks/results/nano-card.json

"Another's thought" puts what nano says in some other position of the scenario into its mouth, so that it acts on
words that are wrong here: what it then loses is what its own are worth. "Apples taken" is how often it moves onto an
apple that lies beside its head.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from machine import facts
from words import SAMPLING, Continued, load, play

from msgrpo.agent import Agent, Decision, LanguageAgent, OnText, View, parse_action
from msgrpo.episode import Episode, derive_seed
from msgrpo.evals.stats import bootstrap_mean, mcnemar_exact, wilson
from msgrpo.game import Scenario
from msgrpo.games import SCENARIOS
from msgrpo.games.snake import Snake, ahead
from msgrpo.prompt import PromptTemplate
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.train.nano.build import FURTHER, rows_of

ANOTHERS = "nano, another's thought"


@dataclass
class AnothersThought:
    """nano that says what it would say elsewhere, and then acts."""

    model: Continued
    elsewhere: list[str]
    spec: str = ANOTHERS

    def settings(self) -> dict[str, Any]:
        return {"model": self.spec}

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        prompt = PromptTemplate().render(view.scenario, view.observation)
        said = self.elsewhere[derive_seed("another", prompt.state) % len(self.elsewhere)] + "<action>"
        answer = await self.model.answer(prompt, view.seed, said)
        return Decision(parse_action(answer.text, view.game.actions).action, None, prompt, answer)

    async def close(self) -> None:
        """The model belongs to others too."""


def thoughts(scenario: Scenario, count: int) -> list[str]:
    """What nano is taught to say, in the training positions that its own play comes through."""
    return [row.answer.partition("<action>")[0] for row in islice(rows_of(scenario, 0, further=FURTHER), count)]


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
    model, continued = load("nano"), Continued("nano")
    agents: dict[str, Agent] = {
        "nano": LanguageAgent("nano", model, SAMPLING),
        "nano, greedy": LanguageAgent("nano", model, SAMPLING.model_copy(update={"temperature": 0.0})),
        "random": RandomAgent(),
        "optimal": OptimalAgent(),
    }
    result: dict[str, Any] = {"machine": facts(), "episodes": given.episodes, "scenarios": {}}
    for name in names:
        another = AnothersThought(continued, thoughts(SCENARIOS[name], 500))
        playing = agents | {ANOTHERS: another}
        played = {label: play(agent, SCENARIOS[name], given.episodes, "test") for label, agent in playing.items()}
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

"""Semantic override on ice: does a policy that learned to reach the goal soon read that it must arrive with step 8?

    export PYTHONPATH=benchmarks
    GAME=benchmarks/studies/eight_steps.py:scenario
    msgrpo --allow $GAME eval base:runs/smol-words adapter:runs/smol-own optimal random --scenario frozen-lake \\
        --scenario $GAME --episodes 60 --max-tokens 64 --prompt none --out runs/eight
    python benchmarks/studies/eight_steps.py --records runs/eight --against base:runs/smol-words \\
        --result benchmarks/results/smollm2-eight-steps.json

The game is Frozen Lake on the same boards, with another end: the goal pays 1 point only if it is entered with step 8,
the last one, and nothing before. The shortest way takes six steps, and a step against an edge is a step that waits,
so that somebody who reads the rules wins from every start. An episode has one of four ends: `won`, `too soon` (the
goal before step 8), `hole`, `out of steps`. *Told apart*: how much more often the goal is reached before step 8 where
that pays than where it does not. Differences are paired over the same starts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from machine import options, write

from msgrpo.episode import Episode
from msgrpo.errors import UsageError
from msgrpo.evals.plays import load
from msgrpo.evals.stats import paired_difference, wilson
from msgrpo.game import Scenario
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import GYM_ACTION, FrozenLake, random_map
from msgrpo.trust import allow

GAME = "benchmarks/studies/eight_steps.py:scenario"
STEPS = 8
PLAIN = get_scenario("frozen-lake")
PAYS = "the goal ends it with 1 point."
ENDS = ("won", "too soon", "hole", "out of steps")


class EightSteps(FrozenLake):
    """Frozen Lake whose goal pays only with the last step."""

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        paid = super()._advance(actions)["player"]
        return {"player": paid if self.steps + 1 == self.step_limit else 0.0}

    @property
    def success(self) -> bool:
        return super().success and self.steps == self.step_limit

    @property
    def ending(self) -> str:
        return "goal reached too soon" if super().success and not self.success else super().ending


@cache
def _wins(desc: tuple[str, ...], cell: int, left: int) -> bool:
    """Whether the goal can be entered from `cell` with the last of the steps that are left, and not before."""
    if "".join(desc)[cell] in "GH" or not left:
        return False
    game = EightSteps(desc, slippery=False, step_limit=left, chance_seed=0)
    return any(_wins_by(game, cell, action, left) for action in GYM_ACTION)


def _wins_by(game: FrozenLake, cell: int, action: str, left: int) -> bool:
    ((_, after, _, _),) = game.env.unwrapped.P[cell][GYM_ACTION[action]]
    if "".join(game.desc)[after] == "G":
        return left == 1
    return _wins(game.desc, int(after), left - 1)


def best(game: EightSteps, player: str) -> list[str]:
    """The actions after which the goal can still be entered with the last step; all, where none is left."""
    left = game.step_limit - game.steps
    return [a for a in GYM_ACTION if _wins_by(game, game.state, a, left)] or list(GYM_ACTION)


scenario = Scenario(
    "frozen-lake-eight-steps",
    "frozen-lake",
    PLAIN.rules.replace(
        PAYS, f"the goal ends it: with 1 point if you enter it with step {STEPS}, with 0 points before."
    ),
    STEPS,
    "[ours]",
    lambda start, chance: EightSteps(random_map(4, 0.8, start), False, STEPS, chance),
    goal=True,
    reference=best,
)


def before_step_8(episode: Episode) -> bool:
    """Whether the goal was reached before step 8, in either game."""
    return len(episode.turns) < STEPS and (episode.success or end_of(episode) == "too soon")


def end_of(episode: Episode) -> str:
    """How it ended: who has not won stands on the goal, in a hole, or has no steps left."""
    if episode.success:
        return "won"
    game = scenario.new(episode.start_seed, episode.chance_seed)
    for turn in episode.turns:
        game.step({"player": turn.action})
    assert isinstance(game, EightSteps)
    row, column = game.cell
    return {"G": "too soon", "H": "hole"}.get(game.desc[row][column], "out of steps")


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--records", type=Path, required=True, help="folder of the evaluation")
    parser.add_argument("--against", required=True, help="the agent before training")
    given = parser.parse_args()
    allow([GAME])
    try:
        plays, _ = load([given.records])
    except UsageError as error:
        parser.error(str(error))
    ends: dict[str, dict[str, list[str]]] = {}
    soon: dict[str, dict[str, np.ndarray]] = {}
    for play in plays:
        where = "plain" if play.scenario == PLAIN.id else "eight steps"
        one = [play.finished[seeds] for seeds in sorted(play.finished)]
        ends.setdefault(play.agent, {})[where] = [
            end_of(episode) if where == "eight steps" else ("won" if episode.success else "lost") for episode in one
        ]
        soon.setdefault(play.agent, {})[where] = np.array([before_step_8(episode) for episode in one], float)
    if given.against not in ends:
        parser.error(f"--against {given.against} is none of {', '.join(sorted(ends))}")
    rows: list[dict[str, Any]] = []
    for agent, of in ends.items():
        row: dict[str, Any] = {"agent": agent, "episodes": len(of["plain"])}
        for where, end in (("plain", "won"), *(("eight steps", end) for end in ENDS)):
            here, before = (
                np.array([one == end for one in ends[who][where]], float) for who in (agent, given.against)
            )
            more = paired_difference(here, before, seed=0)
            row[f"{where}: {end}"] = {
                "share": float(here.mean()),
                "interval": wilson(int(here.sum()), len(here)),
                "more_than_before": {"mean": more.mean, "interval": [more.low, more.high]},
            }
        apart = paired_difference(soon[agent]["plain"], soon[agent]["eight steps"], seed=0)
        row["told apart"] = {
            "plain: before step 8": float(soon[agent]["plain"].mean()),
            "more_than_in_eight_steps": {"mean": apart.mean, "interval": [apart.low, apart.high]},
        }
        row["ends"] = dict(Counter(of["eight steps"]))
        rows.append(row)
        print(json.dumps(row), flush=True)
    write(given.result, {"against": given.against, "rows": rows})


if __name__ == "__main__":
    main()

"""How near the gradient of simulated credit comes to the exact one.

    PYTHONPATH=benchmarks python benchmarks/studies/simulated_truth.py --model nano --result truth.json

As `credit_truth.py`, whose policies, exact values and cosines these are: in every state that the policy can come to,
`--answers` answers are sampled, and their frequencies are taken as the policy. Here its episodes are played in the
games themselves, so that they can be simulated again. All credits see the same groups of `GROUP` episodes and stay in
units of reward (`scale=update`); `exact` is the true advantage of each turn, the best that any credit can say.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise, product
from typing import Any

import numpy as np
import torch
from credit_truth import ACTIONS, PENALTY, Gradients, Lake, State, by_the_head, credit_of
from machine import options, write
from words import load

from msgrpo.agent import Decision, OnText, View
from msgrpo.episode import Episode, derive_seed, play_episode
from msgrpo.game import stream
from msgrpo.games import get_scenario
from msgrpo.train.groups import Group, PerTurn, Step, groups_of
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals import choose
from msgrpo.train.rivals.contract import Credit, Learner

GROUP = 16
PLAYOUTS = (1, 4, 16)


class Table:
    """The policy of a lake's table of states."""

    spec = "table"

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        game = lake.game()
        self.states: dict[str, State] = {}
        for state in lake.policy:
            game.env.s, game.steps = state
            self.states[game.observe("player")] = state

    def settings(self) -> dict[str, Any]:
        return {"model": "table"}

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        shares = self.lake.policy[self.states[view.observation]]
        return Decision(ACTIONS[int(stream(view.seed, "table").choice(len(ACTIONS), p=shares))])

    async def close(self) -> None:
        """Nothing to close."""


async def group_of(table: Table, number: int) -> tuple[Group, list[list[Step]]]:
    """A group's episodes, and their turns in the table's states."""
    lake = table.lake

    async def episode(j: int) -> Episode:
        seed = derive_seed("simulated-truth", lake.start_seed, number, j)
        return await play_episode(
            lake.scenario, {"player": table}, start_seed=lake.start_seed, chance_seed=seed, sampling_seed=seed
        )

    played = [await episode(j) for j in range(GROUP)]
    for turn in (turn for one in played for turn in one.turns if turn.action is None):
        turn.shaping = -PENALTY
    (group,) = groups_of(lake.scenario, played, ("player",), 0)
    steps = [[Step(table.states[t.state], t.action, t.paid + t.shaping) for t in turns] for turns in group.turns]
    return group, steps


def simulated(playouts: int, group: Group) -> PerTurn:
    chosen = choose("credit", f"simulated(playouts={playouts}, scale=update)")
    assert isinstance(chosen, Credit)
    return chosen.of_groups([group], Learner(None, ALONE, torch.Generator()))[0]  # type: ignore[arg-type]


def compared(lakes: Sequence[Lake], episodes: int) -> dict[str, Any]:
    """Of each credit the cosine of an update's gradient with the exact one, by the episodes of each start."""
    tables, rows = [Table(lake) for lake in lakes], defaultdict[str, list[np.ndarray]](list)
    for number in range(episodes // GROUP):
        drawn = [asyncio.run(group_of(table, number)) for table in tables]
        steps = [of_start for _, of_start in drawn]
        credits = {
            "episode": [credit_of("episode", 1.0, "update", one, []) for one in steps],
            "critic, λ = 0.5": [
                credit_of("critic", 0.5, "update", one, values)
                for one, values in zip(steps, by_the_head(list(lakes), steps), strict=True)
            ],
            **{
                f"simulated, {playouts} playouts": [simulated(playouts, group) for group, _ in drawn]
                for playouts in PLAYOUTS
            },
            "exact": [
                [[lake.advantage(step) for step in one] for one in group]
                for lake, group in zip(lakes, steps, strict=True)
            ],
        }
        for name, found in credits.items():
            gradients = [lake.gradient(group, one) for lake, group, one in zip(lakes, steps, found, strict=True)]
            rows[name].append(np.concatenate(gradients))
    exact = [lake.exact_gradient() for lake in lakes]
    ends = [slice(*of_start) for of_start in pairwise([0, *accumulate(map(len, exact))])]
    all_of = Gradients(np.concatenate(exact), {name: np.array(found) for name, found in rows.items()}, ends)
    counts = [count for count in (1, 6, 30, 75) if count <= episodes // GROUP]
    return {
        name: {
            **{key: all_of.scores(name, 1)[key] for key in ("limit", "limit_error")},
            "directions": {str(count * GROUP): all_of.scores(name, count)["direction"] for count in counts},
        }
        for name in rows
    }


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--model", action="append", required=True, help="nano, adapter:DIR, or a folder with a base")
    parser.add_argument("--scenario", action="append", default=[], help="default: both 4x4 lakes")
    parser.add_argument("--starts", type=int, default=16, help="validation starts")
    parser.add_argument("--answers", type=int, default=32, help="sampled in every state")
    parser.add_argument("--episodes", type=int, default=960, help="of each start")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name, model_name in product(given.scenario or ("frozen-lake", "frozen-lake-slippery"), given.model):
        scenario, model = get_scenario(name), load(model_name)

        async def lakes() -> list[Lake]:
            starts = islice(scenario.starts("val"), given.starts)
            return [await Lake.of(model, scenario, start, given.answers) for start in starts]

        read = asyncio.run(lakes())
        for lake in read:
            lake.read(model)
        scores = compared(read, given.episodes)
        value = float(np.mean([lake.value((lake.origin.state, 0)) for lake in read]))
        found.append({"model": model_name, "scenario": name, "value": value, "credits": scores})
        for credit, one in scores.items():
            print(f"{name} {model_name} {credit:24}", one["directions"], f"limit {one['limit']:.2f}", flush=True)
        settings = {key: value for key, value in vars(given).items() if key != "result"}
        write(given.result, {**settings, "found": found})


if __name__ == "__main__":
    main()

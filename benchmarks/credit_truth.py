"""Credit against the truth: where each estimator sends the policy, and where the exact advantages would send it.

    python benchmarks/credit_truth.py --model nano --model adapter:runs/fl --result truth.json

For fixed policies on Frozen Lake. In every state (cell and step) that it can come to, `--answers` answers are
sampled; their frequencies are taken as the policy itself, so its values are exact: Q and A = Q − V by dynamic
programming over Gymnasium's own transition table, the format penalty included. Groups of G episodes are then drawn
from that policy and credited by each estimator of `train.credit` but the critic. All of them see the same groups, so
the budget, answers generated, is equal.

*Turns.* Over all turns of all groups, each turn counting once: the correlation of the credit with A, and the share of
turns whose sign is right, where A is not 0 (a credit of 0 counts as half right).

*Directions.* That a credit differs from A need not matter: what it adds to all actions of a state alike drops out of
the expected gradient. So the gradients themselves are compared, those of a softmax in every state of every start,

    g(s, a) = Σ over turns in s of Â (1[action = a] − π(a|s))        g*(s, a) = d(s) π(a|s) A(s, a), d: mean visits

summed over the groups of an update and concatenated over the starts. `direction` is the cosine of g and g* for an
update of `UPDATE` episodes a start; `limit` that of E[g] and g*, where infinitely many such groups would lead. E[g]
is known from finitely many: |E[g]|² is the mean of g_i·g_j over all pairs of different groups, whose noises are
independent; where that is not above 0, nothing was seen, and the limit is given as 0. `limit_error` is its standard
error, by the jackknife over the groups; it is why an estimate can lie above 1. `within` is the limit inside a start,
the mean over starts by |g*|²: what is lost from it to `limit` is that starts get other weights than they should, as
dividing by the spread of a group gives them. After the best scaling (a learning rate takes it up) the squared bias is
1 − limit² of |g*|², and `variance`, in the same unit, is that of an update. A model shares its weights among states,
so its updates see more of each state than these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts
from words import load

from msgrpo_agent.agent import Sampling
from msgrpo_agent.game import Scenario, stream
from msgrpo_agent.games import get_scenario
from msgrpo_agent.games.frozen_lake import GYM_ACTION, FrozenLake
from msgrpo_agent.models.local import LocalModel
from msgrpo_agent.parse import parse_action
from msgrpo_agent.prompt import PromptTemplate
from msgrpo_agent.rollout import derive_seed
from train.credit import CREDITS, ESTIMATORS, Advantages, Step

ACTIONS = (*GYM_ACTION, None)  # None: no legal action, and the player stays
PENALTY = 0.1  # of such an answer, as in training
LAMBDA, WEIGHT = 0.95, 1.0
COMPARED = [name for name in CREDITS if name != "critic"]  # it reads a model's hidden states: here is a table
UPDATE = 96  # episodes of a start in an update, with groups of 100 one group
BUDGETS = (16, 32, 96, 320, 1200)
PICTURED = "16"  # the size of group that the picture shows
State = tuple[int, int]  # cell, steps played


@dataclass
class Lake:
    """One start: what follows each action, the policy in each state, and the exact worth of both."""

    scenario: Scenario
    start_seed: int
    policy: dict[State, np.ndarray]  # probabilities in the order of ACTIONS
    q: dict[State, np.ndarray]

    @classmethod
    async def of(cls, model: LocalModel, scenario: Scenario, start_seed: int, answers: int) -> Lake:
        """Ask the policy in every state that it can come to, step by step."""
        lake = cls(scenario, start_seed, {}, {})
        states = [(lake.origin.state, 0)]
        while states:
            found = await asyncio.gather(*(lake._ask(model, state, answers) for state in states))
            lake.policy |= dict(zip(states, found, strict=True))
            following = {
                (after, step + 1)
                for cell, step in states
                for i, action in enumerate(ACTIONS)
                if lake.policy[cell, step][i] > 0
                for _, after, _, over in lake.outcomes(cell, action)
                if not over and step + 1 < scenario.step_limit
            }
            states = sorted(following)
        for state in sorted(lake.policy, key=lambda state: -state[1]):
            lake.q[state] = np.array([lake._worth(state, action) for action in ACTIONS])
        return lake

    def game(self) -> FrozenLake:
        game = self.scenario.new(self.start_seed, 0)
        assert isinstance(game, FrozenLake)
        return game

    @cached_property
    def origin(self) -> FrozenLake:
        """The game before its first step; only looked at."""
        return self.game()

    def outcomes(self, cell: int, action: str | None) -> list[tuple[float, int, float, bool]]:
        """(probability, next cell, reward with shaping, over) of an action."""
        if action is None:
            return [(1.0, cell, -PENALTY, False)]
        table = self.origin.env.P[cell][GYM_ACTION[action]]
        return [(float(p), int(after), float(reward), bool(over)) for p, after, reward, over in table]

    async def _ask(self, model: LocalModel, state: State, answers: int) -> np.ndarray:
        game = self.game()
        game.env.s, game.steps = state
        prompt = PromptTemplate().render(self.scenario, game.observe("player"))
        seeds = (derive_seed("truth", self.start_seed, *state, i) for i in range(answers))
        said = await asyncio.gather(*(model.complete(prompt, Sampling(max_tokens=64), seed) for seed in seeds))
        actions = [parse_action(answer.text, game.actions).action for answer in said]
        return np.array([actions.count(action) for action in ACTIONS]) / answers

    def value(self, state: State) -> float:
        return float(self.policy[state] @ self.q[state]) if state in self.q else 0.0

    def _worth(self, state: State, action: str | None) -> float:
        """Q(s, a) = Σ p (r + [goes on] V(s′)); an action that the policy never takes needs no value after it."""
        cell, step = state
        return sum(
            p * (reward + (0.0 if over else self.value((after, step + 1))))
            for p, after, reward, over in self.outcomes(cell, action)
        )

    def advantage(self, step: Step) -> float:
        state: Any = step.state
        return float(self.q[state][ACTIONS.index(step.action)]) - self.value(state)

    @cached_property
    def rows(self) -> dict[State, int]:
        """The place of each state in a table of states by actions."""
        return {state: i for i, state in enumerate(self.policy)}

    def gradient(self, group: list[list[Step]], credits: Advantages) -> np.ndarray:
        """Σ over turns of Â (1[action = a] − π(a|s)), the table of all states by actions as one row."""
        found = np.zeros((len(self.rows), len(ACTIONS)))
        for steps, of_episode in zip(group, credits, strict=True):
            for step, credit in zip(steps, of_episode, strict=True):
                state: Any = step.state
                found[self.rows[state]] -= credit * self.policy[state]
                found[self.rows[state], ACTIONS.index(step.action)] += credit
        return found.ravel() / len(group)

    def exact_gradient(self) -> np.ndarray:
        """d(s) π(a|s) A(s, a), with d(s) how often an episode visits s in the mean."""
        visits = dict.fromkeys(self.policy, 0.0)
        visits[self.origin.state, 0] = 1.0
        found = np.zeros((len(self.rows), len(ACTIONS)))
        for state in sorted(self.policy, key=lambda state: state[1]):
            found[self.rows[state]] = visits[state] * self.policy[state] * (self.q[state] - self.value(state))
            for i, action in enumerate(ACTIONS):
                for p, after, _, over in self.outcomes(state[0], action):
                    if not over and (following := (after, state[1] + 1)) in visits:
                        visits[following] += visits[state] * float(self.policy[state][i]) * p
        return found.ravel()

    def episode(self, generator: np.random.Generator) -> list[Step]:
        cell, steps = self.origin.state, []
        for number in range(self.scenario.step_limit):
            i = int(generator.choice(len(ACTIONS), p=self.policy[cell, number]))
            outcomes = self.outcomes(cell, ACTIONS[i])
            _, after, reward, over = outcomes[int(generator.choice(len(outcomes), p=[o[0] for o in outcomes]))]
            steps.append(Step((cell, number), ACTIONS[i], reward))
            cell = after
            if over:
                break
        return steps


@dataclass
class Gradients:
    """Of each credit the policy gradient of every group, (groups, cells of all starts' tables), and the exact one."""

    exact: np.ndarray
    of_groups: dict[str, np.ndarray]
    starts: list[slice]  # the cells of each start

    def scores(self, credit: str, groups: int) -> dict[str, float]:
        """`direction` of updates of so many groups a start, and what remains with infinitely many."""
        found, whole = self.of_groups[credit], float(self.exact @ self.exact)
        updates = found[: len(found) // groups * groups].reshape(-1, groups, found.shape[1]).mean(axis=1)
        square, limit, error = _expected(found, self.exact)
        scale = limit * math.sqrt(whole / square) if square > 0 else 0.0
        within = sum(
            _expected(found[:, own], self.exact[own])[1] * float(self.exact[own] @ self.exact[own])
            for own in self.starts
        )
        return {
            "direction": float(np.mean([_cosine(update, self.exact) for update in updates])),
            "limit": limit,
            "limit_error": error,
            "within": within / whole,
            "bias": 1 - limit**2,
            "variance": scale**2 * float(found.var(axis=0, ddof=1).sum()) / groups / whole,
        }


def _expected(found: np.ndarray, exact: np.ndarray) -> tuple[float, float, float]:
    """|E[g]|², the cosine of E[g] with the exact gradient (0 where nothing was seen), and its standard error by the
    jackknife, from a row a group.
    """
    whole, total = float(exact @ exact), found.sum(axis=0)
    along, squares = found @ exact, (found**2).sum(axis=1)

    def limits(count: int, along: np.ndarray, square: np.ndarray) -> np.ndarray:
        seen = np.maximum(square, 0.0) * whole > 0
        return np.where(seen, along / count / np.sqrt(np.where(seen, square * whole, 1.0)), 0.0)

    n, pairs = len(found), total @ total - squares.sum()
    without = pairs - 2 * (found @ total - squares)  # of all pairs of different groups, without this one's
    left_out = limits(n - 1, along.sum() - along, without / ((n - 1) * (n - 2)))
    square = pairs / (n * (n - 1))
    error = math.sqrt((n - 1) * left_out.var())
    return float(square), float(limits(n, along.sum(), square)), error


def compared(lakes: list[Lake], size: int, episodes: int, seed: int) -> dict[str, Any]:
    """Each estimator against the exact advantages, on the same groups of `size` episodes."""
    generator = stream(seed, "credit-truth")
    truth: list[float] = []
    credits: dict[str, list[float]] = defaultdict(list)
    gradients: dict[str, list[list[np.ndarray]]] = {name: [] for name in COMPARED}
    for lake in lakes:
        groups = [[lake.episode(generator) for _ in range(size)] for _ in range(episodes // size)]
        truth += [lake.advantage(step) for group in groups for steps in group for step in steps]
        for name in COMPARED:
            found = [ESTIMATORS[name](group, 1.0, LAMBDA, WEIGHT) for group in groups]
            credits[name] += [value for of_group in found for one in of_group for value in one]
            gradients[name].append([lake.gradient(*each) for each in zip(groups, found, strict=True)])
    of_groups = {name: np.concatenate([np.array(of_lake) for of_lake in one], 1) for name, one in gradients.items()}
    exact = [lake.exact_gradient() for lake in lakes]
    ends = [0, *accumulate(map(len, exact))]
    all_of = Gradients(np.concatenate(exact), of_groups, [slice(*ends_of) for ends_of in pairwise(ends)])
    counts = sorted({max(1, n // size) for n in (size, UPDATE, *BUDGETS) if n <= episodes})
    return {
        name: _of_turns(np.array(credits[name]), np.array(truth))
        | all_of.scores(name, max(1, UPDATE // size))
        | {"directions": {str(n * size): all_of.scores(name, n)["direction"] for n in counts}}
        for name in COMPARED
    }


def _of_turns(credit: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    decided = np.abs(truth) > 1e-9
    right = np.sign(credit[decided]) * np.sign(truth[decided])
    return {"correlation": float(np.corrcoef(credit, truth)[0, 1]), "sign": float((1 + right).mean() / 2)}


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """0 where there is no direction: an update whose groups are all flat."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


def draw(found: list[dict[str, Any]], file: Path) -> None:
    """The direction of an update over its episodes, and its limit as dots; a panel a policy and scenario."""
    from matplotlib.figure import Figure

    scenarios = list(dict.fromkeys(row["scenario"] for row in found))
    models = list(dict.fromkeys(row["model"] for row in found))
    figure = Figure(figsize=(3.9 * len(models), 3.4 * len(scenarios)), layout="constrained")
    panels = figure.subplots(len(scenarios), len(models), sharex=True, sharey=True, squeeze=False)
    for row in found:
        axes = panels[scenarios.index(row["scenario"])][models.index(row["model"])]
        for credit, scores in row["sizes"][PICTURED].items():
            episodes = [int(number) for number in scores["directions"]]
            (line,) = axes.plot(episodes, list(scores["directions"].values()), "o-", ms=3, label=credit)
            axes.axhline(scores["limit"], ls=":", lw=1, color=line.get_color())
        axes.set(
            title=f"{row['scenario']}, {Path(row['model']).name} ({row['value']:.2f})", xscale="log", ylim=(0, 1.02)
        )
        axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0][0].legend(frameon=False)
    figure.supylabel("cosine with the exact gradient")
    figure.supxlabel(f"episodes of a start in an update, in groups of {PICTURED}; dotted: infinitely many")
    figure.savefig(file, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="nano, adapter:DIR, or a folder with a base")
    parser.add_argument("--scenario", action="append", default=[], help="default: both 4x4 lakes")
    parser.add_argument("--starts", type=int, default=16, help="validation starts")
    parser.add_argument("--answers", type=int, default=64, help="sampled in every state")
    parser.add_argument("--episodes", type=int, default=2400, help="of each start, for each size of the group")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "machine": facts(),
        **{k: v for k, v in vars(given).items() if k not in ("result", "picture")},
    }
    result["found"] = []
    for name, model_name in product(given.scenario or ("frozen-lake", "frozen-lake-slippery"), given.model):
        scenario, model = get_scenario(name), load(model_name)

        async def lakes(scenario: Scenario = scenario, model: LocalModel = model) -> list[Lake]:
            starts = islice(scenario.starts("val"), given.starts)
            return [await Lake.of(model, scenario, start, given.answers) for start in starts]

        found = asyncio.run(lakes())
        states = sum(len(lake.policy) for lake in found)
        values = [lake.value((lake.origin.state, 0)) for lake in found]
        print(f"{model_name} on {name}: {states} states, mean value {np.mean(values):.3f}", flush=True)
        rows = {size: compared(found, size, given.episodes, seed=0) for size in (8, 16, 32, 100)}
        result["found"].append(
            {
                "model": model_name,
                "scenario": name,
                "states": states,
                "value": float(np.mean(values)),
                "sizes": {str(size): row for size, row in rows.items()},
            }
        )
        for size, row in rows.items():
            for credit, scores in row.items():
                numbers = {key: value for key, value in scores.items() if key != "directions"}
                print(f"  G={size:<4} {credit:13}", *(f"{key} {value:.3f}" for key, value in numbers.items()))
        given.result.parent.mkdir(parents=True, exist_ok=True)
        given.result.write_text(json.dumps(result, indent=2) + "\n")
    if given.picture:
        draw(result["found"], given.picture)


if __name__ == "__main__":
    main()

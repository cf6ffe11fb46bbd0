"""Credit against the truth: what each estimator says of a turn, and what that turn is worth exactly.

    python benchmarks/credit_truth.py --model nano --model adapter:runs/fl --result truth.json

For fixed policies on Frozen Lake. In every state (cell and step) that it can come to, `--answers` answers are
sampled; their frequencies are taken as the policy itself, so its values are exact: Q and A = Q − V by dynamic
programming over Gymnasium's own transition table, the format penalty included. Groups of G episodes are then drawn
from that policy and credited by each estimator of `train.credit` but the critic. All of them see the same groups, so
the budget, answers generated, is equal.

Over all turns of all groups, each turn counting once: the correlation with A, and the share of turns whose sign is
right, where A is not 0 (an estimate of 0 counts as half right). Then an estimator is multiplied by the one number
that brings its mean in each (state, action) nearest to A (its own scale is arbitrary: a learning rate takes it up),
and two more are shares of the mean square of A: the squared bias of those means, and the variance around them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice, product
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
from train.credit import CREDITS, ESTIMATORS, Step

ACTIONS = (*GYM_ACTION, None)  # None: no legal action, and the player stays
PENALTY = 0.1  # of such an answer, as in training
LAMBDA, WEIGHT = 0.95, 1.0
COMPARED = [name for name in CREDITS if name != "critic"]  # it reads a model's hidden states: here is a table
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
        states = [(lake.game().state, 0)]
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

    def outcomes(self, cell: int, action: str | None) -> list[tuple[float, int, float, bool]]:
        """(probability, next cell, reward with shaping, over) of an action."""
        if action is None:
            return [(1.0, cell, -PENALTY, False)]
        table = self.game().env.P[cell][GYM_ACTION[action]]
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

    def episode(self, generator: np.random.Generator) -> list[Step]:
        cell, steps = self.game().state, []
        for number in range(self.scenario.step_limit):
            i = int(generator.choice(len(ACTIONS), p=self.policy[cell, number]))
            outcomes = self.outcomes(cell, ACTIONS[i])
            _, after, reward, over = outcomes[int(generator.choice(len(outcomes), p=[o[0] for o in outcomes]))]
            steps.append(Step((cell, number), ACTIONS[i], reward))
            cell = after
            if over:
                break
        return steps


def compared(lakes: list[Lake], size: int, groups: int, seed: int) -> dict[str, Any]:
    """Each estimator against the exact advantages, on the same groups of `size` episodes."""
    truth: list[float] = []
    keys: list[object] = []
    estimates: dict[str, list[float]] = defaultdict(list)
    generator = stream(seed, "credit-truth")
    for lake in lakes:
        for _ in range(groups):
            group = [lake.episode(generator) for _ in range(size)]
            truth += [lake.advantage(step) for steps in group for step in steps]
            keys += [(lake.start_seed, step.state, step.action) for steps in group for step in steps]
            for name in COMPARED:
                found = ESTIMATORS[name](group, 1.0, LAMBDA, WEIGHT)
                estimates[name] += [value for one in found for value in one]
    places = np.unique([hash(key) for key in keys], return_inverse=True)[1]
    return {name: _error(np.array(values), np.array(truth), places) for name, values in estimates.items()}


def _error(estimate: np.ndarray, truth: np.ndarray, places: np.ndarray) -> dict[str, float]:
    means = (np.bincount(places, estimate) / np.bincount(places))[places]
    fit = float(means @ truth) / max(float(means @ means), 1e-12)
    scaled, means = estimate * fit, means * fit
    whole = float((truth**2).mean())
    decided = np.abs(truth) > 1e-9
    right = np.sign(estimate[decided]) * np.sign(truth[decided])
    return {
        "correlation": float(np.corrcoef(estimate, truth)[0, 1]),
        "sign": float((1 + right).mean() / 2),
        "bias": float(((means - truth) ** 2).mean()) / whole,
        "variance": float(((scaled - means) ** 2).mean()) / whole,
    }


def draw(found: list[dict[str, Any]], file: Path) -> None:
    """Correlation with the exact advantage over the size of the group, a panel a policy and scenario."""
    from matplotlib.figure import Figure

    scenarios = list(dict.fromkeys(row["scenario"] for row in found))
    models = list(dict.fromkeys(row["model"] for row in found))
    figure = Figure(figsize=(3.9 * len(models), 3.4 * len(scenarios)), layout="constrained")
    panels = figure.subplots(len(scenarios), len(models), sharex=True, sharey=True, squeeze=False)
    for row in found:
        axes = panels[scenarios.index(row["scenario"])][models.index(row["model"])]
        sizes = list(row["sizes"])
        for credit in COMPARED:
            axes.plot(sizes, [row["sizes"][size][credit]["correlation"] for size in sizes], "o-", label=credit)
        axes.set(
            title=f"{row['scenario']}, {Path(row['model']).name} ({row['value']:.2f})", xscale="log", ylim=(0, 1)
        )
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0][0].legend(frameon=False)
    figure.supylabel("correlation with the exact advantage")
    figure.supxlabel("episodes of a group")
    figure.savefig(file, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="nano, adapter:DIR, or a folder with a base")
    parser.add_argument("--scenario", action="append", default=[], help="default: both 4x4 lakes")
    parser.add_argument("--starts", type=int, default=16, help="validation starts")
    parser.add_argument("--answers", type=int, default=64, help="sampled in every state")
    parser.add_argument(
        "--groups", type=int, default=100, help="groups of eight of each start; of larger ones as many episodes"
    )
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
        values = [lake.value((lake.game().state, 0)) for lake in found]
        print(f"{model_name} on {name}: {states} states, mean value {np.mean(values):.3f}", flush=True)
        rows = {size: compared(found, size, max(given.groups * 8 // size, 8), seed=0) for size in (8, 16, 32, 100)}
        result["found"].append(
            {"model": model_name, "scenario": name, "states": states, "value": float(np.mean(values)), "sizes": rows}
        )
        for size, row in rows.items():
            for credit, scores in row.items():
                print(f"  G={size:<4} {credit:13}", *(f"{key} {value:.3f}" for key, value in scores.items()))
        given.result.parent.mkdir(parents=True, exist_ok=True)
        given.result.write_text(json.dumps(result, indent=2) + "\n")
    if given.picture:
        draw(result["found"], given.picture)


if __name__ == "__main__":
    main()

"""Credit against the truth: where each estimator sends the policy, and where the exact advantages would send it.

    PYTHONPATH=benchmarks python benchmarks/studies/credit_truth.py --model nano --model adapter:runs/fl \\
        --result truth.json

For fixed policies on Frozen Lake. In every state (cell and step) that it can come to, `--answers` answers are
sampled; their frequencies are taken as the policy itself, so its values are exact: Q and A = Q − V by dynamic
programming over Gymnasium's own transition table, the format penalty included. Updates of a group of G episodes
from each start are then drawn from that policy and credited by each estimator of `msgrpo.train.rivals`. All of them
see the same groups, so the budget, answers generated, is equal. The critic's head is fitted in each update as in
training, on the hidden states of the other starts' turns (`msgrpo.train.rivals.critic`). *By update*: divided by one
spread of the whole update, and not by that of each group (`scaled_by_update`). `true` has the exact V
in the place of its values: what the best head there can be would give.

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
the mean over starts by |g*|², none above 1 (where hardly anything was seen the estimate has no bound): what is lost
from it to `limit` is that starts get other weights than they should, as dividing by the spread of a group gives
them. After the best scaling (a learning rate takes it up) the squared bias is 1 − limit² of |g*|², and `variance`, in
the same unit, is that of an update. A model shares its weights among states, so its updates see more of each state
than these.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import options, write
from words import load

from msgrpo.agent import Sampling, parse_action
from msgrpo.episode import derive_seed
from msgrpo.game import Scenario, stream
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import GYM_ACTION, FrozenLake
from msgrpo.models.local import LocalModel
from msgrpo.models.shared_prefix import evaluating, last_hidden, trunk_and_head
from msgrpo.prompt import Prompt, PromptTemplate
from msgrpo.train.groups import PerTurn, Step, Trajectories
from msgrpo.train.msgrpo import composite_returns, group_advantages
from msgrpo.train.rivals import RIVALS, choose
from msgrpo.train.rivals.critic import Critic, left_out_values, sums_of
from msgrpo.train.rivals.discounted import Discounted, returns_to_go
from msgrpo.train.update import scaled_by_update

ACTIONS = (*GYM_ACTION, None)  # None: no legal action, and the player stays
PENALTY = 0.1  # of such an answer, as in training
COMPARED: dict[str, tuple[str, float, str]] = {  # the estimator, its λ, and what its credit is divided by
    **{name: (name, 0.95, "group") for name in RIVALS["credit"]},
    "critic 0.5": ("critic", 0.5, "group"),
    **{f"{name} by update": (name, 0.95, "update") for name in RIVALS["credit"]},
    **{f"{values} {lam} by update": ("critic", lam, "update") for values in ("critic", "true") for lam in (0.5, 0.0)},
}
UPDATE = 96  # episodes of a start in an update, with groups of 100 one group
BUDGETS = (16, 32, 96, 320, 1200)
PICTURED = "16"  # the size of group that the picture shows
DRAWN = {
    "episode": "episode",
    "lambda": "lambda",
    "episode by update": "episode, scale=update",
    "critic by update": "critic, scale=update",
    "critic 0.5 by update": "… λ = 0.5",
    "true 0.0 by update": "exact values, λ = 0",
}
State = tuple[int, int]  # cell, steps played
Groups = Sequence[list[list[Step]]]  # one of each start


@dataclass
class Lake:
    """One start: what follows each action, the policy in each state, and the exact worth of both."""

    scenario: Scenario
    start_seed: int
    policy: dict[State, np.ndarray]  # probabilities in the order of ACTIONS
    q: dict[State, np.ndarray]
    hidden: dict[State, torch.Tensor]  # of each state's prompt, what the critic's head sees

    @classmethod
    async def of(cls, model: LocalModel, scenario: Scenario, start_seed: int, answers: int) -> Lake:
        """Ask the policy in every state that it can come to, step by step."""
        lake = cls(scenario, start_seed, {}, {}, {})
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

    def prompt(self, state: State) -> Prompt:
        game = self.game()
        game.env.s, game.steps = state
        return PromptTemplate().render(self.scenario, game.observe("player"))

    def read(self, model: LocalModel) -> None:
        """Keep the trunk's last hidden state (D) of every state's prompt."""
        rows = model.chat.ids([self.prompt(state) for state in self.policy])
        with torch.inference_mode(), evaluating(model.model):
            found = last_hidden(trunk_and_head(model.model)[0], [], rows, 0)
        self.hidden = dict(zip(self.policy, found.double(), strict=True))

    async def _ask(self, model: LocalModel, state: State, answers: int) -> np.ndarray:
        prompt = self.prompt(state)
        seeds = (derive_seed("truth", self.start_seed, *state, i) for i in range(answers))
        said = await asyncio.gather(*(model.complete(prompt, Sampling(max_tokens=64), seed) for seed in seeds))
        actions = [parse_action(answer.text, self.origin.actions).action for answer in said]
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

    def gradient(self, group: list[list[Step]], credits: PerTurn) -> np.ndarray:
        """Σ over turns of Â (1[action = a] − π(a|s)), the table of all states by actions as one row."""
        turns = [step for steps in group for step in steps]
        states = [self.rows[step.state] for step in turns]  # type: ignore[index]
        flat = np.array([credit for of_episode in credits for credit in of_episode])
        of_state = np.bincount(states, flat, minlength=len(self.rows))
        found = -of_state[:, None] * np.array(list(self.policy.values()))
        np.add.at(found, (states, [ACTIONS.index(step.action) for step in turns]), flat)
        return np.asarray(found.ravel() / len(group))

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
            min(1.0, _expected(found[:, own], self.exact[own])[1]) * float(self.exact[own] @ self.exact[own])
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
    gradients: dict[str, list[np.ndarray]] = defaultdict(list)  # of each, a row an update
    for _ in range(episodes // size):
        groups = [[lake.episode(generator) for _ in range(size)] for lake in lakes]
        truth += [
            lake.advantage(step) for lake, group in zip(lakes, groups, strict=True) for one in group for step in one
        ]
        valued = {"critic": by_the_head(lakes, groups), "true": by_the_truth(lakes, groups)}
        for name, (credit, lam, scale) in COMPARED.items():
            values = valued.get(name.split()[0], [[]] * len(groups))
            found = [credit_of(credit, lam, scale, *of_start) for of_start in zip(groups, values, strict=True)]
            found = found if scale == "group" else scaled_by_update(found)
            credits[name] += [value for of_group in found for one in of_group for value in one]
            rows = [lake.gradient(group, one) for lake, group, one in zip(lakes, groups, found, strict=True)]
            gradients[name].append(np.concatenate(rows))
    exact = [lake.exact_gradient() for lake in lakes]
    ends = [0, *accumulate(map(len, exact))]
    of_groups = {name: np.array(rows) for name, rows in gradients.items()}
    all_of = Gradients(np.concatenate(exact), of_groups, [slice(*ends_of) for ends_of in pairwise(ends)])
    counts = sorted({max(1, n // size) for n in (size, UPDATE, *BUDGETS) if n <= episodes})
    return {
        name: _of_turns(np.array(credits[name]), np.array(truth))
        | all_of.scores(name, max(1, UPDATE // size))
        | {"directions": {str(n * size): all_of.scores(name, n)["direction"] for n in counts}}
        for name in COMPARED
    }


def credit_of(name: str, lam: float, scale: str, group: Trajectories, values: PerTurn) -> PerTurn:
    """What an estimator says of a group; `values` are those of a critic."""
    chosen = choose("credit", f"{name}(scale={scale}{f', lam={lam}' if name in ('lambda', 'critic') else ''})")
    if isinstance(chosen, Critic):
        return chosen.of_values(group, values)
    rewards = [[step.reward for step in one] for one in group]  # a step's reward holds its shaping
    returns_G = composite_returns(rewards, [[0.0] * len(one) for one in rewards])
    spread = float(returns_G.std(correction=0)) if scale == "update" else 1.0
    of_episodes = (group_advantages(returns_G) * spread).tolist()
    if isinstance(chosen, Discounted):
        return chosen.of_group(group, of_episodes)
    return [[advantage] * len(one) for advantage, one in zip(of_episodes, group, strict=True)]


def by_the_head(lakes: Sequence[Lake], groups: Groups) -> list[PerTurn]:
    """The value of every turn, [group][j][t], by the head that was fitted on the other starts."""
    states = [
        torch.stack([lake.hidden[step.state] for one in group for step in one])  # type: ignore[index]
        for lake, group in zip(lakes, groups, strict=True)
    ]
    returns = [
        torch.tensor([value for one in returns_to_go(group, 1.0) for value in one]).double() for group in groups
    ]
    found = left_out_values(states, list(map(sums_of, states, returns)), range(len(lakes)))
    return [_like(group, values.tolist()) for group, values in zip(groups, found, strict=True)]


def by_the_truth(lakes: Sequence[Lake], groups: Groups) -> list[PerTurn]:
    """The exact value of every turn's state, [group][j][t]."""
    return [
        [[lake.value(step.state) for step in one] for one in group]  # type: ignore[arg-type]
        for lake, group in zip(lakes, groups, strict=True)
    ]


def _like(group: Trajectories, values: Sequence[float]) -> PerTurn:
    left = iter(values)
    return [[next(left) for _ in one] for one in group]


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
        for credit, label in DRAWN.items():
            scores = row["sizes"][PICTURED][credit]
            episodes = [int(number) for number in scores["directions"]]
            (line,) = axes.plot(episodes, list(scores["directions"].values()), "o-", ms=3, label=label)
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
    parser = options(__doc__, result=True)
    parser.add_argument("--model", action="append", required=True, help="nano, adapter:DIR, or a folder with a base")
    parser.add_argument("--scenario", action="append", default=[], help="default: both 4x4 lakes")
    parser.add_argument("--starts", type=int, default=16, help="validation starts")
    parser.add_argument("--answers", type=int, default=64, help="sampled in every state")
    parser.add_argument("--episodes", type=int, default=2400, help="of each start, for each size of the group")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        **{k: v for k, v in vars(given).items() if k not in ("result", "picture")},
    }
    result["found"] = []
    for name, model_name in product(given.scenario or ("frozen-lake", "frozen-lake-slippery"), given.model):
        scenario, model = get_scenario(name), load(model_name)

        async def lakes(scenario: Scenario = scenario, model: LocalModel = model) -> list[Lake]:
            starts = islice(scenario.starts("val"), given.starts)
            found = [await Lake.of(model, scenario, start, given.answers) for start in starts]
            for lake in found:
                lake.read(model)
            return found

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
        write(given.result, result)
    if given.picture:
        draw(result["found"], given.picture)


if __name__ == "__main__":
    main()

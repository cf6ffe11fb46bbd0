"""How loudly does each credit say what killed the snake, and does the snake know?

    PYTHONPATH=benchmarks python benchmarks/studies/fatal.py --adapter msgrpo_agent/nano/adapters/snake \\
        --result benchmarks/results/fatal-snake.json

Snake has no exact advantages to hold an estimator against (`credit_truth.py` has them for the lake), but the worth of
some of its turns is beyond doubt: one that kills costs the reward of death and all apples after it, and a step nearer
to the nearest apple is better than one away from it. The policy plays groups as in training; for each estimator the
mean advantage of three kinds of turns is taken, in units of the root of the mean square over all turns. At equal
noise an estimator with twice the value needs a quarter of the episodes to see these turns. It says nothing of turns
whose worth shows later, so a short horizon looks better here than it need be. The critic is fitted on all starts but
a group's own, which are more than an update has.

Beside it: in how many of the turns that killed the model's own words said that something deadly lies there, and how
sure of its action it was.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import options, write
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase
from words import load

from msgrpo.agent import Completion
from msgrpo.episode import Episode, Turn
from msgrpo.game import Scenario
from msgrpo.games import get_scenario
from msgrpo.games.snake import DELTA, Snake
from msgrpo.models.lora import ADAPTER_WEIGHTS
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.groups import Group
from msgrpo.train.nano.words import DEADLY, Sight, Words, gap
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.actfocus import token_weights
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rollouts import Players, Playing
from msgrpo.train.update import advantages

KINDS = ("fatal", "nearer", "other")
GAMMAS, LAMBDAS = (0.6, 0.8, 0.9, 0.95), (0.0, 0.5, 0.8, 0.95)


@dataclass(frozen=True)
class Seen:
    """What there is to know of a turn: its kind, and what lay, by the model's own words, where it went."""

    kind: str
    said: str | None


def seen(scenario: Scenario, episode: Episode) -> Iterator[Seen]:
    """Every turn of an episode, which is played again to know."""
    game = scenario.new(episode.start_seed, episode.chance_seed)
    assert isinstance(game, Snake)
    for turn in episode.turns:
        nearest, at = Sight(game, turn.player).nearest, game.bodies[turn.player][0]
        words = Words.read(turn.answer or "")
        game.step({turn.player: turn.action})
        if not game.alive(turn.player):
            kind = "fatal"
        else:
            there = game.bodies[turn.player][0]
            kind = "nearer" if nearest and gap(there, nearest[1]) < gap(at, nearest[1]) else "other"
        yield Seen(kind, words.beside[turn.action][1] if words and turn.action in DELTA else None)


def sureness(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> float:
    """The probability of the tokens from the action on: those that ActFocus leaves as they are."""
    completion: Completion | None = turn.completion
    assert completion is not None
    weights = token_weights(completion, tokenizer, 0.0)
    return math.exp(sum(log for log, weight in zip(completion.logprobs, weights, strict=True) if weight))


def means(groups: Sequence[Group], kinds: np.ndarray, config: TrainConfig, learner: Learner) -> dict[str, float]:
    """The mean advantage of each kind of turn, divided by the root of the mean square over all."""
    found = np.array([value for of_group in advantages(groups, config, learner) for one in of_group for value in one])
    root = math.sqrt((found**2).mean())
    return {kind: float(found[kinds == kind].mean() / root) for kind in KINDS}


def measured(adapter: str | None, scenario: Scenario, starts: int) -> dict[str, Any]:
    config = make_config(given={"scenario": scenario.id, "groups": starts})
    policy = Policy(config)
    if adapter:
        policy.load_adapter_state(load_file(Path(adapter) / ADAPTER_WEIGHTS))
    chosen = [(scenario, start) for start in islice(scenario.starts("train"), starts)]
    model = load(f"adapter:{adapter}" if adapter else "nano")
    playing = Playing(Players(config), 0, model, config.sampling, chosen)
    episodes = asyncio.run(playing.play())
    groups = playing.groups(episodes)
    known = [one for episode in episodes for one in seen(scenario, episode)]
    turns = [turn for episode in episodes for turn in episode.turns]
    kinds = np.array([one.kind for one in known])
    fatal = [(one, turn) for one, turn in zip(known, turns, strict=True) if one.kind == "fatal"]

    learner = Learner(policy, ALONE, torch.Generator())

    def row(credit: str, gamma: float, lam: float | None = None) -> dict[str, Any]:
        settings = [f"gamma={gamma}" if credit != "episode" else "", f"lam={lam}" if lam is not None else ""]
        asked = make_config(given=config.model_dump() | {"credit": f"{credit}({', '.join(filter(None, settings))})"})
        return {"credit": credit, "gamma": gamma, "lam": lam} | means(groups, kinds, asked, learner)

    rows = [row("episode", 1.0), *(row("to-go", gamma) for gamma in GAMMAS)]
    rows += [row("critic", gamma, lam) for gamma in GAMMAS for lam in LAMBDAS]
    return {
        "model": f"adapter:{adapter}" if adapter else "nano",
        "scenario": scenario.id,
        "episodes": len(episodes),
        "return": float(np.mean([episode.score for episode in episodes])),
        "died": len(fatal) / len(episodes),
        "share": {kind: float((kinds == kind).mean()) for kind in KINDS},
        "said_so": float(np.mean([one.said in DEADLY for one, _ in fatal])),
        "sureness": float(np.median([sureness(turn, policy.tokenizer) for _, turn in fatal])),
        "credits": rows,
    }


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--adapter", action="append", default=[], help="an adapter of nano; nano itself comes first")
    parser.add_argument("--starts", type=int, default=12)
    given = parser.parse_args()
    result: dict[str, Any] = {"found": []}
    for adapter in (None, *given.adapter):
        found = measured(adapter, get_scenario("snake"), given.starts)
        result["found"].append(found)
        write(given.result, result)
        print(found["model"], *(f"{key} {found[key]:.3f}" for key in ("return", "died", "said_so", "sureness")))
        for one in found["credits"]:
            name = f"{one['credit']} γ={one['gamma']}" + ("" if one["lam"] is None else f" λ={one['lam']}")
            print(f"  {name:24}", *(f"{kind} {one[kind]:+.2f}" for kind in KINDS), flush=True)


if __name__ == "__main__":
    main()

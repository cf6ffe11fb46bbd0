"""How fast does the adapter learn when it is *told* the right action in every turn, instead of finding out?

    OMP_NUM_THREADS=1 PYTHONPATH=benchmarks python benchmarks/studies/told.py --set steps=20 \\
        --adapter msgrpo_agent/nano/adapters/snake \\
        --result benchmarks/results/told-snake.json
    OMP_NUM_THREADS=1 PYTHONPATH=benchmarks python benchmarks/studies/told.py --scenario snake --only-adapters \\
        --adapter runs/own --result benchmarks/results/own-words-danger.json
    OMP_NUM_THREADS=1 PYTHONPATH=benchmarks python benchmarks/studies/told.py --scenario frozen-lake-slippery \\
        --set steps=20 --set groups=8 --set group_size=24 --set minibatches=12 --set 'loss=clip(kl=0.02)' \\
        --result benchmarks/results/told-slippery.json

The loop is that of training: the current adapter plays groups, and an update goes over all their turns in
minibatches, with the same loss, optimizer and penalty on the divergence from nano. Only there is no credit. In each
turn the action of somebody who acts on the model's own words as well as can be (`train.nano.words.follow`) stands
in the place of the model's; its tokens have the advantage 1 and the words 0, so the gradient is that of the
log-likelihood of the right action. (On slippery ice that somebody looks at the neighbours and not at the chances,
which nano says wrongly.)

That is the signal which a perfect judge of actions on the model's own words would give, without noise. It is no bound
of what a credit can reach: credit falls on the words as well, and `follow` looks no further than a step.

*Danger* is a turn in which, by the model's own words, something deadly lies on a way to its target. *Bites*: the
share of those in which it goes where, by its words, something deadly lies. *Died*: ended before the limit of steps
without success.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from machine import options, write
from torch.nn.utils import clip_grad_norm_
from words import load

from msgrpo.episode import Episode
from msgrpo.evals.stats import bootstrap_mean
from msgrpo.evals.suites import episode_seeds
from msgrpo.game import Scenario, stream
from msgrpo.games import get_scenario
from msgrpo.models.local import LocalModel
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.groups import Sample
from msgrpo.train.nano.words import DEADLY, Sight, Words, follow
from msgrpo.train.policy import Policy
from msgrpo.train.rivals.actfocus import token_weights
from msgrpo.train.rollouts import Play, Players, Playing, RolloutSource
from msgrpo.train.update import MAX_GRAD_NORM, learning_rate, micro_batches, minibatches

EVERY = 5  # updates between evaluations


def bites(episodes: Sequence[Episode]) -> dict[str, float]:
    """The share of turns in danger, and how many of those go where something deadly lies by the model's own words."""
    turns = [(turn, words) for one in episodes for turn in one.turns if (words := Words.read(turn.answer or ""))]
    deadly = [{action for action, (_, seen) in words.beside.items() if seen in DEADLY} for _, words in turns]
    danger = [
        words.target is not None and bool(there & set(words.target[2].split()))
        for (_, words), there in zip(turns, deadly, strict=True)
    ]
    went = [turn.action in there for (turn, _), there, is_one in zip(turns, deadly, danger, strict=True) if is_one]
    return {"danger": float(np.mean(danger)), "bites": float(np.mean(went))}


def told(
    policy: Policy, episodes: Sequence[Episode], values: Mapping[str, float], slippery: bool, step: int
) -> Iterator[Sample]:
    """Every turn whose words can be read, with the action that follows from them; weight 1 from the action on."""
    for j, episode in enumerate(episodes):
        for t, turn in enumerate(episode.turns):
            words, said = Words.read(turn.answer or ""), turn.completion
            if words is None or said is None:
                continue
            action = follow(replace(words, chances=None), values, slippery, stream(step, f"told-{j}-{t}"))
            weights = token_weights(said, policy.tokenizer, 0.0)
            own = list(said.token_ids[: weights.count(0.0)])
            ids = own + policy.tokenizer(f"<action>{action}</action>", add_special_tokens=False)["input_ids"]
            weights = (0.0,) * len(own) + (1.0,) * (len(ids) - len(own))
            yield Sample(replace(said, token_ids=tuple(ids), logprobs=(0.0,) * len(ids)), 1.0, weights)


def learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: TrainConfig,
    generator: torch.Generator,
    step: int,
) -> None:
    """`msgrpo.train.update.update` without old policy: the ratio is 1, and nothing is clipped."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    for part in minibatches(samples, config.minibatches, generator):
        optimizer.zero_grad()
        tokens = sum(len(sample.answer_ids) for sample in part)
        for micro in micro_batches(part, config.micro_batch.tokens, policy.model.device, policy.longest_sharing):
            reference = policy.reference_logprobs(micro.prefix, micro.pairs)
            logprobs, mask = policy.logprobs(micro.prefix, micro.pairs)
            loss, _ = config.loss(logprobs, logprobs.detach(), reference, micro.advantages_NT, mask)
            weight = sum(len(answer) for _, answer in micro.pairs) / tokens
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(policy.parameters, MAX_GRAD_NORM)
        optimizer.step()


def evaluated(model: LocalModel, config: TrainConfig, scenario: Scenario) -> dict[str, Any]:
    """What the model gets on the validation starts, and how it behaves in danger there."""
    seeds_of = episode_seeds(scenario, config.evaluation.starts, "val")
    plays = [Play(scenario, *seeds, scenario.players) for seeds in seeds_of]
    episodes = asyncio.run(Players(config).play(model, config.sampling, plays, 0.0))
    scores = [episode.score for episode in episodes]
    died = float(np.mean([len(one.turns) < scenario.step_limit and not one.success for one in episodes]))
    low, high = bootstrap_mean(scores, seed=0)
    found = {"return": float(np.mean(scores)), "return_low": low, "return_high": high, "died": died}
    return found | bites(episodes)


def train(
    config: TrainConfig, scenario: Scenario, result: dict[str, Any], keep: Callable[[dict[str, Any]], None]
) -> None:
    policy = Policy(config)
    optimizer = torch.optim.AdamW(policy.parameters, lr=config.learning_rate, weight_decay=0.0)
    engine, generator = HfEngine(policy, scenario, config), torch.Generator().manual_seed(config.seed)
    sight = Sight(scenario.new(0, 0), scenario.players[0])
    players = Players(config)
    source = RolloutSource(players)
    first, turns, began = 0, 0, time.perf_counter()
    for step in range(config.steps + 1):
        model = engine.load(step)
        if step % EVERY == 0 or step == config.steps:
            seconds = time.perf_counter() - began
            result["told"].append(
                {"updates": step, "turns": turns, "seconds": seconds} | evaluated(model, config, scenario)
            )
            keep(result["told"][-1])
        if step < config.steps:
            starts, first = source.next_starts(first)
            episodes = asyncio.run(Playing(players, step, model, config.sampling, starts).play())
            samples = list(told(policy, episodes, sight.values, sight.slippery, step))
            learn(policy, optimizer, samples, config, generator, step)
            turns += len(samples)


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--scenario", default="snake", help="of which nano's words say something")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="of the run, as of msgrpo train")
    parser.add_argument("--adapter", action="append", default=[], help="adapters of nano to stand beside it")
    parser.add_argument("--only-adapters", action="store_true", help="train nothing")
    given = parser.parse_args()
    config = make_config(settings=given.settings, given={"scenario": given.scenario, "seed": 0})
    scenario = get_scenario(given.scenario)
    result: dict[str, Any] = {
        "scenario": scenario.id,
        "settings": given.settings,
        "told": [],
        "beside": {},
    }

    def keep(row: dict[str, Any]) -> None:
        write(given.result, result)
        print(*(f"{key} {value:.3f}" for key, value in row.items()), flush=True)

    if not given.only_adapters:
        train(config, scenario, result, keep)
    for name in given.adapter:
        result["beside"][name] = evaluated(load(f"adapter:{name}"), config, scenario)
        keep(result["beside"][name])


if __name__ == "__main__":
    main()

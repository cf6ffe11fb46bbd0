"""An adapter beside a bfloat16 base: PEFT's own layers, and those of `models/lora_layers.py`, on the same turns.

    OMP_NUM_THREADS=1 python benchmarks/lora_layers.py --base FOLDER --result benchmarks/results/lora-layers.json

Rollouts: answers to 32 starts of Snake. Learning: the log-probabilities of eight of these answers and their gradient.
Both ways in turn, `--rounds` times; CPU seconds, since other work may share the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from machine import options, write
from peft.tuners.lora import Linear

from msgrpo.agent import Sampling
from msgrpo.games import get_scenario
from msgrpo.models.local import LocalModel
from msgrpo.models.shared_prefix import common_prefix_length
from msgrpo.prompt import make_template
from msgrpo.train.config import TrainConfig
from msgrpo.train.policy import Policy


@contextmanager
def pefts_own(model: Any) -> Iterator[None]:
    """PEFT's forward for as long."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear) and "forward" in vars(layer)]
    ours = [vars(layer).pop("forward") for layer in layers]
    try:
        yield
    finally:
        for layer, forward in zip(layers, ours, strict=True):
            layer.forward = forward


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--base", required=True)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()

    scenario = get_scenario("snake")
    policy = Policy(TrainConfig(scenario="snake", base=given.base, dtype="bfloat16"))
    model = LocalModel("policy", policy.model, policy.tokenizer)
    template, starts = make_template("none"), islice(scenario.starts("train"), given.turns)
    games = [scenario.new(start, start) for start in starts]
    prompts = [template.render(scenario, game.observe(game.players[0])) for game in games]

    def play() -> list[Any]:
        return model.generate(prompts, Sampling(max_tokens=72), range(len(prompts)))

    answers = [(list(answer.prompt_ids), list(answer.token_ids)) for answer in play()]
    shared = common_prefix_length([prompt for prompt, _ in answers])
    rows = [(prompt[shared:], answer) for prompt, answer in answers[:8]]

    def learn() -> None:
        policy.logprobs(answers[0][0][:shared], rows)[0].sum().backward()

    times: dict[str, dict[str, list[float]]] = {"peft": {}, "ours": {}}
    for _ in range(given.rounds):
        for name, work in (("rollouts", play), ("learning", learn)):
            with pefts_own(policy.model):
                times["peft"].setdefault(name, []).append(seconds(work))
            times["ours"].setdefault(name, []).append(seconds(work))
    faster = {
        name: statistics.median(
            theirs / ours for theirs, ours in zip(times["peft"][name], times["ours"][name], strict=True)
        )
        for name in ("rollouts", "learning")
    }
    tokens = sum(len(answer) for _, answer in answers)
    found = {"cpu_seconds": times, "times_as_fast": faster, "turns": given.turns, "tokens": tokens}
    write(given.result, found | {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()

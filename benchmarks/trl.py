"""One training step of msgrpo against one of TRL's `GRPOTrainer`: the same work, side by side, on the CPU.

TRL needs an environment of its own, which is not the project's (its CPU build of torch is enough):

    python3 -m venv .venv-trl
    .venv-trl/bin/python -m pip install torch==2.13.0
    .venv-trl/bin/python -m pip install trl==1.16.0 -e '.[train]'
    OMP_NUM_THREADS=2 .venv-trl/bin/python benchmarks/trl.py --rounds 10 --result benchmarks/results/trl.json
    OMP_NUM_THREADS=1 .venv-trl/bin/python benchmarks/trl.py --base runs/smol-taught --groups 2 --group-size 8 \
        --max-tokens 16 --trl-micro-batch 8 --micro-batch-tokens 2048 --threads 1 --rounds 3 --result trl-smollm2.json

Both sides see the same prompts in the same order (first turns of Frozen Lake, through the tokenizer's chat template),
sample as many answers for each at temperature 1, which end where the model ends them or at the same limit, give a
point to every answer that says "right", and make one optimizer step on all of them: LoRA of the same rank on all
linear layers, AdamW at the same constant rate, the same β, clip range and gradient norm, the mean over tokens,
float32. What is timed is a whole update: generation, reward, reference, loss, step; for msgrpo also the merge into
its engine and the canary, as in `msgrpo.train.loop`. The sides take turns within one process, so that a busy machine
disturbs both; loading and the first update of each are not counted. Seconds are the clock's; `cpu_seconds`, of all
threads together, tell how much of them the machine gave to something else.

An answer is a whole episode here, because that is what both can do. All answers of a group then have one prompt,
which suits msgrpo's engine; in episodes of several turns fewer prompts are equal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from machine import facts, options, write
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from msgrpo.agent import parse_action
from msgrpo.episode import derive_seed
from msgrpo.game import Scenario
from msgrpo.games import get_scenario
from msgrpo.models.paths import base_path
from msgrpo.prompt import Prompt, PromptTemplate
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.groups import Sample
from msgrpo.train.msgrpo import group_advantages
from msgrpo.train.policy import Policy
from msgrpo.train.rivals.paper import Clip
from msgrpo.train.update import MAX_GRAD_NORM, WARM_UP, update

INSTALL = ".venv-trl/bin/python -m pip install trl==1.16.0 -e '.[train]'"
REWARDED = "right"
PACKAGES = ("trl", "torch", "transformers", "peft", "accelerate", "datasets", "msgrpo")


def clocks() -> tuple[float, float]:
    """The clock's seconds and the processor's."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - began[0], time.process_time() - began[1]


class Stopwatch:
    """Seconds by label since they were last taken; a part within a part counts in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, label: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[label] += time.perf_counter() - began

    def wrap(self, owner: Any, method: str, label: str) -> None:
        inner = getattr(owner, method)

        @wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(label):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


@dataclass(frozen=True)
class Round:
    """One update of one side: how long it took, where the time went, and what there was to do."""

    seconds: float
    cpu_seconds: float  # of all threads, those that wait for each other included
    parts: dict[str, float]
    prompts: list[str]  # one for each answer
    tokens: list[int]  # of each answer, its end included
    reward: float  # the mean

    def row(self) -> dict[str, Any]:
        """What the result file keeps: the lengths in two numbers, no prompts."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("prompts", "tokens")}
        return kept | {"mean_tokens": mean(self.tokens), "longest": max(self.tokens)}


class Ours:
    """msgrpo's side, and all that this script knows of its inside."""

    def __init__(self, config: TrainConfig, scenario: Scenario) -> None:
        self.config, self.scenario = config, scenario
        self.policy = Policy(config)
        self.engine = HfEngine(self.policy, scenario, config)
        self.model = self.engine.load(0)
        self.optimizer = torch.optim.AdamW(self.policy.parameters, lr=config.learning_rate, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.watch = Stopwatch()
        self.watch.wrap(self.policy, "reference_logprobs", "reference")
        self.watch.wrap(self.policy, "logprobs", "forward, reference included")

    def same_ids(self, prompt: Prompt) -> bool:
        """Whether the engine reads what the tokenizer's chat template says, as TRL does."""
        ids = self.model.tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)
        return bool(self.model.chat.ids([prompt])[0] == ids["input_ids"])

    def update(self, prompts: Sequence[Prompt], n: int) -> Round:
        """One update on `group_size` answers to each prompt."""
        config, watch = self.config, self.watch
        asked = [prompt for prompt in prompts for _ in range(config.group_size)]
        watch.take()
        began = clocks()
        with watch.part("generation"):
            seeds = [derive_seed("sampling", config.seed, n, row) for row in range(len(asked))]
            answers = self.model.generate(asked, config.sampling, seeds)
        with watch.part("reward"):
            rewards = torch.tensor([score(answer.text, self.scenario) for answer in answers], dtype=torch.float64)
            advantages = torch.cat([group_advantages(group) for group in rewards.split(config.group_size)])
            samples = [
                Sample(answer, float(advantage)) for answer, advantage in zip(answers, advantages, strict=True)
            ]
        with watch.part("update"):
            update(self.policy, self.optimizer, samples, config, self.generator, WARM_UP)  # at the full rate
        taken = watch.take()
        with watch.part("engine and canary"):  # it asks for log-probabilities too
            self.engine.load(n + 1)
        taken["engine and canary"] = watch.take()["engine and canary"]
        seconds, cpu_seconds = since(began)
        return Round(
            seconds,
            cpu_seconds,
            self._parts(taken, seconds),
            [prompt.prefix + prompt.state for prompt in asked],
            [answer.completion_tokens for answer in answers],
            float(rewards.mean()),
        )

    @staticmethod
    def _parts(taken: dict[str, float], seconds: float) -> dict[str, float]:
        forward = taken["forward, reference included"] - taken["reference"]
        named = {name: taken[name] for name in ("generation", "reward", "reference", "engine and canary")}
        return named | {"forward": forward, "backward and rest": seconds - forward - sum(named.values())}


class Theirs:
    """TRL's side: a `GRPOTrainer` that is left to itself, with stopwatches on its methods."""

    def __init__(self, settings: dict[str, Any], config: TrainConfig, prompts: Sequence[Prompt]) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]  # not this file: see find_trl

        path = base_path(config.base)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # with transformers' own attention
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.scenario = get_scenario(config.scenario)
        self.trainer = GRPOTrainer(
            model,
            reward_funcs=self._reward,
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_list([{"prompt": prompt.messages} for prompt in prompts]),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=config.lora_rank,
                lora_alpha=2 * config.lora_rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
        )
        self.trainer.remove_callback(PrinterCallback)  # what this script prints is its result
        self.watch = Stopwatch()
        self.watch.wrap(self.trainer, "_generate_single_turn", "generation")
        self.watch.wrap(self.trainer, "_calculate_rewards", "reward")
        self.watch.wrap(self.trainer, "_generate_and_score_completions", "generation, reward and reference")
        self.watch.wrap(self.trainer, "compute_loss", "forward")
        self._answered: tuple[list[str], list[int], float] = ([], [], 0.0)

    def _reward(self, prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        rewards = [score(completion[0]["content"], self.scenario) for completion in completions]
        self._answered = (
            [prompt[0]["content"] for prompt in prompts],
            [len(x) for x in completion_ids],
            mean(rewards),
        )
        return rewards

    def train(self, before: Callable[[int], None]) -> list[Round]:
        """All updates. `before` gets the number of the update that comes next; its own time is not TRL's."""
        clock = Turns(before, self._round)
        self.trainer.add_callback(clock)
        self.trainer.train()
        return clock.rounds

    def _round(self, seconds: float, cpu_seconds: float) -> Round:
        taken = self.watch.take()
        played = taken["generation, reward and reference"]
        named = {name: taken[name] for name in ("generation", "reward", "forward")}
        named["reference"] = played - taken["generation"] - taken["reward"]  # and decoding and padding
        named["backward and rest"] = seconds - played - taken["forward"]
        return Round(seconds, cpu_seconds, named, *self._answered)


class Turns(TrainerCallback):  # type: ignore[misc]
    """Lets the other side play between two updates of a trainer, and times all that the trainer does beside."""

    def __init__(self, before: Callable[[int], None], ended: Callable[[float, float], Round]) -> None:
        self.rounds: list[Round] = []
        self._before, self._ended = before, ended
        self._began = clocks()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._before(0)
        self._began = clocks()

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        self.rounds.append(self._ended(*since(self._began)))
        if len(self.rounds) < args.max_steps:
            self._before(len(self.rounds))
        self._began = clocks()


def score(answer: str, scenario: Scenario) -> float:
    """1 for an answer that parses to REWARDED, whatever the state: both sides are to work, not to play well."""
    return float(parse_action(answer, scenario.actions).action == REWARDED)


def first_turns(scenario: Scenario, count: int) -> list[Prompt]:
    """The prompts of the first turns from so many training starts."""
    starts = scenario.starts("train")
    games = (scenario.new(next(starts), 0) for _ in range(count))
    return [PromptTemplate().render(scenario, game.observe(scenario.players[0])) for game in games]


def trl_settings(config: TrainConfig, updates: int, micro_batch: int) -> dict[str, Any]:
    """TRL's arguments: the same work, and what TRL can do to be fast on a CPU.

    One generation and one optimizer step an update: TRL then computes no old log-probabilities. No gradient
    checkpointing and no bfloat16, which are its defaults; no logging, no saving.
    """
    completions, loss = config.groups * config.group_size, config.loss
    assert isinstance(loss, Clip)
    return {
        "max_steps": updates,
        "num_generations": config.group_size,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": completions // micro_batch,
        "max_completion_length": config.max_tokens,
        "temperature": config.temperature,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "beta": loss.kl,
        "epsilon": loss.low,
        "epsilon_high": loss.high,
        "loss_type": "dapo",  # the mean over all tokens of the update
        "shuffle_dataset": False,
        "seed": config.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def measure(config: TrainConfig, rounds: int, settings: dict[str, Any]) -> dict[str, list[Round]]:
    """Both sides' updates in turn, without the first of each. Raises RuntimeError when they had different prompts."""
    scenario = get_scenario(config.scenario)
    prompts = first_turns(scenario, config.groups * (rounds + 1))
    ours, played = Ours(config, scenario), []
    if not all(ours.same_ids(prompt) for prompt in prompts):
        raise RuntimeError("the engine's prompts are not those of the tokenizer's chat template")

    def before(n: int) -> None:
        played.append(ours.update(prompts[n * config.groups : (n + 1) * config.groups], n))

    with tempfile.TemporaryDirectory() as folder:
        theirs = Theirs(settings | {"output_dir": folder}, config, prompts).train(before)
    if [one.prompts for one in played] != [one.prompts for one in theirs]:
        raise RuntimeError("the two sides did not get the same prompts in the same order")
    return {"msgrpo": played[1:], "trl": theirs[1:]}


def summary(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Medians of both sides, and how often msgrpo's speed is TRL's: of the medians, and in each pair of rounds."""
    sides: dict[str, Any] = {}
    for name, side in rounds.items():
        seconds = median(one.seconds for one in side)
        sides[name] = {
            "seconds": seconds,
            "cpu_seconds": median(one.cpu_seconds for one in side),
            "completions_per_second": len(side[0].tokens) / seconds,
            "mean_tokens": mean(mean(one.tokens) for one in side),
            "longest": mean(max(one.tokens) for one in side),
            "parts_s": {part: median(one.parts[part] for one in side) for part in side[0].parts},
        }
    pairs = [theirs.seconds / ours.seconds for ours, theirs in zip(rounds["msgrpo"], rounds["trl"], strict=True)]
    ratio = sides["trl"]["seconds"] / sides["msgrpo"]["seconds"]
    spread = {"lowest": min(pairs), "median": median(pairs), "highest": max(pairs)}
    return sides | {"ratio_of_medians": ratio, "ratio_in_pairs": spread}


def find_trl() -> None:
    """Import the package `trl`, which this file would hide: a script's folder is where Python looks first."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    try:
        from trl import GRPOTrainer  # type: ignore[attr-defined]  # noqa: F401
    except ImportError as error:
        print(f"TRL cannot be imported ({error}); this script has its own environment: {INSTALL}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", default="nano", help="nano, or a folder")
    parser.add_argument("--rounds", type=int, default=10, help="updates of each side that count")
    parser.add_argument("--groups", type=int, default=8, help="prompts an update")
    parser.add_argument("--group-size", type=int, default=24, help="answers to a prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--trl-micro-batch", type=int, default=48, help="rows of one forward pass of TRL's")
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384, help="msgrpo's setting: less memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    completions = given.groups * given.group_size
    if completions % given.trl_micro_batch:
        parser.error(f"--trl-micro-batch {given.trl_micro_batch} does not divide the {completions} answers")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both sides on the CPU, wherever this runs
    torch.set_num_threads(given.threads)
    find_trl()
    config = make_config(
        "nano",
        settings=["select=all", "minibatches=1", "steps=1000"],  # so long a run is far from its rate's descent
        given={
            "base": given.base,
            "dtype": "float32",
            "micro_batch": given.micro_batch_tokens,
            "groups": given.groups,
            "group_size": given.group_size,
            "max_tokens": given.max_tokens,
        },
    )
    settings = trl_settings(config, given.rounds + 1, given.trl_micro_batch)
    rounds = measure(config, given.rounds, settings)
    result = {
        "machine": facts() | {"threads": torch.get_num_threads(), "omp_num_threads": os.getenv("OMP_NUM_THREADS")},
        "versions": {package: version(package) for package in PACKAGES},
        "settings": {"msgrpo": config.model_dump(), "trl": settings},
        "summary": summary(rounds),
        "rounds": {name: [one.row() for one in side] for name, side in rounds.items()},
    }
    if given.result:
        write(given.result, result)
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()

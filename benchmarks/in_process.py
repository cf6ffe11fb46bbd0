"""A real model in this process: our engine, transformers' `generate` and vLLM on the same turns, one core each.

    export OMP_NUM_THREADS=1
    python benchmarks/in_process.py --model FOLDER --engine ours --result benchmarks/results/in-process.json

`--engine` is `ours`, `generate` or `vllm`; each is a process of its own and adds its figures to the result file. All
get the same prompts (Snake, different starts), the same seeds and the same length for each answer: short ones, and a
few long ones, as an untrained model writes them. End-of-text is ignored so that the lengths are equal; `generate`
ends with its longest answer, as it does. CPU seconds are those of the process, since other work may share the
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from machine import facts

from msgrpo.games import get_scenario
from msgrpo.prompt import ChatFormat, PromptTemplate

SHORT, LONG = 7, 40  # tokens of an answer


def turns(tokenizer: Any, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts' token ids and the answers' lengths; every eighth answer is long."""
    scenario = get_scenario("snake")
    games = [scenario.new(start, start) for start in islice(scenario.starts("train"), count)]
    prompts = [PromptTemplate().render(scenario, game.observe(game.players[0])) for game in games]
    return ChatFormat(tokenizer, None).ids(prompts), [LONG if i % 8 == 7 else SHORT for i in range(count)]


def ours(folder: str) -> Callable[[list[list[int]], list[int]], int]:
    from msgrpo.agent import Sampling
    from msgrpo.models.generation import Row
    from msgrpo.models.loading import load_base
    from msgrpo.models.local import LocalModel

    model = LocalModel("real", *load_base(folder, dtype="float32"))
    model.stop_ids = frozenset()

    def play(prompts: list[list[int]], lengths: list[int]) -> int:
        rows = [Row(prompt, seed, most) for seed, (prompt, most) in enumerate(zip(prompts, lengths, strict=True))]
        model.answer_rows(rows, Sampling())
        return sum(len(row.tokens) for row in rows)

    return play


def generate(folder: str) -> Callable[[list[list[int]], list[int]], int]:
    from transformers import AutoModelForCausalLM

    from msgrpo.models.shared_prefix import left_pad

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def play(prompts: list[list[int]], lengths: list[int]) -> int:
        torch.manual_seed(0)
        ids, mask = left_pad(prompts, 0, model.device)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
                min_new_tokens=max(lengths), max_new_tokens=max(lengths), pad_token_id=0,
            )  # fmt: skip
        return sum(lengths)  # of the tokens that it computes, those that belong to an answer

    return play


def vllm(folder: str) -> Callable[[list[list[int]], list[int]], int]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    model = LLM(
        folder, dtype="float32", max_model_len=1024, block_size=32, enable_chunked_prefill=False,
        enable_prefix_caching=True, logprobs_mode="processed_logprobs", enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )  # fmt: skip

    def play(prompts: list[list[int]], lengths: list[int]) -> int:
        model.reset_prefix_cache()  # each round is a new version of the policy
        settings = [
            SamplingParams(temperature=1.0, max_tokens=most, ignore_eos=True, seed=seed, logprobs=0)
            for seed, most in enumerate(lengths)
        ]
        answers = model.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], settings, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return play


ENGINES = {"ours": ours, "generate": generate, "vllm": vllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with config.json and safetensors")
    parser.add_argument("--engine", required=True, choices=ENGINES)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import AutoTokenizer

    prompts, lengths = turns(AutoTokenizer.from_pretrained(given.model), given.turns)
    play, rounds = ENGINES[given.engine](given.model), []
    for _ in range(given.rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = play(prompts, lengths)
        rounds.append({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu})
        if tokens != sum(lengths):
            raise SystemExit(f"{given.engine} wrote {tokens} tokens, not {sum(lengths)}")
    best = min(one["cpu_seconds"] for one in rounds)
    held = json.loads(given.result.read_text()) if given.result.is_file() else {}
    where = facts() | {"threads": torch.get_num_threads()}
    where["command"] = where["command"].replace(given.model, Path(given.model).name)
    held[given.engine] = {
        "machine": where,
        "model": Path(given.model).name,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "answer_tokens": lengths,
        "rounds": rounds,
        "turns_per_cpu_second": len(prompts) / best,
    }
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(held, indent=2) + "\n")
    print(given.engine, f"{len(prompts) / best:.3f} turns per CPU second", rounds)


if __name__ == "__main__":
    main()

"""Peak memory of forward and backward with a large vocabulary: logits in parts against all at once.

    python benchmarks/logits.py --result benchmarks/results/logits.json

A small random Qwen2 (hidden 64, two layers) with the vocabulary of Qwen2.5, 151,936, and answers of 64 tokens. Each
figure is the peak resident memory of a process of its own, less that of the same process before the update; the CPU,
float32. `all at once` is the same code with a bound that no batch reaches.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import options, write

VOCABULARY, TOKENS = 151_936, 64


def peak() -> float:
    """The largest resident memory so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def once(rows: int, whole: bool) -> dict[str, Any]:
    """One forward and backward of `rows` answers, in this process."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from msgrpo.models import shared_prefix
    from msgrpo.models.proof import prepare
    from msgrpo.models.shared_prefix import trunk_and_head

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    prepare(model, "qwen2")
    for parameter in model.get_input_embeddings().parameters():
        parameter.requires_grad_(False)  # as in LoRA: the head is frozen, the gradient flows through it
    if whole:
        shared_prefix.LOGITS = 2**62
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (rows, 32 + TOKENS), generator=draw).tolist()
    before, began = peak(), time.perf_counter()
    trunk, head = trunk_and_head(model)
    found, _ = shared_prefix.answer_logprobs(trunk, head, [], [(row[:32], row[32:]) for row in ids], 0)
    found.sum().backward()
    total = float(sum(p.grad.double().abs().sum() for p in model.parameters() if p.grad is not None))
    return {
        "gibibytes": peak() - before,
        "seconds": time.perf_counter() - began,
        "mean_logprob": float(found.mean()),
        "gradient": total,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--result", type=Path)
    parser.add_argument(
        "--once", nargs=2, metavar=("ROWS", "WHOLE"), help="in this process; used by the script itself"
    )
    given = parser.parse_args()
    if given.once:
        print(json.dumps(once(int(given.once[0]), given.once[1] == "whole")))
        return
    found: dict[str, Any] = {}
    for rows in (8, 16, 32):
        for way in ("parts", "whole"):
            command = [sys.executable, __file__, "--once", str(rows), way]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[f"{rows * TOKENS} answer tokens, {'in parts' if way == 'parts' else 'all at once'}"] = json.loads(
                done.stdout.splitlines()[-1]
            )
    if given.result is not None:
        write(given.result, {"peak": found})
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

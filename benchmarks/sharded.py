"""What sharding a base costs and saves: its memory for each rank as measured, and a count for bases of 3B to 72B.

    torchrun --nproc-per-node 2 benchmarks/sharded.py --result benchmarks/results/sharded.json

Measured with a base of random weights (float32, gloo, CPU): the bytes of weights that a rank keeps, and by how much
its resident memory rises while the base is loaded, whole and in shares. Counted, not measured: floating-point
operations of an update of the paper's preset on Snake, 500 kept turns of 250 tokens of their own. Of each token's 2 P
operations there are four: forward, the reference, the forward that checkpointing repeats, and the backward through
frozen weights. Seconds assume 400 TFLOP/s (40 % of an H100's bfloat16) and nothing for the exchange of weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import options, write
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from msgrpo.models.loading import load_base
from msgrpo.models.paths import NANO_DIR
from msgrpo.train.ranks import open_ranks
from msgrpo.train.shard import load_sharded

# layers, width, width of the feed-forward, width of keys, vocabulary; from the models' config.json (Qwen2.5)
BASES = {
    "3B": (36, 2048, 11008, 256, 151936),
    "7B": (28, 3584, 18944, 512, 152064),
    "14B": (48, 5120, 13824, 1024, 152064),
    "32B": (64, 5120, 27648, 1024, 152064),
    "72B": (80, 8192, 29568, 1024, 152064),
}
GPUS = {
    "3B": (1, 1, 1),
    "7B": (1, 1, 1),
    "14B": (2, 1, 2),
    "32B": (2, 2, 4),
    "72B": (4, 2, 8),
}  # servers, each, trainers
TOKENS, PASSES, FLOPS, RANK = 500 * 250, 4, 400e12, 32


def counted(name: str) -> dict[str, Any]:
    """Sizes in GB, and the seconds of an update."""
    layers, width, inner, keys, vocabulary = BASES[name]
    of_layers = layers * (2 * width * width + 2 * width * keys + 3 * width * inner)
    embeddings = width * vocabulary * (1 if name == "3B" else 2)  # 3B: tied
    lora = layers * RANK * (4 * width + 2 * (width + keys) + 3 * (width + inner))
    servers, parallel, trainers = GPUS[name]
    whole = 2 * (of_layers + embeddings)
    head = 2 * width * vocabulary
    held = whole if trainers == 1 else 2 * (of_layers + width * vocabulary) / trainers + head
    seconds = TOKENS * PASSES * 2 * (of_layers + width * vocabulary) / FLOPS / trainers
    return {
        "base": name,
        "servers": servers,
        "GPUs a server": parallel,
        "trainers": trainers,
        "base GB": round(whole / 1e9, 1),
        "base a trainer GB": round(held / 1e9, 1),
        "adapter MB": round(4 * lora / 1e6),
        "adapter, gradient, Adam a trainer GB": round(16 * lora / 1e9, 1),
        "seconds an update": round(seconds, 1),
    }


def measured(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for placing in (None, load_sharded):
        before = psutil.Process().memory_info().rss
        model, _ = load_base(str(folder), dtype="float32", placing=placing)
        parameters = list(model.parameters())
        held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)
        rows.append(
            {
                "how": "whole" if placing is None else "in shares",
                "parameters MB": round(sum(p.numel() for p in parameters) * 4 / 1e6),
                "held MB": round(held / 1e6),
                "resident memory rises by MB": round((psutil.Process().memory_info().rss - before) / 1e6),
            }
        )
        del model, parameters
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    with open_ranks() as ranks, tempfile.TemporaryDirectory() as scratch:
        folder = Path(ranks.broadcast(scratch))
        if ranks.first:
            torch.manual_seed(0)
            tokenizer = AutoTokenizer.from_pretrained(NANO_DIR)
            config = Qwen2Config(
                vocab_size=2048, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=False,
            )  # fmt: skip
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        distributed.barrier()
        found = {"measured": measured(folder), "counted": [counted(name) for name in BASES]}
        distributed.barrier()
        if ranks.first:
            print(json.dumps(found, indent=1))
            if given.result is not None:
                write(given.result, found)


if __name__ == "__main__":
    main()

"""What a GPU does with this project, in stages in the order of their worth; each leaves its result file at once.

    python benchmarks/gpu.py --models ~/models --out runs/gpu --minutes 10
    python benchmarks/gpu.py --smoke --out runs/gpu-smoke          # the same stages on a CPU, with nano

A stage is a run of `msgrpo train` that is stopped when its time is over (it can be resumed). The first is a model of
Qwen2.5-3B's shape with random weights, made here: it says what an update costs and nothing about play. The others are
models that lie in `--models`, as folders or GGUF files; those that are not there are passed over.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import facts

from msgrpo.run_log import read_rows

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}  # bfloat16 without sparsity, by NVIDIA's data sheets
TINY = ("groups=1", "group_size=4", "select=aaw(keep=2)", "minibatches=1", "eval_episodes=4", "max_tokens=16")
PAPER = ("prompt=none", "eval_every=10", "checkpoint_every=5")


@dataclass(frozen=True)
class Stage:
    """A run: the base's file or folder in `--models` (None: made here), its share of the time, its settings."""

    name: str
    base: str | None
    share: float
    settings: list[str] = field(default_factory=list)


STAGES = [
    Stage("3b-shape", None, 0.25, ["steps=3", "groups=1", "max_tokens=64", "eval_episodes=4", "eval_every=100"]),
    Stage(
        "0.5b",
        "qwen2.5-coder-0.5b*",
        0.45,
        ["groups=4", "group_size=32", "select=aaw(keep=8)", "learning_rate=1e-4", *PAPER],
    ),
    Stage(
        "1.5b",
        "qwen2.5-coder-1.5b*",
        0.3,
        ["groups=4", "group_size=32", "select=aaw(keep=8)", "learning_rate=1e-4", *PAPER],
    ),
]


def random_3b(folder: Path) -> Path:
    """A folder with a model of Qwen2.5-3B's shape, random weights, and nano's tokenizer, whose ids it knows."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from msgrpo.models.paths import NANO_DIR

    shape = Qwen2Config(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=11_008,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    tokenizer = AutoTokenizer.from_pretrained(NANO_DIR)
    shape.eos_token_id, shape.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(shape).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def base_of(stage: Stage, models: Path, out: Path, smoke: bool) -> Path | str | None:
    """The stage's model; None where it is not in `models`."""
    if smoke:
        return "nano"
    if stage.base is None:
        return random_3b(out / "random-3b")
    return next(iter(sorted(models.glob(stage.base))), None)


def run(stage: Stage, base: Path | str, out: Path, seconds: float, smoke: bool) -> dict[str, Any]:
    """Train for so long, and say what the run's own metrics and notes say."""
    folder, log = out / stage.name, out / f"{stage.name}.log"
    settings = [*stage.settings, *(TINY if smoke else ()), *(("steps=1",) if smoke else ())]
    command = [sys.executable, "-m", "msgrpo.cli", "train", "frozen-lake", "--base", str(base), "--preset", "paper"]
    command += ["--out", str(folder), "--resume", *(part for one in settings for part in ("--set", one))]
    began = time.perf_counter()
    with log.open("a") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it saves and stops
            process.wait()
    rows = read_rows(folder) if folder.exists() else []
    first = re.findall(r"first update took ([\d.]+) s and ([\d.]+) GiB", log.read_text())
    return {
        "stage": stage.name,
        "base": str(base),
        "command": command[1:],
        "exit_code": process.returncode,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_memory_gib": float(first[-1][1]) if first else None,
        "updates": [row for row in rows if row["kind"] == "train"],
        "evaluations": [row for row in rows if row["kind"] == "eval"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder with models")
    parser.add_argument("--out", type=Path, required=True, help="runs, logs and one result file a stage")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all stages together")
    parser.add_argument("--smoke", action="store_true", help="nano and one tiny update a stage")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        base = base_of(stage, given.models.expanduser(), given.out, given.smoke)
        if base is None:
            print(f"{stage.name}: no {stage.base} in {given.models}", flush=True)
            continue
        machine = facts()
        found = {"machine": machine} | run(stage, base, given.out, 60 * given.minutes * stage.share, given.smoke)
        found["peak_tflops"] = next((v for name, v in PEAK_TFLOPS.items() if name in (machine["gpu"] or "")), None)
        (given.out / f"{stage.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        updates = len(found["updates"])
        print(f"{stage.name}: {updates} updates in {found['seconds']} s, exit {found['exit_code']}", flush=True)


if __name__ == "__main__":
    main()

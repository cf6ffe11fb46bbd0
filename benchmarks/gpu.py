"""What a GPU does with this project, in stages; each leaves its result file at once.

    python benchmarks/gpu.py --models models --out runs/gpu --minutes 10 --stage 3b-shape
    python benchmarks/gpu.py --models models --out runs/gpu --minutes 9 --stage lake:0 --stage lake:1 --stage snake:0
    python benchmarks/gpu.py --smoke --out runs/gpu-smoke          # the same stages on a CPU, with nano

The stages that are named run at the same time and slow each other down: name one alone where its time counts.
`3b-shape` measures the speed of a model of Qwen2.5-3B's shape with random weights, made here: it says what an update
costs and nothing about play. The others train a model that lies in `--models`, as a folder or a GGUF file, from the
seed after the colon; when their time is over they are stopped (the same command goes on with them), and `--test`
plays the 200 test starts with each, beside its base.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import facts

from msgrpo.run_log import read_rows

HERE = Path(__file__).parent
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}  # bfloat16 without sparsity, by NVIDIA's data sheets
SHAPE = "3b-shape"
MAX_TOKENS = 16  # of an answer
TINY = (
    "groups=1",
    "group_size=4",
    "select=aaw(keep=2)",
    "minibatches=1",
    "evaluation=4(film=0)",
    "prompt=brief",
    "steps=1",
)
OURS = (f"max_tokens={MAX_TOKENS}", "evaluation=100(film=0)")


@dataclass(frozen=True)
class Stage:
    """A training: the game, the pattern of the base's file or folder in `--models`, its prompt, its settings."""

    scenario: str
    base: str
    prompt: str
    settings: tuple[str, ...] = ()


STAGES = {
    "lake": Stage("frozen-lake", "qwen2.5-coder-0.5b*", "lake-few-shot.toml"),
    "snake": Stage(
        "snake", "qwen2.5-coder-0.5b*", "snake-few-shot.toml", ("groups=16", "credit=to-go(gamma=0.6)", "steps=60")
    ),
    "lake-1.5b": Stage("frozen-lake", "qwen2.5-coder-1.5b*", "lake-few-shot.toml"),
}


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


def base_of(stage: Stage, given: argparse.Namespace) -> Path | str:
    """The stage's model. Raises FileNotFoundError where it is not in `--models`."""
    if given.smoke:
        return "nano"
    for path in sorted(Path(given.models).expanduser().glob(stage.base)):
        return path
    raise FileNotFoundError(f"no {stage.base} in {given.models}")


def speed(given: argparse.Namespace) -> list[str]:
    """The command that measures the shape of a 3B model; in `--smoke` nano."""
    peak = next((v for name, v in PEAK_TFLOPS.items() if name in (facts()["gpu"] or "")), None)
    base = "nano" if given.smoke else random_3b(given.out / "random-3b")
    tiny = TINY if given.smoke else ("max_tokens=16", "evaluation=8", "micro_batch=4096")
    command = [sys.executable, str(HERE / "speed.py"), "--base", str(base), "--preset", "paper", "--rounds", "1"]
    command += [part for setting in tiny for part in ("--set", setting)]
    command += ["--result", str(given.out / "3b-shape-speed.json")]
    return command + (["--peak-tflops", str(peak)] if peak else [])


def training(name: str, given: argparse.Namespace) -> list[str]:
    """The command that trains a stage, or goes on with it."""
    kind, _, seed = name.partition(":")
    stage = STAGES[kind]
    settings = [f"prompt={HERE / 'prompts' / stage.prompt}", *OURS, *stage.settings, *(TINY if given.smoke else ())]
    command = [sys.executable, "-m", "msgrpo.cli", "train", stage.scenario, "--base", str(base_of(stage, given))]
    command += ["--preset", "small-gpu", "--seed", seed or "0", "--out", str(folder_of(name, given)), "--resume"]
    return command + [part for setting in settings for part in ("--set", setting)]


def folder_of(name: str, given: argparse.Namespace) -> Path:
    return Path(given.out / name.replace(":", "-"))


def together(commands: dict[str, list[str]], given: argparse.Namespace) -> dict[str, int]:
    """Run them at the same time and stop those that have not ended in time; returns their exit codes."""
    until = time.monotonic() + 60 * given.minutes
    processes = {}
    for name, command in commands.items():
        log = (given.out / f"{folder_of(name, given).name}.log").open("a")
        processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
    codes = {}
    for name, process in processes.items():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it saves and stops
        codes[name] = process.wait()
    return codes


def tests(names: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """The rows of the table of each stage's adapter and its base on the test starts, all played at the same time."""
    msgrpo = [sys.executable, "-m", "msgrpo.cli"]
    outs = {name: given.out / f"{folder_of(name, given).name}-test" for name in names}
    running = []
    for name, out in outs.items():
        stage = STAGES[name.partition(":")[0]]
        players = [f"adapter:{folder_of(name, given)}", "nano" if given.smoke else f"base:{base_of(stage, given)}"]
        how = ["--scenario", stage.scenario, "--episodes", "4" if given.smoke else "200", "--out", str(out)]
        how += ["--max-tokens", str(MAX_TOKENS), "--concurrency", "200"]
        how += ["--prompt", "brief" if given.smoke else str(HERE / "prompts" / stage.prompt)]
        running.append(subprocess.Popen([*msgrpo, "eval", *players, *how], stdout=subprocess.DEVNULL))
    if failed := [process.args for process in running if process.wait()]:
        raise RuntimeError(f"an evaluation failed: {failed[0]!r}")
    return {
        name: json.loads(
            subprocess.run([*msgrpo, "leaderboard", str(out), "--json"], check=True, capture_output=True).stdout
        )
        for name, out in outs.items()
    }


def result(name: str, command: list[str], code: int, given: argparse.Namespace) -> dict[str, Any]:
    """What the run's own metrics and notes say, without what was tested."""
    folder = folder_of(name, given)
    rows = read_rows(folder) if folder.exists() else []
    log = (given.out / f"{folder.name}.log").read_text()
    first = re.findall(r"first update took ([\d.]+) s and ([\d.]+) GiB", log)
    return {
        "machine": facts(),
        "stage": name,
        "command": command[1:],
        "exit_code": code,
        "peak_memory_gib": float(first[-1][1]) if first else None,
        "updates": [row for row in rows if row["kind"] == "train"],
        "evaluations": [row for row in rows if row["kind"] == "eval"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder with models")
    parser.add_argument("--out", type=Path, required=True, help="runs, logs and one result file a stage")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the stages' trainings")
    parser.add_argument("--stage", action="append", dest="stages", help=f"{SHAPE}, or NAME:SEED: {list(STAGES)}")
    parser.add_argument("--test", action="store_true", help="play the test starts with each adapter and its base")
    parser.add_argument("--smoke", action="store_true", help="nano and one tiny update a stage")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    stages = given.stages or [SHAPE, *(f"{name}:0" for name in STAGES)]
    if unknown := [name for name in stages if name != SHAPE and name.partition(":")[0] not in STAGES]:
        parser.error(f"no stage is named {unknown[0]!r}: {SHAPE}, {', '.join(STAGES)}")
    commands = {name: speed(given) if name == SHAPE else training(name, given) for name in stages}
    codes = together(commands, given)
    for name, code in codes.items():  # written before anything is tested
        write(name, result(name, commands[name], code, given), given)
    if given.test:
        for name, table in tests([name for name in stages if name != SHAPE], given).items():
            write(name, result(name, commands[name], codes[name], given) | {"test": table}, given)


def write(name: str, measured: dict[str, Any], given: argparse.Namespace) -> None:
    (given.out / f"{folder_of(name, given).name}.json").write_text(json.dumps(measured, indent=1) + "\n")
    print(f"{name}: {len(measured['updates'])} updates, exit {measured['exit_code']}", flush=True)


if __name__ == "__main__":
    main()

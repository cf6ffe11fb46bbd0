"""Healthy runs and sick ones: does `msgrpo doctor` see which is which, and what ails the sick?

    OMP_NUM_THREADS=1 python benchmarks/doctor.py --runs runs/doctor --result benchmarks/results/doctor-runs.json

Each run is a real one of nano, short, with settings that keep it well or make it ill; the result file holds its
settings and its rows (without every episode's value), from which `tests/test_train_doctor.py` tells it again. What is
there already is not run again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from machine import facts, options

from msgrpo import run_log
from msgrpo.errors import RunError
from msgrpo.games.template import write
from msgrpo.train.config import make_config
from msgrpo.train.diagnosis import History, diagnose
from msgrpo.train.display import Quiet
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.loop import train

LAKES = Path(__file__).with_name("doctor_lakes.py")
SHORT = ["groups=3", "group_size=8", "select=aaw(keep=4)", "evaluation=20(every=5)", "minibatches=2"]
WRONG = ["loss=clip(kl=0)", "minibatches=6"]
# Whole runs from before, all of them well; they lack what is measured since then.
BEFORE = {
    "frozen-lake-seed-0": ("frozen-lake", "nano"),
    "slippery-critic-seed-0": ("frozen-lake-slippery", "nano"),
    "slippery-critic-all-seed-0": ("frozen-lake-slippery", "nano"),
    "smollm2-lake-seed-0": ("frozen-lake", "smollm2-taught"),
    "snake-seed-0": ("snake", "nano"),
    "snake-critic-seed-0": ("snake", "nano"),
    "snake-episode-seed-0": ("snake", "nano"),
}
RESULTS = Path(__file__).with_name("results")


@contextmanager
def half_precision() -> Iterator[None]:
    """An engine whose weights are rounded to bfloat16, as a quantised server's are; the trainer's are not.

    The canary is asleep, as it would be where a server rounds only later.
    """
    merge = HfEngine._merge

    def merge_and_round(self: HfEngine) -> None:
        merge(self)
        assert self._merged is not None
        with torch.no_grad():
            for weights in self._merged.parameters():
                weights.copy_(weights.to(torch.bfloat16).float())

    with patch.object(HfEngine, "_merge", merge_and_round), patch("msgrpo.train.engines.contract.check"):
        yield


# name: what doctor shall call it (None: healthy), scenario, steps, further settings
RUNS: dict[str, tuple[str | None, str, int, list[str]]] = {
    "lake": (None, "frozen-lake", 10, []),
    "untaught-game": ("no legal action", "GAME", 3, []),
    "cut-off": ("truncation", "frozen-lake", 3, ["max_tokens=16"]),
    "fast-lake": ("learning rate too high", "frozen-lake", 10, ["learning_rate=0.03", "loss=clip(kl=0)"]),
    "no-penalty": (
        "learning rate too high",
        "frozen-lake",
        12,
        ["learning_rate=0.004", "loss=clip(kl=0)", "minibatches=6"],
    ),
    "wall-lake": ("template collapse", f"{LAKES}:wall", 12, WRONG),
    "sway-lake": ("entropy collapse", f"{LAKES}:sway", 12, WRONG),
    "rounded-engine": ("engine mismatch", "frozen-lake", 3, []),
    "easy-lake": ("starts too easy", f"{LAKES}:easy", 3, []),
    "hard-lake": ("starts too hard", f"{LAKES}:hard", 3, []),
    "cold": ("flat groups", "frozen-lake", 3, ["temperature=0.02"]),
}


def ran(name: str, folder: Path) -> Path:
    """The run's folder, after it was run where that was not done before."""
    _, scenario, steps, settings = RUNS[name]
    out = folder / name
    if (out / "summary.json").is_file() or (out / "ended").is_file():
        return out
    game = folder / "cards.py"
    own = f"{game}:scenario" if game.is_file() else write(game)
    config = make_config(
        "nano", settings=[*SHORT, *settings], given={"scenario": scenario.replace("GAME", own), "steps": steps}
    )
    with half_precision() if name == "rounded-engine" else nullcontext():
        try:
            train(config, out, report=Quiet(), resume=out.exists())
        except RunError as error:
            (out / "ended").write_text(error.message)
    return out


def seen_as(name: str, wanted: str | None, settings: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = [finding.cause for finding in diagnose(History(settings, rows))]
    right = (found[0] if found else None) == wanted
    print(f"{name}: {wanted or 'healthy'}, seen as {', '.join(found) or 'healthy'}", flush=True)
    return {"name": name, "wanted": wanted, "found": found, "right": right, "settings": settings}


def recorded(name: str, folder: Path) -> dict[str, Any]:
    """What a test needs to tell the run again: its settings and rows, without what only takes room."""
    out = ran(name, folder)
    rows = [
        {key: _short(value) for key, value in row.items() if not key.startswith("time/")}
        for row in run_log.read_rows(out)
    ]
    held = run_log.settings(out)
    settings = {key: held[key] for key in KEPT} | {"scenario": Path(held["scenario"]).name}
    return seen_as(name, RUNS[name][0], settings, rows) | {"command": command(name), "rows": rows}


def from_before(name: str) -> dict[str, Any]:
    """A run whose rows have a file of their own."""
    scenario, base = BEFORE[name]
    rows = [json.loads(line) for line in (RESULTS / f"{name}.metrics.jsonl").open()]
    return seen_as(name, None, {"scenario": scenario, "base": base}, rows) | {"command": None, "rows": None}


KEPT = ("base", "steps", "max_tokens", "learning_rate", "gate", "group_size")


def command(name: str) -> str:
    """How the run is made by hand, but for the engine of `rounded-engine`."""
    _, scenario, steps, settings = RUNS[name]
    chosen = " ".join(f"--set {shlex.quote(setting)}" for setting in [*SHORT, *settings])
    return f"msgrpo train {scenario.replace(str(LAKES), LAKES.name)} --preset nano --steps {steps} {chosen}"


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/doctor"))
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    runs = [*map(from_before, BEFORE), *(recorded(name, arguments.runs) for name in RUNS)]
    right = {
        kind: sum(one["right"] for one in runs if (one["wanted"] is None) == (kind == "healthy"))
        for kind in ("healthy", "sick")
    }
    result = {"right": right, "runs": runs, "machine": facts()}
    arguments.result.write_text(json.dumps(result) + "\n")
    print(right)


if __name__ == "__main__":
    main()

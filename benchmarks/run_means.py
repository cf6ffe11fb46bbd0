"""What the rollouts and updates of a study's runs were like: means over updates and seeds, an arm a row.

python benchmarks/run_means.py runs/lab/flat-groups --result benchmarks/results/flat-groups-means.json

Of the seeds only with which all arms have ended. `answers` is the number of turns that a run played, the mean over
its seeds.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from machine import write

from msgrpo.run_log import read_rows

KEYS = ("rollout/flat_groups", "rollout/staleness", "update/clip_share", "update/kl", "rollout/entropy")


def means(runs: list[Path]) -> dict[str, Any]:
    rows = [[row for row in read_rows(run) if row["kind"] == "train"] for run in runs]
    found: dict[str, Any] = {"seeds": len(runs)}
    found["answers"] = mean(sum(row["rollout/turns"] for row in of_run) for of_run in rows)
    values = {key: [row[key] for of_run in rows for row in of_run if key in row] for key in KEYS}
    return found | {key: mean(measured) for key, measured in values.items() if measured}


def main(
    study: Annotated[Path, typer.Argument(help="The folder of a study.")],
    result: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")],
) -> None:
    """Write one row for each arm, and print it."""
    folders = sorted(folder for folder in study.iterdir() if folder.is_dir())
    ended = [{file.parent.name for file in folder.glob("seed-*/summary.json")} for folder in folders]
    seeds = sorted(set.intersection(*ended))
    arms = {folder.name: means([folder / seed for seed in seeds]) for folder in folders}
    for arm, found in arms.items():
        print(arm, *(f"{key} {value:.4g}" for key, value in found.items()))
    write(result, {"study": study.name, "arms": arms})


if __name__ == "__main__":
    typer.run(main)

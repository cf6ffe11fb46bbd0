"""The curves of healthy runs that come with the package, for `msgrpo doctor RUN`.

    python benchmarks/healthy.py

Reads `benchmarks/results/` and writes `train/healthy.json`: of each scenario and base the longest run whose score has
risen beyond chance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from msgrpo.models.paths import NANO, parameters_of
from msgrpo.train.diagnosis import History

RESULTS = Path(__file__).with_name("results")
OUT = Path(__file__).parents[1] / "train" / "healthy.json"
# Runs by the defaults of their scenario.
DEFAULT = {"frozen-lake": "frozen-lake-seed-0", "snake": "snake-seed-0"}


def held() -> list[tuple[str, str, str, list[dict[str, Any]]]]:
    """Scenario, base, settings and rows of every run there is."""
    runs = [
        (scenario, NANO, "", [json.loads(line) for line in (RESULTS / f"{name}.metrics.jsonl").open()])
        for scenario, name in DEFAULT.items()
    ]
    for run in json.loads((RESULTS / "doctor-runs.json").read_text())["runs"]:
        if run["wanted"] is None and run["rows"] is not None:
            settings = run["command"].partition("--preset nano ")[2]
            runs.append((run["settings"]["scenario"], NANO, settings, run["rows"]))
    return runs


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for scenario, base, settings, rows in held():
        history = History({"scenario": scenario, "base": base}, rows)
        if history.change is None or history.change.low <= 0:
            continue
        score = str(history.evaluations[0]["score"])
        curve = [[row["step"], round(row[score], 3)] for row in history.evaluations]
        there = chosen.get((scenario, base))
        if there is None or there["curve"][-1][0] < curve[-1][0]:
            chosen[scenario, base] = {
                "scenario": scenario, "base": base, "parameters": parameters_of(base), "score": score,
                "settings": settings, "curve": curve,
            }  # fmt: skip
    OUT.write_text(json.dumps(list(chosen.values()), indent=1) + "\n")
    print(f"{len(chosen)} curves → {OUT.name}: {', '.join(scenario for scenario, _ in chosen)}")


if __name__ == "__main__":
    main()

"""How long does `msgrpo train SCENARIO` take by itself, for every scenario of the package?

    OMP_NUM_THREADS=1 python benchmarks/default_runs.py --result benchmarks/results/default-runs.json

Each run is begun with the settings that its scenario takes by default, for two updates and the evaluations around
them. From their seconds follows the whole, if nothing changes. Where good play lasts longer than nano's, a run does
as well, up to the scenario's limit of steps: `turns` beside `limit` shows how far there is to go.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from machine import options, write

from msgrpo.game import Scenario
from msgrpo.games import SCENARIOS
from msgrpo.run_log import read_rows
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.loop import train

UPDATES = 2


def evaluations(config: TrainConfig) -> int:
    """How many a whole run has: before, every so many updates, and at its end."""
    return len({*range(0, config.steps, config.evaluation.every), config.steps})


def measured(scenario: Scenario) -> dict[str, Any]:
    config = make_config(given={"scenario": scenario.id})
    with tempfile.TemporaryDirectory() as folder:
        evaluation = config.evaluation.model_copy(update={"every": config.steps})
        began = config.model_copy(update={"steps": UPDATES, "evaluation": evaluation})
        train(began, Path(folder) / "run", report=Quiet())
        rows = read_rows(Path(folder) / "run")
    updates = [row for row in rows if row["kind"] == "train"]
    update_s = updates[-1]["time/total"] / UPDATES
    eval_s = max(row["eval_s"] for row in rows if row["kind"] == "eval")
    episodes = config.groups * config.group_size * UPDATES
    return {
        "scenario": scenario.id,
        "updates": config.steps,
        "update_s": update_s,
        "evaluations": evaluations(config),
        "eval_s": eval_s,
        "minutes": (config.steps * update_s + evaluations(config) * eval_s) / 60,
        "turns": sum(row["rollout/turns"] for row in updates) / episodes / len(scenario.players),
        "limit": scenario.step_limit,
    }


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--scenario", action="append", default=[], help="default: all")
    given = parser.parse_args()
    result: dict[str, Any] = {"runs": []}
    for name in given.scenario or SCENARIOS:
        found = measured(SCENARIOS[name])
        result["runs"].append(found)
        write(given.result, result)
        print(
            f"{name:30} {found['minutes']:5.0f} minutes: {found['updates']} updates of {found['update_s']:.1f} s, "
            f"{found['evaluations']} evaluations of {found['eval_s']:.1f} s; {found['turns']:.1f} turns of at most "
            f"{found['limit']} in an episode",
            flush=True,
        )


if __name__ == "__main__":
    main()

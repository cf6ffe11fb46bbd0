"""What tests of evaluations share: episodes of the suite, records of them, and evaluations in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from msgrpo.episode import Episode, Turn
from msgrpo.evals import command
from msgrpo.evals.leaderboard import Leaderboard
from msgrpo.evals.suites import EpisodeSeeds, episode_seeds
from msgrpo.game import Outcome
from msgrpo.games import get_scenario

SCENARIO = "frozen-lake"


def seeded(seeds: EpisodeSeeds) -> dict[str, int]:
    """The fields of an episode that say which one of the suite it is."""
    return {"start_seed": seeds.start, "chance_seed": seeds.chance, "sampling_seed": seeds.sampling}


def suite_episode(i: int, played: Sequence[Turn], *, agent: str = "a", **fields: Any) -> Episode:
    """The i-th episode of the suite with these turns; it is won where their rewards are above 0."""
    scenario, total = get_scenario(fields.get("scenario", SCENARIO)), sum(turn.reward for turn in played)
    given: dict[str, Any] = {
        "scenario": scenario.id,
        **seeded(episode_seeds(scenario, i + 1)[i]),
        "agents": {"player": agent},
        "settings": {},
        "turns": played,
        "outcome": Outcome.TERMINATED,
        "success": total > 0 if scenario.goal else None,
        "returns": {"player": total},
    }
    return Episode(**(given | fields))


def write(folder: Path, episodes: Sequence[Episode]) -> Path:
    """Append episodes to the folder's record."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "r.jsonl").open("a") as file:
        file.writelines(episode.model_dump_json() + "\n" for episode in episodes)
    return folder


def rewritten(file: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change a record by its lines."""
    rows = change([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def eval_here(out: Path, **options: Any) -> Leaderboard:
    """What `msgrpo eval` with these options gives, of the lake where nothing else is said."""
    given = command.Options(**({"scenarios": [SCENARIO]} | options), out=out)
    return command.run(given, Console(quiet=True))


async def eval_aside(out: Path, **options: Any) -> Leaderboard:
    """The same in a thread, while this one serves."""
    return await asyncio.to_thread(eval_here, out, **options)

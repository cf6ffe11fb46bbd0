"""`msgrpo eval --ray`: the record of a cluster is that of one process, also where a worker is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from msgrpo.episode import Episode
from msgrpo.errors import EndpointError, MsgrpoError, UsageError
from msgrpo.evals.command import Options
from msgrpo.evals.request import CHUNK, Given
from msgrpo.evals.run import evaluate, play_one
from msgrpo.games import get_scenario
from msgrpo.references import RandomAgent
from msgrpo.signals import ASIDE
from tests.command_line import PROGRAM, ended
from tests.test_train_ranks import LAKE as NEAR_LAKE
from tests.test_train_ranks import ROOT

LAKE = get_scenario("frozen-lake")
TIMES = ("started", "seconds", "latency", "wall")


def without_times(value: Any) -> Any:
    """A line of a record without the clock's part."""
    if isinstance(value, dict):
        return {key: without_times(nested) for key, nested in value.items() if not any(time in key for time in TIMES)}
    return [without_times(nested) for nested in value] if isinstance(value, list) else value


def lines(out: Path) -> list[Any]:
    (record,) = out.glob("*/*.jsonl")
    return [without_times(json.loads(line)) for line in record.read_text().splitlines()]


def by_seeds(out: Path) -> list[Any]:
    return sorted(lines(out), key=lambda line: (line["start_seed"], line["chance_seed"]))


class Here:
    """Plays chunks in this process."""

    at_once = 2

    def __init__(self, fails_at: int | None = None) -> None:
        self.chunks: list[int] = []
        self._fails_at = fails_at

    async def play(self, spec: str, chunk: Sequence[Given], regret: bool) -> list[Episode | MsgrpoError]:
        self.chunks.append(len(chunk))
        fails = len(self.chunks) == self._fails_at
        episodes: list[Episode | MsgrpoError] = [
            await play_one(RandomAgent(), get_scenario(name), seeds, regret) for name, seeds in chunk
        ]
        if fails:
            episodes[1] = EndpointError("the key is wrong", kind="http", fatal=True)
        return episodes


async def test_chunks_make_the_record_that_one_process_makes(tmp_path: Path) -> None:
    await evaluate([RandomAgent()], [LAKE], 80, tmp_path / "here", concurrency=1)
    elsewhere = Here()
    await evaluate([RandomAgent()], [LAKE], 80, tmp_path / "chunks", elsewhere=elsewhere)
    assert elsewhere.chunks == [CHUNK, CHUNK, 80 - 2 * CHUNK]
    assert lines(tmp_path / "here") == lines(tmp_path / "chunks")


async def test_what_was_recorded_before_a_fatal_failure_is_not_played_again(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="the key is wrong"):
        await evaluate([RandomAgent()], [LAKE], 80, tmp_path / "run", elsewhere=Here(fails_at=3))
    kept = len(lines(tmp_path / "run"))
    assert kept == 79  # what was paid for is kept, and one is missing
    elsewhere = Here()
    await evaluate([RandomAgent()], [LAKE], 80, tmp_path / "run", elsewhere=elsewhere)
    assert kept + sum(elsewhere.chunks) == 80
    await evaluate([RandomAgent()], [LAKE], 80, tmp_path / "here", concurrency=1)
    assert by_seeds(tmp_path / "here") == by_seeds(tmp_path / "run")


def test_bounds_of_the_whole_evaluation_are_refused() -> None:
    with pytest.raises(UsageError, match="--rate"):
        Options(agents=["random"], ray="auto", rate=3).check_ray()


def test_a_head_that_hangs_does_not_keep_this_process_from_saying_so_and_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was asked how many cores there are in the thread that tells the progress and hears Ctrl-C, then in one that
    is waited for at the end.
    """
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")
    from msgrpo.evals.on_ray import OnRay

    asked, over = threading.Event(), threading.Event()

    def resources() -> dict[str, float]:
        asked.set()
        assert over.wait(20), "this process waited for the answer"
        return {}

    async def interrupted() -> None:
        playing = asyncio.ensure_future(cluster.play("random", [], False))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        assert cluster.at_once == 6
        playing.cancel()

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0})
    cluster = OnRay(lambda spec: RandomAgent())
    monkeypatch.setattr(ray, "cluster_resources", resources)
    asyncio.run(interrupted())
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == ASIDE]
    over.set()
    waiting.join()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing_of_the_record(tmp_path: Path, own_ray: dict[str, str]) -> None:
    """On a cluster of this machine: its first worker is killed while it plays, and the chunk is played again."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")
    command = [*PROGRAM, "eval", "nano", "--scenario", NEAR_LAKE, "--episodes", "70"]
    own_ray |= {"PYTHONPATH": str(ROOT)}
    alone = subprocess.run([*command, "--out", str(tmp_path / "alone")], cwd=ROOT, env=own_ray, check=False)
    assert alone.returncode == 0
    played = subprocess.Popen(
        [*command, "--ray", "auto", "--out", str(tmp_path / "ray")], cwd=ROOT, env=own_ray, text=True
    )
    with ended(played):
        worker = None
        while worker is None and played.poll() is None:
            time.sleep(0.1)
            worker = next(filter(plays, psutil.Process(played.pid).children(recursive=True)), None)
        assert worker is not None
        worker.kill()
    assert played.returncode == 0
    assert by_seeds(tmp_path / "alone") == by_seeds(tmp_path / "ray")  # alone they stand in the order of their ends


def plays(process: psutil.Process) -> bool:
    """Whether it is a worker at work on a chunk: Ray gives it the task's name then."""
    with suppress(psutil.Error):
        return "ray::" in (title := " ".join(process.cmdline())) and "play_or_say_why" in title
    return False

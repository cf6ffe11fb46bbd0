"""The laboratory: a study is one TOML file with arms, seeds and settings; `msgrpo lab FILE` runs and reports all
of it.

    question = "Does credit by state and action learn faster than the whole episode's?"
    scenario = "frozen-lake"
    seeds = 8
    [settings]                 # of every arm
    steps = 20
    [arms.episode]             # the first arm is the one that the others are compared with
    [arms.state-action]
    credit = "state-action"

An arm may train on a mixture that begins with the study's scenario, which all are tested on. Each run is one
`msgrpo train` in a process of its own, on one thread; the arms of a seed come one after the other, so that whatever
else the machine does meets all of them. After its training each adapter is evaluated once on the test starts. The
report is written whenever a seed is whole, and says of how many it is. A study that was cut off, by kill -9 too, goes
on with the same command.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from msgrpo.episode import read_episodes
from msgrpo.errors import RunError, UsageError, first_fault, nearest
from msgrpo.evals.match import points_of
from msgrpo.evals.request import check_repeatable, playable_by
from msgrpo.evals.suites import SUITE_VERSION, episode_seeds
from msgrpo.extras import needs
from msgrpo.files import open_lock, read_regular, replace_json, replace_text
from msgrpo.games import get_scenario
from msgrpo.mixture import names_of
from msgrpo.run_log import SUMMARY
from msgrpo.serve.preflight import installed_engine
from msgrpo.specs import make_agent
from msgrpo.train.config import MANY, TrainConfig, make_config
from msgrpo.train.lab_report import curve, draw, markdown, reported
from msgrpo.train.run_folder import allowing, by_todays_names, refused
from msgrpo.trust import check_named, foreign

STUDY = "study.json"  # what a folder's study is, whole
Say = Callable[[str], None]


class Study(BaseModel):
    """What a study's file says. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str
    scenario: str
    seeds: int = Field(ge=1, le=1000, strict=True)
    settings: dict[str, Any] = {}
    arms: dict[str, dict[str, Any]] = {}
    test_episodes: int = Field(200, ge=1, le=MANY, strict=True)
    test_opponent: str | None = None  # in a game of two; without: optimal where there is a reference, else random

    @model_validator(mode="after")
    def _arms_are_runs(self) -> Self:
        if not self.arms:
            raise ValueError("a study has one arm or more: [arms.NAME], with what it sets below")
        for name, settings in {"settings": self.settings, **self.arms}.items():
            if taken := ({"seed", "scenario"} if name == "settings" else {"seed", "base"}) & set(settings):
                raise ValueError(f"{name} sets {', '.join(sorted(taken))}, which is the same for all arms")
        for name in self.arms:
            if not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII):
                raise ValueError(f"the arm {name!r} names a folder: at most 64 letters, digits, - and _")
            try:
                first = names_of(self.config(name, 0).scenario)[0]
            except UsageError as error:
                raise ValueError(f"arm {name}: {error}") from error
            if first != names_of(self.scenario)[0]:
                raise ValueError(f"arm {name} begins with {first}: it would be tested on another scenario")
        if self.test_opponent is not None and self.opponent() is None:
            raise ValueError(f"test_opponent is {self.test_opponent!r}, and {self.scenario} has one player")
        return self

    def opponent(self) -> str | None:
        """Who sits opposite in the test of a game of two; None in a game of one."""
        scenario = get_scenario(names_of(self.scenario)[0])
        if len(scenario.players) == 1:
            return None
        return self.test_opponent or ("random" if scenario.reference is None else "optimal")

    def config(self, arm: str, seed: int) -> TrainConfig:
        """The whole settings of one run."""
        return make_config(given={"scenario": self.scenario, **self.settings, **self.arms[arm], "seed": seed})

    def whole_settings(self) -> dict[str, dict[str, Any]]:
        """Every arm's settings with seed 0, those of presets and defaults included: what its file leaves open."""
        return {arm: self.config(arm, 0).model_dump(mode="json") for arm in self.arms}


def load_study(file: Path, options: Sequence[str] = ()) -> Study:
    """Raises UsageError for a file that is no study, with the key that is wrong; where it names what a person has to
    allow, with the whole command, whose other `options` these are.
    """
    try:
        values = tomllib.loads(read_regular(file).decode())
        tables = (values, values.get("settings"), *_tables(values.get("arms")))
        named = [pair for settings in tables if isinstance(settings, dict) for pair in foreign(settings)]
        check_named(named, str(file), shlex.join(["lab", str(file), *options]))
        return Study.model_validate(values)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from error
    except ValidationError as error:
        if unknown := [fault for fault in error.errors() if fault["type"] == "extra_forbidden"]:
            key = str(unknown[0]["loc"][0])  # first: a key that is misspelt is missing as well
            raise UsageError(f"{file}: a study has no key {key!r}", fix=nearest(key, Study.model_fields)) from error
        raise UsageError(f"{file}: {first_fault(error, 'the study')}") from error


def _tables(values: Any) -> list[Any]:
    """The values of a table; none where it is no table."""
    return list(values.values()) if isinstance(values, dict) else []


@dataclass(frozen=True)
class Job:
    """One run of a study: an arm with a seed, in its own folder."""

    arm: str
    seed: int
    folder: Path
    config: TrainConfig
    opponent: str | None = None  # of its test, in a game of two

    @property
    def test(self) -> Path:
        return self.folder / "test"

    def commands(self, episodes: int) -> list[list[str]]:
        """What is still to be started: the training (it goes on where it was), and the one look at the test
        starts.
        """
        msgrpo = [sys.executable, "-P", "-m", "msgrpo.cli"]
        settings = self.folder.with_suffix(".json")
        settings.parent.mkdir(parents=True, exist_ok=True)
        replace_text(settings, self.config.model_dump_json(indent=2) + "\n")
        train = [*msgrpo, "train", "--config", str(settings), "--out", str(self.folder), "--resume", "--json"]
        evaluate = [*msgrpo, "eval", f"adapter:{self.folder}", "--scenario", self.config.scenarios[0].id, "--json"]
        evaluate += ["--episodes", str(episodes), "--out", str(self.test)]
        evaluate += ["--opponent", self.opponent] if self.opponent else []
        evaluate += ["--temperature", str(self.config.temperature), "--max-tokens", str(self.config.max_tokens)]
        trained, tested = (self.folder / SUMMARY).exists(), len(self.test_values()) == episodes
        return [*([] if trained else [train]), *([] if trained and tested else [evaluate])]

    def test_values(self) -> list[float]:
        """The score of every test start so far, in the suite's order; against an opponent the points of both seats
        (1 a win, ½ a draw).

        The folder holds this adapter's test and no other, under whatever path the study had when it was played.
        """
        if self.opponent is not None:
            return self._points(self.opponent)
        files = sorted(self.test.glob("*/*.jsonl"))
        episodes = {e.start_seed: e for file in files for e in read_episodes(file) if e.error is None}
        return [episode.score for _, episode in sorted(episodes.items())]

    def _points(self, opponent: str) -> list[float]:
        points_by_place: dict[int, float] = {}
        for file in self.test.glob("match/*.jsonl"):
            for episode in read_episodes(file):
                own_spec = next((spec for spec in episode.agents.values() if spec != opponent), None)
                if own_spec is not None:
                    starts = len(list(read_episodes(file)))
                    points, _ = points_of(file, (own_spec, opponent), self.config.scenarios[0], starts)
                    points_by_place |= {number: sum(both) / 2 for number, both in points.items()}
                    break
        return [value for _, value in sorted(points_by_place.items())]


def run(study: Study, out: Path, workers: int, say: Say) -> dict[str, Any]:
    """Run what is not there yet, `workers` runs at a time, and return the report, which is also written to `out`.

    Raises MsgrpoError, before anything runs, for an arm that could not start or be tested, and for a folder with
    another study.
    """
    if workers < 1:
        raise UsageError(f"workers is {workers}", fix="1 or more runs at a time")
    _check_runs(study, begun=(out / STUDY).exists())
    _check_test(study)
    _free_gpu()
    with refused(f"the study {out}"):
        out.mkdir(parents=True, exist_ok=True)
        return _run(study, out, workers, say)


def _check_runs(study: Study, *, begun: bool) -> None:
    """Raise MsgrpoError for what would end a run of an arm at its beginning, when those of others have run."""
    with needs("msgrpo lab", "train"):
        import torch

        from msgrpo.models.loading import default_device, load_base, usual_dtype
        from msgrpo.train.loop import check_choices
        from msgrpo.train.ranks import ALONE
        from msgrpo.train.rollouts import Players
        from msgrpo.train.tinker.service import check_usable

    for arm in study.arms:
        config = study.config(arm, 0)
        if config.servers or config.trainers != "1" or config.shard:
            said = f"rollouts={config.rollouts}, trainers={config.trainers}, shard={str(config.shard).lower()}"
            raise UsageError(f"arm {arm} has {said}, and each run of a study is one process", fix="without them")
        check_choices(config)
        if config.vllm is not None and not begun:
            installed_engine()
        if config.service is not None and not begun:
            check_usable()
        Players.of(config, ALONE)
    here = any(study.config(arm, 0).service is None for arm in study.arms)
    if here and not begun:  # a finished study shows its report where its base is gone, or vLLM
        # the runs need the GPU's memory; float32, as usual on a processor, would take twice of this one's
        dtype = usual_dtype(config.base, default_device())
        load_base(config.base, device=torch.device("cpu"), dtype=dtype)


def _free_gpu() -> None:
    """Give back the memory of the opponents' models: the runs need it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _check_test(study: Study) -> None:
    """Raise MsgrpoError for a test that could not be played when all has been trained."""
    scenario = get_scenario(names_of(study.scenario)[0])
    check_repeatable([scenario])
    episode_seeds(scenario, study.test_episodes)  # GameFaultError where a start cannot be looked at
    if (opposite := study.opponent()) is not None:
        playable_by(make_agent(opposite), [scenario])


def _run(study: Study, out: Path, workers: int, say: Say) -> dict[str, Any]:
    if (out / STUDY).exists():
        _same_study(study, out)  # another one need not wait
    with _alone(out, say) as lock:
        _same_study(study, out)
        jobs = [
            Job(arm, seed, out / arm / f"seed-{seed}", study.config(arm, seed), study.opponent())
            for seed in range(study.seeds)
            for arm in study.arms
        ]
        report: dict[str, Any] = {}
        done: Counter[int] = Counter()
        for ended in _Crew(jobs, study.test_episodes, say, lock).work(workers):
            done[ended.seed] += 1
            if done[ended.seed] == len(study.arms):  # a seed is whole: what is there so far is worth a look
                report = _report(study, [job for job in jobs if done[job.seed] == len(study.arms)], out)
    return report


def _report(study: Study, jobs: Sequence[Job], out: Path) -> dict[str, Any]:
    """Write what these runs came to, of every arm the same seeds."""
    runs = {arm: [job for job in jobs if job.arm == arm] for arm in study.arms}
    report = {"settings": study.whole_settings()} | reported(
        study.model_dump(),
        {arm: [job.test_values() for job in of_arm] for arm, of_arm in runs.items()},
        {arm: [curve(job.folder, job.config.steps) for job in of_arm] for arm, of_arm in runs.items()},
    )
    replace_json(out / "report.json", report)
    replace_text(out / "report.md", markdown(report))
    draw(report, out / "curves.png")
    return report


@contextmanager
def _alone(out: Path, say: Say) -> Iterator[int]:
    """One lab in a folder. Its runs hold the same lock: those that a killed lab left behind are waited for."""
    with open_lock(out / "lab.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: another lab works in {out}, or a run that a killed one left behind has not ended yet")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _same_study(study: Study, out: Path) -> None:
    """A folder holds one study. What its arms are was fixed before the first run, defaults included, and stays, and
    which of them is the first.

    A setting that came into the program later has its default in the runs before it.
    """
    file = out / STUDY
    arms = study.whole_settings()
    fixed: dict[str, Any] = ({} if study.test_opponent is None else {"test_opponent": study.test_opponent}) | {
        "suite_version": SUITE_VERSION,
        "seeds": study.seeds,
        "test_episodes": study.test_episodes,
        "arms": arms,
    }
    if not file.exists():
        replace_json(file, fixed)
        return
    try:
        recorded = from_json(read_regular(file))
        names = {values["scenario"] for values in recorded["arms"].values()}
        if not names <= {values["scenario"] for values in arms.values()}:
            raise KeyError("another scenario, which is not loaded to be compared")
        was = {
            a: TrainConfig.model_validate(by_todays_names(values)).model_dump(mode="json")
            for a, values in recorded["arms"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{file} holds no study of this version", fix="choose another --out") from error
    if recorded | {"arms": was} != fixed or list(was) != list(study.arms):
        raise UsageError(
            f"{out} holds a study with other arms, another first one, other seeds or settings",
            fix="choose another --out",
        )


class _Crew:
    """Processes that run the jobs; when one fails or somebody stops them, none is left behind."""

    def __init__(self, jobs: Sequence[Job], episodes: int, say: Say, lock: int) -> None:
        self._jobs, self._episodes, self._say, self._held = jobs, episodes, say, lock
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopped, self._done = threading.Lock(), False, 0

    def work(self, workers: int) -> Iterator[Job]:
        """Each job, once it is done."""
        pool = ThreadPoolExecutor(workers)
        try:
            for ended in as_completed([pool.submit(self._run, job) for job in self._jobs]):
                yield ended.result()
        except BaseException:
            with self._lock:
                self._stopped = True
                for process in self._running:
                    process.terminate()  # a run saves its last whole update
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, job: Job) -> Job:
        commands = job.commands(self._episodes)
        if commands:
            allowed = allowing(job.config.model_dump(mode="json"))
            watch = f"msgrpo {allowed}play --run {shlex.quote(str(job.folder))}"
            with self._lock:
                self._say(f"{job.arm}, seed {job.seed} is running; to watch it: {watch}")
        for command in commands:
            self._call(command, job)
        if (played := len(job.test_values())) != self._episodes:
            raise RunError(
                f"{job.arm}, seed {job.seed} has {played} of {self._episodes} test episodes",
                fix="the same command goes on; where it always ends here, the game itself fails on the others: "
                f"msgrpo games check {shlex.quote(job.config.scenarios[0].id)}",
            )
        with self._lock:
            self._done += 1
            self._say(f"{self._done} of {len(self._jobs)} runs: {job.arm}, seed {job.seed} is done")
        return job

    def _call(self, command: list[str], job: Job) -> None:
        file = job.folder.with_suffix(".log")
        with file.open("ab") as log:
            begin = log.tell()
            with self._lock:
                if self._stopped:
                    raise RunError("the study was stopped", fix="the same command goes on")
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                    pass_fds=[self._held],
                )
                self._running.add(process)
            code = process.wait()
            with self._lock:
                self._running.discard(process)
        if code:
            last = file.read_bytes()[begin:].decode(errors="replace").strip().splitlines()[-2:]
            raise RunError(
                f"{job.arm}, seed {job.seed} ended with {code}: {' '.join(last)}",
                fix=f"{file} says more. Once the cause is gone the same command goes on with what is left; with "
                "other settings it is another study: choose another --out",
            )

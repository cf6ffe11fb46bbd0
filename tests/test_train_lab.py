"""The laboratory with real runs: what a study's file may say, that a killed study goes on, what its report holds."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch

from msgrpo import trust
from msgrpo.episode import play_episode
from msgrpo.errors import GameFaultError, MissingExtraError, MsgrpoError, RunError, ServeError, UsageError
from msgrpo.evals.suites import episode_seeds
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.run_log import METRICS, read_rows
from msgrpo.specs import make_agent
from msgrpo.train import lab
from msgrpo.train.lab import Job, Study, _alone, _check_runs, _Crew, _same_study, load_study, run
from msgrpo.train.lab_report import curve, markdown, reported
from tests.command_line import PROGRAM, ended

ROOT = Path(__file__).resolve().parents[1]
STUDY = """
question = "Is a uniform draw as good?"
scenario = "frozen-lake"
seeds = 1
test_episodes = 4
[settings]
steps = 2
groups = 2
group_size = 4
select = "aaw(keep=2)"
evaluation = "4(every=1, film=0)"
[arms.aaw]
[arms.uniform]
select = "uniform(keep=2)"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "draws.toml"
    path.write_text(STUDY)
    return path


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("seeds = 1", "", "seeds: Field required"),
        ("seeds = 1", "seeds = 0", r"seeds: .*seen: 0"),
        ("seeds = 1", "seeds = true", "seeds"),
        ("seeds = 1", 'seeds = "2"', "seeds"),
        ("seeds = 1", "seeds = 99999999999999999999", "seeds"),
        ("test_episodes = 4", "test_episodes = 10_000_000", "test_episodes"),
        ("question =", "answer =", "question"),
        ("question =", "qestion =", "no key 'qestion'\n.*did you mean question"),
        ("test_episodes = 4", "test_episode = 4", "no key 'test_episode'\n.*test_episodes"),
        ("[arms.aaw]\n[arms.uniform]\nselect", "[settings.more]\nselect", "one arm or more"),
        ("[arms.uniform]", f"[arms.{'u' * 65}]", "at most 64"),
        ('scenario = "frozen-lake"', 'scenario = "frozen-lak"', "frozen-lake"),
        ("groups = 2", "groop = 2", "groups"),
        ("groups = 2", "lr = 0.1", "'lr'\n.*it is called learning_rate$"),  # of --set, which lab has not, no word
        ('"uniform(keep=2)', '"uniform(keep=9)', r"take 'select=uniform\(keep=1\)', or select=all$"),
        ('"uniform(', '"unifrom(', "unifrom"),
        ("[arms.uniform]", '[arms."../out"]', "names a folder"),
        ("[arms.aaw]", "[arms.aaw", "not TOML"),
        ("[arms.aaw]", '[arms.aaw]\nscenario = "snake,frozen-lake"', "tested on another scenario"),
        ("[arms.aaw]", '[arms.aaw]\nbase = "other"', "aaw sets base"),
        ("steps = 2", 'scenario = "snake"', "same for all arms"),
        ("test_episodes = 4", 'test_opponent = "random"', "frozen-lake has one player"),
    ],
)
def test_a_wrong_study_is_refused_with_what_is_wrong(file: Path, old: str, new: str, says: str) -> None:
    file.write_text(STUDY.replace(old, new))
    with pytest.raises(UsageError, match=says):
        load_study(file)
    with pytest.raises(UsageError, match="cannot be read"):
        load_study(file.parent / "none.toml")


def test_an_arm_has_the_studys_settings_and_its_own() -> None:
    study = Study(
        question="?",
        scenario="snake",
        seeds=1,
        settings={"steps": 3, "groups": 4},
        arms={"a": {}, "b": {"groups": 2}},
    )
    assert [(study.config(arm, 7).groups, study.config(arm, 7).steps) for arm in "ab"] == [(4, 3), (2, 3)]
    assert study.config("a", 7).seed == 7
    mixed = {"a": {}, "b": {"scenario": "snake@0.7,snake-poison-apple@0.3"}}
    study = Study(question="?", scenario="snake", seeds=1, arms=mixed)
    assert [study.config(arm, 0).scenario for arm in "ab"] == ["snake", "snake@0.7,snake-poison-apple@0.3"]


def command(file: Path, out: Path, *more: str) -> list[str]:
    return [*PROGRAM, "lab", str(file), "--out", str(out), "--json", *more]


def done(out: Path) -> int:
    return sum(row["kind"] == "train" for run in out.glob("*/seed-?") for row in read_rows(run))


def processes_in(out: Path) -> list[int]:
    """Processes whose command names the study's folder."""
    found = subprocess.run(["pgrep", "-f", str(out)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split() if int(pid) != os.getpid()]


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_and_reports_every_arm(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = command(file, out, "--workers", "1")
    first = subprocess.Popen(one, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while done(out) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    first.kill()
    first.wait()
    again = subprocess.run(command(file, out), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert list(report["arms"]) == ["aaw", "uniform"]
    for arm, found in report["arms"].items():
        assert [len(values) for values in found["values"]] == [4]
        assert found["test"]["mean"] == pytest.approx(sum(map(sum, found["values"])) / 4)
        assert [one["updates"] for one in found["curves"]] == [[0, 1, 2]]
        assert (found["difference"] is None) == (arm == "aaw")
    assert report["budget"]["answers"] == min(
        one["answers"][-1] for found in report["arms"].values() for one in found["curves"]
    )
    assert (out / "curves.png").stat().st_size > 10_000
    assert "| uniform |" in (out / "report.md").read_text()
    assert processes_in(out) == []
    assert report == json.loads((out / "report.json").read_text())
    file.write_text(STUDY.replace("steps = 2", "steps = 3"))
    with pytest.raises(UsageError, match="other seeds or settings"):
        run(load_study(file), out, 1, print)


@pytest.mark.parametrize(
    "setting", ['gate = "nowhere:gate"', 'opponent = "adapter:nowhere"\nscenario = "snake-duel"']
)
def test_an_arm_that_could_not_start_is_named_before_anything_runs(setting: str, file: Path, tmp_path: Path) -> None:
    scenario = "snake-duel" if "duel" in setting else "frozen-lake"
    said = STUDY.replace('scenario = "frozen-lake"', f'scenario = "{scenario}"')
    file.write_text(said.replace('select = "uniform(keep=2)"', setting))
    with pytest.raises(MsgrpoError, match="nowhere"):
        run(load_study(file), tmp_path / "out", 1, print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new"), [("steps = 2", 'base = "./no"'), ('select = "uniform(keep=2)"', 'rollouts = "vllm"')]
)
def test_what_each_run_would_lack_is_told_before_anything_runs(
    old: str, new: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of other arms were under way then, and the folder was that study's from then on."""

    def installed() -> None:
        raise ServeError("vLLM is not installed here")

    monkeypatch.setattr("msgrpo.train.lab.installed_engine", installed)
    file.write_text(STUDY.replace(old, new))
    with pytest.raises(MsgrpoError, match=r"'\./no' is no folder|vLLM is not installed"):
        run(load_study(file), tmp_path / "out", 1, print)
    assert not (tmp_path / "out").exists()


def test_a_study_that_has_begun_is_read_where_nothing_of_it_can_run(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a finished one was refused on a machine without vLLM."""

    def missing(*given: object, **how: object) -> None:
        raise ServeError("it is not here")

    monkeypatch.setattr("msgrpo.train.lab.installed_engine", missing)
    monkeypatch.setattr("msgrpo.models.loading.load_base", missing)
    file.write_text(STUDY.replace('select = "uniform(keep=2)"', 'rollouts = "vllm"'))
    _check_runs(load_study(file), begun=True)


def test_a_base_is_looked_at_in_no_more_memory_than_a_run_takes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was loaded in float32, twice as large as in the runs on a GPU."""
    asked = dict[str, object]()
    monkeypatch.setattr("msgrpo.models.loading.default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("msgrpo.models.loading.load_base", lambda base, **how: asked.update(how))
    file.write_text(STUDY.replace("steps = 2", 'steps = 2\nbase = "some/base"'))
    _check_runs(load_study(file), begun=False)
    assert asked == {"device": torch.device("cpu"), "dtype": "bfloat16"}


def test_an_arm_at_a_service_asks_for_its_sdk_and_key_and_for_no_base_here(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run told of them when those of the arms before it had been trained; the base was loaded, however large."""
    service = 'steps = 2\nbase = "some/base"\nbackend = "tinker"\nloss = "clip(kl=0)"'
    file.write_text(STUDY.replace("steps = 2", service))
    monkeypatch.setattr(trust, "_allowed", {"tinker"})
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(MissingExtraError, match="tinker"):
        run(load_study(file), tmp_path / "out", 1, print)
    monkeypatch.setitem(sys.modules, "tinker", ModuleType("tinker"))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(UsageError, match="TINKER_API_KEY is not set"):
        run(load_study(file), tmp_path / "out", 1, print)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setattr("msgrpo.models.loading.load_base", lambda *given, **how: pytest.fail("it was loaded"))
    _check_runs(load_study(file), begun=False)


def test_the_models_that_are_looked_at_leave_the_gpu_before_anything_runs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch kept the memory of an opponent `adapter:` for as long as the study lasted."""

    class Model:
        def __init__(self) -> None:
            self.layer = self  # a circle, as in a model of torch

    looked_at, happened = list[weakref.ref[Model]](), list[str]()

    def check(study: Study) -> None:
        looked_at.append(weakref.ref(Model()))

    monkeypatch.setattr(lab, "_check_test", check)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append(f"model: {looked_at[0]()}"))
    monkeypatch.setattr(lab, "_run", lambda *given: happened.append("run"))
    gc.disable()
    try:
        run(load_study(file), tmp_path / "out", 1, print)
    finally:
        gc.enable()
    assert happened == ["model: None", "run"]


def test_an_opponent_that_cannot_play_the_test_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom msgrpo.games import get_scenario\n"
        "scenario = replace(get_scenario('snake-duel'), id='own', reference=None)\n"
    )
    own = f"{tmp_path}/own.py:scenario"
    study = Study(question="?", scenario=own, seeds=1, arms={"a": {}}, test_opponent="optimal")
    with pytest.raises(UsageError, match=r"can play none of .*nothing is known to be optimal there"):
        run(study, tmp_path / "out", 1, print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", ['trainers = "2"', 'rollouts = "vllm(servers=2)"'])
def test_an_arm_of_several_processes_is_named_before_anything_runs(setting: str, file: Path, tmp_path: Path) -> None:
    """Its first run ended with advice for another command, and the folder was that study's from then on."""
    file.write_text(STUDY.replace('select = "uniform(keep=2)"', setting))
    with pytest.raises(UsageError, match=r"arm uniform has .* is one process"):
        run(load_study(file), tmp_path / "out", 1, print)
    assert not (tmp_path / "out").exists()


def test_a_game_that_cannot_begin_is_named_before_anything_runs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observe(game: FrozenLake, player: str) -> str:
        raise ValueError("no view")

    monkeypatch.setattr(FrozenLake, "observe", observe)
    with pytest.raises(GameFaultError, match="no view"):
        run(load_study(file), tmp_path / "out", 1, print)
    assert not (tmp_path / "out").exists()


def test_without_a_place_for_a_run_nothing_is_written(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="workers is 0"):
        run(load_study(file), tmp_path / "out", 0, print)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_one_is_an_error_in_words(file: Path) -> None:
    for out in (file, file / "below"):
        with pytest.raises(RunError, match="cannot be read or written"):
            run(load_study(file), out, 1, print)


def test_another_study_does_not_wait_for_the_one_in_its_folder(file: Path, tmp_path: Path) -> None:
    study = load_study(file)
    _same_study(study, tmp_path)
    turned = study.model_copy(update={"arms": dict(reversed(study.arms.items()))})
    with _alone(tmp_path, print):
        for other in (study.model_copy(update={"seeds": 2}), turned):  # the first arm is what the others differ from
            with pytest.raises(UsageError, match="other arms, another first one"):
                run(other, tmp_path, 1, print)


def test_the_test_counts_as_played_under_whatever_path_it_was(file: Path, tmp_path: Path) -> None:
    config = load_study(file).config("aaw", 0)
    record = tmp_path / "aaw" / "seed-0" / "test" / "adapter_elsewhere_aaw_seed-0" / "frozen-lake.jsonl"
    record.parent.mkdir(parents=True)
    lake, agents = get_scenario("frozen-lake"), {"player": make_agent("optimal")}
    episodes = [
        asyncio.run(play_episode(lake, agents, start_seed=start, chance_seed=chance, sampling_seed=sampling))
        for start, chance, sampling in episode_seeds(lake, 3, "test")
    ]
    record.write_text("".join(episode.model_dump_json() + "\n" for episode in episodes))
    assert Job("aaw", 0, tmp_path / "aaw" / "seed-0", config).test_values() == [1.0, 1.0, 1.0]


def test_a_run_that_lost_rows_is_no_curve(tmp_path: Path) -> None:
    rows = [{"kind": "eval", "step": 0, "score": "success", "success": 0.0}]
    for step in (1, 2):
        rows.append({"kind": "train", "step": step, "rollout/turns": 5.0, "time/total": float(step)})
    rows.append({"kind": "eval", "step": 2, "score": "success", "success": 0.5})
    whole = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / METRICS).write_text("".join(whole))
    assert curve(tmp_path, 2)["answers"] == [0.0, 10.0]
    for lost in range(len(whole)):
        (tmp_path / METRICS).write_text("".join(whole[:lost] + whole[lost + 1 :]))
        with pytest.raises(RunError, match="lacks rows"):
            curve(tmp_path, 2)


def test_a_study_goes_on_after_a_setting_was_added_or_renamed(tmp_path: Path) -> None:
    """Its runs had the default; another value is another study, and a damaged file is none."""
    (tmp_path / "study.toml").write_text(STUDY)
    study, file = load_study(tmp_path / "study.toml"), tmp_path / "study.json"
    _same_study(study, tmp_path)
    fixed = json.loads(file.read_text())
    del fixed["arms"]["aaw"]["gate"]
    file.write_text(json.dumps(fixed))
    _same_study(study, tmp_path)
    for arm in fixed["arms"].values():
        del arm["backend"]
        arm["engine"] = "here"  # as it was called at first
    file.write_text(json.dumps(fixed))
    _same_study(study, tmp_path)
    fixed["arms"]["aaw"]["gate"] = "true-words"
    file.write_text(json.dumps(fixed))
    with pytest.raises(UsageError, match="other arms"):
        _same_study(study, tmp_path)
    for damaged in ("{", "[]", "{}", '{"arms": {"aaw": {"unknown": 1}}}', '{"arms": {"aaw": 1}}'):
        file.write_text(damaged)
        with pytest.raises(UsageError, match="no study of this version"):
            _same_study(study, tmp_path)


def test_what_a_killed_lab_left_behind_is_waited_for(tmp_path: Path) -> None:
    """A run holds the lock of its lab, which the kernel frees with the last process that has it."""
    with (tmp_path / "lab.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        left = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()])
    said: list[str] = []

    def told(text: str) -> None:
        said.append(text)
        assert left.stdin is not None
        left.stdin.close()  # which it waits for, and then ends

    with _alone(tmp_path, told):
        assert left.wait(60) == 0
    assert len(said) == 1
    assert "waiting" in said[0]
    with _alone(tmp_path, said.append):
        assert len(said) == 1


@pytest.mark.slow
def test_a_stopped_study_leaves_no_run_behind_and_a_run_that_fails_is_named(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    study = subprocess.Popen(command(file, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    folder = out / "aaw" / "seed-0"  # of two that begin together, under load either may be far ahead
    deadline = time.monotonic() + 240
    with ended(study):
        while not (done(out) and (folder / "config.json").is_file()) and time.monotonic() < deadline:
            time.sleep(0.1)
        study.send_signal(signal.SIGTERM)
        _, said = study.communicate(timeout=120)
    assert study.returncode == 130
    assert "the same command goes on" in said
    assert processes_in(out) == []
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"learning_rate": 0.5}))
    (folder / "summary.json").unlink(missing_ok=True)
    failed = subprocess.run(command(file, out, "--workers", "1"), capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "ended with 2" in failed.stderr
    assert "learning_rate" in failed.stderr


def test_the_command_to_watch_a_run_names_what_a_person_has_to_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted, the one that was printed showed no board of a game of one's own."""
    monkeypatch.setattr(Job, "commands", lambda job, episodes: [["false"]])
    nim = f"{ROOT}/examples/nim.py:scenario"
    study = Study(question="?", scenario=nim, seeds=1, settings={"opponent": "random"}, arms={"a": {}})
    job = Job("a", 0, tmp_path / "seed-0", study.config("a", 0))
    told: list[str] = []
    with (tmp_path / "lab.lock").open("w") as lock, pytest.raises(RunError, match="ended with 1"):
        _Crew([job], 4, told.append, lock.fileno())._run(job)
    assert told == [f"a, seed 0 is running; to watch it: msgrpo --allow {nim} play --run {job.folder}"]


def test_equal_seeds_of_two_arms_differ_by_nothing_and_budgets_are_the_smallest() -> None:
    short, long = ({"updates": [0, 1], "answers": [0, n], "seconds": [0, 1], "score": [0.0, 1.0]} for n in (10, 20))
    values = {"a": [[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]], "b": [[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]}
    study = {"question": "?", "scenario": "frozen-lake", "seeds": 2, "test_episodes": 3}
    report = reported(study, values, {"a": [short, short], "b": [long, long]})
    assert report["arms"]["b"]["difference"]["mean"] == 0.0
    assert all(map(math.isnan, report["arms"]["b"]["difference"]["interval"]))  # of six equal values there is none
    assert report["arms"]["a"]["by_seed"] == pytest.approx([1 / 3, 2 / 3])
    assert report["budget"] == {"answers": 10, "seconds": 1}
    assert report["arms"]["b"]["at_equal_answers"] == {"mean": 0.5, "by_seed": [0.5, 0.5]}
    assert "| b |" in markdown(report)
    assert "2 seeds an arm" in markdown(report)
    early = reported(study | {"seeds": 8}, values, {"a": [short, short], "b": [long, long]})
    assert "2 of 8 seeds an arm" in markdown(early)
    one = {arm: of_arm[:1] for arm, of_arm in values.items()}
    alone = reported(study | {"seeds": 1}, one, {"a": [short], "b": [long]})
    assert "1 seed an arm, 3 test starts" in markdown(alone)


def test_a_study_of_a_game_of_two_is_tested_in_matches(tmp_path: Path) -> None:
    """It failed after all its training; and the mean over both seats of a zero-sum game would be 0 whatever was
    learnt.
    """
    file, out = tmp_path / "duel.toml", tmp_path / "out"
    said = STUDY.replace('scenario = "frozen-lake"', 'scenario = "snake-duel"').replace(
        "test_episodes = 4", "test_episodes = 2"
    )
    file.write_text(
        said.replace('[arms.uniform]\nselect = "uniform(keep=2)"\n', "")
        .replace("steps = 2", "steps = 1\nmax_tokens = 4")
        .replace("4(every=1", "1(every=1")
    )
    study = load_study(file)
    assert study.opponent() == "optimal"
    told: list[str] = []
    report = run(study, out, 1, told.append)
    assert told == [
        f"aaw, seed 0 is running; to watch it: msgrpo play --run {out / 'aaw' / 'seed-0'}",
        "1 of 1 runs: aaw, seed 0 is done",
    ]
    ((values,),) = [found["values"] for found in report["arms"].values()]
    assert len(values) == 2
    assert set(values) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    (record,) = out.glob("aaw/seed-0/test/match/*.jsonl")
    assert len(record.read_text().splitlines()) == 4
    assert run(study, out, 1, print) == report  # nothing is played twice

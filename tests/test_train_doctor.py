"""Why a run does not learn: healthy runs and sick ones, looked at again by their rows; and the command."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msgrpo.episode import Turn
from msgrpo.errors import MsgrpoError, UsageError
from msgrpo.prompt import make_template
from msgrpo.run_log import alone
from msgrpo.train import doctor
from msgrpo.train.diagnosis import CAUSES, Adviser, History, diagnose, fast_learning
from msgrpo.train.information import state_information
from tests.command_line import run

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RUNS = json.loads((RESULTS / "doctor-runs.json").read_text())["runs"]
WELL = {
    "rollout/invalid": 0.0, "rollout/truncated": 0.0, "rollout/flat_groups": 0.2, "rollout/gated_groups": 0.0,
    "rollout/success": 0.4, "rollout/entropy": 0.1, "rollout/state_information": 0.4, "rollout/action_entropy": 1.0,
    "rollout/staleness": 0.0, "engine/mismatch_mean": 1e-6, "engine/mismatch_bound": 1e-3, "update/kl": 0.01,
    "update/clip_share": 0.01, "update/grad_norm": 0.1,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "scenario": "frozen-lake",
    "base": "nano",
    "steps": 40,
    "max_tokens": 48,
    "learning_rate": 1e-3,
}


def rows_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's rows: in the result file, or those of a whole run from before."""
    if run["rows"] is not None:
        return list(run["rows"])
    return [json.loads(line) for line in (RESULTS / f"{run['name']}.metrics.jsonl").read_text().splitlines()]


def causes(*changes: dict[str, float], settings: dict[str, Any] = SETTINGS, rows: int = 6) -> list[str]:
    """What a run is told as whose updates are well but for the changes, each for `rows` updates."""
    history = [{"kind": "train", "step": i, **WELL, **change} for change in changes for i in range(rows)]
    return [finding.cause for finding in diagnose(History(settings, history))]


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_a_recorded_run_is_seen_as_the_result_file_says(run: dict[str, Any]) -> None:
    found = [finding.cause for finding in diagnose(History(run["settings"], rows_of(run)))]
    assert found == run["found"]
    assert run["right"] == (found[:1] == ([run["wanted"]] if run["wanted"] else []))


def test_no_healthy_run_is_called_sick_and_one_sick_run_is_missed() -> None:
    """The reward of `sway-lake` pays for something else than the goal, and after 12 updates nothing shows it."""
    assert [run["name"] for run in RUNS if not run["right"]] == ["sway-lake"]
    shown = {run["wanted"] for run in RUNS if run["right"]} - {None}
    assert len(shown) == len(CAUSES) - 3  # for gate, teacher and entropy collapse there are made-up rows only


def test_a_run_without_a_penalty_has_no_divergence_to_speak_of() -> None:
    for row, said in (
        (WELL, "clipped, KL was 0.01 and the gradient"),
        ({**WELL, "update/kl": None}, "clipped and the gradient"),
    ):
        found = fast_learning(History(SETTINGS, [{"kind": "train", **row, "update/clip_share": 0.2}] * 3))
        assert found is not None
        assert said in found.evidence


def test_bounds_are_crossed_one_by_one() -> None:
    assert causes({}) == []
    assert causes({"rollout/gated_groups": 1.0}) == ["gate"]
    assert causes({"teacher/failed": 40.0, "teacher/turns": 50.0}) == ["teacher fails"]
    assert causes({"teacher/failed": 20.0, "teacher/turns": 50.0}) == []
    assert causes({"rollout/invalid": 0.6}) == []  # half a dozen updates in, it may still learn the form
    assert causes({"rollout/invalid": 0.6}, rows=12) == ["no legal action"]
    assert causes({"rollout/invalid": 0.6, "rollout/truncated": 0.5}, rows=12) == ["truncation"]
    assert causes({"engine/mismatch_mean": 1e-4}) == ["engine mismatch"]
    assert causes({"engine/mismatch_mean": 0.05, "engine/mismatch_bound": 0.15}) == []  # bfloat16
    assert causes({"engine/mismatch_mean": 0.1, "engine/mismatch_bound": 0.15}) == ["engine mismatch"]
    assert causes({"engine/mismatch_mean": 5e-4, "rollout/staleness": 1.0}) == []
    assert causes({"rollout/flat_groups": 1.0}) == ["flat groups"]
    assert causes({"rollout/flat_groups": 1.0, "rollout/success": 0.0}) == ["starts too hard"]
    assert causes({"rollout/flat_groups": 1.0, "rollout/success": 1.0}) == ["starts too easy"]
    assert causes({}, {"rollout/flat_groups": 1.0, "rollout/success": 1.0}) == []  # that is what it has learned
    assert causes({}, {"rollout/entropy": 0.005}) == ["entropy collapse"]
    assert causes({"rollout/entropy": 0.0}) == []  # it did not fall
    assert causes({}, {"rollout/state_information": 0.001}) == ["template collapse"]
    assert causes({"rollout/state_information": 0.0}) == ["template collapse"]  # it never depended on it
    assert causes({"update/clip_share": 0.2}, {}) == ["learning rate too high"]
    assert causes({"rollout/flat_groups": math.nan, "update/kl": math.nan}) == []


@pytest.mark.parametrize(
    ("prompt", "chat", "asked"),
    [
        ("brief", {}, ""),
        ("none", {"enable_thinking": False}, " --prompt none --chat '{\"enable_thinking\": false}'"),
        ('{"history": 2}', {}, ' --prompt \'{"name": "given", "history": 2}\''),
    ],
)
def test_a_base_is_to_be_taught_as_its_run_asks_it(prompt: str, chat: dict[str, Any], asked: str) -> None:
    """It was to be taught with the usual prompt, and then gave no legal action where it was asked with the run's."""
    settings = SETTINGS | {"prompt": make_template(prompt).model_dump(), "chat": chat}
    run = History(settings, [{"kind": "train", **WELL, "rollout/invalid": 1.0}])
    (finding,) = diagnose(run)
    assert f"msgrpo teach frozen-lake{asked} --out runs/taught, then" in finding.change


def test_one_update_that_stands_out_is_no_trend() -> None:
    assert causes({}, {"update/grad_norm": 50.0}, {}, rows=1) == []
    assert causes({}, {"update/grad_norm": 50.0}, {"update/grad_norm": 1.2}) == ["learning rate too high"]


def test_a_real_model_that_learned_is_healthy_and_one_that_broke_is_not() -> None:
    settings = SETTINGS | {"base": "qwen", "max_tokens": 16, "learning_rate": 2.5e-4}
    learned, broke = ({"name": name, "rows": None} for name in ("gpu-lake-seed-0", "qwen-lake-seed-0"))
    assert diagnose(History(settings, rows_of(learned))) == []
    (finding,) = diagnose(History(settings, rows_of(broke)))
    assert finding.cause == "learning rate too high"
    assert "learning_rate=2.5e-05 (it was 0.00025)" in finding.change


def test_what_has_learned_may_be_alike() -> None:
    """Low entropy and flat groups after a rise beyond chance are what learning looks like."""
    flat = {"kind": "train", **WELL, "rollout/flat_groups": 1.0, "rollout/entropy": 0.001}
    rows = [{"kind": "train", **WELL}] * 6 + [flat] * 6
    ends = [
        {"kind": "eval", "step": step, "values": [value] * 20 + [0.0] * 5} for step, value in ((0, 0.0), (12, 1.0))
    ]
    assert diagnose(History(SETTINGS, [ends[0], *rows, ends[1]])) == []
    assert diagnose(History(SETTINGS, [*ends[::-1], *rows]))


def test_a_base_that_is_not_nano_is_taught_too() -> None:
    settings = SETTINGS | {"base": "some/model", "scenario": "cards.py:scenario@0.5,snake@0.5"}
    (finding,) = diagnose(History(settings, [{"kind": "train", "step": 1, **WELL, "rollout/invalid": 1.0}]))
    assert "msgrpo teach cards.py:scenario --base some/model --out runs/taught" in finding.change


@pytest.mark.parametrize("base", ["runs/taught", "./runs/taught", str(Path("runs/taught").resolve())])
def test_a_taught_base_is_taught_further_in_another_folder(base: str) -> None:
    """It was to be taught into its own folder, which `msgrpo teach` refuses."""
    settings = SETTINGS | {"base": base}
    (finding,) = diagnose(History(settings, [{"kind": "train", "step": 1, **WELL, "rollout/invalid": 1.0}]))
    assert f"--base {base} --out {base}-2, then --base {base}-2" in finding.change


def test_the_adviser_says_a_cause_once() -> None:
    notes: list[str] = []
    adviser = Adviser(SETTINGS, [], notes.append)
    adviser.evaluation(0, {"score": "success", "success": 0.1, "values": [0.0]})
    for step in range(1, 4):
        adviser.update(step, WELL | {"rollout/truncated": 1.0, "rollout/invalid": 1.0})
    adviser.evaluation(3, {"score": "success", "success": 0.1, "values": [0.0]})
    (note,) = notes
    assert note.startswith("truncation: 100% of the answers were cut off at max_tokens=48")


def test_more_tokens_are_named_than_a_short_answer_needs() -> None:
    """Four times three tokens would still end no answer."""
    cut = {"kind": "train", "step": 1, **WELL, "rollout/truncated": 1.0, "rollout/invalid": 1.0}
    for before, after in ((3, 48), (12, 48), (48, 192)):
        (finding,) = diagnose(History(SETTINGS | {"max_tokens": before}, [cut]))
        assert f"--set max_tokens={after} " in finding.change


def test_answers_that_were_sampled_too_warm_need_neither_more_tokens_nor_a_lesson() -> None:
    """A run of nano at temperature 4: 81 % of its answers were cut off, and 97 % held no legal action."""
    for cut in (0.81, 0.1):
        row = {"kind": "train", "step": 1, **WELL, "rollout/truncated": cut, "rollout/invalid": 0.97}
        for warm, named in ((4.0, True), (1.0, False)):
            (finding,) = diagnose(History(SETTINGS | {"temperature": warm}, [row]))
            assert ("temperature 4: begin with --set temperature=1" in finding.change) == named
            assert ("max_tokens" in finding.change or "teach" in finding.change) != named


def turns(pairs: list[tuple[str, str]]) -> list[Turn]:
    return [Turn(step=0, player="player", state=state, action=action) for state, action in pairs]


def test_information_is_that_of_state_and_action() -> None:
    own = turns([("a", "left"), ("b", "right")] * 50)
    found = state_information(own)
    assert found["rollout/action_entropy"] == pytest.approx(math.log(2))
    assert found["rollout/state_information"] == pytest.approx(math.log(2), abs=0.02)
    assert state_information(turns([("a", "left"), ("b", "left")] * 50))["rollout/state_information"] == 0.0
    assert state_information(turns([(str(i), "left") for i in range(100)])) == {}  # no state twice: nothing is known
    generator = np.random.default_rng(1)
    drawn = turns([(str(s), str(a)) for s, a in generator.integers(0, (150, 4), (600, 2))])
    by_chance = state_information(drawn)
    assert by_chance["rollout/state_information"] < 0.06  # uncorrected it would be 0.37
    assert by_chance["rollout/action_entropy"] > 1.3


def folder_of(run: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS | run["settings"]))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(run)))
    return folder


def shown(*arguments: str) -> str:
    return str(run("doctor", *arguments, env={"COLUMNS": "200"}).output)


def test_the_command_names_the_cause_and_shows_a_healthy_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sick = folder_of(next(run for run in RUNS if run["name"] == "cut-off"), tmp_path / "sick")
    text = shown(str(sick))
    assert "truncation" in text
    assert "max_tokens=64" in text
    assert "a healthy run" in text
    data = json.loads(shown(str(sick), "--json"))
    assert data["findings"][0]["cause"] == "truncation"
    assert data["healthy"]["scenario"] == "frozen-lake"
    assert data["healthy"]["curve"][0] == [0, 0.285]
    well = folder_of(next(run for run in RUNS if run["name"] == "frozen-lake-seed-0"), tmp_path / "well")
    text = shown(str(well))
    assert "nothing ails it" in text
    assert "the score has risen: +0.625" in text


@pytest.mark.parametrize(("updates", "said"), [(0, "too early to say: 0 updates ended"), (5, "nothing ails it")])
def test_a_run_that_has_hardly_begun_is_not_called_healthy(tmp_path: Path, updates: int, said: str) -> None:
    """A run that ended in its first update, by a fault of its credit, was said to have no ailment."""
    run = dict(next(run for run in RUNS if run["name"] == "frozen-lake-seed-0"))
    folder = folder_of(run, tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["step"] <= updates]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert said in shown(str(folder))


def test_a_run_that_was_cut_off_is_said_to_have_stopped(tmp_path: Path) -> None:
    """Of a killed run it said only that there are no two evaluations to compare yet."""
    folder = folder_of(next(run for run in RUNS if run["name"] == "frozen-lake-seed-0"), tmp_path / "run")
    (folder / ".lock").write_text(socket.gethostname())  # nobody holds it
    assert "(stopped before its end)" in shown(str(folder))
    (folder / "summary.json").write_text("{}")
    assert "stopped" not in shown(str(folder))


def test_a_run_that_has_just_begun_is_to_be_waited_for(tmp_path: Path) -> None:
    """It was told to go on with --resume, which is refused while it trains."""
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    with alone(tmp_path), pytest.raises(UsageError, match="has no update and no evaluation yet") as none:
        shown(str(tmp_path))
    assert none.value.fix == "it goes on: its first evaluation is to come"


def test_what_a_runs_files_say_fits_on_the_screen_and_is_no_markup(tmp_path: Path) -> None:
    """A megabyte in the place of the scenario filled the terminal; a score's name that looks like rich's markup ended
    in a traceback.
    """
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"scenario": "x" * 10**6, "base": "y" * 10**6}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 0, "score": "[/red]\x1b[31m"}))
    text = shown(str(tmp_path))
    assert len(text) < 50_000
    assert "[/red]" in text
    assert "\x1b" not in text


def test_healthy_runs_are_of_the_same_size() -> None:
    assert doctor.beside("frozen-lake", "nano") is not None
    assert doctor.beside("frozen-lake", "no/such-model") is None
    assert doctor.beside("frozen-lake-8x8", "nano") is None
    for one in doctor.healthy_runs():
        assert one.at(0) == one.curve[0][1]
        assert one.at(one.curve[-1][0] + 1) is None


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no training run"):
        shown(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"gate": "my gate.py:good"}))
    with pytest.raises(UsageError, match="has no update and no evaluation yet") as none:
        shown(str(tmp_path))
    assert none.value.fix == f"msgrpo --allow 'my gate.py:good' train --resume --out {tmp_path}"  # it can be pasted
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\nrubbish\n{"kind": "train", "step": 2}\n')
    with pytest.raises(MsgrpoError, match="damaged"):
        shown(str(tmp_path))
    strange = [
        {"kind": "train", "step": 1, "rollout/invalid": "x", "rollout/flat_groups": None, "update/kl": [1]},
        {"kind": "eval", "step": 1, "score": ["odd"], "values": {"a": 1}},
        {"kind": "eval", "step": 2, "score": "success", "success": "high", "values": ["x", None, True]},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in strange))
    assert "too early to say: 1 update ended" in shown(str(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl"])
def test_a_number_that_no_float_holds_is_damage(tmp_path: Path, file: str) -> None:
    """It ended in a traceback: int too large to convert to float."""
    huge = {file: 10**400}
    settings = {"scenario": "frozen-lake", "base": "nano", "steps": 3, "learning_rate": huge.get("config.json", 1)}
    rows = [{"kind": "train", "step": step, "grad": huge.get("metrics.jsonl", 1)} for step in (1, 2)]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(MsgrpoError, match=rf"{file}.* is damaged"):
        doctor.examine(tmp_path)

"""Records as files of other tools, read back by those tools' own libraries; and what is refused."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from msgrpo.agent import ParseFailure
from msgrpo.episode import Episode, Turn
from msgrpo.errors import MissingExtraError, RecordError, UsageError
from msgrpo.evals import huggingface, inspect_log, interchange
from msgrpo.evals.exported import played
from msgrpo.evals.leaderboard import build
from msgrpo.evals.plays import Play, load
from msgrpo.evals.record import Price, changing_run
from msgrpo.evals.suites import SUITE_VERSION, episode_seeds
from msgrpo.game import Outcome
from msgrpo.games import get_scenario
from msgrpo.install import install_command
from msgrpo.prompt import PromptTemplate
from tests.command_line import run, run_here
from tests.evals_helpers import SCENARIO, eval_here, seeded, suite_episode, write

SEEDS = episode_seeds(get_scenario(SCENARIO), 8)
SETTINGS = {"model": "m", "template": "t", "sampling": {"temperature": 0.5, "top_p": 0.9, "max_tokens": 64}}
FIRST = Turn(
    step=0, player="player", state="one", answer="<action>fly</action>", failure=ParseFailure.ILLEGAL, regret=0.25,
    prompt_tokens=100, completion_tokens=10, latency_s=0.5, finish_reason="length", reasoning="hm", retries=1,
)  # fmt: skip
LAST = Turn(
    step=1, player="player", state="two", answer="<think>so</think><action>up</action>", action="up", reward=1.0,
    prompt_tokens=200, completion_tokens=20, latency_s=0.25, finish_reason="stop", model="v7",
)  # fmt: skip


def episode(i: int, turns: list[Turn], **fields: Any) -> Episode:
    given = {"settings": {"player": SETTINGS}, "prefix": {"player": "rules: "}, "versions": {"msgrpo": "9"}}
    return suite_episode(i, turns, **(given | fields))


def failed(i: int, kind: str, turns: list[Turn], **fields: Any) -> Episode:
    said = {"error": kind, "error_message": f"the server said {kind}", "outcome": Outcome.PLAYING, "success": None}
    return episode(i, turns, **(said | fields))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A success, a failure at the second try, one that only failed, and one after the first that has not ended."""
    return write(
        tmp_path / "records",
        [
            episode(0, [FIRST, LAST]),
            failed(1, "timeout", [FIRST]),
            episode(1, [FIRST]),
            failed(2, "connection", [FIRST]),
            failed(2, "bad_request", [], prefix={}),
            episode(4, [LAST.model_copy(update={"step": 0})]),
        ],
    )


@pytest.fixture
def logs() -> Any:
    return pytest.importorskip("inspect_ai.log", reason="pip install 'msgrpo[export]'")


@pytest.fixture
def parquet() -> Any:
    return pytest.importorskip("pyarrow.parquet", reason="pip install 'msgrpo[export]'")


# ── Inspect AI ──


def test_a_log_of_inspect_holds_what_was_asked_answered_and_scored(records: Path, tmp_path: Path, logs: Any) -> None:
    done = interchange.export([records], "inspect", tmp_path / "out")
    assert (done.files, done.results, done.errors, done.failed, done.left_out) == (1, 2, 1, 2, 1)
    log = logs.read_eval_log(tmp_path / "out" / "a" / f"{SCENARIO}.eval")
    assert (log.status, log.eval.task, log.eval.task_version, log.eval.model) == (
        "success", SCENARIO, SUITE_VERSION, "a",
    )  # fmt: skip
    config = log.eval.model_generate_config
    assert (config.temperature, config.top_p, config.max_tokens) == (0.5, 0.9, 64)
    assert log.eval.model_args == {"model": "m", "template": "t"}
    assert log.eval.metadata["split"] == "test"
    assert log.eval.metadata["left_out"] == 1
    assert any("the first 2 of the suite count" in note for note in log.eval.metadata["notes"])
    assert log.eval.dataset.sample_ids == [1, 2, 3]
    assert [s.id for s in log.samples] == [1, 2, 3]
    first, second, third = log.samples
    assert first.input == "rules: one"
    assert first.target == "success"
    assert [(m.role, m.text) for m in first.messages] == [
        ("user", "rules: one"),
        ("assistant", "<action>fly</action>"),
        ("user", "rules: two"),
        ("assistant", "<think>so</think><action>up</action>"),
    ]
    assert first.messages[1].content[0].reasoning == "hm"
    assert first.messages[1].metadata["failure"] == "illegal"
    assert first.messages[1].metadata["retries"] == 1
    assert first.messages[3].model == first.output.model == "v7"
    assert first.output.completion == "<think>so</think><action>up</action>"
    assert (first.output.stop_reason, second.output.stop_reason) == ("stop", "max_tokens")
    assert first.metadata == {
        "place": 1,
        "seeds": {"start": str(SEEDS[0].start), "chance": str(SEEDS[0].chance), "sampling": str(SEEDS[0].sampling)},
        "actions": [None, "up"],
        "rewards": [0.0, 1.0],
        "regrets": [0.25, None],
        "failures": ["illegal", None],
    }
    assert (first.model_usage["a"].input_tokens, first.model_usage["a"].output_tokens) == (300, 30)
    assert first.working_time == 0.75
    assert (first.scores["success"].value, first.scores["return"].value) == (1, 1.0)
    assert (second.scores["success"].value, second.scores["return"].value) == (0, 0.0)
    assert (first.error, first.error_retries, second.error) == (None, None, None)
    assert [e.message for e in second.error_retries] == ["timeout: the server said timeout"]
    assert third.scores is None
    assert third.error.message == "bad_request: the server said bad_request"
    assert [e.message for e in third.error_retries] == ["connection: the server said connection"]


def test_the_metrics_are_inspects_and_the_leaderboards(records: Path, tmp_path: Path, logs: Any) -> None:
    scorer = pytest.importorskip("inspect_ai.scorer")
    write(records, [episode(2, [LAST]), episode(3, [FIRST, LAST])])  # now the first five have ended
    interchange.export([records], "inspect", tmp_path / "out")
    log = logs.read_eval_log(tmp_path / "out" / "a" / f"{SCENARIO}.eval")
    row = build(load([records])[0]).rows[0]
    assert row.episodes == 5
    found = {score.name: score for score in log.results.scores}
    assert list(found) == ["success", "return"]
    for name, score in found.items():
        given = [scorer.SampleScore(score=s.scores[name]) for s in log.samples]
        assert score.metrics["mean"].value == pytest.approx(scorer.mean()(given))
        assert score.metrics["stderr"].value == pytest.approx(scorer.stderr()(given))
        assert score.scored_samples == 5
    assert found["return"].metrics["mean"].value == pytest.approx(row.return_mean) == 0.8
    used = log.stats.model_usage["a"]  # failed attempts are paid as well
    assert (used.input_tokens, used.output_tokens) == (row.prompt_tokens, row.completion_tokens) == (1300, 130)


def test_a_price_is_in_the_usage_and_a_stopped_evaluation_is_cancelled(tmp_path: Path, logs: Any) -> None:
    folder = write(tmp_path / "records", [episode(0, [FIRST, LAST])])
    with changing_run(folder) as run:
        run.prices["a"] = Price(prompt=2, completion=10)
        run.asked["a"] = {SCENARIO: 200}
    interchange.export([folder], "inspect", tmp_path / "out")
    log = logs.read_eval_log(tmp_path / "out" / "a" / f"{SCENARIO}.eval")
    assert log.stats.model_usage["a"].total_cost == pytest.approx(300 * 2e-6 + 30 * 10e-6)
    assert (log.status, log.results.total_samples, log.results.completed_samples) == ("cancelled", 200, 1)


def test_an_agent_that_an_endpoint_always_failed_is_a_log_of_errors(tmp_path: Path, logs: Any) -> None:
    folder = write(tmp_path / "records", [failed(0, "connection", [], prefix={}, returns={})])
    done = interchange.export([folder], "inspect", tmp_path / "out")
    assert done.summary == "1 file: 0 episodes with a result, 1 with an error instead"
    log = logs.read_eval_log(tmp_path / "out" / "a" / f"{SCENARIO}.eval")
    assert (log.status, log.error.message) == ("error", "connection: the server said connection")
    (sample,) = log.samples
    assert sample.input == get_scenario(SCENARIO).new(SEEDS[0].start, SEEDS[0].chance).observe("player")
    assert (sample.messages, sample.output.choices, sample.scores) == ([], [], None)
    assert [(score.name, score.metrics) for score in log.results.scores] == [("success", {}), ("return", {})]


def test_agents_without_words_show_their_actions(tmp_path: Path, logs: Any) -> None:
    eval_here(tmp_path / "eval", agents=["random", "optimal"], episodes=2, scenarios=[SCENARIO, "snake"])
    result = run("export", str(tmp_path / "eval"), "--to", "inspect", "--out", str(tmp_path / "out"))
    assert "4 files: 8 episodes with a result, 0 with an error instead" in result.stderr
    paths = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert paths == [f"{agent}/{game}.eval" for agent in ("optimal", "random") for game in (SCENARIO, "snake")]
    assert len(logs.list_eval_logs(str(tmp_path / "out"))) == 4
    lake, snake = (logs.read_eval_log(tmp_path / "out" / "optimal" / f"{game}.eval") for game in (SCENARIO, "snake"))
    assert lake.eval.metadata["messages"].startswith("This agent answers in no words")
    assert lake.stats.model_usage == {}
    sample = lake.samples[0]
    assert [m.text for m in sample.messages if m.role == "assistant"] == sample.metadata["actions"]
    assert not sample.messages[1].metadata["answered_in_words"]
    assert sample.scores["success"].value == 1
    assert list(snake.samples[0].scores) == ["return"]
    assert snake.samples[0].target == ""


def test_what_a_body_may_have_changed_is_no_config(tmp_path: Path) -> None:
    settings = {"player": SETTINGS | {"body": {"temperature": 0}}}
    (play,), _ = load([write(tmp_path / "body", [episode(0, [LAST], settings=settings)])])
    spec = inspect_log.inspect_log(play, [], datetime.now(UTC))["eval"]
    assert spec["model_generate_config"] == {}
    assert spec["model_args"]["body"] == {"temperature": 0}
    (play,), _ = load([write(tmp_path / "odd", [episode(0, [LAST], settings={"player": {"sampling": 0.0}})])])
    assert inspect_log.inspect_log(play, [], datetime.now(UTC))["eval"]["model_generate_config"] == {}


def test_the_same_records_get_the_same_ids(records: Path) -> None:
    one, other = (inspect_log.inspect_log(load([records])[0][0], [], datetime.now(UTC)) for _ in range(2))
    assert one["eval"].pop("created") != other["eval"].pop("created")
    assert one == other
    ids = [message["id"] for sample in one["samples"] for message in sample["messages"]]
    assert len(set(ids)) == len(ids) == 6


# ── Hugging Face ──


def test_a_dataset_has_a_row_for_each_attempt(records: Path, tmp_path: Path, parquet: Any) -> None:
    done = interchange.export([records], "huggingface", tmp_path / "out")
    assert done.summary == (
        "2 files: 2 episodes with a result, 1 with an error instead, 2 more attempts that an endpoint failed; "
        "left out: 1, because earlier ones of the suite have not ended"
    )
    table = parquet.read_table(tmp_path / "out" / "data" / SCENARIO / "test.parquet")
    assert table.schema.names == list(huggingface.COLUMNS)
    rows = table.to_pylist()
    assert [(r["place"], r["error"], r["return"], r["success"], r["outcome"], r["steps"]) for r in rows] == [
        (1, None, 1.0, True, "terminated", 2),
        (2, "timeout", None, None, None, 1),
        (2, None, 0.0, False, "terminated", 1),
        (3, "connection", None, None, None, 1),
        (3, "bad_request", None, None, None, 0),
    ]
    first = rows[0]
    assert (first["scenario"], first["agent"], first["suite_version"]) == (SCENARIO, "a", SUITE_VERSION)
    assert (first["start_seed"], first["chance_seed"]) == (str(SEEDS[0].start), str(SEEDS[0].chance))
    assert first["prefix"] == "rules: "
    assert rows[4]["prefix"] is None
    assert rows[4]["error_message"] == "the server said bad_request"
    assert first["settings"].startswith('{"model": "m"')
    for turn, given in zip(first["turns"], (FIRST, LAST), strict=True):
        assert turn == {name: getattr(given, name) for name in huggingface.TURN_COLUMNS}


def test_a_card_says_of_each_split_what_it_is_by_itself() -> None:
    """A dataset of validation episodes alone said that they are "the same", of what was not there."""
    for split in ("test", "validation"):
        assert huggingface.SPLITS[split].startswith(f"the beginning of the suite, version {SUITE_VERSION}, on starts")


def test_the_card_names_files_that_are_there_and_every_column(records: Path, tmp_path: Path, parquet: Any) -> None:
    yaml = pytest.importorskip("yaml", reason="inspect-ai brings it")
    slippery = "frozen-lake-slippery"
    write(records, [episode(0, [LAST], scenario=slippery), episode(0, [LAST], agent="</b>|[x](y)", chance_seed=5)])
    exported = interchange.export([records], "huggingface", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    read = yaml.safe_load(front)
    assert read["size_categories"] == ["n<1K"]
    assert "license" not in read
    configs = {
        one["config_name"]: {files["split"]: files["path"] for files in one["data_files"]} for one in read["configs"]
    }
    lake, other, slip = (
        f"data/{SCENARIO}/test.parquet", f"data/{SCENARIO}/other.parquet", f"data/{slippery}/test.parquet",
    )  # fmt: skip
    assert configs["default"] == {"test": [lake, slip], "other": [other]}
    assert configs[SCENARIO] == {"test": [lake], "other": [other]}
    assert configs[slippery] == {"test": [slip]}
    assert {path for splits in configs.values() for paths in splits.values() for path in paths} == {
        p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.parquet")
    }
    (foreign,) = parquet.read_table(tmp_path / "out" / other).to_pylist()
    assert (foreign["place"], foreign["suite_version"], foreign["chance_seed"]) == (None, None, "5")
    assert any("belong to no suite" in note for note in exported.notes)
    assert "2 agents played 2 text games: 4 episodes with a result, and 3 attempts that an endpoint failed." in body
    for name, (_, what) in [*huggingface.COLUMNS.items(), *huggingface.TURN_COLUMNS.items()]:
        assert f"| `{name}` |" in body
        assert what in body
    assert "- `other`: episodes of no suite" in body
    assert "| </b>" not in body  # a name is no markup
    assert '"msgrpo": "9"' in body


def test_seeds_of_no_suite_name_their_sample(tmp_path: Path, logs: Any) -> None:
    folder = write(tmp_path / "records", [episode(0, [LAST], chance_seed=2**70), episode(0, [LAST])])
    interchange.export([folder], "inspect", tmp_path / "out")
    log = logs.read_eval_log(tmp_path / "out" / "a" / f"{SCENARIO}.eval")
    assert {sample.id for sample in log.samples} == {1, f"{SEEDS[0].start}-{2**70}-{SEEDS[0].sampling}"}
    assert log.eval.task_version == "seeds of no suite"
    assert log.eval.metadata["split"] is None


@pytest.mark.parametrize(("rows", "name"), [(999, "n<1K"), (1000, "1K<n<10K"), (999_999, "100K<n<1M")])
def test_sizes_are_named_as_the_hub_names_them(rows: int, name: str) -> None:
    assert huggingface._size(rows) == name


# ── what is refused, and what is left behind ──


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_that_holds_something_else_is_not_touched(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], parquet: Any
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    assert run_here(monkeypatch, "export", str(records), "--to", "huggingface", "--out", str(out)) == 2
    told = capsys.readouterr().err
    assert f"{out} holds something else: thesis.tex" in told
    assert "give another --out" in told
    assert "Traceback" not in told
    assert contents(out) == {"thesis.tex": b"mine"}


def test_somebody_elses_readme_is_not_replaced(records: Path, tmp_path: Path, parquet: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("# My project")
    with pytest.raises(UsageError, match=r"something else: README\.md"):
        interchange.export([records], "huggingface", tmp_path / "out")
    assert contents(tmp_path / "out") == {"README.md": b"# My project"}


def test_a_file_is_no_folder(records: Path, tmp_path: Path, parquet: Any) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        interchange.export([records], "huggingface", tmp_path / "out")
    with pytest.raises(RecordError, match="cannot be written"):
        interchange.export([records], "huggingface", tmp_path / "out" / "below")


def test_an_export_of_the_same_agents_is_replaced(records: Path, tmp_path: Path, parquet: Any) -> None:
    out = tmp_path / "out"
    (out / interchange.PART / "data").mkdir(parents=True)
    (out / interchange.PART / "data" / "torn").write_text("an export that was killed")
    interchange.export([records], "huggingface", out)
    assert set(contents(out)) == {"README.md", f"data/{SCENARIO}/test.parquet"}
    write(records, [episode(2, [LAST]), episode(3, [LAST])])
    interchange.export([records], "huggingface", out)
    assert set(contents(out)) == {"README.md", f"data/{SCENARIO}/test.parquet"}
    assert parquet.read_table(out / "data" / SCENARIO / "test.parquet").num_rows == 8


def test_files_are_whole_or_as_they_were(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parquet: Any
) -> None:
    out = tmp_path / "out"
    interchange.export([records], "huggingface", out)
    before = contents(out)
    write(records, [episode(2, [LAST]), episode(3, [LAST])])

    def full(path: Path, text: str, **_: Any) -> int:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RecordError, match="cannot be written: No space left"):
        interchange.export([records], "huggingface", out)
    assert contents(out) == before
    with pytest.raises(RecordError, match="No space left"):
        interchange.export([records], "huggingface", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_does_not_mix_is_refused_with_its_reason(records: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b", [episode(0, [LAST], agent="b", settings={"player": {"template": "u"}})])
    with pytest.raises(RecordError, match="template differs between agents") as refused:
        interchange.export([records, other], "inspect", tmp_path / "out")
    assert refused.value.fix == "compare them apart"  # there is no --mix here
    assert not (tmp_path / "out").exists()


def test_a_number_that_no_column_holds_is_a_damaged_record(records: Path, tmp_path: Path, parquet: Any) -> None:
    write(records, [failed(2, "timeout", [FIRST.model_copy(update={"step": 2**80})])])
    with pytest.raises(RecordError, match="cannot hold what was recorded") as refused:
        interchange.export([records], "huggingface", tmp_path / "out")
    assert refused.value.fix == "the record is damaged: msgrpo verify FILE"
    assert not (tmp_path / "out").exists()


def test_records_with_nothing_that_counts_are_no_export(tmp_path: Path) -> None:
    folder = write(tmp_path / "records", [episode(3, [LAST])])
    with pytest.raises(RecordError, match="nothing to export: a has no result that counts"):
        interchange.export([folder], "huggingface", tmp_path / "out")


def test_an_unknown_tool_is_named_with_those_that_are_known(records: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is exported to 'hugingface'") as refused:
        interchange.export([records], "hugingface", tmp_path / "out")
    assert refused.value.fix == "did you mean huggingface?"


@pytest.mark.parametrize(("to", "package"), [("inspect", "inspect_ai"), ("huggingface", "pyarrow")])
def test_a_missing_package_is_told_with_its_extra(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as missing:
        interchange.export([records], to, tmp_path / "out")
    assert missing.value.fix == install_command("export")
    assert not (tmp_path / "out").exists()


def test_repeats_belong_to_the_suite() -> None:
    seeds = episode_seeds(get_scenario("frozen-lake"), 3, repeats=2)
    found = {s: episode(0, [], **seeded(s)) for s in seeds}
    assert [one.place for one in played(Play("a", "frozen-lake", {}, found, repeats=2))] == [1, 2, 3, 4, 5, 6]


def test_messages_are_what_was_asked_history_and_system_included() -> None:
    template = PromptTemplate(name="h", system="Win.", history=1, instructions="{rules}\nState: ")
    asked = episode(0, [FIRST, LAST], settings={"player": {"model": "m", **template.settings}})
    system, user, _ = inspect_log.turn_messages(asked, asked.turns[1])
    assert (system["role"], system["content"]) == ("system", "Win.")
    assert user["content"].endswith("State: one\nYou chose no legal action.\nState: two")

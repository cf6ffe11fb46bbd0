"""Files are whole, or as they were before: after a kill, and where the disk refuses."""

from __future__ import annotations

import asyncio
import os
import pwd
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import Mock

import pytest

from msgrpo.cli import main
from msgrpo.episode import MAKES_RECORDS, play_episode, read_episodes
from msgrpo.errors import MsgrpoError, RecordError, UsageError
from msgrpo.evals.partial import Partial
from msgrpo.evals.record import changing_run
from msgrpo.evals.suites import EpisodeSeeds
from msgrpo.files import is_part, replace_bytes, replace_json, replace_text, replacing_folder
from msgrpo.games import get_scenario
from msgrpo.models.gguf_file import cache_folder, parameters
from msgrpo.models.paths import shipped_adapters
from msgrpo.outside_code import module_at
from msgrpo.prompt import make_template
from msgrpo.references import RandomAgent
from msgrpo.run_log import LOCK, alone, goes_on
from msgrpo.specs import learned_as, make_agent
from msgrpo.train.config import settings_given
from msgrpo.train.dqn import REPLAY, _load
from msgrpo.train.lab import _alone, load_study
from msgrpo.train.nano import begun
from msgrpo.tui.choices import memory_file
from msgrpo.tui.keys import read_keys
from msgrpo.tui.launch import check_specs
from tests.command_line import invoked, run

WRITES = """
import sys
from pathlib import Path
from msgrpo.files import replace_text
while True:
    for letter in "ab":
        replace_text(Path(sys.argv[1]), letter * 5_000_000)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    for wait in (0.0, 0.003, 0.011):
        with subprocess.Popen([sys.executable, "-c", WRITES, str(file)], cwd=Path(__file__).parents[1]) as writer:
            while not file.exists():
                assert writer.poll() is None
                time.sleep(0.001)
            time.sleep(wait)
            writer.kill()
        assert file.read_text() in ("a" * 5_000_000, "b" * 5_000_000)
        file.unlink()


def test_json_that_is_written_can_be_read_by_other_programs(tmp_path: Path) -> None:
    """Numbers that JSON does not have are null: NaN, as json.dumps writes it, is refused by other readers."""
    replace_json(tmp_path / "facts.json", {"loss": float("nan"), "steps": (1, 2)})
    assert (tmp_path / "facts.json").read_text() == '{\n  "loss": null,\n  "steps": [\n    1,\n    2\n  ]\n}\n'


def test_what_the_disk_refuses_leaves_what_was_there(tmp_path: Path) -> None:
    """The limit on a file's size stops the write on its way, as a full disk does. The system's error names no file,
    and the command line writes an error without one as a traceback.
    """
    file, folder = tmp_path / "file.txt", tmp_path / "folder"
    replace_text(file, "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            replace_bytes(file, b"x" * 2000)
        with pytest.raises(OSError, match="File too large") as refused_folder, replacing_folder(folder) as part:
            (part / "file.txt").write_bytes(b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file.txt", "before")]
    assert (refused.value.filename, refused_folder.value.filename) == (str(file), str(folder))


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_appears_whole_or_not_at_all(full: bool, tmp_path: Path) -> None:
    """While it is written its place is as it was, and so it stays where the writing fails or is interrupted."""
    place = tmp_path / "step-1"
    place.mkdir()
    if full:
        (place / "before").touch()

    def write(stopped: type[BaseException]) -> None:
        with replacing_folder(place, full=full) as part:
            (part / "half").touch()
            assert is_part(part)
            raise stopped

    for stopped in (OSError, KeyboardInterrupt):
        with pytest.raises(stopped):
            write(stopped)
        assert [one.name for one in place.iterdir()] == ["before"] * full
    with replacing_folder(place, full=full) as part:
        (part / "whole").touch()
    assert list(tmp_path.rglob("*")) == [place, place / "whole"]


def test_a_folder_with_a_folder_in_it_is_put_in_place(tmp_path: Path) -> None:
    """A tokenizer with several chat templates writes one, and its model could not be exported."""
    with replacing_folder(tmp_path / "model") as part:
        (part / "templates").mkdir()
        (part / "templates" / "tools.jinja").touch()
    assert (tmp_path / "model" / "templates" / "tools.jinja").is_file()


def test_a_folder_that_holds_something_is_replaced_only_where_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(OSError, match="not empty"), replacing_folder(tmp_path / "mine"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine", tmp_path / "mine" / "notes.txt"]


def test_text_is_written_in_utf8_in_any_locale(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from msgrpo.files import replace_text\n"
    program += "replace_text(Path(sys.argv[1]), '\\u03c8 \\u2192')"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "file")], env=environment, cwd=root, check=True)
    assert (tmp_path / "file").read_bytes().decode() == "ψ →"


@pytest.mark.parametrize(
    "read",
    [
        lambda file: settings_given(file=file), load_study, parameters, read_keys,
        lambda file: begun.taking_over(file, "planned").__enter__(), lambda file: _load(Mock(), file.parent),
    ],
    ids=["train --config", "lab", "gguf", "keys", "teach and nano build", "train-dqn"],
)  # fmt: skip
def test_a_pipe_that_a_person_or_a_folder_names_is_not_waited_for(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    """The fault: each of these commands waited for ever; of runs, records and bases it had been mended before."""
    os.mkfifo(tmp_path / REPLAY)
    with ThreadPoolExecutor(1) as waiting:
        reading = waiting.submit(read, tmp_path / REPLAY)
        ended = wait_for([reading], timeout=60).done
        if not ended:
            os.close(os.open(tmp_path / REPLAY, os.O_WRONLY))  # let it read nothing, and end
    assert ended
    assert isinstance(reading.exception(), MsgrpoError | OSError)  # `alone_in` makes one sentence of the second
    assert "regular file" in f"{reading.exception()} {reading.exception().__cause__}"


@pytest.mark.parametrize(
    ("name", "lock"),
    [(LOCK, alone), (".run.json.lock", changing_run), ("lab.lock", lambda out: _alone(out, print))],
    ids=["run", "evaluation", "study"],
)
def test_a_lock_is_made_in_its_folder_and_nowhere_else(
    name: str, lock: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    """The fault: a lock that was a pipe was waited for, and of one that was a link the file that it leads to was
    emptied: somebody's run, resumed, could empty any file.
    """
    theirs, out = tmp_path / "theirs.txt", tmp_path / "out"
    out.mkdir()
    theirs.write_text("kept")
    (out / name).symlink_to(theirs)
    with pytest.raises((OSError, RecordError), match=r"it is a link, .*: remove it"), lock(out):
        pass
    assert theirs.read_text() == "kept"
    (out / name).unlink()
    os.mkfifo(out / name)
    held = os.open(out / name, os.O_RDWR)  # with both its ends open nobody waits for the other
    with pytest.raises((OSError, RecordError), match="no regular file"), lock(out):
        pass
    os.close(held)


def test_a_lock_that_holds_no_text_is_a_lock(tmp_path: Path) -> None:
    """It was a traceback, of train and play."""
    (tmp_path / LOCK).write_bytes(b"\xff\xfe")
    assert goes_on(tmp_path) is None
    with alone(tmp_path):
        assert goes_on(tmp_path)


def test_the_answers_of_an_interrupted_evaluation_are_written_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("kept")
    (tmp_path / ".lake.turns.part").symlink_to("theirs.txt")
    lake = get_scenario("frozen-lake")
    partial = Partial(tmp_path / "lake.jsonl", {}, set())
    episode = asyncio.run(play_episode(lake, {"player": RandomAgent()}, start_seed=0, chance_seed=0, sampling_seed=0))
    episode.turns[-1].answer = "<action>up</action>"
    partial.add(EpisodeSeeds(0, 0, 0), episode)
    partial.close(ended=False)
    assert (tmp_path / "theirs.txt").read_text() == "kept"
    again = Partial(tmp_path / "lake.jsonl", {}, set())
    assert [turn.answer for turn in again._begun[EpisodeSeeds(0, 0, 0)][0]] == ["<action>up</action>"]
    again.path.write_text(again.path.read_text().replace('"step":', '"of_tomorrow": 1, "step":'))
    with pytest.raises(RecordError, match=r"another version of msgrpo: 0\.of_tomorrow"):  # they would be paid again
        Partial(tmp_path / "lake.jsonl", {}, set())


@pytest.mark.parametrize("way", ["teach frozen-lake --out {}/model", "nano build --out {}/model"])
def test_a_folder_that_is_a_file_is_one_sentence(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault: a traceback, as for all that the system refuses where a command had not thought of it."""
    (tmp_path / "notes.txt").touch()
    monkeypatch.setattr("sys.argv", ["msgrpo", *way.format(tmp_path / "notes.txt").split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "notes.txt" in capsys.readouterr().err


def test_a_home_is_found_behind_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell does so, and --out=~/x made a folder that is called ~ in the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    run("eval", "random", "--scenario", "frozen-lake", "--episodes", "1", "--out=~/records")
    assert (tmp_path / "records" / "leaderboard.json").is_file()
    assert not any((tmp_path / "here").iterdir())
    nobody = invoked("eval", "random", "--out=~nobody-of-this-name/x")
    assert "nobody has this home" in str(nobody.exception)
    (tmp_path / "plain").symlink_to(shipped_adapters()["frozen-lake"])
    (tmp_path / "own.txt").write_text("Play well.")
    (tmp_path / "own.py").write_text("number = 7")
    check_specs(make_agent, "adapter:~/plain")  # `play` looked for a folder that is called ~
    assert learned_as("adapter:~/plain") == learned_as(f"adapter:{tmp_path}/plain")
    assert make_template("~/own.txt").instructions == "Play well."
    assert module_at("~/own.py", "~/own.py:number", "").number == 7


def test_the_command_that_takes_a_damaged_line_out_does_that(tmp_path: Path) -> None:
    file = tmp_path / "a record.jsonl"
    file.write_text("\n{\n\n")
    with pytest.raises(RecordError, match=r"a record\.jsonl:2 is no episode") as caught:
        list(read_episodes(file))
    subprocess.run(str(caught.value.fix).partition("taken out with: ")[2], shell=True, check=True)
    assert list(read_episodes(file)) == []
    file.unlink()
    with pytest.raises(RecordError) as gone:
        list(read_episodes(file))
    assert gone.value.fix == MAKES_RECORDS


@pytest.mark.parametrize("asked", [cache_folder, memory_file, read_keys])
def test_a_user_without_a_home_is_told_to_name_one(
    asked: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a number without a name in a container: `msgrpo doctor` and the app were tracebacks."""
    for variable in ("HOME", "MSGRPO_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(UsageError, match="has no home folder") as refused:
        asked()
    assert "HOME=" in str(refused.value.fix)

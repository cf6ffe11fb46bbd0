"""What a record, a run's folder or a study names is data: it is never asked, loaded or imported by itself.

The fault: one press of space on somebody's unfinished record sent the API key to the URL that the record names. Its
siblings, found since: `train --resume` imported the game and the gate of a foreign run and sent the servers' key to
its `rollouts`; `lab` did both for a study; a DQN's zip and replay buffer were unpickled (`test_train_dqn.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msgrpo import doctor
from msgrpo.cli import main
from msgrpo.contract import _in_another_process
from msgrpo.episode import play_episode
from msgrpo.errors import ModelError, UsageError
from msgrpo.games import get_scenario
from msgrpo.models.asked import trained_as
from msgrpo.models.paths import NANO_DIR, check_base
from msgrpo.references import RandomAgent
from msgrpo.run_log import goes_on
from msgrpo.serve.adapters import list_runs
from msgrpo.serve.preflight import check_torchvision
from msgrpo.specs import make_agent
from msgrpo.train.config import make_config
from msgrpo.train.lab import load_study
from msgrpo.train.run_folder import resume_command
from msgrpo.trust import allow
from msgrpo.tui.app import PlayApp
from msgrpo.tui.choices import run_choices
from msgrpo.tui.records import Records
from tests.command_line import invoked
from tests.tui_helpers import ManualClock, play_screen, press, settle

LAKE = get_scenario("frozen-lake")
EVIL = "from pathlib import Path\nPath({marker!r}).touch()\nraise RuntimeError('it ran')\n"


@dataclass
class Trap:
    """A folder of somebody else's, a server that counts who asks it, and a file that is there once code has run."""

    folder: Path
    url: str
    asked: list[str] = field(default_factory=list)

    @property
    def marker(self) -> Path:
        return self.folder / "it-ran"

    @property
    def game(self) -> str:
        return f"{self.folder / 'evil.py'}:scenario"

    def is_untouched(self) -> bool:
        return not self.asked and not self.marker.exists() and not (self.folder / "versions").exists()


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    found = Trap(tmp_path, "")

    class Counting(BaseHTTPRequestHandler):
        def answer(self) -> None:
            found.asked.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_error(500)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            """Not to the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    found.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(found.marker)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("MSGRPO_API_KEY", "sk-secret-too")
    monkeypatch.chdir(tmp_path)
    yield found
    server.shutdown()
    server.server_close()


def record(trap: Trap, name: str, **changes: object) -> Path:
    """A record that breaks off after one step, changed as somebody may change it."""
    episode = asyncio.run(play_episode(LAKE, {"player": RandomAgent()}, start_seed=3, chance_seed=3, sampling_seed=3))
    held = episode.model_dump(mode="json")
    held |= {"turns": held["turns"][:1], "outcome": "playing", "success": None, "returns": {"player": 0.0}}
    held |= {"error": "timeout", "error_message": "no answer"} | changes
    file = trap.folder / "theirs" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(held) + "\n")
    return file


def spread(trap: Trap) -> None:
    """A folder with everything that can name something: records, a run that may be resumed, a study."""
    specs = [f"endpoint:{trap.url}/v1#m", f"dqn:{trap.folder}", f"adapter:{trap.folder}", "nano+human"]
    for number, spec in enumerate(specs):
        record(trap, f"{number}.jsonl", agents={"player": spec})
    record(trap, "game.jsonl", scenario=trap.game)
    for name, changed in {
        "run-game": {"scenario": trap.game},
        "run-gate": {"gate": "evil:gate"},
        "run-url": {"rollouts": f"servers(at={trap.url}, adapters=versions)"},
        "run-folder": {"rollouts": "servers(at=, adapters=versions)"},
    }.items():
        (trap.folder / name).mkdir()
        config = make_config(
            settings=["steps=1", "groups=1", "group_size=2", "select=aaw(keep=1)", "evaluation=1(film=0)"]
        )
        (trap.folder / name / "config.json").write_text(json.dumps(config.model_dump(mode="json") | changed))
        (trap.folder / name / "metrics.jsonl").write_text('{"kind": "eval", "step": 0, "score": "success"}\n')
    for name, line in {
        "game": f'scenario = "{trap.game}"\nseeds = 1\n[arms.a]\n',
        "gate": 'scenario = "frozen-lake"\nseeds = 1\n[arms.a]\ngate = "evil:gate"\n',
        "url": f'scenario = "frozen-lake"\nseeds = 1\n[arms.a]\nrollouts = "servers(at={trap.url}, adapters=a)"\n',
    }.items():
        (trap.folder / f"study-{name}.toml").write_text(f'question = "?"\n{line}')


WAYS = [
    *(f"{way} theirs/{n}.jsonl{tail}" for n in (0, 1, 2, 3, "game") for way, tail in [
        ("play --replay", " --plain"), ("view", " --plain"), ("verify", ""), ("leaderboard", ""),
        ("leaderboard", " --verify"), ("view", " --html page.html"), ("export", " --to huggingface --out hf"),
    ]),
    "verify theirs", "leaderboard theirs", "eval random --scenario frozen-lake --episodes 1 --out theirs",
    "eval random optimal --scenario snake-duel --episodes 1 --out theirs",
    *(f"{way} run-{name}{tail}" for name in ("game", "gate", "url", "folder") for way, tail in [
        ("train --resume --out", ""), ("play --plain --run", ""), ("adapters", ""), ("serve --dry-run --adapter", ""),
    ]),
    *(f"lab study-{name}.toml --out lab" for name in ("game", "gate", "url")),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_a_file_names_is_asked_or_run(way: str, trap: Trap) -> None:
    spread(trap)
    result = invoked(*way.split())
    assert trap.is_untouched(), (way, trap.asked, result.output)
    if way.startswith(("train", "lab")):
        assert isinstance(result.exception, UsageError), result.output
        assert "nothing is run or asked because a file says so" in str(result.exception)
        assert "msgrpo --allow" in str(result.exception)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(keys=st.lists(st.sampled_from(["space", "n", "enter", "t", "up", "b", "end", "escape", "right"]), max_size=12))
def test_no_key_on_somebodys_record_asks_whom_it_names(keys: list[str], trap: Trap) -> None:
    files = [
        record(trap, f"{n}.jsonl", agents={"player": spec})
        for n, spec in enumerate((f"endpoint:{trap.url}/v1#m", f"dqn:{trap.folder}"))
    ]

    async def mash(file: Path) -> None:
        app = PlayApp(make_agent, records=Records.read(file), clock=ManualClock(), plays=trap.folder / "plays")
        async with app.run_test(size=(100, 30)) as pilot:
            await settle(pilot)
            await press(pilot, "space", *keys)

    for file in files:
        asyncio.run(mash(file))
    assert trap.is_untouched()


async def test_a_record_that_ends_early_says_so_and_a_person_plays_on(trap: Trap) -> None:
    changed = {"player": f"endpoint:{trap.url}/v1#m"}
    file = await asyncio.to_thread(record, trap, "r.jsonl", agents=changed)
    app = PlayApp(
        {"random": RandomAgent()}.__getitem__, records=Records.read(file), clock=ManualClock(), plays_on="random",
        plays=trap.folder / "plays",
    )  # fmt: skip
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "end", "space")
        screen = play_screen(app)
        assert "the record ends here" in str(screen.query("AgentPanel .status").first().render())
        assert not screen.pace.playing
        await press(pilot, "t", "t")  # by hand, and then handed on to who was named
        assert screen.match.sessions[0].agents["player"].spec == "random"
        await press(pilot, "n")
        assert screen.match.last > 1
    assert trap.is_untouched()


def test_what_a_person_names_goes_on(trap: Trap) -> None:
    """The command that is printed names everything that a fresh process must be told."""
    run = trap.folder / "run"
    run.mkdir()
    config = make_config(settings=["gate=evil:gate"]).model_dump(mode="json")
    (run / "config.json").write_text(json.dumps(config))
    assert resume_command(run) == f"msgrpo --allow evil:gate train --resume --out {run}"
    result = invoked("--allow", "evil:gate", "train", "--resume", "--out", str(run))
    assert "it ran" in str(result.exception)  # a person has named it, so it was imported
    assert trap.marker.exists()


def test_nothing_in_the_present_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -c` and `python -m` look into the present folder first: in somebody else's, `msgrpo doctor` ran its
    torch.py, `games check` its numpy.py, and `serve` whatever vLLM imports. Looked for: every start of a Python in
    the packages, which the second half reads (`lab`, `beside` and the app had -P, vLLM's supervisor -I).
    """
    marker = tmp_path / "it-ran"
    for module in ("numpy", "torch", "torchvision", "json"):
        (tmp_path / f"{module}.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)
    assert doctor._ask("import numpy").returncode == 0
    check_torchvision()
    assert not list(_in_another_process(LAKE, "frozen-lake", 0, slow=False))
    assert not marker.exists()
    root = Path(__file__).parents[1]
    starts = [
        (file.name, line.strip())
        for package in ("msgrpo_agent", "train", "evals", "serve", "tui")
        for file in (root / package).rglob("*.py")
        for line in file.read_text().splitlines()
        if "sys.executable," in line
    ]
    assert len(starts) > 5
    assert [start for start in starts if '"-P"' not in start[1] and '"-I"' not in start[1]] == []


ADAPTER = NANO_DIR / "adapters" / "frozen-lake"


def _pipe(folder: Path, name: str, opened: list[str]) -> Path:
    """A copy of nano, or of an adapter of it, in which one file is a pipe; `opened` says who has opened it."""
    if not folder.exists():
        shutil.copytree(ADAPTER, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)

    def wait() -> None:
        while (folder / name).exists():
            writer = os.open(folder / name, os.O_WRONLY)  # waits until somebody reads, who then finds nothing
            opened.append(name)
            os.close(writer)

    threading.Thread(target=wait, daemon=True).start()
    return folder


def test_a_pipe_in_somebodys_folder_is_not_waited_for(tmp_path: Path) -> None:
    """The fault: `msgrpo adapters`, `doctor` and `--agent adapter:DIR` read a run's config.json or .lock that is a
    pipe, or a link to /dev/zero, for ever. Looked for: every file that is opened in a folder named by a person.
    Siblings: the start screen's list of runs, and each file of a base's folder, which transformers opens itself.
    """
    opened: list[str] = []
    run = _pipe(tmp_path / "runs" / "theirs", "config.json", opened)
    _pipe(tmp_path / "runs" / "other", "config.json", opened)
    assert [found.scenario for found in list_runs(run)] == [None]
    with pytest.raises(ModelError, match="no regular file"):
        trained_as(run)
    titles = [choice.title for choice in run_choices(tmp_path / "runs")]
    assert "other (trained)" in titles
    assert goes_on(_pipe(tmp_path / "locked", ".lock", opened)) is None
    for name in ("config.json", "tokenizer.json", "model.safetensors", "extra.safetensors"):
        base = tmp_path / f"base-{name}"
        shutil.copytree(NANO_DIR, base, ignore=shutil.ignore_patterns("adapters"))
        _pipe(base, name, opened)
        with pytest.raises(ModelError, match="is no regular file"):
            check_base(str(base))
    assert opened == []


def test_a_folder_with_the_name_of_weights_is_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(NANO_DIR, tmp_path / "base", ignore=shutil.ignore_patterns("adapters"))
    (tmp_path / "base" / "more.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"more\.safetensors: it is no regular file"):
        check_base(str(tmp_path / "base"))


LONG = "A" * 5000


@pytest.mark.parametrize(
    "way",
    [
        f"play {LONG}.py:scenario --plain", f"play --run {LONG} --plain", f"play --replay {LONG} --plain",
        f"view {LONG} --plain", f"verify {LONG}", f"leaderboard {LONG}", f"doctor {LONG}", f"adapters {LONG}",
        f"export {LONG} --to inspect --out out", f"teach frozen-lake --out {LONG}",
        f"games check {LONG}.py:scenario",
    ],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_one_sentence(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault: in these eleven commands it was a traceback (OSError 36); `lab`, `serve`, `train` and `eval` were
    right before.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["msgrpo", *way.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err) < 1000


def test_what_allows_a_study_goes_on_where_it_was_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that was printed lacked --out: pasted, it would have filled another folder."""
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text('question = "?"\nscenario = "mine.py:scenario"\nseeds = 1\n[arms.a]\n')
    monkeypatch.setattr("sys.argv", ["msgrpo", "lab", "study.toml", "--out", "my studies", "--workers", "1"])
    with pytest.raises(SystemExit):
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert "msgrpo --allow mine.py:scenario lab study.toml --out 'my studies' --workers 1" in said


def test_what_allows_the_rest_of_a_study_keeps_what_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The game was asked for alone, then the credit without the game: each printed command undid the last."""
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text(
        'question = "?"\nscenario = "mine.py:scenario"\nseeds = 1\n[arms.a]\n[arms.b]\ncredit = "mine.py:credit"\n'
    )
    for allowed in ((), ("--allow", "mine.py:credit")):
        monkeypatch.setattr("sys.argv", ["msgrpo", *allowed, "lab", "study.toml"])
        with pytest.raises(SystemExit):
            main()
        said = " ".join(capsys.readouterr().err.split())
        assert "msgrpo --allow mine.py:scenario --allow mine.py:credit lab study.toml" in said


def test_a_study_reads_no_file_into_its_prompts_that_nobody_has_named(tmp_path: Path) -> None:
    """A run's configuration was refused the same; the study's file went on to read whatever it named."""
    secret, study = tmp_path / "secret.txt", tmp_path / "study.toml"
    secret.write_text("what nobody else may read")
    line = 'question = "?"\nscenario = "frozen-lake"\nseeds = 1\n[arms.a]\nprompt = "{}"\n'
    study.write_text(line.format(secret))
    with pytest.raises(UsageError, match="names prompt"):
        load_study(study)
    study.write_text(line.format("brief"))
    assert load_study(study).config("a", 0).prompt.name == "brief"
    study.write_text(line.format(secret))
    allow([str(secret)])
    assert load_study(study).config("a", 0).prompt.instructions == "what nobody else may read"

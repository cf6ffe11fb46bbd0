"""The command: plain text, keys, records, refusals; in a real terminal and in a real browser."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from msgrpo.agent import Decision, LanguageAgent, OnText, View
from msgrpo.episode import read_episodes
from msgrpo.errors import EndpointError, MissingExtraError, MsgrpoError, RecordError, UsageError
from msgrpo.install import install_command
from msgrpo.loopback import is_loopback, is_own
from msgrpo.prompt import make_template
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.serve.preflight import free_port
from msgrpo.tui import browser, launch, plain
from msgrpo.tui.agents import LazyAgent, Table
from msgrpo.tui.export import BY_HAND, append_episode
from msgrpo.tui.keys import bindings, is_key, read_keys
from msgrpo.tui.match import new_match
from msgrpo.tui.plain import meant, play_plain
from msgrpo.tui.session import Setup
from msgrpo.tui.theme import NIGHT
from tests import command_line
from tests.browser import CHROMIUM, opened, wait_for
from tests.tui_helpers import answer, scripted

ROOT = Path(__file__).parent.parent
COMMAND = [*command_line.PROGRAM, "play"]
AGENTS = {"random": RandomAgent, "optimal": OptimalAgent}


def run(*arguments: str) -> str:
    return str(command_line.run("play", *arguments).output)


@pytest.mark.parametrize(
    ("game", "needs", "agent"),
    [
        ("snake", "", "nano"),
        ("frozen-lake~symbols", "", "nano"),
        (f"{ROOT / 'examples' / 'nim.py'}:scenario", "", "optimal"),
        ("spiel:chess", "pyspiel", "optimal"),
        ("spiel:2048", "pyspiel", "random"),
    ],
)
def test_who_plays_where_nobody_is_named_can_play_the_game(game: str, needs: str, agent: str) -> None:
    """nano played chess as if it were Frozen Lake, and lost by its first answer."""
    if needs:
        pytest.importorskip(needs)
    setup = launch.setup(game, None, None, 0, None, step=False, live=False)
    assert setup is not None
    assert setup.agent == agent


# ── plain ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_terminal_the_episode_is_text() -> None:
    text = run("frozen-lake", "--agent", "optimal", "--seed", "3")
    assert text.count("frozen-lake · seed 3 · step 0/8") == 1
    assert text.count("player: ") == text.count("reward") > 0
    assert "goal reached" in text
    assert "P" in text


def test_models_are_asked_as_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no way to ask an endpoint as its adapter was trained."""
    made: list[dict[str, Any]] = []

    def make(spec: str, *_: Any, **given: Any) -> RandomAgent:
        made.append(given)
        return RandomAgent()

    monkeypatch.setattr("msgrpo.specs.make_agent", make)
    run("frozen-lake", "--agent", "nano", "--prompt", "none", "--chat", '{"enable_thinking": false}')
    run("frozen-lake", "--agent", "nano")
    asked = [(given["template"], given["chat"]) for given in made]
    assert asked == [(make_template("none"), {"enable_thinking": False}), (None, None)]
    with pytest.raises(UsageError, match="neither a preset nor a file"):
        run("frozen-lake", "--agent", "nano", "--prompt", "brif")


@pytest.mark.parametrize(
    "given", [("--step",), ("--agent", "random", "--live"), ("--seed", "5"), ("--temperature", "0")]
)
def test_what_is_said_of_a_game_needs_one(given: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="none is named"):
        run(*given)


@pytest.mark.parametrize("option", ["--step", "--live"])
@pytest.mark.parametrize("printed", [("--plain",), ()])
def test_what_only_the_app_can_do_is_refused_where_a_game_is_printed(option: str, printed: tuple[str, ...]) -> None:
    """It was left out without a word."""
    with pytest.raises(UsageError, match=f"{option} .*, which only the app can do; .* as text") as refused:
        run("snake", "--agent", "human", option, *printed)
    assert refused.value.fix == f"leave out {option}"


def test_what_is_said_against_a_record_names_what_was_given_and_nothing_else() -> None:
    with pytest.raises(UsageError) as refused:
        run("--replay", "records.jsonl", "--seed", "3", "--against", "nano")
    said = f"{refused.value}"
    assert "records.jsonl is only shown, and nothing new is played in it; --against and --seed would be" in said
    assert "--live" not in said


def test_who_plays_on_from_a_record_has_the_temperature_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 1, whatever --temperature said."""
    given: list[Any] = []
    monkeypatch.setattr("msgrpo.tui.launch.start", lambda resolve, *_, **__: given.append(resolve))
    run("--replay", "records.jsonl", "--agent", "nano", "--temperature", "0.5")
    seat = Table(given[0]).seat("nano")
    assert isinstance(seat, LazyAgent)
    made = seat._make()
    assert isinstance(made, LanguageAgent)
    assert made.sampling.temperature == 0.5


def test_games_that_are_chosen_in_the_app_are_played_as_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("msgrpo.tui.launch.start", lambda *_, **named: given.append(named))
    run("--max-tokens", "64", "--prompt", "none")
    run()
    assert [named["options"] for named in given] == [["--max-tokens", "64", "--prompt", "none"], []]


def test_an_adapter_whose_answers_are_cut_off_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It learned with longer answers, and nothing said why they ended in the middle."""
    (tmp_path / "config.json").write_text('{"prompt": {}, "max_tokens": 300}')
    monkeypatch.setattr("msgrpo.tui.launch.start", lambda *_, **__: None)
    asked = ("snake", "--agent", "random", "--against", f"adapter:{tmp_path}")
    assert "answers of up to 300 tokens, and here they are cut off at 256; --max-tokens 300" in run(*asked)
    assert run(*asked, "--max-tokens", "300") == ""


def test_who_plays_on_from_a_record_does_not_keep_the_temperature_of_another_game() -> None:
    """Agents are made once: the last game's temperature stayed, whether the agent was there already or not."""
    made = scripted("nano", answer("up"))
    as_made = made.sampling.temperature
    table = Table(lambda spec: made)
    table.seat("nano", 0.0)
    seat = table.seat("nano")
    assert isinstance(seat, LazyAgent)
    assert seat._make() is made
    assert made.sampling.temperature == as_made != 0
    table.seat("nano", 0.0)
    assert made.sampling.temperature == 0
    table.seat("nano")
    assert made.sampling.temperature == as_made


def test_a_comparison_in_plain_text_ends_with_its_result() -> None:
    """And begins with what its signs mean, as a replay does: only a person who plays was told. Looked for: the plain
    twins of all screens (a watched run explains its own marks).
    """
    said = run("frozen-lake", "--agent", "optimal", "--against", "random", "--seed", "3", "--plain")
    assert "optimal +1" in said
    assert said.count("O hole, G goal") == 1
    assert said.count("frozen-lake · optimal · seed 3 · step 0") == 1  # two boards: whose each is
    assert said.count("frozen-lake · random · seed 3 · step 0") == 1


def test_a_person_plays_in_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed moves or their beginnings; what is none is said to be none; what was begun is recorded."""
    monkeypatch.chdir(tmp_path)
    typed = iter(["?", "sideways", "r", "down"])

    def ask(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    said = run("frozen-lake", "--agent", "human", "--plain")
    assert "Walk over the ice" in said
    assert "O hole" in said
    assert "⊥ is a turn" in said
    assert "fell in the hole" in said
    (episode,) = read_episodes(tmp_path / "plays" / "human.jsonl")
    assert [turn.action for turn in episode.turns] == ["right", "down"]


def test_a_record_of_people_that_cannot_be_written_is_told_and_the_game_has_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plays" / "human.jsonl").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda prompt: "left")
    said = run("frozen-lake", "--agent", "human", "--against", "random", "--plain")
    assert "plays/human.jsonl cannot be opened: Is a directory" in said
    assert said.index("cannot be opened") < said.rindex("random")


def test_in_plain_text_a_person_reads_no_other_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspiel")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="two people would read each other's cards"):
        run("spiel:kuhn_poker", "--agent", "human", "--against", "human", "--plain")
    monkeypatch.setattr("builtins.input", lambda ask: "Pass")
    said = run("spiel:kuhn_poker", "--agent", "human", "--against", "random", "--plain")
    assert said.count("You are player1.") > 1
    assert "You are player2." not in said


def test_a_person_of_a_plain_duel_is_told_their_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspiel")
    monkeypatch.chdir(tmp_path)
    typed, asked = iter(["e7e5", "q"]), []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return next(typed)

    monkeypatch.setattr("builtins.input", ask)
    said = run("spiel:chess", "--agent", "human", "--against", "random", "--plain")
    assert said.startswith("You are Black. Chess, 2 players.")
    assert "White: g4  reward" in said
    assert "Black: e5  reward" in said
    assert asked == ["Black> ", "Black> "]


def test_a_move_is_meant_by_its_beginning_and_its_case_counts_where_it_helps() -> None:
    assert meant("b4", ("Bb4", "b4", "b3")) == ["b4"]
    assert meant("B", ("Bb4", "c3")) == ["Bb4"]
    assert meant("e", ("e6", "e5", "f5")) == ["e6", "e5"]
    assert meant("", ("up",)) == []
    chess = {"e7e8q": "e8=Q", "e7e8r": "e8=R", "b2b4": "b4"}
    assert meant("E7E8Q", ("e8=Q", "e8=R", "b4"), chess) == ["e8=Q"]
    assert meant("e7", ("e8=Q", "e8=R", "b4"), chess) == ["e8=Q", "e8=R"]
    assert meant("b2b4", ("e8=Q", "Bb4", "b4"), chess) == ["b4"]


def test_nothing_to_choose_in_a_pipe() -> None:
    """With --plain it was said that there is no terminal, on one, too."""
    with pytest.raises(UsageError, match="the app needs a terminal"):
        run()
    with pytest.raises(UsageError, match="--plain opens no app"):
        run("--plain")


@pytest.mark.parametrize("arguments", [("snke",), ("snake", "--agent", "optmal")])
def test_wrong_names_are_refused_with_a_hint(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        run(*arguments, "--plain")
    assert "did you mean" in str(caught.value)


@pytest.mark.parametrize(
    ("game", "agent", "says"),
    [
        ("spiel:leduc_poker(players=3)", "random", "has 3 players; the app seats two"),
        ("spiel:leduc_poker", "optimal", "has no reference player"),
        ("fails.py:scenario", "random", "no start today"),
    ],
)
def test_a_game_that_cannot_begin_is_an_error_before_the_screen_is_taken(
    game: str, agent: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The screen stayed empty, and a message that went after five seconds said why."""
    pytest.importorskip("pyspiel")
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(
        "from msgrpo.game import Scenario\n"
        "def make(start, chance):\n    raise ValueError('no start today')\n"
        "scenario = Scenario('f', 'f', 'Play.', 4, 'mine', make)\n"
    )
    monkeypatch.setattr("msgrpo.tui.launch.has_screen", lambda: True)
    monkeypatch.setattr("msgrpo.tui.app.PlayApp.run", lambda app, **how: pytest.fail("the screen was taken"))
    with pytest.raises(MsgrpoError, match=says):
        run(game, "--agent", agent)


def test_an_adapter_of_nano_is_not_loaded_before_the_screen_is_taken() -> None:
    """torch takes ten seconds, in which the terminal would be empty."""

    def resolve(spec: str) -> RandomAgent:
        raise AssertionError(f"{spec} was loaded")

    launch.check_specs(resolve, "nano", "nano:frozen-lake")
    with pytest.raises(UsageError, match="no adapter for 'frozen-lke'"):
        launch.check_specs(resolve, "nano:frozen-lke")


def test_a_folder_without_an_adapter_is_not_named_as_the_place_to_train_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MsgrpoError) as caught:
        run("snake", "--agent", "adapter:", "--plain")
    assert "--out runs/frozen-lake" in str(caught.value)


def test_without_torch_plain_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msgrpo.tui.choices.find_spec", lambda name: None)
    with pytest.raises(MsgrpoError) as caught:
        run("snake", "--plain")
    assert install_command("train") in str(caught.value)
    assert "--agent optimal" in str(caught.value)


def test_a_failing_agent_ends_plain_play_with_its_error() -> None:
    def resolve(spec: str) -> RandomAgent:
        raise MissingExtraError("the agent", "train")

    with pytest.raises(MissingExtraError):
        play_plain(Setup("snake", "random"), resolve, Console(file=io.StringIO()))


async def test_as_text_too_it_is_said_who_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For half an hour nothing was, where a server took requests and answered none."""
    monkeypatch.setattr(plain, "PATIENCE_S", 0.0)
    said = asyncio.Event()

    class Slow(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            await said.wait()
            return await super().act(view)

    monkeypatch.setattr(plain, "say", lambda line: (said.set(), print(line)))
    table = Table(lambda spec: Slow())
    match = new_match(Setup("frozen-lake", "slow"), table.seat)
    await plain._play(match, table, lambda session: None)
    assert "slow … · Ctrl-C ends the game\n" in capsys.readouterr().out


def test_what_a_person_has_played_as_text_is_kept_where_the_other_agent_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost with the agent's error, and by Ctrl-C; the app keeps such a game as unfinished."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda prompt: "up")
    failing = scripted("s", answer("up"), EndpointError("connection refused", kind="connection"))
    with pytest.raises(EndpointError):
        play_plain(Setup("frozen-lake", "human", "s", seed=3), lambda spec: failing, Console(file=io.StringIO()))
    (kept,) = read_episodes(BY_HAND)
    assert [turn.action for turn in kept.turns] == ["up"]


def test_ctrl_c_ends_a_game_with_typed_moves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one did nothing: it was heard only after a line had been typed."""
    monkeypatch.chdir(tmp_path)
    lines = iter(["right", "left"])

    def typed(prompt: str) -> str:
        move = next(lines)
        if move == "left":
            signal.raise_signal(signal.SIGINT)
        return move

    monkeypatch.setattr("builtins.input", typed)
    with pytest.raises(KeyboardInterrupt):
        play_plain(Setup("frozen-lake", "human"), lambda spec: AGENTS[spec](), Console(file=io.StringIO()))
    (kept,) = read_episodes(BY_HAND)
    assert [turn.action for turn in kept.turns] == ["right"]
    assert capsys.readouterr().out == "\n"


def test_a_record_is_replayed_as_text_and_a_changed_one_refused(tmp_path: Path) -> None:
    setup = Setup("snake", "optimal", seed=2)
    match = play_plain(setup, lambda spec: AGENTS[spec](), Console(file=io.StringIO()))
    record = tmp_path / "one.jsonl"
    append_episode(record, match.sessions[0].episode)
    text = run("--replay", str(record), "--plain")
    assert text.count("snake · seed 2 · step") == match.last + 1
    changed = json.loads(record.read_text())
    changed["turns"][0]["reward"] = 5
    record.write_text(json.dumps(changed))
    with pytest.raises(RecordError, match="step 0 of the record differs"):
        run("--replay", str(record), "--plain")
    for empty, says in (("", r"holds no episode\n"), ("\x89PNG", r"holds no episode: what stands there is none, or")):
        record.write_text(empty)
        with pytest.raises(RecordError, match=says):
            run("--replay", str(record), "--plain")


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_key_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file's line was broken at 80 columns, and a folder's name in brackets was missing in it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "[red]"))
    monkeypatch.setenv("COLUMNS", "80")
    text = run("--keys")
    for name in bindings():
        assert name in text
    assert str(tmp_path / "[red]" / "msgrpo" / "keys.toml") in text
    example = tmp_path / "keys.toml"
    example.write_text(text.rpartition("one line a key:")[2])
    assert read_keys(example)


def test_a_keys_file_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    assert read_keys(path) == {}
    path.write_text('"play.pause" = "space,f2"\n')
    assert read_keys(path) == {"play.pause": "space,f2"}
    for text, said in (
        ("= 3", "cannot be read"),
        ('"play.paus" = "z"', "did you mean"),
        ('"play.pause" = 3', "must be"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_keys(path)


# ── the served app ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "example.org", "::"])
def test_other_hosts_are_refused_unless_forced(host: str) -> None:
    with pytest.raises(UsageError, match="there is no password"):
        browser.serve(["play"], host, 8080, force=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_loopback_needs_no_force(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("host", "origin", "anywhere", "own"),
    [
        ("127.0.0.1:8080", None, False, True),  # a program
        ("127.0.0.1:8080", "http://127.0.0.1:8080", False, True),
        ("LOCALHOST:8080", "http://127.0.0.1:8080", False, True),  # the page names the other loopback name
        ("[::1]:8080", "http://[::1]:8080", False, True),
        ("127.0.0.1:8080", "http://evil.example", False, False),
        ("127.0.0.1:8080", "http://localhost:3000", False, False),  # another program's page
        ("127.0.0.1:8080", "null", False, False),  # a page in a sandbox
        ("evil.example:8080", "http://evil.example:8080", False, False),  # its name leads here
        ("127.0.0.1.evil.example:8080", None, False, False),
        ("[::1", None, False, False),
        ("", None, False, False),
        ("play.example", "https://play.example", True, True),
        ("play.example", "https://evil.example", True, False),
    ],
)
def test_only_its_own_page_talks_to_a_server_without_a_key(
    host: str, origin: str | None, anywhere: bool, own: bool
) -> None:
    assert is_own(host, origin, anywhere=anywhere) is own


async def test_no_page_of_another_site_types_into_the_app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sibling of DNS rebinding in `msgrpo serve`: the websocket of `--web` types into the app, with a person's
    keys and files, and was open to every page that the person's browser showed.
    """
    pytest.importorskip("textual_serve")
    from aiohttp.test_utils import TestClient, TestServer
    from textual_serve.server import Server

    made: list[Any] = []
    monkeypatch.setattr(Server, "serve", lambda server: made.append(server))
    browser.serve(["play", "--web"], "127.0.0.1", 8080, force=False)
    async with TestClient(TestServer(await made[0]._make_app())) as client:
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example:8080"}):
            for path in ("/", "/ws", "/static/js/textual.js"):
                assert (await client.get(path, headers=headers)).status == 403
        assert (await client.get("/static/js/textual.js")).status == 200


@pytest.mark.parametrize("asked", ["[::1]:8080", "127.0.0.1:9000"])
def test_the_page_names_the_address_by_which_the_browser_came(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --host ::1 it asked for its parts at http://::1:8080, and through a tunnel at the port of the far end."""
    pytest.importorskip("textual_serve")
    from aiohttp.test_utils import TestClient, TestServer
    from textual_serve.server import Server

    pages: list[str] = []

    async def visit(server: Any) -> None:
        async with TestClient(TestServer(await server._make_app())) as client:
            pages.append(await (await client.get("/", headers={"Host": asked})).text())

    monkeypatch.setattr(Server, "serve", lambda server: asyncio.run(visit(server)))
    browser.serve(["play", "--web"], "::1", 8080, force=False)
    assert f'"http://{asked}/static/js/textual.js"' in pages[0]
    assert f'"ws://{asked}/ws"' in pages[0]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["snak"], "snak"),
        (["snake", "--agent", "nano:nothing"], "nothing"),
        (["--replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["snake", "--plain"], "--web shows the app"),
    ],
)
def test_what_cannot_be_played_is_not_served(asked: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was served, and each browser was told that the session had ended."""
    served: list[str] = []
    monkeypatch.setattr(browser, "serve", lambda *_, **__: served.append("a page"))
    with pytest.raises(MsgrpoError, match=says):
        run(*asked, "--web")
    run("snake", "--agent", "random", "--web")
    assert served == ["a page"]


def test_a_port_that_is_taken_is_said_to_be() -> None:
    """It was a traceback of aiohttp."""
    pytest.importorskip("textual_serve")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use") as caught:
            browser.serve(["play", "--web"], "127.0.0.1", port, force=False)
    assert caught.value.fix == f"--port {port + 1}"


def test_the_served_command_is_the_same_without_the_serving() -> None:
    asked = ["play", "snake", "--web", "--host", "127.0.0.1", "--port=81", "--seed", "3", "--force"]
    assert browser.without_web(asked) == ["play", "snake", "--seed", "3"]


def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(home), "TERM": "xterm-256color"}


TMUX = shutil.which("tmux")


@pytest.mark.skipif(TMUX is None, reason="tmux is not installed")
def test_in_a_terminal_it_draws_plays_quits_and_restores_the_screen(tmp_path: Path) -> None:
    socket_name = str(tmp_path / "tmux.sock")

    def tmux(*arguments: str) -> str:
        found = subprocess.run(
            [str(TMUX), "-S", socket_name, "-f", "/dev/null", *arguments],
            env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return found.stdout

    tmux("new-session", "-d", "-x", "80", "-y", "24", "sh")
    try:
        # Exported sizes do not change with the terminal, which is what counts.
        command = " ".join(["COLUMNS=80 LINES=24", *COMMAND, "frozen-lake", "--agent", "human", "--seed", "3"])
        tmux("send-keys", f"echo be''fore; {command}; echo code=$?.", "Enter")
        wait_for(lambda: "your move" in tmux("capture-pane", "-p"))
        assert "●P" in tmux("capture-pane", "-p")
        tmux("send-keys", "Down")
        wait_for(lambda: "step 1/8" in tmux("capture-pane", "-p"))
        tmux("resize-window", "-x", "120", "-y", "40")
        wait_for(lambda: len(tmux("capture-pane", "-p").rstrip().splitlines()) > 30)
        tmux("send-keys", "C-q")
        shown = wait_for(lambda: (s := tmux("capture-pane", "-p")) and "code=0." in s and s)
        assert "before" in shown  # the screen from before the app is back
        assert "your move" not in shown
        assert tmux("display-message", "-p", "#{alternate_on} #{mouse_any_flag} #{cursor_flag}").split() == [
            "0",
            "0",
            "1",
        ]
    finally:
        tmux("kill-server")


def test_the_served_page_asks_no_other_machine_for_anything(tmp_path: Path) -> None:
    pytest.importorskip("textual_serve", reason="the web extra is not installed")
    browser.page_without_links(tmp_path)
    page = (tmp_path / "app_index.html").read_text()
    assert "textual.js" in page
    assert "https://" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_in_a_browser_the_served_app_draws_and_plays(tmp_path: Path) -> None:
    pytest.importorskip("textual_serve", reason="the web extra is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: it comes with the train extra")
    port = free_port()
    server = subprocess.Popen(
        [*COMMAND, "frozen-lake", "--agent", "human", "--seed", "3", "--web", "--port", str(port)],
        env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: reachable(port))
        async with opened(f"http://127.0.0.1:{port}/", tmp_path / "profile") as ask:
            wanted = {
                tuple(bytes.fromhex(NIGHT.variables[name][1:])) for name in ("ice-a", "ice-b", "goal", "snake-1")
            }
            deadline = time.monotonic() + 90
            seen: set[tuple[int, ...]] = set()
            while not wanted <= seen and time.monotonic() < deadline:
                shot = (await ask("Page.captureScreenshot"))["data"]
                picture = image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
                seen = {colour for _, colour in picture.getcolors(picture.width * picture.height)}
            assert wanted <= seen
            record = tmp_path / "plays" / "human.jsonl"
            deadline = time.monotonic() + 90
            while not (record.is_file() and record.read_bytes().endswith(b"\n")) and time.monotonic() < deadline:
                await ask("Runtime.evaluate", expression="document.querySelector('textarea').focus()")
                for kind in ("keyDown", "keyUp"):
                    key = {"key": "ArrowLeft", "code": "ArrowLeft", "windowsVirtualKeyCode": 37}
                    await ask("Input.dispatchKeyEvent", type=kind, **key)
                await ask("Page.captureScreenshot")  # lets the page take the key and draw
            (episode,) = read_episodes(record)
            assert [turn.action for turn in episode.turns] == ["left"] * 8
    finally:
        server.terminate()
        server.wait(timeout=30)


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('"play.pause" = "sapce"', "the key 'sapce', which there is not"),
        ('"play.pause" = "ctrl+nokey"', "which there is not"),
        ('"play.pause" = "F2"', "did you mean f2?"),
        ('"play.pause" = "1"', "would mean both"),
        ('"play.pause" = "r"', "the key 'r' would mean both"),
        ('"play.step" = "f5"\n"show.details" = "f5"', "the key 'f5' would mean both 'play.step' and 'show.details'"),
        ('"play.pause" = "ctrl+q"', "would mean both"),
        ('"show.details" = "."', "would mean both"),  # play.step has full_stop, the same key
    ],
)
def test_keys_that_cannot_be_or_mean_two_things_are_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_keys(path)
    assert says in str(caught.value)


def test_keys_of_every_kind_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('"play.pause" = "f2,ctrl+p,shift+f3,ä,full_stop"\n"play.step" = "z"\n')
    assert read_keys(path)["play.step"] == "z"
    for binding in bindings().values():
        assert all(is_key(key) for key in binding.key.split(",")), binding


def test_a_record_that_is_cut_off_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"schema_version": 1, "scen')
    with pytest.raises(RecordError, match="cut off"):
        run("--replay", str(tmp_path / "r.jsonl"), "--plain")


def test_an_endpoint_without_a_model_is_told_how_to_name_one() -> None:
    with pytest.raises(UsageError, match="does not name the model") as caught:
        run("snake", "--agent", "endpoint:http://h:8000/v1", "--plain")
    assert "#model" in str(caught.value.fix)

"""Our games for other people's trainers: a session held against the game itself, and the same through a real server.

The server needs the extra `openenv`, whose fastmcp wants another `mcp` than vLLM does: those tests run in an
environment of their own (`make test-openenv`) and are skipped elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msgrpo.contract import examine
from msgrpo.episode import GAME_FAULT, observation_of, play_episode
from msgrpo.errors import GameError, GameFaultError, MissingExtraError, UsageError
from msgrpo.game import AnyText, Game, Outcome, Remote, Scenario, stream
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.references import RandomAgent
from msgrpo.serve.env_session import GAME_OVER, NO_GAME, TASKS, Catalogue, Move, Seen, Session
from msgrpo.serve.preflight import free_port
from msgrpo.serve.vllm_command import KEY_VARIABLE
from tests.command_line import PROGRAM, invoked

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    f"{ROOT}/examples/nim.py:scenario",
    "examples.corridor:scenario",
    "spiel:tic_tac_toe",
    "spiel:leduc_poker",
    "gym:BabyAI-GoToRedBallGrey-v0",
)
ALL = (*SCENARIOS, *OUTSIDE)
needs_openenv = pytest.mark.skipif(
    find_spec("openenv") is None, reason="needs msgrpo[openenv] in an environment of its own: make test-openenv"
)

Reset = Callable[..., dict[str, Any]]
Step = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    os.chdir(ROOT)
    return Catalogue(ALL)


def same(seen: dict[str, Any], game: Game, scenario: Scenario) -> None:
    """What a client sees is what the game says."""
    done = game.outcome is not Outcome.PLAYING
    moving = scenario.players[:1] if done else game.to_move
    seats = seen["seats"] or [seen]
    assert [seat["player"] for seat in seats] == list(moving)
    for seat in seats:
        assert seat["text"] == observation_of(game, seat["player"])
        assert seat["legal_actions"] == ([] if done else list(game.legal(seat["player"])))
    assert (seen["done"], seen["outcome"], seen["success"]) == (done, str(game.outcome), game.success)
    assert (seen["step"], seen["step_limit"]) == (game.steps, game.step_limit)


def compare(scenario: Scenario, reset: Reset, step: Step, start: int) -> None:
    """One game by a client and in process, with the same start, luck and answers, ⊥ among them."""
    generator = stream(start, "compare")
    seen = reset(scenario=scenario.id, seed=start, chance_seed=7)
    start_seed = next(scenario.starts("train", start))
    game = scenario.new(start_seed, 7)
    same(seen, game, scenario)
    assert seen["reward"] is None
    while game.outcome is Outcome.PLAYING:
        moves: dict[str, str | None] = {}
        for player in game.to_move:
            legal = game.legal(player)
            chosen = int(generator.integers(len(legal) + 1))
            moves[player] = None if chosen == len(legal) else legal[chosen]
        known = {player: action for player, action in moves.items() if action is not None}
        alone = len(moves) == 1 and known
        seen = step({"action": next(iter(known.values()))} if alone else {"moves": known})
        rewards = game.step(moves)
        assert seen["rewards"] == rewards  # to the bit
        assert seen["reward"] == rewards[scenario.players[0]]
        assert set(seen["failures"]) == {player for player, action in moves.items() if action is None}
        same(seen, game, scenario)


def of_session(session: Session) -> tuple[Reset, Step]:
    def reset(**asked: Any) -> dict[str, Any]:
        return session.reset(**asked).model_dump(mode="json")

    def step(move: dict[str, Any]) -> dict[str, Any]:
        return session.step(Move(**move)).model_dump(mode="json")

    return reset, step


@pytest.mark.parametrize("name", ALL)
def test_a_session_plays_what_the_game_itself_plays(name: str, catalogue: Catalogue) -> None:
    reset, step = of_session(Session(catalogue))
    for start in (0, 11):
        compare(get_scenario(name), reset, step, start)


def test_an_answer_without_a_legal_action_is_seen_with_its_reason(catalogue: Catalogue) -> None:
    session = Session(catalogue)
    session.reset(scenario="frozen-lake", seed=3)
    whys = ["", "no tag", "<action>fly</action>", "I go <action>down</action>"]
    seen = [session.step(Move(answer=answer)) for answer in whys]
    assert [one.failures for one in seen] == [{"player": why} for why in ("empty", "no_tag", "illegal")] + [{}]
    assert [one.step for one in seen] == [1, 2, 3, 4]
    assert session.step(Move(action="fly")).failures == {"player": "illegal"}
    for _ in range(3):
        last = session.step(Move())
    assert (last.done, last.outcome, last.step) == (True, Outcome.TRUNCATED, 8)
    late = session.step(Move(action="down"))
    assert (late.failures, late.reward, late.step, late.done) == ({"player": GAME_OVER}, 0.0, 8, True)
    assert late.text == last.text


def test_what_is_not_legal_now_and_a_stranger_to_the_turn_are_told_apart(catalogue: Catalogue) -> None:
    session = Session(catalogue)
    session.reset(scenario=OUTSIDE[2])
    taken = session.step(Move(action=session._last.legal_actions[0]))
    assert taken.player == "player2"
    with pytest.raises(UsageError, match="'player1' is not to move; to move: player2"):
        session.step(Move(moves={"player1": "x(1,1)"}))


def test_a_start_has_a_number_a_seed_and_its_own_luck(catalogue: Catalogue) -> None:
    session, lake = Session(catalogue), get_scenario("frozen-lake")
    keys: dict[str, set[str]] = {split: set() for split in ("train", "val", "test")}
    for split, seen in keys.items():
        for index in (0, 1, 2, 7):
            session.reset(scenario="frozen-lake", split=split, index=index)
            assert session.saved is not None
            assert session.saved.start_seed == catalogue.start_of(lake, session.saved.split, index)
            seen.add(lake.start_key(session.saved.start_seed))
    assert not keys["train"] & (keys["val"] | keys["test"])
    session.reset(scenario="snake", seed=5)
    first = session.saved
    session.reset(scenario="snake", seed=5)
    assert session.saved == first  # luck follows from the start
    session.reset(scenario="snake", seed=5, chance_seed=1)
    assert first is not None
    assert session.saved is not None
    assert (session.saved.start_seed, session.saved.chance_seed) == (first.start_seed, 1)
    session.reset(scenario="snake")
    assert session.saved.start_seed != first.start_seed
    assert catalogue.tasks(get_scenario("frozen-lake-4x4")) == 1
    with pytest.raises(UsageError, match=r"the starts 0 to 0 in train, not 1"):
        session.reset(scenario="frozen-lake-4x4", index=1)


def test_each_task_of_the_example_for_verifiers_is_a_game(catalogue: Catalogue) -> None:
    tasks = tomllib.loads((ROOT / "examples" / "verifiers_openenv.toml").read_text())["env"]["taskset"]["resets"]
    session = Session(catalogue)
    assert len({session.reset(**task).text for task in tasks}) == len(tasks) > 1


def test_a_state_brings_its_game_back(catalogue: Catalogue) -> None:
    session, other = Session(catalogue), Session(catalogue)
    session.reset(scenario="snake", seed=2)
    for action in ("up", "left", "", "up"):
        seen = session.step(Move(action=action))
    assert session.saved is not None
    back = other.reset(injected_state=json.loads(session.saved.model_dump_json()))
    assert (back.text, back.step, back.done) == (seen.text, seen.step, seen.done)
    if not seen.done:
        assert other.step(Move(action="left")) == session.step(Move(action="left"))
    with pytest.raises(UsageError, match="moves; 20 are the most"):
        other.reset(injected_state=session.saved.model_dump() | {"moves": [{"player": None}] * 21})
    had = other.game
    with pytest.raises(GameError, match="'fly' of snake1 is no action"):
        other.reset(injected_state=session.saved.model_dump() | {"moves": [{"snake1": "fly"}]})
    assert other.game is had


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"scenario": "evil.py:scenario"}, "offers no 'evil.py:scenario'"),
        ({"scenario": 3}, "scenario"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"split": "dev"}, "split"),
        ({"index": TASKS}, "index"),
        ({"injected_state": {"scenario": "snake"}}, "start_seed"),
        ({"injected_state": {"scenario": "evil.py:s", "start_seed": 0, "chance_seed": 0}}, "offers no 'evil"),
    ],
)
def test_a_reset_that_means_no_game_is_refused(asked: dict[str, Any], why: str, catalogue: Catalogue) -> None:
    session = Session(catalogue)
    with pytest.raises(UsageError, match=why):
        session.reset(**asked)
    assert session.reset(prompt="other fields are for others").error is None  # and nothing is broken


def test_a_games_own_fault_ends_the_episode_without_a_result(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from msgrpo.game import Game, Scenario\n"
        "class Broken(Game):\n"
        "    def observe(self, player): return 'here'\n"
        "    def _advance(self, actions): raise ValueError('no more')\n"
        "scenario = Scenario('b', 'b', 'r', 9, 's', lambda s, c: Broken(9))\n"
    )
    session = Session(Catalogue([f"{broken}:scenario"]))
    assert session.step(Move(action="up")).error == NO_GAME
    assert session.reset().error is None
    seen = session.step(Move(action="up"))
    assert (seen.error, seen.done, seen.reward) == (GAME_FAULT, True, None)
    assert "ValueError: no more" in seen.text
    assert session.step(Move(action="up")) == seen
    session.close()
    with pytest.raises(UsageError, match="this session was closed"):
        session.reset()


def test_a_game_that_fails_at_one_start_keeps_its_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fault ended the iterator of starts: from then on every further number was "list index out of range"."""
    session, whole, failing = Session(Catalogue(["frozen-lake"])), Scenario.start_key, [38]

    def start_key(scenario: Scenario, seed: int) -> str:
        if seed in failing:
            raise GameFaultError("no map")
        return whole(scenario, seed)

    assert session.reset(split="val", index=2).error is None  # whether it has few starts is known
    monkeypatch.setattr(Scenario, "start_key", start_key)
    for _ in range(2):
        with pytest.raises(GameFaultError, match="no map"):
            session.reset(split="val", index=4)
    assert session.reset(split="val", index=3).error is None
    failing.clear()
    assert session.reset(split="val", index=4).error is None
    assert session.saved is not None
    assert session.saved.start_seed == next(islice(get_scenario("frozen-lake").starts("val"), 4, None))


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    for name in [name for name in sys.modules if name.startswith(("openenv.", "msgrpo.serve.env_server"))]:
        monkeypatch.delitem(sys.modules, name)
    done = invoked("env", "serve", "frozen-lake")
    assert isinstance(done.exception, MissingExtraError)
    assert done.exception.fix is not None
    assert "[openenv]" in done.exception.fix


@pytest.mark.parametrize("key", ["two words", "schlüssel", "line\n"])
def test_a_key_that_no_client_could_send_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`msgrpo serve` refused it; here the server ran, and nobody was let in."""
    monkeypatch.setenv(KEY_VARIABLE, key)
    done = invoked("env", "serve", "frozen-lake")
    assert isinstance(done.exception, UsageError)
    assert "that an HTTP header cannot" in done.exception.message


def test_the_address_of_a_server_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By IPv6 it was http://::1:8000."""
    server = SimpleNamespace(SESSIONS=1, usual_sessions=lambda: 1, make_server=lambda *_, **__: None)
    server.run = lambda *_: None
    monkeypatch.setitem(sys.modules, "msgrpo.serve.env_server", server)
    monkeypatch.setattr("msgrpo.serve.env_server", server, raising=False)
    monkeypatch.setattr("msgrpo.serve.preflight.check_port", lambda *_: None)  # a machine may have no IPv6
    done = invoked("env", "serve", "frozen-lake", "--host", "::1", "--port", "8000")
    assert "frozen-lake at http://[::1]:8000;" in " ".join(done.stderr.split())


# --- through a real server ------------------------------------------------------------------------------------


def wait_for(url: str, child: subprocess.Popen[Any]) -> None:
    """Wait until a child process answers there."""
    for _ in range(600):
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
            assert child.poll() is None, child.communicate()[1]
    raise AssertionError("the server does not start")


class Server:
    """`msgrpo env serve` as a process."""

    def __init__(self, *arguments: str, key: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._key = key
        environment = os.environ | ({"MSGRPO_API_KEY": key} if key else {})
        self._child = subprocess.Popen(
            [*PROGRAM, "env", "serve", *arguments, "--port", str(self.port)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(f"{self.url}/health", self._child)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> str:
        self._child.terminate()
        try:
            return self._child.communicate(timeout=60)[1]
        finally:
            self._child.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server(*ALL)
    yield running
    said = running.stop()
    assert "Traceback" not in said


def client(url: str, **headers: str) -> Any:
    from openenv.core import GenericEnvClient

    return GenericEnvClient(base_url=url, **({"headers": headers} if headers else {})).sync()


def of_client(connected: Any) -> tuple[Reset, Step]:
    def flat(result: Any) -> dict[str, Any]:
        return {**result.observation, "reward": result.reward, "done": result.done}

    return lambda **asked: flat(connected.reset(**asked)), lambda move: flat(connected.step(move))


@needs_openenv
def test_the_server_plays_what_the_game_itself_plays(server: Server) -> None:
    with client(server.url) as connected:
        for name in ALL:
            for start in (0, 11):
                compare(get_scenario(name), *of_client(connected), start)
        connected.reset(scenario="snake", seed=4, episode_id="mine")
        connected.step({"action": "up"})
        state = connected.state()
        assert (state["episode_id"], state["step_count"], state["scenario"]) == ("mine", 1, "snake")
        with client(server.url) as other:
            assert other.reset(injected_state=state).observation["step"] == 1


@needs_openenv
def test_what_the_server_cannot_do_is_an_answer_and_the_session_goes_on(server: Server) -> None:
    with client(server.url) as connected:
        for wrong in ({"scenario": "x.py:scenario"}, {"seed": -3}):
            with pytest.raises(RuntimeError, match="Server error"):
                connected.reset(**wrong)
        assert connected.reset().observation["text"]
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            connected.step({"direction": "up"})
        assert connected.step({"action": "up"}).observation["step"] == 1
    request = urllib.request.Request(
        f"{server.url}/step", b'{"action": {"action": "up"}}', {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # HTTP keeps no game
        assert json.load(answer)["observation"]["error"] == NO_GAME


@needs_openenv
def test_the_tasks_of_a_split_are_its_starts(server: Server) -> None:
    def ask(path: str, **said: Any) -> Any:
        body = json.dumps(said).encode()
        request = urllib.request.Request(f"{server.url}/msgrpo/{path}", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    assert [split["type"] for split in server.get("/msgrpo/splits")] == ["train", "validation", "test"]
    assert ask("num_tasks", split="test") == {"num_tasks": TASKS}
    task = ask("task", split="test", index=3)["task"]
    assert task in ask("task_range", split="test", start=2, stop=5)["tasks"]
    with client(server.url) as connected:
        connected.reset(split="test", index=3)
        assert connected.state()["start_seed"] == task["start_seed"]


@needs_openenv
def test_the_validator_passes_the_server_and_the_folder(server: Server) -> None:
    command = [str(Path(sys.executable).parent / "openenv"), "validate"]
    live = subprocess.run([*command, "--url", server.url, "--json"], capture_output=True, text=True, check=False)
    report = json.loads(live.stdout)
    assert report["passed"] is True
    assert report["summary"]["failed_criteria"] == []
    folder = [str(ROOT / "examples" / "lake_space"), "--level", "static", "--skip-build", "--json"]
    static = subprocess.run([*command, *folder], capture_output=True, text=True, check=False)
    assert static.returncode == 0, static.stdout + static.stderr
    assert json.loads(static.stdout)["verdict"] == "pass"


@needs_openenv
def test_a_key_is_asked_for_where_one_is_set() -> None:
    running = Server("frozen-lake", key="secret")
    try:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            running.get("/schema")
        with pytest.raises(Exception, match=r"403|1008|rejected"), client(running.url) as connected:
            connected.reset()
        with client(running.url, Authorization="Bearer secret") as connected:
            assert connected.reset().observation["text"]
    finally:
        running.stop()


@needs_openenv
@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
def test_without_a_key_no_page_of_anothers_plays(headers: dict[str, str], server: Server) -> None:
    """A browser lets every page open a websocket to this machine."""
    request = urllib.request.Request(f"{server.url}/schema", headers=headers)
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request)
    own = urllib.request.Request(f"{server.url}/schema", headers={"Origin": server.url})
    with urllib.request.urlopen(own) as answer:
        assert answer.status == 200
    if "Origin" in headers:
        with pytest.raises(Exception, match=r"403|1008|rejected"), client(server.url, **headers) as connected:
            connected.reset()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL in an environment of its own: make test-openenv")
@needs_openenv
def test_trl_trains_on_the_server(server: Server) -> None:
    command = [sys.executable, str(ROOT / "examples" / "trl_openenv.py"), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    updates, _, moves = done.stdout.splitlines()[-1].split()[:3]
    assert int(updates) == 2
    assert int(moves) >= 32  # each of two updates' sixteen rollouts moved


@needs_openenv
def test_a_client_that_is_gone_and_one_that_is_idle_cost_nothing() -> None:
    """Two places: those of two clients that are killed, then of two that fall silent, are free again."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    running = Server("frozen-lake", "--sessions", "2", "--idle-s", "1")
    url = running.url.replace("http", "ws") + "/ws"

    held = ExitStack()

    def begin() -> Any:
        for _ in range(300):
            socket_ = held.enter_context(connect(url))
            with suppress(ConnectionClosed):  # a full server says so at once, and closes
                socket_.send('{"type": "reset", "data": {}}')
            answer = json.loads(socket_.recv(timeout=60))
            if answer["type"] == "observation":
                return socket_
            said = answer["data"]
            assert said["code"] == "CAPACITY_REACHED" or "this session was closed" in said["message"], said
            socket_.close()  # full; or this process stood still before it spoke, and was forgotten
            time.sleep(0.1)
        raise AssertionError("no place is free")

    try:
        for _ in range(2):
            killed = begin()
            killed.socket.shutdown(socket.SHUT_RDWR)  # without a farewell, as a killed process ends
        silent = [begin(), begin()]
        again = begin()  # when the silent ones are forgotten
        silent[0].send('{"type": "step", "data": {"action": "up"}}')
        answer = json.loads(silent[0].recv(timeout=60))
        assert "this session was closed" in answer["data"]["message"]
        again.close()
    finally:
        said = running.stop()
        held.close()
    assert "Traceback" not in said  # of closing what is closed already


@needs_openenv
def test_half_a_request_does_not_keep_the_server_from_ending() -> None:
    """It waited for the other half, and said nothing."""
    running = Server("frozen-lake")
    with socket.create_connection(("127.0.0.1", running.port)) as half:
        half.sendall(b"POST /reset HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        running.get("/health")  # by when it has read that
        said = running.stop()
    assert "Traceback" not in said


@needs_openenv
async def test_for_a_client_that_has_gone_nothing_more_is_played() -> None:
    """Of what it had sent before, thousands of moves were played on, and the server's end waited for them."""
    from msgrpo.serve.env_server import ClientsGo

    played = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal played
        while (await receive())["type"] == "websocket.receive" and played < 9:
            played += 1
            await send({"type": "websocket.send", "text": ""})
        await send({"type": "websocket.close"})

    async def receive() -> Any:
        return {"type": "websocket.receive", "text": ""}

    async def send(message: Any) -> None:
        raise OSError("it has gone")

    await ClientsGo(app)({"type": "websocket"}, receive, send)
    assert played == 1


@needs_openenv
def test_sessions_that_the_process_may_not_have_are_refused(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond the limit were cut off without a word, here or there."""
    from msgrpo.serve import env_server

    monkeypatch.setattr(env_server, "may_open", lambda wanted: min(wanted, 256))
    with pytest.raises(UsageError, match="256") as caught:
        env_server.make_server(catalogue, sessions=1000, idle_s=9, key=None, web=False)
    assert "ulimit" in str(caught.value.fix)
    assert env_server.usual_sessions() == 256 - env_server.OTHER_FILES  # where nobody asks for more it begins
    env_server.make_server(catalogue, sessions=env_server.usual_sessions(), idle_s=9, key=None, web=False)


@needs_openenv
@pytest.mark.parametrize("said", [True, False])
async def test_a_body_over_http_is_no_longer_than_a_message(said: bool) -> None:
    """One of 400 MB was read whole into the server's memory, whether its length was said before or not."""
    from msgrpo.serve.env_server import MOST_MESSAGE, SmallBodies

    pieces, read, sent = 40, 0, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal read
        while (message := await receive())["type"] == "http.request":
            read += len(message["body"])

    async def receive() -> Any:
        nonlocal pieces
        pieces -= 1
        return {"type": "http.request", "body": bytes(MOST_MESSAGE // 4), "more_body": pieces > 0}

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    headers = [(b"content-length", b"%d" % (10 * MOST_MESSAGE))] if said else []
    await SmallBodies(app)({"type": "http", "headers": headers}, receive, send)
    assert read == (0 if said else MOST_MESSAGE)
    assert sent[:1] == ([413] if said else [])


@needs_openenv
def test_the_page_offers_the_legal_moves_and_shows_a_text_as_text(catalogue: Catalogue) -> None:
    from msgrpo.serve.env_server import GameEnvironment, observed

    environment = GameEnvironment(catalogue)
    seen = environment.reset(seed=0, scenario="frozen-lake").model_dump()
    assert environment.web_actions(seen)[0] == ("up", {"action": "up"})
    assert environment.render_web({"text": "<b>"}) == "<pre>&lt;b&gt;</pre>"
    duel = environment.reset(seed=0, scenario="snake-duel").model_dump()
    assert environment.web_actions(duel) == []
    assert environment.render_web(duel).count("<pre>") == 2
    assert observed(Seen(text="x")).text == "x"


# --- a server's environment as a game here --------------------------------------------------------------------


@needs_openenv
def test_our_own_server_is_a_game_like_the_game_itself(server: Server) -> None:
    """The same start, luck and actions: the same texts, rewards and end; and the contract holds, copies included."""
    for name in ("frozen-lake-slippery", "snake"):
        remote, own = get_scenario(f"openenv:{server.url}?scenario={name}"), get_scenario(name)
        assert remote.remote is not None
        assert (remote.remote.repeats, remote.remote.copies) == (True, True)
        for start in islice(own.starts("train"), 2):
            game, twin = remote.new(start, 7), own.new(start, 7)
            generator = stream(start, "moves")
            while twin.outcome is Outcome.PLAYING:
                assert game.observe("player").split("\n", 1)[1] == observation_of(twin, twin.players[0])
                action = str(generator.choice(twin.actions))
                assert list(game.step({"player": action}).values()) == list(
                    twin.step({twin.players[0]: action}).values()
                )
            assert game.outcome is Outcome.TERMINATED
    assert examine(get_scenario(f"openenv:{server.url}?scenario=frozen-lake"), plays=1).breaches == []


@needs_openenv
async def test_the_environment_that_openenv_ships_is_a_game(tmp_path: Path) -> None:
    """`openenv init` writes one that echoes; its server plays one game at a time, and pays for long words."""
    subprocess.run(
        [str(Path(sys.executable).parent / "openenv"), "init", "echo_test"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    port = free_port()
    child = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port), "--log-level", "error"],
        cwd=tmp_path / "echo_test",
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", child)
        scenario = get_scenario(f"openenv:http://127.0.0.1:{port}?steps=3")
        assert scenario.remote == Remote(sessions=1, repeats=True, copies=False)
        assert isinstance(scenario.actions, AnyText)
        game = scenario.new(0, 0)
        assert "Echo Test environment ready!" in game.observe("player")
        assert game.step({"player": "hello"}) == {"player": 0.5}
        assert game.observe("player").endswith("\nhello")
        del game
        episodes = await asyncio.gather(
            *(
                play_episode(scenario, {"player": RandomAgent()}, start_seed=i, chance_seed=i, sampling_seed=i)
                for i in range(3)
            )
        )
        assert [episode.error_message for episode in episodes] == [None] * 3
        assert [len(episode.turns) for episode in episodes] == [3] * 3
    finally:
        child.terminate()
        child.wait(30)

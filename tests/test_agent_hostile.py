"""Games, bases and adapters from elsewhere: whatever they do, it costs an episode or is one clear error."""

from __future__ import annotations

import asyncio
import builtins
import copy
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from msgrpo import contract, limits, outside_code, prompt
from msgrpo.agent import Completion, Decision, LanguageAgent, OnText, Sampling, View
from msgrpo.cli import make_app
from msgrpo.contract import examine
from msgrpo.episode import GAME_FAULT, play_episode
from msgrpo.errors import EndpointError, GameFaultError, ModelError, TookTooLongError, UsageError
from msgrpo.evals import inspect_log
from msgrpo.game import Board, Game, Scenario
from msgrpo.games import get_scenario
from msgrpo.games.outside import _checked
from msgrpo.judge import add_regrets
from msgrpo.limits import games_code, memory_within, within
from msgrpo.models import loading
from msgrpo.models.loading import load_adapted, load_base
from msgrpo.models.local import LocalModel
from msgrpo.models.lora import ADAPTER_CONFIG
from msgrpo.models.paths import NANO_DIR
from msgrpo.prompt import ChatFormat, Prompt
from msgrpo.references import RandomAgent
from msgrpo.train.engines.contract import canary_prompts
from msgrpo.tui.launch import keeps_direction
from tests.serve_fakes import nano_lora_shapes, write_adapter


@pytest.fixture(autouse=True)
def _nothing_has_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """All games of these tests have one name, and the third hang of a game is the last."""
    monkeypatch.setattr(limits, "_hangs", Counter())
    monkeypatch.setattr(limits, "_wakes", False)  # pytest's own limit may have had the signal when it was asked for


# ── games ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Walk(Game):
    """Three steps, each pays 1."""

    actions = ("on", "back")

    def __init__(self, start_seed: int, chance_seed: int) -> None:
        super().__init__(3)

    def observe(self, player: str) -> str:
        return f"step {self.steps}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return {"player": 1.0}


class Pays(Walk):
    reward: Any = None

    def _advance(self, actions: Mapping[str, str | None]) -> Any:
        return {"player": self.reward} if not isinstance(self.reward, dict) else self.reward


def paying(reward: Any) -> type[Walk]:
    return type("Paying", (Pays,), {"reward": reward})


class Raises(Walk):
    fault: BaseException = ValueError("boom \x1b[2J")

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        raise self.fault


def raising(fault: BaseException) -> type[Walk]:
    return type("Raising", (Raises,), {"fault": fault})


class Interrupts(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        raise KeyboardInterrupt


class BadTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class SetsReturns(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.returns["player"] = 50.0
        return super()._advance(actions)


class NoMoves(Walk):
    def legal(self, player: str) -> tuple[str, ...]:
        return ()


class Shows(Walk):
    text: Any = None

    def observe(self, player: str) -> Any:
        return self.text


def showing(text: Any) -> type[Walk]:
    return type("Showing", (Shows,), {"text": text})


class Endless(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.steps = -1
        return super()._advance(actions)


class Begins(Walk):
    def __init__(self, start_seed: int, chance_seed: int) -> None:
        raise RuntimeError("no start")


def scenario(game: type[Game], **more: Any) -> Scenario:
    return Scenario("hostile", "hostile", "Walk.", 3, "[test]", game, actions=Walk.actions, **more)


async def played(game: type[Game]) -> Any:
    return await play_episode(scenario(game), {"player": RandomAgent()}, start_seed=0, chance_seed=0, sampling_seed=0)


@pytest.mark.parametrize(
    ("game", "says"),
    [
        (paying(math.nan), "not finite"),
        (paying(-math.inf), "not finite"),
        (paying(None), "is no number"),
        (paying("1"), "is no number"),
        (paying({}), "not for each of player"),
        (paying({"player": 1.0, "ghost": 1.0}), "not for each of player"),
        (raising(ValueError("boom \x1b[2J")), "ValueError: boom"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (Interrupts, "KeyboardInterrupt"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (raising(BadTextError()), "BadTextError"),
        (paying(1e300), "more than"),
        (SetsReturns, "returns were changed"),
        (NoMoves, "names no action"),
        (showing(None), "no text"),
        (showing(7), "no text"),
        (showing("x" * 200_000), "200,000 characters"),
        (Endless, "it goes on after"),
        (Begins, "no start"),
    ],
)
async def test_a_games_own_fault_costs_its_episode_and_is_named(game: type[Game], says: str) -> None:
    episode = await played(game)
    assert episode.error == GAME_FAULT
    assert says in episode.error_message
    assert "hostile" in episode.error_message
    assert "\x1b" not in episode.error_message
    if issubclass(game, Raises | Interrupts | Begins):
        assert f"{Path(__file__).name}:" in episode.error_message  # file and line


@pytest.mark.parametrize("moving", [(), ("ghost",), ("player", "ghost")])
async def test_who_is_to_move_is_one_of_the_players(moving: tuple[str, ...]) -> None:
    class Moves(Walk):
        @property
        def to_move(self) -> tuple[str, ...]:
            return moving

    episode = await played(Moves)
    assert episode.error == GAME_FAULT
    assert "to_move is" in episode.error_message


@pytest.mark.parametrize(
    ("given", "becomes"), [("yes", "no result"), (1, "no result"), (np.True_, True), (None, None)]
)
async def test_a_success_is_true_or_false_or_none(given: Any, becomes: Any) -> None:
    """`eval` took "yes" for a success, and a training ended in a ValueError. Looked for: what else a game gives
    beside its rewards (outcome, to_move, legal and texts are checked where they are read).
    """

    class Odd(Walk):
        @property
        def success(self) -> Any:
            return given

    episode = await played(Odd)
    if becomes == "no result":
        assert episode.error == GAME_FAULT
        assert f"success is {given!r}, not True, False or None" in (episode.error_message or "")
    else:
        assert episode.error is None
        assert episode.success is becomes


async def test_an_outcome_is_none_but_an_outcome() -> None:
    """A text in its place ended a training in a division by zero: nothing had been played, and it seemed over."""

    class Says(Walk):
        @property
        def outcome(self) -> Any:
            return "playing"

    episode = await played(Says)
    assert episode.error == GAME_FAULT
    assert "outcome is 'playing'" in episode.error_message
    assert [one.rule for one in examine(scenario(Says), plays=2).breaches] == ["start"]


@pytest.mark.parametrize("reward", [np.float32(1), np.float64(1), np.int64(1), True, 1, np.array(1.0)])
async def test_numbers_of_any_library_are_rewards(reward: Any) -> None:
    """Every Gymnasium game returns them; they passed the check and ended a training in a traceback."""
    episode = await played(paying(reward))
    assert (episode.error, episode.returns) == (None, {"player": 3.0})
    assert all(type(turn.reward) is float for turn in episode.turns)
    assert examine(scenario(paying(reward)), plays=2).breaches == []
    assert json.loads(episode.model_dump_json())["returns"] == {"player": 3.0}


async def test_torchs_numbers_are_rewards() -> None:
    import torch

    assert (await played(paying(torch.tensor(1.0)))).returns == {"player": 3.0}


async def test_escape_codes_and_halves_of_characters_do_not_leave_the_game() -> None:
    episode = await played(showing("a\x1b[2J\ud800b"))
    assert episode.error is None
    assert {turn.state for turn in episode.turns} == {"a\ufffd[2J\ufffdb"}
    episode.model_dump_json().encode()
    assert len(scenario(showing("a\ud800b")).start_key(0)) == 64  # which is a hash of what is seen


def test_what_a_game_raises_is_reported_without_its_escape_codes() -> None:
    class Shouts(Walk):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            raise ValueError("boom \x1b[2J\x1b]0;owned\x07")

    (breach,) = [one.breach for one in examine(scenario(Shouts), plays=2).breaches if one.rule == "runs"]
    assert breach is not None
    assert "boom" in breach
    assert "\x1b" not in breach


@pytest.mark.timeout(0)
def test_a_game_that_hangs_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twenty games would take a minute."""
    for module in (limits, contract):
        monkeypatch.setattr(module, "GAME_S", 0.4)
    calls = []

    class Sleeps(Walk):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            calls.append(1)
            time.sleep(60)
            return {}

    assert [one.rule for one in examine(scenario(Sleeps), plays=20).breaches] == ["runs"]
    assert len(calls) <= 2


@pytest.mark.timeout(0)
async def test_a_game_that_hangs_is_named_with_its_line_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GAME_S", 0.4)

    class Hangs(Walk):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            while True:
                try:
                    time.sleep(60)
                except Exception:
                    continue
            return {}

    class Spins(Walk):
        def observe(self, player: str) -> str:
            while True:
                pass

    for game in (Hangs, Spins):
        episode = await played(game)
        assert episode.error == GAME_FAULT
        assert "took longer than 0.4 s" in episode.error_message
        assert f"{Path(__file__).name}:" in episode.error_message


class Blind(Walk):
    def observe(self, player: str) -> str:
        raise ValueError("nobody sees it")

    def board(self) -> Board | None:
        raise ValueError("nobody draws it")


async def test_a_game_that_cannot_be_looked_at_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`games show`, `play --live`, the beginning of a run and an export of its record ended in tracebacks."""
    blind = scenario(Blind)
    monkeypatch.setattr("msgrpo.games.get_scenario", lambda name: blind)
    shown = CliRunner().invoke(make_app(), ["games", "show", "hostile"])
    assert isinstance(shown.exception, GameFaultError)
    for look in (keeps_direction, canary_prompts):
        with pytest.raises(GameFaultError, match="the game hostile failed"):
            look(blind)
    monkeypatch.setattr(inspect_log, "recorded_scenario", lambda name: blind)
    assert inspect_log.first_prompt(await played(Blind)) == ""


@pytest.mark.timeout(0)
async def test_the_third_hang_ends_what_plays_the_game(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred episodes that hang for a minute each would take three hours; the sibling is a judge that hangs."""
    episode = await played(Walk)
    monkeypatch.setattr(limits, "GAME_S", 0.4)

    class Stuck(Walk):
        def observe(self, player: str) -> str:
            time.sleep(60)
            return ""

    def stuck(game: Any, player: str) -> Any:
        while True:  # in a thread, where only what comes back to Python can be stopped
            time.sleep(0.01)

    assert [(await played(Stuck)).error for _ in range(limits.HANGS - 1)] == [GAME_FAULT] * (limits.HANGS - 1)
    with pytest.raises(GameFaultError, match="took longer") as error:
        await played(Stuck)
    assert "3 times" in str(error.value.fix)
    assert "games check" in str(error.value.fix)
    with pytest.raises(GameFaultError, match="took longer"):
        await add_regrets(scenario(Walk, judge=stuck), episode)


async def test_a_game_that_changes_the_folder_loses_its_episode_and_nothing_else(tmp_path: Path) -> None:
    """A run with a relative --out went on in another folder."""
    here = Path.cwd()

    class Moves(Walk):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            os.chdir(tmp_path)
            return super()._advance(actions)

    episode = await played(Moves)
    assert episode.error == GAME_FAULT
    assert "changed the working directory" in str(episode.error_message)
    assert Path.cwd() == here


class Tries(Walk):
    """Tries a regular expression that never ends: C code, which holds Python's lock and lets signals in."""

    def observe(self, player: str) -> str:
        return "" if re.match("(a+)+$", "a" * 40 + "b") is None else "never"


@pytest.mark.timeout(0)  # pytest's own limit has the signal otherwise
async def test_a_regular_expression_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher is a thread, and this code lets no other thread run. The sibling hunt found the same hang in the
    import of a game's file and in the function that makes its scenario, which had no limit at all. Later the whole
    test run stood still here: an alarm that somebody else had taken back in the second before was relied on.
    """
    monkeypatch.setattr(limits, "GAME_S", 0.3)
    await played(Walk)
    signal.setitimer(signal.ITIMER_REAL, 0)
    episode = await played(Tries)
    assert episode.error == GAME_FAULT
    assert "took longer than 0.3 s" in (episode.error_message or "")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("where", ["import", "factory"])
@pytest.mark.parametrize("does", ["re.match('(a+)+$', 'a' * 40 + 'b')", "time.sleep(99)"])
def test_a_games_file_has_its_time(where: str, does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_code, "IMPORT_S", 0.3)
    file = tmp_path / "slow.py"
    begins = "def scenario():\n    " if where == "factory" else ""
    file.write_text(f"import re, time\n{begins}{does}\n")
    with pytest.raises(UsageError, match="it took too long: TookTooLongError"):
        get_scenario(f"{file}:scenario")


@pytest.mark.parametrize("where", ["import", "factory"])
def test_a_games_file_presses_no_ctrl_c(where: str, tmp_path: Path) -> None:
    """It ended the command with exit code 130 and without a word; in a step it was an error of the game already."""
    begins = "def scenario():\n    " if where == "factory" else ""
    file = tmp_path / "presses.py"
    file.write_text(f"{begins}raise KeyboardInterrupt\n")
    with pytest.raises(UsageError, match=f"KeyboardInterrupt .*{file.name}:"):
        get_scenario(f"{file}:scenario")


@pytest.mark.parametrize("where", ["import", "factory", "step"])
async def test_a_game_takes_no_signal_and_no_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Ctrl-C ignored nobody can end a program; of an import nobody looked after the folder, either. The sibling:
    a game that holds signals back, which also kept our own alarm from coming.
    """
    monkeypatch.setenv("TAKES", where)
    file = tmp_path / "takes.py"
    file.write_text(TAKES)
    here, interrupt = os.getcwd(), signal.getsignal(signal.SIGINT)
    episode = await play_episode(
        get_scenario(f"{file}:scenario"), {"player": RandomAgent()}, start_seed=0, chance_seed=0, sampling_seed=0
    )
    held = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGALRM})
    assert (os.getcwd(), signal.getsignal(signal.SIGINT), held) == (here, interrupt, set())
    assert ("working directory" in (episode.error_message or "")) == (where == "step")


TAKES = """
import os, signal
from msgrpo.games import SCENARIOS

def take(where):
    if os.environ["TAKES"] == where:
        os.chdir("/")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGALRM})

def scenario():
    take("factory")
    from tests.test_agent_hostile import Walk, scenario as made
    class Takes(Walk):
        def _advance(self, actions):
            take("step")
            return super()._advance(actions)
    return made(Takes)

take("import")
"""


class LateLegal(Walk):
    """Its `legal` works for whoever shows the state, and fails for the agent that asks again."""

    asked = 0

    def legal(self, player: str) -> tuple[str, ...]:
        self.asked += 1
        if self.asked == 2:
            raise ValueError("no \x1b[2J")
        return self.actions


async def test_what_an_agent_asks_of_the_game_is_the_games_code_too() -> None:
    """The agents, random and language models alike, asked the game itself: a traceback ended the run."""
    for agent in (RandomAgent(), LanguageAgent("m", Says())):
        episode = await play_episode(
            scenario(LateLegal), {"player": agent}, start_seed=0, chance_seed=0, sampling_seed=0
        )
        assert episode.error == GAME_FAULT
        assert f"no \ufffd[2J ({__file__}:" in (episode.error_message or "")


class Says:
    """A model that always says one thing."""

    name = "says"
    extra_settings: Mapping[str, Any] = {}

    async def complete(
        self, prompt: Prompt, sampling: Sampling, seed: int, *, actions: Any = (), on_text: OnText | None = None
    ) -> Completion:
        return Completion("<action>on</action>", "stop")

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("words", [{"caption": "\x1b[2J"}, {"legend": {".": "\x1b]0;x"}}, {"down": ("\x9b1m",)}])
def test_words_of_a_board_do_not_drive_the_terminal(words: dict[str, Any]) -> None:
    """Its cells were looked at, and its words were printed by `msgrpo play --plain` as they were."""
    with pytest.raises(GameFaultError, match="no text that can be printed"):
        Board((((".",),)), **({"legend": {}} | words))


def test_a_template_that_takes_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It doubled a text till the system ended the process. A limit holds for the block alone."""
    monkeypatch.setattr(prompt, "RENDER_S", 60.0)  # a busy machine doubles slowly
    tokenizer = copy.deepcopy(loading.nano().tokenizer)
    tokenizer.chat_template = (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    )
    with pytest.raises(ModelError, match="GiB of memory"):
        ChatFormat(tokenizer)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), memory_within(2**28):
        bytearray(2**30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(2**30)) == 2**30


def test_an_adapters_folder_brings_no_template_among_the_templates_arguments(tmp_path: Path) -> None:
    """What its config.json says of `chat` was handed on as it was: another template, which nobody had looked at, and
    whose number of a hundred million digits no signal interrupts.
    """
    tokenizer = loading.nano().tokenizer
    with pytest.raises(ModelError, match="chat_template, tokenize would change how it is used"):
        ChatFormat(tokenizer, {"chat_template": "{{ 9 ** 9 }}", "tokenize": True, "enable_thinking": False})
    assert ChatFormat(tokenizer, {"enable_thinking": False, "tools": None}).arguments


def test_two_templates_at_once_leave_no_limit_behind() -> None:
    """The one that ended first put back what the other had set, for the rest of the process."""
    before, inside = resource.getrlimit(resource.RLIMIT_AS), threading.Event()

    def long() -> None:
        with memory_within(2**31):
            inside.set()
            time.sleep(0.3)

    def late() -> None:
        inside.wait()
        with memory_within(2**31):
            time.sleep(0.3)

    threads = [threading.Thread(target=one) for one in (long, late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


ENDS_SLOWLY = """
import signal, sys, time
from msgrpo.limits import within

class Slow:
    def __del__(self, signal=signal, time=time):  # while Python ends it has no handlers any more
        if signal.getitimer(signal.ITIMER_REAL)[0]:  # an alarm is to come: let it come now
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(60)

with within(60, "a game"):
    pass
if sys.argv[1:]:
    import atexit
    from msgrpo import limits
    atexit.unregister(limits._no_alarm)
sys.modules["slow"] = Slow()
"""


@pytest.mark.parametrize(("kept", "code"), [((), 0), (("alarm",), -signal.SIGALRM)])
def test_a_process_that_ends_is_not_killed_by_its_alarm(kept: tuple[str, ...], code: int) -> None:
    """Trainings that had ended well died in their last second, and their servers and ranks with them."""
    assert subprocess.run([sys.executable, "-c", ENDS_SLOWLY, *kept], check=False).returncode == code


def test_a_persons_ctrl_c_is_no_fault_of_the_game() -> None:
    class Handler:
        def ask(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), games_code("x"):
        Handler().ask()  # as a signal's handler does


def test_the_other_seat_is_not_asked_on_where_one_has_failed() -> None:
    """Its answer was paid for, and stood in no record."""
    ended: list[str] = []

    class Slow(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return await super().act(view)

    class Fails(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            raise EndpointError("no answer", kind="timeout")

    duel = get_scenario("snake-duel")
    agents = dict(zip(duel.players, (Slow(), Fails()), strict=True))
    episode = asyncio.run(play_episode(duel, agents, start_seed=0, chance_seed=0, sampling_seed=0))
    assert (episode.error, ended) == ("timeout", ["cancelled"])


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_limit_stops_what_is_within_and_nothing_after_it(where: str) -> None:
    found: list[str] = []

    def work() -> None:
        try:
            with within(0.3, "a loop"):
                while True:
                    pass
        except TookTooLongError:
            found.append("stopped")
        for _ in range(20):  # what was asked for late must not arrive here
            time.sleep(0.02)
        with within(60, "a short one"):
            found.append("ended")

    if where == "main":
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    assert found == ["stopped", "ended"]


PROFILED = """
import sys
from msgrpo.errors import TookTooLongError
from msgrpo.limits import within
try:
    with within(0.2, "a loop"):
        while True: pass
except TookTooLongError:
    pass
def call(): return "called"
sys.setprofile(lambda *event: None)
call()
sys.setprofile(None)
print("over")
"""


def test_after_something_was_stopped_a_profiler_works() -> None:
    """Clearing the exception that stops a thread leaves a mark behind: the next traced call never returned."""
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "over\n", done.stderr


def test_what_cannot_be_stopped_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """A library's own loop looks at no signal: then a person is told whose it is, and where."""
    busy = threading.Lock()

    def work() -> None:
        with within(0.2, "the game g.py:scenario"):
            try:
                busy.acquire()  # in a thread no signal wakes it
            except TookTooLongError:
                return

    said, deadline = "", time.monotonic() + 60
    with busy:
        thread = threading.Thread(target=work)
        thread.start()
        while "does not come back" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capfd.readouterr().err
    thread.join()
    assert f"the game g.py:scenario does not come back at {__file__}" in said


def test_names_that_drive_a_terminal_are_no_names() -> None:
    with pytest.raises(UsageError, match="can be printed"):
        _checked(scenario(Walk, players=("a\x1b[2J",)), "x", "f.py")
    found = _checked(Scenario("h", "h", "rules \x1b[2J", 3, "s\x1b", Walk, actions=Walk.actions), "x", "f.py")
    assert "\x1b" not in found.rules + found.source


# ── hands of cards ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "cards"), [("kuhn_poker", 3), ("leduc_poker", 6)])
def test_hands_of_cards_are_not_held_out(name: str, cards: int) -> None:
    """Training held only kings, validation only jacks, the test only queens: the hash was of the first hand."""
    pytest.importorskip("pyspiel")
    poker = get_scenario(f"spiel:{name}")
    assert not poker.holds_out
    for split in ("train", "val", "test"):
        starts = poker.starts(split)  # type: ignore[arg-type]
        seen = {poker.start_key(next(starts)) for _ in range(200)}
        assert len(seen) == cards
    assert get_scenario("spiel:backgammon").holds_out
    assert all(get_scenario(own).holds_out for own in ("frozen-lake", "snake", "snake-duel"))


@pytest.mark.parametrize("boards", [33, 34, 40, 60])
def test_no_split_is_empty_however_many_starts_there_are(boards: int) -> None:
    """Of 3,000 families with 34 boards 13 had an empty split, and looking for its first start never ended."""

    class Numbered(Walk):
        def __init__(self, start_seed: int, chance_seed: int) -> None:
            super().__init__(start_seed, chance_seed)
            self.number = start_seed % boards

        def observe(self, player: str) -> str:
            return f"board {self.number}"

    for family in range(400):
        numbered = Scenario("n", f"family {family}", "", 3, "[test]", Numbered, actions=Walk.actions)
        firsts = [next(numbered.starts(split)) % boards for split in ("train", "val", "test")]  # type: ignore[arg-type]
        assert len(set(firsts)) == 3


def test_one_team_loses_together_and_bystanders_keep_what_they_have() -> None:
    """A partner's unparsed answer paid the others of a cooperative game."""
    pytest.importorskip("pyspiel")
    hanabi = get_scenario("spiel:tiny_hanabi").new(0, 0)
    paid = hanabi.step(dict.fromkeys(hanabi.to_move))
    assert len(set(paid.values())) == 1
    kuhn = get_scenario("spiel:kuhn_poker").new(0, 0)
    assert sum(kuhn.step(dict.fromkeys(kuhn.to_move)).values()) == 0
    deal = get_scenario("spiel:negotiation").new(0, 0)
    failed = deal.to_move[0]
    others = {player: paid for player, paid in deal.step({failed: None}).items() if player != failed}
    assert set(others.values()) == {0.0}


# ── bases and adapters ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of nano, to be changed."""
    folder = tmp_path / "base"
    shutil.copytree(NANO_DIR, folder, ignore=shutil.ignore_patterns("adapters"))
    return folder


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_a_bases_own_code_is_never_run_and_nobody_is_asked_whether_it_may(
    where: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal, and `y` ran it; an adapter that names such a base did as well."""

    def nobody(*prompt: object) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr(builtins, "input", nobody)
    (base / "evil.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')\nclass Evil: pass\n")
    own = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    kind = {"model_type": "evil"} if where == "config.json" else {"tokenizer_class": "Evil"}
    changed(base / where, auto_map=own, **kind)
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=str(base))
    for load in (lambda: load_base(str(base)), lambda: load_adapted(adapter)):
        if where == "config.json":  # for a tokenizer transformers has a class of its own
            with pytest.raises(ModelError, match="code of its own"):
                load()
        else:
            load()
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    "named",
    [
        {"_attn_implementation": "some/kernel"},
        {"attn_implementation": "some/kernel:fast"},
        {"text_config": {"layers": [{"_attn_implementation_internal": {"a": "some/kernel"}}]}},
    ],
)
def test_compiled_code_of_a_hub_is_not_asked_for(named: dict[str, Any], base: Path) -> None:
    """The sibling of code beside a base: transformers fetches a kernel that its config names, and loads it."""
    changed(base / "config.json", **named)
    with pytest.raises(ModelError, match="compiled code from a hub"):
        load_base(str(base))


def test_what_is_no_base_is_said_in_a_sentence(base: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(base / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    run = write_adapter(tmp_path / "run")
    (run / "config.json").write_text('{"scenario": "snake"}')
    long = base.parent / "long"
    shutil.copytree(base, long)
    (long / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    for name, says in {
        str(pickled): "only pickled weights",
        str(run): "names no model_type",
        str(long): "list of tensors",
        "x" * 950: "is no folder and no hub name",
        "a/" + "x" * 5000: "cannot be loaded",
        "/etc": "cannot be loaded",
        "../../x": "is no folder and no hub name",
    }.items():
        with pytest.raises(ModelError, match=says):
            load_base(name)


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client tries ten times, with 46 s of pauses between; they are noted here, and not waited for."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    pauses: list[float] = []
    sleep, me = time.sleep, threading.current_thread()
    monkeypatch.setattr(time, "sleep", lambda s: pauses.append(s) if threading.current_thread() is me else sleep(s))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_base("somebody/some-model")
    assert pauses == []


@pytest.mark.parametrize(
    "config",
    [
        {"r": 10**9}, {"r": 0}, {"r": -1}, {"r": "8"}, {"r": 8.5}, {"lora_alpha": math.nan}, {"lora_alpha": 1e308},
        {"rank_pattern": {"q_proj": 10**7}}, {"rank_pattern": {"(([a-z0-9_.])+)+!": 8}},
        {"rank_pattern": {f"of.many.{i}": 8 for i in range(10_000)}},  # each is tried on each layer
        {"alpha_pattern": [1]},
        {"layer_replication": [[0, 1]] * 2000}, {"modules_to_save": ["lm_head"]}, {"peft_type": "PROMPT_TUNING"},
        {"peft_type": "XLORA"}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "corda"},
        {"megatron_config": {"a": 1}},
    ],
)  # fmt: skip
def test_an_adapter_that_asks_for_more_than_its_layers_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fl", **config)
    with pytest.raises(ModelError, match="no plain LoRA"):
        load_adapted(folder)


def test_a_pattern_from_a_file_is_not_run_over_the_layers(tmp_path: Path) -> None:
    """`(([a-z0-9_.])+)+!` took more than a minute: the layers are those that the weights name."""
    folder = write_adapter(tmp_path / "fl", target_modules="(([a-z0-9_.])+)+!")
    model, _ = load_adapted(folder)
    assert model is not None


def test_an_adapter_of_other_names_or_a_config_of_megabytes_is_refused(tmp_path: Path) -> None:
    """Where only some of the names were another's, PEFT left those weights out without a word, and the rest played.
    Looked for: all that loads an adapter (the trainer's own loading compares every name; `serve` leaves it to vLLM).
    """
    shapes = {f"renamed.{name}": shape for name, shape in nano_lora_shapes().items()}
    with pytest.raises(ModelError):
        load_adapted(write_adapter(tmp_path / "renamed", shapes=shapes))
    for old, new in (("layers.0.", "layers.99."), ("layers.0.mlp.down_proj", "layers.0.mlp.dawn_proj")):
        shapes = {name.replace(old, new): shape for name, shape in nano_lora_shapes().items()}
        with pytest.raises(ModelError, match=r"layers are none of the base's, like model\.layers\."):
            load_adapted(write_adapter(tmp_path / new, shapes=shapes))
    large = write_adapter(tmp_path / "large")
    (large / ADAPTER_CONFIG).write_text(json.dumps({"x": "y" * 20_000_000}))
    with pytest.raises(ModelError, match="no config has more"):
        load_adapted(large)


# ── the model in this process ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return loading.nano()


def long(words: int) -> Prompt:
    return Prompt("", " ".join(["hole"] * words))


async def test_the_length_of_an_answer_depends_on_its_own_prompt_alone(model: LocalModel) -> None:
    """Beside a prompt of 2,040 tokens an answer of 22 became one of 8."""
    short = Prompt("", "a hole and a goal")
    beyond = next(words for words in range(500, 4000) if len(model.chat.ids([long(words)])[0]) > model.context - 6)
    sampling = Sampling(max_tokens=40)
    alone = await model.complete(short, sampling, 3)
    beside, full = await asyncio.gather(model.complete(short, sampling, 3), model.complete(long(beyond), sampling, 4))
    assert alone.completion_tokens > 6
    assert beside.token_ids == alone.token_ids
    assert full.prompt_tokens + full.completion_tokens <= model.context
    assert full.completion_tokens <= 6


async def test_a_prompt_beyond_the_context_is_no_answer_and_its_neighbours_have_theirs(model: LocalModel) -> None:
    short = Prompt("", "a hole and a goal")
    found = await asyncio.gather(
        model.complete(long(4000), Sampling(), 1), model.complete(short, Sampling(), 2), return_exceptions=True
    )
    assert isinstance(found[0], EndpointError)
    assert found[0].kind == "context_length"
    assert not isinstance(found[1], BaseException)


def test_one_model_answers_two_event_loops_at_once(model: LocalModel) -> None:
    """The second loop's answers were completed from the first one's thread, and never came."""
    answers: dict[str, list[Any]] = {}

    def ask(name: str) -> None:
        async def many() -> None:
            answers[name] = []
            for seed in range(6):
                got = await asyncio.gather(
                    *(model.complete(Prompt("", f"{name} {i}"), Sampling(max_tokens=8), seed) for i in range(3))
                )
                answers[name] += [one.token_ids for one in got]
            await model.close()

        asyncio.run(many())

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [len(answers[name]) for name in ("one", "two")] == [18, 18]


def test_a_fault_of_a_game_is_a_game_error() -> None:
    with pytest.raises(GameFaultError, match="the game x failed: ZeroDivisionError"), games_code("x"):
        print(1 // 0)

"""Code from outside that never ends, or takes memory, a signal or the folder: it is stopped and leaves nothing."""

from __future__ import annotations

import copy
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from msgrpo import contract, limits, outside_code, prompt
from msgrpo.contract import examine
from msgrpo.episode import GAME_FAULT, play_episode
from msgrpo.errors import GameFaultError, ModelError, TookTooLongError, UsageError
from msgrpo.evals import inspect_log
from msgrpo.game import Board
from msgrpo.games import get_scenario
from msgrpo.judge import add_regrets
from msgrpo.limits import games_code, memory_within, unmoved, within
from msgrpo.models import loading
from msgrpo.prompt import ChatFormat
from msgrpo.references import RandomAgent
from msgrpo.train.engines.contract import canary_prompts
from msgrpo.tui.launch import keeps_direction
from tests.command_line import invoked
from tests.hostile_games import Walk, played, scenario

pytestmark = pytest.mark.usefixtures("nothing_has_hung")


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
    shown = invoked("games", "show", "hostile")
    assert isinstance(shown.exception, GameFaultError)
    for look in (keeps_direction, canary_prompts):
        with pytest.raises(GameFaultError, match="the game hostile failed"):
            look(blind)
    monkeypatch.setattr(inspect_log, "recorded_scenario", lambda name: blind)
    assert inspect_log.first_prompt(await played(Blind)) == ""


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a limit may strike in a callback
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


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a limit may strike in a callback
async def test_a_game_that_hung_too_often_plays_again_once_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: by its name alone it was refused for the rest of the process, with its old fault."""
    monkeypatch.setattr(limits, "GAME_S", 0.4)

    class Stuck(Walk):
        def observe(self, player: str) -> str:
            time.sleep(60)
            return ""

    for _ in range(limits.HANGS):
        with suppress(GameFaultError):
            await played(Stuck)
    assert (await played(Walk)).error is None


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


@pytest.mark.parametrize("guard", [lambda: games_code("moves"), unmoved])
def test_in_a_folder_that_is_gone_nothing_is_put_back(
    guard: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with guard():
        os.chdir(tmp_path)
    assert Path.cwd() == tmp_path


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
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    here, handlers = os.getcwd(), [*map(signal.getsignal, taken)]
    episode = await play_episode(
        get_scenario(f"{file}:scenario"), {"player": RandomAgent()}, start_seed=0, chance_seed=0, sampling_seed=0
    )
    held = signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
    assert (os.getcwd(), [*map(signal.getsignal, taken)], held) == (here, handlers, set())
    assert ("working directory" in (episode.error_message or "")) == (where == "step")


TAKES = """
import os, signal
from msgrpo.games import SCENARIOS

def take(where):
    if os.environ["TAKES"] == where:
        os.chdir("/")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGALRM})

def scenario():
    take("factory")
    from tests.hostile_games import Walk, scenario as made
    class Takes(Walk):
        def _advance(self, actions):
            take("step")
            return super()._advance(actions)
    return made(Takes)

take("import")
"""


@pytest.mark.timeout(0)
def test_a_limit_ends_with_a_game_that_held_the_alarm_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm came when signals were let in again, and the limit stayed: a second later the next one struck
    whatever ran then, and so on, once a second.
    """
    monkeypatch.setattr(limits, "GAME_S", 0.3)

    def held() -> None:
        with games_code("held"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            while not limits._calls[threading.get_ident()].stopped:
                time.sleep(0.01)

    with pytest.raises(GameFaultError, match="took longer"):
        held()
    assert threading.get_ident() not in limits._calls


@pytest.mark.parametrize("guard", [lambda: games_code("held"), unmoved])
def test_ctrl_c_that_code_from_outside_held_back_is_a_persons(guard: Callable[[], Any], tmp_path: Path) -> None:
    """It went to the handler that the code had set, or came before all was put back."""
    here = os.getcwd()

    def held() -> None:
        with guard():
            os.chdir(tmp_path)
            signal.signal(signal.SIGINT, lambda *given: None)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        held()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert threading.get_ident() not in limits._calls
    assert os.getcwd() == here


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


def test_a_lower_limit_of_memory_that_there_is_already_stays() -> None:
    """And the highest that may be asked for, which nobody but root can raise again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lower = 2**41 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        with memory_within(2**45):
            assert resource.getrlimit(resource.RLIMIT_AS) == (lower, hard)
        with memory_within(2**30):
            found, highest = resource.getrlimit(resource.RLIMIT_AS)
            size = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert size is not None
            assert abs(found - 2**30 - 1024 * int(size[1])) < 2**24
            assert highest == hard
        assert resource.getrlimit(resource.RLIMIT_AS) == (lower, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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


def test_ctrl_c_in_the_midst_of_a_games_line_is_a_persons() -> None:
    with pytest.raises(KeyboardInterrupt), games_code("x"):
        signal.raise_signal(signal.SIGINT)


def test_the_third_hang_of_each_game_says_what_can_be_pasted() -> None:
    ends: list[tuple[bool, str | None]] = []
    for name in ("my game.py:s", "other.py:s", "my game.py:s", "my game.py:s"):
        with pytest.raises(GameFaultError, match="took longer than 60 s") as fault, games_code(name):
            raise TookTooLongError
        ends.append((fault.value.fatal, fault.value.fix))
    assert ends[:3] == [(False, None)] * 3
    assert ends[3][0]
    assert str(ends[3][1]).endswith("msgrpo games check 'my game.py:s'")


def test_what_others_do_to_signals_stays() -> None:
    """One that was held back before still is; in a thread nothing is put back, and not what came from elsewhere."""
    before, later = signal.getsignal(signal.SIGTERM), lambda *given: None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    within_it, changed = threading.Event(), threading.Event()

    def guarded() -> str:
        with games_code("x"), unmoved():
            within_it.set()
            changed.wait()
        return "ended"

    try:
        with unmoved():
            pass
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(guarded)
            within_it.wait()
            signal.signal(signal.SIGTERM, later)
            changed.set()
            assert done.result() == "ended"
        assert signal.getsignal(signal.SIGTERM) is later
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


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


@pytest.mark.timeout(0)
def test_a_limit_holds_on_when_one_within_it_has_ended() -> None:
    """And its alarm comes in its own time, whatever a longer one before it asked for."""
    with within(60, "a long one"):
        pass

    def outer() -> None:
        with within(0.3, "outer"):
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.3 + limits.LATER_S
            with within(60, "inner"):
                pass
            for _ in range(3000):
                time.sleep(0.01)

    with pytest.raises(TookTooLongError):
        outer()


@pytest.mark.timeout(0)
def test_an_alarm_within_a_call_is_set_anew() -> None:
    """One that came for an earlier call must not be the last; after a call's end the next comes soon, not never."""
    with within(60, "a call"):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(signal.SIGALRM)
        assert 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60 + limits.LATER_S
        limits._set_alarm(limits._Call("over", time.monotonic() - 5, 1.0, None))
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= limits.LATER_S


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


@pytest.mark.parametrize(("limit_s", "later_s"), [(0.2, limits.LATER_S), (60.0, 60.0)])
def test_what_does_not_come_back_is_named_once_when_its_time_has_passed_again(
    limit_s: float, later_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    call, said = limits._Call("a game", 100.0, limit_s, None), []
    for now in (99.9, 100.0, 100 + 0.9 * later_s, 100 + later_s, 100 + 3 * later_s):
        limits._look(1, call, now)  # no thread has this number
        said.append("a game does not come back: end msgrpo" in capsys.readouterr().err)
    assert said == [False, False, False, True, False]


@pytest.mark.parametrize(("worked_s", "given_s"), [(1.0, 100.0), (30.0, 0.0)])
def test_a_call_is_not_charged_for_the_time_in_which_the_process_stood_still(worked_s: float, given_s: float) -> None:
    """A Ctrl-Z for a minute within a game's call was a hang, and the episode was lost."""
    with within(1000, "a game"), within(500, "its template"):
        inner = limits._calls[threading.get_ident()]
        outer = inner.before
        assert outer is not None
        ends = [inner.ends, outer.ends]
        limits._give_back(100.0, worked_s)
        assert [inner.ends, outer.ends] == [end + given_s for end in ends]


def test_a_call_that_waits_without_end_in_c_is_given_time_once() -> None:
    """A loop of waits in which C keeps Python's lock was given each of them back, and never ended."""
    with within(1000, "a game"):
        call = limits._calls[threading.get_ident()]
        ends = call.ends
        limits._give_back(2.0, 0.0)
        limits._give_back(2.0, 0.0)
        assert call.ends == ends + 2.0

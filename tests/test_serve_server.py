"""Starting, readiness, failure and, above all, the end of the child, with a fake that is as vLLM at its worst."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from msgrpo.errors import ServeError
from msgrpo.models.bounded import LONGEST_BODY
from msgrpo.serve import preflight, supervisor, terminal
from msgrpo.serve import server as server_module
from msgrpo.serve.preflight import check_port, failure, free_port, stage, telling_lines
from msgrpo.serve.server import Server, hold_port, models
from msgrpo.serve.vllm_command import Launch, Request
from tests.serve_fakes import fake_launch

ROOT = Path(__file__).parents[1]
WITHIN_S = 60  # far beyond what stopping takes, and far less than what is left running or drains


@pytest.fixture(autouse=True)
def _short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "DRAIN_S", -0.8)  # the supervisor waits a second longer than vLLM drains


def shared_memory_of(log: Path) -> Path:
    """The file that the fake left in shared memory."""
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("shared memory")]
    return Path("/dev/shm") / line.split()[-1]


@contextlib.contextmanager
def ended(pid: int) -> Iterator[None]:
    """On the way out, wait until the process `pid` has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        yield
        readable, _, _ = select.select([pidfd], [], [], WITHIN_S)
        assert readable, f"process {pid} is still there after {WITHIN_S} s"
    finally:
        os.close(pidfd)


def ready(server: Server) -> tuple[int, Path]:
    """Starts the server, and waits for it: its session and its shared memory."""
    server.start()
    server.wait_ready()
    return server.pid, shared_memory_of(server.log)


@pytest.mark.parametrize("options", [(), ("stubborn",)])
def test_a_ready_server_is_stopped_with_all_that_belongs_to_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    server = Server(fake_launch(*options), tmp_path / "vllm.log")
    session, memory = ready(server)
    assert len(supervisor.session_processes(session)) == 3  # the fake, its worker, Python's resource tracker
    assert memory.exists()
    server.stop()
    assert supervisor.session_processes(session) == []
    assert not memory.exists()
    server.stop()  # a second time does nothing


def test_a_server_that_still_starts_is_stopped(tmp_path: Path) -> None:
    server = Server(fake_launch("starting", "stubborn"), tmp_path / "vllm.log")
    server.start()
    session = server.pid
    with pytest.raises(KeyboardInterrupt), server:
        server.wait_ready(_interrupt_once(server.log))
    assert supervisor.session_processes(session) == []
    assert not shared_memory_of(server.log).exists()


def _interrupt_once(log: Path) -> Callable[[str], None]:
    def on_stage(_: str) -> None:
        if "serving" in log.read_text():
            raise KeyboardInterrupt

    return on_stage


def test_of_a_child_that_cannot_be_started_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    launch = fake_launch()
    launch = replace(launch, command=[*launch.command, "x" * 2**21])  # longer than the kernel takes
    for _ in range(2):  # the port is free again, too
        with pytest.raises(ServeError, match="cannot be started: Argument list too long"):
            Server(launch, tmp_path / "vllm.log").start()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_while_a_server_starts_its_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    looks: list[str] = []
    monkeypatch.setattr(server_module, "stage", lambda lines, before="": read.append(lines) or before)
    server = Server(fake_launch("starting"), tmp_path / "vllm.log")

    def on_stage(now: str) -> None:
        if "serving" in server.log.read_text():
            looks.append(now)
        if len(looks) == 3:
            raise KeyboardInterrupt

    server.start()
    with pytest.raises(KeyboardInterrupt), server:
        server.wait_ready(on_stage)
    assert "".join(read).count("serving") == 1


def test_a_server_that_dies_at_the_start_is_one_error_with_its_telling_line(tmp_path: Path) -> None:
    with Server(fake_launch("dies"), tmp_path / "vllm.log") as server:
        server.start()
        with pytest.raises(ServeError, match="the fake one cannot start") as caught:
            server.wait_ready()
    assert "pid=7" not in caught.value.message
    assert caught.value.fix is not None
    assert str(tmp_path / "vllm.log") in caught.value.fix


def test_a_server_that_dies_later_is_one_error(tmp_path: Path) -> None:
    with Server(fake_launch(), tmp_path / "vllm.log") as server:
        session, memory = ready(server)
        for pid in supervisor.session_processes(session):
            if b"-c\0\nimport http.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServeError, match=r"vLLM ended \(exit status 137\)"):
            server.wait()
        assert supervisor.session_processes(session) == []  # its worker is gone too
    assert not memory.exists()


def test_ready_means_that_every_model_is_there(tmp_path: Path) -> None:
    launch = fake_launch(models=("nano", "fl"), lists=("nano",))
    with Server(launch, tmp_path / "vllm.log") as server:
        server.start()
        with pytest.raises(ServeError, match="does not serve fl, but nano"):
            server.wait_ready()


def test_a_list_that_comes_late_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with much other work a server that had begun was given up: no answer in time."""
    monkeypatch.setattr(server_module, "ASK_S", 0.5)
    with Server(fake_launch("busy"), tmp_path / "vllm.log") as server:
        server.start()
        server.wait_ready()


def test_a_killed_supervisor_leaves_nothing_after_stop(tmp_path: Path) -> None:
    server = Server(fake_launch(), tmp_path / "vllm.log")
    session, memory = ready(server)
    scratch = Path(server._scratch)
    assert scratch.is_dir()
    os.kill(session, signal.SIGKILL)
    with pytest.raises(ServeError, match="vLLM ended"):
        server.wait()
    server.stop()
    assert supervisor.session_processes(session) == []
    assert not memory.exists()
    assert not scratch.exists()


def test_another_servers_answer_is_not_taken_for_readiness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's starts at our port: vLLM binds it first and listens much later."""
    monkeypatch.setattr("msgrpo.serve.server.hold_port", lambda port: socket.socket())  # which only ours keep
    launch = fake_launch()
    with Server(launch, tmp_path / "a.log") as theirs, Server(fake_launch("dies"), tmp_path / "b.log") as ours:
        theirs.start()
        theirs.wait_ready()
        ours.launch = replace(ours.launch, port=launch.port)
        ours.start()
        with pytest.raises(ServeError, match="the fake one cannot start"):
            ours.wait_ready()


def test_a_log_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ServeError, match="cannot be written"):
        Server(fake_launch(), tmp_path / "runs" / "serve" / "vllm.log").start()


DRIVER = """
import os, sys
from rich.console import Console
from pathlib import Path
from msgrpo.serve import server, terminal
from msgrpo.serve.vllm_command import Launch, Request
server.DRAIN_S = float(os.environ["DRAIN_S"])
command, port = sys.argv[2:], int(sys.argv[1])
launch = Launch(command, {"PYTHONPATH": sys.path[0]}, "127.0.0.1", port, ["nano"])
terminal.prepare = lambda request, console: launch
ready = terminal.serve(Request(port=port), None, Console(width=200))
print("was ready" if ready else "never ready", flush=True)
"""


@contextlib.contextmanager
def driven(
    folder: Path, launch: Launch, until: str, drain_s: float = -0.8
) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """`msgrpo serve` in a process of its own, once it has printed `until`: (process, supervisor's pid, lines)."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(launch.port), *launch.command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "DRAIN_S": str(drain_s)},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if until in line:
                break
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield process, int(child), lines
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_ready_server(tmp_path: Path, number: signal.Signals) -> None:
    with driven(tmp_path, fake_launch("stubborn"), "stop it with") as (process, session, lines):
        assert "models   nano" in lines
        process.send_signal(number)
        rest, _ = process.communicate(timeout=WITHIN_S)
        assert rest.splitlines()[-2:] == ["stopped", "was ready"]
        assert supervisor.session_processes(session) == []
        assert not shared_memory_of(next(tmp_path.glob("runs/serve/*.log"))).exists()


def test_a_signal_stops_a_server_that_starts(tmp_path: Path) -> None:
    with driven(tmp_path, fake_launch("starting", "stubborn"), "importing vLLM") as (process, session, _):
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=WITHIN_S)
        assert rest.splitlines()[-1] == "never ready"
        assert supervisor.session_processes(session) == []


def test_a_second_ctrl_c_does_not_wait_for_requests_in_flight(tmp_path: Path) -> None:
    with driven(tmp_path, fake_launch("stubborn"), "stop it with", drain_s=600) as (process, session, _):
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert any("stopping" in line for line in process.stdout)  # an interrupted print may end once more
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WITHIN_S)
        assert supervisor.session_processes(session) == []


def test_a_third_ctrl_c_of_a_ready_server_does_not_say_that_it_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "prepare", lambda request, say: fake_launch())
    stop = Server.stop
    monkeypatch.setattr(Server, "wait", interrupted)
    monkeypatch.setattr(Server, "stop", lambda server, **how: (stop(server, **how), interrupted()))
    console = Console(file=io.StringIO(), width=200)
    assert terminal.serve(Request(), None, console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1] == "stopped"


def test_nohup_is_respected(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; the child inherits it
    try:
        with driven(tmp_path, fake_launch(), "stop it with") as (process, _, _):
            fields = dict(line.split(":\t") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            assert int(fields["SigIgn"], 16) >> (signal.SIGHUP - 1) & 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_spinner_says_what_vllm_does(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Server(fake_launch(), tmp_path / "vllm.log") as server:
        terminal._start(server, Console(file=screen, force_terminal=True, width=80))
    assert "importing vLLM …" in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_start_that_takes_long_says_how_long_and_where_its_log_is(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM that hung was waited for under the one line "importing vLLM …"."""
    seconds = 0.0
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: seconds))

    class Hangs(Server):
        def start(self) -> None: ...

        def wait_ready(self, on_stage: Callable[[str], None] = lambda _: None) -> None:
            nonlocal seconds
            for passed in (0.0, 30.0, 61.0, 90.0, 125.0):
                seconds = passed
                on_stage("importing vLLM")

    screen = io.StringIO()
    terminal._start(
        Hangs(fake_launch(), Path("vllm.log")), Console(file=screen, force_terminal=is_terminal, width=99)
    )
    after_two = "importing vLLM … 2:05 min already; its log is vllm.log"
    assert after_two in screen.getvalue()
    if not is_terminal:
        minutes = ["importing vLLM …", "importing vLLM … 1:01 min already; its log is vllm.log", after_two]
        assert screen.getvalue().splitlines() == minutes


@pytest.mark.parametrize("until", ["importing vLLM", "stop it with"])
def test_the_children_notice_a_kill_9_of_msgrpo_serve(tmp_path: Path, until: str) -> None:
    options = ("stubborn", "starting") if until == "importing vLLM" else ("stubborn",)
    with driven(tmp_path, fake_launch(*options), until) as (process, session, _):
        with ended(session):
            process.kill()
        assert supervisor.session_processes(session) == []


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} is in use") as caught:
            check_port("127.0.0.1", port)
    assert f"--port {port + 1}" in str(caught.value)
    check_port("127.0.0.1", free_port())


def test_a_free_port_is_none_that_a_system_gives_away_before_the_server_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the system's own ports one was taken by somebody's connection while the server was being loaded."""
    assert all(20_000 <= free_port() < 30_000 for _ in range(20))
    with pytest.raises(ServeError, match=r"cannot listen at 192.0.2.77"):
        free_port("192.0.2.77")
    monkeypatch.setattr(preflight, "check_port", Mock(side_effect=preflight.PortInUseError("in use")))
    with pytest.raises(ServeError, match=r"none is free at 127.0.0.1"):
        free_port()


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(ServeError, match=r"cannot listen at 192.0.2.77"):
        check_port("192.0.2.77", free_port())


def test_asking_where_nothing_runs_says_so() -> None:
    with pytest.raises(ServeError, match="nothing answers at"):
        models("127.0.0.1", free_port())


@contextlib.contextmanager
def answering(*pieces: bytes, every_s: float = 0.0) -> Iterator[int]:
    """A server's port that answers every request with these pieces, one after the other, and then ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the client has gone, or the test is over
                while True:
                    with listening.accept()[0] as asked:
                        asked.recv(2**16)
                        for piece in pieces:
                            asked.sendall(piece)
                            time.sleep(every_s)

        threading.Thread(target=answer, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (OK + b'\r\n{"data": [{"id": 5}]}', "is no OpenAI-compatible server"),
        (OK + b'\r\n{"data": ["nano"]}', "is no OpenAI-compatible server"),
        (OK + b"\r\n" + b"[" * 100_000, "is no OpenAI-compatible server"),
        (OK + b"\r\n" + b" " * (LONGEST_BODY + 1), "is no OpenAI-compatible server"),
        (OK + b"content-le", "no whole answer comes from"),
        (OK + b"content-length: 99\r\n\r\n{", "no whole answer comes from"),
    ],
)
def test_an_answer_of_something_else_is_one_error(said: bytes, why: str) -> None:
    with answering(said) as port, pytest.raises(ServeError, match=why):
        models("127.0.0.1", port)


def test_who_answers_a_byte_now_and_then_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte began the time limit anew, and `--status` never ended."""
    monkeypatch.setattr(server_module, "ASK_S", 0.5)
    drip = [OK + b"content-length: 600\r\n\r\n", *[b" "] * 600]
    with answering(*drip, every_s=0.1) as port, pytest.raises(ServeError, match="no answer in time"):
        models("127.0.0.1", port)


def test_a_supervisor_that_is_stopped_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed, stopped, and its command ended with a traceback."""
    monkeypatch.setattr(server_module, "STOP_S", 0.5)
    server = Server(fake_launch(), tmp_path / "vllm.log")
    session, memory = ready(server)
    os.kill(session, signal.SIGSTOP)
    server.stop()
    assert not Path(f"/proc/{session}").exists()
    assert supervisor.session_processes(session) == []
    assert not memory.exists()


def test_the_telling_lines_of_a_log_are_each_shown_once_without_their_prefix() -> None:
    log = """
(EngineCore pid=12) INFO 11-21 11:42:17 [core.py:133] Initializing a V1 LLM engine
(EngineCore pid=12) ERROR 11-21 11:42:17 [core.py:7] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-21 11:42:17 [core.py:7] ValueError: No available memory for the cache blocks.
(APIServer pid=11) ValueError: No available memory for the cache blocks.
(APIServer pid=11)   Value error, User-specified max_model_len (100000) is greater than 2048
(APIServer pid=11) RuntimeError: Engine core initialization failed.
"""
    assert telling_lines(log) == [
        "ValueError: No available memory for the cache blocks.",
        "Value error, User-specified max_model_len (100000) is greater than 2048",
        "RuntimeError: Engine core initialization failed.",
    ]
    assert telling_lines("one\n\ntwo\n") == ["one", "two"]
    worker = (
        "(VllmWorker-0 pid=3) ERROR 11-26 03:41:28 [multiproc_executor.py:953] ValueError: Available memory on node 0"
    )
    assert telling_lines(worker) == ["ValueError: Available memory on node 0"]


def test_a_vllm_that_ended_without_a_word_is_said_to_have_said_nothing(tmp_path: Path) -> None:
    """As one that is killed, or whose log lies on a full disk: the sentence ended after its colon."""
    assert failure("vLLM ended (exit status -9)", tmp_path / "log").message.endswith("-9): its log says nothing")


def test_the_stage_is_read_from_the_last_line_that_tells() -> None:
    assert stage("") == "importing vLLM"
    log = (
        "(EngineCore pid=1) INFO 11-21 11:42:17 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='nano', compilation_config={'mode': 3}\n"
    )
    assert stage(log + "nothing\n") == "starting the engine"
    assert stage("nothing\n", "loading the weights") == "loading the weights"
    assert stage(log + "(Worker pid=2) INFO 1 2 [x] Starting to load model nano...\n") == "loading the weights"


def test_a_second_server_at_a_port_where_the_first_still_starts_is_refused(tmp_path: Path) -> None:
    """vLLM binds at once and listens half a minute later: the second one waited for ever, with 3 GB."""
    first = Server(fake_launch("starting"), tmp_path / "one.log")
    first.start()
    try:
        second = Server(replace(fake_launch("starting"), port=first.launch.port), tmp_path / "two.log")
        with pytest.raises(ServeError, match="another msgrpo serve runs, or is starting, at port"):
            second.start()
        assert not (tmp_path / "two.log").exists()
    finally:
        first.stop(at_once=True)
    hold_port(first.launch.port).close()  # free again


def test_a_port_that_another_program_takes_meanwhile_is_an_end_to_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "TAKEN_S", 0.5)
    launch = replace(fake_launch(), command=[sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", launch.port)), Server(launch, tmp_path / "vllm.log") as server:
        server.start()
        with pytest.raises(ServeError, match="another program has taken port"):
            server.wait_ready()


def test_kill_9_of_supervisor_and_parent_ends_what_they_started(tmp_path: Path) -> None:
    """Nobody is left to end vLLM: the kernel does, and no whole server goes on answering."""
    program = f"""
import sys, time
from pathlib import Path
from msgrpo.serve.server import Server
from tests.serve_fakes import fake_launch
server = Server(fake_launch(), Path({str(tmp_path / "vllm.log")!r}))
server.start()
server.wait_ready()
print(server.pid, server.launch.port, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    session, port = map(int, parent.stdout.readline().split())
    assert supervisor.listens(session, port)
    os.kill(session, signal.SIGSTOP)  # it notices nothing any more
    parent.kill()
    parent.wait()
    os.kill(session, signal.SIGKILL)
    deadline = time.monotonic() + WITHIN_S
    while supervisor.listens(session, port) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not supervisor.listens(session, port)
    supervisor.end_session(session, 0)  # its worker, which is the real vLLM's to end
    parent.stdout.close()

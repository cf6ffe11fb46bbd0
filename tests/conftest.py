"""For all tests: signals reach the processes that they start, even where a shell runs them as a background job."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.near import use_near_lakes

if TYPE_CHECKING:
    from msgrpo.agent import Agent
    from msgrpo.tui.app import PlayApp
    from msgrpo.tui.session import Setup
    from tests.tui_helpers import ManualClock

# Until all tests are collected: what is imported stays, and searches for cycles in it took a quarter of the time.
gc.disable()

# As in the Makefile: with two threads the last digits of sums depend on how rows are batched. Children get it, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Background jobs of a script ignore the one, nohup the other, and both are passed on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("ours", deadline=None)  # no test depends on how fast the machine is
settings.load_profile("ours")

# The files that take longest, the longest first. Each is dealt to one process as a whole: one that begins last would
# keep the others waiting at the end. The first four begin together: of vLLM's two files, and of what waits for a
# terminal or a cluster, one at a time.
LONGEST = [
    *("serve_vllm", "train_loop", "train_rivals", "tui_terminal"),
    *("train_ranks", "train_vllm", "train_lab", "train_engines", "tui_learning", "train_outside", "train_stops"),
    *("evals_ray", "imports", "train_peers", "train_teacher", "agent_trust", "train_shard", "agent_hostile"),
    *("train_canary", "agent_export", "train_dqn", "tui_people", "tui_series", "train_tinker", "train_nano"),
    "tui_launch",
]
LAST_S = 1300.0  # longer than pytest-timeout's longest limit, which ends no code that holds Python's lock


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """End the process of a test that nothing else ends, so that a test run says which one it was."""
    faulthandler.dump_traceback_later(LAST_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; within a file nothing moves, nor among the others."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen lakes are near ones, which cost a third: see `near.py`."""
    use_near_lakes(monkeypatch)


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key for a server comes from the environment of whoever runs the tests."""
    for name in ("MSGRPO_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no picture, and their canary compares 8 tokens: for tests that are about neither."""
    from msgrpo.train import evaluate
    from msgrpo.train.engines import contract

    monkeypatch.setattr(contract, "TOKENS", 8)
    monkeypatch.setattr(evaluate, "draw_curve", lambda *given: None)


@pytest.fixture
def nothing_has_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """All hostile games have one name, and the third hang of a game is the last."""
    from msgrpo import limits

    monkeypatch.setattr(limits, "_hangs", defaultdict(list))
    monkeypatch.setattr(limits, "_wakes", False)  # pytest's own limit may have had the signal when it was asked for


@pytest.fixture
def clock() -> ManualClock:
    """Time in the app, which goes on when a test says so."""
    from tests.tui_helpers import ManualClock

    return ManualClock()


@pytest.fixture
def app_of(clock: ManualClock, tmp_path: Path) -> Callable[..., PlayApp]:
    """Makes the app for a setup, or for none, with these agents beside `random` and `optimal`."""
    from msgrpo.tui.app import PlayApp
    from tests.tui_helpers import resolver

    def make(setup: Setup | None, **agents: Agent) -> PlayApp:
        return PlayApp(resolver(**agents), setup, clock=clock, runs=tmp_path / "runs", plays=tmp_path / "plays")

    return make


@pytest.fixture
def own_ray() -> Iterator[dict[str, str]]:
    """The environment of a command whose `--ray auto` starts a cluster of its own, whatever runs on this machine."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short: sockets lie below it
        yield os.environ | {"OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}

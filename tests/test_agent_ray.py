"""Which Ray cluster `--ray` means: nobody's private one, and none that does not answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msgrpo import ray_cluster
from msgrpo.errors import RunError, UsageError
from msgrpo.signals import ASIDE


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An address at which something listens, and no cluster of this machine."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", ["nonsense", "http://a:1", "a:b", "a:", ":6379", "a:123456"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        ray_cluster._checked(address)


def test_an_address_where_nobody_listens_is_refused_at_once(listening: str) -> None:
    assert ray_cluster._checked(listening) == listening
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UsageError, match=f"no Ray cluster answers at {closed}"):
        ray_cluster._checked(closed)


def test_auto_is_what_ray_start_wrote_down_while_it_answers(
    listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own `auto` joins any cluster whose process it finds: another run's, which ends some day."""
    assert ray_cluster._current() is None
    written = tmp_path / "ray" / "ray_current_cluster"
    written.parent.mkdir()
    written.write_text(f"{listening}\n")
    assert ray_cluster._current() == listening
    written.write_text("127.0.0.1:1\n")  # it has ended since
    assert ray_cluster._current() is None
    monkeypatch.setenv("RAY_ADDRESS", listening)
    assert ray_cluster._current() == listening


@pytest.mark.parametrize(
    ("token", "mode", "then"), [(True, "", "token"), (False, "", ""), (True, "disabled", "disabled")]
)
def test_rays_token_is_sent_to_the_cluster_of_this_machine(token: bool, mode: str, then: str, tmp_path: Path) -> None:
    """Ray's first cluster here wrote a token, after which no cluster of `ray start` could be joined by `--ray auto`.

    The sibling: an explicit address gets the token only where RAY_AUTH_MODE says so, which the error names.
    """
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("a" * 32)
    code = "import os, ray, msgrpo.ray_cluster as ours; ours._use_token(); print(os.environ.get('RAY_AUTH_MODE', ''))"
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {"HOME": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=env | ({"RAY_AUTH_MODE": mode} if mode else {}),
        capture_output=True,
        check=True,
    )
    assert said.stdout.decode().strip() == then


@pytest.mark.parametrize("owner", ["mine", "root", "another"])
def test_what_another_user_wrote_down_is_not_the_cluster_of_this_machine(
    owner: str, listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may write to /tmp/ray where Ray has not been started yet: `--ray auto` sent Ray's token there."""
    written = tmp_path / "ray" / "ray_current_cluster"
    written.parent.mkdir()
    written.write_text(f"{listening}\n")
    mine = written.stat().st_uid
    monkeypatch.setattr(ray_cluster.os, "getuid", lambda: mine + (owner != "mine"))
    real = Path.stat
    uid = 0 if owner == "root" else mine + 4 if owner == "another" else mine

    def stat(path: Path, **given: bool) -> os.stat_result:
        found = list(real(path, **given))
        return os.stat_result([*found[:4], uid, *found[5:]])

    monkeypatch.setattr(Path, "stat", stat)
    if owner == "another":
        with pytest.raises(UsageError, match="another user of this machine"):
            ray_cluster._current()
    else:
        assert ray_cluster._current() == listening


def test_the_token_is_for_one_connection_only(tmp_path: Path) -> None:
    """RAY_AUTH_MODE stayed in the environment: the next cluster of the process, wherever it is, got the token."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a" * 32)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        code = (
            "import os, ray, msgrpo.ray_cluster as ours\n"
            "from ray._raylet import AuthenticationMode, get_authentication_mode as mode\n"
            "ray.init = lambda *given, **more: print(mode() == AuthenticationMode.TOKEN)\n"
            f"for address in ('auto', {address!r}):\n"
            "    with ours.connected(address): pass\n"
            "print(os.environ.get('RAY_AUTH_MODE'))\n"
        )
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        said = subprocess.run(
            [sys.executable, "-c", code],
            env=env | {"HOME": str(tmp_path), "RAY_TMPDIR": str(tmp_path)},
            capture_output=True,
            check=True,
        )
    assert said.stdout.decode().split() == ["True", "False", "None"]


@pytest.mark.parametrize("own", [None, "9"])
def test_an_address_that_is_no_ray_is_asked_twice(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asked it for a quarter of an hour. The sibling: who has said how often is heard."""
    asked = list[str | None]()

    def init(address: str, **quiet: Any) -> None:
        asked.append(os.environ.get(ray_cluster.TRIES))
        raise RuntimeError("Failed to connect to GCS.")

    monkeypatch.delenv(ray_cluster.TRIES, raising=False)
    if own:
        monkeypatch.setenv(ray_cluster.TRIES, own)
    with pytest.raises(UsageError, match="cannot be joined: Failed to connect to GCS"):
        ray_cluster._join(SimpleNamespace(init=init), "127.0.0.1:1", {})
    assert asked == [own or "2"]
    assert os.environ.get(ray_cluster.TRIES) == own


@pytest.mark.parametrize("own", [None, "5"])
@pytest.mark.parametrize(
    ("name", "ours"), [("RAY_worker_niceness", "0"), ("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "120")]
)
def test_what_ray_is_told_where_nobody_has_said_otherwise(
    name: str, ours: str, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives its workers nice 15: beside anything else that computes, a run with `--ray auto` stood still. And it
    waited ten minutes for a trainer that was frozen.
    """
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")
    told = list[str]()
    for each in ray_cluster.ENVIRONMENT:
        monkeypatch.setenv(each, own or "")
        if own is None:
            monkeypatch.delenv(each)
    monkeypatch.setattr(ray_cluster, "_start", lambda *given: told.append(os.environ[name]))
    with ray_cluster.connected("local"):
        assert told == [own or ours]


def test_a_failure_without_a_word_is_named_by_its_type() -> None:
    def init(*given: Any, **named: Any) -> None:
        raise Exception  # as Ray does where its processes do not begin in time

    with pytest.raises(RunError, match="Ray cannot start here: Exception"):
        ray_cluster._start(SimpleNamespace(init=init, shutdown=lambda: None), {})


def test_a_head_that_stands_still_does_not_keep_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waited for it without end, and Ctrl-C was not heard: only kill -9 helped."""
    monkeypatch.setattr(ray_cluster, "END_S", 0.1)
    goes_on, ended = threading.Event(), threading.Event()

    def shutdown() -> None:
        goes_on.wait()
        ended.set()

    ray_cluster._disconnect(SimpleNamespace(shutdown=shutdown))
    assert any(thread.name == ASIDE for thread in threading.enumerate())  # by which the program ends all the same
    assert not ended.is_set()
    goes_on.set()
    assert ended.wait(60)

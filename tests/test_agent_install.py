"""The command that adds a part of the package, in the way in which the package was installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from msgrpo import doctor, install

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("origin", "asked"),
    [
        ({"url": "file:///clone", "dir_info": {"editable": True}}, "-e '.[train]'"),
        ({"url": "file:///elsewhere%20too", "dir_info": {}}, "'/elsewhere too[train]'"),
        ({"url": "https://host/m.git", "vcs_info": {"vcs": "git"}}, "'msgrpo[train] @ git+https://host/m.git'"),
        (None, "'msgrpo[train]'"),
    ],
)
def test_the_command_asks_for_what_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None, asked: str
) -> None:
    record = tmp_path / "msgrpo-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: msgrpo\nVersion: 1\n")
    if origin is not None:
        (record / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(install.Path, "cwd", lambda: Path("/clone"))
    assert install.install_command("train").endswith(f"pip install {asked}")


def test_pip_is_that_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    assert install.install_command("dqn").startswith("pip install ")
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/elsewhere/{name}")
    assert " -m pip install " in install.install_command("dqn")


@pytest.mark.parametrize("goal", ["demo", "test-openenv"])
def test_make_refuses_an_older_python_before_it_installs_anything(tmp_path: Path, goal: str) -> None:
    """Its environment would stay, too, and keep a newer Python from making one."""
    older = tmp_path / "python3.10"
    run = "import sys; sys.version_info = (3, 10, 13, 'final', 0); exec(sys.argv[2])"  # what python -c is given
    older.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{run}" "$@"\n')
    older.chmod(0o755)
    command = ["make", "-C", str(ROOT), goal, f"PYTHON={older}", f"VENV={tmp_path}/venv"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert f"msgrpo needs Python 3.11 or newer, and {older} is 3.10" in told.stderr
    assert f"make {goal} PYTHON=" in told.stderr
    assert not (tmp_path / "venv").exists()


def test_doctor_names_a_version_that_an_extra_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It called a transformers and a vLLM ready that msgrpo does not run with; pip checks no extras."""
    found = {"transformers": "5.99.0", "vllm": "0.31.0", "torch": "2.99.0+cpu"}
    monkeypatch.setattr(doctor, "version", lambda name: found.get(name) or importlib.metadata.version(name))
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)
    monkeypatch.setattr(doctor, "_ask", lambda program: subprocess.CompletedProcess([], 0, "some GPU", ""))
    parts = {finding.part: finding for finding in doctor.examine()}
    for part, package in (("train", "transformers is 5.99.0, needed is"), ("serve", "vllm is 0.31.0, needed is")):
        assert not parts[part].ok
        assert parts[part].state.startswith(package)
        assert f"[{part}]" in str(parts[part].fix)

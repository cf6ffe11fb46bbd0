"""How far a reader has to go: the files that one default update runs through."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from msgrpo.train.config import make_config
from msgrpo.train.loop import train
from tests.test_imports import FOLDERS, ROOT

MOST, MOST_IN_TRAIN = 21, 10
OURS = tuple(f"{ROOT / folder}/" for folder in FOLDERS)


class Silent:
    """A reporter that is none of the package's files."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


@pytest.mark.usefixtures("near")
def test_one_default_update_runs_through_few_files(tmp_path: Path) -> None:
    """From the first episode of an update to the proof that the engine plays with the new weights."""
    files: set[str] = set()
    within = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal within
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(OURS):  # asked at every call of every library
            return
        if event == "call" and name == "next" and file.endswith("train/rollouts.py"):
            within = True
        if within and event == "call":
            files.add(Path(file).relative_to(ROOT).as_posix())
        if event == "return" and name == "load" and file.endswith("engines/hf.py"):
            within = False

    settings = ["groups=2", "group_size=4", "select=aaw(keep=2)", "minibatches=1", "evaluation=2"]
    config = make_config(settings=settings, given={"steps": 1})
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        train(config, tmp_path / "run", report=Silent())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    in_train = sorted(file for file in files if file.startswith("train/"))
    assert {"train/loop.py", "train/groups.py", "train/msgrpo.py", "train/rivals/paper.py"} <= set(in_train)
    assert len(in_train) <= MOST_IN_TRAIN, in_train
    assert len(files) <= MOST, sorted(files)

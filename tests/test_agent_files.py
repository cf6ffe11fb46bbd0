"""Files are whole, or as they were before: after a kill, and where the disk refuses."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from msgrpo.files import replace_bytes, replace_text

WRITES = """
import sys
from pathlib import Path
from msgrpo.files import replace_text
while True:
    for letter in "ab":
        replace_text(Path(sys.argv[1]), letter * 5_000_000)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    for wait in (0.0, 0.003, 0.011):
        with subprocess.Popen([sys.executable, "-c", WRITES, str(file)], cwd=Path(__file__).parents[1]) as writer:
            while not file.exists():
                assert writer.poll() is None
                time.sleep(0.001)
            time.sleep(wait)
            writer.kill()
        assert file.read_text() in ("a" * 5_000_000, "b" * 5_000_000)
        file.unlink()


def test_what_the_disk_refuses_leaves_what_was_there(tmp_path: Path) -> None:
    """The limit on a file's size stops the write on its way, as a full disk does."""
    file = tmp_path / "file.txt"
    replace_text(file, "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_bytes(file, b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file.txt", "before")]


def test_text_is_written_in_utf8_in_any_locale(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from msgrpo.files import replace_text\n"
    program += "replace_text(Path(sys.argv[1]), '\\u03c8 \\u2192')"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "file")], env=environment, cwd=root, check=True)
    assert (tmp_path / "file").read_bytes().decode() == "ψ →"

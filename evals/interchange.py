"""Records of an evaluation as files that other tools read: logs of Inspect AI, and a dataset folder for Hugging Face.

Both hold what the leaderboard counts, and are refused where it refuses. Logs and rows are plain data first; Inspect's
own classes check and write the logs, pyarrow writes the tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgrpo.errors import RecordError, UsageError, nearest
from msgrpo.evals.exported import CARD, MADE_BY, Files, left_out, played
from msgrpo.evals.huggingface import huggingface_files
from msgrpo.evals.inspect_log import inspect_files
from msgrpo.evals.leaderboard import PLAYED_ON, Leaderboard, build
from msgrpo.evals.plays import Play, load
from msgrpo.text import counted

PART = ".msgrpo-export.part"  # the folder where files are written before they take their places
TOOLS: dict[str, Callable[[Sequence[Play], Leaderboard], Files]] = {
    "inspect": inspect_files,
    "huggingface": huggingface_files,
}


@dataclass(frozen=True)
class Exported:
    """How many files were written, and of how many episodes."""

    files: int
    results: int
    errors: int  # episodes without a result: the endpoint failed
    failed: int  # further attempts that the endpoint failed
    left_out: int  # episodes after the first one of the suite that has not ended
    notes: list[str]

    @property
    def summary(self) -> str:
        """The counts as one sentence."""
        files, results = counted(self.files, "file"), counted(self.results, "episode")
        text = f"{files}: {results} with a result, {self.errors} with an error instead"
        if self.failed:
            text += f", {self.failed} more attempts that an endpoint failed"
        if self.left_out:
            text += f"; left out: {self.left_out}, because earlier ones of the suite have not ended"
        return text


def export(folders: Sequence[Path], to: str, out: Path) -> Exported:
    """Write the records below `folders` as files for the tool `to`, each complete or not at all; upload nothing.

    Raises RecordError for what the leaderboard refuses, and UsageError where `out` holds anything that this export
    would not replace.
    """
    if to not in TOOLS:
        raise UsageError(f"nothing is exported to {to!r}", fix=nearest(to, TOOLS))
    try:
        loaded, notes = load(folders)
    except RecordError as error:  # an export has no --mix
        raise RecordError(error.message, fix=error.fix and error.fix.replace(", or say --mix", "")) from error
    board = build(loaded, notes)
    plays = [play for play in loaded if play.finished or play.unfinished]
    if not plays:
        why = "; ".join(board.notes) or "the records are empty"
        raise RecordError(f"there is nothing to export: {why}", fix=PLAYED_ON)
    files = TOOLS[to](plays, board)
    check_free(out, files)
    write(files, out)
    all_played = [entry for play in plays for entry in played(play)]
    errors = sum(entry.episode.error is not None for entry in all_played)
    return Exported(
        files=len(files),
        results=len(all_played) - errors,
        errors=errors,
        failed=sum(len(entry.failed) for entry in all_played),
        left_out=sum(map(left_out, loaded)),
        notes=board.notes,
    )


def check_free(out: Path, files: Iterable[str]) -> None:
    """Raise UsageError where `out` is no folder, or holds a file that an export of the same records did not write."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", fix="give another --out: a folder")
    names = set(files)
    try:
        present = (path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir())
        other = next((name for name in present if name not in names and not name.startswith(f"{PART}/")), None)
        if CARD in names and (out / CARD).is_file() and MADE_BY not in (out / CARD).read_text(errors="replace"):
            other = CARD
    except OSError as error:
        raise RecordError(f"{out} cannot be read: {error.strerror}", fix="give another --out") from error
    if other is not None:
        fix = "give another --out; if that is an older export, remove it first"
        raise UsageError(f"{out} holds something else: {other}", fix=fix)


def write(files: Files, out: Path) -> None:
    """Write every file into a temporary folder, and move them into place once all are complete."""
    part = out / PART
    try:
        shutil.rmtree(part, ignore_errors=True)  # left by an export that was killed
        part.mkdir(parents=True)
        try:
            for name, make in files.items():
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                make(part / name)
            for name in files:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (part / name).replace(out / name)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):  # it holds files, as it should
                out.rmdir()
    except OSError as error:
        raise RecordError(f"{out} cannot be written: {error.strerror or error}", fix="give another --out") from error

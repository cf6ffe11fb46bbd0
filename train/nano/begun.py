"""Checkpoints of `msgrpo teach` and `msgrpo nano build`: the same command goes on from what was learned so far."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from msgrpo.errors import RunError, UsageError, of_the_machine
from msgrpo.files import check_regular, is_part, new_parents, remove_parts, replacing
from msgrpo.models.asked import TAUGHT
from msgrpo.run_log import LOCK, alone
from msgrpo.train.run_folder import refused


@contextmanager
def alone_in(out: Path, begun: str) -> Iterator[None]:
    """A folder for one model alone, until it is done. Raises UsageError if it holds anything but its beginning.

    Where nothing was begun in it, a new folder goes again.
    """
    _check_free(out, begun)
    is_new = not out.exists()
    with refused(str(out)), new_parents(out), alone(out):
        _check_free(out, begun)  # who was here before may have ended meanwhile, and left a model
        remove_parts(out)
        try:
            yield
        except BaseException:
            if is_new and [file.name for file in out.iterdir()] == [LOCK]:
                (out / LOCK).unlink()
                out.rmdir()
            raise
        (out / begun).unlink()
        (out / LOCK).unlink()


def _check_free(out: Path, begun: str) -> None:
    files = [file for file in out.iterdir() if file.name != LOCK and not is_part(file)] if out.exists() else []
    if files and out / begun not in files:
        further = f", with --base {shlex.quote(str(out))} to teach its model further" if out / TAUGHT in files else ""
        raise UsageError(f"--out {out} is not empty", fix=f"choose another --out{further}")


def check_steps(steps: int) -> None:
    """Raise UsageError where there is nothing to be learned."""
    if steps < 1:
        raise UsageError(f"{steps} steps teach nothing", fix="1 or more")


def save(file: Path, saved: dict[str, Any]) -> None:
    """Write it whole or not at all."""
    with replacing(file) as handle:
        torch.save(saved, handle)


@contextmanager
def taking_over(file: Path, planned: str) -> Iterator[dict[str, Any]]:
    """What was saved, to be taken over within the block. Raises UsageError if something else was begun there,
    RunError where the file is damaged, or of a version that learned something else.
    """
    try:
        check_regular(file)
        saved: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        if saved["planned"] != planned:
            raise UsageError(
                f"{file.parent} holds what was begun with {saved['planned']}",
                fix="the same settings go on; or choose another --out",
            )
        yield saved
    except Exception as error:  # whatever a file holds that somebody changed
        if isinstance(error, UsageError) or of_the_machine(error):
            raise
        raise RunError(
            f"{file} is damaged, or of another version: {type(error).__name__}", fix="begin anew in another --out"
        ) from error


def check_finite(step: int, loss: float, gradient: float) -> None:
    """Raise RunError, before a weight has changed, where the loss or its gradient is no number."""
    if not math.isfinite(loss + gradient):
        raise RunError(
            f"the loss is not finite in step {step + 1}: {loss}, gradient {gradient}",
            fix="begin anew in another --out with another --seed",
        )

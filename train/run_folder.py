"""A run's folder: whose it is, what settings it holds, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from msgrpo import run_log
from msgrpo.episode import Episode
from msgrpo.errors import RunError, UsageError, first_fault, unknown_names
from msgrpo.files import is_file, is_part, read_regular, remove_parts, replace_text
from msgrpo.run_log import CONFIG, LOCK, SUMMARY, TRANSCRIPTS
from msgrpo.train.config import TrainConfig
from msgrpo.train.launched import by_accelerate, launched, processes
from msgrpo.train.sinks import Reporter, Sinks, open_sinks
from msgrpo.trust import check_named, foreign

# On resume: how long it runs, where it plays and computes; and the film of `evaluation` (`_fixed`).
MAY_CHANGE = ("steps", "rollouts", "trainers", "shard", "backend")
# What a run leaves that did not begin.
BEFORE_A_RUN = ("vllm.log", "versions", "versions-of", "train.log", "cost.json", LOCK)
READABLE = 4  # episodes of the last update that are kept to read


def check_folder(
    out: Path, config: TrainConfig, resume: bool, ray: str | None = None, logs: Sequence[str] = ()
) -> None:
    """Refuse to touch a folder that holds another run, or anything that is no run; `ray` is the cluster's address."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", fix="choose another --out")
    if is_free(out):
        return
    if not resume and is_file(out / CONFIG):
        raise UsageError(f"--out {out} holds a run already", fix="go on with --resume, or choose another --out")
    recorded = config_of(out, config.model_dump(), ray, logs)
    if recorded is None:
        raise UsageError(f"--out {out} is not empty and holds no run", fix="choose another --out")
    there, wanted = recorded.model_dump(), config.model_dump()
    fixed, asked = _fixed(recorded), _fixed(config)
    differing = [key for key in wanted if key not in MAY_CHANGE and fixed[key] != asked[key]]
    if (recorded.service is None) != (config.service is None):  # only its price and limit may change
        differing.append("backend")
    if differing:
        differences = ", ".join(f"{key} {there[key]!r} there, {wanted[key]!r} asked" for key in differing)
        raise UsageError(
            f"--out {out} holds a run with other settings: {differences}",
            fix=f"go on by its own: {resume_command(out, ray, logs)}; or choose another --out",
        )


def is_free(out: Path) -> bool:
    """Whether a run may begin in this folder: nothing is there, or what a run leaves that did not begin."""
    if not out.is_dir():
        return not out.exists()
    return all(entry.name in BEFORE_A_RUN or is_part(entry) for entry in out.iterdir())


def _fixed(config: TrainConfig) -> dict[str, Any]:
    """The settings as they are compared on resume: without the film."""
    return config.model_dump() | {"evaluation": (config.evaluation.starts, config.evaluation.every)}


def resume_command(out: Path, ray: str | None = None, logs: Sequence[str] = ()) -> str:
    """What goes on with the run in `out`, ready to be pasted; what only a person may name is named in it, and what no
    setting holds: the Ray cluster that it runs on, and its `logs`.
    """
    try:
        recorded = _recorded(read_regular(out / CONFIG))
    except (OSError, ValueError):
        recorded = {}
    allowed = allowing(recorded) if isinstance(recorded, dict) else ""
    return f"{_program(ray)} {allowed}{_resuming(out, ray, logs)}"


def _program(ray: str | None) -> str:
    """What starts this run's processes. On a cluster Ray does."""
    count = 1 if ray is not None else processes()
    if count == 1:
        return "msgrpo"
    launcher, number, module = (
        ("accelerate launch --multi_gpu", "--num_processes", "--module")  # without it: one process where GPUs are few
        if by_accelerate()
        else ("torchrun", "--nproc-per-node", "-m")
    )
    here = f"{number} {count}" if launched("LOCAL_WORLD_SIZE", 0) == count else "…"
    return f"{launcher} {here} {module} msgrpo.cli"


def _resuming(out: Path, ray: str | None, logs: Sequence[str]) -> str:
    cluster = "" if ray is None else f" --ray {shlex.quote(ray)}"
    return f"train --resume --out {shlex.quote(str(out))}{cluster}{''.join(f' --log {name}' for name in logs)}"


def allowing(settings: Mapping[str, Any]) -> str:
    """The options of `msgrpo` for what only a person may name in a run's settings; empty where that is nothing."""
    return "".join(f"--allow {shlex.quote(name)} " for _, name in foreign(settings))


def how_to_go_on(out: Path, ray: str | None = None, logs: Sequence[str] = ()) -> str:
    """What to do about a run that has ended early: go on with it, or begin it where it had not begun."""
    begun = is_file(out / CONFIG)  # without its settings there is nothing to go on with
    return (
        f"go on with: {resume_command(out, ray, logs)}" if begun else "it had not begun: the same command begins it"
    )


def _recorded(text: bytes) -> Any:
    """A run's settings as they stand in its file. Raises ValueError where that is no JSON."""
    recorded = from_json(text)
    return by_todays_names(recorded) if isinstance(recorded, dict) else recorded


def by_todays_names(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings of a run: what is called backend now was engine at first, and its local was `here`."""
    settings = dict(recorded)
    if "engine" in settings:
        engine = settings.pop("engine")
        settings["backend"] = "local" if engine == "here" else engine
    return settings


def config_of(
    out: Path, given: Mapping[str, Any], ray: str | None = None, logs: Sequence[str] = ()
) -> TrainConfig | None:
    """The settings of the run in `out`; None where there is none.

    `given` are the settings that a person gave themselves. Raises UsageError for a damaged file, and for one that
    names code or a server that nobody else has named.
    """
    file = out / CONFIG
    if not file.is_file():
        return None
    try:
        recorded = _recorded(file.read_bytes())
        if isinstance(recorded, dict):
            if isinstance(recorded.get("prompt", {}), str):
                raise ValueError("prompt is a text, which would be the name of a file to read")
            said = [f"{key}={given[key]}" for key in MAY_CHANGE if key in given]
            changes = "".join(f" --set {shlex.quote(setting)}" for setting in said)
            changed = "scenario" in given and given["scenario"] != recorded.get("scenario")
            named = [
                pair for pair in foreign(recorded) if pair[0] not in given or (pair[0] == "scenario" and changed)
            ]
            check_named(named, str(file), f"{_resuming(out, ray, logs)}{changes}", _program(ray))
        return TrainConfig.model_validate(recorded)
    except ValueError as error:
        if isinstance(error, ValidationError) and (unknown := unknown_names(error)):
            asked = any(name.startswith("prompt.") for name in unknown)  # then nobody here knows how to ask it
            raise UsageError(
                f"{file} is of another version of msgrpo: here no setting is called {', '.join(unknown)}",
                fix="go on with the version that began the run, or choose another --out"
                + ("" if asked else "; the adapter that the run has can be used here"),
            ) from error
        why = first_fault(error, "settings") if isinstance(error, ValidationError) else str(error)
        raise UsageError(f"{file} is damaged, or of another version: {why}", fix="choose another --out") from error


def open_folder(out: Path, config: TrainConfig, step: int, report: Reporter, logs: Sequence[str]) -> Sinks:
    """Make the run's folder, or drop from it what came after update `step`; write the settings, open the sinks."""
    out.mkdir(parents=True, exist_ok=True)
    remove_parts(out)  # of a killed run; this one holds the folder
    run_log.forget_after(out, step)
    if step < config.steps:  # a summary of fewer updates says nothing of the weights that come
        (out / SUMMARY).unlink(missing_ok=True)
    replace_text(out / CONFIG, config.model_dump_json(indent=2) + "\n")
    return open_sinks(out, config, step, report, logs)


def write_transcripts(out: Path, episodes: Sequence[Episode]) -> None:
    """A few episodes of the last update, spread over its groups, to read."""
    chosen = episodes[:: max(1, len(episodes) // READABLE)][:READABLE]
    replace_text(out / TRANSCRIPTS, "".join(episode.model_dump_json() + "\n" for episode in chosen))


@contextmanager
def writing(out: Path, ray: str | None = None, logs: Sequence[str] = ()) -> Iterator[None]:
    """What the disk refuses, in whatever file of the run, is one clear error; what a network refuses is another."""

    def then(first: str) -> str:
        if not is_file(out / CONFIG):  # without its settings there is nothing to go on with
            return f"{first}, or choose another --out"
        return f"{first}, then go on: {resume_command(out, ray, logs)}"

    with refused(f"the run {out}", then):
        yield


def the_same_command(first: str) -> str:
    """What goes on with all but a run of `train`."""
    return f"{first}; the same command goes on"


@contextmanager
def refused(where: str, then: Callable[[str], str] = the_same_command) -> Iterator[None]:
    """What the system refuses within is one clear error. `then` says what to do `first`, and what then."""
    try:
        with quiet_boards():
            yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, first = "the disk is full", "make room"
        elif error.filename is not None or error.errno in (errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM):
            what, first = "a file cannot be read or written", "remove the cause"
        else:
            what, first = "the system has refused something", "remove the cause"
        raise RunError(f"{what} in {where}: {str(error) or type(error).__name__}", fix=then(first)) from error


@contextmanager
def quiet_boards() -> Iterator[None]:
    """TensorBoard's thread prints no traceback of what the disk refuses: it tells whoever writes there next."""
    usual = threading.excepthook

    def tell(raised: threading.ExceptHookArgs) -> None:
        of_board = type(raised.thread).__module__.startswith("tensorboard.")
        if not (of_board and issubclass(raised.exc_type, OSError)):
            usual(raised)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = usual

"""Write files so that after a kill or a power cut each is complete or as it was before."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from msgrpo.errors import UsageError
from msgrpo.text import as_json


def replace_text(file: Path, text: str) -> None:
    """Write a text file, in UTF-8; see `replace_bytes`."""
    replace_bytes(file, text.encode())


def replace_json(file: Path, value: Any) -> None:
    """Write data as indented JSON, with null for numbers that JSON does not have; see `replace_bytes`."""
    replace_text(file, as_json(value, indent=2) + "\n")


def replace_bytes(file: Path, data: bytes) -> None:
    """Write a file whole; see `replacing`."""
    with replacing(file) as handle:
        handle.write(data)


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A temporary file to write to; it is synced and moved into place: if that is interrupted, the old file stays.

    Several writers may do so at once: each has a file of its own, and the last one's stays. Raises OSError where it
    cannot be written; then nothing is left of it.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=PART, dir=file.parent)
    part = Path(name)
    try:
        with _naming(file), os.fdopen(descriptor, "wb") as handle:
            os.fchmod(handle.fileno(), 0o666 & ~_umask())  # as open() would make it
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        part.replace(file)
        sync_folder(file.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path, *, full: bool = False) -> Iterator[Path]:
    """A temporary folder to put files into; they are synced, and it is moved into place whole.

    What stands there may be an empty folder, and with `full` one that holds something; it goes in the last moment.
    Raises OSError where this cannot be done; then nothing is left of it. What a killed writer leaves (`.NAME.*.part`)
    is removed by whoever knows that nobody else writes there.
    """
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{PART}")
    try:
        part.mkdir()
        with _naming(folder):
            yield part
            for inner in part.rglob("*"):  # a tokenizer with several chat templates has a folder for them
                if inner.is_dir():
                    sync_folder(inner)
                else:
                    sync_file(inner)
            sync_folder(part)
        if full:
            shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # on a full disk it would keep it full


@contextmanager
def new_parents(path: Path) -> Iterator[None]:
    """Make the folders above `path`; those that are new go again where the block fails and they are empty."""
    new = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # somebody has put something there meanwhile
            for folder in new:
                folder.rmdir()
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of a write, as on a full disk, names no file: that it be told, it names this one. Of such an error
    torch makes one about a place in its own format.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = error if isinstance(error, OSError) else error.__context__
        if not isinstance(refused, OSError):
            raise
        if refused.errno is not None:  # one that is only words would lose them
            refused.filename = refused.filename or str(path)
        raise refused from None


def check_regular(file: Path) -> None:
    """Raise OSError for a pipe, a device or a folder in the place of a file: to open one may take for ever."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(file))


def read_regular(file: Path) -> bytes:
    """The bytes of a file. Raises OSError where it is none; see `check_regular`."""
    check_regular(file)
    return file.read_bytes()


def open_lock(file: Path) -> TextIO:
    """Open a file that is there to be locked, and make it where it is missing. What is in it may be changed, so a
    link, which may lead to any file, is refused as `check_regular` refuses a pipe.
    """
    check_regular(file)
    if file.is_symlink():
        raise OSError(errno.EINVAL, "it is a link, which may lead to any file: remove it", str(file))
    return file.open("a+", errors="replace")  # what it holds is anybody's


def expanded(path: str | Path) -> Path:
    """The path with somebody's home for its ~. Raises FileNotFoundError where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "nobody has this home", str(path)) from error


def users_folder(variable: str, usual: str) -> Path:
    """Where a user's files of one kind lie: below the folder that a variable names, or else the usual one at home.
    Raises UsageError where there is neither, as for a number without a name in a container.
    """
    try:
        return Path(os.environ.get(variable) or Path.home() / usual) / "msgrpo"
    except RuntimeError as error:
        raise UsageError(f"user {os.getuid()} has no home folder", fix="name one: export HOME=/a/folder") from error


def is_file(name: str | Path) -> bool:
    """Whether there is such a file; names that no file can have are none."""
    try:
        return expanded(name).is_file()
    except OSError:  # too long; ~nobody
        return False


def is_folder(name: str | Path) -> bool:
    """Whether there is such a folder; names that no file can have are none."""
    try:
        return Path(name).is_dir()
    except OSError:
        return False


PART = ".part"  # how the name of a file ends that is being written


def is_part(file: Path) -> bool:
    """Whether a file is the temporary file or folder of a killed writer."""
    return file.name.startswith(".") and file.name.endswith(PART)


def remove_parts(folder: Path) -> None:
    """Remove the temporary files of killed writers from a folder in which nobody else writes files.

    A temporary folder stays: it may be that of an export (`--out RUN/merged`), which asks nobody and may still go on.
    """
    for left in filter(is_part, folder.iterdir()):
        if not left.is_dir():
            left.unlink(missing_ok=True)


def sync_file(file: Path) -> None:
    """Sync a file that a library has written, so that it survives a power cut."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems sync no folders: the files themselves are synced
        return
    finally:
        os.close(descriptor)


def digest(file: Path) -> str:
    """The SHA-256 of a file, which may be larger than the memory."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _umask() -> int:
    """The process's mask, read without being changed for other threads where Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else ():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022

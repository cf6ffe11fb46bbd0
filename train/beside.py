"""`msgrpo train --watch`: the training in a process of its own, and the app that watches its run."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgrpo.errors import UsageError
from msgrpo.files import open_lock
from msgrpo.output import say
from msgrpo.run_log import CONFIG, goes_on, settings
from msgrpo.signals import ending_as_interrupt
from msgrpo.trust import foreign

WAKES_S = 0.2  # by when an app that the shell has woken runs again
LOG = "train.log"  # in the run's folder: what the training would have printed
PROGRAM = (sys.executable, "-P", "-m", "msgrpo.cli")  # -P: nothing in the present folder is imported


def train_and_watch(arguments: Sequence[str], folder: Path) -> int:
    """Start `msgrpo` with these arguments, show the run in the app, and wait for its end; returns its exit status.

    Leaving the app leaves the training going; Ctrl-C then stops it with a checkpoint. Raises UsageError without a
    terminal, and where another one trains in this folder, or begins there: it locks it only once it has loaded.
    """
    if not sys.stdout.isatty():
        raise UsageError(
            "--watch needs a terminal",
            fix=f"train without it, and look with: msgrpo play --run {shlex.quote(str(folder))} --plain",
        )
    fix = "wait for it, or give another --out"
    if goes_on(folder):
        raise UsageError(f"another process trains in {folder}", fix=fix)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG
    with open_lock(log) as output:  # the training holds it, too
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another train --watch trains in {folder}, or begins there", fix=fix) from error
        except OSError:  # the disk has no locks
            pass
        output.truncate(0)
        # a group of its own: Ctrl-C reaches it once, through this process
        training = subprocess.Popen([*PROGRAM, *arguments], stdout=output, stderr=subprocess.STDOUT, process_group=0)
    with ending_as_interrupt():
        try:
            _watch(training, folder)
        except KeyboardInterrupt:
            _stop(training)
    sys.stdout.write("".join(line + "\n" for line in log.read_text(errors="replace").splitlines()[-3:]))
    return training.returncode if training.returncode >= 0 else 128 - training.returncode


def _watch(training: subprocess.Popen[bytes], folder: Path) -> None:
    """Show the run once it has begun; then wait for its end."""
    while training.poll() is None and not ((folder / CONFIG).is_file() and goes_on(folder) is not False):
        time.sleep(0.1)
    if training.poll() is None:
        allowed = [part for _, name in foreign(settings(folder)) for part in ("--allow", name)]  # it trains there now
        app = subprocess.Popen([*PROGRAM, *allowed, "play", "--run", str(folder)])
        try:
            _wait_and_stop_with(app)
        finally:  # it leaves the terminal as it was
            app.terminate()
            app.wait()
    if training.poll() is None:
        say(f"the training goes on; Ctrl-C stops it with a checkpoint. What it prints: {folder / LOG}")
    training.wait()


def _wait_and_stop_with(app: subprocess.Popen[bytes]) -> None:
    """Wait for the app's end. Where Ctrl-Z stops it, stop too: the shell has both in one job, and `fg` wakes both.

    Without a shell nothing stops us, and nobody else would wake the app. It must not be woken twice: the second time
    it would take the terminal as it uses it for the terminal as it found it.
    """
    while app.returncode is None:
        _, status = os.waitpid(app.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGTSTP)
            time.sleep(WAKES_S)
            woken, status = os.waitpid(app.pid, os.WCONTINUED | os.WNOHANG)
            if not woken:
                app.send_signal(signal.SIGCONT)
                continue
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            app.returncode = os.waitstatus_to_exitcode(status)


def _stop(training: subprocess.Popen[bytes]) -> None:
    """Ask the training to stop, and wait for its end; a further Ctrl-C is passed on to it."""
    while training.poll() is None:
        training.send_signal(signal.SIGINT)
        try:
            training.wait()
        except KeyboardInterrupt:
            continue

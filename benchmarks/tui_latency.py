"""How long a person waits: from the command to the first board, and from a key to the whole new picture.

    pip install pyte
    python benchmarks/tui_latency.py [--before FOLDER] [--repeat 40] [--json FILE]

The app runs in a terminal of its own (a pseudo-terminal of 120 by 40 characters), and a terminal emulator (pyte)
reads what it writes. After a key three things have to show the new step: the board, the panel and the history.
`first` is the time to the first of them and `whole` to the last, so that the difference is how long the picture is
torn. The emulator needs longer for a picture than the app does, so what comes after a key is first kept, each piece
with its time, and read by the emulator when nothing more comes. CPU seconds are those of the app's process for one
move, and for a second of watching.
`--before FOLDER` measures another checkout in the same run, turn by turn with this one, so that a busy machine slows
both: the median then compares them. Its dependencies are this environment's.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyte
from machine import facts

ROOT = Path(__file__).parent.parent
COLUMNS, ROWS, LIMIT_S, SETTLES_S, WATCHED_S = 120, 40, 60.0, 0.4, 8.0
PARTS = ("train", "serve", "evals", "tui")
# Moves that end no game, for a start of each scenario.
GAMES = {"frozen-lake": ("right", "left"), "snake-solo": ("up", "right", "up", "right", "up", "right")}
KEYS = {"up": b"\x1b[A", "down": b"\x1b[B", "right": b"\x1b[C", "left": b"\x1b[D"}


class Terminal:
    """The app in a pseudo-terminal."""

    def __init__(self, packages: Path, arguments: list[str]) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self.began = time.perf_counter()
        self.process, self._file = pty.fork()
        if self.process == 0:
            os.chdir(tempfile.mkdtemp())
            os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(packages)}
            os.environ |= {"XDG_CONFIG_HOME": os.getcwd(), "XDG_STATE_HOME": os.getcwd()}
            os.execv(sys.executable, [sys.executable, "-P", "-m", "msgrpo.cli", "play", *arguments])
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._file, keys)

    def piece(self, seconds: float) -> tuple[float, bytes] | None:
        """What is written next and the time at which it came, None where nothing comes."""
        if not select.select([self._file], [], [], seconds)[0]:
            return None
        try:
            data = os.read(self._file, 65536)
        except OSError as error:
            raise SystemExit("the app ended:\n" + "\n".join(self.screen.display).strip()) from error
        return time.perf_counter(), data

    def read(self, seconds: float) -> float | None:
        """Take in what is written; the time at which it came, None where nothing does."""
        piece = self.piece(seconds)
        if piece is None:
            return None
        self._stream.feed(piece[1])
        return piece[0]

    def times(self, shown: Sequence[Callable[[], bool]]) -> list[float]:
        """For each thing that is to be shown, the time of the output with which it was."""
        pieces = []
        while (piece := self.piece(SETTLES_S)) is not None:
            pieces.append(piece)
        at: list[float | None] = [None] * len(shown)
        for came, data in pieces:
            self._stream.feed(data)
            at = [came if time is None and true() else time for time, true in zip(at, shown, strict=True)]
        if None in at:
            raise TimeoutError("\n".join(self.screen.display))
        return [time for time in at if time is not None]

    def until(self, true: Callable[[], bool]) -> float:
        """The time of the output with which it was true."""
        at = time.perf_counter()
        while not true():
            came = self.read(LIMIT_S)
            if came is None:
                raise TimeoutError("\n".join(self.screen.display))
            at = came
        return at

    def settle(self) -> None:
        while self.read(SETTLES_S) is not None:
            pass

    def board(self) -> int:
        """Names the cells of the board: those with a picture in the left half."""
        display = self.screen.display
        rows = [y for y in range(ROWS) if "▀" in display[y][: COLUMNS // 2]]
        cells = [self.screen.buffer[y][x] for y in rows for x in range(COLUMNS // 2)]
        return hash(tuple((cell.data, cell.fg, cell.bg) for cell in cells))

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self._file)


def packages_of(checkout: Path, folder: Path) -> Path:
    """A folder from which the checkout's packages are imported under their one name."""
    (folder / "msgrpo").mkdir(parents=True)
    checkout = checkout.resolve()
    for path in [*(checkout / "msgrpo_agent").iterdir(), *(checkout / part for part in PARTS)]:
        (folder / "msgrpo" / path.name).symlink_to(path)
    return folder


def panel_shows(terminal: Terminal, step: int) -> bool:
    return any(f"step {step}/" in line for line in terminal.screen.display)


def history_shows(terminal: Terminal, step: int) -> bool:
    return f" {step}/" in terminal.screen.display[-2]


def board_changed(terminal: Terminal, before: int) -> bool:
    return terminal.board() != before


def moves(packages: Path, scenario: str, found: dict[str, list[float]]) -> None:
    """The times of the moves of one game, added to `found`."""
    terminal = Terminal(packages, [scenario, "--agent", "human"])
    try:
        terminal.until(lambda: any("step 0/" in line for line in terminal.screen.display))
        terminal.settle()
        for number, way in enumerate(GAMES[scenario], start=1):
            before, cpu = terminal.board(), terminal.cpu()
            shown: list[Callable[[], bool]] = [
                partial(panel_shows, terminal, number),
                partial(history_shows, terminal, number),
                partial(board_changed, terminal, before),
            ]
            began = time.perf_counter()
            terminal.press(KEYS[way])
            times = terminal.times(shown)
            found["first"].append(min(times) - began)
            found["whole"].append(max(times) - began)
            found["cpu"].append(terminal.cpu() - cpu)
    finally:
        terminal.close()


def watching(packages: Path, scenario: str) -> float:
    """CPU seconds for a second of a game that goes on by itself, four steps a second.

    A good player's: a random one's snake stays short or dies, and there is less to draw and to judge.
    """
    terminal = Terminal(packages, [scenario, "--agent", "optimal", "--speed", "4"])
    try:
        terminal.until(lambda: any("step 1/" in line for line in terminal.screen.display))
        cpu, began = terminal.cpu(), time.perf_counter()
        while time.perf_counter() - began < WATCHED_S:
            terminal.read(0.1)
        return (terminal.cpu() - cpu) / (time.perf_counter() - began)
    finally:
        terminal.close()


def first_board(packages: Path) -> float:
    """Seconds from the command to the board."""
    terminal = Terminal(packages, ["frozen-lake", "--agent", "human"])
    try:
        return terminal.until(lambda: any("step 0/" in line for line in terminal.screen.display)) - terminal.began
    finally:
        terminal.close()


def summary(times: list[float]) -> dict[str, float]:
    return {"n": len(times), "median_s": statistics.median(times), "slowest_s": max(times)}


def in_words(found: dict[str, float]) -> str:
    return f"{found['median_s']:.3f} s (at most {found['slowest_s']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--repeat", type=int, default=40, help="moves of each game")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkouts = {"before": options.before, "now": ROOT} if options.before else {"now": ROOT}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        packages = {name: packages_of(path, Path(folder) / name) for name, path in checkouts.items()}
        for scenario, ways in GAMES.items():
            found: dict[str, dict[str, list[float]]] = {
                name: {"first": [], "whole": [], "cpu": [], "watching": []} for name in checkouts
            }
            for _ in range(-(-options.repeat // len(ways))):
                for name in checkouts:
                    moves(packages[name], scenario, found[name])
            for _ in range(3):
                for name in checkouts:
                    found[name]["watching"].append(watching(packages[name], "snake-solo"))
            for name in checkouts:
                rows[f"{scenario}, {name}"] = {what: summary(times) for what, times in found[name].items()}
        starts = {name: summary([first_board(packages[name]) for _ in range(5)]) for name in checkouts}
    for name, row in rows.items():
        print(name, "  ".join(f"{what} {in_words(times)}" for what, times in row.items()))
    for name, times in starts.items():
        print(f"first board, {name}: {in_words(times)}")
    if options.json is not None:
        result = {"machine": facts(), "moves": rows, "first board": starts}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

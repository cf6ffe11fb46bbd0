"""How long a person waits: from the command to the first board, and from a key to the redrawn board.

    python benchmarks/tui_latency.py [--repeat 10] [--json FILE]

The first is measured in a terminal of its own (a pseudo-terminal): from starting the process to the first sign of
the board in its output, with an agent that needs no model, and with nano (whose model loads behind the board).
The second is measured inside the app: from the key to the frame in which the board shows the move.
Run it on a machine that does nothing else: it reports medians and the slowest.
"""

from __future__ import annotations

import argparse
import asyncio
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
from pathlib import Path

from machine import facts

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from msgrpo.specs import make_agent  # noqa: E402
from msgrpo.tui.app import PlayApp  # noqa: E402
from msgrpo.tui.screens.play import PlayScreen  # noqa: E402
from msgrpo.tui.session import Setup  # noqa: E402
from msgrpo.tui.widgets.board import BoardView  # noqa: E402

HEAD = "●P".encode()
LIMIT_S = 120.0


def first_board(agent: str) -> float:
    """Seconds from starting `msgrpo play frozen-lake` to the player's sign in its output."""
    command = [sys.executable, "-m", "msgrpo.cli", "play", "frozen-lake", "--agent", agent]
    began = time.perf_counter()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, command)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        output = b""
        while HEAD not in output:
            left = LIMIT_S - (time.perf_counter() - began)
            if left <= 0 or not select.select([terminal], [], [], left)[0]:
                raise TimeoutError(f"no board within {LIMIT_S:g} s; the output began {output[:200]!r}")
            output += os.read(terminal, 65536)
        return time.perf_counter() - began
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


async def key_to_redraw(repeat: int, plays: Path) -> list[float]:
    """Seconds from a key to the board that shows its move, in the app at 80x24."""
    app = PlayApp(make_agent, Setup("frozen-lake-8x8", "human"), plays=plays)
    times: list[float] = []
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        while len(times) < repeat:
            screen = app.screen
            assert isinstance(screen, PlayScreen)
            if screen.match.over:
                await pilot.press("r")
                await pilot.pause()
                continue
            while not screen.asking.people():
                await asyncio.sleep(0)
            played, view = screen.match.last, screen.query_one(BoardView)
            began = time.perf_counter()
            app.simulate_key("left" if len(times) % 2 else "right")
            while screen.match.last == played or view.board != screen.match.sessions[0].frame.board:
                await asyncio.sleep(0)
            times.append(time.perf_counter() - began)
    return times


def summary(times: list[float]) -> dict[str, float]:
    return {"n": len(times), "median_s": statistics.median(times), "slowest_s": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as plays:
        redraw = asyncio.run(asyncio.wait_for(key_to_redraw(options.repeat, Path(plays)), LIMIT_S))
    found = {
        "first board, optimal": summary([first_board("optimal") for _ in range(options.repeat)]),
        "first board, nano": summary([first_board("nano") for _ in range(options.repeat)]),
        "key to redraw": summary(redraw),
    }
    for name, row in found.items():
        print(f"{name:24} n {row['n']:3}   median {row['median_s']:.3f} s   slowest {row['slowest_s']:.3f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": facts()} | found, indent=2) + "\n")


if __name__ == "__main__":
    main()

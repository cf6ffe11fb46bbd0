"""What a sitting leaves behind: the record of an episode, and an asciicast v2 of it."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

from rich.console import Console

from msgrpo_agent.episode import Episode
from tui.plain import frame_text
from tui.session import Session

LONGEST_STEM = 100  # file systems take names of 255 bytes
CAST_WIDTH, CAST_HEIGHT = 80, 30


def file_stem(session: Session) -> str:
    """`snake-nano-seed7`: scenario, who played, start seed."""
    names = "-vs-".join(session.name(player) for player in session.players)
    clean = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{session.scenario.id}-{names}")
    return f"{clean[:LONGEST_STEM]}-seed{session.seed}"


def episode_line(episode: Episode) -> str:
    return episode.model_dump_json() + "\n"


def append_episode(path: Path, episode: Episode) -> None:
    """Add one line to a record, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(episode_line(episode))
        file.flush()
        os.fsync(file.fileno())


def asciicast(session: Session, *, speed: float) -> str:
    """The episode as asciicast v2: a header line, then one output event a frame, `speed` frames a second."""
    header = {
        "version": 2,
        "width": CAST_WIDTH,
        "height": CAST_HEIGHT,
        "title": f"msgrpo play {session.scenario.id} --seed {session.seed}",
        "env": {"TERM": "xterm-256color"},
    }
    lines = [json.dumps(header)]
    for i, frame in enumerate(session.frames):
        output = io.StringIO()
        console = Console(file=output, force_terminal=True, color_system="standard", width=CAST_WIDTH, no_color=False)
        console.print(frame_text(session, frame))
        screen = "\x1b[2J\x1b[H" + output.getvalue().replace("\n", "\r\n")
        lines.append(json.dumps([round(i / speed, 3), "o", screen]))
    return "\n".join(lines) + "\n"

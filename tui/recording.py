"""A recording of the app (`--record`): what the screen showed, picture after picture, as an asciicast or a GIF.

A picture is the lines of the screen as Textual drew them, so a recording shows what was seen: boards, thoughts, bars.
"""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.screen import Screen
from textual.strip import Strip

from msgrpo.errors import MsgrpoError, UsageError
from msgrpo.extras import needs
from msgrpo.files import replace_bytes

if TYPE_CHECKING:
    from PIL import Image

LONGEST_S, LAST_S = 2.0, 2.5  # a pause that is kept, and how long the last picture stays
FONT_SIZE, COLOURS = 15, 128  # pixels a letter is high; colours of a GIF's picture
# Eighths of a cell that these characters fill: (left, top, right, bottom). Fonts leave gaps between them.
BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "▀": (0, 0, 8, 4),
    "▐": (4, 0, 8, 8),
    **{chr(0x2580 + n): (0, 8 - n, 8, 8) for n in range(1, 9)},  # ▁ … █
    **{chr(0x2590 - n): (0, 0, n, 8) for n in range(1, 8)},  # ▏ … ▉
}
DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))  # (column, row) of the bits of U+2800 …
KINDS = (".gif", ".cast")
STILL = ".svg"  # of a run: six scenes beside each other


@dataclass
class Recording:
    """`pictures` are (seconds since the first, lines of the screen); pauses are cut at LONGEST_S."""

    pictures: list[tuple[float, list[Strip]]] = field(default_factory=list)
    _seen_at: float = 0.0

    def take(self, screen: Screen[Any], now: float) -> None:
        """Add what the screen shows, unless nothing has changed. `now` in seconds."""
        lines = screen._compositor.render_strips()  # what Textual writes to the terminal, screenshots included
        if not self.pictures:
            self.pictures.append((0.0, lines))
        elif lines != self.pictures[-1][1]:
            at = self.pictures[-1][0] + min(max(now - self._seen_at, 0.0), LONGEST_S)
            self.pictures.append((at, lines))
        else:
            return
        self._seen_at = now

    def after(self, other: Recording) -> Recording:
        """One recording: the other, and then this."""
        start = other.pictures[-1][0] + LONGEST_S if other.pictures else 0.0
        return Recording([*other.pictures, *((start + at, lines) for at, lines in self.pictures)])

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows) of the largest picture."""
        wide = max((line.cell_length for _, lines in self.pictures for line in lines), default=0)
        return wide, max((len(lines) for _, lines in self.pictures), default=0)

    def asciicast(self, title: str) -> str:
        """Asciicast v2: a header line, then one output event a picture."""
        width, height = self.size
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width)
        header = {"version": 2, "width": width, "height": height, "title": title, "env": {"TERM": "xterm-256color"}}
        lines = [json.dumps(header)]
        for at, strips in self.pictures:
            shown = "\r\n".join(strip.render(console) for strip in strips)
            lines.append(json.dumps([round(at, 3), "o", f"\x1b[?25l\x1b[H\x1b[2J{shown}\x1b[0m"]))
        return "\n".join(lines) + "\n"

    def gif(self) -> bytes:
        """An animated GIF that plays for ever."""
        draw = _Draw(*self.size)
        images = [draw.picture(lines) for _, lines in self.pictures]
        times = [at for at, _ in self.pictures]
        seconds = [max(after - before, 0.05) for before, after in pairwise(times)]
        out = io.BytesIO()
        images[0].save(
            out,
            format="GIF",
            save_all=True,
            append_images=images[1:],
            duration=[round(1000 * s) for s in (*seconds, LAST_S)],
            loop=0,
            optimize=True,
        )
        return out.getvalue()

    def write(self, file: Path, title: str) -> None:
        """Write the file whole or not at all, by its suffix. Raises MsgrpoError where it cannot be written."""
        write_whole(file, self.gif() if file.suffix == ".gif" else self.asciicast(title).encode())


def write_whole(file: Path, data: bytes) -> None:
    """Write a recording in one move. Raises MsgrpoError where it cannot be written."""
    try:
        replace_bytes(file, data)
    except OSError as error:
        raise MsgrpoError(f"{file} cannot be written: {error.strerror}", fix="give another --record") from error


def check(file: Path, *, of_run: bool = False) -> None:
    """Raise, before anything is played, where a recording could not be written there."""
    if file.suffix not in (*KINDS, *([STILL] if of_run else [])):
        kinds = "is none of .gif, .cast and .svg" if of_run else "ends in neither .gif nor .cast"
        raise UsageError(f"--record {file} {kinds}", fix="--record game.gif")
    if not file.absolute().parent.is_dir():
        raise UsageError(
            f"--record {file}: there is no folder {file.parent}", fix=f"mkdir -p {shlex.quote(str(file.parent))}"
        )
    if file.is_dir():
        raise UsageError(f"--record {file} is a folder", fix=f"--record {shlex.quote(str(file / 'game.gif'))}")
    if file.suffix == ".gif":
        with needs("--record FILE.gif", "train"):
            _font(bold=False)


@cache
def _font(*, bold: bool) -> Any:
    """DejaVu Sans Mono, which comes with matplotlib: the same letters on every machine."""
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSansMono-Bold.ttf" if bold else "DejaVuSansMono.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), FONT_SIZE)


class _Draw:
    """Draws lines of cells; a line that looks like one before is drawn once."""

    def __init__(self, columns: int, rows: int) -> None:
        font = _font(bold=False)
        self.across = round(font.getlength("M"))
        self.down = sum(font.getmetrics())
        self.columns, self.rows = columns, rows
        self._lines: dict[tuple[tuple[str, Style | None], ...], Image.Image] = {}

    def picture(self, lines: Sequence[Strip]) -> Image.Image:
        from PIL import Image

        whole = Image.new("RGB", (self.columns * self.across, self.rows * self.down))
        for row, strip in enumerate(lines):
            whole.paste(self._line(strip), (0, row * self.down))
        return whole.quantize(COLOURS, dither=Image.Dither.NONE)

    def _line(self, strip: Strip) -> Image.Image:
        segments = [segment for segment in strip if segment.cell_length]
        key = tuple((segment.text, segment.style) for segment in segments)
        if key not in self._lines:
            self._lines[key] = self._draw(segments)
        return self._lines[key]

    def _draw(self, segments: Sequence[Segment]) -> Image.Image:
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.columns * self.across, self.down))
        pen = ImageDraw.Draw(image)
        column = 0
        for segment in segments:
            style = segment.style or Style()
            ink, ground = _rgb(style.color, (215, 224, 238)), _rgb(style.bgcolor, (0, 0, 0))
            if style.reverse:
                ink, ground = ground, ink
            wide = cell_len(segment.text)
            left = column * self.across
            pen.rectangle((left, 0, left + wide * self.across - 1, self.down - 1), fill=ground)
            for character in segment.text:
                self._cell(pen, character, column * self.across, ink, bold=bool(style.bold))
                column += cell_len(character)
        return image

    def _cell(self, pen: Any, character: str, left: int, ink: tuple[int, int, int], *, bold: bool) -> None:
        if character in BLOCKS:
            x1, y1, x2, y2 = BLOCKS[character]
            across, down = self.across / 8, self.down / 8
            box = (left + round(x1 * across), round(y1 * down), left + round(x2 * across) - 1, round(y2 * down) - 1)
            pen.rectangle(box, fill=ink)
        elif 0x2800 <= ord(character) < 0x2900:  # braille, in which curves are drawn; the font has none
            across, down = self.across / 2, self.down / 4
            for bit, (x, y) in enumerate(DOTS):
                if ord(character) >> bit & 1:
                    middle, top = left + (x + 0.5) * across, (y + 0.5) * down
                    pen.ellipse((middle - 1.2, top - 1.2, middle + 1.2, top + 1.2), fill=ink)
        elif not character.isspace():
            pen.text((left, 0), character, font=_font(bold=bold), fill=ink)


def _rgb(colour: Color | None, default: tuple[int, int, int]) -> tuple[int, int, int]:
    if colour is None or colour.is_default:
        return default
    red, green, blue = colour.get_truecolor()
    return red, green, blue

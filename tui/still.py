"""Six scenes of a run's film beside each other, as one SVG for a paper: each board at its end, and the way there."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from msgrpo.errors import UsageError
from msgrpo.game import Board, Place, Role
from msgrpo.text import counted
from msgrpo.tui.scenes import Scenes, learner_of
from msgrpo.tui.session import Session, ending, points
from msgrpo.tui.theme import DAY

SCENES = 6
SIDE, GAP, HEAD, FOOT, SIZE = 150, 18, 26, 40, 12  # pixels: a board's longer side, around it, its words; of a letter
WORDS, LINES = 24, 9  # letters of a line and lines of a game without a board
LETTERS: tuple[Role, ...] = ("goal", "good", "bad", "thing", "other", "won")  # whose sign is written on the cell
HEADS: tuple[Role, ...] = ("own", "won", "lost")  # where the first player is
FILLS: dict[Role, str] = {
    "floor": "board-a",
    "ice": "ice-a",
    "wall": "board-mark",
    "hole": "hole",
    "goal": "goal",
    "won": "goal",
    "lost": "hole",
    "own": "snake-body-1",
    "own-body": "snake-body-1",
    "other": "snake-body-2",
    "other-body": "snake-body-2",
    "good": "good",
    "bad": "bad",
}
INK, WAY = DAY.foreground, DAY.accent


class Scene(NamedTuple):
    """One scene: after how many updates it was played, and the episode."""

    step: int
    session: Session


def still(film: Scenes) -> str:
    """The SVG. Raises UsageError where the run keeps no film that can be shown."""
    chosen = list(_chosen(film))
    if not chosen and len(film):
        raise UsageError(f"no scene of {film.folder} can be shown: {film.session_of(film.steps[0])}")
    if not chosen:
        raise UsageError(
            f"{film.folder} keeps no film: trained with film=0, or not begun yet",
            fix="msgrpo train frozen-lake --set 'evaluation=200(film=3)' --out runs/film",
        )
    panels = [
        f'<g transform="translate({GAP + number * (SIDE + GAP)} {GAP})">{_panel(scene)}</g>'
        for number, scene in enumerate(chosen)
    ]
    width, height = GAP + len(chosen) * (SIDE + GAP), HEAD + SIDE + FOOT + 2 * GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{SIZE}" fill="{INK}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(panels)}</svg>\n'
    )


def _chosen(film: Scenes) -> Iterator[Scene]:
    """The first and the last scene, and four between them in equal distances, as far as they can be shown."""
    last = len(film) - 1
    places = sorted({round(last * part / (SCENES - 1)) for part in range(SCENES)}) if last >= 0 else []
    for place in places:
        session = film.session_of(film.steps[place])
        if isinstance(session, Session):
            session.seek(session.last)
            yield Scene(film.steps[place], session)


def _panel(scene: Scene) -> str:
    session = scene.session
    frame = session.frame
    total = frame.tallies[learner_of(session.episode)].total
    title = f"after {counted(scene.step, 'update')}"
    below = [ending(session, frame) or "not over", f"return {points(round(total, 3))}, {frame.step} steps"]
    words = [_text(title, SIDE / 2, SIZE, "bold")]
    words += [_text(line, SIDE / 2, HEAD + SIDE + SIZE + 5 + 16 * row) for row, line in enumerate(below)]
    drawn = _words(frame.seen) if frame.board is None else _board(frame.board, list(_way(session)))
    return f'{"".join(words)}<g transform="translate(0 {HEAD})">{drawn}</g>'


def _text(text: str, x: float, y: float, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-weight="{weight}">{escape(text)}</text>'


def _words(seen: str) -> str:
    """What the player reads, where there is no board: as many lines as have room, with … where more is left out."""
    rows = seen.split("\n")
    rows = rows if len(rows) <= LINES else [*rows[: LINES - 1], "…"]
    lines = [line if len(line) <= WORDS else f"{line[: WORDS - 1]}…" for line in rows]
    return "".join(_text(line, SIDE / 2, SIZE + 16 * row) for row, line in enumerate(lines))


def _board(board: Board, way: list[Place]) -> str:
    """The cells, and over them the way of the first player."""
    cell = SIDE / max(len(board.cells), len(board.cells[0]))
    parts = []
    for y, row in enumerate(board.cells):
        for x, glyph in enumerate(row):
            role = board.roles.get(glyph, "floor")
            fill = DAY.variables.get(FILLS.get(role, ""), DAY.panel)
            parts.append(
                f'<rect x="{x * cell:g}" y="{y * cell:g}" width="{cell:g}" height="{cell:g}" fill="{fill}" '
                f'stroke="#ffffff"/>'
            )
            if role in LETTERS:
                parts.append(_text(glyph, (x + 0.5) * cell, (y + 0.5) * cell + SIZE / 3, "bold"))
    places = [((x + 0.5) * cell, (y + 0.5) * cell) for y, x in way]
    if places:
        line = " ".join(f"{left:g},{top:g}" for left, top in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{WAY}" stroke-width="{cell / 9:g}"/>')
        for (left, top), size in ((places[0], 9), (places[-1], 5)):
            parts.append(f'<circle cx="{left:g}" cy="{top:g}" r="{cell / size:g}" fill="{WAY}"/>')
    return "".join(parts)


def _way(session: Session) -> Iterator[Place]:
    """Where the first player was in each frame, as far as the board shows it."""
    for frame in session.frames:
        cells = frame.board.cells if frame.board else ()
        roles = frame.board.roles if frame.board else {}
        yield from ((y, x) for y, row in enumerate(cells) for x, glyph in enumerate(row) if roles.get(glyph) in HEADS)

"""What stands on a big cell, as a square of pixels: two stand one above the other in one character (▀).

Every shape is a rule on the distances from the middle of the cell, so it works for any even size from 6 on.
"""

from __future__ import annotations

from functools import lru_cache

from msgrpo.game import Role

SMALLEST = 6  # pixels a side; below it letters say more
WAY = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}  # (x, y), y downwards
# Roles that are drawn, and the colour class of each.
DRAWN: dict[Role, str] = {
    "own": "head-1",
    "own-body": "body-1",
    "other": "head-2",
    "other-body": "body-2",
    "good": "good",
    "bad": "bad",
    "goal": "goal",
    "hole": "hole",
    "won": "won",
    "lost": "lost",
}
Sprite = tuple[str, ...]  # rows of pixels: "#" the shape, "o" its mark (an eye, a leaf, a cross), "." what is below


@lru_cache(maxsize=512)
def sprite(role: Role, size: int, joined: frozenset[str], facing: str) -> Sprite:
    """The pixels of a role in a cell of `size` by `size`; `joined` names the sides to which a body goes on."""
    middle = (size - 1) / 2
    pixels = [
        [_pixel(role, x - middle, y - middle, size / 2, joined, facing) for x in range(size)] for y in range(size)
    ]
    return tuple("".join(row) for row in pixels)


def _pixel(role: Role, x: float, y: float, half: float, joined: frozenset[str], facing: str) -> str:
    """One pixel at (x, y) from the middle of a cell that reaches `half` to each side."""
    if role in ("own", "other", "won"):
        if _eye(x, y, half, facing):
            return "o"
        return "#" if x * x + y * y <= half * half or _band(x, y, half - 1, joined) else "."
    if role in ("own-body", "other-body"):
        return "#" if x * x + y * y <= (half - 1) ** 2 + 0.5 or _band(x, y, half - 1, joined) else "."
    if role == "hole":
        return "#" if (x / half) ** 2 + (y / (half - 0.5)) ** 2 <= 1.05 else "."
    if role == "goal":
        return "#" if abs(x) + abs(y) <= half else "."
    if role == "lost":
        return "o" if abs(abs(x) - abs(y)) < 0.9 and abs(x) < half - 0.6 else "#" if x * x + y * y <= half**2 else "."
    if role == "bad":
        cross = abs(abs(x) - abs(y)) < 0.9 and abs(x) < half / 2
        return "o" if cross else "#" if x * x + y * y <= (half - 0.7) ** 2 else "."
    if y < 1 - half:  # an apple's leaf
        return "o" if 0 < x < half - 1 else "."
    return "#" if x * x + (y - 0.5) ** 2 <= (half - 0.6) ** 2 else "."


def _band(x: float, y: float, half_width: float, joined: frozenset[str]) -> bool:
    """Whether the pixel lies between the middle and a side to which the body goes on."""
    for side in joined:
        dx, dy = WAY[side]
        along, across = x * dx + y * dy, abs(x * dy) + abs(y * dx)
        if along > 0 and across <= half_width:
            return True
    return False


def _eye(x: float, y: float, half: float, facing: str) -> bool:
    """Two eyes, in front and to both sides of the way it looks."""
    dx, dy = WAY.get(facing, WAY["up"])
    along, across = x * dx + y * dy, abs(x * dy) + abs(y * dx)
    return 0.4 < along < 0.4 + half / 3 and half / 3 - 0.5 < across < half / 3 + 0.7

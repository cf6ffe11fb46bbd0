"""The scenarios of a run as one name: `frozen-lake`, or a mixture with shares: `snake@0.7,frozen-lake@0.3`."""

from __future__ import annotations

import re


def names_of(scenario: str) -> list[str]:
    """The names of a mixture, without their shares."""
    return [name for name, _ in map(_share_of, _parts(scenario))]


def weights_of(scenario: str) -> list[float]:
    """The number after each name's @; 1 where there is none."""
    return [float(share or 1) for _, share in map(_share_of, _parts(scenario))]


def _parts(scenario: str) -> list[str]:
    """The parts of a mixture; a comma within parentheses belongs to a game's own parameters."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", scenario)]


def _share_of(part: str) -> tuple[str, str | None]:
    """The name and the share of `name@share`; without a share all have the same."""
    form = re.fullmatch(r"(.+)@([\d.]+)", part)
    return (form[1], form[2]) if form else (part, None)

"""Higher or lower in an installed package: what `msgrpo games new` writes, offered under a name of its own."""

from msgrpo.games.higher import scenario

__all__ = ["scenario"]

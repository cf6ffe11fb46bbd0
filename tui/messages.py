"""What widgets tell the screen above them."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass
class SeekTo(Message):
    """The timeline was clicked at a step."""

    step: int


@dataclass
class ActionChosen(Message):
    """An action's bar was clicked in the panel of a seat."""

    session: int
    player: str
    action: str


@dataclass
class AnswerStreamed(Message):
    """The text of an answer so far."""

    session: int
    player: str
    text: str


@dataclass
class SeatAnswered(Message):
    """A seat has decided."""

    session: int
    player: str


@dataclass
class SeatFailed(Message):
    """A seat gave no answer."""

    session: int
    player: str


@dataclass
class RoundEnded(Message):
    """Everybody who was asked has answered, or failed."""


@dataclass
class Judged(Message):
    """A position has been judged."""

"""Where the cursor stands in the history: one mark a step, rewards and invalid answers shown; a click seeks."""

from __future__ import annotations

from itertools import groupby

from textual.events import Click

from msgrpo.tui.judging import Judging
from msgrpo.tui.match import Match
from msgrpo.tui.messages import SeekTo
from msgrpo.tui.pace import Pace
from msgrpo.tui.session import Frame
from msgrpo.tui.widgets.lines import HERE as UNDER_CURSOR
from msgrpo.tui.widgets.lines import Lines, Part

PLAIN, GAIN, LOSS, MISTAKE, BLUNDER, INVALID, AHEAD, HERE = "━", "+", "−", "?", "⁇", "!", "─", "●"
PLAYERS = ("sign-1", "sign-2")  # of two boards: whose sign it is
BOTH = 2
KINDS = {
    PLAIN: "track",
    GAIN: "gain",
    LOSS: "loss",
    MISTAKE: "mistake",
    BLUNDER: "blunder",
    INVALID: "mistake",
    AHEAD: "ahead",
}


def mark(frame: Frame) -> str:
    """The most telling thing that happened in the step that led to a frame."""
    turns = frame.turns.values()
    if any(turn.failure is not None for turn in turns):
        return INVALID
    if any(turn.reward < 0 for turn in turns):
        return LOSS
    return GAIN if any(turn.reward > 0 for turn in turns) else PLAIN


class Timeline(Lines):
    """Steps 0 to the limit, spread over the width."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.match: Match | None = None
        self.pace: Pace | None = None
        self.judging: Judging | None = None

    def show(self, match: Match, pace: Pace, judging: Judging) -> None:
        self.match, self.pace, self.judging = match, pace, judging
        self.draw()

    @property
    def limit(self) -> int:
        return self.match.sessions[0].scenario.step_limit if self.match else 1

    @property
    def _track(self) -> tuple[int, int]:
        """(first column, columns) of the track; the state stands before it and the count after it."""
        return 11, max(10, self.size.width - 11 - 11)

    def step_at(self, column: int) -> int:
        first, width = self._track
        return round(max(0, min(column - first, width - 1)) * self.limit / (width - 1))

    def lines(self) -> list[list[Part]]:
        if self.match is None or self.pace is None or self.judging is None:
            return []
        first, width = self._track
        marks, whose = [AHEAD] * width, [-1] * width  # and the player of each sign: a race has two
        weight = {sign: i for i, sign in enumerate((AHEAD, PLAIN, GAIN, MISTAKE, LOSS, BLUNDER, INVALID))}
        cost = {"": PLAIN, "?": MISTAKE, "??": BLUNDER}
        column_of = [round(step * (width - 1) / self.limit) for step in range(self.limit + 1)]
        for column in range(column_of[min(self.match.last, self.limit)] + 1):
            marks[column] = PLAIN
        for i, session in enumerate(self.match.sessions):
            for frame in session.frames[1:]:
                signs = [cost[self.judging.lost(i, frame.step, player)[1]] for player in frame.turns]
                column = column_of[frame.step]
                most = max(mark(frame), *signs, key=lambda m: weight[m])
                if weight[most] > weight[marks[column]]:
                    marks[column], whose[column] = most, i
                elif most == marks[column] != PLAIN:
                    whose[column] = BOTH
        here = column_of[self.match.cursor]
        sign = "▶" if self.pace.playing else "||"
        parts: list[Part] = [(f" {sign:<2}{self.pace.speed:>4g}/s".ljust(first), "cursor")]
        for i, m in enumerate(marks):
            telling = m in (MISTAKE, BLUNDER, INVALID, LOSS, GAIN)  # the cursor stands on it and does not hide it
            kind = PLAYERS[whose[i]] if len(self.match.sessions) > 1 and whose[i] in (0, 1) else KINDS[m]
            if i == here:
                parts.append((m, kind + UNDER_CURSOR) if telling else (HERE, "cursor"))
            else:
                parts.append((m, kind))
        same = groupby(parts, key=lambda part: part[1])
        count = (f"{self.match.cursor:>5}/{self.limit}", "")
        return [[*(("".join(text for text, _ in run), kind) for kind, run in same), count]]

    def on_click(self, event: Click) -> None:
        self.post_message(SeekTo(self.step_at(event.x)))

"""The desk of a run on a Ray cluster: an actor through which the ranks and the command that began the run talk.

It is a module of its own, since the process that Ray starts for it loads what this file imports, and needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STARTS = 5  # in a row that end before one more update is done: then the run ends
NO_WORD = "no message, as of a process that was killed: Ray kills where memory runs out"


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended: its summary, or the error of a rank; neither where it was asked to stop."""

    summary: dict[str, Any] | None = None
    error: str = ""
    fix: str | None = None
    saved: bool = False  # the error is the first rank's, which has saved what there is


class Desk:
    """What ranks report, until the command fetches it; whether they run; and whether they shall stop."""

    def __init__(self) -> None:
        self._reports: list[tuple[str, tuple[Any, ...]]] = []
        self._outcome: RunEnd | None = None
        self._stopping = self._running = False
        self._starts, self._fruitless, self._last_fault = 0, 0, NO_WORD
        self._furthest = 0  # update that was done

    def report(self, method: str, *given: Any) -> None:
        self._reports.append((method, given))
        if method == "update" and given[0] > self._furthest:  # those after the last checkpoint are done again
            self._fruitless, self._furthest = 0, given[0]

    def fetch(self) -> tuple[list[tuple[str, tuple[Any, ...]]], RunEnd | None, bool]:
        """The reports since the last time, how the run has ended, and whether its ranks run."""
        reports, self._reports = self._reports, []
        return reports, self._outcome, self._running

    def start(self) -> None:
        """Ray has started the ranks. This is counted before they run: one that is killed at once tells nobody."""
        if self._starts and self._last_fault == NO_WORD:
            why = "one has ended without a word, or their number changes"
            self._reports.append(("note", (f"the processes of the run begin again: {why}",)))
        self._running = False
        self._starts += 1
        self._fruitless += 1
        if self._fruitless > STARTS and self._outcome is None:
            self._outcome = RunEnd(
                error=f"{STARTS} starts in a row have ended before one more update was done, the last with: "
                f"{self._last_fault}",
                fix="the last checkpoint is kept; Ray's logs of the workers say more (ray logs)",
            )
        self._last_fault = NO_WORD

    def begin(self) -> bool:
        """The first rank begins; whether the ranks were started before."""
        self._running = True
        if self._stopping:  # what there is to save was saved before: it need not load the model first
            self._outcome = self._outcome or RunEnd()
        return self._starts > 1

    def fault(self, text: str) -> None:
        """A rank has ended by something that starting again may cure."""
        self._last_fault, self._running = text, False
        self._reports.append(("note", (f"a process of the run has ended, all begin again: {text}",)))

    def end(self, outcome: RunEnd) -> None:
        self._outcome = self._outcome or outcome

    def is_over(self) -> bool:
        return self._outcome is not None

    def stop(self) -> None:
        self._stopping = True

    def stopping(self) -> bool:
        return self._stopping

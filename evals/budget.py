"""Limits on what a run may cost: no episode begins that could exceed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Spent(Protocol):
    """The parts of a run's progress that a budget needs. `spent_…` include earlier starts of the command."""

    running: int
    steps_open: int
    largest_tokens: int
    largest_cost: float
    spoken: int  # episodes of language models that have a result
    stopped: str

    @property
    def spent_tokens(self) -> int: ...

    @property
    def spent_cost(self) -> float: ...

    async def change(self) -> None:
        """Wait for the next answer, or the next end of an episode."""
        ...


@dataclass(frozen=True)
class Budget:
    """Tokens and US$ that the records of a run may add up to; None sets no limit.

    An episode is taken to have all its steps, each as large as the largest answer so far: only an answer that is
    larger than all before it can go beyond the limit. Until one has come, a single episode is tried.
    """

    tokens: int | None = None
    cost: float | None = None

    async def room(self, progress: Spent, steps: int) -> bool:
        """Whether an episode of this many steps may begin; waits until the running episodes allow an answer."""
        if self.tokens is None and self.cost is None:
            return True
        while progress.running and not progress.stopped and not self._fits(progress, steps):
            await progress.change()  # not for a time: it would decide which turns of a model here are a batch
        if not self._fits(progress, steps):
            limits = (
                "" if self.tokens is None else f"--max-tokens-total {self.tokens}",
                "" if self.cost is None else f"--max-cost {self.cost:g}",
            )
            why = (
                "" if progress.largest_tokens or not progress.spoken else " (the endpoint does not count its tokens)"
            )
            progress.stopped = f"{' and '.join(filter(None, limits))}{why}: no further episode begins"
        return not progress.stopped

    def _fits(self, progress: Spent, steps: int) -> bool:
        if not progress.largest_tokens and (progress.running or progress.spoken):
            return False  # one episode is tried; an endpoint that does not report its tokens cannot be limited
        return all(
            limit is None or spent + (progress.steps_open + steps) * largest <= limit
            for limit, spent, largest in (
                (self.tokens, progress.spent_tokens, progress.largest_tokens),
                (self.cost, progress.spent_cost, progress.largest_cost),
            )
        )

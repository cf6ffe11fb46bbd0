"""What a run may cost: it ends before it costs more, as a complete beginning of the suite."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

TRIED, LOOK_S = 4, 0.02  # episodes at once until the first has ended; seconds between looks


class Spent(Protocol):
    """What a budget must know of a run's progress. `spent_…` count earlier starts as well."""

    running: int
    stopped: str

    @property
    def ended(self) -> int: ...

    @property
    def spent_tokens(self) -> int: ...

    @property
    def spent_cost(self) -> float: ...

    @property
    def largest_tokens(self) -> int: ...

    @property
    def largest_cost(self) -> float: ...


@dataclass(frozen=True)
class Budget:
    """Tokens and US$ that the records of a run may add up to; None sets no limit."""

    tokens: int | None = None
    cost: float | None = None

    async def room(self, progress: Spent) -> bool:
        """Whether one more episode may begin, once that is known: if it and those that run are as large as the
        largest so far. Until one has ended nobody knows what one takes, and a few go first."""
        if self.tokens is None and self.cost is None:
            return True
        while progress.running and not self._fits(progress, progress.running + 1) and not progress.stopped:
            await asyncio.sleep(LOOK_S)
        if not self._fits(progress, 1):
            limits = (
                f"--max-tokens-total {self.tokens}" if self.tokens is not None else "",
                f"--max-cost {self.cost:g}" if self.cost is not None else "",
            )
            progress.stopped = f"{' and '.join(filter(None, limits))}: no further episode begins"
        return not progress.stopped

    def _fits(self, progress: Spent, episodes: int) -> bool:
        if not progress.ended and episodes > TRIED:
            return False
        return all(
            limit is None or spent + episodes * largest <= limit
            for limit, spent, largest in (
                (self.tokens, progress.spent_tokens, progress.largest_tokens),
                (self.cost, progress.spent_cost, progress.largest_cost),
            )
        )

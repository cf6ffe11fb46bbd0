"""How far an evaluation is, what it costs, and the line that says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from msgrpo.agent import Agent
from msgrpo.evals.record import FREE, Price
from msgrpo.text import duration

LOG_EVERY_S = 10.0  # between lines where there is no terminal
QUIET_S = 60.0  # without an answer, after which the line says so
LONGEST_TROUBLE = 100  # characters of it


def trouble_of(agent: Agent | None) -> str:
    """How the last request of an agent's model failed that has no answer yet; nothing where there is none."""
    return str(getattr(getattr(agent, "model", None), "trouble", ""))[:LONGEST_TROUBLE]


@dataclass
class EvalProgress:
    """Counts of a run in progress; `on_change` is called after each change. Times in seconds."""

    planned: int = 0
    finished_before: int = 0  # episodes that earlier starts of the command finished
    done: int = 0
    failed: int = 0
    given_up: int = 0
    running: int = 0
    tokens: int = 0
    cost: float = 0.0  # US$ of this start, where the price is known
    largest_tokens: int = 0  # tokens of the largest answer and its prompt
    largest_cost: float = 0.0
    spoken: int = 0  # finished episodes of language models, from which the cost of an answer is known
    steps_open: int = 0  # steps that all running episodes together may still have
    stopped: str = ""  # why no further episode begins
    kept_out: list[tuple[str, str]] = field(default_factory=list)  # agents and scenarios of which none ever began
    agent: Agent | None = None
    on_change: Callable[[EvalProgress], None] = lambda progress: None
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    heard: float = field(init=False)  # when an answer last came, or an episode ended
    before: int = 0  # episodes that ended before the present agent began
    prices: dict[str, Price] = field(default_factory=dict)  # by agent
    tokens_at: int = 0  # tokens when the present agent began
    cost_at: float = 0.0
    end_of_agent: int = 0  # ended episodes, earlier starts included, when the present agent has played all
    tokens_before: int = 0  # tokens in the records of earlier starts
    cost_before: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # by an answer, or the end of an episode

    def __post_init__(self) -> None:
        self.began = self.heard = self.clock()

    def begin(self, agent: Agent, planned: int) -> None:
        """Start counting for another agent: rates are of the present agent only, since agents differ in speed."""
        self.agent, self.before = agent, self.ended
        self.began = self.heard = self.clock()
        self.tokens_at, self.cost_at = self.tokens, self.cost
        self.end_of_agent = self.planned - self.left + planned
        self.on_change(self)

    @property
    def waits(self) -> str:
        """How many requests have failed and have no answer yet, and how the last of them failed."""
        number, trouble = getattr(getattr(self.agent, "model", None), "retrying", 0), trouble_of(self.agent)
        return f"{number} retrying{trouble and f': {trouble}'}"

    @property
    def left(self) -> int:
        return self.planned - self.finished_before - self.done - self.failed - self.given_up

    @property
    def rate(self) -> float:
        """Episodes per second of the present agent."""
        return (self.ended - self.before) / max(self.clock() - self.began, 1e-9)

    @property
    def ended(self) -> int:
        return self.done + self.failed

    @property
    def spent_tokens(self) -> int:
        """Prompt and answer tokens of all starts of the command."""
        return self.tokens_before + self.tokens

    @property
    def spent_cost(self) -> float:
        return self.cost_before + self.cost

    def mean_tokens(self) -> float:
        """Mean tokens of an episode of the present agent."""
        return (self.tokens - self.tokens_at) / max(self.ended - self.before, 1)

    def mean_cost(self) -> float:
        return (self.cost - self.cost_at) / max(self.ended - self.before, 1)

    def pay(self, read: int, written: int, spec: str) -> None:
        """Count an episode of this start."""
        self.heard = self.clock()
        self.tokens += read + written
        self.cost += self.prices.get(spec, FREE).of(read, written)

    def pay_before(self, read: int, written: int, spec: str) -> None:
        """Count an episode of an earlier start."""
        self.tokens_before += read + written
        self.cost_before += self.prices.get(spec, FREE).of(read, written)

    def look(self, read: int, written: int, spec: str) -> None:
        """Update the largest answer seen."""
        self.heard = self.clock()
        self.largest_tokens = max(self.largest_tokens, read + written)
        self.largest_cost = max(self.largest_cost, self.prices.get(spec, FREE).of(read, written))
        self.changed.set()

    async def change(self) -> None:
        """Wait for the next answer, or the next end of an episode."""
        self.changed.clear()
        await self.changed.wait()

    def to_go(self) -> str:
        """What the present agent's other episodes will take, if they are like those that it has played."""
        left = self.end_of_agent - (self.planned - self.left)
        tokens = f"about {round(self.mean_tokens() * left):,} tokens"
        return f"{tokens} and ${self.mean_cost() * left:.2f} to go" if self.cost else f"{tokens} to go"

    def line(self) -> str:
        """One line for a log: what is done, running, retrying and failed, the rate and the time left."""
        parts = [f"{self.finished_before + self.done}/{self.planned} episodes"]
        if self.agent is not None:
            parts.append(self.agent.spec)
        parts += [f"{self.running} running", self.waits, f"{self.failed} failed"]
        if self.running and (quiet := self.clock() - self.heard) >= QUIET_S:
            parts.append(f"no answer for {duration(quiet)}")
        if self.given_up:
            parts.append(f"{self.given_up} given up")
        if self.tokens:
            parts.append(f"{self.tokens:,} tokens")
        if self.cost:
            parts.append(f"${self.cost:.2f}")
        if self.tokens > self.tokens_at and self.left > 0:
            parts.append(self.to_go())
        if self.rate:
            parts.append(f"{self.rate:.2f} episodes/s")
            parts.append(f"{duration(self.left / self.rate)} left")
        if self.stopped:
            parts.append(self.stopped)
        return " · ".join(parts)


@contextmanager
def shown(progress: EvalProgress, console: Console) -> Iterator[None]:
    """A line that renews itself on a terminal; elsewhere a plain line now and then, and one at the end."""
    if console.is_terminal:
        line = Live(get_renderable=lambda: Text(progress.line()), console=console, refresh_per_second=4)
        with line:
            try:
                yield
            finally:
                line.transient = not progress.planned  # of an evaluation that was refused nothing stays
        return
    last = [time.monotonic()]

    def log(progress: EvalProgress) -> None:
        if time.monotonic() - last[0] >= LOG_EVERY_S:
            last[0] = time.monotonic()
            console.print(progress.line(), soft_wrap=True, highlight=False, markup=False)

    progress.on_change = log
    try:
        yield
    finally:
        if progress.planned:
            console.print(progress.line(), soft_wrap=True, highlight=False, markup=False)


async def ticking(progress: EvalProgress) -> None:
    """Refresh the display while every request waits for its next try and nothing else changes."""
    while True:
        await asyncio.sleep(LOG_EVERY_S)
        progress.on_change(progress)

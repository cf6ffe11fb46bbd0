"""What tests of the app share: scripted agents, a clock that is moved by hand, real keys, and what is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.app import App
from textual.css.query import NoMatches
from textual.message_pump import MessagePump
from textual.pilot import Pilot
from textual.screen import Screen

from msgrpo.agent import Agent, Completion, LanguageAgent, OnText, Sampling
from msgrpo.prompt import Prompt
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui.agents import HumanAgent
from msgrpo.tui.app import PlayApp
from msgrpo.tui.screens.play import PlayScreen

NARROWEST = 80  # columns: a usual terminal, in which no key at the foot may be cut off
PATIENCE_S = 120.0  # far beyond what anything here takes
PlayApp.NOTIFICATION_TIMEOUT = PATIENCE_S  # a message goes by the real clock: a slow machine asked for it too late
NIM = f"{Path(__file__).resolve().parents[1] / 'examples' / 'nim.py'}:scenario"


def answer(action: str, thought: str = "the apple is near.") -> str:
    return f"{thought}<action>{action}</action>"


class ScriptedModel:
    """Answers with the texts of a script in turn, the last one for ever; an exception in it is raised."""

    name = "scripted"

    def __init__(self, *script: str | Exception, gate: asyncio.Event | None = None) -> None:
        self.script = list(script)
        self.gate = gate
        self.calls = 0

    @property
    def extra_settings(self) -> dict[str, Any]:
        return {}

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: tuple[str, ...] = (),
        on_text: OnText | None = None,
    ) -> Completion:
        said = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        if isinstance(said, Exception):
            raise said
        if on_text is not None:
            on_text(said[: len(said) // 2])
        if self.gate is not None:
            await self.gate.wait()
        shares = dict(zip(actions, (0.55, 0.25, 0.15, 0.05), strict=False)) if actions else None
        return Completion(said, "stop", 300, 20, 0.25, action_probabilities=shares)

    async def close(self) -> None:
        """Nothing to close."""


def scripted(spec: str, *script: str | Exception, gate: asyncio.Event | None = None) -> LanguageAgent:
    return LanguageAgent(spec, ScriptedModel(*script, gate=gate), show_probabilities=True)


class ManualClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def after(self, screen: object, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        entry = (self.time + seconds, call)
        self.calls.append(entry)
        return lambda: self.calls.remove(entry) if entry in self.calls else None

    def tick(self, seconds: float) -> None:
        self.time += seconds
        due = [entry for entry in self.calls if entry[0] <= self.time]
        self.calls = [entry for entry in self.calls if entry[0] > self.time]
        for _, call in due:
            call()


def resolver(**agents: Agent | Exception) -> Callable[[str], Agent]:
    """What finds agents by their names: two that need no model, and those that are given; errors are raised."""
    known = {"random": RandomAgent(), "optimal": OptimalAgent(), **agents}

    def resolve(spec: str) -> Agent:
        found = known[spec]
        if isinstance(found, Exception):
            raise found
        return found

    return resolve


def text_of(app: App[Any], selector: str) -> str:
    """What the widget that a selector finds shows."""
    widget = app.screen.query_one(selector)
    return " ".join(" ".join(strip.text for strip in widget.render_lines(widget.size.region)).split())


def keys_of(app: App[Any]) -> str:
    """The keys that the last line of the screen names."""
    return text_of(app, "#keys")


def play_screen(app: PlayApp) -> PlayScreen:
    assert isinstance(app.screen, PlayScreen)
    return app.screen


async def settle(pilot: Pilot[Any]) -> None:
    """Until every message is handled, and nobody but a person is being asked; twice, since one message makes another.

    `pause` takes a process that gets no time for one that is idle: what the queues hold is waited for.
    """
    quiet, deadline = 0, time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        await pilot.pause()
        await drained(pilot.app)
        quiet = quiet + 1 if is_settled(pilot.app.screen) else 0
        if quiet == 2:
            return
        if not quiet:
            await asyncio.sleep(0.005)
    raise AssertionError("an agent is still being asked")


async def until(happened: Callable[[], object]) -> None:
    """Until something has happened on the screen, of which what is asked for may still be missing."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if happened():
                return
        except NoMatches:
            pass
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


async def drained(app: App[Any]) -> None:
    """Until a key that stood in the app's queue has gone its way: the app, the screen, the focus and back up."""
    await handles(app)
    focused = app.screen.focused
    for pump in (app.screen, *(focused.ancestors_with_self if focused is not None else ()), app):
        await handles(pump)


async def handles(pump: MessagePump) -> None:
    """Until what stands in its queue is handled; one that is being left handles no more."""
    handled = asyncio.Event()
    if pump.call_later(handled.set):
        while not handled.is_set() and pump.is_running:
            await asyncio.sleep(0)


def is_settled(screen: Screen[Any]) -> bool:
    if not isinstance(screen, PlayScreen):
        return True
    if screen.judging.going:
        return False
    by_hand = screen.asking.people() and all(isinstance(a, HumanAgent) for a in unanswered(screen))
    return bool(by_hand) or not screen.asking.going


def unanswered(screen: PlayScreen) -> list[Agent]:
    """Who is being asked; a seat that failed is not."""
    return [
        screen.match.sessions[i].agents[p] for i, p in screen.match.waiting() if (i, p) not in screen.asking.failed
    ]


async def ticks(pilot: Pilot[Any], clock: ManualClock, steps: int, seconds: float = 0.25) -> None:
    for _ in range(steps):
        clock.tick(seconds)
        await settle(pilot)


async def press(pilot: Pilot[Any], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settle(pilot)

"""Who sits at the board: a person at the keys, and an agent that is made when it is first needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from msgrpo.agent import Agent, Decision, LanguageAgent, OnText, Sampling, View
from msgrpo.errors import UsageError
from msgrpo.prompt import Prompt
from msgrpo.references import OptimalAgent
from msgrpo.signals import in_daemon_thread

Resolve = Callable[[str], Agent]
HUMAN = "human"


ARROWS, WASD = "arrows", "wasd"
SEARCHES = 2  # of one agent at the same time: each board of a match has one


class HumanAgent:
    """A person: `act` waits until `choose` is called, which is what a key press does.

    `name` is what the screen calls them, `hands` the keys that are theirs, `kept` an action that was chosen before it
    was asked for, which answers the next turn if it is legal then.
    """

    spec = HUMAN

    def __init__(self) -> None:
        self.name = "you"
        self.hands: tuple[str, ...] = (ARROWS, WASD)
        self.kept: str | None = None
        self._turn: asyncio.Future[str | None] | None = None

    @property
    def waiting(self) -> bool:
        return self._turn is not None and not self._turn.done()

    def choose(self, action: str | None) -> bool:
        """Answer the turn that waits, with None as ⊥: nothing was chosen in time; False where no turn waits."""
        if self._turn is None or self._turn.done():
            return False
        self._turn.set_result(action)
        return True

    def settings(self) -> dict[str, Any]:
        return {"model": "a person"}

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        kept, self.kept = self.kept, None
        if kept is not None and kept in view.legal():
            return Decision(kept)
        self._turn = asyncio.get_running_loop().create_future()
        return Decision(await self._turn)

    async def close(self) -> None:
        """Nothing to close."""


class EmptySeat:
    """A seat of a record. Nobody is asked there: a record says who has played, a person says who plays on. `name` is
    what the screen calls who has played, in place of what the record does.
    """

    def __init__(self, name: str, spec: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.spec = spec
        self._settings = settings

    def settings(self) -> dict[str, Any]:
        """What the record says of who sat here."""
        return self._settings

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        raise UsageError("nobody sits here: the record ends", fix="play on by hand, or name an agent: --agent NAME")

    async def close(self) -> None:
        """Nothing to close."""


class LazyAgent:
    """An agent made by `resolve` in a thread at its first turn, so that the board is there before the model is."""

    def __init__(self, spec: str, resolve: Resolve) -> None:
        self.spec = spec
        self._resolve = resolve
        self._making = threading.Lock()
        self._agent: Agent | None = None
        self._sampling: Sampling | None = None  # of a language model, as it was made
        self._temperature: float | None = None
        self._searches = asyncio.Semaphore(SEARCHES)

    @property
    def loaded(self) -> bool:
        return self._agent is not None

    @property
    def searches(self) -> bool:
        """Whether it is a reference player, once it is made."""
        return isinstance(self._agent, OptimalAgent)

    def settings(self) -> dict[str, Any]:
        return {} if self._agent is None else self._agent.settings()

    @property
    def trouble(self) -> str:
        """What a model says it is waiting for (`trouble`: the failure and which retry comes next), or nothing."""
        return str(getattr(getattr(self._agent, "model", None), "trouble", ""))

    def prompt(self, view: View) -> Prompt | None:
        """What the agent will read this turn; None where it reads no text, or is not there yet."""
        if isinstance(self._agent, LanguageAgent):
            return self._agent.prompt(view)
        return None

    def _make(self) -> Agent:
        """Make the agent, or wait for the thread that does."""
        with self._making:
            if self._agent is None:
                self._agent = self._resolve(self.spec)
                if isinstance(self._agent, LanguageAgent):
                    self._sampling = self._agent.sampling
                self.sample_at(self._temperature)
            return self._agent

    def sample_at(self, temperature: float | None) -> None:
        """The temperature of a language model, from its next answer on; None is the one that it was made with."""
        self._temperature = temperature
        if isinstance(self._agent, LanguageAgent) and self._sampling is not None:
            changed = {} if temperature is None else {"temperature": temperature}
            self._agent.sampling = self._sampling.model_copy(update=changed)

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        agent = await in_daemon_thread(self._make) if self._agent is None else self._agent
        return await (
            self._search(agent, view) if isinstance(agent, OptimalAgent) else agent.act(view, on_text=on_text)
        )

    async def _search(self, agent: OptimalAgent, view: View) -> Decision:
        """A search may take seconds. One that nobody waits for any more keeps its place until it ends."""
        await self._searches.acquire()
        search = asyncio.ensure_future(in_daemon_thread(lambda: agent.choose(view)))
        search.add_done_callback(lambda _: self._searches.release())
        return Decision(await asyncio.shield(search))

    async def close(self) -> None:
        if self._agent is not None:
            await self._agent.close()


class Table:
    """Makes every agent of a sitting once: seats and episodes that name the same one share it."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._agents: dict[str, LazyAgent] = {}

    def seat(self, spec: str, temperature: float | None = None) -> Agent:
        if spec == HUMAN:
            return HumanAgent()
        agent = self._agents.setdefault(spec, LazyAgent(spec, self._resolve))
        agent.sample_at(temperature)
        return agent

    async def close(self) -> None:
        for agent in self._agents.values():
            await agent.close()

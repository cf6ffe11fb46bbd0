"""What an evaluation is asked for, and what of it is refused before anything is played."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

from msgrpo.agent import Agent
from msgrpo.episode import Episode
from msgrpo.errors import MsgrpoError, UsageError, check_given, nearest
from msgrpo.evals.budget import Budget
from msgrpo.evals.progress import EvalProgress
from msgrpo.evals.record import Run, check_names, holds_episodes
from msgrpo.evals.suites import EpisodeSeeds, HeldOut, check_scenario
from msgrpo.game import Scenario
from msgrpo.specs import check_agents

CHUNK = 32  # episodes that are played together in another process


Given = tuple[str, EpisodeSeeds]  # the scenario and the seeds of an episode


class Elsewhere(Protocol):
    """Plays chunks of episodes in other processes."""

    @property
    def at_once(self) -> int:
        """How many chunks may be on their way."""
        ...

    async def play(self, spec: str, chunk: Sequence[Given], regret: bool) -> list[Episode | MsgrpoError]:
        """The episodes of a chunk, in its order, or why one could not be played."""
        ...


@dataclass(frozen=True)
class EvalRequest:
    """What `evaluate` was asked for, less the agents and scenarios."""

    out: Path
    episodes: int
    repeats: int
    split: HeldOut
    concurrency: int
    retry_failed: bool
    regret: bool
    max_failures: int | None
    budget: Budget
    elsewhere: Elsewhere | None
    progress: EvalProgress

    @property
    def plays(self) -> int:
        """Episodes of one agent in one scenario."""
        return self.episodes * self.repeats

    @property
    def at_once(self) -> int:
        """How many of them may be on their way."""
        return self.concurrency if self.elsewhere is None else CHUNK * self.elsewhere.at_once


def can_play(agent: Agent, scenario: Scenario) -> bool:
    """Whether an agent can play a scenario: a DQN knows the boards of its training only, `optimal` needs a reference
    player.
    """
    able = getattr(agent, "can_play", None)
    return True if able is None else bool(able(scenario))


def why_not(agent: Agent) -> str:
    """Why an agent with a `can_play` does not play a scenario: its own words, where it has some."""
    return str(getattr(agent, "why_not", "it cannot play this game"))


def playable_by(agent: Agent, scenarios: Collection[Scenario]) -> list[Scenario]:
    """Those that an agent can play. Raises UsageError where it can play none."""
    able = [scenario for scenario in scenarios if can_play(agent, scenario)]
    if not able:
        listed = ", ".join(scenario.id for scenario in scenarios)
        raise UsageError(f"{agent.spec} can play none of {listed}: {why_not(agent)}", fix="choose other agents")
    return able


def check_asked(agents: Collection[Agent], scenarios: Collection[Scenario], split: HeldOut, command: str) -> None:
    """Refuse, before anything is written, what a caller from Python may ask for and no folder can hold."""
    for what, given in (("agents", agents), ("scenarios", scenarios)):
        if isinstance(given, str) or not isinstance(given, Collection):  # one, or the name of one
            raise UsageError(f"{what} is {reprlib.repr(given)}, not a list", fix=f"{what}=[…], also of a single one")
    check_given("command", command, str)
    if not agents or not scenarios:
        raise UsageError(f"there are {len(agents)} agents and {len(scenarios)} scenarios: nothing can be played")
    check_agents(agents)
    for scenario in scenarios:
        check_scenario(scenario)
    for what, names in (("agents", [agent.spec for agent in agents]), ("scenarios", [one.id for one in scenarios])):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"two {what} are named {twice!r}: they share a record", fix="give each its own name, once"
            )
    if split not in get_args(HeldOut):
        raise UsageError(f"no split of evaluations is named {split!r}", fix=nearest(split, get_args(HeldOut)))


def check_repeatable(scenarios: Collection[Scenario]) -> None:
    """Refuse games of a server that gives another game for the same seed: nothing could be compared by pairs."""
    for scenario in scenarios:
        if scenario.remote is not None and not scenario.remote.repeats:
            raise UsageError(
                f"{scenario.id} gave another game when it was asked for the same seed again, so no two agents would "
                "play the same episodes",
                fix="its reset(seed) has to seed all that it draws; training and play do not need it",
            )


def check_folder(
    run: Run, able: Sequence[tuple[Agent, Sequence[Scenario]]], request: EvalRequest, called: dict[str, str]
) -> None:
    """Refuse what the folder of this run cannot hold too."""
    _check_split(run, request)
    _check_repeats(run, able, request)
    _check_names(run, [agent for agent, _ in able], called)


def _check_split(run: Run, request: EvalRequest) -> None:
    """Refuse a folder with episodes of another split: its tables would mix them. Its `run.json` may be gone."""
    if (run.asked or holds_episodes(request.out)) and run.split != request.split:
        raise UsageError(
            f"{request.out} holds episodes of the split {run.split}, not of {request.split}",
            fix=f"--split {run.split}, or another --out",
        )


def _check_repeats(run: Run, able: Sequence[tuple[Agent, Sequence[Scenario]]], request: EvalRequest) -> None:
    """Refuse fewer repeats or starts than are recorded, which would leave results out; more are allowed."""
    episodes, repeats = request.episodes, request.repeats
    for spec, scenario in ((agent.spec, scenario.id) for agent, playable in able for scenario in playable):
        before = run.repeats.get(spec, {}).get(scenario, 1)
        starts = run.asked.get(spec, {}).get(scenario, 0) // before
        if starts and (repeats < before or (repeats > before and episodes < starts)):
            raise UsageError(
                f"{spec} has played {starts} starts of {scenario} {before} times each here; "
                f"{episodes} starts {repeats} times each would leave some of that out",
                fix=f"--episodes {max(starts, episodes)} --repeats {max(before, repeats)}, or another --out",
            )


def _check_names(run: Run, agents: Collection[Agent], called: dict[str, str]) -> None:
    """Refuse names that, with those of earlier evaluations in the folder, would make one agent another."""
    asked = run.asked | {agent.spec: {} for agent in agents}
    check_names(run.model_copy(update={"names": run.names | called, "asked": asked}))

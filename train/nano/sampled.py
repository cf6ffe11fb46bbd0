"""Rows for `msgrpo teach --from own`: a base's own answers that hold a legal action, and no others.

Rejection sampling: the base plays episodes on training starts, and what it said in its own words, with an action that
was legal there, is what it then learns to say. Nothing is chosen by what a move was worth. So a base whose answers
are legal one time in five comes to give nearly only such, and plays as it did where they were legal.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from msgrpo.agent import Agent, LanguageAgent, LanguageModel, Sampling
from msgrpo.episode import Episode, derive_seed, few_collections, play_episode
from msgrpo.errors import UsageError
from msgrpo.game import Scenario
from msgrpo.judge import decided
from msgrpo.limits import passing_faults
from msgrpo.loops import run_async
from msgrpo.prompt import Past, PromptTemplate
from msgrpo.references import known_best
from msgrpo.train.nano.build import Row

AT_ONCE = 64  # episodes
MOST_TOKENS = 96  # of an answer; what is cut off is no row
TRIES = 4  # times AT_ONCE episodes without a row, before it is given up


def own_rows(
    scenario: Scenario,
    model: LanguageModel,
    untaught: Callable[[], AbstractContextManager[object]],
    seed: int,
    template: PromptTemplate,
) -> Iterator[list[Row]]:
    """Turns on training starts, without end, each a list of one row. Within `untaught()` the model is the base.

    Raises UsageError where no answer holds a legal action.
    """
    agent = LanguageAgent("base", model, Sampling(max_tokens=MOST_TOKENS), template)
    starts, barren = scenario.starts("train", first_seed=seed * 10_007), 0
    for batch in itertools.count():
        with untaught(), few_collections():
            episodes = run_async(_played(scenario, agent, list(itertools.islice(starts, AT_ONCE)), (seed, batch)))
        rows = [row for episode in episodes for row in _legal(scenario, episode, template)]
        yield from ([row] for row in rows)
        barren = 0 if rows else barren + 1
        if barren == TRIES:
            failed = [episode.error_message for episode in episodes if episode.error is not None]
            why = f"; {len(failed)} of the last {AT_ONCE} failed: {failed[-1]}" if failed else ""
            raise UsageError(
                f"the base gave no legal action in {TRIES * AT_ONCE} episodes of {scenario.id}{why}",
                fix="leave --from own out, which takes the answers of a bad player; or try another --prompt",
            )


async def _played(
    scenario: Scenario, agent: LanguageAgent, starts: Sequence[int], parts: tuple[object, ...]
) -> list[Episode]:
    agents: dict[str, Agent] = dict.fromkeys(scenario.players, agent)
    seeds = [derive_seed("own", *parts, place) for place in range(len(starts))]
    plays = [
        play_episode(scenario, agents, start_seed=start, chance_seed=seed >> 32, sampling_seed=seed)
        for start, seed in zip(starts, seeds, strict=True)
    ]
    try:
        return await asyncio.gather(*plays)
    finally:
        await agent.close()


def _legal(scenario: Scenario, episode: Episode, template: PromptTemplate) -> Iterator[Row]:
    """The answers that ended by themselves and held a legal action, each with what it was asked."""
    best = _best(scenario, episode)
    for turn in episode.turns:
        if turn.action is None or turn.answer is None or turn.finish_reason != "stop":
            continue
        past = [Past(one.state, one.action) for one in episode.turns_of(turn.player) if one.step < turn.step]
        prompt = template.render(scenario, turn.state, past)
        yield Row(prompt, turn.answer, turn.action in best[id(turn)] if id(turn) in best else None)


def _best(scenario: Scenario, episode: Episode) -> dict[int, Sequence[str]]:
    """The best actions of each turn, by its `id`; none where nobody knows them, or from where on the game fails.

    Without a reference player no game is played again: a server's need not go the same way twice.
    """
    best = dict[int, Sequence[str]]()
    if scenario.reference is None:
        return best
    with passing_faults():  # only the figure of best actions needs them
        for turn, game in decided(scenario, episode):
            if (known := known_best(scenario, game, turn.player)) is not None:
                best[id(turn)] = known
    return best

"""Re-simulating records without any model, and printing them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path

from msgrpo_agent.episode import Episode, Turn, read_episodes
from msgrpo_agent.errors import MsgrpoError, RecordError
from msgrpo_agent.game import Game, Outcome
from msgrpo_agent.games import get_scenario
from msgrpo_agent.parse import parse_action, printable
from msgrpo_agent.prompt import PromptTemplate


def nth(path: Path, number: int) -> Episode:
    """The `number`-th episode of a record, from 1."""
    episode = next(islice(read_episodes(path), number - 1, None), None)
    if episode is None:
        raise RecordError(f"{path} has no episode {number}", fix=f"it holds {sum(1 for _ in read_episodes(path))}")
    return episode


def verify(path: Path) -> int:
    """Play every episode of a record again from its seeds and actions; returns how many were the same.

    Raises RecordError at the first difference in a prompt, state, parsed action, reward, outcome or return.
    """
    count = 0
    for count, episode in enumerate(read_episodes(path), start=1):
        try:
            difference = first_difference(episode)
        except MsgrpoError as error:
            raise RecordError(f"{path}: episode {count} does not replay: {error.message}") from error
        if difference is not None:
            raise RecordError(f"{path}: episode {count} ({episode.scenario}) does not replay: {difference}")
    if not count:
        raise RecordError(f"{path} holds no episode")
    return count


def first_difference(episode: Episode) -> str | None:
    """Where a new simulation departs from the record, in words; None where it does not."""
    return next(_differences(episode), None)


def _differences(episode: Episode) -> Iterator[str]:
    scenario = get_scenario(episode.scenario)
    game = scenario.new(episode.start_seed, episode.chance_seed)
    if set(episode.agents) != set(game.players):
        yield f"players {sorted(episode.agents)}, the game has {sorted(game.players)}"
        return
    for player, prefix in episode.prefix.items():
        template = PromptTemplate()
        known = episode.settings.get(player, {}).get("template") == template.hash
        if known and template.render(scenario, "").prefix != prefix:
            yield f"the prompt of {player} is not this version's"
    for step, group in groupby(episode.turns, key=lambda turn: turn.step):
        turns = list(group)
        if game.outcome is not Outcome.PLAYING:
            yield f"step {step}: the game was over ({game.outcome})"
            return
        if step != game.steps or sorted(turn.player for turn in turns) != sorted(game.players):
            yield f"step {step}: expected one turn of each player at step {game.steps}"
            return
        yield from _of_step(game, turns)
    if episode.error is None and game.outcome is Outcome.PLAYING:
        yield f"the record ends after step {game.steps}, the game does not"
    recorded = (str(episode.outcome), episode.success, episode.returns)
    simulated = (str(game.outcome), game.success, dict(game.returns))
    if recorded != simulated and episode.turns:
        yield f"(outcome, success, returns) {recorded}, now {simulated}"


def _of_step(game: Game, turns: list[Turn]) -> Iterator[str]:
    step = game.steps
    for turn in turns:
        if turn.state != game.observe(turn.player):
            yield f"step {step}: {turn.player} saw another state:\n{turn.state}\nnow:\n{game.observe(turn.player)}"
        if turn.answer is not None:
            parsed = parse_action(turn.answer, game.actions)
            if (parsed.action, parsed.failure) != (turn.action, turn.failure):
                yield f"step {step}: action {turn.action} ({turn.failure}), now {parsed.action} ({parsed.failure})"
    rewards = game.step({turn.player: turn.action for turn in turns})
    for turn in turns:
        if turn.reward != rewards[turn.player]:
            yield f"step {step}: reward {turn.reward:g} of {turn.player}, now {rewards[turn.player]:g}"


def as_text(episode: Episode) -> str:
    """An episode as a person reads it: each turn's state, answer, action and reward."""
    who = ", ".join(f"{player}: {agent}" for player, agent in episode.agents.items())
    lines = [f"{episode.scenario} · start {episode.start_seed} · {who}"]
    for turn in episode.turns:
        lines += ["", f"── step {turn.step + 1} · {turn.player}", turn.state]
        if turn.reasoning:
            lines.append(f"reasoning: {printable(turn.reasoning)}")
        if turn.answer is not None:
            lines.append(f"answer: {printable(turn.answer)}")
        chosen = turn.action or f"no legal action ({turn.failure})"
        lines.append(f"→ {chosen}   reward {turn.reward:+g}")
    if episode.error is not None:
        lines += ["", f"failed: {episode.error}: {episode.error_message}"]
    else:
        returns = ", ".join(f"{player} {value:+g}" for player, value in episode.returns.items())
        success = {True: ", success", False: ", no success", None: ""}[episode.success]
        lines += ["", f"{episode.outcome} after {game_steps(episode)} steps, return {returns}{success}"]
    return "\n".join(lines)


def game_steps(episode: Episode) -> int:
    """How many steps were played."""
    return 1 + max((turn.step for turn in episode.turns), default=-1)

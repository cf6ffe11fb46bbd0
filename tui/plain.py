"""The app without a terminal: an episode as text, for pipes, logs and CI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from msgrpo.errors import UsageError
from msgrpo.game import Board, Role
from msgrpo.parse import thought
from msgrpo.tui.agents import HUMAN, Resolve, Table
from msgrpo.tui.series import verdict
from msgrpo.tui.session import Frame, Match, Session, Setup, ending, new_match, points

COLOURS: dict[Role, str] = {
    "own": "bold green",
    "own-body": "green",
    "other": "bold magenta",
    "other-body": "magenta",
    "good": "bold yellow",
    "bad": "bold red",
    "hole": "red",
    "goal": "bold yellow",
    "won": "bold green",
    "lost": "bold red",
}


def frame_text(session: Session, frame: Frame) -> Text:
    """One moment as coloured text: the board that the model reads, what was answered, where it stands."""
    text = Text(f"{session.scenario.id} · seed {session.seed} · step {frame.step}/{session.scenario.step_limit}\n")
    text.stylize("bold")
    if frame.board is None:
        text.append(frame.seen + "\n")
    else:
        _append_board(text, frame.board)
    for player, turn in frame.turns.items():
        words = thought(turn.answer or "")
        if words:
            text.append(f"{player}: “{words}”\n", "italic")
        action = turn.action or f"⊥ ({turn.failure.value if turn.failure else 'no action'})"
        text.append(f"{player}: {action}", "bold")
        text.append(f"  reward {points(turn.reward)}  return {points(frame.tallies[player].total)}\n")
        if turn.action_probabilities:
            shares = "  ".join(f"{name} {p:.0%}" for name, p in turn.action_probabilities.items())
            text.append(f"{player}: {shares}\n", "dim")
    end = ending(session, frame)
    if end:
        text.append(f"{end}\n", "bold")
    return text


def _append_board(text: Text, board: Board) -> None:
    rows = board.text().split("\n")
    for row in rows[:-1]:
        label, _, cells = row.partition(" ")
        text.append(label + " ", "dim")
        for glyph in cells:
            text.append(glyph, COLOURS.get(board.roles.get(glyph, "floor"), "dim"))
        text.append("\n")
    text.append(rows[-1] + "\n", "dim")


def show_replay(session: Session, console: Console) -> None:
    for frame in session.frames:
        console.print(frame_text(session, frame), highlight=False)


def play_plain(setup: Setup, resolve: Resolve, console: Console) -> Match:
    """Play a setup to its end and print every step. Raises what an agent raises: nothing is played in its place."""
    if HUMAN in (setup.agent, setup.against):
        raise UsageError(
            "a person needs a terminal to play in",
            fix="play in a terminal without --plain, or choose another --agent",
        )
    table = Table(resolve)
    match = new_match(setup, table.seat)
    asyncio.run(
        _play(match, table, lambda session: console.print(frame_text(session, session.frame), highlight=False))
    )
    result = verdict(match)
    if result:
        console.print(result, highlight=False)
    return match


async def _play(match: Match, table: Table, show: Callable[[Session], None]) -> None:
    for session in match.sessions:
        show(session)
    try:
        while not match.over:
            for i, player in match.waiting():
                session = match.sessions[i]
                session.answer(player, await session.agents[player].act(session.view(player)))
            moving = [session for session in match.sessions if session.ready]
            match.commit()
            for session in moving:
                show(session)
    finally:
        await table.close()

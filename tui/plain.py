"""The app without a terminal: an episode as text, for pipes, logs and CI."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from msgrpo.agent import Decision, thought
from msgrpo.errors import RecordError, UsageError
from msgrpo.game import Board, Role
from msgrpo.output import say
from msgrpo.tui.agents import LazyAgent, Resolve, Table
from msgrpo.tui.export import BY_HAND, append_episode
from msgrpo.tui.match import Match, new_match
from msgrpo.tui.series import verdict
from msgrpo.tui.session import Frame, Session, Setup, ending, points

PATIENCE_S = 10.0  # of silence, before it is said who is waited for

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


def frame_text(session: Session, frame: Frame, *, several: bool = False) -> Text:
    """One moment as coloured text: the board that the model reads, what was answered, where it stands; of several
    boards, whose it is.
    """
    whose = f" · {session.name(session.players[0])}" if several else ""
    text = Text(
        f"{session.scenario.id}{whose} · seed {session.seed} · step {frame.step}/{session.scenario.step_limit}\n"
    )
    text.stylize("bold")
    board, seen = session.shown if frame is session.frame else (frame.board, frame.seen)
    if board is None:
        text.append(seen + "\n")
    else:
        if board.caption:
            text.append(board.caption + "\n")
        _append_board(text, board)
    for player, turn in frame.turns.items():
        who = session.side(player) or player
        words = thought(turn.answer or "")
        if words and not session.covers(player):
            text.append(f"{who}: “{words}”\n", "italic")
        action = turn.action or f"⊥ ({turn.failure.value if turn.failure else 'no action'})"
        text.append(f"{who}: {action}", "bold")
        text.append(f"  reward {points(turn.reward)}  return {points(frame.tallies[player].total)}\n")
        if turn.action_probabilities:
            shares = "  ".join(f"{name} {p:.0%}" for name, p in turn.action_probabilities.items())
            text.append(f"{who}: probabilities {shares}\n", "dim")
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
    coloured = [
        f"{board.named((y, x))} at ({board.column_names[x]},{board.row_names[y]})"
        for y, x in sorted(board.colours)
        if board.named((y, x)) != board.legend.get(board.cells[y][x])
    ]
    if coloured:
        text.append(f"Colours: {', '.join(coloured)}\n")


def show_replay(session: Session, console: Console) -> None:
    console.print(signs(session), highlight=False, markup=False)
    for frame in session.frames:
        console.print(frame_text(session, frame), highlight=False)


def play_plain(setup: Setup, resolve: Resolve, console: Console) -> Match:
    """Play a setup to its end and print every step. Raises what an agent raises: nothing is played in its place."""
    table = Table(resolve)
    match = new_match(setup, table.seat)
    if all(match.sessions[0].covers(player) for player in match.sessions[0].players):
        raise UsageError(
            "as text two people would read each other's cards",
            fix="play it in the app, which covers them: leave out --plain",
        )
    if match.human:
        index, player = next(seat for seat in match.seats() if match.human_seat(*seat))
        console.print(f"{explained(match.sessions[index], player)}\n{HOW}\n", highlight=False, markup=False)
    else:
        console.print(signs(match.sessions[0]), highlight=False, markup=False)
    several = len(match.sessions) > 1

    def show(session: Session) -> None:
        console.print(frame_text(session, session.frame, several=several), highlight=False)

    try:
        asyncio.run(_play(match, table, show))
    except LeftError:
        console.print("left before the end", highlight=False)
    finally:
        for session in match.sessions:
            _keep(session, console)
    result = verdict(match)
    if result:
        console.print(result, highlight=False, markup=False)
    return match


def _keep(session: Session, console: Console) -> None:
    """Record what a person has played."""
    if session.human_played:
        try:
            append_episode(BY_HAND, session.episode)
            console.print(f"recorded in {BY_HAND}", highlight=False)
        except RecordError as error:
            console.print(error.message, highlight=False, markup=False)


HOW = "Type a move, or its beginning, and enter. ?: the rules and the moves. q: leave."


class LeftError(Exception):
    """A person has left the game."""


def explained(session: Session, player: str) -> str:
    """Who a person is, the rules, and what each sign means that stands for something."""
    return f"{session.rules(player)}\n{signs(session)}"


def signs(session: Session) -> str:
    """What each sign means, in words: the colours and the app's own legend are not there."""
    board = session.game.board()
    meanings = ", ".join(f"{sign} {meaning}" for sign, meaning in board.legend.items()) if board is not None else ""
    lines = [f"Signs: {meanings}"] if meanings else []
    return "\n".join([*lines, "⊥ is a turn in which no legal action was chosen."])


def ask_person(session: Session, player: str) -> str:
    """A person's move, asked for until it is one. Raises LeftError at `q` and where no more is typed."""
    legal = session.game.legal(player)
    while True:
        try:
            typed = line(f"{session.side(player) or 'your move'}> ").strip()
        except EOFError:
            raise LeftError from None
        if typed == "q" and "q" not in legal:
            raise LeftError
        if typed == "?":
            print(f"{explained(session, player)}\nmoves: {', '.join(legal)}")
            continue
        actions = meant(typed, legal, session.game.other_names(player))
        if len(actions) == 1:
            return actions[0]
        print(f"{typed!r} is {'no move' if not actions else 'more than one move'}: {', '.join(actions or legal)}")


def line(prompt: str) -> str:
    """A line that is typed. Ctrl-C ends it at once: asyncio's own handler would have it wait for enter."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    except KeyboardInterrupt:
        print()  # what follows stands on a line of its own
        raise
    finally:
        signal.signal(signal.SIGINT, handler)


def meant(typed: str, legal: Sequence[str], others: Mapping[str, str] | None = None) -> list[str]:
    """The moves that may be meant: the one of that name, else those that begin so; the case counts where it helps.

    `others` are further names of moves, which count where no move's own name begins so.
    """
    if typed in legal:
        return [typed]
    small = typed.casefold()
    same = [action for action in legal if action.casefold() == small]
    beginning = [action for action in legal if small and action.casefold().startswith(small)]
    further = {action: None for name, action in (others or {}).items() if small and name.startswith(small)}
    return same or beginning or list(further)


async def _answer(session: Session, player: str) -> Decision:
    telling = asyncio.ensure_future(_tell_waiting(session, player))
    try:
        return await session.agents[player].act(session.view(player))
    finally:
        telling.cancel()


async def _tell_waiting(session: Session, player: str) -> None:
    """Say who is waited for, and what a model says of its trouble whenever that is something else."""
    agent, told = session.agents[player], None
    while True:
        await asyncio.sleep(PATIENCE_S)
        trouble = agent.trouble if isinstance(agent, LazyAgent) else ""
        if trouble != told:
            told = trouble
            doing = "loading" if isinstance(agent, LazyAgent) and not agent.loaded else "waiting for"
            say(" · ".join(filter(None, (f"{doing} {session.subject(player)} …", trouble, "Ctrl-C ends the game"))))


async def _play(match: Match, table: Table, show: Callable[[Session], None]) -> None:
    for session in match.sessions:
        show(session)
    try:
        while not match.over:
            for i, player in match.waiting():
                session = match.sessions[i]
                if match.human_seat(i, player):
                    session.answer(player, Decision(ask_person(session, player)))
                else:
                    session.answer(player, await _answer(session, player))
            moving = [session for session in match.sessions if session.ready]
            match.commit()
            for session in moving:
                show(session)
    finally:
        await table.close()

"""The lines under a seat and under a board that say what is going on there, in words."""

from __future__ import annotations

from typing import Literal

from msgrpo.tui.agents import EmptySeat, HumanAgent
from msgrpo.tui.asking import Asking
from msgrpo.tui.hands import keys_of
from msgrpo.tui.judging import Advice, Judging, to_move
from msgrpo.tui.match import Match
from msgrpo.tui.session import Mood, Session, ending, loss, mood

Kind = Literal["note", "turn", "wait", "error"] | Mood
UNJUDGED = "…"
PATIENCE_S = 3  # of thinking, before the way out is named


def status(
    match: Match, asking: Asking, judging: Judging, index: int, player: str, *, by_step: bool, idle: str
) -> tuple[str, Kind]:
    """(text, kind) of one seat; the text is empty where there is nothing to say.

    `by_step` says that the game stands until a person asks for the next step; `idle` is what a turn without an
    action is called.
    """
    session = match.sessions[index]
    agent = session.agents[player]
    answered = player in session.answers
    if not session.live:
        way = "end, or a move" if match.human else "end"
        past = f"this is step {session.cursor} of {session.last}; {way}: back to the present"
        return (past if session.human else ""), "note"
    if session.over:
        again = retry_from(match, judging)
        retry = f"enter: try step {again[1] + 1} again" if again and again[0] == (index, player) else ""
        searched = agent.spec == "optimal" and judging.mistakes(index, player)
        further = "a strong search player; the judge looks further" if searched else ""
        lines = filter(None, (ending(session, session.frame), judging.summary(index, player, idle), further, retry))
        return "\n".join(lines), mood(session, player)
    if (index, player) in asking.failed:
        again_key = "" if asking.people() else "enter: ask again   "  # first the person moves
        return f"{asking.failed[index, player]}\n{again_key}{seat_key(match, index, player)}: play by hand", "error"
    if player not in session.game.to_move:
        return "the other is to move", "note"
    if isinstance(agent, EmptySeat):
        key = seat_key(match, index, player)
        return f"the record ends here and nobody is asked   {key}: play on by hand", "note"
    if isinstance(agent, HumanAgent) and not answered and session.covers(player):
        look = "enter shows your cards" if match.to_look() == (index, player) else "the other chooses first"
        return f"{agent.name}: {look}", "turn"
    if isinstance(agent, HumanAgent) and not answered:
        keys = keys_of(session.game, player, agent)
        return f"{agent.name}, your move: {keys}".removeprefix("you, "), "turn"
    if match.secret and answered:
        return "has chosen; shown when everybody has", "note"
    if asking.going and not answered:
        return waiting(match, asking, index, player), "wait"
    if asking.stopped and not answered:
        return f"stopped waiting   n: ask again   {seat_key(match, index, player)}: play by hand", "note"
    if by_step:
        return ("n: play it" if answered else "n: ask"), "note"
    return "", "note"


def retry_from(match: Match, judging: Judging) -> tuple[tuple[int, str], int] | None:
    """(seat, step) from which a person may try again: before the worst mistake of a game of one that is over."""
    if len(match.seats()) != 1 or not match.over:
        return None
    seat = match.seats()[0]
    costs = judging.mistakes(*seat)
    return (seat, max(costs, key=lambda step: costs[step]) - 1) if costs else None


def seat_key(match: Match, index: int, player: str) -> str:
    """The key that takes a seat over: t the first, T the second."""
    return "t" if match.seats().index((index, player)) == 0 else "T"


def waiting(match: Match, asking: Asking, index: int, player: str) -> str:
    """What is being waited for, how long already, and after a while the way out."""
    waited, trouble = asking.waited, asking.trouble(index, player)
    doing = "loading the agent" if asking.loading(index, player) else "thinking"
    lines = [f"{doing} … {f'{waited} s' if waited else ''}".rstrip()]
    if trouble:
        lines.append(trouble)
    if trouble or waited >= PATIENCE_S:
        stop = "" if asking.people() else "esc: stop waiting   "  # a person who waits may take their time
        lines.append(f"{stop}{seat_key(match, index, player)}: play by hand")
    return "\n".join(lines)


def worth(match: Match, judging: Judging, index: int, *, hint: bool, idle: str, width: int) -> str:
    """What the position that is shown is worth, what the move before it lost, and the best moves.

    A line each; where several play and so many columns hold it, both are one line for each player.

    The best moves of a position in which a person has still to choose are a hint, shown when asked for. `idle` is
    what a turn without an action is called. What is not judged yet has its line already: a line that comes and goes
    would have the whole screen laid out anew twice a move. A hint that was asked for comes first: in a narrow lane
    the last line may have no room.
    """
    session = match.sessions[index]
    if session.scenario.judge is None or judging.failed:
        return judging.failed
    step = session.cursor
    parts: list[str] = []
    for player in session.players:
        name = f"{session.subject(player)}: " if len(session.players) > 1 else ""
        last = then = ""
        before, now = judging.of(index, step - 1, player), judging.of(index, step, player)
        turn = session.frame.turns.get(player)
        if turn is not None:
            last = move_worth(session, before, turn.action, idle) if before else UNJUDGED
        asked = session.live and isinstance(session.agents[player], HumanAgent)
        # while others choose in secret, a hint is about the person's own move
        open_ = asked if match.secret else True
        shown = open_ and (hint or not (asked or match.secret))
        if shown and player in to_move(session, step):
            then = position_worth(session, now) if now else UNJUDGED
        if name and last and then and len(both := f"{name}{last}; now {then}") <= width:
            parts.append(both)
        else:
            parts += [f"{word}: {name}{said}" for word, said in (("last", last), ("now", then)) if said]
    return "\n".join(sorted(parts, key=lambda part: part.startswith("last: ")) if hint else parts)


def move_worth(session: Session, before: Advice, action: str | None, idle: str) -> str:
    """What a move cost, in words."""
    judgement, chosen = before.judgement, action or idle
    cost, sign = judgement.regret(action), judgement.sign(action)
    if before.lost:
        already = "the goal was already out of reach" if session.scenario.goal else "the game was already lost"
        return f"{chosen} lost nothing more: {already}"
    if cost:
        return f"{chosen} lost {loss(cost)} {sign}".rstrip() + f", better {' or '.join(before.moves)}"
    if action in before.moves:
        return f"{chosen} is best"
    return f"{chosen} lost nothing" if judgement.exact else f"{chosen}, perhaps as good as the best"


def position_worth(session: Session, now: Advice) -> str:
    """What a position is worth, and what to do in it."""
    if now.lost:
        return "the goal is out of reach" if session.scenario.goal else "lost, if the others make no mistake"
    about = "" if now.judgement.exact else "about "
    return f"worth {about}{now.judgement.value:+.2f}, best {' or '.join(now.moves)}"

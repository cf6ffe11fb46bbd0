"""Which person a key or a click moves, and which keys a person is told."""

from __future__ import annotations

from msgrpo.game import MOVES, Game
from msgrpo.tui.agents import ARROWS, WASD, HumanAgent
from msgrpo.tui.asking import Asking, Seat
from msgrpo.tui.match import Match

KEYS = {(ARROWS, WASD): "arrows, hjkl or wasd", (ARROWS,): "arrows or hjkl", (WASD,): "wasd"}
SIGNS = {"up": "↑", "down": "↓", "left": "←", "right": "→"}
NUMBERS = 9  # actions that have a number key


def aimed(game: Game, player: str, way: str) -> str | None:
    """The legal action that an arrow means: the one of its name, or forward for up where a player turns."""
    legal = {action.casefold(): action for action in game.legal(player)}
    return legal.get(way) or (legal.get("forward") if way == "up" else None)


def move(match: Match, asking: Asking, way: str, hand: str) -> None:
    """Answer `way` for the first waiting person who has that hand of keys and may go there.

    While the last move of people alone is still being played, it is kept for the next one.
    """
    for index, player, person in asking.people():
        action = aimed(match.sessions[index].game, player, way) if hand in person.hands else None
        if action is not None:
            person.choose(action)
            return
    if not asking.people():
        keep(match, way, hand)


def keep(match: Match, way: str, hand: str) -> None:
    """Keep a key that came faster than the game, where nobody but people plays."""
    seats = [(match.sessions[index], player) for index, player in match.seats()]
    if all(isinstance(session.agents[player], HumanAgent) for session, player in seats):
        for session, player in seats:
            person = session.agents[player]
            if isinstance(person, HumanAgent) and hand in person.hands and session.live and not session.over:
                person.kept = aimed(session.game, player, way)
                return


def want(match: Match, asking: Asking, wanted: dict[Seat, str], way: str, hand: str) -> None:
    """Keep what the person with that hand of keys wants to do at the next tick; the last key counts."""
    for index, player, person in asking.people():
        action = aimed(match.sessions[index].game, player, way) if hand in person.hands else None
        if action is not None:
            wanted[index, player] = action
            return


def numbers(game: Game, player: str) -> dict[str, int]:
    """The number key of each action that no arrow means: the digit in which all their names end (x3), where each has
    another one, else its place. An action keeps its number for the whole game."""
    own = game.own_actions(player)
    if {action.casefold() for action in own} <= set(MOVES):
        return {}
    ends = {action[-1:] for action in own}
    if len(ends) == len(own) and ends <= set("0123456789"):
        return {action: int(action[-1]) for action in own}
    return {action: number for number, action in enumerate(own[:NUMBERS], start=1)}


def choose(match: Match, asking: Asking, number: int) -> str:
    """Choose the action with this number. Says why nothing was chosen; empty where something was, or nobody waits."""
    for index, player, person in asking.people():
        game = match.sessions[index].game
        action = {n: a for a, n in numbers(game, player).items()}.get(number)
        if action is None:
            continue
        if action in game.legal(player):
            person.choose(action)
            return ""
        return f"{number} is {action}, which is not possible now."
    return ""


def pick(match: Match, asking: Asking, index: int, player: str, action: str) -> None:
    """The action that was clicked or typed for a seat, where a person sits there and it is legal."""
    for waiting, name, person in asking.people():
        if (waiting, name) == (index, player) and action in match.sessions[index].game.legal(player):
            person.choose(action)


def listed(game: Game, player: str) -> bool:
    """Whether some legal action has neither an arrow nor a number, so that it has to be typed or chosen."""
    keyed = set(numbers(game, player))
    return any(action not in keyed and action.casefold() not in MOVES for action in game.legal(player))


def arrows(game: Game, player: str) -> str:
    """What the arrows mean now, where they mean something."""
    return " ".join(f"{SIGNS[way]} {action}" for way in MOVES if (action := aimed(game, player, way)))


def keys_of(game: Game, player: str, person: HumanAgent) -> str:
    """The keys that play: arrows where they mean something, numbers, and m where moves are typed."""
    legal = game.legal(player)
    if {action.casefold() for action in legal} <= set(MOVES):
        return KEYS[person.hands]
    typed = f"m: type or choose one of {len(legal)}" if listed(game, player) else ""
    numbered = "a number, or a click" if numbers(game, player) else ""
    return "   ".join(filter(None, (arrows(game, player), numbered, typed)))

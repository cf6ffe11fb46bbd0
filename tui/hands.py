"""Which person a key or a click moves, and which keys a person is told."""

from __future__ import annotations

from msgrpo.game import MOVES, Game
from msgrpo.tui.agents import ARROWS, WASD, HumanAgent
from msgrpo.tui.asking import Asking, Seat
from msgrpo.tui.session import Match

KEYS = {(ARROWS, WASD): "arrows, hjkl or wasd", (ARROWS,): "arrows or hjkl", (WASD,): "wasd"}


def move(match: Match, asking: Asking, way: str, hand: str) -> None:
    """Answer `way` for the first waiting person who has that hand of keys and may go there."""
    for index, player, person in asking.people():
        if hand in person.hands and way in match.sessions[index].game.legal(player):
            person.choose(way)
            return


def want(match: Match, asking: Asking, wanted: dict[Seat, str], way: str, hand: str) -> None:
    """Keep what the person with that hand of keys wants to do at the next tick; the last key counts."""
    for index, player, person in asking.people():
        if hand in person.hands and way in match.sessions[index].game.legal(player):
            wanted[index, player] = way
            return


def choose(match: Match, asking: Asking, number: int) -> None:
    """The `number`-th action that is legal now, for games that are not played with arrows."""
    for index, player, person in asking.people():
        legal = match.sessions[index].game.legal(player)
        if number <= len(legal) and not set(legal) <= set(MOVES):
            person.choose(legal[number - 1])
            return


def click(match: Match, asking: Asking, index: int, player: str, action: str) -> None:
    """The action that was clicked in a seat's panel, where a person sits there and it is legal."""
    for waiting, name, person in asking.people():
        if (waiting, name) == (index, player) and action in match.sessions[index].game.legal(player):
            person.choose(action)


def keys_of(game: Game, player: str, person: HumanAgent) -> str:
    """The keys that play: those of the person's hands where all that can be done is to go somewhere, else numbers."""
    legal = game.legal(player)
    if set(legal) <= set(MOVES):
        return KEYS[person.hands]
    return "  ".join(f"{i} {action}" for i, action in enumerate(legal[:9], start=1)) + (" …" if legal[9:] else "")

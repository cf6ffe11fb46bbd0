"""OpenSpiel (`pip install -e '.[openspiel]'`): `spiel:tic_tac_toe`, `spiel:connect_four`, `spiel:leduc_poker`, …

Rules, legal actions and texts are OpenSpiel's own. Chance before the first decision is drawn from the start's stream,
later chance from the luck's. Players are asked in turn, or all at once where a game says so. With hidden information
a player reads its information state, else the observation. An answer without a legal action loses the game where
there are several players, and uses up a step where there is one.
"""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pyspiel

from msgrpo.errors import GameError, UsageError, first_line, nearest
from msgrpo.game import Board, Game, Judgement, Scenario, stream

LIMIT = 400  # steps, where a game may last longer
MOST_ACTIONS = 150  # that are listed; of games with more, each state names its own
SIMULATIONS = 400  # of the search player
SOLVED = 9  # moves of the longest game that is searched to its end, as tic-tac-toe is
SEARCHED = pyspiel.GameType.Information.PERFECT_INFORMATION


class SpielGame(Game):
    def __init__(self, name: str, step_limit: int, start_seed: int, chance_seed: int) -> None:
        self.name = name
        self.players, self.actions = players_of(name), actions_of(name)
        super().__init__(step_limit)
        self.state = load(name).new_initial_state()
        self._forfeited: str | None = None
        self._chance(stream(start_seed, "spiel-start"))
        self._draw_luck(chance_seed)

    def _draw_luck(self, chance_seed: int) -> None:
        self._luck = stream(chance_seed, "spiel-luck")

    def __deepcopy__(self, memo: dict[int, object]) -> SpielGame:
        twin = copy.copy(self)
        twin.state, twin.returns = self.state.clone(), dict(self.returns)
        twin._luck = copy.deepcopy(self._luck)
        return twin

    def _chance(self, generator: Any) -> None:
        """Play chance nodes until somebody decides."""
        while self.state.is_chance_node():
            outcomes, chances = zip(*self.state.chance_outcomes(), strict=True)
            total = sum(chances)
            self.state.apply_action(int(generator.choice(outcomes, p=[chance / total for chance in chances])))

    @property
    def to_move(self) -> tuple[str, ...]:
        if self.state.is_simultaneous_node():
            return self.players
        moving = self.state.current_player()
        return (self.players[moving],) if moving >= 0 else self.players[:1]

    def legal(self, player: str) -> tuple[str, ...]:
        seat = self.players.index(player)
        if self.state.is_terminal():
            return self.actions
        return tuple(self.state.action_to_string(seat, action) for action in self.state.legal_actions(seat))

    def own_actions(self, player: str) -> tuple[str, ...]:
        return seat_actions(self.name, self.players.index(player)) if self.actions else ()

    def other_names(self, player: str) -> dict[str, str]:
        """Chess's moves as programs write them: from, to, and what a pawn becomes."""
        if self.name != "chess" or self.state.is_terminal():
            return {}
        board, seat = self.state.board(), self.players.index(player)
        moves = {number: pyspiel.chess.action_to_move(number, board) for number in self.state.legal_actions(seat)}
        return {move.to_lan(): self.state.action_to_string(seat, number) for number, move in moves.items()}

    def side(self, player: str) -> str:
        """Chess's colours, or the sign with which all actions of a player begin: x(1,2), o3."""
        if self.name == "chess":
            return "White" if self.players.index(player) == int(pyspiel.chess.Color.WHITE) else "Black"
        signs = [{PIECE.sub(r"\1", action) for action in self.own_actions(one)} for one in self.players]
        all_signs = set().union(*signs)
        alone = all(len(sign) == 1 for sign in all_signs) and [len(of) for of in signs] == [1] * len(all_signs)
        return "".join(signs[self.players.index(player)]) if alone else player

    def board(self) -> Board | None:
        """The pieces of a game whose text is a plain rectangle of signs, or chess's own notation; None for others."""
        if load(self.name).get_type().information != SEARCHED:
            return None
        text = COLOUR.sub("", self.state.observation_string(0)).strip()
        return chess_board(text) if self.name == "chess" else plain_board(text, self.actions)

    def observe(self, player: str) -> str:
        seat, kind = self.players.index(player), load(self.name).get_type()
        hidden = kind.information != SEARCHED and kind.provides_information_state_string
        text = self.state.information_state_string(seat) if hidden else self.state.observation_string(seat)
        plain = COLOUR.sub("", text).strip("\n")
        seen = textwrap.dedent(plain).rstrip() or "nothing is seen yet"  # the first row stays as far in
        who = f" You are {player}." if len(self.players) > 1 else ""
        return f"Step {min(self.steps + 1, self.step_limit)} of {self.step_limit}.{who}\n{seen}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        failed = [player for player, action in actions.items() if action is None]
        if failed:
            return self._failed(failed)
        chosen = {player: self._number(player, str(action)) for player, action in actions.items()}
        if self.state.is_simultaneous_node():
            self.state.apply_actions([chosen[player] for player in self.players])
        else:
            self.state.apply_action(*chosen.values())
        self._chance(self._luck)
        self._over = self.state.is_terminal()
        after = self.state.returns()
        return {player: float(after[i]) - self.returns[player] for i, player in enumerate(self.players)}

    def _number(self, player: str, action: str) -> int:
        seat = self.players.index(player)
        for number in self.state.legal_actions(seat):
            if self.state.action_to_string(seat, number) == action:
                return int(number)
        raise GameError(f"{action!r} of {player} is no action now")

    def _failed(self, failed: list[str]) -> dict[str, float]:
        nothing = dict.fromkeys(self.players, 0.0)
        if len(self.players) == 1:
            return nothing
        self._over, self._forfeited = True, failed[0]
        rules = load(self.name)
        worst, utility = float(rules.min_utility()), rules.get_type().utility
        kinds = pyspiel.GameType.Utility
        others = [player for player in self.players if player not in failed]
        if utility == kinds.IDENTICAL:  # one team: who fails fails all
            return {player: worst - self.returns[player] for player in self.players}
        lost = {player: worst - self.returns[player] for player in failed}
        if utility not in (kinds.ZERO_SUM, kinds.CONSTANT_SUM):  # the others keep what they have
            return nothing | lost
        rest = float(rules.utility_sum()) - worst * len(failed)
        won = {player: rest / len(others) - self.returns[player] for player in others}
        return nothing | lost | won

    @property
    def ending(self) -> str:
        if self._forfeited is not None:
            return f"{self._forfeited} gave no legal action"
        if not self._over or len(self.players) == 1:
            return super().ending
        most = max(self.returns.values())
        winners = [player for player, value in self.returns.items() if value == most]
        return "a draw" if len(winners) == len(self.players) else f"{' and '.join(winners)} won"


@cache
def load(name: str) -> Any:
    """Raises UsageError for a name that OpenSpiel does not know, or parameters that a game does not have.

    An unknown name is not asked of OpenSpiel, which prints a list of all its games.
    """
    known, short = [kind.short_name for kind in pyspiel.registered_games()], name.partition("(")[0]
    if short not in known:
        raise UsageError(f"OpenSpiel has no game {short!r}", fix=nearest(short, known))
    try:
        return pyspiel.load_game(name)
    except (pyspiel.SpielError, RuntimeError, IndexError) as error:  # the last for a file that is not named
        raise UsageError(f"OpenSpiel has no game {name!r}: {first_line(error)}") from error


@cache
def players_of(name: str) -> tuple[str, ...]:
    count = load(name).num_players()
    return ("player",) if count == 1 else tuple(f"player{i + 1}" for i in range(count))


@cache
def actions_of(name: str) -> tuple[str, ...]:
    """Every action of every player by its name, where there are few and a name does not depend on the state.

    Empty for others (chess): there the legal ones of each state are all that is named.
    """
    game = load(name)
    if game.num_distinct_actions() > MOST_ACTIONS:
        return ()
    state = _first_decision(game)
    numbers = range(game.num_distinct_actions())
    try:
        names = [state.action_to_string(seat, n) for seat in range(game.num_players()) for n in numbers]
    except (pyspiel.SpielError, RuntimeError):
        return ()
    generator = stream(0, "spiel-actions")
    for _ in range(5):
        state = game.new_initial_state()
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(int(generator.choice([outcome for outcome, _ in state.chance_outcomes()])))
                continue
            seats = _to_move(state)
            legal = [state.legal_actions(seat) for seat in seats]
            legal_names = {state.action_to_string(seat, n) for seat, of in zip(seats, legal, strict=True) for n in of}
            if not legal_names <= set(names):
                return ()
            chosen = [int(generator.choice(of)) for of in legal]
            if state.is_simultaneous_node():
                state.apply_actions(chosen)
            else:
                state.apply_action(*chosen)
    return tuple(dict.fromkeys(names))


@cache
def seat_actions(name: str, seat: int) -> tuple[str, ...]:
    """What one player may ever do, by the game's own numbers, so that an action's place never changes."""
    game = load(name)
    state = _first_decision(game)
    names = [state.action_to_string(seat, number) for number in range(game.num_distinct_actions())]
    return tuple(dict.fromkeys(names))


CHESS = dict(zip("kqrbnp", ("king", "queen", "rook", "bishop", "knight", "pawn"), strict=True))
PIECE = re.compile(r"([a-zA-Z])[\d(].*")  # an action that begins with the sign of who plays it
COLOUR = re.compile(r"\x1b\[[\d;]*m")  # twixt's text is written for a terminal
SEEDED = {"stones_and_gems"}  # whose own chance comes from a seed among its parameters
SMALLEST_BOARD = 3  # rows and columns of signs that are taken for a board


def plain_board(text: str, actions: tuple[str, ...]) -> Board | None:
    """The board of a text that is a rectangle of signs, as of tic-tac-toe and connect four; else None.

    Rows are counted from the top, as OpenSpiel's `x(row,column)` does.
    """
    rows = [tuple(line) for line in text.split("\n")]
    width = len(rows[0])
    if min(len(rows), width) < SMALLEST_BOARD or any(len(row) != width for row in rows):
        return None
    pieces = sorted({cell for row in rows for cell in row if cell.isalpha()})
    if any(not (cell == "." or cell.isalpha()) for row in rows for cell in row) or len(pieces) > 2:
        return None
    dealt = {"x": "blue", "o": "red", "w": "white", "b": "black"}
    return Board(
        tuple(rows),
        {".": "empty"} | {sign: sign for sign in pieces},
        dict.fromkeys(pieces, "thing"),
        colours={
            (y, x): dealt.get(cell, "grey") for y, row in enumerate(rows) for x, cell in enumerate(row) if cell != "."
        },
        down=tuple(str(y) for y in range(len(rows))) if any("," in action for action in actions) else (),
    )


def chess_board(notation: str) -> Board:
    """The board of a position in Forsyth-Edwards notation: White's pieces are capitals."""
    placed, to_move, *_ = notation.split()
    lines = ["".join("." * int(sign) if sign.isdigit() else sign for sign in row) for row in placed.split("/")]
    rows = tuple(map(tuple, lines))
    pieces = sorted({cell for row in rows for cell in row if cell != "."})
    names = {sign: f"{'white' if sign.isupper() else 'black'} {CHESS[sign.lower()]}" for sign in pieces}
    return Board(
        rows,
        {".": "empty"} | names,
        dict.fromkeys(pieces, "thing"),
        colours={
            (y, x): "white" if cell.isupper() else "black"
            for y, row in enumerate(rows)
            for x, cell in enumerate(row)
            if cell != "."
        },
        across=tuple("abcdefgh"),
        down=tuple("87654321"),
        caption=f"{'White' if to_move == 'w' else 'Black'} is to move.",
    )


def _first_decision(game: Any) -> Any:
    state = game.new_initial_state()
    while state.is_chance_node():
        state.apply_action(state.chance_outcomes()[0][0])
    return state


def _to_move(state: Any) -> Sequence[int]:
    return range(state.num_players()) if state.is_simultaneous_node() else [state.current_player()]


def spiel_scenario(name: str) -> Scenario:
    """The scenario of an OpenSpiel game.

    Raises UsageError for an unknown one, and for one that no text tells of, whose starts cannot be drawn again, or
    whose actions have no numbers.
    """
    game = load(name)
    kind = game.get_type()
    if kind.dynamics == pyspiel.GameType.Dynamics.MEAN_FIELD:
        raise UsageError(f"{name} is a mean-field game: nobody in particular plays it")
    if not (kind.provides_observation_string or kind.provides_information_state_string):
        raise UsageError(f"OpenSpiel gives no text of what a player of {name} sees")
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC and kind.short_name not in SEEDED:
        raise UsageError(f"{name} draws its chance inside OpenSpiel: no start of it could be played twice")
    first = _first_decision(game)
    try:
        for seat in _to_move(first):
            first.legal_actions(seat)
    except (pyspiel.SpielError, RuntimeError) as error:
        raise UsageError(f"OpenSpiel lists no legal actions of {name}: {first_line(error)}") from error
    limit = min(game.max_game_length(), LIMIT)
    state = game.new_initial_state()

    def make(start_seed: int, chance_seed: int) -> SpielGame:
        return SpielGame(name, limit, start_seed, chance_seed)

    several = game.num_players() > 1
    rules = (
        f"{kind.long_name}, {game.num_players()} player{'s' if several else ''}. {aim_of(game)} "
        f"There are at most {limit} steps. An answer without a legal action "
        f"{'loses the game' if several else 'uses up a step'}."
    )
    terminal = kind.reward_model == pyspiel.GameType.RewardModel.TERMINAL  # the search needs it
    solvable = terminal and kind.information == SEARCHED and kind.dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL
    alone = not state.is_chance_node()
    return Scenario(
        f"spiel:{name}",
        f"spiel-{name}",
        rules,
        limit,
        f"[OpenSpiel] {name}",
        make,
        players_of(name),
        actions_of(name),
        one_start=alone,
        hidden=kind.information != SEARCHED and not alone,
        reference=best if solvable else None,
        judge=judge_exactly if _small(game) else None,
    )


def aim_of(game: Any) -> str:
    """What is played for, as far as OpenSpiel knows it: who wins, and how many points that is."""
    kinds, utility = pyspiel.GameType.Utility, game.get_type().utility
    least, most, players = game.min_utility(), game.max_utility(), game.num_players()
    if players == 2 and utility == kinds.ZERO_SUM:
        point = "point" if most == 1 else "points"
        return f"The winner gains what the loser loses, at most {most:g} {point}; a draw is worth 0."
    points = f"between {least:g} and {most:g} a game; the more, the better."
    if players == 1:
        return f"You play for points, {points}"
    if utility == kinds.IDENTICAL:
        return f"All play together for the same points, {points}"
    return f"Everybody plays for points of their own, {points} The player with the most wins."


def _small(game: Any) -> bool:
    """Whether alpha-beta search sees to the end of every game at once: two players, no chance, few moves."""
    kind = game.get_type()
    return bool(
        game.num_players() == 2
        and game.max_game_length() <= SOLVED
        and kind.utility == pyspiel.GameType.Utility.ZERO_SUM
        and kind.chance_mode == pyspiel.GameType.ChanceMode.DETERMINISTIC
        and kind.information == SEARCHED
        and kind.dynamics == pyspiel.GameType.Dynamics.SEQUENTIAL
    )


def judge_exactly(game: SpielGame, player: str) -> Judgement:
    """The game's value after each action, by OpenSpiel's alpha-beta search; ⊥ loses."""
    from open_spiel.python.algorithms.minimax import alpha_beta_search

    rules, seat = load(game.name), game.players.index(player)
    values: dict[str | None, float] = {None: float(rules.min_utility())}
    for number in game.state.legal_actions(seat):
        after = game.state.child(number)
        value = (
            after.player_return(seat)
            if after.is_terminal()
            else alpha_beta_search(rules, after, maximizing_player_id=seat)[0]
        )
        values[game.state.action_to_string(seat, number)] = float(value)
    return Judgement(values)


def best(game: SpielGame, player: str) -> list[str]:
    """OpenSpiel's own Monte Carlo tree search, which proves a result where it can see to the end."""
    seed = int(stream(game.steps, "spiel-search").integers(2**31))
    evaluator = pyspiel.RandomRolloutEvaluator(4, seed)
    bot = pyspiel.MCTSBot(load(game.name), evaluator, 2.0, SIMULATIONS, 64, True, seed, False)
    state = game.state.clone()
    return [state.action_to_string(state.current_player(), bot.step(state))]

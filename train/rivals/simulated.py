"""credit=simulated(playouts=4): Q(s, a) − V(s), from episodes that are simulated with the group's own answers.

The policy sees only the current state, so what it answered in a state would serve as well in any other episode that
comes there. From the state of each turn the game goes on `playouts` times, with new luck, after each action that was
tried there, and as often after an action that is drawn. So are all later ones: with n answers recorded in a state,
one of these with probability n / (n + 1), else one of all that this player gave in the group and that are legal
there (where none are, any legal action). No model is asked. In what was recorded and simulated, taken together as the
game, the values are exact:

    Q(s, a) = mean over what followed a in s of r + γ V(s′)        V(s) = Σ_a π(a|s) Q(s, a)

where π are the frequencies with which answers are drawn, over the actions that were tried in s. States are told apart
by their step too; where several moments look alike to the player, the game goes on from the first. Most of the luck
is averaged away, at the price of steps of the game and not of answers. The game must let itself be copied in mid-play
with new luck.

Sources: values in the model that the data make most likely (batch TD; Sutton 1988), Dyna (Sutton 1991); for playouts
as credit VinePPO (arXiv 2410.01679), whose playouts are new answers.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from pydantic import Field

from msgrpo.episode import Episode, Turn, derive_seed, observation_of, play_again
from msgrpo.errors import GameError, GameFaultError, RunError
from msgrpo.game import Game, Outcome
from msgrpo.limits import games_code
from msgrpo.train.groups import Group, PerTurn
from msgrpo.train.rivals.contract import Credit, Learner, Settings
from msgrpo.train.rivals.discounted import mean, scaled

State = tuple[int, str]  # the step, and what the player sees
Said = tuple[str | None, float]  # the action of an answer, and its shaping
Noted = tuple[State, str | None, float]  # a turn: its action, and the reward up to the player's next turn
Followed = tuple[float, State | None]  # that reward, and the state of the next turn


@dataclass
class Tally:
    """How many simulated episodes have a result and how many an error prevented or ended, and the last error."""

    played: int = 0
    lost: int = 0
    last: str = ""


class Simulated(Credit):
    """Q(s, a) − V(s) from episodes that are simulated with the group's own answers, in copies of the game."""

    name = "simulated"
    copies_games = True
    gamma: float = Field(1.0, gt=0, le=1, description="γ, discount of returns to go")
    playouts: int = Field(4, ge=1, le=1000, description="simulated episodes after each action tried in a state")

    def check(self, config: Settings) -> None:
        if config.prompt.history:
            raise ValueError(
                "credit=simulated reuses answers by their state, and a prompt with history shows more than that;"
                " take another credit, such as credit=episode"
            )

    def of_groups(self, groups: Sequence[Group], learner: Learner) -> list[PerTurn]:
        found = learner.ranks.gather([self._of_group(group) for group in learner.ranks.share(groups)])
        _tell_lost(groups, [tally for _, tally in found], learner)
        return [credit for credit, _ in found]

    def _of_group(self, group: Group) -> tuple[PerTurn, Tally]:
        """The credit of every turn, [j][t], and what became of its simulated episodes."""
        model = Model(group)
        model.simulate(self.playouts)
        gains = model.gains(self.gamma)
        credits = [[gains[_state(turn)][turn.action] for turn in turns] for turns in group.turns]
        return scaled(credits, group.trajectories(), self.scale), model.tally


class Answers:
    """The policy, as the answers of a group's episodes show it."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._in_state: dict[tuple[str, str], list[Said]] = defaultdict(list)
        self._of_player: dict[str, list[Said]] = defaultdict(list)
        self._legal: dict[str, tuple[tuple[str, ...], list[Said]]] = {}  # the last ones, and what was said of these
        for turn in (turn for episode in episodes for turn in episode.turns):
            said = (turn.action, turn.shaping)
            self._in_state[turn.player, turn.state].append(said)
            self._of_player[turn.player].append(said)
        self._shares = {
            player: {action: n / len(said) for action, n in Counter(action for action, _ in said).items()}
            for player, said in self._of_player.items()
        }

    def draw(self, game: Game, player: str, state: str, random: Random) -> Said:
        """An answer in this state; where the player gave no legal one in the group, any legal action."""
        here = self._in_state.get((player, state), [])
        if random.random() * (len(here) + 1) < len(here):
            return random.choice(here)
        legal = game.legal(player)
        if self._legal.get(player, ((), []))[0] != tuple(legal):  # of which a game may change the list
            all_of = [said for said in self._of_player[player] if said[0] is None or said[0] in legal]
            self._legal[player] = tuple(legal), all_of or [(action, 0.0) for action in legal]
        return random.choice(self._legal[player][1])

    def weight(self, player: str, state: str, action: str | None) -> float:
        """How often `draw` gives this action, up to a factor; what nobody said counts as if it were rarest."""
        here = sum(said == action for said, _ in self._in_state.get((player, state), []))
        return here + self._shares[player].get(action, 1 / len(self._of_player[player]))


class Model:
    """What followed each action in each state of a player, in the group's episodes and in simulated ones."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.player = group.turns[0][0].player
        self.answers = Answers(group.episodes)
        self.tally = Tally()
        self.followed: dict[State, dict[str | None, list[Followed]]] = defaultdict(lambda: defaultdict(list))
        for turns in group.turns:
            self._note([(_state(turn), turn.action, turn.paid + turn.shaping) for turn in turns])

    def _note(self, turns: Sequence[Noted]) -> None:
        """Keep what followed each turn of an episode."""
        after: State | None = None
        for state, action, reward in reversed(turns):
            self.followed[state][action].append((reward, after))
            after = state

    def simulate(self, playouts: int) -> None:
        """Go on from the state of every turn, after each action that was tried there and after one that is drawn."""
        tried: dict[State, set[Said]] = defaultdict(set)
        for turn in (turn for turns in self.group.turns for turn in turns):
            tried[_state(turn)].add((turn.action, turn.shaping))
        for state, game in self._visited():
            firsts = [*sorted(tried.pop(state), key=str), None]
            for k in range(playouts):
                luck = derive_seed("simulated", self.group.episodes[0].chance_seed, *state, k)
                for first in firsts:  # with the same luck
                    self._play(game, luck, first)
        not_seen_again = tried.values()
        self.tally.lost += sum(playouts * (len(actions) + 1) for actions in not_seen_again)

    def _visited(self) -> Iterator[tuple[State, Game]]:
        """Every state that the player had a turn in, once, with the game as it stood there."""
        seen: set[State] = set()
        for j, turns in enumerate(self.group.turns):
            own = {turn.step: _state(turn) for turn in turns}
            for step, game in self._again(j):
                if step in own and own[step] not in seen:
                    seen.add(own[step])
                    yield own[step], game

    def _again(self, j: int) -> Iterator[tuple[int, Game]]:
        """An episode played again: the game before each of its steps, until one fails or shows something else."""
        episode = self.group.episodes[j]
        turns: dict[int, list[Turn]] = defaultdict(list)
        for turn in episode.turns:
            turns[turn.step].append(turn)
        try:
            with games_code(episode.scenario):
                game = self.group.origin(j)
            for step in sorted(turns):
                with games_code(episode.scenario):
                    _check_same(game, turns[step])
                yield step, game
                play_again(episode.scenario, game, turns[step])
        except GameError as error:
            self._fail(error)

    def _play(self, game: Game, luck: int, first: Said | None) -> None:
        """Go on with this luck to the end, and note what followed; not where an error ended it."""
        try:
            noted = list(self._turns(game, luck, first, Random(luck)))
        except GameError as error:
            self._fail(error)
            self.tally.lost += 1
            return
        self.tally.played += 1
        self._note(noted)

    def _fail(self, error: GameError) -> None:
        """Raise a fatal fault. Any other costs its episode, and so does a move that is illegal in a copy: the player
        does not see all, and made it where the game only looked the same.
        """
        if isinstance(error, GameFaultError) and error.fatal:
            raise error
        self.tally.last = error.message

    def _turns(self, game: Game, luck: int, first: Said | None, random: Random) -> Iterator[Noted]:
        """The player's turns to the end in a copy of the game, of which `first` is the first."""
        name = self.group.episodes[0].scenario
        turn: tuple[State, str | None] | None = None
        earned = 0.0
        with games_code(name):
            copy = game.with_luck(luck)
            moving = self._to_move(copy, first, random)
        while moving:
            if self.player in moving:
                if turn is not None:
                    yield *turn, earned
                seen, (action, earned) = moving[self.player]
                turn, first = ((copy.steps, seen), action), None
            with games_code(name):  # each step has the time that a game's call may take
                earned += copy.step({player: action for player, (_, (action, _)) in moving.items()})[self.player]
                moving = self._to_move(copy, first, random)
        if turn is not None:
            yield *turn, earned

    def _to_move(self, game: Game, first: Said | None, random: Random) -> dict[str, tuple[str, Said]]:
        """What each player who is to move sees and answers; nothing once the game is over."""
        moving: dict[str, tuple[str, Said]] = {}
        if game.outcome is not Outcome.PLAYING:
            return moving
        if game.steps >= game.step_limit:
            raise GameFaultError(f"it goes on after {game.steps} steps; its limit is {game.step_limit}", rule="limit")
        for player in game.to_move:
            seen = observation_of(game, player)
            said = first if player == self.player else None
            moving[player] = seen, said or self.answers.draw(game, player, seen, random)
        return moving

    def gains(self, gamma: float) -> dict[State, dict[str | None, float]]:
        """Q(s, a) − V(s) of every action tried in every state, in units of reward; from the last step back."""
        values: dict[State, float] = {}
        gains = {}
        for state in sorted(self.followed, reverse=True):
            worth = {
                action: mean([reward + gamma * (values[after] if after else 0.0) for reward, after in followed])
                for action, followed in self.followed[state].items()
            }
            weights = {action: self.answers.weight(self.player, state[1], action) for action in worth}
            values[state] = sum(weights[action] * worth[action] for action in worth) / sum(weights.values())
            gains[state] = {action: q - values[state] for action, q in worth.items()}
        return gains


def _tell_lost(groups: Sequence[Group], tallies: Sequence[Tally], learner: Learner) -> None:
    """Raise RunError where errors ended most of what an update simulated: the rest says little. A few starts where
    they do cost only themselves, which is said once in a run.
    """
    lost, played = sum(one.lost for one in tallies), sum(one.played for one in tallies)
    if not lost:
        return
    name, last = next(
        (group.episodes[0].scenario, one.last) for group, one in zip(groups, tallies, strict=True) if one.lost
    )
    said = f"{lost} of {lost + played} simulated episodes have no result, one of them: {last}"
    fix = f"find the game's fault with: msgrpo games check {shlex.quote(name)}; or take another credit"
    if lost > played:
        raise RunError(said, fix=fix)
    if Simulated.name not in learner.memory:
        learner.memory[Simulated.name] = torch.ones(1)
        learner.note(f"left out: {said}; {fix}")


def _check_same(game: Game, turns: Sequence[Turn]) -> None:
    """Raise GameFaultError where the game does not show what it showed when the turns were played."""
    for turn in turns:
        if observation_of(game, turn.player) != turn.state:
            raise GameFaultError(
                f"played again with the same seeds and moves, it shows {turn.player} something else before step "
                f"{turn.step + 1}",
                rule="seeds",
            )


def _state(turn: Turn) -> State:
    return turn.step, turn.state

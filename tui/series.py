"""Who won a game of two, and a series of them: the seeds advance, in duels the seats change, the score runs on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msgrpo.evals.stats import bootstrap_mean
from msgrpo.text import counted, interval_text
from msgrpo.tui.match import Match, opponent
from msgrpo.tui.session import Setup, names_of, points

FEWEST = 8  # games of a series from which an interval says something


def winner(match: Match) -> int | None:
    """The seat (in the order of the screen) that won: by the return, or by fewer steps where both reached the goal.

    None for a draw, before the end, and where nobody else plays.
    """
    seats = match.seats()
    if len(seats) < 2 or not match.over:
        return None
    results = []
    for i, player in seats[:2]:
        last = match.sessions[i].frames[-1]
        reached = all(session.game.success for session in match.sessions)
        results.append((last.tallies[player].total, -last.step if reached else 0))
    if results[0] == results[1]:
        return None
    return 0 if results[0] > results[1] else 1


def verdict(match: Match) -> str:
    """Who won and how, when two played; empty for one, and before the end."""
    seats = match.seats()
    if len(seats) < 2 or not match.over:
        return ""
    names = [match.sessions[i].subject(player) for i, player in seats[:2]]
    lasts = [match.sessions[i].frames[-1] for i, _ in seats[:2]]
    totals = [last.tallies[player].total for last, (_, player) in zip(lasts, seats, strict=False)]
    text = " · ".join(f"{name} {points(total)}" for name, total in zip(names, totals, strict=True))
    won = winner(match)
    if won is None:
        return f"{text}  —  a draw"
    name = names[won] if names[0] != names[1] else f"the {('first', 'second')[won]} {names[won]}"
    steps = ""
    if totals[0] == totals[1]:
        quick, slow = lasts[won].step, lasts[1 - won].step
        steps = f", in {counted(quick, 'step')} against {slow}"
    return f"{text}  —  {name} {'win' if name == 'you' else 'wins'}{steps}"


@dataclass
class Series:
    """`games` games of two agents; in a duel each of them has either seat in turn.

    `differences` are the first agent's returns less the second's, a game; `wins` count by the rule of `winner`.
    """

    setup: Setup  # of the first game
    games: int
    wins: list[int] = field(default_factory=lambda: [0, 0])
    differences: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.setup = replace(self.setup, against=opponent(self.setup))

    @property
    def played(self) -> int:
        return len(self.differences)

    @property
    def over(self) -> bool:
        return self.played >= self.games

    def next(self) -> Setup:
        """The next game: another seed, and in a duel the other seats."""
        first, second = self.setup.agent, self.setup.against
        if self.changed and second is not None:
            first, second = second, first
        return replace(self.setup, agent=first, against=second, seed=self.setup.seed + self.played)

    @property
    def changed(self) -> bool:
        """Whether the second agent has the first seat in the game that comes next."""
        return self.setup.mode == "duel" and self.played % 2 == 1

    def add(self, match: Match) -> None:
        """Count the game that `next` began."""
        changed, won = self.changed, winner(match)
        totals = [match.sessions[i].frames[-1].tallies[player].total for i, player in match.seats()[:2]]
        self.differences.append((totals[1] - totals[0]) if changed else (totals[0] - totals[1]))
        if won is not None:
            self.wins[1 - won if changed else won] += 1

    def score(self) -> str:
        """`demo 7 - nano 3, difference +0.40 [+0.10, +0.70]`; the interval is a bootstrap over the games."""
        specs = (self.setup.agent, self.setup.against or "")
        names = [names_of(specs)[spec] for spec in specs]
        text = f"{names[0]} {self.wins[0]} - {names[1]} {self.wins[1]}"
        draws = self.played - sum(self.wins)
        text += f", {draws} drawn" if draws else ""
        if self.played < 2:
            return text
        mean = sum(self.differences) / self.played
        if not self.measured:
            return f"{text}, difference {mean:+.2f}"
        low, high = bootstrap_mean(self.differences, seed=0)
        return f"{text}, difference {mean:+.2f} {interval_text(low, high, '+.2f')}"

    @property
    def measured(self) -> bool:
        """Whether there are games enough for an interval: from a handful it would be narrow by chance."""
        return self.played >= FEWEST

    def card(self) -> str:
        """The result, when all games are played."""
        about = (
            "95 % interval of the mean difference" if self.measured else f"no interval from fewer than {FEWEST} games"
        )
        return f"{self.played} games of {self.setup.scenario}: {self.score()} ({about})"


def standing(match: Match, series: Series | None) -> str:
    """The line under the boards: who won this game, where it is over, and how the series stands."""
    result = verdict(match) if match.live else ""
    if series is None:
        return result
    if series.over:
        return series.card()
    games = "game" if series.played == 1 else "games"
    score = f"after {series.played} {games}: {series.score()}" if series.played else ""
    return "   ".join(filter(None, (result, score)))

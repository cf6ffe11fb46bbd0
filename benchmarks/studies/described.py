"""Whether a taught model says what is true of a game from outside: its words against the scenario's own description.

    PYTHONPATH=benchmarks python benchmarks/studies/described.py runs/eval-goto \\
        --result benchmarks/results/described-babyai-goto.json

For every record of an evaluation's folder: the share of turns whose words are exactly what the scenario's `describe`
says of that state. The game is simulated again from the record. A game from a file: say `--game my_game.py:scenario`.
"""

from __future__ import annotations

from pathlib import Path

from machine import options, write

from msgrpo.agent import thought
from msgrpo.episode import read_episodes, replay
from msgrpo.games import get_scenario, recorded_scenario


def share(file: Path) -> tuple[str, str, float, int] | None:
    """(agent, scenario, share of true words, turns) of a record; None where nothing is said or described."""
    agent, true, turns, name = "", 0, 0, ""
    for episode in read_episodes(file):
        scenario = recorded_scenario(episode.scenario)
        if scenario.describe is None:
            return None
        name, agent = scenario.id, next(iter(episode.agents.values()))
        for turn in episode.turns:
            if turn.answer is not None:
                game = replay(scenario, episode, turn.step)
                true += thought(turn.answer) == scenario.describe(game, turn.player)
                turns += 1
    return (agent, name, true / turns, turns) if turns else None


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path, help="an evaluation's folder")
    parser.add_argument("--game", action="append", default=[], help="a game from outside that records may name")
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    for name in given.game:
        get_scenario(name)
    rows = [row for file in sorted(given.folder.rglob("*.jsonl")) if (row := share(file))]
    for agent, name, true, turns in rows:
        print(f"{agent} in {name}: {true:.1%} of {turns} turns")
    if given.result:
        found = [dict(zip(("agent", "scenario", "true", "turns"), row, strict=True)) for row in rows]
        write(given.result, {"rows": found})


if __name__ == "__main__":
    main()

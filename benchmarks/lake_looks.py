"""Does a policy look at the map of Frozen Lake? From a record of its episodes, and from its training's own log.

    python benchmarks/lake_looks.py runs/eval/AGENT/frozen-lake.jsonl --result benchmarks/results/looks.json
    python benchmarks/lake_looks.py --run runs/lake --result benchmarks/results/boards.json

Two witnesses. The first: whoever does not look can be no better than the best fixed sequence of moves on these
starts (of the twenty that lead to the goal in six moves; chosen afterwards, so a high bound). The second: of the
moves ahead (right or down) in turns in which just one of these two leads into a hole, how many do not take it; half
where nobody looks.

Of a run: how often its rollouts won on boards that it had trained on before, and on boards that were new to it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

from machine import options, write

from msgrpo.episode import Episode, read_episodes
from msgrpo.games import get_scenario

Cell = tuple[int, int]
START, GOAL, AHEAD = (0, 3), (3, 0), {"right": (1, 0), "down": (0, -1)}


def cells(text: str) -> list[Cell]:
    return [(int(x), int(y)) for x, y in re.findall(r"\((\d),(\d)\)", text)]


def seen(state: str) -> tuple[Cell, set[Cell]]:
    """Where the player is, and the holes."""
    you, _, rest = state.partition(" Goal ")
    return cells(you)[0], set(cells(rest.partition("Holes")[2].partition("\n")[0]))


def sequences() -> dict[str, list[Cell]]:
    """The cells of every way of three moves right and three down."""
    ways = {}
    for rights in combinations(range(6), 3):
        moves = ["right" if i in rights else "down" for i in range(6)]
        way = [START]
        for move in moves:
            way.append((way[-1][0] + AHEAD[move][0], way[-1][1] + AHEAD[move][1]))
        assert way[-1] == GOAL
        ways[" ".join(moves)] = way
    return ways


def looks(episodes: list[Episode]) -> dict[str, Any]:
    boards = [seen(episode.turns[0].state)[1] for episode in episodes]
    wins = {name: sum(not board & set(way) for board in boards) for name, way in sequences().items()}
    best = max(wins, key=lambda name: wins[name])
    one_hole, avoided = 0, 0
    for turn in (turn for episode in episodes for turn in episode.turns):
        (x, y), holes = seen(turn.state)
        into = [move for move, (dx, dy) in AHEAD.items() if (x + dx, y + dy) in holes]
        if len(into) == 1 and turn.action in AHEAD:
            one_hole += 1
            avoided += turn.action not in into
    return {
        "episodes": len(episodes),
        "successes": sum(bool(episode.success) for episode in episodes),
        "best_fixed_sequence": {"moves": best, "successes": wins[best]},
        "moves_ahead_beside_one_hole": one_hole,
        "hole_avoided": avoided,
        "actions": dict(Counter(str(turn.action) for episode in episodes for turn in episode.turns)),
    }


def boards(run: Path) -> list[dict[str, Any]]:
    """For each update the groups on new and on known boards that its log holds, and the mean return of each kind."""
    scenario, known, rows = get_scenario("frozen-lake"), set[frozenset[Cell]](), []
    for file in sorted((run / "updates").glob("*.json")):
        update = json.loads(file.read_text())
        returns: dict[str, list[float]] = {"new": [], "known": []}
        here = set()
        for group in update["groups"]:
            game = scenario.new(group["start_seed"], 0)
            board = frozenset(seen(game.observe(game.players[0]))[1])
            mean = sum(member["total"] for member in group["members"]) / len(group["members"])
            returns["known" if board in known else "new"].append(mean)
            here.add(board)
        known |= here
        means = {kind: round(sum(of), 4) / len(of) if of else None for kind, of in returns.items()}
        rows.append({"update": update["step"], "groups": {kind: len(of) for kind, of in returns.items()}} | means)
    return rows


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--run", type=Path, help="folder of a training")
    parser.add_argument("records", nargs="*", type=Path, help="frozen-lake.jsonl of an evaluation")
    given = parser.parse_args()
    found: dict[str, Any] = {record.parent.name: looks(list(read_episodes(record))) for record in given.records}
    if given.run is not None:
        found["boards"] = boards(given.run)
    write(given.result, {"agents": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

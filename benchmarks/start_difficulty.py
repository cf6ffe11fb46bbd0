"""How hard the starts of each split of a lake are, and how often the same board comes.

    python benchmarks/start_difficulty.py frozen-lake-slippery

For 2,000 training, 200 validation and 200 test starts: the exact optimum's mean success, and the share of the most
frequent board.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
from machine import options

from msgrpo.game import Split
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.games.search import optimal_success

if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("scenario")
    scenario = get_scenario(parser.parse_args().scenario)
    counts: dict[Split, int] = {"train": 2000, "val": 200, "test": 200}
    for split, n in counts.items():
        lakes = [
            game
            for start in islice(scenario.starts(split), n)
            if isinstance(game := scenario.new(start, 0), FrozenLake)
        ]
        ((board, times),) = Counter(game.desc for game in lakes).most_common(1)
        optimum = np.mean([optimal_success(game) for game in lakes])
        print(
            f"{split}: optimum {optimum:.3f}, most frequent board {' '.join(board)} in {times / n:.1%} of {n} starts"
        )

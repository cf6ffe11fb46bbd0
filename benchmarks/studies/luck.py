"""How much of a group's spread is luck: the same group, each episode with its own luck, and all with common luck.

    PYTHONPATH=benchmarks python benchmarks/studies/luck.py --model nano --model adapter:runs/fl \\
        --scenario snake --result luck.json

From each start a square of episodes is played: K seeds of sampling by K seeds of luck. A group as training plays it
is a diagonal of that square (every episode with luck of its own), a group under common luck is a column. For returns
R[k, l] with one episode a cell, analysis of variance splits the spread within a start without bias (Searle, Casella
& McCulloch, Variance Components, 1992, section 4.3; two random factors without replication):

    Var R = σ²_sampling + σ²_luck + σ²_both

σ²_luck is what one luck is worth more than another to everybody, and what common luck takes out of a group. A seed
of sampling fixes an episode's first answer, and later ones only as long as luck leads to the same prompts:
σ²_sampling is what of them is worth the same under every luck. σ²_both is all the rest: luck that meets some answers
and not others, and the answers that are given where it leads. So σ²_sampling is *not* what answers are worth; where
there is luck, it is nearly the first answer's worth alone. The intervals are bootstrapped over starts.
"""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from typing import Any

import numpy as np
from machine import options, write
from words import SAMPLING, load

from msgrpo.episode import derive_seed
from msgrpo.evals.stats import ends
from msgrpo.game import Scenario, stream
from msgrpo.games import get_scenario
from msgrpo.models.local import LocalModel
from msgrpo.train.config import TrainConfig
from msgrpo.train.rollouts import Play, Players

PARTS = ("sampling", "luck", "both")
DRAWS = 2000  # of the bootstrap


async def square(model: LocalModel, scenario: Scenario, start: int, size: int) -> np.ndarray:
    """Returns with the format penalty, as training compares them; a row for each sampling seed, a column a luck."""
    answers, lucks = ([derive_seed(name, start, i) for i in range(size)] for name in ("answers", "luck"))
    plays = [Play(scenario, start, luck, answer, scenario.players) for answer in answers for luck in lucks]
    episodes = await Players(TrainConfig()).play(model, SAMPLING, plays, TrainConfig().format_penalty)
    returns = [sum(turn.paid + turn.shaping for turn in episode.turns) for episode in episodes]
    return np.array(returns).reshape(size, size)


def components(returns: np.ndarray) -> np.ndarray:
    """σ² of sampling, luck and both, in that order, of a square of returns; each estimate is unbiased, so one may be
    below 0.

    With mean squares MS of rows, columns and what is left: σ²_both = MS_left, σ²_sampling = (MS_rows − MS_left) / K,
    σ²_luck = (MS_columns − MS_left) / K.
    """
    size = len(returns)
    rows, columns = returns.mean(1, keepdims=True), returns.mean(0, keepdims=True)
    left = ((returns - rows - columns + returns.mean()) ** 2).sum() / (size - 1) ** 2
    sampling = (size * rows.var(ddof=1) - left) / size
    luck = (size * columns.var(ddof=1) - left) / size
    return np.array([sampling, luck, left])


def measured(squares: list[np.ndarray]) -> dict[str, Any]:
    found = np.array([components(one) for one in squares])
    mean = found.mean(0)
    drawn = stream(0, "luck-bootstrap").integers(len(found), size=(DRAWS, len(found)))
    means = found[drawn].mean(1)
    kept = means[means.sum(1) > 0]
    shares = kept / kept.sum(1, keepdims=True)
    return {
        "starts": len(squares),
        "size": len(squares[0]),
        "mean_return": float(np.mean(squares)),
        "flat_under_own_luck": float(np.mean([np.ptp(np.diag(one)) == 0 for one in squares])),
        "flat_under_common_luck": float(np.mean([np.ptp(one, axis=0) == 0 for one in squares])),
        "variance": dict(zip(PARTS, map(float, mean), strict=True)),
        "share": {
            name: {
                "mean": float(mean[i] / mean.sum()),
                "interval": [float(value) for value in np.quantile(shares[:, i], ends(len(squares)))],
            }
            for i, name in enumerate(PARTS)
        },
    }


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--model", action="append", required=True, help="nano, adapter:DIR or a folder; may repeat")
    parser.add_argument("--scenario", action="append", required=True, help="may repeat")
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--size", type=int, default=12, help="K: episodes of a group")
    given = parser.parse_args()
    result: dict[str, Any] = {"found": []}
    for name in given.model:
        model = load(name)
        for scenario in map(get_scenario, given.scenario):
            starts = list(islice(scenario.starts("train"), given.starts))
            squares = [asyncio.run(square(model, scenario, start, given.size)) for start in starts]
            result["found"].append({"model": name, "scenario": scenario.id} | measured(squares))
            write(given.result, result)
            print(name, scenario.id, json.dumps(result["found"][-1]["share"]), flush=True)


if __name__ == "__main__":
    main()

"""Record the comparison that `msgrpo play` opens on: nano before and after training, the same starts, the same luck.

    python benchmarks/showcase.py            # two minutes on one core; writes tui/showcase.jsonl.gz

Each game is played by nano as it comes and by nano with the adapter that comes with it, on the first STARTS test
starts, which no training has seen. Every start has one seed for the start, the luck and the sampling, so that a
person who plays the same start in the app has the same luck.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
from pathlib import Path

from machine import options

from msgrpo.episode import play_episode
from msgrpo.games import get_scenario
from msgrpo.specs import make_agent
from msgrpo.tui.showcase import AFTER, BEFORE, FILE, GAMES

STARTS = 20


async def main() -> None:
    lines = []
    for game in GAMES:
        scenario = get_scenario(game)
        agents = [make_agent(spec.format(game=game), show_probabilities=True) for spec in (BEFORE, AFTER)]
        totals = [0.0, 0.0]
        for seed in itertools.islice(scenario.starts("test"), STARTS):
            for i, agent in enumerate(agents):
                episode = await play_episode(
                    scenario,
                    {scenario.players[0]: agent},
                    start_seed=seed,
                    chance_seed=seed,
                    sampling_seed=seed,
                )
                if episode.error:
                    raise SystemExit(f"{game}, start {seed}: {episode.error_message}")
                totals[i] += episode.returns[scenario.players[0]]
                lines.append(episode.model_dump_json(exclude_none=True))
        print(f"{game}: mean return {totals[0] / STARTS:.2f} before, {totals[1] / STARTS:.2f} after")
    data = gzip.compress("\n".join(lines).encode() + b"\n", mtime=0)
    Path(FILE).write_bytes(data)
    print(f"{FILE}: {len(lines)} episodes, {len(data) / 1000:.0f} kB")


if __name__ == "__main__":
    options(__doc__).parse_args()
    asyncio.run(main())

"""The pictures of README and docs that stand still: the app itself, driven by keys, drawn by itself.

    python benchmarks/pictures.py --agent nano:frozen-lake --seed 3 --run runs/frozen-lake --out docs/images

`watch.svg` is one moment of `--agent`, `learn.svg` the newest update of `--run`. What moves is made by the app's own
`--record`:

    msgrpo play frozen-lake --agent nano --against nano:frozen-lake --seed 3 --speed 2 \\
        --record docs/images/compare.gif
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from machine import options

from msgrpo.specs import make_agent
from msgrpo.tui.app import PlayApp
from msgrpo.tui.learning import Learning
from msgrpo.tui.screens.play import PlayScreen
from msgrpo.tui.session import Setup

STEPS, SIZE = 4, (120, 36)  # moves before the picture; columns and rows


async def watched(setup: Setup) -> str:
    """The screen as SVG after some steps."""
    app = PlayApp(lambda spec: make_agent(spec, show_probabilities=True), setup)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("space")
        screen = app.screen
        assert isinstance(screen, PlayScreen)
        for step in range(1, STEPS + 1):
            await pilot.press("n")
            while screen.match.last < step and not screen.match.over:
                await asyncio.sleep(0.05)
            await pilot.pause()
        return app.export_screenshot(title=f"msgrpo play {setup.scenario}")


async def learned(run: Learning) -> str:
    app = PlayApp(lambda spec: make_agent(spec), run=run)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(1.0)
        return app.export_screenshot(title="msgrpo play --run")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--agent", default="nano:frozen-lake")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--run", type=Path, required=True, help="a training run, for learn.svg")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "watch.svg").write_text(asyncio.run(watched(Setup(given.scenario, given.agent, seed=given.seed))))
    (given.out / "learn.svg").write_text(asyncio.run(learned(Learning.of(given.run))))


if __name__ == "__main__":
    main()

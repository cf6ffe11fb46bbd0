"""The pictures of README and docs: the app itself, driven by keys, drawn by itself.

    python benchmarks/pictures.py --scenario frozen-lake --against adapter:runs/frozen-lake --seed 3 --out docs/images

`watch.svg` is one moment of `--against`; `compare.gif` a whole episode of `--agent` beside the same of `--against`.
Needs chromium, which turns the app's own SVG into frames.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import subprocess
import tempfile
from pathlib import Path

from PIL import Image
from textual.pilot import Pilot

from msgrpo_agent.specs import make_agent
from tui.app import PlayApp
from tui.screens.play import PlayScreen
from tui.session import Setup

FRAME_MS, LAST_MS = 450, 2500


async def one_step(pilot: Pilot[None]) -> PlayScreen:
    """Press the key for one step and wait until its answers are played and drawn."""
    screen = pilot.app.screen
    assert isinstance(screen, PlayScreen)
    before = screen.match.last
    await pilot.press("n")
    while screen.match.last == before and not screen.match.over:
        await asyncio.sleep(0.05)
    await pilot.pause()
    return screen


async def pictures(setup: Setup, size: tuple[int, int], steps: int) -> list[str]:
    """The screen as SVG after every step, until the episode is over or `steps` are played."""
    app = PlayApp(lambda spec: make_agent(spec, show_probabilities=True), setup)
    drawn = []
    async with app.run_test(size=size) as pilot:
        await pilot.press("space")
        for _ in range(steps):
            screen = await one_step(pilot)
            drawn.append(app.export_screenshot(title=f"msgrpo play {setup.scenario}"))
            if screen.match.over:
                break
    return drawn


def frame(svg: str, folder: Path, width: int = 1000) -> Image.Image:
    """A browser draws the SVG: other converters drop the leading spaces of its texts."""
    source, target = folder / "frame.svg", folder / "frame.png"
    source.write_text(svg)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found
    across, down = (math.ceil(float(side)) for side in found.groups())
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--screenshot={target}", f"--window-size={across},{down}", source.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    image = Image.open(target).convert("RGB").resize((width, round(width * down / across)))
    return image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="snake")
    parser.add_argument("--agent", default="nano")
    parser.add_argument("--against", required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    watched = asyncio.run(pictures(Setup(given.scenario, given.against, seed=given.seed), (110, 32), 6))
    (given.out / "watch.svg").write_text(watched[-1])
    setup = Setup(given.scenario, given.agent, given.against, seed=given.seed)
    with tempfile.TemporaryDirectory() as folder:
        frames = [frame(svg, Path(folder)) for svg in asyncio.run(pictures(setup, (120, 36), 100))]
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_MS]
    frames[0].save(
        given.out / "compare.gif", save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True
    )


if __name__ == "__main__":
    main()

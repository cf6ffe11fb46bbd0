"""The figure of the method in the README: one group of Frozen Lake, from the start to the loss.

    python benchmarks/method_figure.py --out docs/images/method.svg

nano plays the group, and the functions of `msgrpo.train.msgrpo` compute what is drawn: returns, advantages, and which
episodes are kept.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path

import matplotlib
import torch
from machine import options
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from msgrpo.episode import Episode, play_episode
from msgrpo.game import Scenario
from msgrpo.games import get_scenario
from msgrpo.specs import make_agent
from msgrpo.train.msgrpo import aaw_sample, composite_returns, group_advantages

GROUP, KEEP, PENALTY = 8, 3, 0.1  # episodes of the group, how many are kept, the format penalty
ARROWS = {"up": "↑", "down": "↓", "left": "←", "right": "→"}
GOOD, BAD, GREY, LINE, INK = "#1a7f5a", "#c0392b", "#d0d4da", "#6b7684", "#22272e"
CELLS = {"_": "#eef5fb", "O": "#5b6b7d", "G": "#f2c14e", "P": "#eef5fb"}
TOP, ROW = 7.6, 0.8  # height of the first episode's row, distance between rows


def group_of(scenario: Scenario, start_seed: int) -> list[Episode]:
    """A group: episodes from one start, each with its own luck and its own sampling."""
    agent = make_agent("nano")

    async def play() -> list[Episode]:
        (player,) = scenario.players
        return await asyncio.gather(
            *(
                play_episode(
                    scenario,
                    {player: agent},
                    start_seed=start_seed,
                    chance_seed=j,
                    sampling_seed=j,
                    format_penalty=PENALTY,
                )
                for j in range(GROUP)
            )
        )

    return asyncio.run(play())


def draw_board(axes: Axes, rows: list[str]) -> None:
    for y, row in enumerate(reversed(rows)):
        for x, cell in enumerate(row):
            axes.add_patch(
                Rectangle((0.35 + 0.5 * x, 3.6 + 0.5 * y), 0.47, 0.47, facecolor=CELLS[cell], edgecolor="#9fb0c2")
            )
            if cell in "PGO":
                axes.text(
                    0.585 + 0.5 * x,
                    3.835 + 0.5 * y,
                    cell,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if cell == "O" else INK,
                )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=LINE))


def draw(axes: Axes, episodes: list[Episode], board: list[str]) -> None:
    returns = composite_returns(
        [[turn.reward for turn in episode.turns] for episode in episodes],
        [[turn.shaping for turn in episode.turns] for episode in episodes],
    )
    advantages = group_advantages(returns)
    kept = set(aaw_sample(advantages, KEEP, torch.Generator().manual_seed(0)).tolist())
    titles = [
        (1.35, "1  one start", f"G = {GROUP} episodes\nare played from it"),
        (4.35, "2  returns", "rewards + format penalty,\nsummed over the episode"),
        (7.6, "3  advantages", "A = (return − mean) / std\nof the group"),
        (10.1, "4  selection", f"keep {KEEP} of {GROUP}, drawn with\nprobability ∝ exp |A|"),
        (13.1, "5  credit", "every token of a kept\nepisode carries its A"),
        (16.0, "6  update", "clipped loss + KL penalty\non the LoRA weights"),
    ]
    for x, title, text in titles:
        axes.text(x, 9.35, title, ha="center", fontsize=11.5, fontweight="bold", color=INK)
        axes.text(x, 9.13, text, ha="center", va="top", fontsize=8.6, color="#4a5563")
    draw_board(axes, board)
    arrow(axes, (2.5, 4.6), (2.95, 4.6))
    for j, episode in enumerate(episodes):
        y, advantage = TOP - ROW * j, float(advantages[j])
        colour = GOOD if advantage > 0 else BAD
        for t, turn in enumerate(episode.turns):
            sign = ARROWS.get(turn.action or "", "?")
            axes.text(3.1 + 0.27 * t, y, sign, ha="center", va="center", fontsize=10, color=INK)
        axes.text(6.0, y, f"{float(returns[j]):+.1f}", ha="right", va="center", fontsize=9.5, color=INK)
        axes.add_patch(Rectangle((7.6, y - 0.2), 0.36 * advantage, 0.4, facecolor=colour))
        text_x = 7.6 + 0.36 * advantage + (0.1 if advantage > 0 else -0.1)
        axes.text(text_x, y, f"{advantage:+.1f}", ha="left" if advantage > 0 else "right", va="center", fontsize=8.5)
        axes.text(
            10.1,
            y,
            "●" if j in kept else "○",
            ha="center",
            va="center",
            fontsize=12,
            color=INK if j in kept else GREY,
        )
        for t in range(len(episode.turns)):
            face = colour if j in kept else "#f3f4f6"
            axes.add_patch(Rectangle((11.9 + 0.3 * t, y - 0.2), 0.26, 0.4, facecolor=face, edgecolor="white"))
    axes.plot([7.6, 7.6], [TOP - ROW * (GROUP - 1) - 0.3, TOP + 0.3], color="#9aa5b1", linewidth=0.8)
    arrow(axes, (14.4, 4.6), (14.9, 4.6))
    box = "for each token\n\n" + r"$-\min(w A,\ \mathrm{clip}(w) A)$" + "\n" + "+ kl · KL"
    axes.text(
        16.05, 4.6, box + "\n\n" + r"$w = p_\mathrm{new}\,/\,p_\mathrm{played}$",
        ha="center", va="center", fontsize=9.5, color=INK,
        bbox={"boxstyle": "round,pad=0.6", "facecolor": "#f6f8fa", "edgecolor": "#9fb0c2"},
    )  # fmt: skip
    axes.plot([16.05, 16.05, 1.35, 1.35], [2.95, 0.95, 0.95, 2.5], color=LINE, linewidth=1.2)
    arrow(axes, (1.35, 2.4), (1.35, 3.5))
    axes.text(8.7, 0.45, "the new adapter plays the next group", ha="center", fontsize=9, color="#4a5563")
    axes.set(xlim=(0, 17.6), ylim=(0, 9.9))
    axes.axis("off")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=int, default=2, help="which training start of the scenario")
    given = parser.parse_args()
    matplotlib.rcParams |= {"svg.hashsalt": "msgrpo", "font.family": "DejaVu Sans"}
    lake = get_scenario("frozen-lake")
    start_seed = next(islice(lake.starts("train"), given.start, None))
    board = lake.new(start_seed, 0).board()
    assert board is not None, "Frozen Lake has a board"
    figure = Figure(figsize=(12.4, 5.4), facecolor="white")
    draw(figure.add_axes((0, 0, 1, 1)), group_of(lake, start_seed), ["".join(row) for row in board.cells])
    figure.savefig(given.out, metadata={"Date": None} if given.out.suffix == ".svg" else None)

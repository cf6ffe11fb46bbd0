"""One self-contained HTML file: charts, tables, and an episode browser."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import islice
from statistics import fmean
from typing import Any

from msgrpo.episode import Episode, Turn
from msgrpo.evals.leaderboard import Leaderboard
from msgrpo.evals.plays import Play
from msgrpo.evals.rows import Pair, Row, return_of
from msgrpo.evals.suites import EpisodeSeeds, HeldOut, places_in_suite
from msgrpo.evals.tables import (
    ANSWERS,
    OVERALL,
    PAIR_COLUMNS,
    REPEATED,
    RETOLD,
    SCORES,
    by_scenario,
    cells,
    named,
    overall_cells,
    pair_cells,
    repeated_cells,
    retold_cells,
)
from msgrpo.game import MISTAKE
from msgrpo.text import interval_text

REPLAYS = 50  # replays of each agent and scenario, which keeps the file small
LABEL = 30  # characters of an agent's name in a chart
ROW, FOOT = 38, 20  # a chart's pixels for each agent and for the axis
SMALLEST = 1e-300  # difference of returns that has a scale of its own
MARGIN = 2.0  # per cent of its width that are free at either side

REPLAY = """<section id="replays"><h2>Replays</h2>
<noscript><p>The replays need JavaScript; charts and tables do not.</p></noscript>
<p id="kept"></p>
<form id="filters">
<label>Scenario <select id="scenario"></select></label>
<label>Agent <select id="agent"></select></label>
<label>Result <select id="result"><option value="">all</option>
<option value="won">success, or return above 0</option><option value="lost">lost</option>
<option value="invalid">with invalid answers</option><option value="mistake">with a mistake</option></select></label>
<label>Index in the suite <input id="index" type="number" min="1" placeholder="any"></label>
<label>Agents wrote <input id="text" type="search" placeholder="any text"></label>
</form>
<p id="count" role="status"></p>
<div class="scroll" id="list"><table><thead><tr><th>agent</th><th>index</th><th>start seed</th><th>steps</th>
<th>return</th><th>result</th><th>mean regret</th></tr></thead><tbody id="episodes"></tbody></table></div>
<div id="player">
<div id="controls"><span class="buttons">
<button id="first" title="first step" aria-label="first step">|◀&#xfe0e;</button>
<button id="back" title="back (←)" aria-label="back">◀&#xfe0e;</button>
<button id="play" title="play or pause (space)">play</button>
<button id="next" title="next (→)" aria-label="next">▶&#xfe0e;</button>
<button id="last" title="last step" aria-label="last step">▶&#xfe0e;|</button></span>
<input id="scrub" type="range" min="1" aria-label="step">
<span id="place"></span>
<span class="buttons"><select id="speed" aria-label="speed"><option value="0.5">0.5 steps/s</option>
<option value="1">1 step/s</option><option value="2" selected>2 steps/s</option><option value="4">4 steps/s</option>
<option value="8">8 steps/s</option></select>
<label>against <select id="against"></select></label></span></div>
<div id="panes"></div>
</div>
<template id="pane"><article><h3 class="name"></h3><pre class="state"></pre><pre class="reasoning"></pre>
<pre class="answer"></pre><p class="move"></p><p class="sums"></p><p class="end"></p></article></template>
</section>"""


def html(board: Leaderboard, plays: Sequence[Play], *, replays: int = REPLAYS) -> str:
    """The whole page, with the first `replays` episodes of each play. What agents wrote is escaped or set as text."""
    style, script = (files("msgrpo.evals").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>msgrpo leaderboard</title><style>{style}</style></head><body>"
        f"{_results(board, _prefixes(plays))}{REPLAY}"
        f'<script type="application/json" id="plays">{_json(_replays(plays, replays))}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _policy(script: str) -> str:
    """The content security policy: no network, and no script but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _json(value: Any) -> str:
    """ASCII JSON without characters that HTML could read as a tag or JavaScript as a line end."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


# ── charts and tables ──


def _results(board: Leaderboard, prefixes: Mapping[str, Sequence[str]]) -> str:
    """What stands above the replays: for each scenario its chart, its table, its pairs and its prompt."""
    scenarios = by_scenario(board)
    links = [f'<a href="#results-{i}">{escape(scenario)}</a>' for i, scenario in enumerate(scenarios)]
    parts = [
        f"<h1>msgrpo leaderboard</h1><p>Suite version {board.suite_version}. "
        "Bars are means, lines their 95 % intervals.</p>",
        f'<nav>{" ".join(links)} <a href="#replays">Replays</a></nav>',
    ]
    parts += [f'<p class="note">{escape(note)}</p>' for note in board.notes]
    if board.overall:
        parts.append(
            "<h2>Overall: the way from random to optimal</h2>" + _table(OVERALL, map(overall_cells, board.overall))
        )
    returns = return_axis(board.rows)
    for i, (scenario, (rows, pairs)) in enumerate(scenarios.items()):
        parts.append(f'<h2 id="results-{i}">{escape(scenario)}</h2>{chart(rows, returns)}')
        parts.append(_table((*SCORES, *ANSWERS), map(cells, rows)))
        repeated = [repeated_cells(row) for row in rows if row.repeats > 1]
        if repeated:
            parts.append(_table(REPEATED, repeated))
        parts.append(_pairs(pairs))
        parts += [
            f"<details><summary>The prompt's fixed part</summary><pre>{escape(prefix)}</pre></details>"
            for prefix in prefixes.get(scenario, ())
        ]
    if board.retellings:
        parts.append("<h2>In other words: retold − plain</h2>" + _table(RETOLD, map(retold_cells, board.retellings)))
    if board.made:
        sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in board.made)
        parts.append(f"<details><summary>How this came about</summary><ul>{sentences}</ul></details>")
    return "".join(parts)


def _prefixes(plays: Sequence[Play]) -> dict[str, list[str]]:
    """The prompts' fixed parts, each once: a scenario has several only where prompts were mixed."""
    prefixes_of: dict[str, dict[str, None]] = {}
    for play in plays:
        for episode in play.finished.values():
            prefixes_of.setdefault(play.scenario, {}).update(dict.fromkeys(filter(None, episode.prefix.values())))
    return {scenario: list(prefixes) for scenario, prefixes in prefixes_of.items()}


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _pairs(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return ""
    table = _table(PAIR_COLUMNS, map(pair_cells, pairs))
    return f"<details><summary>Paired differences of return</summary>{table}</details>"


@dataclass(frozen=True)
class Axis:
    """A scale from the first tick to the last, as wide as the chart whatever the screen."""

    ticks: Sequence[float]

    def x(self, value: float) -> str:
        """Where a value stands, in per cent of the chart's width."""
        low, high = self.ticks[0], self.ticks[-1]
        return f"{MARGIN + (value - low) / (high - low) * (100 - 2 * MARGIN):.2f}%"


SUCCESS = Axis((0.0, 0.25, 0.5, 0.75, 1.0))


def return_axis(rows: Iterable[Row]) -> Axis:
    """The one scale of all charts of returns: from zero, or below, to the highest end of an interval."""
    shown = [row for row in rows if row.success_rate is None]
    points = [value for row in shown for value in (row.return_low, row.return_mean, row.return_high)]
    points = [0.0, *(value for value in points if not math.isnan(value))]  # NaN: there is no interval
    return axis(min(points), max(points))


def axis(low: float, high: float) -> Axis:
    """Ticks at multiples of 1, 2 or 5 times a power of ten, three to seven of them, around both values."""
    span = high - low if high - low > SMALLEST else 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return Axis([i * step for i in range(first, max(last, first + 1) + 1)])


def chart(rows: Sequence[Row], returns: Axis) -> str:
    """Means as bars from zero with their intervals, one an agent: success where there is a goal, from 0 to 1 (with
    the exact optimum as a dot), return elsewhere. Widths are shares of the screen's; letters keep their size."""
    goal = rows[0].success_rate is not None
    scale = SUCCESS if goal else returns
    bottom = len(rows) * ROW
    marks = [_line(scale.x(tick), 0, scale.x(tick), bottom, "grid" if tick else "zero") for tick in scale.ticks]
    marks += [
        f'<text class="tick" x="{scale.x(tick)}" y="{bottom + 14}">{f"{tick:.0%}" if goal else f"{tick:g}"}</text>'
        for tick in scale.ticks
    ]
    marks += [_bar(row, scale, i * ROW) for i, row in enumerate(rows)]
    what = "Success" if goal else "Mean return"
    legend = f"{what}; the dot is the exact optimum" if any(row.optimum is not None for row in rows) else what
    return (
        f'<figure><figcaption>{legend}</figcaption><svg width="100%" height="{bottom + FOOT}" role="img" '
        f'aria-label="{what} by agent">{"".join(marks)}</svg></figure>'
    )


def _bar(row: Row, scale: Axis, top: int) -> str:
    """One agent's line of a chart: its name and its value, below them bar, interval and optimum."""
    mean, low, high = _estimate(row)
    goal = row.success_rate is not None
    form = ".1%" if goal else "+.3f"
    value = f"{mean:{form}} {interval_text(low, high, form)}"
    start, end = sorted((0.0, mean))
    width = float(scale.x(end)[:-1]) - float(scale.x(start)[:-1])
    middle = top + 27
    marks = [
        f"<title>{escape(named(row.agent, row.prompt))}: {value}</title>",
        f'<text x="{MARGIN}%" y="{top + 15}">{escape(shortened(named(row.agent, row.prompt)))}</text>',
        f'<text class="value" x="{100 - MARGIN}%" y="{top + 15}">{value}</text>',
        f'<rect class="bar" x="{scale.x(start)}" y="{top + 21}" width="{width:.2f}%" height="12"/>',
    ]
    if not math.isnan(low):
        marks.append(_line(scale.x(low), middle, scale.x(high), middle, "interval"))
        marks += [_line(scale.x(end), middle - 4, scale.x(end), middle + 4, "interval") for end in (low, high)]
    if row.optimum is not None:
        marks.append(
            f'<circle cx="{scale.x(row.optimum)}" cy="{middle}" r="4"><title>{row.optimum:.1%}</title></circle>'
        )
    return f"<g>{''.join(marks)}</g>"


def _line(x1: str, y1: int, x2: str, y2: int, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _estimate(row: Row) -> tuple[float, float, float]:
    """(mean, low, high) of what the chart shows."""
    if row.success_rate is not None and row.success_low is not None and row.success_high is not None:
        return row.success_rate, row.success_low, row.success_high
    return row.return_mean, row.return_low, row.return_high


def shortened(name: str) -> str:
    """A name without its middle, where it is long: agents differ at the beginning (the kind) and at the end."""
    if len(name) <= LABEL:
        return name
    end = LABEL * 2 // 3
    return f"{name[: LABEL - end - 1]}…{name[-end:]}"


# ── replays ──


def _replays(plays: Sequence[Play], most: int) -> list[dict[str, Any]]:
    """What the episode browser reads: for each play its first episodes, in the order of the suite."""
    shown = [(play, dict(islice(play.finished.items(), most))) for play in plays if play.finished]
    seeds: dict[str, dict[EpisodeSeeds, None]] = {}
    for play, episodes in shown:
        seeds.setdefault(play.scenario, {}).update(dict.fromkeys(episodes))
    repeats = max((play.repeats for play, _ in shown), default=1)
    split = shown[0][0].split if shown else "test"
    indices = {scenario: _indices(scenario, wanted, repeats, split) for scenario, wanted in seeds.items()}
    return [
        {
            "scenario": play.scenario,
            "agent": named(play.label, play.prompt),
            "finished": len(play.finished),
            "episodes": [
                {"index": indices[play.scenario][seeds], "line": play.lines.get(seeds)} | _replay(episode)
                for seeds, episode in episodes.items()
            ],
        }
        for play, episodes in shown
    ]


def _indices(scenario: str, wanted: Iterable[EpisodeSeeds], repeats: int, split: HeldOut) -> dict[EpisodeSeeds, int]:
    """A number for each episode, the same for every agent: its place in the suite, from 1. Those that belong to no
    suite follow the others."""
    places, foreign = places_in_suite(scenario, wanted, repeats, split)
    last = max(places.values(), default=-1) + 1
    return {seeds: place + 1 for seeds, place in places.items()} | {
        seeds: i for i, seeds in enumerate(sorted(foreign), start=last + 1)
    }


def _replay(episode: Episode) -> dict[str, Any]:
    regrets = [turn.regret for turn in episode.turns if turn.regret is not None]
    total = return_of(episode)
    return {
        "seed": str(episode.start_seed),  # it may be larger than JavaScript's numbers
        "return": total,
        "won": total > 0 if episode.success is None else episode.success,
        "success": episode.success,
        "outcome": episode.outcome,
        "invalid": sum(turn.failure is not None for turn in episode.turns),
        "mistakes": sum(regret >= MISTAKE for regret in regrets),
        "regret": fmean(regrets) if regrets else None,
        "turns": [_turn(turn) for turn in episode.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """A turn as it is shown; what it does not have is left out."""
    shown = turn.model_dump(mode="json", include={"answer", "reasoning", "action", "failure", "regret"})
    there = {name: value for name, value in shown.items() if value is not None}
    return {"state": turn.state, "reward": turn.reward} | there

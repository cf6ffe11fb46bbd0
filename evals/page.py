"""One HTML file that needs nothing else: charts, tables, and replays to step through."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from evals.leaderboard import Leaderboard
from evals.plays import Series
from evals.rows import Pair, Row, return_of
from evals.tables import ANSWERS, PAIR_COLUMNS, SCORES, by_scenario, cells, pair_cells
from msgrpo_agent.episode import Episode

REPLAYS = 5  # of each agent and scenario: the file stays small

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #4078c0; --dot: #d9480f; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; } svg text { fill: currentColor; font-size: 12px; }
#replay { display: grid; grid-template-columns: minmax(18rem, max-content) 1fr; gap: 1rem; margin-top: .6rem; }
pre { margin: 0; padding: .7rem; border: 1px solid var(--line); border-radius: 4px; white-space: pre-wrap; }
button, select { font: inherit; padding: .15rem .6rem; } .note { font-weight: 600; }
"""

SCRIPT = """
const plays = JSON.parse(document.getElementById('plays').textContent);
const $ = id => document.getElementById(id);
let turn = 0, timer = null;
const play = () => plays[$('which').value];
plays.forEach((p, i) => $('which').add(new Option(p.title, i)));
function show() {
  const t = play().turns, now = t[turn];
  $('place').textContent = `step ${turn + 1} of ${t.length}`;
  $('state').textContent = now.state;
  const total = t.slice(0, turn + 1).reduce((sum, x) => sum + x.reward, 0);
  $('said').textContent = [now.reasoning && 'reasoning: ' + now.reasoning, now.answer,
    '→ ' + now.action + '   reward ' + now.reward + ', so far ' + total].filter(x => x !== null).join('\\n\\n');
}
function go(to) { turn = Math.max(0, Math.min(play().turns.length - 1, to)); show(); }
function run() {
  if (timer) { clearInterval(timer); timer = null; } else timer = setInterval(() => {
    if (turn + 1 >= play().turns.length) run(); else go(turn + 1); }, 600);
  $('run').textContent = timer ? 'pause' : 'play';
}
$('which').onchange = () => go(0);
$('first').onclick = () => go(0); $('back').onclick = () => go(turn - 1);
$('next').onclick = () => go(turn + 1); $('last').onclick = () => go(1e9); $('run').onclick = run;
document.onkeydown = e => {
  if (e.target.tagName === 'SELECT') return;
  if (e.key === 'ArrowLeft') go(turn - 1); if (e.key === 'ArrowRight') go(turn + 1);
};
if (plays.length) show();
"""

REPLAY = """<h2>Replays</h2>
<p><select id="which" aria-label="episode"></select>
<button id="first">⏮</button> <button id="back">◀</button> <button id="run">play</button>
<button id="next">▶</button> <button id="last">⏭</button> <span id="place"></span></p>
<div id="replay"><pre id="state"></pre><pre id="said"></pre></div>"""


def html(board: Leaderboard, plays: Sequence[Series]) -> str:
    """The whole page. Everything that agents wrote is escaped or set as text."""
    parts = [
        f"<h1>msgrpo leaderboard</h1><p>Suite version {board.suite_version}. "
        "Bars are means, lines their 95 % intervals.</p>"
    ]
    parts += [f'<p class="note">{escape(note)}</p>' for note in board.notes]
    for scenario, (rows, pairs) in by_scenario(board).items():
        parts.append(f"<h2>{escape(scenario)}</h2>{chart(rows)}")
        parts.append(_table((*SCORES, *ANSWERS), map(cells, rows)))
        parts.append(_pairs(pairs))
    replays = json.dumps(_replays(plays), ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>msgrpo leaderboard</title><style>{STYLE}</style><body>{''.join(parts)}{REPLAY}"
        f'<script type="application/json" id="plays">{replays}</script><script>{SCRIPT}</script></body></html>\n'
    )


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _pairs(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return ""
    table = _table(PAIR_COLUMNS, map(pair_cells, pairs))
    return f"<details><summary>Paired differences of return</summary>{table}</details>"


def chart(rows: Sequence[Row]) -> str:
    """Means as bars from zero with their intervals, one line an agent: success where there is a goal (with the
    exact optimum as a mark), return elsewhere."""
    estimates = [_estimate(row) for row in rows]
    lows = [min(0.0, low) for _, low, _ in estimates]
    highs = [max(0.0, high, row.optimum or 0.0) for row, (_, _, high) in zip(rows, estimates, strict=True)]
    least, most = min(lows), max(highs)
    span = (most - least) or 1.0
    left, width, height = 230, 560, 26

    def x(value: float) -> float:
        return round(left + (value - least) / span * width, 1)

    marks = []
    for i, (row, (mean, least_likely, most_likely)) in enumerate(zip(rows, estimates, strict=True)):
        y = i * height + 4
        start, end = sorted((x(0), x(mean)))
        low, high, middle = x(least_likely), x(most_likely), y + 9
        marks.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(_short(row.agent))}</text>'
            f'<rect x="{start}" y="{y}" width="{round(end - start, 1)}" height="18" fill="var(--bar)" opacity=".55"/>'
            f'<line x1="{low}" x2="{high}" y1="{middle}" y2="{middle}" stroke="currentColor" stroke-width="2"/>'
            f'<text x="{left + width + 10}" y="{y + 13}">{mean:+.3f}</text>'
        )
        if row.optimum is not None:
            marks.append(f'<circle cx="{x(row.optimum)}" cy="{middle}" r="4" fill="var(--dot)"/>')
    what = "Success (dot: the exact optimum)" if rows[0].success_rate is not None else "Mean return"
    total = len(rows) * height + 8
    zero = f'<line x1="{x(0)}" x2="{x(0)}" y1="0" y2="{total}" stroke="var(--line)"/>'
    return (
        f'<p>{what}</p><svg viewBox="0 0 {left + width + 80} {total}" width="{left + width + 80}" '
        f'style="max-width:100%" role="img" aria-label="{what} by agent">{zero}{"".join(marks)}</svg>'
    )


def _estimate(row: Row) -> tuple[float, float, float]:
    """(mean, low, high) of what the chart shows."""
    if row.success_rate is not None and row.success_low is not None and row.success_high is not None:
        return row.success_rate, row.success_low, row.success_high
    return row.return_mean, row.return_low, row.return_high


def _short(name: str) -> str:
    return name if len(name) <= 34 else "…" + name[-33:]


def _replays(plays: Sequence[Series]) -> list[dict[str, Any]]:
    return [
        _replay(play, play.lines.get(seeds), episode)
        for play in plays
        for seeds, episode in list(play.finished.items())[:REPLAYS]
    ]


def _replay(play: Series, line: int | None, episode: Episode) -> dict[str, Any]:
    turns = [
        {
            "state": turn.state,
            "answer": turn.answer,
            "reasoning": turn.reasoning,
            "action": turn.action or f"no legal action ({turn.failure})",
            "reward": turn.reward,
        }
        for turn in episode.turns
    ]
    number = "" if line is None else f"episode {line} · "  # as `msgrpo replay --episode` counts
    title = f"{play.scenario} · {play.agent} · {number}return {return_of(episode):+g}"
    return {"title": title, "turns": turns}

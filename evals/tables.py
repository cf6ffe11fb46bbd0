"""The leaderboard as text: terminal, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from msgrpo.evals.leaderboard import Leaderboard
from msgrpo.evals.match import Result
from msgrpo.evals.ranking import Overall
from msgrpo.evals.rows import Pair, Retelling, Row
from msgrpo.games.retold import SIGN
from msgrpo.output import Name, beginning
from msgrpo.prompt import PromptTemplate
from msgrpo.text import counted, interval_text

SCORES = ("agent", "n", "return", "success", "of optimum", "steps")
OVERALL = ("rank", "agent", "score", "95 % interval", "scenarios")
RETOLD = ("agent", "game", "plain", "retold", "difference")
REPEATED = ("agent", "starts", "k", "pass@k", "pass^k", "spread within", "spread between")
ANSWERS = ("illegal", "unparsed", "cut off", "failures", "tokens in/out", "cost", "s/step")
MATCH = ("first", "second", "starts", "won", "drawn", "lost", "points", "95 % interval")
# The columns whose cells may go on in the next line after one of their signs.
NAMES = ("agent", "game", "a", "b", "first", "second", "tokens in/out")
PAIR_COLUMNS = ("a", "b", "n", "a − b", "95 % interval", "McNemar p", "detectable")


def cells(row: Row) -> list[str]:
    """A row as text, in the order of SCORES and ANSWERS; – for a missing value."""
    success = "–"
    if row.success_rate is not None and row.success_low is not None and row.success_high is not None:
        success = f"{row.success_rate:.1%} {interval_text(row.success_low, row.success_high, '.1%')}"
    failures = ", ".join(f"{kind} {count}" for kind, count in row.failures.items())
    if row.retries:
        failures = f"{failures or 0}, {row.retries} retried"
    if row.unfinished:
        failures += f" ({row.unfinished} without result)"
    tokens = f"{row.prompt_tokens:,}/{row.completion_tokens:,}" + (" +?" if row.usage_missing else "")
    return [
        named(row.agent, row.prompt),
        str(row.episodes) if row.asked in (None, row.episodes) else f"{row.episodes} of {row.asked}",
        f"{row.return_mean:+.3f} {interval_text(row.return_low, row.return_high)}",
        success,
        "–" if row.optimum_share is None else f"{row.optimum_share:.1%}",
        f"{row.steps_mean:.1f}" + ("" if row.regret_mean is None else f" (lost {row.regret_mean:.3f} a move)"),
        f"{row.illegal / row.turns:.1%}" if speaks(row) else "–",
        f"{row.unparsed / row.turns:.1%}" if speaks(row) else "–",
        f"{row.truncated / row.turns:.1%}" if speaks(row) else "–",
        failures or "0",
        tokens if speaks(row) else "–",
        "–" if row.cost_usd is None else f"${row.cost_usd:.4f}" + (" +?" if row.usage_missing else ""),
        f"{row.seconds_per_step:.3f}" if row.seconds_per_step is not None else "–",
    ]


def named(agent: str, prompt: str) -> str:
    """An agent, and how it was asked where that was not as usual."""
    return f"{agent} [{prompt}]" if prompt not in ("", PromptTemplate().name) else agent


def overall_cells(row: Overall) -> list[str]:
    rank = str(row.rank) if row.rank == row.last_rank else f"{row.rank}–{row.last_rank}"
    return [
        rank,
        named(row.agent, row.prompt),
        f"{row.share:.3f}",
        interval_text(row.low, row.high, ".3f"),
        str(row.scenarios),
    ]


def retold_cells(row: Retelling) -> list[str]:
    return [
        named(row.agent, row.prompt),
        f"{row.scenario}{SIGN}{row.telling}",
        f"{row.plain:.3f}",
        f"{row.score:.3f}",
        f"{row.difference:+.3f} {interval_text(row.low, row.high)}",
    ]


def repeated_cells(row: Row) -> list[str]:
    return [
        named(row.agent, row.prompt),
        str(row.episodes // row.repeats),
        str(row.repeats),
        *("–" if share is None else f"{share:.1%}" for share in (row.pass_at_k, row.pass_hat_k)),
        *("–" if spread is None else f"{spread:.3f}" for spread in (row.spread_within, row.spread_between)),
    ]


def speaks(row: Row) -> bool:
    """Whether the agent answers in words."""
    return row.seconds_per_step is not None


def pair_cells(pair: Pair) -> list[str]:
    return [
        pair.a,
        pair.b,
        str(pair.episodes),
        f"{pair.difference:+.3f}",
        interval_text(pair.low, pair.high),
        "–" if pair.mcnemar_p is None else f"{pair.mcnemar_p:.3g}",
        "–" if pair.detectable is None else f"{pair.detectable:.3f}",
    ]


def by_scenario(board: Leaderboard) -> dict[str, tuple[list[Row], list[Pair]]]:
    """Rows and pairs of each scenario, in the board's order."""
    tables: dict[str, tuple[list[Row], list[Pair]]] = {}
    for row in board.rows:
        tables.setdefault(row.scenario, ([], []))[0].append(row)
    for pair in board.pairs:
        tables[pair.scenario][1].append(pair)
    return tables


Section = tuple[str, Sequence[str], list[list[str]]]  # title, columns, lines


def sections(board: Leaderboard, *, narrow: bool = False) -> Iterator[Section]:
    """Every table of the board. With `narrow`, the columns about answers are a table of their own."""
    if board.overall:
        yield "overall: the way from random to optimal", OVERALL, list(map(overall_cells, board.overall))
    for scenario, (rows, pairs) in by_scenario(board).items():
        lines = [cells(row) for row in rows]
        if narrow:
            yield scenario, SCORES, [line[: len(SCORES)] for line in lines]
            spoken = [[line[0], *line[len(SCORES) :]] for line, row in zip(lines, rows, strict=True) if speaks(row)]
            if spoken:
                yield f"{scenario}: answers", ("agent", *ANSWERS), spoken
        else:
            yield scenario, (*SCORES, *ANSWERS), lines
        repeated = [repeated_cells(row) for row in rows if row.repeats > 1]
        if repeated:
            yield f"{scenario}: repeats", REPEATED, repeated
        if pairs:
            yield f"{scenario}: paired differences of return", PAIR_COLUMNS, list(map(pair_cells, pairs))
    if board.retellings:
        yield "in other words: retold − plain, the same episodes", RETOLD, list(map(retold_cells, board.retellings))


def markdown(board: Leaderboard) -> str:
    """All tables as Markdown, and how they were made."""
    parts = [f"Suite version {board.suite_version}; 95 % intervals."]
    for title, columns, lines in sections(board):
        parts += [f"### {_escaped(title)}", _table(columns, lines)]
    parts += [_listed(texts) for texts in (board.notes, board.made) if texts]
    return "\n\n".join(parts) + "\n"


def card(board: Leaderboard) -> str:
    """What a paper or a model card needs: the scores, what qualifies them, and how they were made."""
    parts = ["# Evaluation with msgrpo"]
    for title, columns, lines in sections(board, narrow=True):
        if not title.endswith((": answers", "differences of return")):
            parts += [f"## {_escaped(title)}", _table(columns, lines)]
    if board.notes:
        parts += ["## What to know", _listed(board.notes)]
    parts += ["## How this came about", _listed([*_boards(board.rows), *board.made])]
    return "\n\n".join(parts) + "\n"


def _boards(rows: Sequence[Row]) -> list[str]:
    """How many episodes each scenario has, and on how many boards; where agents differ in it, which have which."""
    agents: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        held = counted(row.boards, "board") if row.boards == 1 else f"{row.boards} different boards"
        played = f"{row.scenario}: {counted(row.episodes, 'episode')} on {held}"
        agents.setdefault(row.scenario, {}).setdefault(played, []).append(named(row.agent, row.prompt))
    return [
        f"{played}." if len(alike) == 1 else f"{played} ({', '.join(dict.fromkeys(names))})."
        for alike in agents.values()
        for played, names in alike.items()
    ]


def _listed(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {_escaped(sentence)}" for sentence in sentences)


def terminal(board: Leaderboard) -> Iterator[Table | Text]:
    """For each scenario the scores, what the answers were like, and the pairs; then the notes. 80 columns do."""
    yield from (table(*section) for section in sections(board, narrow=True))
    yield from (Text(f"note: {beginning(note)}") for note in board.notes)


class _Narrowing(Table):
    """A table that gives up room where the terminal is narrow: first in its widest columns, down to their longest
    word, then between columns. rich takes it from all columns alike, and breaks words where others have blanks.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ranges = [
            [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            for column in self.columns
        ]
        least, widths = ([max(one[end] for one in of) for of in ranges] for end in (0, 1))
        room = options.max_width - 2 * len(widths)  # a blank on both sides of each column
        if sum(least) > room:
            self.padding = 0
            room += len(widths) - 1
        if sum(least) <= room:
            while sum(widths) > room:
                widest = max(range(len(widths)), key=lambda i: widths[i] if widths[i] > least[i] else 0)
                widths[widest] -= 1
            for column, width in zip(self.columns, widths, strict=True):
                column.width = width
        yield from super().__rich_console__(console, options)


def table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table for the terminal."""
    shown = _Narrowing(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        shown.add_column(Name(column))
    for line in lines:
        # Text, so that what an agent is called is not read as markup
        shown.add_row(
            *(Name(cell) if column in NAMES else Text(cell) for column, cell in zip(columns, line, strict=True))
        )
    return shown


def match_table(scenario: str, results: Iterable[Result]) -> Table:
    """The results of a match, a line for each pairing."""
    lines = [
        [
            pairing.first,
            pairing.second,
            *map(str, (pairing.starts, pairing.wins, pairing.draws, pairing.losses)),
            f"{pairing.score:.3f}",
            interval_text(pairing.low, pairing.high, ".3f"),
        ]
        for pairing in results
    ]
    return table(f"{scenario}: both seats on the same starts", MATCH, lines)


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in body)


def _escaped(text: str) -> str:
    """Text as Markdown shows it, whatever it holds: no HTML, no link, no new cell and no new line."""
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\n", " ")):
        text = text.replace(sign, entity)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)


def csv_text(board: Leaderboard) -> str:
    """One line a row, every number in full."""
    failures = (" ".join(f"{kind}={count}" for kind, count in row.failures.items()) for row in board.rows)
    rows = (row.model_dump() | {"failures": said} for row, said in zip(board.rows, failures, strict=True))
    return _csv(Row, rows)


def csv_pairs(board: Leaderboard) -> str:
    """The paired differences, one line a pair."""
    return _csv(Pair, (pair.model_dump() for pair in board.pairs))


def _csv(kind: type[BaseModel], rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(kind.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_no_formula, rows))
    return out.getvalue()


def _no_formula(row: dict[str, Any]) -> dict[str, Any]:
    """A spreadsheet takes text that begins so for a formula, and runs it: a quote before it keeps it text."""
    return {
        name: f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
        for name, value in row.items()
    }

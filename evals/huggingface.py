"""A dataset folder for Hugging Face: one table for each scenario and split, and a card."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgrpo import __version__
from msgrpo.episode import Episode
from msgrpo.errors import RecordError
from msgrpo.evals import tables
from msgrpo.evals.exported import CARD, IN_SUITE, MADE_BY, OF_NO_SUITE, Files, distinct, played
from msgrpo.evals.leaderboard import Leaderboard
from msgrpo.evals.plays import Play
from msgrpo.evals.record import folder_name, seeds_of
from msgrpo.evals.rows import return_of
from msgrpo.evals.suites import SUITE_VERSION
from msgrpo.evals.verify import game_steps
from msgrpo.extras import needs
from msgrpo.text import counted

SPLITS = {
    IN_SUITE["test"]: f"the beginning of the suite, version {SUITE_VERSION}, on starts that are held out of training "
    "(a game with one start has nothing to hold out)",
    IN_SUITE["val"]: f"the beginning of the suite, version {SUITE_VERSION}, on starts that are held out of training, "
    "too, and on which settings are chosen",
    OF_NO_SUITE: "episodes of no suite: nothing says how their seeds were chosen",
}
# name -> (Arrow type, what it is). The lists of turns are COLUMNS' last column.
TURN_COLUMNS = {
    "step": ("int32", "from 0"),
    "state": ("string", "what the agent saw; with the usual prompt a language model was asked `prefix` and this"),
    "answer": ("string", "the text of a language model, whole; null for other agents"),
    "reasoning": ("string", "where the server returned it apart from the answer"),
    "action": ("string", "what was played; null where the answer held no legal action"),
    "failure": ("string", "why there is no action: `empty`, `no_tag`, `illegal`, `not_now`"),
    "reward": ("double", "of the environment"),
    "regret": ("double", "what the move lost against the best one; null where nobody judged it"),
    "finish_reason": ("string", "`stop`, `length`, `content_filter`"),
    "prompt_tokens": ("int64", "0 where nothing said it"),
    "completion_tokens": ("int64", "0 where nothing said it"),
    "latency_s": ("double", "seconds for the answer, without waits between tries"),
    "retries": ("int64", "requests that were tried again"),
    "model": ("string", "which weights answered, where the engine says so"),
}
COLUMNS = {
    "scenario": ("string", "the game and its setting"),
    "agent": ("string", "who played, as msgrpo names it"),
    "place": ("int64", "of the episode in the suite, from 1; null for seeds of no suite"),
    "suite_version": ("int32", "results of different versions do not compare; null for seeds of no suite"),
    "start_seed": ("string", "the start; seeds are text, because many readers' numbers end at 2^53"),
    "chance_seed": ("string", "the luck of the game"),
    "sampling_seed": ("string", "the agent's dice"),
    "return": ("double", "sum of the rewards; null without a result"),
    "success": ("bool", "whether the goal was reached; null without a result, or in a game without a goal"),
    "outcome": ("string", "`terminated` or `truncated` (the step limit); null without a result"),
    "error": (
        "string",
        "null for a result; else the kind of failure, the endpoint's or the game's, that ended this attempt",
    ),
    "error_message": ("string", "what failed, in words"),
    "steps": ("int32", "how many were played"),
    "prefix": ("string", "the part of the prompt that never changes: instructions, rules, actions; null without one"),
    "settings": ("string", "JSON: model, weights, sampling, hash of the prompt's template"),
    "versions": ("string", "JSON: of the packages, and the hash of the rules"),
    "turns": ("", "a list of structs, one a turn"),
}

CARD_TEXT = """---
{front}
---

# {title}

{agents} played {scenarios}: {results} with a result, and {failed} that an endpoint failed. Prompts, answers,
actions and rewards are here as they were recorded. All agents meet the same starts with the same luck, so differences
are paired by `scenario` and `place`.

A row is an attempt at an episode, with its turns inside. Rows with `error` have no result: leave them out of means.

{splits}

## Results

{board}
## Columns

{columns}

Of a turn:

{turn_columns}

## Agents

```json
{settings}
```

## How it was made

The episodes were played by `msgrpo eval`; this folder was {made_by} {version} from its records. Episodes after the
first one of the suite that has not ended are left out: short episodes end first, and what has ended so far would be a
biased sample. The versions under which the episodes were played:

```json
{versions}
```
"""


def huggingface_files(plays: Sequence[Play], board: Leaderboard) -> Files:
    """A dataset folder: data/SCENARIO/SPLIT.parquet and the card.

    A row is an episode, with its turns inside: seeds, success, return and error belong to the episode, so that a mean
    over rows is a mean over episodes. With a row a turn, long episodes would count for more.
    """
    with needs("msgrpo export", "export"):
        import pyarrow
        from pyarrow import parquet

    def fields(columns: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, Any]]:
        return ((name, pyarrow.type_for_alias(kind)) for name, (kind, _) in columns.items() if kind)

    turns = pyarrow.list_(pyarrow.struct([*fields(TURN_COLUMNS)]))
    schema = pyarrow.schema([*fields(COLUMNS), ("turns", turns)])
    by_path: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for play in plays:
        for entry in played(play):
            split = OF_NO_SUITE if entry.place is None else IN_SUITE[play.split]
            path = f"data/{folder_name(play.scenario)}/{split}.parquet"
            by_path[path] += [row(play, entry.place, episode) for episode in (*entry.failed, entry.episode)]

    def make(rows: list[dict[str, Any]], path: Path) -> None:
        try:
            table = pyarrow.Table.from_pylist(rows, schema=schema)
        except (pyarrow.ArrowInvalid, OverflowError) as error:
            fix = "the record is damaged: msgrpo verify FILE"
            raise RecordError(f"{path.name} cannot hold what was recorded: {error}", fix=fix) from error
        parquet.write_table(table, path)

    text = card(plays, board, {path: len(rows) for path, rows in by_path.items()})

    def make_card(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return {path: partial(make, rows) for path, rows in by_path.items()} | {CARD: make_card}


def row(play: Play, place: int | None, episode: Episode) -> dict[str, Any]:
    """A row of the table: an episode with a result, or an attempt that an endpoint failed."""
    ended = episode.error is None
    seeds = {f"{name}_seed": str(seed) for name, seed in seeds_of(episode)._asdict().items()}
    return seeds | {
        "scenario": play.scenario,
        "agent": play.agent,
        "place": place,
        "suite_version": None if place is None else SUITE_VERSION,
        "return": return_of(episode) if ended else None,
        "success": episode.success if ended else None,
        "outcome": str(episode.outcome) if ended else None,
        "error": episode.error,
        "error_message": episode.error_message,
        "steps": game_steps(episode),
        "prefix": next(iter(episode.prefix.values()), None),
        "settings": json.dumps(play.settings),
        "versions": json.dumps(episode.versions),
        "turns": [{name: getattr(turn, name) for name in TURN_COLUMNS} for turn in episode.turns],
    }


def card(plays: Sequence[Play], board: Leaderboard, rows: Mapping[str, int]) -> str:
    """The README of the dataset: front matter for loaders, then text. `rows` is the number of rows of each file."""
    scenarios = list(dict.fromkeys(play.scenario for play in plays))
    agents = list(dict.fromkeys(play.agent for play in plays))
    versions = distinct(entry.episode.versions for play in plays for entry in played(play))
    settings = {agent: next(play.settings for play in plays if play.agent == agent) for agent in agents}
    results = sum(len(play.finished) for play in plays)
    total = sum(rows.values())
    title = "Episodes of LLM agents in text games"
    front = {
        "pretty_name": title,
        "language": ["en"],
        "task_categories": ["text-generation", "reinforcement-learning"],
        "tags": ["msgrpo", "llm-agents", "text-games", "evaluation"],
        "size_categories": [_size(total)],
        "configs": _configs(rows),
    }
    present = {Path(path).stem for path in rows}
    return CARD_TEXT.format(
        front="\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items()),  # JSON is YAML
        title=title,
        agents=counted(len(agents), "agent"),
        scenarios=counted(len(scenarios), "text game"),
        results=counted(results, "episode"),
        failed=counted(total - results, "attempt"),
        splits="\n".join(f"- `{split}`: {what}" for split, what in SPLITS.items() if split in present),
        board=tables.markdown(board),
        columns=_columns(COLUMNS),
        turn_columns=_columns(TURN_COLUMNS),
        settings=json.dumps(settings, indent=2),
        made_by=MADE_BY,
        version=__version__,
        versions=json.dumps(versions, indent=2),
    )


def _configs(rows: Mapping[str, int]) -> list[dict[str, Any]]:
    """One configuration of everything, and one a scenario."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in rows:
        scenario, split = Path(path).parent.name, Path(path).stem
        for config in ("default", scenario):
            files[config][split].append(path)
    return [
        {"config_name": name, "data_files": [{"split": split, "path": paths} for split, paths in splits.items()]}
        for name, splits in files.items()
    ]


def _columns(columns: Mapping[str, tuple[str, str]]) -> str:
    lines = [f"| `{name}` | {kind or 'list'} | {what} |" for name, (kind, what) in columns.items()]
    return "\n".join(["| column | type | what it is |", "| --- | --- | --- |", *lines])


def _size(rows: int) -> str:
    """The Hub's name for a number of rows up to a million; records hold no more."""
    limits = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}
    return next((name for limit, name in limits.items() if rows < limit), "1M<n<10M")

"""Records of an evaluation as files that other tools read: logs of Inspect AI, and a dataset folder for Hugging Face.

Both hold what the leaderboard counts, and are refused where it refuses. Logs and rows are plain data first; Inspect's
own classes check and write the logs, pyarrow writes the tables.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import ValidationError

from evals import tables
from evals.leaderboard import Leaderboard, build
from evals.plays import Series, load
from evals.record import Price, folder_name, seeds_of
from evals.rows import return_of
from evals.suites import SUITE_VERSION, places_in_suite
from evals.verify import game_steps
from msgrpo_agent import __version__
from msgrpo_agent.agent import Sampling
from msgrpo_agent.episode import Episode, Turn
from msgrpo_agent.errors import RecordError, UsageError, nearest
from msgrpo_agent.extras import needs
from msgrpo_agent.games import recorded_scenario
from msgrpo_agent.rollout import observation_of

Files = dict[str, Callable[[Path], None]]  # a path below --out -> what writes that file
PART = ".msgrpo-export.part"  # the folder where files are written before they take their places
MADE_BY = "made by `msgrpo export`"  # a card without these words is somebody else's and is not replaced
CARD = "README.md"
IN_SUITE, OF_NO_SUITE = "test", "other"  # the dataset's splits: the suite draws its starts from the test split
SPLITS = {
    IN_SUITE: f"the beginning of the suite, version {SUITE_VERSION}, on starts that are held out of training (a game "
    "with one start has nothing to hold out)",
    OF_NO_SUITE: "episodes of no suite: nothing says how their seeds were chosen",
}
STOP_REASONS = {"stop": "stop", "length": "max_tokens", "content_filter": "content_filter"}
ALONE = "Every turn was asked alone: the model saw that one user message and nothing before it."
WORDLESS = "This agent answers in no words: the text of an assistant message is the action that it chose."

# name -> (Arrow type, what it is). The lists of turns are COLUMNS' last column.
TURN_COLUMNS = {
    "step": ("int32", "from 0"),
    "state": ("string", "what the agent saw; a language model was asked `prefix` and this, and nothing else"),
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
    "error": ("string", "null for a result; else the kind of failure at which the endpoint ended this attempt"),
    "error_message": ("string", "the endpoint's words"),
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


@dataclass(frozen=True)
class Played:
    """An episode that the leaderboard knows of: its result, or the attempt that failed last, and other failures."""

    place: int | None  # in the suite, from 1; None for seeds of no suite
    episode: Episode
    failed: list[Episode]  # the other attempts, which an endpoint failed

    @property
    def id(self) -> int | str:
        """The place in the suite; without one the seeds."""
        return self.place or "-".join(map(str, seeds_of(self.episode)))


@dataclass(frozen=True)
class Exported:
    """What was written, and of how many episodes."""

    files: int
    results: int
    errors: int  # episodes without a result: the endpoint failed
    failed: int  # further attempts that the endpoint failed
    left_out: int  # episodes after the first one of the suite that has not ended
    notes: list[str]

    @property
    def told(self) -> str:
        """How many of each, in a sentence."""
        files, results = _counted(self.files, "file"), _counted(self.results, "episode")
        said = f"{files}: {results} with a result, {self.errors} with an error instead"
        if self.failed:
            said += f", {self.failed} more attempts that an endpoint failed"
        if self.left_out:
            said += f"; left out: {self.left_out}, because earlier ones of the suite have not ended"
        return said


def export(folders: Sequence[Path], to: str, out: Path) -> Exported:
    """Write the records below `folders` as files for the tool `to`, each whole or not at all; upload nothing.

    Raises RecordError for what the leaderboard refuses, and UsageError where `out` holds anything that this export
    would not replace.
    """
    if to not in TOOLS:
        raise UsageError(f"nothing is exported to {to!r}", fix=nearest(to, TOOLS))
    try:
        loaded, notes = load(folders)
    except RecordError as error:  # an export has no --mix
        raise RecordError(error.message, fix=error.fix and error.fix.replace(", or say --mix", "")) from error
    board = build(loaded, notes)
    plays = [play for play in loaded if play.finished or play.unfinished]
    if not plays:
        raise RecordError("there is nothing to export: " + ("; ".join(board.notes) or "the records are empty"))
    files = TOOLS[to](plays, board)
    check_free(out, files)
    write(files, out)
    all_played = [one for play in plays for one in played(play)]
    errors = sum(one.episode.error is not None for one in all_played)
    return Exported(
        files=len(files),
        results=len(all_played) - errors,
        errors=errors,
        failed=sum(len(one.failed) for one in all_played),
        left_out=sum(map(left_out, loaded)),
        notes=board.notes,
    )


def played(play: Series) -> list[Played]:
    """The episodes of the complete beginning of the suite, in its order, and then those of no suite."""
    failed = defaultdict(list)
    for episode in play.failed:
        failed[seeds_of(episode)].append(episode)
    wanted = {*play.finished, *play.unfinished}
    places, _ = places_in_suite(play.scenario, wanted, play.repeats)
    found = []
    for seeds in sorted(wanted, key=lambda seeds: (places.get(seeds, math.inf), seeds)):
        tries = [*failed[seeds], *([play.finished[seeds]] if seeds in play.finished else [])]
        place = places[seeds] + 1 if seeds in places else None
        found.append(Played(place, tries[-1], tries[:-1]))
    return found


def left_out(play: Series) -> int:
    """How many episodes have ended, with or without a result, and do not count."""
    ended = {*play.left_out, *map(seeds_of, play.failed)}
    return len(ended - {*play.finished, *play.unfinished})


# ── files ──


def check_free(out: Path, files: Iterable[str]) -> None:
    """Raise UsageError where `out` is no folder, or holds a file that an export of the same records did not write."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", fix="give another --out: a folder")
    names = set(files)
    try:
        held = (path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir())
        other = next((name for name in held if name not in names and not name.startswith(f"{PART}/")), None)
        if CARD in names and (out / CARD).is_file() and MADE_BY not in (out / CARD).read_text(errors="replace"):
            other = CARD
    except OSError as error:
        raise RecordError(f"{out} cannot be read: {error.strerror}", fix="give another --out") from error
    if other is not None:
        fix = "give another --out; if that is an older export, remove it first"
        raise UsageError(f"{out} holds something else: {other}", fix=fix)


def write(files: Files, out: Path) -> None:
    """Write every file beside its place, and move them there once all are whole."""
    part = out / PART
    try:
        shutil.rmtree(part, ignore_errors=True)  # of an export that was killed
        part.mkdir(parents=True)
        try:
            for name, make in files.items():
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                make(part / name)
            for name in files:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (part / name).replace(out / name)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):  # it holds files, as it should
                out.rmdir()
    except OSError as error:
        raise RecordError(f"{out} cannot be written: {error.strerror or error}", fix="give another --out") from error


# ── Inspect AI ──


def inspect_files(plays: Sequence[Series], board: Leaderboard) -> Files:
    """A log in Inspect's own format for each agent in each scenario: AGENT/SCENARIO.eval."""
    with needs("msgrpo export", "export"):
        from inspect_ai.log import EvalLog, write_eval_log

    def make(play: Series, path: Path) -> None:
        log = EvalLog.model_validate(inspect_log(play, board.notes, datetime.now(UTC)))
        write_eval_log(log, path, format="eval")

    return {f"{folder_name(p.agent)}/{folder_name(p.scenario)}.eval": partial(make, p) for p in plays}


def inspect_log(play: Series, notes: Sequence[str], created: datetime) -> dict[str, Any]:
    """The fields of an EvalLog: one agent is the model, the scenario the task, an episode a sample."""
    episodes = played(play)
    results = [one.episode for one in episodes if one.episode.error is None]
    ended = len(episodes)
    total = max(ended, play.asked or 0)
    everything = [*play.finished.values(), *play.left_out.values(), *play.failed]
    arguments = {name: value for name, value in play.settings.items() if name != "sampling"}
    in_suite = all(one.place is not None for one in episodes)
    scores = metrics(results, recorded_scenario(play.scenario).goal)
    return {
        "status": "error" if not results else "cancelled" if ended < total else "success",
        "error": None if results else _error(episodes[-1].episode),
        "eval": {
            "eval_id": _name("eval", play, ended),
            "run_id": _name("run", play, ended),
            "task_id": _name("task", play),
            "created": created.isoformat(),
            "task": play.scenario,
            "task_version": SUITE_VERSION if in_suite else "seeds of no suite",
            "dataset": {
                "name": play.scenario,
                "samples": total,
                "sample_ids": [one.id for one in episodes],
                "shuffled": False,
            },
            "model": play.agent,
            "model_generate_config": _generate_config(play.settings),
            "model_args": arguments,
            "config": {"epochs": 1, "fail_on_error": False},
            "packages": {"msgrpo": __version__},
            "scorers": [
                {"name": one["name"], "metrics": [{"name": f"inspect_ai/{metric}"} for metric in one["metrics"]]}
                for one in scores
            ],
            "metadata": {
                "made_by": f"msgrpo export, version {__version__}",
                "created": "the time of the export: records hold none",
                "suite_version": SUITE_VERSION if in_suite else None,
                "split": IN_SUITE if in_suite else None,
                "messages": ALONE if speaks(play) else WORDLESS,
                "settings": play.settings,
                "versions": _distinct(one.episode.versions for one in episodes),
                "left_out": left_out(play),
                "notes": [*notes],
            },
        },
        "results": {"total_samples": total, "completed_samples": len(results), "scores": scores},
        "stats": {"model_usage": _model_usage(play, [turn for e in everything for turn in e.turns])},
        "samples": [sample(play, one) for one in episodes],
    }


def sample(play: Series, one: Played) -> dict[str, Any]:
    """The fields of an EvalSample. Seeds are text, because a browser shows them, and its numbers end at 2^53."""
    episode, turns = one.episode, one.episode.turns
    seeds = seeds_of(episode)
    messages = [message for turn in turns for message in turn_messages(episode, turn)]
    found: dict[str, Any] = {
        "id": one.id,
        "epoch": 1,
        "uuid": _name("sample", play, *seeds),
        "input": messages[0]["content"] if messages else first_prompt(episode),
        "target": "success" if recorded_scenario(episode.scenario).goal else "",
        "messages": messages,
        "working_time": sum(turn.latency_s for turn in turns) if speaks(play) else None,
        "model_usage": _model_usage(play, turns),
        "metadata": {
            "place": one.place,
            "seeds": {name: str(seed) for name, seed in seeds._asdict().items()},
            "actions": [turn.action for turn in turns],
            "rewards": [turn.reward for turn in turns],
            "regrets": [turn.regret for turn in turns],
            "failures": [turn.failure for turn in turns],
        },
        "error": _error(episode),
        "error_retries": [_error(attempt) for attempt in one.failed] or None,
    }
    if turns:
        found["output"] = {
            "model": turns[-1].model or play.agent,
            "choices": [
                {"message": messages[-1], "stop_reason": STOP_REASONS.get(str(turns[-1].finish_reason), "unknown")}
            ],
        }
    if episode.error is None:
        found["scores"] = sample_scores(episode)
    return found


def sample_scores(episode: Episode) -> dict[str, Any]:
    """The return and, where there is a goal, the success of an episode that has a result."""
    said = f"{episode.outcome} after {_counted(game_steps(episode), 'step')}"
    scores: dict[str, Any] = {}
    if episode.success is not None:
        answer = "success" if episode.success else "no success"
        scores["success"] = {"value": int(episode.success), "answer": answer, "explanation": said}
    return scores | {"return": {"value": return_of(episode), "explanation": said}}


def metrics(results: Sequence[Episode], goal: bool) -> list[dict[str, Any]]:
    """The mean of each score over the episodes with a result, and its standard error as Inspect computes it."""
    values = {"success": [float(bool(e.success)) for e in results]} if goal else {}
    values["return"] = [return_of(e) for e in results]
    found = []
    for name, numbers in values.items():
        error = stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0
        computed = {"mean": fmean(numbers), "stderr": error} if numbers else {}
        listed = {metric: {"name": metric, "value": value} for metric, value in computed.items()}
        found.append({"name": name, "scorer": name, "scored_samples": len(numbers), "metrics": listed})
    return found


def turn_messages(episode: Episode, turn: Turn) -> list[dict[str, Any]]:
    """What was asked and what was answered. The text of who answers in no words is the action."""
    spoken = turn.answer is not None
    content: list[dict[str, str]] = [{"type": "text", "text": (turn.answer if spoken else turn.action) or ""}]
    if turn.reasoning is not None:
        content.insert(0, {"type": "reasoning", "reasoning": turn.reasoning})
    told = {
        "step": turn.step,
        "action": turn.action,
        "failure": turn.failure,
        "reward": turn.reward,
        "regret": turn.regret,
        "answered_in_words": spoken,
        "latency_s": turn.latency_s,
        "retries": turn.retries,
        "finish_reason": turn.finish_reason,
    }
    asked = {"role": "user", "content": episode.prefix.get(turn.player, "") + turn.state, "source": "input"}
    answered = {
        "role": "assistant",
        "content": content,
        "source": "generate" if spoken else None,
        "model": turn.model,
        "metadata": told,
    }
    named = _hash(episode.agents, episode.scenario, *seeds_of(episode), turn.step)
    return [asked | {"id": f"{named}-asked"}, answered | {"id": f"{named}-answered"}]


def first_prompt(episode: Episode) -> str:
    """What an episode without turns was asked first: its endpoint failed before any answer."""
    game = recorded_scenario(episode.scenario).new(episode.start_seed, episode.chance_seed)
    (player,) = episode.agents
    return episode.prefix.get(player, "") + observation_of(game, player)


def speaks(play: Series) -> bool:
    """Whether the agent is asked in words: only then its settings name a prompt's template."""
    return "template" in play.settings


def _error(episode: Episode) -> dict[str, str] | None:
    """The fields of an EvalError: an endpoint's failure has words and no traceback."""
    if episode.error is None:
        return None
    message = f"{episode.error}: {episode.error_message or 'the endpoint gave no answer'}"
    return {"message": message, "traceback": "", "traceback_ansi": ""}


def _model_usage(play: Series, turns: Sequence[Turn]) -> dict[str, Any]:
    """Tokens by model, and US$ where the evaluation was told a price; nothing where no answer was asked for."""
    if not any(turn.answer is not None for turn in turns):
        return {}
    read, written = sum(turn.prompt_tokens for turn in turns), sum(turn.completion_tokens for turn in turns)
    used = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    return {play.agent: used | _cost(play.price, read, written)}


def _cost(price: Price | None, read: int, written: int) -> dict[str, float]:
    return {} if price is None else {"total_cost": (read * price.prompt + written * price.completion) / 1e6}


def _generate_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings; none where an extra body may have changed them, which the log's `model_args` hold."""
    try:
        return {} if "body" in settings else Sampling.model_validate(settings.get("sampling")).model_dump()
    except ValidationError:  # none, or those of another program
        return {}


def _name(kind: str, play: Series, *parts: object) -> str:
    """An id that the same records get again."""
    return _hash(kind, play.agent, play.scenario, sorted(play.settings.items()), *parts)


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:22]


# ── Hugging Face ──


def huggingface_files(plays: Sequence[Series], board: Leaderboard) -> Files:
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
        for one in played(play):
            split = OF_NO_SUITE if one.place is None else IN_SUITE
            path = f"data/{folder_name(play.scenario)}/{split}.parquet"
            by_path[path] += [row(play, one.place, episode) for episode in (*one.failed, one.episode)]

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


def row(play: Series, place: int | None, episode: Episode) -> dict[str, Any]:
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


def card(plays: Sequence[Series], board: Leaderboard, rows: Mapping[str, int]) -> str:
    """The README of the dataset: what a loader reads, and then what a person does. `rows` is how many a file has."""
    scenarios = list(dict.fromkeys(play.scenario for play in plays))
    agents = list(dict.fromkeys(play.agent for play in plays))
    versions = _distinct(one.episode.versions for play in plays for one in played(play))
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
    held = {Path(path).stem for path in rows}
    return CARD_TEXT.format(
        front="\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items()),  # JSON is YAML
        title=title,
        agents=_counted(len(agents), "agent"),
        scenarios=_counted(len(scenarios), "text game"),
        results=_counted(results, "episode"),
        failed=_counted(total - results, "attempt"),
        splits="\n".join(f"- `{split}`: {what}" for split, what in SPLITS.items() if split in held),
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


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _distinct(versions: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Each set of versions once, in the order in which they come."""
    return [dict(pairs) for pairs in dict.fromkeys(tuple(one.items()) for one in versions)]


TOOLS: dict[str, Callable[[Sequence[Series], Leaderboard], Files]] = {
    "inspect": inspect_files,
    "huggingface": huggingface_files,
}

"""Logs of Inspect AI, one for each agent and scenario; an episode is a sample. Inspect's own classes write them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from msgrpo import __version__
from msgrpo.agent import recorded_sampling
from msgrpo.episode import Episode, Turn, observation_of
from msgrpo.evals.exported import IN_SUITE, Files, Played, distinct, left_out, played, prompt_of
from msgrpo.evals.leaderboard import Leaderboard
from msgrpo.evals.plays import Play
from msgrpo.evals.record import Price, failure_of, folder_name, seeds_of
from msgrpo.evals.rows import return_of
from msgrpo.evals.suites import SUITE_VERSION
from msgrpo.evals.verify import game_steps
from msgrpo.extras import needs
from msgrpo.games import recorded_scenario
from msgrpo.limits import games_code, passing_faults
from msgrpo.text import counted

STOP_REASONS = {"stop": "stop", "length": "max_tokens", "content_filter": "content_filter"}
ALONE = (
    "Every turn was asked alone: the model saw what stands in the user message (and the system message before it)."
)
WORDLESS = "This agent answers in no words: the text of an assistant message is the action that it chose."


def inspect_files(plays: Sequence[Play], board: Leaderboard) -> Files:
    """A log in Inspect's own format for each agent in each scenario: AGENT/SCENARIO.eval."""
    with needs("msgrpo export", "export"):
        from inspect_ai.log import EvalLog, write_eval_log

    def make(play: Play, path: Path) -> None:
        log = EvalLog.model_validate(inspect_log(play, board.notes, datetime.now(UTC)))
        write_eval_log(log, path, format="eval")

    return {f"{folder_name(p.agent)}/{folder_name(p.scenario)}.eval": partial(make, p) for p in plays}


def inspect_log(play: Play, notes: Sequence[str], created: datetime) -> dict[str, Any]:
    """The fields of an EvalLog: one agent is the model, the scenario the task, an episode a sample."""
    episodes = played(play)
    results = [entry.episode for entry in episodes if entry.episode.error is None]
    ended = len(episodes)
    total = max(ended, play.asked or 0)
    everything = [*play.finished.values(), *play.left_out.values(), *play.failed]
    arguments = {name: value for name, value in play.settings.items() if name != "sampling"}
    in_suite = all(entry.place is not None for entry in episodes)
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
                "sample_ids": [entry.id for entry in episodes],
                "shuffled": False,
            },
            "model": play.agent,
            "model_generate_config": _generate_config(play.settings),
            "model_args": arguments,
            "config": {"epochs": 1, "fail_on_error": False},
            "packages": {"msgrpo": __version__},
            "scorers": [
                {"name": score["name"], "metrics": [{"name": f"inspect_ai/{metric}"} for metric in score["metrics"]]}
                for score in scores
            ],
            "metadata": {
                "made_by": f"msgrpo export, version {__version__}",
                "created": "the time of the export: records hold none",
                "suite_version": SUITE_VERSION if in_suite else None,
                "split": IN_SUITE[play.split] if in_suite else None,
                "messages": ALONE if speaks(play) else WORDLESS,
                "settings": play.settings,
                "versions": distinct(entry.episode.versions for entry in episodes),
                "left_out": left_out(play),
                "notes": [*notes],
            },
        },
        "results": {"total_samples": total, "completed_samples": len(results), "scores": scores},
        "stats": {"model_usage": _model_usage(play, [turn for e in everything for turn in e.turns])},
        "samples": [sample(play, entry) for entry in episodes],
    }


def sample(play: Play, entry: Played) -> dict[str, Any]:
    """The fields of an EvalSample. Seeds are text, because a browser shows them, and its numbers end at 2^53."""
    episode, turns = entry.episode, entry.episode.turns
    seeds = seeds_of(episode)
    messages = [message for turn in turns for message in turn_messages(episode, turn)]
    log: dict[str, Any] = {
        "id": entry.id,
        "epoch": 1,
        "uuid": _name("sample", play, *seeds),
        "input": messages[0]["content"] if messages else first_prompt(episode),
        "target": "success" if recorded_scenario(episode.scenario).goal else "",
        "messages": messages,
        "working_time": sum(turn.latency_s for turn in turns) if speaks(play) else None,
        "model_usage": _model_usage(play, turns),
        "metadata": {
            "place": entry.place,
            "seeds": {name: str(seed) for name, seed in seeds._asdict().items()},
            "actions": [turn.action for turn in turns],
            "rewards": [turn.reward for turn in turns],
            "regrets": [turn.regret for turn in turns],
            "failures": [turn.failure for turn in turns],
        },
        "error": _error(episode),
        "error_retries": [_error(attempt) for attempt in entry.failed] or None,
    }
    if turns:
        log["output"] = {
            "model": turns[-1].model or play.agent,
            "choices": [
                {"message": messages[-1], "stop_reason": STOP_REASONS.get(str(turns[-1].finish_reason), "unknown")}
            ],
        }
    if episode.error is None:
        log["scores"] = sample_scores(episode)
    return log


def sample_scores(episode: Episode) -> dict[str, Any]:
    """The return and, where there is a goal, the success of an episode that has a result."""
    explanation = f"{episode.outcome} after {counted(game_steps(episode), 'step')}"
    scores: dict[str, Any] = {}
    if episode.success is not None:
        answer = "success" if episode.success else "no success"
        scores["success"] = {"value": int(episode.success), "answer": answer, "explanation": explanation}
    return scores | {"return": {"value": return_of(episode), "explanation": explanation}}


def metrics(results: Sequence[Episode], goal: bool) -> list[dict[str, Any]]:
    """The mean of each score over the episodes with a result, and its standard error as Inspect computes it."""
    values = {"success": [float(bool(e.success)) for e in results]} if goal else {}
    values["return"] = [return_of(e) for e in results]
    summaries = []
    for name, numbers in values.items():
        error = stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0
        computed = {"mean": fmean(numbers), "stderr": error} if numbers else {}
        listed = {metric: {"name": metric, "value": value} for metric, value in computed.items()}
        summaries.append({"name": name, "scorer": name, "scored_samples": len(numbers), "metrics": listed})
    return summaries


def turn_messages(episode: Episode, turn: Turn) -> list[dict[str, Any]]:
    """The messages of a turn: prompt and answer. For agents that answer without text it is the action."""
    spoken = turn.answer is not None
    content: list[dict[str, str]] = [{"type": "text", "text": (turn.answer if spoken else turn.action) or ""}]
    if turn.reasoning is not None:
        content.insert(0, {"type": "reasoning", "reasoning": turn.reasoning})
    metadata = {
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
    asked = [message | {"source": "input"} for message in prompt_of(episode, turn).messages]
    answered = {
        "role": "assistant",
        "content": content,
        "source": "generate" if spoken else None,
        "model": turn.model,
        "metadata": metadata,
    }
    named = _hash(episode.agents, episode.scenario, *seeds_of(episode), turn.step)
    return [
        *(message | {"id": f"{named}-asked-{message['role']}"} for message in asked),
        answered | {"id": f"{named}-answered"},
    ]


def first_prompt(episode: Episode) -> str:
    """The first prompt of an episode without turns, whose endpoint or game failed before any answer."""
    (player,) = episode.agents
    seen = ""
    with passing_faults():
        game = recorded_scenario(episode.scenario).new(episode.start_seed, episode.chance_seed)
        with games_code(episode.scenario):
            seen = observation_of(game, player)
    return episode.prefix.get(player, "") + seen


def speaks(play: Play) -> bool:
    """Whether the agent reads a prompt: only then its settings name a template."""
    return "template" in play.settings


def _error(episode: Episode) -> dict[str, str] | None:
    """The fields of an EvalError: an endpoint's failure has a message and no traceback."""
    if episode.error is None:
        return None
    return {"message": failure_of(episode), "traceback": "", "traceback_ansi": ""}


def _model_usage(play: Play, turns: Sequence[Turn]) -> dict[str, Any]:
    """Tokens by model, and US$ where the price is known; empty where no answer was asked for."""
    if not any(turn.answer is not None for turn in turns):
        return {}
    read, written = sum(turn.prompt_tokens for turn in turns), sum(turn.completion_tokens for turn in turns)
    used = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    return {play.agent: used | _cost(play.price, read, written)}


def _cost(price: Price | None, read: int, written: int) -> dict[str, float]:
    return {} if price is None else {"total_cost": price.of(read, written)}


def _generate_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings; none where an extra body may have changed them, which the log's `model_args` hold."""
    sampling = None if "body" in settings else recorded_sampling(settings)
    return {} if sampling is None else sampling.model_dump()


def _name(kind: str, play: Play, *parts: object) -> str:
    """An id that the same records get again."""
    return _hash(kind, play.agent, play.scenario, sorted(play.settings.items()), *parts)


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:22]

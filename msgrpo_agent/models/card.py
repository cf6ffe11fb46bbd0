"""The model card of a run: its base, its settings, and what it reached, from the run's own files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from msgrpo.files import read_regular
from msgrpo.models.lora import base_of
from msgrpo.models.paths import NANO, NANO_DIR
from msgrpo.prompt import PromptTemplate
from msgrpo.run_log import CONFIG, SUMMARY
from msgrpo.text import as_json, counted, interval_text, printable

# Settings that say where and how fast it was computed (`engine` is what backend was called at first), or that stand
# elsewhere in the card. All others are shown: also those of another version, and those that come.
UNSHOWN = (
    "backend", "base", "checkpoint_every", "dtype", "engine", "evaluation", "micro_batch", "prompt", "rollouts",
    "shard", "trainers",
)  # fmt: skip
# An address; or a path with two slashes or more, of which the last part is shown.
PATH = re.compile(r"https?://[^\s|,]+|(?<![^\s|,:=(@'\"])[^\s/|,:=(@'\"]*(?:/[^\s/|,]+)+/(?P<last>[^\s/|,]+)")
MOST = 1000  # characters of a name or a setting
LONGEST = 10_000  # characters of a prompt's text


def card(run: Path, name: str, *, merged: bool) -> str:
    """README.md with the head that the hub reads."""
    base = shown_base(base_of(run))
    settings, summary = _object(run / CONFIG), _object(run / SUMMARY)
    head = {"library_name": "transformers" if merged else "peft", "pipeline_tag": "text-generation"}
    if "/" in base:
        head["base_model"] = base
    lines = [
        "---",
        *(f"{key}: {as_json(value)}" for key, value in head.items()),
        "tags: [msgrpo, reinforcement-learning, text-games]",
        "---",
        "",
        f"# {_cell(name)}",
        "",
        f"`{_cell(base)}`, post-trained with MS-GRPO on the text game `{_cell(settings.get('scenario'))}` by msgrpo"
        f"{'; the adapter is merged into the weights' if merged else ' (a LoRA adapter)'}.",
        *(
            ("", "nano is a model of about a million parameters that knows a few games and nothing else.")
            if base == NANO
            else ()
        ),
        "",
        "## What it reached",
        "",
        *_results(summary),
        "",
        "## How it was trained",
        "",
        "| setting | value |",
        "|---|---|",
        *(
            f"| {_cell(key)} | {_cell(value)} |"
            for key, value in settings.items()
            if key not in UNSHOWN and value not in (None, {})
        ),
        "",
        *_asked(settings),
    ]
    return "\n".join(lines)


def shown_base(base: str) -> str:
    """A hub's name as it is; of a folder or file of this machine the last part."""
    if Path(base) == NANO_DIR or base == NANO:
        return NANO
    return base if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists() else Path(base).name


def shown_setting(text: str) -> str:
    """A setting as anybody may read it: of a path of this machine the last part, an address as it is."""
    return PATH.sub(lambda found: found["last"] or found[0], text)


def _results(summary: dict[str, Any]) -> list[str]:
    score = summary.get("score")
    before, after, change = (_part(summary, key) for key in ("before", "after", "change"))
    if not (isinstance(score, str) and before and after and change):
        return ["The run has not ended: there is no evaluation of its last weights."]
    rows = [
        f"| {when} | {_number(part.get(score))} | "
        f"{interval_text(part.get(f'{score}_low'), part.get(f'{score}_high'), '.3f')} |"
        for when, part in (("before training", before), (_after(summary.get("steps")), after))
    ]
    evaluated = summary.get("evaluated_on", summary.get("scenario"))
    of = f" of `{_cell(evaluated)}`" if evaluated != summary.get("scenario") else ""
    return [
        f"On {summary.get('episodes')} validation starts{of}, which no update played, sampled as in training:",
        "",
        f"| | {_cell(score)} | 95 % interval |",
        "|---|---|---|",
        *rows,
        "",
        f"Change: {_number(change.get('mean'), '+.3f')} {interval_text(change.get('low'), change.get('high'))}, "
        f"paired over the starts; one training run (seed {_cell(summary.get('seed'))}), others may end elsewhere.",
    ]


def _asked(settings: dict[str, Any]) -> list[str]:
    """The prompt of its training: asked in another way, the model may answer worse."""
    try:
        prompt = PromptTemplate.model_validate(settings["prompt"])
    except (KeyError, ValidationError):
        return []
    parts = [("The system message:", prompt.system)] if prompt.system else []
    where = "the state stands at {state}" if "{state}" in prompt.instructions else "the state comes last"
    parts.append((f"{{rules}}, {{actions}} and {{example}} are the scenario's; {where}:", prompt.instructions))
    parts += [
        (f"Example {n}, before the state and introduced like it:", f"{one.state}\n{one.answer}")
        for n, one in enumerate(prompt.examples, 1)
    ]
    shown = [line for about, text in parts for line in (about, "", *_block(text), "")]
    history = [f"Before the state: the last {counted(prompt.history, 'turn')}.", ""] if prompt.history else []
    return ["## How it was asked", "", *shown, *history]


def _block(text: str) -> list[str]:
    """Text from a file as a block in which nothing is markup."""
    lines = [f"    {printable(line)}" for line in text[:LONGEST].splitlines()]
    return lines if len(text) <= LONGEST else [*lines, "", f"Cut here: {LONGEST:,} of {len(text):,} characters."]


def _after(steps: Any) -> str:
    return f"after {counted(steps, 'update') if isinstance(steps, int) else 'all updates'}"


def _part(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _number(value: Any, form: str = ".3f") -> str:
    return format(value, form) if isinstance(value, (int, float)) else "unknown"


def _object(file: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is none."""
    try:
        data = from_json(read_regular(file))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _cell(value: Any) -> str:
    """Text from a file as a table's cell: one line, no markup of its own, nothing of this machine's paths."""
    text = printable(value if isinstance(value, str) else as_json(value))
    text = shown_setting(text if len(text) <= MOST else f"{text[:MOST]}…")
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;").replace("`", "'")

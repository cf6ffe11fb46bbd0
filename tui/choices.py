"""Which agents can be chosen here, and what those that cannot would need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from msgrpo_agent.errors import MissingExtraError

RUNS = Path("runs")


@dataclass(frozen=True)
class Choice:
    """`missing` says what a person must do before this agent can play; None where it can play now."""

    spec: str
    title: str
    missing: str | None = None


def missing_extra(spec: str) -> str | None:
    """How to get what `spec` needs; None where everything is installed. Looks without importing anything."""
    kind = spec.partition(":")[0]
    needs = {"nano": ("train", ("torch", "transformers")), "adapter": ("train", ("torch", "transformers", "peft"))}
    needs["dqn"] = ("dqn", ("stable_baselines3",))
    extra, packages = needs.get(kind, ("", ()))
    if all(find_spec(package) is not None for package in packages):
        return None
    return str(MissingExtraError(f"the agent {spec!r}", extra).fix)


def trained_on(folder: Path) -> str:
    """The scenario of a run, from its summary; empty where there is none that can be read."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(summary.get("scenario", "")) if isinstance(summary, dict) else ""


def agent_choices(runs: Path = RUNS) -> list[Choice]:
    """nano, the trained runs (newest first), the references."""
    found = sorted(runs.glob("*/adapter_config.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    choices = [Choice("nano", "nano (embedded)", missing_extra("nano"))]
    for config in found:
        folder, spec = config.parent, f"adapter:{config.parent}"
        about = trained_on(folder)
        title = f"{folder.name} ({about or 'trained'})"
        choices.append(Choice(spec, title, missing_extra(spec)))
    choices.append(Choice("optimal", "optimal"))
    choices.append(Choice("random", "random"))
    return choices

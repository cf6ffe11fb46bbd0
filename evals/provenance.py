"""How a table was made, in sentences: what is needed to repeat it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgrpo.evals.plays import Play
from msgrpo.evals.suites import SUITE_VERSION

ABOUT_GAMES = ("rules",)  # versions that are a scenario's, not a package's


def made(plays: Sequence[Play]) -> list[str]:
    """The sentences, from what the records say themselves."""
    return list(_sentences([play for play in plays if play.finished]))


def _sentences(plays: Sequence[Play]) -> Iterator[str]:
    scenarios = list(dict.fromkeys(play.scenario for play in plays))
    splits = " and ".join(sorted({play.split for play in plays})) or "test"
    yield f"Suite version {SUITE_VERSION}, {splits} split: {', '.join(scenarios)}."
    agents: dict[tuple[str, str], list[Play]] = defaultdict(list)
    for play in plays:
        agents[play.label, str(play.settings)].append(play)
    for (label, _), same in agents.items():
        parts = list(_circumstances(same))
        if parts:
            yield f"{label}: {'; '.join(parts)}."
    versions = sorted(
        {
            f"{package} {version}"
            for play in plays
            for episode in play.finished.values()
            for package, version in episode.versions.items()
            if package not in ABOUT_GAMES
        }
    )
    if versions:
        yield f"Versions: {', '.join(versions)}."
    commands = {(started.at, started.line) for play in plays for run in play.runs for started in run.commands}
    for at, line in sorted(commands):
        yield f"{at}: {line}"


def _circumstances(same: Sequence[Play]) -> Iterator[str]:
    """Yield what served the agent and how it was asked, over all scenarios."""
    play = same[0]
    settings = play.settings
    if play.label != play.agent:
        yield play.agent
    if "template" in settings:
        yield f"prompt {play.prompt} ({settings['template']})"
    if isinstance(settings.get("sampling"), dict):
        yield ", ".join(f"{name} {value}" for name, value in settings["sampling"].items())
    if settings.get("weights"):
        yield f"weights {settings['weights']}"
    for name in ("body", "chat"):
        if settings.get(name):
            yield f"{name} {settings[name]}"
    served = sorted({turn.model for record in same for turn in record.turns if turn.model})
    if served:
        yield f"answered by {', '.join(served)}"

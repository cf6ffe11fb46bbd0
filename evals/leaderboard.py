"""Build the leaderboard from plays: rows, pairs, and notes on what limits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from pydantic import BaseModel

from msgrpo.errors import RecordError, check_given
from msgrpo.evals.plays import SOUND_FROM, Play
from msgrpo.evals.provenance import made
from msgrpo.evals.ranking import Overall, ranking
from msgrpo.evals.record import failure_of
from msgrpo.evals.rows import Pair, Retelling, Row, failures, pair_of, retellings, row_of
from msgrpo.evals.suites import CONCURRENCY, SUITE_VERSION
from msgrpo.games import recorded_scenario
from msgrpo.text import counted, printable

PLAYED_ON = (
    "start the msgrpo eval that made the records again: it plays what is missing, with --retry-failed also what was "
    "given up"
)


class Leaderboard(BaseModel):
    suite_version: int
    rows: list[Row]
    pairs: list[Pair]
    notes: list[str]
    overall: list[Overall] = []
    retellings: list[Retelling] = []
    silent: list[str] = []  # agents of whom no episode in a scenario has a result
    fatal: str = ""  # what ended the evaluation before its end
    made: list[str] = []  # sentences on how the table was made


def build(plays: Sequence[Play], notes: Sequence[str] = ()) -> Leaderboard:
    """The leaderboard of `plays`, in each scenario the best first.

    Raises RecordError where a score is above the exact optimum beyond noise, UsageError for what are no plays.
    """
    both = "plays, notes = load_plays(…); build_leaderboard(plays, notes)"
    check_given("plays", plays, Collection, fix=both)
    for play in plays:
        check_given("one of the plays", play, Play, fix=both)
    notes = [notes] if isinstance(notes, str) else notes
    order = {name: place for place, name in enumerate(dict.fromkeys(play.scenario for play in plays))}
    played = [play for play in plays if play.finished]
    played.sort(key=lambda play: (order[play.scenario], -play.score))
    overall, left_out = ranking(played)
    return Leaderboard(
        suite_version=SUITE_VERSION,
        rows=[row_of(play) for play in played],
        pairs=list(_pairs(played)),
        notes=[*notes, *left_out, *_notes(plays)],
        overall=overall,
        retellings=retellings(played),
        silent=[
            f"{play.label} in {play.scenario}"
            for play in plays
            if play.failed and not (play.finished or play.left_out)
        ],
        made=made(played),
    )


def check_result(board: Leaderboard, fix: str = PLAYED_ON) -> None:
    """Raise RecordError where no episode has a result, so that every table would be empty."""
    if not board.rows:
        raise RecordError(
            "there is no result to show: " + ("; ".join(board.notes) or "the records are empty"), fix=fix
        )


def _pairs(played: Sequence[Play]) -> Iterator[Pair]:
    """All comparisons; an agent that was asked with several prompts is named with each."""
    prompts = Counter(label for label, _ in {(play.label, play.prompt) for play in played})
    named = [(play, f"{play.label}, {play.prompt}" if prompts[play.label] > 1 else play.label) for play in played]
    for (a, name_a), (b, name_b) in combinations(named, 2):
        if a.scenario == b.scenario and (pair := pair_of(a, b)):
            yield pair.model_copy(update={"a": name_a, "b": name_b})


def _notes(plays: Sequence[Play]) -> Iterator[str]:
    called = {
        (spec, name) for play in plays for run in play.runs for spec, name in run.names.items() if name == play.name
    }
    for spec, name in sorted(called):
        yield f"{name} is the agent {spec}: --name calls it so."
    taught = {play.label: teacher for play in plays if (teacher := play.settings.get("teacher"))}
    for agent, teacher in taught.items():
        yield (
            f"{agent} was trained with a teacher, {printable(str(teacher))}: its score is no evidence of what "
            "learning from returns reaches."
        )
    chosen_on = sorted({play.scenario for play in plays if play.split == "val"})
    if chosen_on:
        yield (
            f"{', '.join(chosen_on)}: starts of the validation split, on which settings are chosen; final figures "
            "are of --split test."
        )
    for play in plays:
        yield from _notes_of(play)
    interrupted = {play.label: play.interrupted for play in plays if any(t.completion_tokens for t in play.turns)}
    for agent, starts in interrupted.items():
        if starts:
            yield (
                f"{agent}: {counted(starts, 'start', 'was', 'were')} interrupted; tokens and cost lack the answers "
                "that were on their way."
            )
    for scenario in sorted({play.scenario for play in plays}):
        yield from _notes_on(scenario, [play for play in plays if play.scenario == scenario])


def _notes_of(play: Play) -> Iterator[str]:
    """What qualifies one agent's result in one scenario."""
    where = f"{play.label} in {play.scenario}"
    if not play.finished:
        last = f"; the last: {failure_of(play.failed[-1])}" if play.failed else ""
        listed = ", ".join(f"{kind} {number}" for kind, number in failures(play).items())
        short = f"{len(play.left_out)} ended, but not the first of the suite" if play.left_out else listed
        yield f"{play.label} has no result that counts in {play.scenario}: {short}{last}"
    elif play.left_out:
        first, others = len(play.finished), len(play.left_out)
        yield (
            f"{where}: {first + others} episodes have ended, and the first {first} "
            f"of the suite count; short episodes end first, so the other {others} do not."
        )
    if play.is_biased:
        least = SOUND_FROM * (play.at_once or CONCURRENCY)
        yield (
            f"{where}: no interval and no comparison, since it was broken off after "
            f"{len(play.finished)} episodes in order. Short episodes end first, so the mean of so few is biased; "
            f"from {least} on (twice those that are played at once) it is not. The same command goes on."
        )
    judged = [turn.regret is not None for turn in play.turns]
    if any(judged) and not all(judged):
        count = f"{sum(judged)} of {len(judged)} moves were judged"
        yield f"{where}: {count}; the others are older, or their judge failed"
    if play.unfinished and play.finished:
        yield f"{where}: {_with_unfinished(play)}"


def _notes_on(scenario: str, plays: Sequence[Play]) -> Iterator[str]:
    """What qualifies a comparison of these agents in one scenario."""
    sizes = {frozenset(play.finished) for play in plays if play.finished}
    if len(sizes) > 1:
        yield f"{scenario}: the agents finished different episodes; only the pairs compare like with like"
    seeds, drawn = {episode.start for size in sizes for episode in size}, recorded_scenario(scenario)
    boards = {drawn.start_key(seed) for seed in seeds}
    if not drawn.holds_out and not drawn.one_start:
        yield f"{scenario}: nothing is held out, because a start is a deal: training draws from the same starts"
    elif len(boards) < len(seeds) and not drawn.one_start:
        held = counted(len(boards), "board") if len(boards) == 1 else f"{len(boards)} different boards"
        yield f"{scenario}: the {len(seeds)} starts hold {held}; the others are repeats"


def _with_unfinished(play: Play) -> str:
    """A note on how far episodes without a result could move the score."""
    unfinished = len(play.unfinished)
    why = "the endpoint or the game failed"
    if play.failed:
        why += f", the last time with {failure_of(play.failed[-1])}"
    text = f"{counted(unfinished, 'episode', 'has', 'have')} no result, because {why}"
    if not recorded_scenario(play.scenario).goal:
        return f"{text}; the return leaves them out."
    won, total = sum(bool(e.success) for e in play.finished.values()), len(play.finished) + unfinished
    return f"{text}; with them success would lie between {won / total:.1%} and {(won + unfinished) / total:.1%}."

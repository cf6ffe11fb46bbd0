"""What `msgrpo play` and `msgrpo view` are to show: checked, then shown in the app, or as text without a screen."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.table import Table as RichTable
from rich.text import Text

from msgrpo.errors import MsgrpoError, UsageError, nearest
from msgrpo.files import expanded, replace_text
from msgrpo.game import Scenario, shown_board
from msgrpo.games import get_scenario
from msgrpo.limits import games_code
from msgrpo.models.lora import read_adapter_config
from msgrpo.output import Name, out, print_table
from msgrpo.specs import shipped
from msgrpo.text import counted, interval_text, printable
from msgrpo.tui import recording
from msgrpo.tui.agents import HUMAN, Resolve, Table
from msgrpo.tui.choices import memory_file, missing_extra
from msgrpo.tui.learning import SIGNS, Learning, sign
from msgrpo.tui.match import new_match, usual
from msgrpo.tui.recording import Recording
from msgrpo.tui.records import EVERYBODY, FILTERS, NAMES, Records
from msgrpo.tui.scenes import scale_of, scene_legend, scene_sign
from msgrpo.tui.series import Series
from msgrpo.tui.session import LIVE_SPEED, SPEED, Session, Setup
from msgrpo.tui.showcase import Showcase
from msgrpo.tui.still import still

if TYPE_CHECKING:
    from msgrpo.tui.app import PlayApp

UNSEEN = (120, 40)  # columns and rows of a recording that is made without a terminal
INTERACTIVE = "TEXTUAL_DRIVER"  # set by textual-serve, whose child has no terminal and needs none


def setup(
    scenario: str | None,
    agent: str | None,
    against: str | None,
    seed: int,
    speed: float | None,
    *,
    step: bool,
    live: bool,
    temperature: float = 1.0,
    shown: Path | None = None,
) -> Setup | None:
    """What was asked for; None where the person is to choose, or where a record or a run is `shown`."""
    said = {"a game": scenario, "--against": against, "--seed": seed, "--step": step, "--live": live}
    given = [name for name, value in said.items() if value]
    if shown is not None and given:
        raise UsageError(
            f"{shown} is only shown, and nothing new is played in it; {' and '.join(given)} would be for a new game",
            fix=f"leave out {' and '.join(given)}, or leave out {shown} and play",
        )
    if scenario is None:
        if shown is None:
            given += ["--agent"] * bool(agent) + ["--temperature"] * (temperature != 1)
        if given:
            raise UsageError(
                f"{' and '.join(given)} would be for a game, and none is named",
                fix=f"name one, as in: msgrpo play snake {given[0]} …   (or leave it out, and choose in the app)",
            )
        return None
    with busy(out, f"loading {scenario}"):  # a file or a server takes its time
        game = get_scenario(scenario)
    agent = agent or usual(game)
    if live and not keeps_direction(game):
        raise UsageError(
            f"--live is for a game that goes on by itself, and a player of {scenario} stands still who does nothing",
            fix=f"msgrpo play {shlex.quote(scenario)} --agent human",
        )
    if live and HUMAN not in (agent, against):
        fix = f"msgrpo play {shlex.quote(scenario)} --agent human --live"
        raise UsageError("--live is for a person's game", fix=fix)
    pace = speed or (LIVE_SPEED if live else SPEED)
    return Setup(scenario, agent, against, seed, pace, step, live, temperature)


def keeps_direction(scenario: Scenario) -> bool:
    """Whether who does nothing goes on the same way, as a snake does."""
    game = scenario.new(0, 0)
    with games_code(scenario.id):
        board = shown_board(game)
        return board is not None and bool(board.facing)


def has_screen() -> bool:
    """Whether there is a terminal that the app can draw on; TERM=dumb (an editor's shell, say) cannot."""
    drawable = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    return drawable or INTERACTIVE in os.environ


def start(
    resolve: Resolve,
    wanted: Setup | None,
    *,
    replay: Path | None,
    episode: int | None,
    run: Path | None,
    plays_on: str | None = None,
    options: Sequence[str] = (),
    games: int,
    plain: bool,
    record: Path | None = None,
    console: Console,
    serve: Callable[[], None] | None = None,
) -> None:
    """Open the app, or print where there is no terminal. Exits with the app's own code where that is not 0.

    `options` of the command say how models are asked in games that are chosen in the app. With `serve` the app is
    not opened here: that is called, once everything that was asked for is known to be there.
    """
    if serve is not None and plain:
        raise UsageError("--web shows the app, and --plain leaves it out; give one of them")
    _check_together(wanted, replay, episode, run, plays_on, games)
    watched = None if run is None else Learning.of(run)
    records = None
    if replay is not None:
        with busy(console, f"reading {replay}"):
            records = Records.read(replay)
        records.command = shlex.join(sys.argv[1:])
        if episode is not None:
            records.choose(episode)
    if record is not None:
        _check_record(record, wanted, records, watched, plain=plain)
        if watched is not None and record.suffix == recording.STILL:
            recording.write_whole(record, still(watched.film).encode())
            console.print(f"scenes of the run: {record}", highlight=False, markup=False, soft_wrap=True)
            return
    if plain or not (has_screen() or record or serve):
        _print(resolve, wanted, records, watched, games, console, plain=plain)
        return
    check_specs(resolve, plays_on, *((wanted.agent, wanted.against) if wanted is not None else ()))
    _check_begins(resolve, wanted, records)
    if serve is not None:
        serve()
        return
    from msgrpo.tui.app import PlayApp
    from msgrpo.tui.keys import read_keys

    app = PlayApp(
        resolve,
        wanted,
        records=records,
        run=watched,
        plays_on=plays_on,
        games=games,
        options=options,
        keys=read_keys(),
        memory=memory_file(),
        record=record is not None,
        showcase=Showcase() if wanted is None and records is None and watched is None else None,
    )
    _open(app)
    if record is not None:
        with busy(console, f"writing {record}"):
            write_recording(app.recording, record, app.trouble, console)


def busy(console: Console, doing: str) -> Status:
    """Says on a terminal what is being done, for as long as the block takes: names in it are no markup."""
    return console.status(Text(printable(f"{doing} …")))


def _check_together(
    wanted: Setup | None,
    replay: Path | None,
    episode: int | None,
    run: Path | None,
    plays_on: str | None,
    games: int,
) -> None:
    """Raise UsageError for options that say nothing together."""
    if run is not None and replay is not None:
        raise UsageError("--run watches a training run and --replay a record; give one of them")
    if plays_on is not None and replay is None:
        raise UsageError("--run watches a training run, in which nobody plays on", fix="leave out --agent")
    if games > 1 and (wanted is None or wanted.mode not in ("race", "compare", "duel")):
        game = "snake" if wanted is None else shlex.quote(wanted.scenario)
        fix = f"msgrpo play {game} --agent nano --against random --best-of {games}"
        raise UsageError("--best-of needs two agents", fix=fix)
    if episode is not None and replay is None:
        raise UsageError("--episode is one of a record", fix=f"msgrpo play --replay FILE --episode {episode}")


def _check_begins(resolve: Resolve, wanted: Setup | None, records: Records | None) -> None:
    """A game that cannot begin, and an episode that does not replay, are errors before the screen is taken."""
    if wanted is not None:
        new_match(wanted, Table(resolve).seat)
    if records is not None and _alone(records):
        Session.replay(records.episode, records.command)


def _alone(records: Records) -> bool:
    """Whether one episode is shown at once, and no list of them."""
    return records.chosen or len(records.episodes) == 1


def _open(app: PlayApp) -> None:
    """Open the app until a person leaves it. Exits with its own code where that is not 0: 1 after a crash."""
    app.run() if has_screen() else app.run(headless=True, size=UNSEEN)
    if app.return_code:
        sys.exit(app.return_code)


def _printed(wanted: Setup | None, *, plain: bool) -> Setup:
    """The game that is printed as text. Raises UsageError where none is named, and for what only the app can do."""
    if wanted is None:
        why = "--plain opens no app" if plain else "the app needs a terminal that it can draw on"
        raise UsageError(
            f"no game is named, and none can be chosen here: {why}",
            fix="msgrpo play snake --agent optimal, or, by hand, msgrpo play frozen-lake --agent human",
        )
    if not (wanted.step or wanted.live):
        return wanted
    option, does = ("--live", "plays in real time") if wanted.live else ("--step", "waits for a key at each step")
    why = "--plain prints the game as text" if plain else "the game is printed as text, for want of a terminal"
    raise UsageError(f"{option} {does}, which only the app can do; {why}", fix=f"leave out {option}")


def filtered(folder: Path, only: str, agent: str, words: str, best: bool) -> Records:
    """The records below a folder, with their filters set. Raises UsageError for one that there is not."""
    records = Records.read(folder)
    if only not in FILTERS:
        raise UsageError(f"no filter is named {only!r}", fix=nearest(only, FILTERS))
    names = records.names()
    if agent and agent not in names:
        raise UsageError(f"{folder} has no episode of {agent!r}", fix=nearest(agent, names))
    if only == "mistakes" and all(turn.regret is None for episode in records.episodes for turn in episode.turns):
        raise UsageError(f"no move of {folder} was judged", fix="play it again with: msgrpo eval … --regret")
    records.command = shlex.join(sys.argv[1:])
    records.only, records.agent, records.words, records.best_first = only, names.get(agent, EVERYBODY), words, best
    return records


def browse(resolve: Resolve, records: Records, *, plain: bool, console: Console) -> None:
    """The list of episodes in the app, or as text."""
    if plain or not has_screen():
        columns, listed = records.table()
        table = RichTable(*columns, title=Text(f"{records.name}: {records.told}"), title_justify="left")
        for line in listed.values():
            table.add_row(*(Name(x) if name in NAMES else Text(x) for name, x in zip(columns, line, strict=True)))
        print_table(table, console)
        return
    from msgrpo.tui.app import PlayApp
    from msgrpo.tui.keys import read_keys

    _open(PlayApp(resolve, records=records, keys=read_keys(), memory=memory_file()))


def write_page(folder: Path, file: Path, episodes: int) -> None:
    """The leaderboard's page with so many episodes of each agent. Raises MsgrpoError where it cannot be written."""
    # a third of the time to the first board, where a game is asked for
    from msgrpo.evals.leaderboard import build, check_result
    from msgrpo.evals.page import html
    from msgrpo.evals.plays import load

    plays, notes = load([folder], by_prompt=True)
    board = build(plays, notes)
    check_result(board)
    text = html(board, plays, replays=episodes)
    if not file.name or file.is_dir():
        raise MsgrpoError(f"--html {file} is a folder", fix="--html page.html")
    try:
        replace_text(file, text)
    except OSError as error:
        raise MsgrpoError(f"{file} cannot be written: {error.strerror}", fix="--html page.html") from error


def _check_record(
    file: Path, wanted: Setup | None, records: Records | None, run: Learning | None, *, plain: bool
) -> None:
    recording.check(file, of_run=run is not None)
    if plain:
        raise UsageError("--record writes what the app shows, and --plain leaves it out; give one of them")
    if run is not None:
        still(run.film)  # without a film there is nothing to record
    if has_screen() or run is not None:
        return
    if wanted is None and (records is None or not _alone(records)):
        raise UsageError(
            "without a terminal --record needs a game, or one episode", fix="msgrpo play snake --record game.gif"
        )
    if wanted is not None and HUMAN in (wanted.agent, wanted.against):
        raise UsageError("a person needs a terminal to play in", fix="choose another --agent")


def write_recording(taken: Recording, file: Path, trouble: str, console: Console) -> None:
    """Write what was recorded and say so. Raises MsgrpoError where there is nothing, or the game was not finished."""
    if not taken.pictures:
        raise MsgrpoError("no game and no run was shown, so nothing is recorded", fix="play one before you leave")
    taken.write(file, "msgrpo play")
    console.print(f"{len(taken.pictures)} pictures: {file}", highlight=False, markup=False, soft_wrap=True)
    if trouble:
        raise MsgrpoError(f"the recording ends where an agent gave no answer: {trouble}")


def check_specs(resolve: Resolve, *specs: str | None) -> None:
    """Raise for a name that no agent has, before the screen is taken. What is slow to load is not loaded."""
    for spec in filter(None, specs):
        kind, _, rest = spec.partition(":")
        if kind == "nano":
            if rest:
                shipped(rest)
        elif spec != HUMAN and kind not in ("adapter", "dqn"):
            resolve(spec)
        elif kind in ("adapter", "dqn") and not expanded(rest).is_dir():
            raise UsageError(
                f"there is no folder {rest!r} for the agent {spec!r}", fix="msgrpo adapters lists the runs"
            )
        elif kind == "adapter":
            read_adapter_config(expanded(rest))


def _print(
    resolve: Resolve,
    wanted: Setup | None,
    records: Records | None,
    watched: Learning | None,
    games: int,
    console: Console,
    *,
    plain: bool,
) -> None:
    """What was asked for, as text."""
    from msgrpo.tui.plain import play_plain, show_replay

    if watched is not None:
        print_run(watched, console)
        return
    if records is not None:
        if not records.chosen:
            records.place = len(records.episodes) - 1
        show_replay(Session.replay(records.episode, records.command), console)
        return
    wanted = _printed(wanted, plain=plain)
    for spec in filter(None, (wanted.agent, wanted.against)):
        fix = missing_extra(spec)
        if fix is not None:
            raise MsgrpoError(
                f"the agent {spec!r} needs packages that are not installed.",
                fix=f"{fix}   (or, without it: --agent optimal, --agent random)",
            )
    check_specs(resolve, wanted.agent, wanted.against)
    if games == 1:
        play_plain(wanted, resolve, console)
        return
    series = Series(wanted, games)
    while not series.over:
        match = play_plain(series.next(), resolve, console)
        if not match.over:  # who leaves a game leaves the series, and no game that was left is a draw
            return
        series.add(match)
        console.print(f"game {series.played} of {games}: {series.score()}\n", highlight=False, markup=False)


def print_run(run: Learning, console: Console) -> None:
    """The run as text: where it stands, its evaluations, the newest update's groups, its film in one line."""
    lines, of = [run.title()], f" of {run.evaluated} alone" if run.evaluated else ""
    for step, mean, low, high in run.evaluations:
        lines.append(
            f"  after {counted(step, 'update')}: {run.score}{of} {mean:.3f} {interval_text(low, high, '.3f')}"
        )
    if run.update is not None:
        lines.append(f"update {run.step}: " + "  ".join(f"{name} {value}" for name, value in run.facts()))
        for row in run.update.groups:
            members = "".join(map(sign, sorted(row.members, key=lambda member: -member.advantage)))
            lines.append(f"  {row.start_seed:>8}  {members}")
        lines.append(SIGNS)
    if len(run.film):
        results = [one for _, one in run.film.results()]
        signs = "".join(scene_sign(one, *scale_of(results))[0] for one in results)
        after = ", ".join(map(str, run.film.steps))
        lines.append(f"film: one start after {after} updates: {signs}   {scene_legend(results)}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def print_keys(console: Console) -> None:
    """Every key with its name, and where to change it."""
    from msgrpo.tui.keys import bindings, keys_file, read_keys

    changed = read_keys()
    table = RichTable("name", "keys", "does")
    for name, binding in bindings().items():
        table.add_row(name, changed.get(name, binding.key), binding.description)
    print_table(table, console)
    line = f'Change them in {keys_file()}, one line a key:  "play.pause" = "space,f2"'
    console.print(line, highlight=False, markup=False, soft_wrap=True)

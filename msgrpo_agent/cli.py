"""`msgrpo`: gathers the commands of all packages. Each command imports what it needs when it runs."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.markup import escape
    from rich.table import Table
    from typer.core import TyperGroup

    from msgrpo import __version__
    from msgrpo.errors import MsgrpoError, UsageError, nearest, no_memory
    from msgrpo.files import expanded
    from msgrpo.game import AnyText, Scenario
    from msgrpo.output import Json, Name, err, open_what_is_closed, outliving, print_json, print_table, say, say_error
    from msgrpo.signals import end_with_threads, ending_as_interrupt
    from msgrpo.text import counted, printable
except KeyboardInterrupt:  # a Ctrl-C while these are loaded, which takes up to a second
    sys.exit(130)

commands = typer.Typer()
SHOWN = 200  # characters of a file's name


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"msgrpo {__version__}")
        raise typer.Exit


class _HomesAreFound(TyperGroup):
    """`--out=~/runs/x` means what `--out ~/runs/x` does: a shell puts a home for ~ only where a word begins."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        found = (re.fullmatch(r"(--(?!allow=)[\w-]+=)(~.*)", arg, re.DOTALL) for arg in args)
        return super().parse_args(
            ctx, [f"{at[1]}{expanded(at[2])}" if at else arg for arg, at in zip(args, found, strict=True)]
        )


def make_app() -> typer.Typer:
    """The command line with the commands of all packages."""
    from msgrpo.evals import cli as evals
    from msgrpo.serve import cli as serve
    from msgrpo.train import cli as train
    from msgrpo.tui import cli as tui

    app = typer.Typer(
        cls=_HomesAreFound,
        help=(
            "Post-train small language models into agents for text games with MS-GRPO; "
            "serve, watch and benchmark them."
        ),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
        ] = False,
        allow: Annotated[
            list[str] | None,
            typer.Option(
                help="What a record, a run's folder or a study may name: file.py:scenario and module:function, whose "
                "code runs, a server's URL, a folder; may repeat."
            ),
        ] = None,
    ) -> None:
        """Common options."""
        if allow:
            from msgrpo import trust

            trust.allow(allow)

    for part in (train.commands, evals.commands, serve.commands, tui.commands, commands):
        app.add_typer(part)
    app.add_typer(train.nano, name="nano")
    app.add_typer(games, name="games")
    app.add_typer(serve.env, name="env")
    return app


class _NameIsShown(TyperGroup):
    """`msgrpo games snake` is `msgrpo games show snake`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


games = typer.Typer(cls=_NameIsShown, help="List the scenarios; with a name, show its rules.")


@games.callback(invoke_without_command=True)
def list_games(ctx: typer.Context, as_json: Json = False) -> None:
    """List the scenarios, one line each."""
    if ctx.invoked_subcommand is not None:
        return
    from msgrpo.games import SCENARIOS, get_scenario
    from msgrpo.games.outside import offered
    from msgrpo.games.retold import SIGN, TELLINGS

    chosen = [*SCENARIOS.values()]
    for name in offered():
        try:
            chosen.append(get_scenario(name))
        except MsgrpoError as error:  # one package that is broken hides no other game
            say_error(str(error))
    if as_json:
        print_json([_facts(scenario) for scenario in chosen])
        return
    table = Table("scenario", "players", "steps", "source", box=None, pad_edge=False)
    for scenario in chosen:
        table.add_row(
            Name(scenario.id), str(len(scenario.players)), str(scenario.step_limit), escape(scenario.source)
        )
    print_table(table)
    say("settings after [V] Verlog, [F] FastSnake, [G] Gymnasium")
    say("msgrpo games NAME shows the rules; msgrpo play NAME plays; msgrpo games new my_game.py begins your own")
    say(f"NAME{SIGN}TELLING is the same game in other words: {', '.join(TELLINGS)}")


def _facts(scenario: Scenario) -> dict[str, Any]:
    names = ("id", "family", "players", "actions", "step_limit", "source", "rules")
    return {name: getattr(scenario, name) for name in names}


@games.command()
def show(scenario: Annotated[str, typer.Argument(help="A scenario.")], as_json: Json = False) -> None:
    """Show a scenario's rules and what a player sees at the start."""
    from msgrpo.episode import observation_of
    from msgrpo.games import get_scenario
    from msgrpo.limits import games_code

    one = get_scenario(scenario)
    if as_json:
        print_json([_facts(one)])
        return
    players = counted(len(one.players), "player")
    own_words = "your own words" if isinstance(one.actions, AnyText) else "those that the state names"
    actions = ", ".join(one.actions) or own_words
    typer.echo(f"{one.id}: {players}, actions {actions}, {one.step_limit} steps, source {one.source}")
    game = one.new(0, 0)
    with games_code(one.id):
        seen = observation_of(game, game.to_move[0])
    typer.echo(f"\n{one.rules}\n\nWhat a player sees at the start:\n\n{seen}")


@games.command()
def check(
    scenario: Annotated[str, typer.Argument(help="A scenario: a name, file.py:scenario or module:scenario.")],
    plays: Annotated[int, typer.Option(min=1, help="Random games.")] = 20,
    as_json: Json = False,
) -> None:
    """Check a game against the contract; exits with 2 where it breaks it."""
    from msgrpo.contract import examine
    from msgrpo.games import get_scenario

    one = get_scenario(scenario)
    with err.status("random games") as status:
        examined = examine(one, plays=plays, name=scenario, tell=lambda doing: status.update(escape(doing)))
    if as_json:
        rows = [{"rule": finding.rule, "breach": finding.breach, "fix": finding.fix} for finding in examined.findings]
        print_json({"scenario": scenario, "rules": rows, "episode_s": examined.episode_s})
    else:
        table = Table("rule", "what was seen", "what mends it", box=None, pad_edge=False)
        for finding in examined.findings:
            state = "[green]✓[/]" if finding.breach is None else f"[red]✗[/] {escape(finding.breach)}"
            table.add_row(finding.rule, state, escape(finding.fix or ""))
        print_table(table)
        broken, rules = len(examined.breaches), len(examined.findings)
        verdict = f"{broken} of {rules} rules are broken" if broken else f"all {rules} rules hold"
        say(f"{verdict}; {plays} random games, {1000 * examined.episode_s:.3g} ms an episode with all its checks")
        if examined.searches is not None:
            say(f"its reference player is slow; positions in which it was asked twice: {examined.searches // 2}")
    if examined.breaches:
        raise typer.Exit(2)


@games.command()
def new(file: Annotated[Path, typer.Argument(help="The file to write: my_game.py.")]) -> None:
    """Write a small working game to begin with: its rules, reference player and test."""
    from msgrpo.games.template import write

    name = shlex.quote(write(file))
    say(f"{file} holds a game that works. Change it, and then:")
    for command in (f"games check {name}", f"play {name} --agent optimal", f"teach {name} --out runs/taught"):
        say(f"  msgrpo {command}")
    say(f"  msgrpo train {name} --base runs/taught --steps 20")


@commands.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(help="A training run's folder: why does it not learn?")] = None,
    as_json: Json = False,
) -> None:
    """Show what is installed and the command that closes each gap; with a run's folder, why it does not learn."""
    if run is not None:
        from msgrpo.train.cli import show_examination

        show_examination(run, as_json)
        return
    from msgrpo.doctor import examine

    findings = examine()
    if as_json:
        print_json([vars(finding) for finding in findings])
        return
    table = Table("part", "state", "command that helps")
    for finding in findings:
        mark = "[green]✓[/]" if finding.ok else "[yellow]–[/]"
        table.add_row(finding.part, f"{mark} {escape(finding.state)}", escape(finding.fix or ""))
    print_table(table)


@commands.command()
def export(
    folders: Annotated[list[Path], typer.Argument(help="A training run, or folders written by msgrpo eval.")],
    to: Annotated[
        str,
        typer.Option(
            help="Of a run: merged (a folder that any tool loads), gguf (llama.cpp, Ollama, LM Studio), hub (adapter "
            "and model card). Of evaluations: inspect (logs of Inspect AI), huggingface (a dataset folder)."
        ),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="A folder for these files alone.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="How weights are stored: float32, float16, bfloat16; of gguf also q8_0. Default: the base's; of "
            "gguf float16."
        ),
    ] = None,
) -> None:
    """Write a trained model, or the records of evaluations, as files that other tools read. Nothing is uploaded."""
    from msgrpo.evals import interchange

    of_runs = ("merged", "gguf", "hub")
    if to not in (*of_runs, *interchange.TOOLS):
        raise UsageError(f"nothing is exported to {to!r}", fix=nearest(to, (*of_runs, *interchange.TOOLS)))
    if to in of_runs:
        from msgrpo.models.export import export_run

        if len(folders) > 1:
            raise UsageError(f"--to {to} takes one run, and {len(folders)} folders were given")
        with ending_as_interrupt():  # what is half written goes
            notes = export_run(folders[0], to, out_dir, dtype)
        for note in notes:
            say(note)
        return
    if dtype is not None:
        raise UsageError(f"--dtype is for the weights of a run, and --to {to} writes none")
    from msgrpo.evals.record import check_games

    check_games(folders, shlex.join(sys.argv[1:]))
    with ending_as_interrupt():
        done = interchange.export(folders, to, out_dir)
    for note in done.notes:
        say(f"note: {note}")
    say(f"{out_dir}: {done.summary}")


def main() -> None:
    """Entry point."""
    try:
        _run()
    except SystemExit as ended:
        end_with_threads(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


def _run() -> None:
    """Run the command: an error that a person can correct is one message and exit code 2, never a traceback."""
    open_what_is_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? for what it lacks
            setattr(sys, name, outliving(stream))
    try:
        make_app()()
    except MsgrpoError as error:
        say_error(error.message)
        if error.fix is not None:
            say("  " + error.fix)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        say_error(printable(f"{str(error.filename)[:SHOWN]!r} cannot be read or written: {error.strerror}"))
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # a second Ctrl-C, while a lock was given back
            say("stopped")
            sys.exit(130)
        why = no_memory(error)
        if why is None:
            raise
        say_error(printable(why))
        say("  take a smaller model, or less at once: a lower --concurrency or --max-tokens; what was saved is kept")
        sys.exit(2)
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()

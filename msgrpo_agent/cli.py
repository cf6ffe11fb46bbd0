"""`msgrpo`: gathers the commands of all packages. Each command imports what it needs when it runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from msgrpo_agent import __version__
from msgrpo_agent.errors import MsgrpoError
from msgrpo_agent.extras import ROOT, check_not_hidden
from msgrpo_agent.output import Json, err, out, print_json, say

commands = typer.Typer()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"msgrpo {__version__}")
        raise typer.Exit


def make_app() -> typer.Typer:
    """The whole command line. Raises UsageError where another file hides one of our packages."""
    check_not_hidden()
    from evals import cli as evals
    from serve import cli as serve
    from train import cli as train
    from tui import cli as tui

    app = typer.Typer(
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
    ) -> None:
        """Common options."""

    for part in (train.commands, evals.commands, serve.commands, tui.commands, commands):
        app.add_typer(part)
    app.add_typer(train.nano, name="nano")
    return app


@commands.command()
def games(
    scenario: Annotated[str | None, typer.Argument(help="One scenario: its rules and what is seen.")] = None,
    as_json: Json = False,
) -> None:
    """List the scenarios, one line each; with a name, show that one's rules."""
    from msgrpo_agent.games import SCENARIOS, get_scenario

    chosen = [get_scenario(scenario)] if scenario else list(SCENARIOS.values())
    if as_json:
        names = ("id", "family", "players", "actions", "step_limit", "source", "rules")
        print_json([{name: getattr(one, name) for name in names} for one in chosen])
    elif scenario:
        (one,) = chosen
        facts = (
            f"{one.id}: {len(one.players)} player{'s' if len(one.players) > 1 else ''}, actions "
            f"{', '.join(one.actions)}, {one.step_limit} steps, source {one.source}"
        )
        typer.echo(f"{facts}\n\n{one.rules}\n\nWhat a player sees at the start:\n")
        typer.echo(one.new(0, 0).observe(one.players[0]))
    else:
        table = Table("scenario", "players", "steps", "source", box=None, pad_edge=False)
        for one in chosen:
            table.add_row(one.id, str(len(one.players)), str(one.step_limit), escape(one.source))
        out.print(table)
        say("msgrpo games NAME shows the rules; msgrpo play NAME plays")


@commands.command()
def doctor(as_json: Json = False) -> None:
    """Show what is installed, which engines can run here, and the command that closes each gap."""
    from msgrpo_agent.doctor import examine

    findings = examine()
    if as_json:
        print_json([vars(finding) for finding in findings])
        return
    table = Table("part", "state", "command that helps")
    for finding in findings:
        mark = "[green]✓[/]" if finding.ok else "[yellow]–[/]"
        table.add_row(finding.part, f"{mark} {escape(finding.state)}", escape(finding.fix or ""))
    out.print(table)


def main() -> None:
    """Entry point: an error that a person can correct is one message and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 shows ? for what it lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        make_app()()
    except MsgrpoError as error:
        err.print("[bold red]error:[/] ", end="")
        say(error.message)
        if error.fix is not None:
            say("  " + error.fix)
        sys.exit(2)
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)


if __name__ == "__main__":
    # `python -m` puts the current folder in front, where a user's train.py would stand in for our package.
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != ROOT:
        del sys.path[0]
    main()

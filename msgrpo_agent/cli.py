"""`msgrpo`: thin commands. Each imports its package when it runs, so that `msgrpo --help` is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from msgrpo_agent import __version__
from msgrpo_agent.errors import MsgrpoError

app = typer.Typer(
    help="Post-train small language models into agents for text games with MS-GRPO; serve, watch and benchmark them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out, err = Console(), Console(stderr=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of text.")]


def print_json(value: Any) -> None:
    """JSON to standard output, never wrapped or coloured."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"msgrpo {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Common options."""


# ── games ────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def games(as_json: Json = False) -> None:
    """List the scenarios: rules, actions, limits and source."""
    from msgrpo_agent.games import SCENARIOS

    if as_json:
        print_json(
            [
                {
                    "id": s.id,
                    "family": s.family,
                    "players": list(s.players),
                    "actions": list(s.actions),
                    "step_limit": s.step_limit,
                    "source": s.source,
                    "rules": s.rules,
                }
                for s in SCENARIOS.values()
            ]
        )
        return
    table = Table("scenario", "players", "actions", "steps", "source", "rules", show_lines=True)
    for s in SCENARIOS.values():
        table.add_row(
            s.id,
            str(len(s.players)),
            " ".join(s.actions),
            str(s.step_limit),
            s.source.replace("[", r"\["),
            s.rules,
        )
    out.print(table)


# ── play ─────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def play(
    scenario: Annotated[str | None, typer.Argument(help="A scenario of `msgrpo games`; without one: choose.")] = None,
    agent: Annotated[
        str, typer.Option(help="Who plays: nano, random, optimal, human, adapter:DIR, dqn:DIR, endpoint:URL#model.")
    ] = "nano",
    against: Annotated[str | None, typer.Option(help="The second player: a race, a comparison or a duel.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the start, the luck and the sampling.")] = 0,
    speed: Annotated[float, typer.Option(min=0.1, max=60, help="Steps a second.")] = 4.0,
    step: Annotated[bool, typer.Option("--step", help="Stop before and after every answer.")] = False,
    replay: Annotated[Path | None, typer.Option(help="Show a recorded episode (the last of the file).")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print the episode as text, without the app.")] = False,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    keys: Annotated[bool, typer.Option("--keys", help="Print the keys and the file that changes them.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve the app to a browser on this machine.")] = False,
    host: Annotated[str, typer.Option(help="With --web.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --web.")] = 8080,
    force: Annotated[
        bool, typer.Option("--force", help="With --web: listen on a host that is not loopback.")
    ] = False,
) -> None:
    """Watch, step through, take over, and play against an agent."""
    from msgrpo_agent.agent import Sampling
    from msgrpo_agent.specs import make_agent
    from tui import launch

    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    if keys:
        launch.print_keys(out)
    elif web:
        launch.web(sys.argv[1:], host, port, force=force)
    else:
        launch.play(
            lambda spec: make_agent(spec, sampling, show_probabilities=True),
            launch.setup(scenario, agent, against, seed, speed, step=step),
            replay=replay,
            plain=plain,
            console=out,
        )


def main() -> None:
    """Entry point: an error a person can mend is one message and exit code 2, never a traceback."""
    try:
        app()
    except MsgrpoError as error:
        err.print("[bold red]error:[/] ", end="")
        err.print(error.message, markup=False, highlight=False, soft_wrap=True)
        if error.fix is not None:
            err.print("  " + error.fix, markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()

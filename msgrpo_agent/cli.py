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


# ── evals ────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command("eval")
def evaluate(
    agents: Annotated[list[str] | None, typer.Argument(help="Agents, like nano, adapter:runs/fl, optimal.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI-compatible URL, ending in /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at --endpoint.")] = None,
    suite: Annotated[str | None, typer.Option(help="paper (the default), all or transfer.")] = None,
    scenario: Annotated[list[str] | None, typer.Option(help="A scenario in place of a suite; may repeat.")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes a scenario; 200 without.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="20 episodes a scenario.")] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Records and tables; the same command goes on.")] = Path(
        "runs/eval"
    ),
    concurrency: Annotated[int | None, typer.Option(min=1, help="Episodes at once; 64 without.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the endpoint; may repeat.")] = None,
    body: Annotated[str | None, typer.Option(help="JSON merged into every request; null takes out.")] = None,
    price: Annotated[str | None, typer.Option(help="US$ per million tokens at the endpoint: IN,OUT.")] = None,
    as_json: Json = False,
) -> None:
    """Play the same episodes with every agent and print the leaderboard.

    An endpoint's key comes from MSGRPO_API_KEY or OPENAI_API_KEY. Start the same command again to go on.
    """
    from evals import command

    board = command.run(
        command.Options(
            agents=agents or [],
            endpoint=endpoint,
            model=model,
            suite=suite,
            scenarios=scenario or [],
            episodes=episodes,
            quick=quick,
            out=out_dir,
            concurrency=concurrency,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            headers=header or [],
            body=body,
            price=price,
        ),
        err,
    )
    _print_board(board, as_json)
    err.print(f"tables and replays: {out_dir / 'leaderboard.html'}", soft_wrap=True)


@app.command()
def leaderboard(
    folders: Annotated[list[Path], typer.Argument(help="Folders written by msgrpo eval.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Write the tables here.")] = None,
    mix: Annotated[bool, typer.Option("--mix", help="Merge though prompts, settings or versions differ.")] = False,
    as_json: Json = False,
) -> None:
    """Merge the results of several evaluations into one table."""
    from evals import command

    _print_board(command.merge(folders, out_dir, mix=mix), as_json)


def _print_board(board: Any, as_json: bool) -> None:
    from evals import tables

    if as_json:
        print_json(board.model_dump(mode="json"))
        return
    for part in tables.terminal(board):
        out.print(part)


@app.command()
def verify(files: Annotated[list[Path], typer.Argument(help="Records (.jsonl), or folders of them.")]) -> None:
    """Simulate every recorded episode again, without any model; the first difference is an error."""
    from evals.verify import records_in, verify

    for file in records_in(files):
        out.print(f"{file}: {verify(file)} episodes replay to what they say", soft_wrap=True, markup=False)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A record (.jsonl).")],
    episode: Annotated[int, typer.Option(min=1, help="Which line of the record, from 1.")] = 1,
) -> None:
    """Print a recorded episode as text."""
    from evals.verify import as_text, nth

    typer.echo(as_text(nth(file, episode)))


@app.command("train-dqn")
def train_dqn(
    scenario: Annotated[str, typer.Argument(help="A single-player scenario.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder; the same command goes on.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Environment steps in all.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, exploration and starts.")] = 0,
) -> None:
    """Train the DQN baseline on a scenario's training starts (stable-baselines3)."""
    from msgrpo_agent.errors import MissingExtraError

    try:
        from train import dqn
    except ImportError as error:
        raise MissingExtraError("msgrpo train-dqn", "dqn") from error
    dqn.train(scenario, out_dir, steps=steps, seed=seed, say=lambda line: err.print(line, soft_wrap=True))


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

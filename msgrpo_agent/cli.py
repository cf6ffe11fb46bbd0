"""`msgrpo`: thin commands. Each imports its package when it runs, so that `msgrpo --help` is instant."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from msgrpo_agent import __version__
from msgrpo_agent.errors import MissingExtraError, MsgrpoError, UsageError

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
            escape(s.source),
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


# ── train ────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def train(
    scenario: Annotated[str | None, typer.Argument(help="Scenario to train on; see `msgrpo games`.")] = None,
    base: Annotated[str | None, typer.Option(help="nano, a folder, or a hub name.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run folder; default: runs/SCENARIO.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    preset: Annotated[str, typer.Option(help="nano or paper.")] = "nano",
    config_file: Annotated[Path | None, typer.Option("--config", help="JSON file with settings.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, any setting; repeatable.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in --out, if there is one.")] = False,
    as_json: Json = False,
) -> None:
    """Train a LoRA adapter with MS-GRPO. Without arguments: nano on frozen-lake, minutes on two CPU cores."""
    try:
        from train.config import make_config
        from train.loop import train as run
        from train.report import closing_line, reporter
    except ImportError as error:
        raise MissingExtraError("msgrpo train", "train") from error
    given = {"scenario": scenario, "base": base, "steps": steps, "seed": seed}
    config = make_config(preset, file=config_file, settings=settings or (), given=given)
    folder = out_dir or _free_folder(Path("runs") / config.scenario, resume)
    with reporter(err, config, as_json=as_json) as report:
        report.note(f"{config.base} on {config.scenario}, {config.steps} updates → {folder}")
        try:
            summary = run(config, folder, resume=resume, report=report)
        except KeyboardInterrupt:
            report.note(f"stopped; go on with: msgrpo train … --out {folder} --resume")
            raise
    if as_json:
        print_json(summary | {"out": str(folder)})
        return
    out.print(closing_line(summary), highlight=False, soft_wrap=True)
    err.print(f"adapter, curve.png and transcripts: {folder}", highlight=False, soft_wrap=True)


def _free_folder(wanted: Path, resume: bool) -> Path:
    """`wanted`, or wanted-2, wanted-3, … if it is taken and not to be resumed."""
    candidates = (wanted.with_name(f"{wanted.name}-{n}") if n > 1 else wanted for n in itertools.count(1))
    return wanted if resume else next(folder for folder in candidates if not folder.exists())


# ── nano ─────────────────────────────────────────────────────────────────────────────────────────────────────

nano_app = typer.Typer(help="The embedded model.", no_args_is_help=True)
app.add_typer(nano_app, name="nano")


@nano_app.command("build")
def nano_build(
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the model and its tokenizer.")] = Path(
        "runs/nano"
    ),
    seed: Annotated[int, typer.Option(help="Seed of text, weights and batches.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 2000,
    as_json: Json = False,
) -> None:
    """Train the embedded model again from nothing (half an hour on two CPU cores)."""
    try:
        from train.nano import build
    except ImportError as error:
        raise MissingExtraError("msgrpo nano build", "train") from error
    from rich.progress import Progress

    if out_dir.exists() and any(out_dir.iterdir()):
        raise UsageError(f"--out {out_dir} is not empty", fix="choose another --out")
    with Progress(console=err, disable=as_json) as progress:
        task = progress.add_task("generating text", total=steps)

        def show(step: int, total: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"loss {loss:.3f}")

        facts = build(out_dir, seed=seed, steps=steps, progress=show)
    if as_json:
        print_json(facts | {"out": str(out_dir)})
    else:
        out.print(f"{facts['parameters']:,} parameters, loss {facts['loss']}, {facts['minutes']} minutes → {out_dir}")


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what is installed, which engines can run here, and the command that mends each gap."""
    from msgrpo_agent.doctor import examine

    findings = examine()
    if as_json:
        print_json([vars(finding) for finding in findings])
        return
    table = Table("part", "state", "mend it with")
    for finding in findings:
        mark = "[green]✓[/]" if finding.ok else "[yellow]–[/]"
        table.add_row(finding.part, f"{mark} {finding.state}", escape(finding.fix or ""))
    out.print(table)


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

"""`msgrpo`: thin commands. Each imports its package when it runs, so that `msgrpo --help` is instant."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

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


# ── evals ────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command("eval")
def evaluate(
    agents: Annotated[list[str] | None, typer.Argument(help="Agents, like nano, adapter:runs/fl, optimal.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI-compatible URL, ending in /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at --endpoint.")] = None,
    suite: Annotated[str | None, typer.Option(help="paper (the default), all or transfer.")] = None,
    scenario: Annotated[list[str] | None, typer.Option(help="A scenario in place of a suite; may repeat.")] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Episodes a scenario; 200 without.")
    ] = None,
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
    err.print(f"tables and replays: {out_dir / 'leaderboard.html'}", markup=False, soft_wrap=True)


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
    from evals.record import records_in
    from evals.verify import verify

    for file in records_in(files):
        found = verify(file)
        told = f"{file}: {found.episodes} episodes replay to what they say"
        if found.unchecked_prompts:
            told += f"; the prompts of {found.unchecked_prompts} are of another version and could not be checked"
        out.print(told, soft_wrap=True, markup=False)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A record (.jsonl).")],
    episode: Annotated[int, typer.Option(min=1, max=10**9, help="Which line of the record, from 1.")] = 1,
) -> None:
    """Print a recorded episode as text."""
    from evals.verify import as_text, nth

    typer.echo(as_text(nth(file, episode)))


@app.command("train-dqn")
def train_dqn(
    scenario: Annotated[str, typer.Argument(help="A single-player scenario.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder; the same command goes on.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Environment steps in all.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of weights, exploration and starts.")] = 0,
) -> None:
    """Train the DQN baseline on a scenario's training starts (stable-baselines3)."""
    try:
        from train import dqn
    except ImportError as error:
        raise MissingExtraError("msgrpo train-dqn", "dqn") from error
    dqn.train(
        scenario, out_dir, steps=steps, seed=seed, say=lambda line: err.print(line, markup=False, soft_wrap=True)
    )


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
    err.print(f"adapter, curve.png and transcripts: {folder}", markup=False, highlight=False, soft_wrap=True)


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
    steps: Annotated[int, typer.Option(help="Training steps.")] = 2200,
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
        built = f"{facts['parameters']:,} parameters, loss {facts['loss']}, {facts['minutes']} minutes → {out_dir}"
        out.print(built, markup=False)


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


# ── serve ────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    adapter: Annotated[
        list[str] | None, typer.Option(help="A run's folder, or NAME=FOLDER; may be given several times.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="nano, a folder or a hub name; default: the adapter's own.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The base's model name; default: its own.")] = None,
    host: Annotated[str, typer.Option(help="Another than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and answer.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share one copy.")] = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Copies of the model.")] = 1,
    allow_runtime_adapters: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Let clients load adapters from below this folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and its variables only.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Ask a running server at --host, --port.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a base and its adapters with vLLM behind an OpenAI-compatible URL; vLLM's own options after `--`."""
    from serve import terminal

    key = os.environ.get("MSGRPO_API_KEY")
    if status:
        served = terminal.status(host, port, key)
        if as_json:
            print_json(served)
        else:
            for model, parent in served.items():
                typer.echo(model + (f"  (adapter of {parent})" if parent else ""))
        return
    request = terminal.plan(
        adapter or [],
        base=base,
        name=name,
        host=host,
        port=port,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        runtime_adapters=allow_runtime_adapters,
        extra=context.args,
    )
    if dry_run:
        typer.echo(terminal.dry_run(request, key))
    elif not terminal.serve(request, key, out):
        raise typer.Exit(130)


@app.command()
def adapters(
    folder: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("runs"), as_json: Json = False
) -> None:
    """List trained adapters: base, scenario, result, and whether each can be served."""
    from dataclasses import asdict

    from serve.adapters import list_runs

    runs = list_runs(folder)
    if as_json:
        print_json([asdict(run) for run in runs])
        return
    if not runs:
        out.print(f"no adapters in {folder}; train one: msgrpo train --out {folder / 'fl'}", markup=False)
        return
    table = Table(*(Column(name, overflow="fold") for name in ("run", "base", "scenario", "result", "problem")))
    for run in runs:
        table.add_row(*(escape(text or "") for text in (run.folder, run.base, run.scenario, run.result, run.problem)))
    out.print(table)


def main() -> None:
    """Entry point: an error a person can mend is one message and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 shows ? for what it lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
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

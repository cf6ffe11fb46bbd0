"""`msgrpo train`, `msgrpo train-dqn`, `msgrpo teach`, `msgrpo lab` and `msgrpo nano build`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from msgrpo.errors import UsageError
from msgrpo.extras import needs
from msgrpo.output import Chat, HowAsked, Json, beginning, err, out, print_json, print_line, print_table, say, takes
from msgrpo.signals import ending_as_interrupt
from msgrpo.train.options import Given

if TYPE_CHECKING:
    from msgrpo.train.doctor import Examination

commands = typer.Typer()
nano = typer.Typer(help="The embedded model.", no_args_is_help=True)


@commands.command()
@takes(Given)
def train(given: Given) -> None:
    """Train a LoRA adapter with MS-GRPO. Without arguments: nano on frozen-lake, a quarter of an hour on a core."""
    if given.watch and sys.stdout.isatty():  # torch alone takes seconds to load
        say("loading what the training needs; the app opens when it has begun")
    with needs("msgrpo train", "train"):
        from msgrpo.train import command

    command.run(given)


def show_examination(run: Path, as_json: bool) -> None:
    """`msgrpo doctor RUN`: why it does not learn, what to change, and the curve of a healthy run beside its own."""
    from rich.markup import escape
    from rich.table import Table

    from msgrpo.run_log import SUMMARY
    from msgrpo.train.doctor import examine, table

    exam = examine(run)
    if as_json:
        print_json(exam.as_data())
        return
    stopped = exam.goes_on is False and not (run / SUMMARY).is_file()
    state = " (goes on)" if exam.goes_on else " (stopped before its end)" if stopped else ""
    print_line(
        beginning(f"{exam.base} on {exam.scenario}, {exam.updates} of {exam.planned} updates{state}; {exam.verdict}")
    )
    _show_findings(exam)
    if exam.failures and exam.answer is not None:
        counts = ", ".join(f"{count} {name}" for name, count in exam.failures.items())
        out.print(f"\nanswers without a legal action in the last update that was kept: {counts}; one of them:")
        out.print(f"  {exam.answer!r}", markup=False, highlight=False)
    title = f"\n{escape(str(exam.score))} on the validation starts"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    columns, *rows = table(exam)
    for column in columns:
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(*row)
    print_table(shown)
    if exam.healthy is None:
        say(f"no healthy run of {exam.scenario} with a base of this size comes with msgrpo")
    else:
        settings = exam.healthy.settings or "the defaults"
        say(f"the healthy run: {exam.healthy.base} on {exam.healthy.scenario}, {settings}")


def _show_findings(exam: Examination) -> None:
    from rich.markup import escape

    from msgrpo.text import counted
    from msgrpo.train.diagnosis import RECENT

    for number, finding in enumerate(exam.findings):
        colour = "red" if number == 0 else "yellow"
        evidence = escape(beginning(finding.evidence))
        out.print(f"\n[bold {colour}]{escape(finding.cause)}[/]: {evidence}.", highlight=False)
        out.print(beginning(f"  {finding.change}"), markup=False, highlight=False)
    if not exam.findings and exam.updates < RECENT:
        ended = counted(exam.updates, "update")
        out.print(f"\n[yellow]too early to say[/]: {ended} ended, and some causes show only after {RECENT}")
    elif not exam.findings:
        out.print("\n[green]nothing ails it[/] that these rows would show")


@commands.command("train-dqn")
def train_dqn(
    scenario: Annotated[str, typer.Argument(help="A single-player scenario.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder; the same command goes on.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Environment steps in all.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of weights, exploration and starts.")] = 0,
) -> None:
    """Train the DQN baseline on a scenario's training starts (stable-baselines3)."""
    from msgrpo.games import get_scenario

    get_scenario(scenario)  # a wrong name is told before the seconds in which torch is loaded
    with needs("msgrpo train-dqn", "dqn"):
        from msgrpo.train import dqn

    with _going_on():
        dqn.train(scenario, out_dir, steps=steps, seed=seed, say=say)


@commands.command()
def lab(
    study: Annotated[Path, typer.Argument(help="A study: a TOML file with arms, seeds and settings.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Its folder; default: runs/lab/NAME.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
    as_json: Json = False,
) -> None:
    """Run a study: train every arm with every seed, then compare them. The same command continues after a stop."""
    from rich.table import Table
    from rich.text import Text

    options = [*(("--out", str(out_dir)) if out_dir else ()), *(("--workers", str(workers)) if workers != 2 else ())]
    with needs("msgrpo lab", "train"):  # some choices load torch
        from msgrpo.train import lab as laboratory
        from msgrpo.train import lab_report

        planned = laboratory.load_study(study, [*options, *(("--json",) if as_json else ())])
    folder = out_dir or Path("runs/lab") / study.stem
    with _going_on():
        report = laboratory.run(planned, folder, workers, say if not as_json else _silent)
    if as_json:
        print_json(report)
        return
    title, caption = Text(report["study"]["question"]), Text(lab_report.caption(report))
    table = Table(title=title, title_justify="left", caption=caption)
    for column in lab_report.COLUMNS:
        table.add_column(column)
    for line in lab_report.lines(report):
        table.add_row(*line)
    print_table(table)


@contextmanager
def _going_on() -> Iterator[None]:
    """SIGTERM ends what is within as Ctrl-C does, and a person is told how it goes on."""
    with ending_as_interrupt():
        try:
            yield
        except KeyboardInterrupt:
            say("stopped; the same command goes on")
            raise


def _silent(text: str) -> None:
    """For machines."""


@nano.command("build")
def nano_build(
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the model and its tokenizer.")] = Path(
        "runs/nano"
    ),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of text, weights and batches.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: 6000.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half the steps: it reads worse.")] = False,
    scenarios: Annotated[
        list[str] | None, typer.Option("--scenario", help="What it reads of; may repeat. Default: every scenario.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the embedded model again from scratch (about an hour). The same command continues after a stop."""
    from msgrpo.games import get_scenario

    for name in scenarios or ():  # a wrong name is told before the seconds in which torch is loaded
        get_scenario(name)
    with needs("msgrpo nano build", "train"):
        from msgrpo.train.nano.build import QUICK, STEPS, build
    from rich.progress import Progress

    steps = steps or (QUICK if quick else STEPS)
    with _going_on(), Progress(console=err, disable=as_json) as progress:
        task = progress.add_task("generating text", total=steps)

        def show(step: int, total: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"loss {loss:.3f}")

        facts = build(out_dir, seed=seed, steps=steps, scenarios=scenarios or (), progress=show)
    if as_json:
        print_json(facts | {"out": str(out_dir)})
    else:
        print_line(
            f"{facts['parameters']:,} parameters, loss {facts['loss']}, {facts['minutes']} minutes → {out_dir}"
        )


@commands.command()
def teach(
    scenario: Annotated[str, typer.Argument(help="A scenario, one of your own too: my_game.py:scenario.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the taught base; the same command goes on.")],
    base: Annotated[str, typer.Option(help="nano, a folder, a GGUF file, or a hub name.")] = "nano",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of play and batches.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: 250.")] = None,
    prompt: HowAsked = None,
    chat: Chat = None,
    source: Annotated[
        str, typer.Option("--from", help="play: a bad player's answers; own: its own that hold a legal action.")
    ] = "play",
    words: Annotated[
        bool, typer.Option(" /--no-words", help="Answers are nothing but actions.", show_default=False)
    ] = True,
    as_json: Json = False,
) -> None:
    """Fine-tune a base on a bad player's answers in a game, to learn their form. The result is a base for `train`."""
    from msgrpo.games import get_scenario
    from msgrpo.models.asked import taught_as
    from msgrpo.prompt import as_given

    if source not in ("play", "own"):
        raise UsageError(f"--from {source[:80]!r} is not play or own")
    if source == "own" and not words:
        raise UsageError("--no-words is for a bad player's answers, and --from own takes the base's own")
    game, asked = get_scenario(scenario), as_given(prompt, chat)
    with needs("msgrpo teach", "train"):
        from msgrpo.train.display import teaching
        from msgrpo.train.nano.teach import STEPS
        from msgrpo.train.nano.teach import teach as run

    if source == "own" and not as_json:
        say("the base plays before it learns; of a large one that takes minutes")
    taught = taught_as(base) if prompt is None and chat is None else None
    if taught is not None and not as_json:
        say(f"asked with {taught.said}, as its base was when it was taught")
    with _going_on(), teaching(err, silent=as_json) as progress:
        facts = run(
            game,
            out_dir,
            base=base,
            seed=seed,
            steps=steps or STEPS,
            **asked,
            answers="own" if source == "own" else "words" if words else "actions",
            progress=progress,
        )
    if as_json:
        print_json(facts | {"out": str(out_dir)})
        return
    best = facts["best_actions"]
    share = "" if best is None else f", {best:.0%} of the actions that it saw are best ones"
    print_line(f"loss {facts['loss']:.3f}, {facts['rows']:,} rows{share}, {facts['seconds']} s → {out_dir}")
    evaluation = ["eval", f"base:{out_dir}", "--scenario", scenario]
    training = ["train", scenario, "--base", str(out_dir)]
    say(f"what it plays like: msgrpo {shlex.join(evaluation)}")
    say(f"train it: msgrpo {shlex.join(training)}")

"""`msgrpo train`, `msgrpo train-dqn`, `msgrpo teach`, `msgrpo lab` and `msgrpo nano build`."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msgrpo.errors import UsageError
from msgrpo.extras import needs
from msgrpo.output import Chat, HowAsked, Json, err, out, print_json, say
from msgrpo.signals import ending_as_interrupt
from msgrpo.text import counted

if TYPE_CHECKING:
    from msgrpo.train.config import TrainConfig

commands = typer.Typer()
nano = typer.Typer(help="The embedded model.", no_args_is_help=True)


@commands.command()
def train(
    scenario: Annotated[
        str | None, typer.Argument(help="Scenario to train on (see `msgrpo games`); several with commas: a mixture.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="nano, a folder, a GGUF file, or a hub name.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run folder; default: runs/SCENARIO.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="nano, small, small-gpu or paper; default: by the base and the device.")
    ] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="JSON file with settings.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value, any setting; repeatable. Some take more: 'evaluation=200(every=15, film=3)'."
        ),
    ] = None,
    rollouts: Annotated[
        str | None,
        typer.Option(help="What plays: hf (this process), vllm (a child), or servers(at=URL URL, adapters=DIR)."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="What computes: local, or tinker(max_cost=20), a service: see TINKER_BASE_URL."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run would cost at that service, and end.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--settings", help="List every setting, as this run would have it, and end.")
    ] = False,
    log: Annotated[list[str] | None, typer.Option(help="wandb or trackio, beside TensorBoard; repeatable.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on with the run in --out, by its own settings; starts it where there is none.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster; auto: the one here, or a new one."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Watch it learn, in the terminal app.")] = False,
    as_json: Json = False,
) -> None:
    """Train a LoRA adapter with MS-GRPO. Without arguments: nano on frozen-lake, minutes on two CPU cores."""
    if watch and sys.stdout.isatty():  # torch alone takes seconds to load
        say("loading what the training needs; the app opens when it has begun")
    with needs("msgrpo train", "train"):
        from msgrpo.models.asked import taught_as
        from msgrpo.models.lora import ADAPTER_WEIGHTS
        from msgrpo.models.paths import NANO
        from msgrpo.train.beside import train_and_watch
        from msgrpo.train.config import make_config, settings_given
        from msgrpo.train.display import closing_line, reporter
        from msgrpo.train.presets import preset_for
        from msgrpo.train.ranks import launched_as
        from msgrpo.train.run_folder import check_folder, config_of, resume_command, writing
        from msgrpo.train.sinks import check_logs

    given: dict[str, Any] = {"scenario": scenario, "base": base, "steps": steps, "seed": seed, "rollouts": rollouts}
    given |= {"backend": backend}
    check_logs(log or ())

    def configured(held: TrainConfig | None) -> TrainConfig:
        return make_config(preset, file=config_file, settings=settings or (), given=given, held=held)

    folder = out_dir or _free_folder(Path("runs") / _folder_for(configured(None).scenario), resume)
    said = settings_given(file=config_file, settings=settings or (), given=given)
    held = config_of(folder, said) if resume else None
    if resume and held is None and not (scenario or config_file):
        fix = f"begin one: msgrpo train frozen-lake --out {folder}"
        raise UsageError(f"{folder} holds no run to go on with", fix=fix)
    config = configured(held)
    if show:
        _show_settings(config, as_json)
        return
    if dry_run:
        _show_cost(config, as_json)
        return
    if ray is None and (config.servers or config.trainers != "1"):
        raise UsageError(
            f"rollouts={config.rollouts} and trainers={config.trainers} are started on a Ray cluster",
            fix="--ray auto; on one machine without Ray: torchrun --nproc-per-node 2 -m msgrpo.cli train …",
        )
    first = launched_as() == 0
    if first:  # what loads models takes seconds more to import
        with writing(folder):
            check_folder(folder, config, resume)
    if watch:
        arguments = [argument for argument in sys.argv[1:] if argument != "--watch"]
        raise typer.Exit(train_and_watch([*arguments, *(() if out_dir else ("--out", str(folder)))], folder))
    if ray is None:  # on a cluster the ranks load it
        with needs("msgrpo train", "train"):
            from msgrpo.train.loop import train as run
    with reporter(err, config, silent=as_json or not first) as report:
        report.note(f"{config.base} on {config.scenario}, {counted(config.steps, 'update')} → {folder}")
        if held is None and preset is None and config.base != NANO and not config_file:
            report.note(
                f"settings of the preset {preset_for(config.base)}, by the base's size; --preset names another"
            )
        taught = taught_as(config.base) if held is None else None
        if taught is not None and (taught.prompt, taught.chat) == (config.prompt, config.chat):
            report.note(f"asked with {taught.said}, as its base was when it was taught")
        try:
            if ray is not None:
                with needs("msgrpo train --ray", "ray"):
                    from msgrpo.train.cluster import train_on_ray
                summary = train_on_ray(config, folder, ray, resume=resume, report=report, logs=log or ())
            else:
                summary = run(config, folder, resume=resume, report=report, logs=log or ())
        except KeyboardInterrupt:
            report.note(f"stopped; go on with: {resume_command(folder, ray)}")
            raise
    if not first:
        return
    if as_json:
        print_json(summary | {"out": str(folder)})
        return
    out.print(closing_line(summary), markup=False, highlight=False, soft_wrap=True)
    what = "adapter, curve.png" if (folder / ADAPTER_WEIGHTS).is_file() else "curve.png"
    say(f"{what} and transcripts: {folder}")


def _show_settings(config: TrainConfig, as_json: bool) -> None:
    """`--settings`. Nothing is trained."""
    from msgrpo.train.settings import settings_of, settings_table

    if as_json:
        print_json([asdict(setting) for setting in settings_of(config)])
    else:
        out.print(settings_table(config))
        say(
            "change one with --set: --set steps=20 --set 'credit=to-go(gamma=0.6)'; what each does: docs/algorithm.md"
        )
        say("[P]: as in the paper, arXiv 2508.10839")


def _show_cost(config: TrainConfig, as_json: bool) -> None:
    """`--dry-run`: tokens, turns and dollars of a run at a service. Nothing is sent."""
    from msgrpo.models.loading import local_tokenizer
    from msgrpo.train.tinker.cost import price_of
    from msgrpo.train.tinker.estimate import estimate, lines

    if config.service is None:
        raise UsageError(
            "--dry-run says what a run costs at a service; a run on this machine says its time and memory after its "
            "first update",
            fix="with --backend tinker, or without --dry-run",
        )
    price = price_of(config)
    expected = estimate(config, local_tokenizer(config.base))
    if as_json:
        print_json(asdict(expected) | {"usd": price.of(expected.tokens), "usd_per_million": asdict(price)})
        return
    for line in lines(config, expected, price):
        out.print(line, highlight=False, soft_wrap=True, markup=False)


def _folder_for(scenario: str) -> str:
    """A folder's name for what is played: a mixture has commas, a scenario from outside a path."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", scenario.replace(",", "+").replace(".py:", "-")).strip("_.")


def _free_folder(wanted: Path, resume: bool) -> Path:
    """`wanted`, or wanted-2, wanted-3, … if it is taken and not to be resumed."""
    candidates = (wanted.with_name(f"{wanted.name}-{n}") if n > 1 else wanted for n in itertools.count(1))
    return wanted if resume else next(folder for folder in candidates if not folder.exists())


def show_examination(run: Path, as_json: bool) -> None:
    """`msgrpo doctor RUN`: what ails it, what to change, and the curve of a healthy run beside its own."""
    from rich.markup import escape
    from rich.table import Table

    from msgrpo.train.doctor import examine, table

    exam = examine(run)
    if as_json:
        print_json(exam.as_data())
        return
    state = " (goes on)" if exam.goes_on else ""
    out.print(
        f"{exam.base} on {exam.scenario}, {exam.updates} of {exam.planned} updates{state}; {exam.verdict}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for number, finding in enumerate(exam.findings):
        colour = "red" if number == 0 else "yellow"
        out.print(f"\n[bold {colour}]{escape(finding.cause)}[/]: {escape(finding.evidence)}.", highlight=False)
        out.print(f"  {finding.change}", markup=False, highlight=False)
    if not exam.findings:
        out.print("\n[green]nothing ails it[/] that these rows would show")
    if exam.failures and exam.answer is not None:
        counts = ", ".join(f"{count} {name}" for name, count in exam.failures.items())
        out.print(f"\nanswers without a legal action in the last update that was kept: {counts}; one of them:")
        out.print(f"  {exam.answer!r}", markup=False, highlight=False)
    shown = Table(title=f"\n{exam.score} on the validation starts", title_justify="left", box=None, pad_edge=False)
    for column in ("update", "this run", *(["a healthy run"] if exam.healthy else [])):
        shown.add_column(column, justify="right")
    for row in table(exam):
        shown.add_row(row["update"], row["this run"], *([row["healthy"]] if exam.healthy else []))
    out.print(shown)
    if exam.healthy is None:
        say(f"no healthy run of {exam.scenario} with a base of this size comes with msgrpo")
    else:
        settings = exam.healthy.settings or "the defaults"
        say(f"the healthy run: {exam.healthy.base} on {exam.healthy.scenario}, {settings}")


@commands.command("train-dqn")
def train_dqn(
    scenario: Annotated[str, typer.Argument(help="A single-player scenario.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder; the same command goes on.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Environment steps in all.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of weights, exploration and starts.")] = 0,
) -> None:
    """Train the DQN baseline on a scenario's training starts (stable-baselines3)."""
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
    """Run a study: every arm with every seed, then a table, curves, paired comparisons. The same command goes on."""
    with needs("msgrpo lab", "train"):
        from msgrpo.train import lab as laboratory
        from msgrpo.train import lab_report
    from rich.table import Table
    from rich.text import Text

    planned, folder = laboratory.load_study(study), out_dir or Path("runs/lab") / study.stem
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
    out.print(table)


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
    seed: Annotated[int, typer.Option(help="Seed of text, weights and batches.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: 6000.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half the steps: it reads worse.")] = False,
    scenarios: Annotated[
        list[str] | None, typer.Option("--scenario", help="What it reads of; may repeat. Default: every scenario.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the embedded model again from nothing (about an hour). The same command goes on after a stop."""
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
        built = f"{facts['parameters']:,} parameters, loss {facts['loss']}, {facts['minutes']} minutes → {out_dir}"
        out.print(built, markup=False)


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
    """Teach a base the form of the answers in a game, from bad play. The result is a base for `train`."""
    with needs("msgrpo teach", "train"):
        from msgrpo.models.asked import taught_as
        from msgrpo.train.nano.teach import STEPS
        from msgrpo.train.nano.teach import teach as run

    from msgrpo.games import get_scenario
    from msgrpo.prompt import as_given
    from msgrpo.train.display import teaching

    if source not in ("play", "own"):
        raise UsageError(f"--from {source[:80]!r} is not play or own")
    if source == "own" and not words:
        raise UsageError("--no-words is for a bad player's answers, and --from own takes the base's own")
    if source == "own" and not as_json:
        say("the base plays before it learns; of a large one that takes minutes")
    taught = taught_as(base) if prompt is None and chat is None else None
    if taught is not None and not as_json:
        say(f"asked with {taught.said}, as its base was when it was taught")
    with _going_on(), teaching(err, silent=as_json) as progress:
        facts = run(
            get_scenario(scenario),
            out_dir,
            base=base,
            seed=seed,
            steps=steps or STEPS,
            **as_given(prompt, chat),
            answers="own" if source == "own" else "words" if words else "actions",
            progress=progress,
        )
    if as_json:
        print_json(facts | {"out": str(out_dir)})
        return
    best = facts["best_actions"]
    share = "" if best is None else f", {best:.0%} of the actions that it saw are best ones"
    out.print(
        f"loss {facts['loss']:.3f}, {facts['rows']:,} rows{share}, {facts['seconds']} s → {out_dir}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    evaluation = ["eval", f"base:{out_dir}", "--scenario", scenario]
    training = ["train", scenario, "--base", str(out_dir)]
    say(f"what it plays like: msgrpo {shlex.join(evaluation)}")
    say(f"train it: msgrpo {shlex.join(training)}")

"""`msgrpo train`: options become settings and a folder, then a run; and what is said of it."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from msgrpo.errors import UsageError
from msgrpo.extras import needs
from msgrpo.files import is_file
from msgrpo.games import SCENARIOS
from msgrpo.models.asked import taught_as
from msgrpo.models.lora import ADAPTER_WEIGHTS
from msgrpo.models.paths import NANO
from msgrpo.output import err, print_json, print_line, print_table, say
from msgrpo.run_log import CONFIG, goes_on
from msgrpo.text import counted
from msgrpo.train.beside import train_and_watch
from msgrpo.train.config import TrainConfig, make_config, settings_given
from msgrpo.train.display import closing_line, reporter
from msgrpo.train.launched import launched
from msgrpo.train.options import Given
from msgrpo.train.presets import preset_for
from msgrpo.train.run_folder import check_folder, config_of, how_to_go_on, is_free, resume_command, writing
from msgrpo.train.settings import settings_of, settings_table
from msgrpo.train.sinks import Reporter, check_logs


@dataclass(frozen=True)
class Plan:
    """What is trained, and where; `goes_on` of a run that has begun."""

    config: TrainConfig
    folder: Path
    goes_on: bool


def run(given: Given) -> None:
    """Train, or show what a run would be."""
    check_logs(given.log or ())
    with needs("msgrpo train", "train"):  # some choices, and the list of all, load torch
        plan = planned(given)
        if given.show:
            _show_settings(plan.config, given.as_json)
            return
    if given.dry_run:
        _show_cost(plan.config, given.as_json)
        return
    _check_cluster(plan.config, given)
    first = launched("RANK", 0) == 0
    if first:  # what loads models takes seconds more to import
        with writing(plan.folder, given.ray, given.log or ()):
            check_folder(plan.folder, plan.config, given.resume, given.ray, given.log or ())
    if given.watch:
        arguments = [argument for argument in sys.argv[1:] if argument != "--watch"]
        where = () if given.out_dir else ("--out", str(plan.folder))
        raise typer.Exit(train_and_watch([*arguments, *where], plan.folder))
    summary = _train(plan, given, silent=given.as_json or not first)
    if first:
        _tell(summary, plan.folder, given.as_json)


def planned(given: Given) -> Plan:
    """The settings and the folder; with `--resume` those of the run that goes on."""
    _check_no_folder(given)
    settings = given.settings or ()
    by_name = {name: getattr(given, name) for name in ("scenario", "base", "steps", "seed", "rollouts", "backend")}

    def configured(held: TrainConfig | None) -> TrainConfig:
        return make_config(given.preset, file=given.config_file, settings=settings, given=by_name, held=held)

    folder = given.out_dir or _free_folder(Path("runs") / _folder_for(configured(None).scenario), given.resume)
    said = settings_given(file=given.config_file, settings=settings, given=by_name)
    held = config_of(folder, said, given.ray, given.log or ()) if given.resume else None
    if given.resume and held is None and not (given.scenario or given.config_file):
        fix = f"begin one: msgrpo train frozen-lake --out {shlex.quote(str(folder))}"
        raise UsageError(f"{folder} holds no run to go on with", fix=fix)
    return Plan(configured(held), folder, goes_on=held is not None)


def _check_no_folder(given: Given) -> None:
    """Raise UsageError for a run's folder in the place of the scenario."""
    named = given.scenario
    if given.resume and named and named not in SCENARIOS and is_file(Path(named) / CONFIG):
        fix = f"go on with: {resume_command(Path(named), given.ray, given.log or ())}"
        raise UsageError(f"{named} is a run's folder, and no scenario", fix=fix)


def _check_cluster(config: TrainConfig, given: Given) -> None:
    if given.ray is None and (config.servers or config.trainers != "1"):
        raise UsageError(
            f"rollouts={config.rollouts} and trainers={config.trainers} are started on a Ray cluster",
            fix="--ray auto; on one machine without Ray: torchrun --nproc-per-node 2 -m msgrpo.cli train …",
        )


def _train(plan: Plan, given: Given, *, silent: bool) -> dict[str, Any]:
    """Train here, or on a cluster; returns the run's summary."""
    config, logs = plan.config, given.log or ()
    if given.ray is None:  # on a cluster the ranks load it
        with needs("msgrpo train", "train"):
            from msgrpo.train.loop import train
    with reporter(err, config, silent=silent) as report:
        _announce(plan, given, report)
        try:
            if given.ray is None:
                return train(config, plan.folder, resume=given.resume, report=report, logs=logs)
            with needs("msgrpo train --ray", "ray"):
                from msgrpo.train.cluster import train_on_ray
            return train_on_ray(config, plan.folder, given.ray, resume=given.resume, report=report, logs=logs)
        except KeyboardInterrupt:
            report.note(f"stopped; {how_to_go_on(plan.folder, given.ray, logs)}")
            raise


def _announce(plan: Plan, given: Given, report: Reporter) -> None:
    """What is trained; and which settings were chosen for a person who did not name them."""
    config = plan.config
    report.note(f"{config.base} on {config.scenario}, {counted(config.steps, 'update')} → {plan.folder}")
    if plan.goes_on:
        return
    if given.preset is None and config.base != NANO and not given.config_file:
        report.note(f"settings of the preset {preset_for(config.base)}, by the base's size; --preset names another")
    taught = taught_as(config.base)
    if taught is not None and (taught.prompt, taught.chat) == (config.prompt, config.chat):
        report.note(f"asked with {taught.said}, as its base was when it was taught")


def _tell(summary: dict[str, Any], folder: Path, as_json: bool) -> None:
    """Say what the run has changed, and where its files are."""
    if as_json:
        print_json(summary | {"out": str(folder)})
        return
    print_line(closing_line(summary))
    what = "adapter, curve.png" if (folder / ADAPTER_WEIGHTS).is_file() else "curve.png"
    say(f"{what} and transcripts: {folder}")


def _show_settings(config: TrainConfig, as_json: bool) -> None:
    """`--settings`. Nothing is trained."""
    if as_json:
        print_json([asdict(setting) for setting in settings_of(config)])
    else:
        print_table(settings_table(config))
        say(
            "change one with --set: --set steps=20 --set 'credit=to-go(gamma=0.6)'; what each does: docs/algorithm.md"
        )
        say("[P]: as in the paper, arXiv 2508.10839")


def _show_cost(config: TrainConfig, as_json: bool) -> None:
    """`--dry-run`: tokens, turns and dollars of a run at a service. Nothing is sent."""
    with needs("msgrpo train --dry-run", "train"):
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
        print_line(line)


def _folder_for(scenario: str) -> str:
    """A folder's name for what is played: a mixture has commas, a scenario from outside a path."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", scenario.replace(",", "+").replace(".py:", "-")).strip("_.")


def _free_folder(wanted: Path, resume: bool) -> Path:
    """`wanted`, or wanted-2, wanted-3, … if it is taken and not to be resumed."""
    candidates = (wanted.with_name(f"{wanted.name}-{n}") if n > 1 else wanted for n in itertools.count(1))
    return wanted if resume else next(folder for folder in candidates if is_free(folder) and not goes_on(folder))

"""The options of `msgrpo train`, each named once: they are the command's and the fields of what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from msgrpo.output import Json


@dataclass(frozen=True)
class Given:
    """What a person gave, unchecked."""

    scenario: Annotated[
        str | None, typer.Argument(help="Scenario to train on (see `msgrpo games`); several with commas: a mixture.")
    ] = None
    base: Annotated[str | None, typer.Option(help="nano, a folder, a GGUF file, or a hub name.")] = None
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run folder; default: runs/SCENARIO.")] = None
    steps: Annotated[int | None, typer.Option(help="Updates.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None
    preset: Annotated[
        str | None, typer.Option(help="nano, small, small-gpu or paper; default: by the base and the device.")
    ] = None
    config_file: Annotated[Path | None, typer.Option("--config", help="JSON file with settings.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value, any setting; repeatable. Some take more: 'evaluation=200(every=15, film=3)'."
        ),
    ] = None
    rollouts: Annotated[
        str | None,
        typer.Option(help="What plays: hf (this process), vllm (a child), or servers(at=URL URL, adapters=DIR)."),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(help="What computes: local, or tinker(max_cost=20), a service: see TINKER_BASE_URL."),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run would cost at that service, and end.")
    ] = False
    show: Annotated[
        bool, typer.Option("--settings", help="List every setting, as this run would have it, and end.")
    ] = False
    log: Annotated[list[str] | None, typer.Option(help="wandb or trackio, beside TensorBoard; repeatable.")] = None
    resume: Annotated[
        bool, typer.Option(help="Go on with the run in --out, by its own settings; starts it where there is none.")
    ] = False
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster; auto: the one here, or a new one."),
    ] = None
    watch: Annotated[bool, typer.Option("--watch", help="Watch it learn, in the terminal app.")] = False
    as_json: Json = False

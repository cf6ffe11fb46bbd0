"""`msgrpo serve`, `msgrpo adapters` and `msgrpo env`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from msgrpo.errors import UsageError
from msgrpo.output import Json, Name, out, print_json, print_table, say
from msgrpo.text import printable

commands = typer.Typer()
env = typer.Typer(help="Our games for other people's trainers.", no_args_is_help=True)


@commands.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    adapter: Annotated[
        list[str] | None, typer.Option(help="A run's folder, or NAME=FOLDER; may be given several times.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="nano, a folder or a hub name; default: the adapter's own.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The base's model name; default: its own.")] = None,
    host: Annotated[
        str, typer.Option(help="Another than loopback has a key: MSGRPO_API_KEY, or a new one.")
    ] = "127.0.0.1",
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
    from msgrpo.serve import terminal
    from msgrpo.serve.vllm_command import Request

    key = os.environ.get("MSGRPO_API_KEY")
    if status:
        served = terminal.status(host, port, key)
        if as_json:
            print_json(served)
        else:
            for model, parent in served.items():
                typer.echo(printable(model + (f"  (adapter of {parent})" if parent else "")))
        return
    asked = Request(
        name=name,
        host=host,
        port=port,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        runtime_adapters=allow_runtime_adapters,
        extra=tuple(context.args),
    )
    request = terminal.plan(adapter or [], base, asked)
    if dry_run:
        typer.echo(terminal.dry_run(request, key))
    elif not terminal.serve(request, key, out):
        raise typer.Exit(130)


@commands.command()
def adapters(
    folder: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("runs"), as_json: Json = False
) -> None:
    """List trained adapters: base, scenario, result, and whether each can be served."""
    from dataclasses import asdict

    from msgrpo.serve.adapters import list_runs

    runs = list_runs(folder)
    if as_json:
        print_json([asdict(run) for run in runs])
        return
    if not runs:
        out.print(
            f"no adapters in {folder}; train one: msgrpo train --out {shlex.quote(str(folder / 'fl'))}", markup=False
        )
        return
    table = Table("run", "base", "scenario", "result", "problem")
    for run in runs:
        cells = (run.folder, run.base, run.scenario, run.result, run.problem)
        table.add_row(*(Name(printable(text or "")) for text in cells))
    print_table(table)


@env.callback()
def about() -> None:
    """Our games for other people's trainers."""


@env.command("serve")
def serve_games(
    scenarios: Annotated[
        list[str] | None, typer.Argument(help="Scenarios, the usual one first; default: all of msgrpo's own.")
    ] = None,
    host: Annotated[str, typer.Option(help="Another than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Clients at once, at most; default: 1000, if so many files may be open.")
    ] = None,
    idle_s: Annotated[float, typer.Option(min=1, help="Seconds without a message until one is forgotten.")] = 900,
    web: Annotated[bool, typer.Option("--web", help="Also a page to play on, at /web.")] = False,
) -> None:
    """Serve games by the OpenEnv protocol, which TRL, SkyRL, verifiers and others play."""
    from msgrpo.extras import needs
    from msgrpo.games import SCENARIOS
    from msgrpo.loopback import bracketed, is_loopback
    from msgrpo.serve.env_session import Catalogue
    from msgrpo.serve.preflight import check_port
    from msgrpo.serve.terminal import check_key
    from msgrpo.serve.vllm_command import KEY_VARIABLE

    key = os.environ.get(KEY_VARIABLE)
    check_key(key)
    if not key and not is_loopback(host):
        raise UsageError(f"{host} can be reached by others: it needs a key", fix=f"set {KEY_VARIABLE}")
    with needs("msgrpo env serve", "openenv"):
        from msgrpo.serve import env_server
    check_port(host, port)
    catalogue = Catalogue(scenarios or list(SCENARIOS))
    most = sessions or env_server.usual_sessions()
    app = env_server.make_server(catalogue, sessions=most, idle_s=idle_s, key=key, web=web, local=not key)
    say(f"{', '.join(catalogue.scenarios)} at http://{bracketed(host)}:{port}{'/web' if web else ''}; Ctrl-C ends it")
    if sessions is None and most < env_server.SESSIONS:
        say(f"{most} clients at once, at most: this process may have no more files and connections (ulimit -n)")
    env_server.run(app, host, port)

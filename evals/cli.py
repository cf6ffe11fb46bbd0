"""`msgrpo eval`, `leaderboard` and `verify`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import from_json

from msgrpo.errors import RecordError, UsageError
from msgrpo.evals.options import Given
from msgrpo.output import Chat, Json, print_json, print_line, print_table, say, takes
from msgrpo.text import counted, interval_text

commands = typer.Typer()
AGAIN = "start the same command again"


@commands.command("eval")
@takes(Given)
def evaluate(given: Given) -> None:
    """Play the same episodes with every agent and print the leaderboard. The same command continues after a stop.

    An endpoint's key comes from MSGRPO_API_KEY or OPENAI_API_KEY.

    Exits with 2 where an agent has no result in a scenario, or against an opponent.
    """
    from msgrpo.evals import command

    options = command.Options(**vars(given), line=command.line_of(sys.argv[1:]))
    if options.is_match():
        options.check_match()
        scenario, results, rated, without_result = command.run_match(options)
        _print_match(scenario, results, rated, options.out, options.as_json)
        if without_result:
            raise RecordError(without_result, fix=f"{AGAIN}: what is finished stays")
        return
    board = command.run(options)
    _print_board(board, options.as_json)
    say(f"tables and replays: {options.out / 'leaderboard.html'}")
    if board.fatal:
        raise RecordError(board.fatal, fix=None if AGAIN in board.fatal else f"{AGAIN}: what is finished stays")
    if board.silent:
        raise RecordError(
            f"no result: {', '.join(board.silent)}; the notes say why",
            fix=f"{AGAIN}, with --retry-failed or a larger budget where the notes name it: what is finished stays",
        )


@commands.command()
def leaderboard(
    folders: Annotated[list[Path], typer.Argument(help="Folders written by msgrpo eval.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Write the tables here.")] = None,
    mix: Annotated[bool, typer.Option("--mix", help="Merge though prompts, settings or versions differ.")] = False,
    by: Annotated[str | None, typer.Option(help="prompt: prompts may differ, and stand in a column.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Simulate every episode again before it counts.")] = False,
    as_json: Json = False,
) -> None:
    """Merge the results of several evaluations into one table."""
    from msgrpo.evals import command
    from msgrpo.evals.record import check_games

    if by not in (None, "prompt"):
        raise UsageError(f"--by {by!r}: only prompts can stand in a column", fix="--by prompt")
    check_games(folders, shlex.join(sys.argv[1:]))
    _print_board(command.merge(folders, out_dir, mix=mix, by_prompt=by == "prompt", check=verify), as_json)


def _print_board(board: Any, as_json: bool) -> None:
    from msgrpo.evals import tables

    if as_json:
        print_json(board.model_dump(mode="json"))
        return
    for part in tables.terminal(board):
        print_table(part)


@commands.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Records (.jsonl), or folders of them.")],
    ask: Annotated[int, typer.Option(min=0, help="Turns of each record about which --agent is asked again.")] = 0,
    agent: Annotated[str | None, typer.Option(help="Who is asked: endpoint:URL#model, adapter:DIR, nano …")] = None,
    chat: Chat = None,
) -> None:
    """Simulate every recorded episode again, without any model; the first difference is an error.

    The moves of random and optimal are computed again, too. What cannot be checked is named.

    Exits with 1 where something that was asked for is missing, or is there twice.
    """
    import asyncio

    from msgrpo.agent import Agent
    from msgrpo.evals.progress import LOG_EVERY_S, trouble_of
    from msgrpo.evals.record import check_games, records_in
    from msgrpo.evals.verify import ask_again, verify, without_record
    from msgrpo.prompt import as_given
    from msgrpo.specs import make_agent

    if bool(ask) != (agent is not None):
        raise UsageError("--ask and --agent belong together: a record's own agent is never asked", fix="--agent nano")
    if chat is not None and agent is None:
        raise UsageError("--chat is for the agent that is asked again", fix="--ask 20 --agent nano")
    check_games(files, shlex.join(sys.argv[1:]))
    complete = True
    for file in records_in(files):
        verified = verify(file)
        complete = complete and verified.is_complete
        print_line(f"{file}: {verified.summary}")
    for line in (line for folder in files if folder.is_dir() for line in without_record(folder)):
        complete = False
        print_line(line)
    if agent is not None:

        async def say_why(asked: Agent) -> None:
            """While an answer is waited for, how the request has failed before."""
            while True:
                await asyncio.sleep(LOG_EVERY_S)
                if trouble := trouble_of(asked):
                    say(f"{asked.spec}: {trouble}")

        async def ask_all(asked: Agent) -> None:
            turns, saying = 0, asyncio.create_task(say_why(asked))
            try:
                for file in records_in(files):
                    again = await ask_again(file, asked, ask)
                    turns += again.turns
                    print_line(f"{file}: {again.summary}")
            finally:
                saying.cancel()
                await asked.close()
            if not turns:
                raise RecordError(f"no record holds a turn that {asked.spec} could be asked about")

        asyncio.run(ask_all(make_agent(agent, chat=as_given(None, chat)["chat"])))
    if not complete:
        raise typer.Exit(1)


def _print_match(scenario: str, results: list[Any], rated: list[Any], folder: Path, as_json: bool) -> None:
    from msgrpo.evals import tables

    if as_json:
        print_json(from_json((folder / "match.json").read_bytes()))
        return
    print_table(tables.match_table(scenario, results))
    for rating in rated:
        print_line(f"{rating.agent}: {rating.elo:+.0f} Elo {interval_text(rating.low, rating.high, '+.0f')}")
    left_out = sum(pairing.failed for pairing in results)
    if left_out:
        say(f"{counted(left_out, 'start', 'is', 'are')} left out: a game has no result; the same command goes on")
        for pairing in filter(lambda pairing: pairing.failed, results):
            low, high = pairing.bounds
            names = f"{pairing.first} against {pairing.second}"
            say(f"  {names}: if they counted, the points would lie between {low:.3f} and {high:.3f}")
    say(f"records and match.json: {folder}")

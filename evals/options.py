"""The options of `msgrpo eval`, each named once: they are the command's and the fields of what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from msgrpo.evals.suites import MOST, MOST_COUNTED
from msgrpo.output import Chat, HowAsked, Json, MaxTokens
from msgrpo.text import ANSWER_TOKENS


@dataclass
class Given:
    """What a person gave, unchecked."""

    agents: Annotated[list[str], typer.Argument(help="Agents, like nano, adapter:runs/fl, optimal.")] = field(
        default_factory=list
    )
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI-compatible URL, ending in /v1.")] = None
    model: Annotated[str | None, typer.Option(help="The model's name at --endpoint.")] = None
    suite: Annotated[str | None, typer.Option(help="paper (the default), all, transfer or semantic.")] = None
    scenarios: Annotated[
        list[str], typer.Option("--scenario", help="A scenario in place of a suite; may repeat.")
    ] = field(default_factory=list)
    episodes: Annotated[
        int | None, typer.Option(min=1, max=MOST_COUNTED, help="Episodes a scenario; default: 200.")
    ] = None
    split: Annotated[
        Literal["val", "test"], typer.Option(help="Whose starts: val to choose settings, test for final figures.")
    ] = "test"
    quick: Annotated[bool, typer.Option("--quick", help="20 episodes a scenario.")] = False
    out: Annotated[Path, typer.Option(help="Records and tables; the same command goes on.")] = Path("runs/eval")
    concurrency: Annotated[int | None, typer.Option(min=1, help="Episodes at once; default: 64.")] = None
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0
    max_tokens: MaxTokens = ANSWER_TOKENS
    prompt: HowAsked = None
    chat: Chat = None
    repeats: Annotated[int, typer.Option(min=1, max=MOST["repeats"], help="Episodes from each start.")] = 1
    names: Annotated[list[str], typer.Option("--name", help="AGENT=NAME, for tables; may repeat.")] = field(
        default_factory=list
    )
    max_tokens_total: Annotated[
        int | None, typer.Option(min=1, help="Tokens of all records together; then no episode begins.")
    ] = None
    max_cost: Annotated[float | None, typer.Option(min=1e-9, help="The same in US$; needs --price.")] = None
    rate: Annotated[float | None, typer.Option(min=0.1, help="Requests a minute to the endpoint, at most.")] = None
    opponent: Annotated[
        str | None, typer.Option(help="Who sits opposite, in a game of two; default: all agents meet.")
    ] = None
    headers: Annotated[list[str], typer.Option("--header", help="NAME=VALUE for the endpoint; may repeat.")] = field(
        default_factory=list
    )
    body: Annotated[str | None, typer.Option(help="JSON merged into every request; null takes out.")] = None
    price: Annotated[str | None, typer.Option(help="US$ per million tokens at the endpoint: IN,OUT.")] = None
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds for one request; default: 600.")] = (
        None
    )
    retries: Annotated[
        int | None, typer.Option(min=0, help="Further tries of one request; default: 10, in four minutes.")
    ] = None
    max_failures: Annotated[
        int | None, typer.Option(min=0, help="Failed episodes that end the run; default: a quarter, at least 10.")
    ] = None
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Play again the episodes that were given up.")
    ] = False
    regret: Annotated[
        bool, typer.Option("--regret", help="Judge every move: what it lost against the best one. Slow in Snake.")
    ] = False
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Play on a Ray cluster; auto: the one here, or a new one.")
    ] = None
    as_json: Json = False

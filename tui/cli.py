"""`msgrpo play` and `msgrpo view`."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from msgrpo.output import Chat, HowAsked, MaxTokens, out, say
from msgrpo.text import ANSWER_TOKENS

commands = typer.Typer()


@commands.command()
def view(
    folder: Annotated[Path, typer.Argument(help="Records of an evaluation: a folder, or a file.")],
    only: Annotated[str, typer.Option(help="all, won, lost, mistakes, 'invalid answers' or 'broken off'.")] = "all",
    agent: Annotated[str, typer.Option(help="This agent's episodes only.")] = "",
    words: Annotated[str, typer.Option(help="Episodes in which an answer holds these words.")] = "",
    best: Annotated[bool, typer.Option("--best", help="The highest returns first, of each scenario.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write tables and episodes as one page in place of showing them.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="With --html: episodes of each agent and scenario.")] = 50,
    plain: Annotated[bool, typer.Option("--plain", help="Print the list as text, without the app.")] = False,
) -> None:
    """Read what agents did: a list of episodes to filter, search, watch and compare."""
    from msgrpo.agent import Sampling
    from msgrpo.specs import make_agent
    from msgrpo.tui import launch

    if html is not None:
        from msgrpo.evals.record import check_games

        check_games([folder], shlex.join(sys.argv[1:]))
        with launch.busy(out, f"reading {folder} and writing {html}"):
            launch.write_page(folder, html, episodes)
        out.print(f"{html}", highlight=False, markup=False, soft_wrap=True)
        return
    with launch.busy(out, f"reading {folder}"):
        records = launch.filtered(folder, only, agent, words, best)
    launch.browse(
        lambda spec: make_agent(spec, Sampling(), show_probabilities=True), records, plain=plain, console=out
    )


@commands.command()
def play(
    scenario: Annotated[
        str | None,
        typer.Argument(
            help="A scenario of `msgrpo games`; default: recorded games, from which enter leads to the start screen."
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="nano, nano:SCENARIO, random, optimal, human, adapter:DIR, base:DIR, dqn:DIR, endpoint:URL#model. "
            "Default: nano in the games of this package; in others optimal, or random. "
            "With --replay: who plays on when you leave a seat."
        ),
    ] = None,
    against: Annotated[str | None, typer.Option(help="The second player: a race, a comparison or a duel.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the start, the luck and the sampling.")] = 0,
    speed: Annotated[
        float | None, typer.Option(min=0.1, max=60, help="Steps a second; default: 4, and 2 in real time.")
    ] = None,
    step: Annotated[bool, typer.Option("--step", help="Stop before and after every answer.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Play in real time: the game does not wait for you.")] = False,
    best_of: Annotated[int, typer.Option(min=1, help="Games of a match between two; the seeds advance.")] = 1,
    replay: Annotated[Path | None, typer.Option(help="Show recorded episodes: a file, or a folder of them.")] = None,
    episode: Annotated[int | None, typer.Option(min=1, help="With --replay: the episode of this number.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Watch a training run: its folder. It may be going on, or be over.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write what the app shows when you leave: FILE.gif, .cast; of a run .svg.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print the episode as text, without the app.")] = False,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Of language models; 0 is greedy.")] = 1.0,
    max_tokens: MaxTokens = ANSWER_TOKENS,
    prompt: HowAsked = None,
    chat: Chat = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print the keys and the file that changes them.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve the app to a browser on this machine.")] = False,
    host: Annotated[str, typer.Option(help="With --web.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --web.")] = 8080,
    force: Annotated[
        bool, typer.Option("--force", help="With --web: listen on a host that is not loopback.")
    ] = False,
) -> None:
    """Watch, step through, take over, and play against an agent."""
    from msgrpo.agent import Sampling
    from msgrpo.prompt import as_given
    from msgrpo.specs import cut_short, make_agent
    from msgrpo.tui import browser, launch

    sampling, asked = Sampling(temperature=temperature, max_tokens=max_tokens), as_given(prompt, chat)
    options = [*(["--max-tokens", str(max_tokens)] if max_tokens != ANSWER_TOKENS else [])]
    options += [*(["--prompt", prompt] if prompt else []), *(["--chat", chat] if chat else [])]
    if keys:
        launch.print_keys(out)
    else:
        for sentence in cut_short(filter(None, (agent, against)), max_tokens):
            say(sentence)
        launch.start(
            lambda spec: make_agent(spec, sampling, show_probabilities=True, **asked),
            launch.setup(
                scenario,
                agent,
                against,
                seed,
                speed,
                step=step,
                live=live,
                temperature=temperature,
                shown=replay or run,
            ),
            replay=replay,
            episode=episode,
            run=run,
            plays_on=agent if scenario is None else None,
            options=options,
            games=best_of,
            plain=plain,
            record=record,
            console=out,
            serve=partial(browser.serve, sys.argv[1:], host, port, force=force) if web else None,
        )

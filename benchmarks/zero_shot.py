"""What language models do before any training: legal answers, score and tokens, for each prompt and scenario.

    python benchmarks/zero_shot.py base:smollm2.gguf --prompt none --prompt brief --result FILE.json
    python benchmarks/zero_shot.py base:smollm2.gguf --prompt brief --split test --episodes 200 --result FILE.json

`val` is for choosing a prompt, `test` for the one that was chosen. Each cell is written when it has been played, and
the same command goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import facts

from msgrpo.agent import Agent, Sampling
from msgrpo.episode import Episode, play_episode
from msgrpo.evals.stats import bootstrap_mean, wilson
from msgrpo.evals.suites import HeldOut, episode_seeds
from msgrpo.game import Scenario
from msgrpo.games import get_scenario
from msgrpo.prompt import make_template
from msgrpo.specs import make_agent


def play(agent: Agent, scenario: Scenario, episodes: int, split: HeldOut, at_once: int) -> list[Episode]:
    """The episodes, `at_once` of them in one batch: all that play together are answered together."""

    async def part(seeds: Sequence[tuple[int, int, int]]) -> list[Episode]:
        seats = dict.fromkeys(scenario.players, agent)
        return await asyncio.gather(
            *(
                play_episode(scenario, seats, start_seed=start, chance_seed=chance, sampling_seed=sampling)
                for start, chance, sampling in seeds
            )
        )

    seeds = list(episode_seeds(scenario, episodes, split))
    found = []
    for at in range(0, len(seeds), at_once):
        found += asyncio.run(part(seeds[at : at + at_once]))
    return found


def measured(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Score with its interval, and what the answers were like."""
    scores = [episode.score for episode in episodes]
    goal = episodes[0].success is not None
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "episodes": len(episodes),
        "score": sum(scores) / len(scores),
        "interval": wilson(round(sum(scores)), len(scores)) if goal else bootstrap_mean(scores, seed=0),
        "score_is": "success" if goal else "return",
        "scores": scores,
        "turns": len(turns),
        "legal": sum(turn.action is not None for turn in turns) / len(turns),
        "failures": Counter(str(turn.failure) for turn in turns if turn.failure is not None),
        "cut_off": sum(turn.finish_reason == "length" for turn in turns) / len(turns),
        "tokens": sum(turn.completion_tokens for turn in turns) / len(turns),
        "answers": [turn.answer for turn in turns[:3]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", help="base:FILE.gguf, base:DIR or adapter:DIR")
    parser.add_argument("--scenario", action="append", default=[], help="default: frozen-lake")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="none, brief, free, or a file; default: as it was trained or taught",
    )
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--split", choices=["val", "test"], default="val")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=64, help="episodes in one batch")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    held = json.loads(given.result.read_text()) if given.result.exists() else {"cells": {}}
    sampling = Sampling(max_tokens=given.max_tokens, temperature=given.temperature)
    for prompt in given.prompt or [None]:
        agent: Any = make_agent(given.agent, sampling, template=make_template(prompt) if prompt else None)
        template = agent.template
        held |= {"machine": facts(), "model": agent.settings()["weights"], "max_tokens": given.max_tokens}
        held["weights"] = "de-quantised from 4 bits" if ".gguf" in given.agent else "as in the folder"
        for name in given.scenario or ["frozen-lake"]:
            cell = f"{name} {template.name} {given.split} {given.episodes} temperature {given.temperature:g}"
            if cell in held["cells"]:
                continue
            began = time.perf_counter()
            scenario = get_scenario(name)
            episodes = play(agent, scenario, given.episodes, given.split, given.at_once)
            found = measured(episodes) | {"seconds": round(time.perf_counter() - began, 1), "template": template.hash}
            held["cells"][cell] = found
            given.result.write_text(json.dumps(held, indent=1) + "\n")
            low, high = found["interval"]
            print(
                f"{cell}: {found['score']:.3f} [{low:.3f}, {high:.3f}], legal {found['legal']:.3f}, "
                f"{found['tokens']:.1f} tokens, cut off {found['cut_off']:.2f}, {found['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

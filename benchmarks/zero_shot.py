"""What language models do before any training, with several prompts and games side by side, as one table in one file.

    python benchmarks/zero_shot.py base:smollm2.gguf --prompt none --prompt brief --result FILE.json
    python benchmarks/zero_shot.py base:smollm2.gguf --prompt brief --split test --episodes 200 --result FILE.json

It plays and counts as `msgrpo eval` does, once for each prompt. Each cell is written when it has been played, and the
same command goes on with those that are missing. `val` is for choosing a prompt, `test` for the one that was chosen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import facts

from msgrpo.agent import Agent, Sampling
from msgrpo.evals.plays import Play, load
from msgrpo.evals.rows import row_of
from msgrpo.evals.run import evaluate
from msgrpo.evals.suites import HeldOut
from msgrpo.games import get_scenario
from msgrpo.prompt import make_template
from msgrpo.specs import make_agent


def play(agent: Agent, scenario: str, episodes: int, split: HeldOut, at_once: int) -> Play:
    """The episodes of an evaluation whose records nobody keeps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        asyncio.run(evaluate([agent], [get_scenario(scenario)], episodes, out, concurrency=at_once, split=split))
        (played,), _ = load([out])
        return played


def measured(played: Play) -> dict[str, Any]:
    """Score with its interval, and what the answers were like."""
    row, turns = row_of(played), list(played.turns)
    goal = row.success_rate is not None
    return {
        "episodes": row.episodes,
        "score": row.success_rate if goal else row.return_mean,
        "interval": [row.success_low, row.success_high] if goal else [row.return_low, row.return_high],
        "score_is": "success" if goal else "return",
        "scores": [episode.score for episode in played.finished.values()],
        "turns": row.turns,
        "legal": sum(turn.action is not None for turn in turns) / row.turns,
        "failures": Counter(str(turn.failure) for turn in turns if turn.failure is not None),
        "cut_off": row.truncated / row.turns,
        "tokens": sum(turn.completion_tokens for turn in turns) / row.turns,
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
    parser.add_argument("--at-once", type=int, default=64, help="episodes in one batch")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    held = json.loads(given.result.read_text()) if given.result.exists() else {"cells": {}}
    sampling = Sampling(max_tokens=given.max_tokens)
    for prompt in given.prompt or [None]:
        agent: Any = make_agent(given.agent, sampling, template=make_template(prompt) if prompt else None)
        template = agent.template
        held |= {"machine": facts(), "model": agent.settings()["weights"], "max_tokens": given.max_tokens}
        held["weights"] = "de-quantised from 4 bits" if ".gguf" in given.agent else "as in the folder"
        for name in given.scenario or ["frozen-lake"]:
            cell = f"{name} {template.name} {given.split} {given.episodes} temperature {sampling.temperature:g}"
            if cell in held["cells"]:
                continue
            began = time.perf_counter()
            found = measured(play(agent, name, given.episodes, given.split, given.at_once))
            held["cells"][cell] = found | {
                "seconds": round(time.perf_counter() - began, 1),
                "template": template.hash,
            }
            given.result.write_text(json.dumps(held, indent=1) + "\n")
            low, high = found["interval"]
            print(
                f"{cell}: {found['score']:.3f} [{low:.3f}, {high:.3f}], legal {found['legal']:.3f}, "
                f"{found['tokens']:.1f} tokens, cut off {found['cut_off']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What would a model teach itself that is told the best action? The ceiling of self-distillation.

    PYTHONPATH=benchmarks python benchmarks/studies/hinted.py nano nano:frozen-lake \\
        --result benchmarks/results/hinted-nano.json
    PYTHONPATH=benchmarks python benchmarks/studies/hinted.py base:models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf \\
        --prompt benchmarks/prompts/lake-few-shot.toml --episodes 20 --max-tokens 16 \\
        --result benchmarks/results/hinted-qwen.json

Methods such as SDPO (arXiv 2601.20802) and OPSD (arXiv 2601.19897) take as teacher the model itself, which reads more
than the policy does. Such a teacher can be no better than what the model does when it reads that text. Here each
state that it reads is followed by one sentence that names an action: one of the reference player's best or, as a
control, a legal one that is not among them; or by nothing. *Followed* is the share of turns in which it takes the
action that was named (after nothing: the one that would have been named the best).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import facts
from zero_shot import measured, play

from msgrpo.agent import Agent, Decision, OnText, Sampling, View
from msgrpo.evals.stats import wilson
from msgrpo.game import stream
from msgrpo.prompt import make_template
from msgrpo.references import best_actions
from msgrpo.specs import make_agent

HINT = "The best action now is {}."
SAID = ("nothing", "the best", "another")


class Hinted:
    """An agent that reads one more sentence."""

    def __init__(self, agent: Agent, said: str) -> None:
        self._agent, self._said = agent, said
        self.spec = f"{agent.spec} told {said}"
        self.turns = self.followed = 0

    def settings(self) -> dict[str, Any]:
        return self._agent.settings() | {"told": self._said}

    def _named(self, view: View) -> Sequence[str]:
        best = best_actions(view.scenario, view.game, view.player)
        return [action for action in view.legal() if action not in best] if self._said == "another" else best

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        named = self._named(view)
        if not named:
            return await self._agent.act(view, on_text=on_text)
        hint = str(stream(view.seed, "hint").choice(list(named)))
        if self._said != "nothing":
            view = replace(view, observation=f"{view.observation}\n{HINT.format(hint)}")
        decision = await self._agent.act(view, on_text=on_text)
        self.turns += 1
        self.followed += decision.action == hint
        return decision

    async def close(self) -> None:
        await self._agent.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="+", help="nano, base:FILE.gguf, adapter:DIR, …")
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--prompt", help="none, brief, free, or a file; default: as it was trained or taught")
    parser.add_argument("--episodes", type=int, default=50, help="validation starts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    held = json.loads(given.result.read_text()) if given.result.exists() else {"cells": {}}
    held["machine"] = facts()
    template = make_template(given.prompt) if given.prompt else None
    for spec in given.agents:
        agent = None
        for said in SAID:
            name = f"{Path(spec).name} on {given.scenario}, told {said}"
            if name in held["cells"]:
                continue
            agent = agent or make_agent(spec, Sampling(max_tokens=given.max_tokens), template=template)
            hinted = Hinted(agent, said)
            found = measured(play(hinted, given.scenario, given.episodes, "val", 64))
            share, bounds = hinted.followed / hinted.turns, wilson(hinted.followed, hinted.turns)
            held["cells"][name] = found | {"followed": share, "followed_interval": bounds, "of": hinted.turns}
            given.result.write_text(json.dumps(held, indent=1) + "\n")
            print(name, f"{found['score']:.3f}", found["interval"], "followed", share, bounds, flush=True)


if __name__ == "__main__":
    main()

"""`msgrpo nano teach SCENARIO`: warm nano up for a game that it does not know, from play on that game.

A base whose answers are nearly all invalid has groups whose returns are all equal, and learns nothing. Here it reads
the game's prompts and learns the form of an answer: words that are true, where the scenario can `describe` a state,
and a legal action, the reference player's with probability `SKILL`, else any. It plays badly on purpose: to play well
is what MS-GRPO is for. All weights are trained, so this is for small models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from msgrpo.errors import UsageError
from msgrpo.files import replace_text
from msgrpo.game import Outcome, Scenario, stream
from msgrpo.limits import games_code
from msgrpo.models.loading import load_base
from msgrpo.prompt import PromptTemplate
from msgrpo.references import best_actions
from msgrpo.rollout import observation_of
from msgrpo.train.nano.build import Progress, Row, Source, answer_loss

SKILL = 0.4  # of its actions are the reference player's
STEPS, BATCH = 250, 48
PEAK = 3e-3  # learning rate


def rows_of(scenario: Scenario, seed: int) -> Iterator[Row]:
    """Turns on training starts, without end, as somebody would play who knows the rules and seldom what is best."""
    template = PromptTemplate()
    generator = stream(seed, f"teach-{scenario.id}")

    def chosen(game: Any, player: str) -> str:
        best = scenario.reference is not None and generator.random() < SKILL
        return str(generator.choice(list(best_actions(scenario, game, player) if best else game.legal(player))))

    for start in scenario.starts("train", first_seed=seed * 10_007):
        game = scenario.new(start, int(generator.integers(2**31)))
        while game.outcome is Outcome.PLAYING:
            for player in game.to_move:
                with games_code(scenario.id):
                    words = scenario.describe(game, player) if scenario.describe is not None else ""
                answer = f"{words}<action>{chosen(game, player)}</action>"
                yield Row(template.render(scenario, observation_of(game, player)), answer)
            moves = {player: chosen(game, player) for player in game.to_move}
            with games_code(scenario.id):
                game.step(moves)


def teach(
    scenario: Scenario,
    out: Path,
    *,
    base: str = "nano",
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Train `base` on the game's rows and write it to `out` as a base like any other; returns what was done.

    Raises UsageError if `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out} is not empty", fix="choose another --out")
    began = time.perf_counter()
    torch.manual_seed(seed)
    model, tokenizer = load_base(base, dtype="float32")
    source = Source(tokenizer, rows_of(scenario, seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.0)
    recent: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)
        loss = answer_loss(model, *source.batch(BATCH))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-19:], float(loss.detach())]
        progress(step + 1, steps, sum(recent) / len(recent))
    out.mkdir(parents=True, exist_ok=True)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    facts = {
        "scenario": scenario.id,
        "rules": scenario.rules_hash,
        "base": base,
        "steps": steps,
        "seed": seed,
        "loss": sum(recent) / len(recent),
        "seconds": round(time.perf_counter() - began, 1),
    }
    replace_text(out / "taught.json", json.dumps(facts, indent=2) + "\n")
    return facts

"""How well a model foretells the next observation before any training: where ECHO's cross-entropy begins.

    python benchmarks/foretelling.py nano models/SmolLM2-135M-Instruct.Q4_1.gguf --result FILE.json

Random legal moves on training starts, each written as an answer of nothing but the action; then the mean of -log p
over the tokens of what is seen next, as `loss="clip(echo=…)"` puts it behind an answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import options, write

from msgrpo.episode import observation_of
from msgrpo.game import Outcome, Scenario, stream
from msgrpo.games import get_scenario
from msgrpo.models.loading import load_base, weights_of
from msgrpo.prompt import ChatFormat, PromptTemplate
from msgrpo.train.rivals.echo import observed_tokens


def turns(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """State, action, and the state that followed; of one player."""
    generator = stream(0, "foretelling")
    (player,) = scenario.players
    for start in scenario.starts("train", first_seed=0):
        game = scenario.new(start, 0)
        state = observation_of(game, player)
        while game.outcome is Outcome.PLAYING:
            action = str(generator.choice(list(game.legal(player))))
            game.step({player: action})
            if game.outcome is Outcome.PLAYING:
                before, state = state, observation_of(game, player)
                yield before, action, state


def cross_entropies(base: str, scenario: Scenario, count: int) -> list[list[float]]:
    """-log p of every token of the next observation, a row for each turn."""
    model, tokenizer = load_base(base)
    chat, template, rows = ChatFormat(tokenizer), PromptTemplate(), []
    for state, action, following in itertools.islice(turns(scenario), count):
        (asked,) = chat.ids([template.render(scenario, state)])
        answer = tokenizer(f"<action>{action}</action>", add_special_tokens=False)["input_ids"]
        given, seen = [*asked, *answer, tokenizer.eos_token_id], list(observed_tokens(following, tokenizer))
        with torch.no_grad():
            logprobs: Any = model(torch.tensor([given + seen])).logits[0].float().log_softmax(-1)
        rows.append([-float(logprobs[len(given) - 1 + i, token]) for i, token in enumerate(seen)])
    return rows


if __name__ == "__main__":
    parser = options(__doc__, result=True)
    parser.add_argument("bases", nargs="+", help="nano, a folder, or a GGUF file")
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--turns", type=int, default=24)
    given = parser.parse_args()
    found = {}
    for base in given.bases:
        rows = cross_entropies(base, get_scenario(given.scenario), given.turns)
        tokens = [value for row in rows for value in row]
        found[Path(base).name] = {
            "weights": weights_of(base),
            "turns": len(rows),
            "tokens": len(tokens),
            "nats_a_token": math.fsum(tokens) / len(tokens),
        }
        print(Path(base).name, found[Path(base).name])
    write(given.result, {"scenario": given.scenario, "models": found})

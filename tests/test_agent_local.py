"""The model in this process: it stops when nobody waits, and knows its action probabilities cheaply."""

from __future__ import annotations

import asyncio

import pytest
import torch

from msgrpo.agent import Sampling
from msgrpo.games import get_scenario
from msgrpo.models.loading import nano
from msgrpo.models.local import LocalModel
from msgrpo.parse import action_span
from msgrpo.prompt import Prompt, PromptTemplate


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return nano()


def prompt_of(seed: int) -> Prompt:
    scenario = get_scenario("snake")
    return PromptTemplate().render(scenario, scenario.new(seed, 0).observe("snake1"))


async def test_generation_ends_when_nobody_waits_any_more(model: LocalModel) -> None:
    """A person who quits, or takes the seat, does not wait for the rest of a long answer."""
    tokens: list[str] = []

    stop_ids, model.stop_ids = model.stop_ids, frozenset()  # it would go on for ever
    try:
        sampling = Sampling(max_tokens=100_000)
        asked = asyncio.create_task(model.complete(prompt_of(0), sampling, 1, on_text=tokens.append))
        while not tokens:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(model.close(), 60)  # which waits for the generation
    finally:
        model.stop_ids = stop_ids
    assert len(tokens) < 1500  # of the 2,048 that fit
    assert (await model.complete(prompt_of(0), Sampling(max_tokens=24), 1)).text  # and it works on


def test_action_probabilities_are_those_of_the_full_forward(model: LocalModel) -> None:
    actions = get_scenario("snake").actions
    for seed in range(4):
        (answer,) = model.generate([prompt_of(seed)], Sampling(max_tokens=48), [seed], actions=[actions])
        span = action_span(answer.text)
        assert span is not None
        scores = []
        for action in actions:
            said = answer.text[: span[0]] + action + "</action>"
            ids = list(answer.prompt_ids) + model.tokenizer(said, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = model.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            start = len(answer.prompt_ids)
            scores.append(sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))))
        expected = torch.tensor(scores).softmax(0).tolist()
        assert list((answer.action_probabilities or {}).values()) == pytest.approx(expected, abs=1e-4)


def test_the_head_sees_only_where_the_actions_differ(model: LocalModel) -> None:
    """On a 3B model four passes of the whole prompt through the vocabulary cost 1.5 GB a turn."""
    positions: list[int] = []
    head = model.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, given, __: positions.append(given[0][..., 0].numel()))
    actions = get_scenario("snake").actions
    model.generate([prompt_of(1)], Sampling(max_tokens=48), [1], actions=[actions])
    hook.remove()
    assert positions[-1] <= len(actions) * 12

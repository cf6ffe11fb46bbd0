"""The shared prefix gives what the plain forward pass gives: log-probabilities, gradients, generated tokens."""

import math
from itertools import islice
from typing import Any

import pytest
import torch

from msgrpo_agent.agent import Sampling
from msgrpo_agent.games import get_scenario
from msgrpo_agent.models.loading import load_base
from msgrpo_agent.models.local import LocalModel, sample, uniforms
from msgrpo_agent.models.shared_prefix import answer_logprobs, common_prefix_length
from msgrpo_agent.prompt import Prompt, PromptTemplate


@pytest.fixture(scope="module")
def nano() -> LocalModel:
    return LocalModel("nano", *load_base("nano"))


def prompts(id: str, n: int) -> list[Prompt]:
    scenario = get_scenario(id)
    games = [scenario.new(start, start) for start in islice(scenario.starts("train"), n)]
    return [PromptTemplate().render(scenario, game.observe(game.players[0])) for game in games]


def pairs_of(nano: LocalModel, id: str) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    made = nano.generate(prompts(id, 6), Sampling(max_tokens=24), list(range(6)))
    shared = common_prefix_length([list(c.prompt_ids) for c in made])
    assert shared > 50
    return list(made[0].prompt_ids[:shared]), [(list(c.prompt_ids[shared:]), list(c.token_ids)) for c in made]


@pytest.mark.parametrize("id", ["frozen-lake", "snake"])
def test_log_probabilities_and_gradients_equal_the_plain_ones(nano: LocalModel, id: str) -> None:
    prefix, pairs = pairs_of(nano, id)
    model: Any = nano.model
    results = []
    for head, rows in ((prefix, pairs), ([], [(prefix + rest, answer) for rest, answer in pairs])):
        model.zero_grad()
        logprobs, mask = answer_logprobs(model.model, model.lm_head, head, rows, nano.pad_id)
        (logprobs * torch.linspace(-1, 1, len(rows))[:, None]).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((logprobs.detach(), mask, gradient))
    model.zero_grad()
    (shared, mask, shared_gradient), (plain, plain_mask, plain_gradient) = results
    assert (mask == plain_mask).all()
    torch.testing.assert_close(shared, plain, atol=2e-5, rtol=1e-4)
    assert (shared_gradient - plain_gradient).norm() < 1e-4 * plain_gradient.norm()


def test_a_detached_prefix_would_be_noticed(nano: LocalModel) -> None:
    """The named wrong variant: keys and values of the prefix without their gradient."""
    prefix, pairs = pairs_of(nano, "frozen-lake")
    model: Any = nano.model
    gradients = []
    for cut in (False, True):
        model.zero_grad()
        if cut:
            hooks = [
                layer.self_attn.k_proj.register_forward_hook(lambda m, i, o: o.detach() if len(o) == 1 else o)
                for layer in model.model.layers
            ]
        logprobs, _ = answer_logprobs(model.model, model.lm_head, prefix, pairs, nano.pad_id)
        logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    assert (gradients[0] - gradients[1]).norm() > 1e-3 * gradients[0].norm()


def test_reported_log_probabilities_are_those_of_the_trainer(nano: LocalModel) -> None:
    for temperature in (1.0, 0.7):
        made = nano.generate(prompts("snake", 4), Sampling(temperature=temperature, max_tokens=24), [1, 2, 3, 4])
        for completion in made:
            pair = (list(completion.prompt_ids), list(completion.token_ids))
            logprobs, _ = answer_logprobs(nano.model.model, nano.model.lm_head, [], [pair], nano.pad_id, temperature)
            assert logprobs[0].tolist() == pytest.approx(list(completion.logprobs), abs=1e-4)


def test_greedy_tokens_equal_transformers_generate(nano: LocalModel) -> None:
    asked = prompts("frozen-lake", 4)
    made = nano.generate(asked, Sampling(temperature=0, max_tokens=24), [0] * 4)
    for prompt, completion in zip(asked, made, strict=True):
        ids = torch.tensor(nano.chat.ids([prompt]))
        out = nano.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert out[0, ids.shape[1] :].tolist() == list(completion.token_ids)


def test_an_answer_does_not_depend_on_its_batch(nano: LocalModel) -> None:
    asked, sampling = prompts("frozen-lake", 8), Sampling(max_tokens=24)
    together = nano.generate(asked, sampling, list(range(8)))
    alone = [nano.generate([prompt], sampling, [seed])[0] for seed, prompt in enumerate(asked)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_the_chat_format_is_the_tokenizers_own(nano: LocalModel) -> None:
    prompt = prompts("snake", 1)[0]
    own = nano.tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    assert nano.chat.ids([prompt])[0] == own


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, -1)
    for sampling, p in (
        (Sampling(), logits[0].softmax(0)),
        (Sampling(temperature=0.5), (logits[0] / 0.5).softmax(0)),
        (Sampling(top_p=0.6), torch.tensor([0.0, 0.0, 1.0, 0.0])),
        (Sampling(top_p=0.8), torch.tensor([-math.inf, 1.0, 2.0, -math.inf]).softmax(0)),
    ):  # fmt: skip
        tokens, logprobs = sample(logits, sampling, uniforms(range(20_000), 3))
        seen = torch.bincount(tokens, minlength=4) / len(tokens)
        torch.testing.assert_close(seen, p, atol=0.015, rtol=0)
        torch.testing.assert_close(logprobs.exp(), p[tokens], atol=1e-5, rtol=1e-4)


def test_uniforms_are_fixed_by_seed_and_position() -> None:
    assert uniforms([5, 6], 0)[0] == uniforms([9, 5], 0)[1]
    assert uniforms([5], 0) != uniforms([5], 1)
    many = uniforms(range(50_000), 0)
    assert abs(float(many.mean()) - 0.5) < 0.01
    assert abs(float(many.var()) - 1 / 12) < 0.005

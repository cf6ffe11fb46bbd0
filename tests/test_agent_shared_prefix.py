"""The shared prefix gives what the plain forward pass gives: log-probabilities, gradients, generated tokens."""

import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from msgrpo.agent import Sampling
from msgrpo.errors import ModelError
from msgrpo.games import get_scenario
from msgrpo.models import generation
from msgrpo.models.generation import Row, _searched, parts_of, sample, uniforms
from msgrpo.models.loading import load_adapted, load_base
from msgrpo.models.local import LocalModel
from msgrpo.models.lora import ADAPTER_WEIGHTS
from msgrpo.models.shared_prefix import (
    NAME,
    answer_logprobs,
    attend,
    common_prefix_length,
    trunk_and_head,
    window,
)
from msgrpo.prompt import Prompt, PromptTemplate
from tests.serve_fakes import write_adapter, write_safetensors


@pytest.fixture(scope="module")
def nano() -> LocalModel:
    return LocalModel("nano", *load_base("nano"))


def test_models_load_in_several_threads_at_once(nano: LocalModel) -> None:
    """As when the app compares two agents of this process; without a lock the weights stay on the meta device."""
    ids = torch.tensor([[5, 6, 7, 8]])
    with ThreadPoolExecutor(8) as pool:
        loaded = [model for model, _ in pool.map(load_base, ["nano"] * 24)]
    with torch.no_grad():
        for model in loaded:
            torch.testing.assert_close(model(ids).logits, nano.model(ids).logits)


def prompts(id: str, n: int) -> list[Prompt]:
    scenario = get_scenario(id)
    games = [scenario.new(start, start) for start in islice(scenario.starts("train"), n)]
    return [PromptTemplate().render(scenario, game.observe(game.players[0])) for game in games]


def pairs_of(nano: LocalModel, id: str) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """Six prompts, two of them asked again with other seeds; answers of different lengths."""
    asked = prompts(id, 6)
    made = nano.generate([*asked, *asked[:2]], Sampling(max_tokens=24), list(range(8)))
    shared = common_prefix_length([list(c.prompt_ids) for c in made])
    assert shared > 50
    pairs = [(list(c.prompt_ids[shared:]), list(c.token_ids[: 24 - i])) for i, c in enumerate(made)]
    return list(made[0].prompt_ids[:shared]), pairs


def plain_logprobs(model: Any, prefix: list[int], pairs: list[tuple[list[int], list[int]]], width: int) -> Tensor:
    """One full prompt after the other through the whole model, without padding, cache or prefix."""
    rows = []
    for rest, answer in pairs:
        logits = model(torch.tensor([prefix + rest + answer])).logits[0, -len(answer) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(found, (width - len(answer), 0)))
    return torch.stack(rows)


@pytest.mark.parametrize("with_prefix", [True, False])
@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("id", ["frozen-lake", "snake"])
def test_log_probabilities_and_gradients_equal_the_plain_ones(
    nano: LocalModel, id: str, repeated: bool, with_prefix: bool
) -> None:
    prefix, pairs = pairs_of(nano, id)
    pairs = pairs if repeated else pairs[:6]
    if not with_prefix:
        prefix, pairs = [], [(prefix + rest, answer) for rest, answer in pairs]
    model: Any = nano.model
    shared, mask = answer_logprobs(*trunk_and_head(model), prefix, pairs, nano.pad_id)
    plain = plain_logprobs(model, prefix, pairs, mask.shape[1])
    assert mask.sum(1).tolist() == [len(answer) for _, answer in pairs]
    torch.testing.assert_close(shared, plain, atol=2e-5, rtol=1e-4)
    gradients = []
    for logprobs in (shared, plain):
        model.zero_grad()
        (logprobs * torch.linspace(-1, 1, len(pairs))[:, None]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[1].norm()


@pytest.mark.parametrize("length", [1, 2, 5])
def test_attention_over_a_prefix_equals_a_slow_loop(length: int) -> None:
    """Two rows of five tokens, the last of which ask, behind three that they share; four heads on two keys.

    Without a mask each token sees the prefix and its own row up to itself.
    """
    draw = torch.Generator().manual_seed(length)
    prefix_key, prefix_value = (torch.randn(2, 3, 8, generator=draw) for _ in range(2))
    key, value = (torch.randn(2, 2, 5, 8, generator=draw) for _ in range(2))
    query = torch.randn(2, 4, length, 8, generator=draw)
    for scaling in (None, 0.7):
        module = SimpleNamespace(layer_idx=1)
        shared = [(prefix_value, prefix_key), (prefix_key, prefix_value)]
        found, _ = attend(module, query, key, value, None, scaling, shared)
        assert found.shape == (2, length, 4, 8)
        for n, h, at in itertools.product(range(2), range(4), range(length)):
            seen = 3 + 5 - length + at + 1
            keys = torch.cat([prefix_key[h // 2], key[n, h // 2]])[:seen]
            values = torch.cat([prefix_value[h // 2], value[n, h // 2]])[:seen]
            weights = (keys @ query[n, h, at] * (scaling or 8**-0.5)).softmax(0)
            torch.testing.assert_close(found[n, at, h], weights @ values)


def test_the_window_is_the_shortest_that_a_layer_or_the_config_names() -> None:
    def trunk(*of_layers: Any, **config: Any) -> Any:
        layers = [SimpleNamespace(), *(SimpleNamespace(sliding_window=width) for width in of_layers)]
        return SimpleNamespace(modules=lambda: layers, config=SimpleNamespace(**config))

    assert window(trunk(None, 64, 96, sliding_window=128)) == 64
    assert window(trunk(64, sliding_window=48, attention_chunk_size=32)) == 32
    assert window(trunk(None, sliding_window=48)) == 48
    assert window(trunk(0, sliding_window=None)) == sys.maxsize  # none at all


def test_prompts_are_computed_in_equal_parts_that_the_longest_has_room_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens are shared by all, so 9 prompts of 12 and one of 22 count as 10 · 20; never fewer rows than four."""
    monkeypatch.setattr(generation, "PROMPT_TOKENS", 100)

    def sizes(count: int, most: int = 1, width: int | None = None, attention: str = NAME) -> list[int]:
        config = SimpleNamespace(_attn_implementation=attention, sliding_window=width)
        trunk = SimpleNamespace(modules=list, config=config)
        rows = [Row([1, 2, *[seed + 3] * (20 if seed == 5 else 10)], seed, most) for seed in range(count)]
        parts = parts_of(trunk, rows)
        assert [row for part in parts for row in part] == rows
        return [len(part) for part in parts]

    assert sizes(5) == [5]  # 100 tokens of their own are as many as may be
    assert sizes(10) == [5, 5]
    assert sizes(11) == [4, 4, 3]
    assert sizes(10, attention="sdpa") == [4, 4, 2]  # 22 each
    assert sizes(10, most=8, width=30) == [5, 5]
    assert sizes(10, most=9, width=30) == [4, 4, 2]  # beyond the window nothing is shared
    monkeypatch.setattr(generation, "PROMPT_TOKENS", 10)
    assert sizes(10) == [4, 4, 2]


def test_answers_of_one_token_to_the_same_prompt(nano: LocalModel) -> None:
    prefix, pairs = pairs_of(nano, "frozen-lake")
    short = [(rest, answer[:1]) for rest, answer in pairs]
    logprobs, _ = answer_logprobs(*trunk_and_head(nano.model), prefix, short, nano.pad_id)
    torch.testing.assert_close(logprobs, plain_logprobs(nano.model, prefix, short, 1), atol=2e-5, rtol=1e-4)


def test_the_gradient_is_the_same_to_the_byte_where_threads_share_it() -> None:
    """The gradient of what answers to one prompt read came in whatever order two threads added it up."""
    torch.manual_seed(0)
    base, _ = load_base("nano")
    vocabulary = base.config.vocab_size
    prompts = [torch.randint(vocabulary, (40,)).tolist() for _ in range(6)]
    pairs = [(prompts[i % 6], torch.randint(vocabulary, (24,)).tolist()) for i in range(96)]

    def gradient() -> list[Tensor]:
        base.zero_grad()
        logprobs, _ = answer_logprobs(*trunk_and_head(base), list(range(30)), pairs, 0)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return [weight.grad.clone() for weight in base.parameters() if weight.grad is not None]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert len(first) > 10
        for _ in range(4):
            assert all(map(torch.equal, first, gradient()))
    finally:
        torch.set_num_threads(threads)


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
        logprobs, _ = answer_logprobs(*trunk_and_head(model), prefix, pairs, nano.pad_id)
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
            logprobs, _ = answer_logprobs(*trunk_and_head(nano.model), [], [pair], nano.pad_id, temperature)
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


def drawn_slowly(logits: Tensor, sampling: Sampling, number: float) -> tuple[int, float]:
    """The reference for one row: all tokens sorted, one cumulative sum over all of them in double precision."""
    logprobs = (logits / sampling.temperature).log_softmax(0)
    if sampling.top_p < 1:
        order = logprobs.argsort(descending=True)
        kept = int((logprobs[order].double().exp().cumsum(0) < sampling.top_p).sum()) + 1
        logprobs[order[kept:]] = -math.inf
        logprobs = logprobs.log_softmax(0)
    cumulative = logprobs.double().exp().cumsum(0)
    token = int((cumulative <= number * cumulative[-1]).sum())
    return token, float(logprobs[token])


@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])  # from tokens nearly alike to one that takes nearly all
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.9)])
@pytest.mark.parametrize("size", [768, 2500, 40_000])
def test_a_large_vocabulary_is_sampled_as_the_slow_reference_does(
    size: int, sampling: Sampling, spread: float
) -> None:
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * spread
    logits[:, size // 2 :: 2] = -math.inf  # tokens, and whole blocks between them, that must never be drawn
    logits[:, size // 8 : size // 4] = -math.inf
    for n in range(4):
        numbers = uniforms(range(6), n)
        numbers[0], numbers[1] = 0.0, 1 - 2.0**-20
        tokens, logprobs = sample(logits, sampling, numbers)
        slow = [drawn_slowly(row, sampling, number) for row, number in zip(logits, numbers.tolist(), strict=True)]
        assert tokens.tolist() == [token for token, _ in slow]
        assert logprobs.tolist() == pytest.approx([logprob for _, logprob in slow], abs=1e-5)


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    """Not at the ends of [0, 1) either, where rounding would step over the last token that can be."""
    logits = torch.full((2, 5000), -math.inf)
    logits[:, 2100:2900:3] = 0.0
    for numbers in (torch.zeros(2, dtype=torch.float64), torch.full((2,), 1 - 2.0**-53, dtype=torch.float64)):
        tokens, logprobs = sample(logits, Sampling(), numbers)
        assert bool(logprobs.isfinite().all())
        assert tokens[0] in (2100, 2898)


def test_a_number_lies_within_its_weight_whatever_rounding_made_of_the_sums() -> None:
    """1 + 1.2e-16 is 1 + 2.2e-16 in double precision: 1, where this number is, would lie 0.85 before the second."""
    weights = torch.tensor([[1.0, 1.2e-16]], dtype=torch.float64)
    place, inside = _searched(weights, torch.tensor([[1 - 2.0**-53]], dtype=torch.float64))
    assert place.item() == 1
    assert 0 <= inside.item() < 1


def test_a_flat_row_has_its_nucleus_beside_one_that_a_few_tokens_hold() -> None:
    """Of 2,048 equal tokens 0.9 × 2,048 = 1,843.2 make the nucleus, so 1,844; of the other row one."""
    logits = torch.zeros(2, 2048)
    logits[1, 5] = 100.0
    tokens, logprobs = sample(logits, Sampling(top_p=0.9), torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert logprobs.exp().tolist() == pytest.approx([1 / 1844, 1.0])
    assert tokens[1] == 5


def test_a_row_is_sampled_as_if_it_were_alone() -> None:
    logits = torch.randn(90, 151_936, generator=torch.Generator().manual_seed(1))  # several parts
    numbers = uniforms(range(90), 0)
    together = sample(logits, Sampling(), numbers)
    for row in (0, 27, 89):
        token, logprob = sample(logits[row : row + 1], Sampling(), numbers[row : row + 1])
        assert (int(token), float(logprob)) == (int(together[0][row]), float(together[1][row]))


def test_uniforms_are_fixed_by_seed_and_position() -> None:
    assert uniforms([5, 6], 0)[0] == uniforms([9, 5], 0)[1]
    assert uniforms([5], 0) != uniforms([5], 1)
    many = uniforms(range(50_000), 0)
    assert abs(float(many.mean()) - 0.5) < 0.01
    assert abs(float(many.var()) - 1 / 12) < 0.005


def test_uniforms_are_splitmix64s() -> None:
    """The numbers that its authors' program gives for seed 1234567: with others no record could be asked again."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    drawn = [float(uniforms([1234567], n)[0]) for n in range(4)]
    assert drawn == [(number >> 11) / 2**53 for number in published]


def test_log_probabilities_are_of_what_was_sampled_from_and_at_temperature_1_where_nothing_was() -> None:
    """p = ¼, ¾ at temperature 1, and 1/82, 81/82 at ¼, where the less likely one has the numbers below 1/82."""
    logits, number = torch.tensor([[0.0, math.log(3)]]), torch.tensor([0.01], dtype=torch.float64)
    for temperature, token, p in ((0.0, 1, 3 / 4), (0.25, 0, 1 / 82)):
        drawn, logprobs = sample(logits, Sampling(temperature=temperature), number)
        assert drawn.tolist() == [token]
        assert logprobs.exp().tolist() == pytest.approx([p])


def test_an_adapter_without_its_weights_never_plays_as_its_base(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fl", rank=8)
    write_safetensors(folder / ADAPTER_WEIGHTS, {})
    with pytest.raises(ModelError, match="no rank, or no layer"):
        load_adapted(folder)
    (folder / ADAPTER_WEIGHTS).write_bytes(b"torn")
    with pytest.raises(ModelError, match="no complete safetensors"):
        load_adapted(folder)


def test_a_damaged_base_is_one_clear_error(tmp_path: Path) -> None:
    for text in ("[]", '{"model_type": "qwen2", "hidden_size": "x"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_base(str(tmp_path))


def test_no_answer_is_longer_than_the_context_allows(nano: LocalModel) -> None:
    """2048 tokens of context: a limit of a trillion neither fails nor takes the memory for it."""
    prompt = prompts("frozen-lake", 1)
    assert nano.generate(prompt, Sampling(max_tokens=10**12), [1])[0].finish_reason == "stop"

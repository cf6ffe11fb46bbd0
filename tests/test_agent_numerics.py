"""What engine and trainer compute equals the model's own forward, for every architecture that can be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from msgrpo.agent import Sampling
from msgrpo.errors import ModelError
from msgrpo.models import loading, shared_prefix
from msgrpo.models.generation import Batch, Row
from msgrpo.models.loading import load_base
from msgrpo.models.local import LocalModel
from msgrpo.models.proof import prepare
from msgrpo.models.shared_prefix import (
    NAME,
    answer_logprobs,
    compute_prefix,
    evaluating,
    last_hidden,
    plain_logprobs,
    shareable_length,
    trunk_and_head,
)
from msgrpo.prompt import ChatFormat, Prompt

WINDOW = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "llama": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": WINDOW},
    "phi": {},
    "phi3": {},
    "smollm3": {},
    "olmo2": {},
    "exaone4": {"sliding_window": WINDOW},
}
HEADS = ("gemma2", "granite", "cohere", "cohere2")  # whose forward does something after the head
WINDOWS = tuple(kind for kind, given in MODELS.items() if "sliding_window" in given)


def tiny(kind: str, **changed: Any) -> Any:
    """A random model of this architecture whose answers are far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | MODELS.get(kind, {}) | changed))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def rows(prefix: int) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """A shared prefix, rests of prompts (two are equal) and answers, all of different lengths."""
    draw = torch.Generator().manual_seed(prefix)

    def some(count: int) -> list[int]:
        return torch.randint(3, 97, (count,), generator=draw).tolist()

    rests = [some(12), some(3), some(7)]
    return some(prefix), [*rests, rests[1]], [some(5), some(9), some(2), some(4)]


def gap(model: Any, prefix: list[int], rests: list[list[int]], answers: list[list[int]]) -> float:
    """The largest difference in log-probability, the trainer's from the model's own forward of each row alone."""
    trunk, head = trunk_and_head(model)
    with torch.no_grad(), evaluating(model):
        ours, mask = answer_logprobs(trunk, head, prefix, list(zip(rests, answers, strict=True)), 0)
        plain = [plain_logprobs(model, prefix + rest, answer) for rest, answer in zip(rests, answers, strict=True)]
    return float((ours[mask.bool()] - torch.cat(plain)).abs().max())


class Words:
    """A tokenizer of numbers, for models that have none: token i is the text `i `."""

    chat_template, name_or_path, eos_token_id, pad_token_id = "{{ messages }}", "words", 2, 0

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        return messages[0]["content"]

    def __call__(self, texts: list[str] | str, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("length", [20, 2 * WINDOW])
@pytest.mark.parametrize("kind", MODELS)
def test_the_trainer_computes_what_the_model_does(kind: str, length: int) -> None:
    model = tiny(kind)
    prepare(model, kind)
    assert model.config._attn_implementation == NAME
    assert gap(model, *rows(length)) < 1e-4


@pytest.mark.parametrize("length", [20, 2 * WINDOW])
@pytest.mark.parametrize("kind", MODELS)
def test_the_engine_samples_from_what_the_model_computes(kind: str, length: int) -> None:
    from msgrpo.prompt import Prompt

    model = tiny(kind)
    prepare(model, kind)
    engine = LocalModel(kind, model, Words())
    prefix, rests, _ = rows(length)
    prompts = [Prompt(" ".join(map(str, prefix)) + " ", " ".join(map(str, rest))) for rest in rests]
    answers = engine.generate(prompts, Sampling(max_tokens=12), [1, 2, 3, 4])
    with torch.no_grad():
        for answer in answers:
            plain = plain_logprobs(model, list(answer.prompt_ids), list(answer.token_ids))
            assert torch.allclose(torch.tensor(answer.logprobs), plain, atol=1e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_a_bare_head_is_not_what_these_models_compute(kind: str) -> None:
    """The wrong variant: what follows the head is left out."""
    model = tiny(kind)
    ids = torch.tensor([rows(20)[0]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        bare = model.get_output_embeddings()(hidden).log_softmax(-1)
        whole = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    assert float((bare - whole).abs().max()) > 0.1


@pytest.mark.parametrize("kind", WINDOWS)
def test_sharing_beyond_a_window_is_not_what_these_models_compute(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: a prefix is shared though a layer does not look back that far."""
    model = tiny(kind)
    prepare(model, kind)
    assert shareable_length(model.base_model, 20, WINDOW) == 20
    assert shareable_length(model.base_model, 20, WINDOW + 1) == 0
    monkeypatch.setattr(shared_prefix, "window", lambda trunk: 10**9)
    assert gap(model, *rows(2 * WINDOW)) > 0.05


@pytest.mark.parametrize("length", [20, 2 * WINDOW])
@pytest.mark.parametrize("kind", MODELS)
def test_in_bfloat16_ours_rounds_no_worse_than_the_models_own(kind: str, length: int) -> None:
    """Against the float32 model: the mean error of ours, of one query a row as well, beside that of its own SDPA."""
    exact, model = tiny(kind), tiny(kind).to(torch.bfloat16)
    exact.load_state_dict(model.state_dict())  # the same rounded weights
    prefix, rests, answers = rows(length)
    pairs = list(zip(rests, answers, strict=True))
    with torch.no_grad():
        truth = torch.cat([plain_logprobs(exact, prefix + rest, answer) for rest, answer in pairs])
        own = torch.cat([plain_logprobs(model, prefix + rest, answer) for rest, answer in pairs])
        prepare(model, kind)
        trunk, head = trunk_and_head(model)
        ours, mask = answer_logprobs(trunk, head, prefix, pairs, 0)
    assert float((ours[mask.bool()] - truth).abs().mean()) < 2 * float((own - truth).abs().mean()) + 0.01


def test_one_query_with_large_keys_rounds_no_worse_than_sdpa() -> None:
    """Qwen2 has keys with large entries, whose products cancel: scores in bfloat16 were up to 19 times worse."""
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, length, 16) for heads, length in ((4, 1), (2, 24), (2, 24)))
    key[..., 0] += 60  # the same for every token: it cancels in the softmax
    query, key, value = (t.to(torch.bfloat16) for t in (query, key, value))
    prefix = key[:1, :, :16], value[:1, :, :16]
    keys, values = (
        torch.cat([p.expand(3, -1, -1, -1), own[:, :, 16:]], 2) for p, own in zip(prefix, (key, value), strict=True)
    )

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*tensors, enable_gqa=True).transpose(1, 2).float()

    exact, sdpa = whole(query.float(), keys.float(), values.float()), whole(query, keys, values)
    ours = shared_prefix._attend_one(query, key[:, :, 16:], value[:, :, 16:], None, None, prefix[0][0], prefix[1][0])
    assert float((ours.float() - exact).abs().mean()) < 1.5 * float((sdpa - exact).abs().mean())


@pytest.mark.parametrize("kind", ["falcon", "stablelm", "gpt_oss"])
def test_what_cannot_share_keeps_its_own_attention(kind: str) -> None:
    model = tiny(kind)
    own = model.config._attn_implementation
    prepare(model, kind)
    assert model.config._attn_implementation == own
    assert gap(model, *rows(20)) < 1e-4


def test_recurrent_layers_are_refused() -> None:
    """Decided by the probe, not by a list of names."""
    conv = ["conv", "full_attention", "conv", "full_attention"]
    for kind, model in (("mamba", tiny("mamba")), ("lfm2", tiny("lfm2", layer_types=conv))):
        with pytest.raises(ModelError, match=f"{kind} .* cannot be used"):
            prepare(model, kind)


@pytest.mark.parametrize("kind", ["qwen2", "granite", "gemma2"])
def test_log_probabilities_in_parts_are_the_same_with_the_same_gradient(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(kind)
    prepare(model, kind)
    prefix, rests, answers = rows(20)

    def found() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        trunk, head = trunk_and_head(model)
        logprobs, _ = answer_logprobs(trunk, head, prefix, list(zip(rests, answers, strict=True)), 0, 0.7)
        logprobs.square().sum().backward()
        return logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole, gradient = found()
    monkeypatch.setattr(shared_prefix, "LOGITS", 3 * 97)
    parts, in_parts = found()
    assert torch.allclose(whole, parts, atol=1e-5)
    assert all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in zip(gradient, in_parts, strict=True)
    )


@pytest.mark.parametrize("kind", ["qwen2", "granite", "gemma2"])
def test_the_plain_forward_computes_no_logits_of_the_prompt(kind: str) -> None:
    """Of a prompt of four thousand tokens and a vocabulary of 152,000 they take 2.4 GB, before every version."""
    model, computed = tiny(kind), list[int]()
    prefix, (rest, *_), (answer, *_) = rows(20)
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _, given, __: computed.append(given[0].shape[1])
    )
    with torch.no_grad():
        found = plain_logprobs(model, prefix + rest, answer, 0.7)
        hook.remove()
        logits = model(torch.tensor([prefix + rest + answer])).logits[0, len(prefix + rest) - 1 : -1] / 0.7
    assert computed == [len(answer) + 1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_plain_forward_of_an_adapted_model_computes_no_logits_of_the_prompt() -> None:
    """PEFT's own forward does not say what the model's takes."""
    adapted: Any = get_peft_model(tiny("qwen2"), LoraConfig(target_modules=["q_proj"]))
    computed: list[int] = []
    adapted.get_base_model().lm_head.register_forward_hook(lambda _, given, __: computed.append(given[0].shape[1]))
    with torch.no_grad():
        plain_logprobs(adapted, [5, 6, 7, 8], [9, 10])
    assert computed == [3]


@pytest.mark.parametrize("length", [20, 2 * WINDOW])
@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_the_last_hidden_states_are_those_of_whole_prompts(kind: str, length: int) -> None:
    """Beyond a layer's window too, where no prefix is shared."""
    model = tiny(kind)
    prepare(model, kind)
    trunk, _ = trunk_and_head(model)
    prefix, rests, _ = rows(length)
    with torch.no_grad():
        found = last_hidden(trunk, prefix, rests, 0)
        own = [trunk(input_ids=torch.tensor([prefix + rest])).last_hidden_state[0, -1] for rest in rests]
    assert torch.allclose(found, torch.stack(own), atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_a_prefix_leaves_a_model_in_the_mode_that_it_was_in(training: bool) -> None:
    trunk, _ = trunk_and_head(tiny("qwen2").train(training))
    compute_prefix(trunk, [5, 6, 7])
    with pytest.raises(IndexError):
        compute_prefix(trunk, [97])  # there is no such token
    assert {module.training for module in trunk.modules()} == {training}


TRIMS = "{% for m in messages %}<s>{{ m['content'] | trim }}</s>{% endfor %}A:"
LOOKS = "{% for m in messages %}{% if 'hole' in m['content'] %}careful {% endif %}{{ m['content'] }}{% endfor %}A:"
LOSES = "{% for m in messages %}{{ m['content'] | length }}{% endfor %}A:"
SYSTEM = "be brief. {% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}A:"
WITH_SYSTEM = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[answer] "
SWITCH = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking %}<think>{% endif %}A:"


HIDES = "{% for m in messages %}{% if 'hole' not in m['content'] %}{{ m['content'] }}{% endif %}{% endfor %}A:"
BOMB = "{{ 'a' * 20000000000 }}{{ messages[0]['content'] }}"
LONG = "{% for i in range(90000) %}some words of text {% endfor %}{{ messages[0]['content'] }}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"
ESCAPE = "{{ raise_exception('x\x1b[2J') }}"
PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}A:"


@pytest.mark.parametrize("template", ["", "A:", LOSES, HIDES, BOMB, LONG, NESTED, ESCAPE, PARTS, "{{ x|attr('y') }}"])
def test_a_template_that_runs_away_or_hides_the_prompt_is_one_clear_error(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model would play blind, or nothing would ever come back; the message holds no escape code."""
    from msgrpo import prompt
    from msgrpo.prompt import Prompt

    monkeypatch.setattr(prompt, "RENDER_S", 1.0)
    _, tokenizer = load_base("nano")
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=r"the chat template of .* cannot be used") as said:
        ChatFormat(tokenizer).ids([Prompt("the rules\n", "a hole and a goal")])
    assert "\x1b" not in str(said.value)


@pytest.mark.parametrize("system", ["", "You play to win.", "\u241fcontent\u241f"])
@pytest.mark.parametrize("template", [TRIMS, LOOKS, SYSTEM, SWITCH, None])
def test_prompts_are_rendered_as_the_template_renders_them(template: str | None, system: str) -> None:
    _, tokenizer = load_base("nano")
    tokenizer.chat_template = template or WITH_SYSTEM
    chat = ChatFormat(tokenizer, {"enable_thinking": False})
    prompts = [Prompt("  the rules\n", f"state {i} hole\n ", mine) for i in range(3) for mine in {system, ""}]
    for _ in range(2):
        for prompt, ids in zip(prompts, chat.ids(prompts), strict=True):
            text = tokenizer.apply_chat_template(
                prompt.messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_prompts_with_a_system_message_go_through_the_template_no_more_often_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rendering holds the memory of the whole process within bounds, so it must not happen beside an update."""
    _, tokenizer = load_base("nano")
    tokenizer.chat_template = WITH_SYSTEM
    asked = Counter[str]()
    render = tokenizer.apply_chat_template

    def counted(messages: list[dict[str, str]], **given: Any) -> Any:
        asked[messages[0]["role"]] += 1
        return render(messages, **given)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    chat = ChatFormat(tokenizer)
    for i in range(50):
        chat.ids([Prompt("the rules\n", f"state {i}"), Prompt("the rules\n", f"state {i}", "You play to win.")])
    assert asked["system"] == asked["user"] < 10


@pytest.mark.parametrize("pays", [True, False])
def test_bfloat16_is_for_bases_beyond_nanos_size_where_the_processor_is_faster_with_it(
    pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_bfloat16_pays", lambda: pays)
    cpu = torch.device("cpu")
    assert loading.usual_dtype("nano", cpu) == "float32"
    assert loading.usual_dtype("nobody/has-this-model-here", cpu) == "float32"
    for name, parameters, expected in (("small", 10_000, "float32"), ("large", 20_000_001, "bfloat16")):
        (tmp_path / name).mkdir()
        save_file({"w": torch.zeros(parameters, dtype=torch.uint8)}, tmp_path / name / "model.safetensors")
        assert loading.usual_dtype(str(tmp_path / name), cpu) == (expected if pays else "float32")


@pytest.mark.parametrize("ratio", [1, 3])
def test_bfloat16_is_chosen_alike_whatever_else_the_machine_does(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured one after the other, the type that a busy moment met looked slow, and a resumed run took the other."""
    for busy in (range(8), range(8, 100)):
        asked = count()

        def product_s(dtype: torch.dtype, busy: range = busy, asked: Iterator[int] = asked) -> float:
            return (ratio if dtype == torch.float32 else 1) * (10 if next(asked) in busy else 1)

        monkeypatch.setattr(loading, "_product_s", product_s)
        assert loading._bfloat16_pays.__wrapped__() == (ratio > loading.PAYS)


def test_the_head_gets_rows_that_lie_close() -> None:
    """Of a slice of more dimensions torch's `linear` copies the head's weights for every row: 700 times the time."""
    trunk, head = trunk_and_head(load_base("nano")[0])
    close = []

    def seen(hidden: torch.Tensor) -> torch.Tensor:
        close.append(hidden.is_contiguous())
        return head(hidden)

    Batch(trunk, seen, [Row(prompt=[5 + seed, 6, 7, 8], seed=seed, most=2) for seed in range(3)], pad_id=0)
    assert close == [True]

"""The model in this process: it stops when nobody waits, and knows its action probabilities cheaply."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest
import torch

from msgrpo.agent import Sampling, action_span
from msgrpo.games import get_scenario
from msgrpo.models import generation
from msgrpo.models.generation import Row, kept_rows
from msgrpo.models.loading import nano
from msgrpo.models.local import LocalModel
from msgrpo.models.proof import prepare
from msgrpo.models.shared_prefix import new_cache, plain_logprobs, select_rows
from msgrpo.prompt import Prompt, PromptTemplate
from tests.test_agent_numerics import Words, tiny


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return nano()


def prompt_of(seed: int) -> Prompt:
    scenario = get_scenario("snake")
    return PromptTemplate().render(scenario, scenario.new(seed, 0).observe("snake1"))


async def test_generation_ends_when_nobody_waits_any_more(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who quits, or takes the seat, does not wait for the rest of a long answer."""
    tokens: list[str] = []
    left, say = threading.Event(), model._say

    def said(row: Row) -> None:  # in the thread that generates, which is held up until the person has left
        say(row)
        assert left.wait(60)

    stop_ids, model.stop_ids = model.stop_ids, frozenset()  # it would go on for ever
    monkeypatch.setattr(model, "_say", said)
    try:
        sampling = Sampling(max_tokens=100_000)
        asked = asyncio.create_task(model.complete(prompt_of(0), sampling, 1, on_text=tokens.append))
        while not tokens:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        left.set()
        await asyncio.wait_for(model.close(), 60)  # which waits for the generation
    finally:
        model.stop_ids = stop_ids
    assert len(tokens) == 1  # of the 2,048 that fit
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


def rows_of(model: LocalModel, count: int) -> list[Row]:
    """Different prompts, three of them asked twice, whose answers are cut to very different lengths."""
    prompts = model.chat.ids([prompt_of(seed // 2 if seed < 6 else seed) for seed in range(count)])
    return [Row(prompt, seed, 3 + seed * 7 % 40) for seed, prompt in enumerate(prompts)]


def test_rows_that_have_ended_leave_and_change_nothing(model: LocalModel) -> None:
    """Neither a token nor a digit of a log-probability: the answers are those of a batch in which all rows stay."""
    widths: list[int] = []
    hook = model.model.model.layers[0].register_forward_hook(lambda _, given, __: widths.append(len(given[0])))
    leaving = rows_of(model, 12)
    try:
        model.answer_rows(leaving, Sampling(temperature=1.5))
        of_leaving, widths[:] = list(widths), []
        staying = rows_of(model, 12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generation, "FEWEST_ROWS", 12)
            model.answer_rows(staying, Sampling(temperature=1.5))
    finally:
        hook.remove()
    assert [row.tokens for row in leaving] == [row.tokens for row in staying]
    assert [row.logprobs for row in leaving] == [row.logprobs for row in staying]
    assert widths[2:] == [12] * len(widths[2:])
    lengths = [len(row.tokens) for row in leaving]
    going = [max(4, sum(length > n for length in lengths)) for n in range(1, max(lengths))]
    assert of_leaving[2:] == going  # after the shared prefix and the distinct prompts, one step a token


def test_rows_that_stay_keep_their_keys_and_values_when_others_leave() -> None:
    assert kept_rows([False] * 6) == [0, 1, 2, 3, 4, 5]
    assert kept_rows([True, False, False, True, False, False]) == [5, 1, 2, 4]
    assert kept_rows([True, False, True, True, True, True]) == [0, 1, 2, 3]  # four rows are the fewest
    assert kept_rows([True, True, True, True, True, False]) == [5, 1, 2, 3]
    assert kept_rows([True, False]) == [0, 1]
    layer = new_cache(1)
    keys = torch.arange(6.0)[:, None, None, None].expand(6, 1, 3, 2)
    layer.update(keys, -keys, 0)
    select_rows(layer, [5, 1, 2, 4])
    new = torch.full((4, 1, 1, 2), 9.0)
    for length in range(4, 80):  # beyond the room that the buffer had at first
        held, values = layer.update(new, -new, 0)
        assert held.shape == (4, 1, length, 2)
        assert held[:, 0, :3, 0].tolist() == [[row] * 3 for row in (5.0, 1.0, 2.0, 4.0)]
        assert torch.equal(values, -held)
        assert bool((held[:, :, 3:] == 9).all())


@pytest.mark.parametrize(
    "tokens", [500, 80, 20]
)  # texts of several rows at once; not even those of one; not one text
@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text"])  # the second looks back on 64 tokens only
def test_actions_of_a_whole_batch_are_compared_on_the_keys_and_values_that_are_there(kind: str, tokens: int) -> None:
    """Rows end at different steps; one says a tag's action, one writes no tag, one's words come out differently."""
    engine = LocalModel(kind, tiny(kind), Words())
    prepare(engine.model, kind)
    prompts = [[*range(3, 33), *range(40, 40 + 5 * i)] for i in range(1, 6)]
    rows = [Row(prompt, seed, 4 + 3 * seed, actions=("a", "b", "c")) for seed, prompt in enumerate(prompts)]
    endings = {"a": [7], "b": [8, 9], "c": [8, 11, 12]}

    def with_actions(row: Row) -> list[list[int]]:
        if row.seed == 2:
            return []
        said = row.tokens[: 2 + row.seed] if row.seed != 3 else [row.tokens[0], 95, 94]
        return [row.prompt + said + endings[action] for action in row.actions]

    computed: list[int] = []
    at_once: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_with_actions", with_actions)
        patch.setattr(generation, "TOKENS", tokens)  # several parts
        answering = generation.Batch.logprobs_of

        def counted(batch: generation.Batch, asked: dict[int, list[list[int]]]) -> dict[int, list[float]]:
            hook = engine.model.base_model.layers[0].register_forward_hook(
                lambda _, given, __: (computed.append(given[0].shape[1]), at_once.append(given[0].shape[0]))[0]
            )
            try:
                return answering(batch, asked)
            finally:
                hook.remove()

        patch.setattr(generation.Batch, "logprobs_of", counted)
        engine.answer_rows(rows, Sampling())
    for row in rows:
        texts = with_actions(row)
        if not texts:
            assert row.action_probabilities is None
            continue
        with torch.no_grad():
            scores = [plain_logprobs(engine.model, row.prompt, text[len(row.prompt) :]).sum() for text in texts]
        expected = torch.stack(scores).softmax(0).tolist()
        assert list((row.action_probabilities or {}).values()) == pytest.approx(expected, abs=1e-4)
    if kind == "qwen2":
        assert max(computed) <= 8  # tokens a text: the prompts are not computed again
    if tokens < 500:
        assert max(at_once) <= (2 if tokens == 80 else 1)


def test_the_tokens_of_prompts_that_are_computed_at_once_are_bounded(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their rows were: many long prompts took memory without a bound. The answers are the same."""
    prompts, sampling = [prompt_of(seed) for seed in range(24)], Sampling(max_tokens=4)
    whole = model.generate(prompts, sampling, range(24))
    widths: list[tuple[int, ...]] = []
    forward = generation.Batch._forward

    def measured(batch: generation.Batch, ids: torch.Tensor) -> torch.Tensor:
        widths.append(tuple(ids.shape))
        return forward(batch, ids)

    monkeypatch.setattr(generation.Batch, "_forward", measured)
    monkeypatch.setattr(generation, "PROMPT_TOKENS", 1600)
    bounded = model.generate(prompts, sampling, range(24))
    prefills = [(rows, width) for rows, width in widths if width > 1]
    assert len(prefills) > 1
    assert all(rows * width <= 1600 for rows, width in prefills)
    assert [one.token_ids for one in bounded] == [one.token_ids for one in whole]
    for one, other in zip(bounded, whole, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs))


def test_the_keys_and_values_of_one_part_are_gone_before_the_next_is_computed(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were held beside those of the next part, so a batch took twice the memory that bounds it."""
    begun: list[weakref.ref[generation.Batch]] = []
    held: list[bool] = []
    forward = generation.Batch._forward

    def counted(batch: generation.Batch, ids: torch.Tensor) -> torch.Tensor:
        if not begun or begun[-1]() is not batch:
            held.append(any(earlier() is not None for earlier in begun))
            begun.append(weakref.ref(batch))
        return forward(batch, ids)

    monkeypatch.setattr(generation.Batch, "_forward", counted)
    monkeypatch.setattr(generation, "PROMPT_TOKENS", 1600)
    model.generate([prompt_of(seed) for seed in range(24)], Sampling(max_tokens=4), range(24))
    assert len(held) > 1
    assert not any(held)

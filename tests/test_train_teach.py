"""`msgrpo teach`: rows of bad play, the same result after a kill, LoRA on larger bases; presets by size."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from msgrpo.agent import Completion, LanguageAgent, Sampling, parse_action
from msgrpo.errors import GameFaultError, ModelError, RunError, UsageError
from msgrpo.game import Outcome, Scenario
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.models import loading
from msgrpo.models.asked import Taught, taught_as
from msgrpo.models.loading import load_base
from msgrpo.models.local import LocalModel
from msgrpo.models.paths import NANO_DIR
from msgrpo.models.shared_prefix import answer_logprobs
from msgrpo.prompt import USUAL, Prompt, PromptTemplate, make_template
from msgrpo.run_log import alone
from msgrpo.specs import make_agent
from msgrpo.train import presets
from msgrpo.train.config import make_config
from msgrpo.train.nano import begun, sampled
from msgrpo.train.nano import teach as teaching
from msgrpo.train.nano.build import Row, build
from msgrpo.train.nano.sampled import own_rows
from msgrpo.train.nano.teach import ANSWERS, BEGUN, Teaching, rows_of, teach
from msgrpo.train.nano.words import Words
from msgrpo.train.presets import PRESETS, preset_for
from tests.command_line import run

LAKE = get_scenario("frozen-lake")
ROOT = Path(__file__).parents[1]


def failing(game: Any, player: str) -> list[str]:
    """A reference player who knows the first move alone."""
    if game.steps:
        raise ValueError("it cannot tell")
    return ["right"]


class CutOffError(Exception):
    """As good as a kill: nothing is put down."""


def test_rows_of_the_lake_say_true_words_and_act_badly() -> None:
    turns = list(itertools.islice(rows_of(LAKE, 0), 300))
    assert all(len(turn) == 1 and Words.read(turn[0].answer) is not None for turn in turns)
    best = sum(bool(turn[0].best) for turn in turns) / len(turns)
    assert 0.7 < best < 0.9  # most moves of a short walk lose nothing yet; a good player's share would be 1
    assert [turn[0].answer for turn in itertools.islice(rows_of(LAKE, 0), 5)] == [t[0].answer for t in turns[:5]]


def test_without_words_a_prompt_has_several_answers_of_one_action() -> None:
    template = make_template("none")
    for turn in itertools.islice(rows_of(LAKE, 0, template, words=False), 20):
        assert len(turn) == ANSWERS
        assert len({row.prompt for row in turn}) == 1
        assert turn[0].prompt.prefix.startswith(
            "You are playing a text game. Look at the state and choose one action."
        )
        for row in turn:
            found = parse_action(row.answer, LAKE.actions).action
            assert row.answer == f"<action>{found}</action>"


def test_a_prompt_with_a_history_tells_of_the_turns_before() -> None:
    """As in play: the state that was seen and the action that was chosen there, the last two of them."""
    template = make_template("brief").model_copy(update={"history": 2})
    most = 0
    for turn, plain in itertools.islice(zip(rows_of(LAKE, 0, template), rows_of(LAKE, 0), strict=True), 60):
        state, bare = turn[0].prompt.state, plain[0].prompt.state
        assert state.endswith(bare)
        assert turn[0].answer == plain[0].answer
        told = state.count("You chose ")
        assert told == min(2, int(bare.split()[1]) - 1)  # "Step 3 of 8." has two before it
        most = max(most, told)
        game_says = re.findall(r"Step (\d+) of", state)
        assert game_says == sorted(game_says)
    assert most == 2


def test_play_goes_on_where_the_reference_player_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command ended there again and again, since it came to the same state."""
    monkeypatch.setattr(teaching, "has_words", lambda scenario: False)
    lake = replace(LAKE, reference=failing)
    turns = [row for row, *_ in itertools.islice(rows_of(lake, 0), 60)]
    assert {row.best is None for row in turns} == {True, False}
    assert {parse_action(row.answer, LAKE.actions).failure for row in turns} == {None}


@pytest.mark.parametrize("reference", [LAKE.reference, None])
def test_a_game_of_ones_own_that_is_a_lake_is_taught(reference: Any) -> None:
    """How it is played stands in a table of families, where its own is not: that was a KeyError."""
    mine = replace(LAKE, id="mine", family="mine", reference=reference)
    turns = [row for row, *_ in itertools.islice(rows_of(mine, 0), 10)]
    assert {parse_action(row.answer, LAKE.actions).failure for row in turns} == {None}
    assert {row.best is None for row in turns} == {reference is None}


@pytest.mark.parametrize("what", ["observe", "outcome", "legal", "describe"])
def test_a_games_own_fault_ends_that_game_and_no_more(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it fails: a fault of `outcome`, or of `legal` as an action is drawn, was a traceback, and what
    `describe` gave was taught as it was: `None<action>right</action>`.
    """
    monkeypatch.setattr(teaching, "has_words", lambda scenario: False)

    class Broken(FrozenLake):
        asked = 0

        def fail(self, part: str) -> None:
            if part == what and self.steps:
                raise ValueError("it cannot be seen")

        def observe(self, player: str) -> str:
            self.fail("observe")
            return super().observe(player)

        @property
        def outcome(self) -> Outcome:
            self.fail("outcome")
            return super().outcome

        def legal(self, player: str) -> tuple[str, ...]:
            self.asked += self.steps
            if self.asked > 1:  # as the action is drawn
                self.fail("legal")
            return super().legal(player)

    def describe(game: FrozenLake, player: str) -> Any:
        return None if what == "describe" and isinstance(game, Broken) and game.steps else "so "

    def broken(every: int) -> Scenario:
        def make(start_seed: int, chance_seed: int) -> FrozenLake:
            whole = LAKE.make(start_seed, chance_seed)
            assert isinstance(whole, FrozenLake)
            kind = FrozenLake if start_seed % every else Broken
            return kind(whole.desc, whole.slippery, whole.step_limit, chance_seed)

        return replace(LAKE, make=make, reference=None, describe=describe)

    rows = [row for (row,) in itertools.islice(rows_of(broken(every=2), 0), 40)]
    assert max(int(row.prompt.state.split()[1]) for row in rows) > 1
    assert all(row.answer.startswith("so <action>") for row in rows)
    with pytest.raises(GameFaultError, match=r"it cannot be seen|describe\(\) gave a NoneType, no text"):
        list(rows_of(broken(every=1), 0))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model, _ = load_base(str(folder))
    return dict(model.state_dict())


def test_a_base_that_had_a_teacher_is_known_to_have_had_one_after_another_teaching(tmp_path: Path) -> None:
    shutil.copytree(NANO_DIR, tmp_path / "base", ignore=shutil.ignore_patterns("adapters", "*.py"))
    known = Taught(prompt=make_template("brief"), teacher="optimal(weight=0.3)")
    (tmp_path / "base" / "taught.json").write_text(known.model_dump_json(exclude_defaults=True))
    teach(LAKE, tmp_path / "again", base=str(tmp_path / "base"), steps=1)
    assert taught_as(str(tmp_path / "again")) == known


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("small", [teaching.SMALL, 0])
def test_a_teaching_that_is_cut_off_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """All weights of a small model, a LoRA of any other: both end as a base that differs from the one before."""
    lake = get_scenario("frozen-lake")  # the near one
    monkeypatch.setattr(teaching, "SMALL", small)
    monkeypatch.setattr(teaching, "SAVE_S", -1.0)
    monkeypatch.setattr(teaching, "BLOCK", 2)
    whole = teach(lake, tmp_path / "whole", steps=4)
    seen = []

    def cut_off(pace: Any) -> None:
        seen.append(pace.step)
        if pace.step == 4 and len(seen) == 4:
            raise CutOffError

    with pytest.raises(CutOffError):
        teach(lake, tmp_path / "cut", steps=4, progress=cut_off)
    assert (tmp_path / "cut" / BEGUN).exists()
    with pytest.raises(UsageError, match="begun with"):
        teach(lake, tmp_path / "cut", steps=4, answers="own")
    with pytest.raises(UsageError, match="3 steps already"):
        teach(lake, tmp_path / "cut", steps=2)
    resumed = teach(lake, tmp_path / "cut", steps=4, progress=cut_off)
    assert seen == [1, 2, 3, 4, 4]
    assert resumed["losses"] == whole["losses"]
    assert resumed["rows"] == whole["rows"]
    one, other, untaught = weights(tmp_path / "whole"), weights(tmp_path / "cut"), load_base("nano")[0].state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one.keys() == untaught.keys()
    moved = [name for name in one if not torch.equal(one[name], untaught[name])]
    assert any("q_proj" in name for name in moved)
    assert ("model.norm.weight" in moved) == bool(small)
    assert 0 < whole["best_actions"] < 1
    assert json.loads((tmp_path / "whole" / "taught.json").read_text()) == whole
    assert not (tmp_path / "cut" / BEGUN).exists()


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("base", ["./no/such/folder", "nano"])
def test_a_teaching_that_cannot_begin_leaves_no_folder(base: str, tmp_path: Path) -> None:
    """It left one with a lock in it; from Python, 0 steps were a traceback."""
    with pytest.raises((ModelError, UsageError), match=r"no/such/folder|0 steps teach nothing"):
        teach(get_scenario("frozen-lake"), tmp_path / "out" / "taught", base=base, steps=0 if base == "nano" else 1)
    with pytest.raises(UsageError, match="0 steps teach nothing"):
        build(tmp_path / "out", steps=0)
    assert not (tmp_path / "out").exists()


async def test_own_answers_are_those_that_hold_a_legal_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in words that nano never saw it often names none, and what it then says is no row. A
    loop runs, as in a notebook's cell.
    """
    lake, template = get_scenario("frozen-lake"), make_template("none")
    monkeypatch.setattr(sampled, "AT_ONCE", 32)
    monkeypatch.setattr(sampled, "MOST_TOKENS", 40)  # longer ones are cut off
    model = LocalModel("nano", *load_base("nano"))
    turns = list(itertools.islice(own_rows(lake, model, nullcontext, 0, template), 60))
    assert all(len(turn) == 1 for turn in turns)
    rows = [row for (row,) in turns]
    assert all(parse_action(row.answer, lake.actions).action for row in rows)
    assert all(row.prompt.prefix == template.render(lake, "").prefix for row in rows)
    assert {row.best for row in rows} == {True, False}
    assert len({row.answer for row in rows}) > 10  # its own words, and not a list of actions


def test_own_answers_are_asked_with_the_turns_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each player itself saw and chose, as it was asked in play."""
    monkeypatch.setattr(sampled, "AT_ONCE", 2)
    template = make_template("brief").model_copy(update={"history": 2})
    asked = []

    class Listening(LocalModel):
        async def complete(self, prompt: Prompt, *args: Any, **more: Any) -> Completion:
            completion = await super().complete(prompt, *args, **more)
            asked.append((prompt, completion.text))
            return completion

    duel = get_scenario("snake-duel")
    turns = own_rows(duel, Listening("nano", *load_base("nano")), nullcontext, 0, template)
    rows = [row for (row,) in itertools.islice(turns, 24)]
    for row in rows:
        assert (row.prompt, row.answer) in asked
    assert {row.prompt.state.count("You chose ") for row in rows} == {0, 1, 2}


def test_own_answers_are_rows_where_nobody_knows_the_best_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference player that failed ended the teaching; without one every game was played again for nothing."""
    monkeypatch.setattr(sampled, "AT_ONCE", 4)
    model = LocalModel("nano", *load_base("nano"))

    def rows(lake: Scenario) -> list[Row]:
        return [row for (row,) in itertools.islice(own_rows(lake, model, nullcontext, 0, make_template("brief")), 8)]

    known = rows(replace(LAKE, reference=failing))
    assert {row.best is None for row in known} == {True, False}
    monkeypatch.setattr(sampled, "decided", None)
    assert rows(replace(LAKE, reference=None)) == [replace(row, best=None) for row in known]


class Scripted:
    """Says in each batch of episodes what it is told to say there."""

    name = "scripted"

    def __init__(self, says: Callable[[int, int], Completion]) -> None:
        self.extra_settings: dict[str, Any] = {}
        self._says, self.batch, self.asked = says, 0, list[tuple[int, int]]()  # in which batch, with which seed

    async def complete(self, prompt: Prompt, sampling: Sampling, seed: int, **more: Any) -> Completion:
        self.asked.append((self.batch, seed))
        return self._says(self.batch, seed)

    async def close(self) -> None:
        self.batch += 1


@pytest.fixture
def lake(near: None, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """The near one, two episodes at once."""
    monkeypatch.setattr(sampled, "AT_ONCE", 2)
    return get_scenario("frozen-lake")


def sampled_rows(lake: Scenario, model: Scripted, seed: int = 0) -> Iterator[Row]:
    return (row for (row,) in own_rows(lake, model, nullcontext, seed, make_template("brief")))


RIGHT = "so <action>right</action>"


def test_an_answer_that_was_cut_off_is_no_row(lake: Scenario) -> None:
    """It may hold a legal action: learnt with an end behind it, it would end where it was cut."""

    def says(batch: int, seed: int) -> Completion:
        return Completion("cut: " + RIGHT, "length") if seed % 2 else Completion(RIGHT, "stop")

    model = Scripted(says)
    assert {row.answer for row in itertools.islice(sampled_rows(lake, model), 12)} == {RIGHT}
    assert {seed % 2 for _, seed in model.asked} == {0, 1}


def test_only_batches_in_a_row_without_a_row_end_it(lake: Scenario) -> None:
    def says(batch: int, seed: int) -> Completion:
        return Completion(RIGHT if batch % sampled.TRIES == sampled.TRIES - 1 and batch < 10 else "hm", "stop")

    model, rows = Scripted(says), list[Row]()
    with pytest.raises(UsageError, match=f"no legal action in {2 * sampled.TRIES} episodes of frozen-lake\n"):
        rows.extend(sampled_rows(lake, model))
    assert [row.answer for row in rows] == [RIGHT] * len(rows) != []
    assert model.batch == 8 + sampled.TRIES  # the last that it answered, and so many more


def test_games_that_fail_are_named_where_there_is_no_row(lake: Scenario) -> None:
    class Broken(FrozenLake):
        def step(self, actions: Any) -> Any:
            raise ValueError("it stands still")

    def make(start_seed: int, chance_seed: int) -> FrozenLake:
        whole = lake.make(start_seed, chance_seed)
        assert isinstance(whole, FrozenLake)
        return Broken(whole.desc, whole.slippery, whole.step_limit, chance_seed)

    model = Scripted(lambda batch, seed: Completion(RIGHT, "stop"))
    with pytest.raises(UsageError, match=r"2 of the last 2 failed: .*it stands still"):
        list(sampled_rows(replace(lake, make=make), model))


def test_every_batch_has_starts_and_luck_of_its_own(lake: Scenario) -> None:
    """The batches of a scenario with one start differ by their luck alone."""

    def played(seed: int) -> tuple[list[tuple[int, int]], list[str]]:
        model = Scripted(lambda batch, seed: Completion(RIGHT, "stop"))
        rows = list(itertools.islice(sampled_rows(lake, model, seed), 24))
        return model.asked, [row.prompt.state for row in rows]

    asked, states = played(0)
    assert len({batch for batch, _ in asked}) > 2
    assert len({seed for _, seed in asked}) == len(asked)
    assert played(0) == (asked, states)
    other_asked, other_states = played(1)
    assert not {seed for _, seed in other_asked} & {seed for _, seed in asked}
    assert set(other_states) != set(states)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("small", [teaching.SMALL, 0])
def test_a_base_in_bfloat16_loses_nothing_of_what_it_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """Only the base's weights are rounded, and only while it learns; its rotary angles and the LoRA never are.

    Where all weights are trained they are read in float32.
    """
    monkeypatch.setattr(teaching, "SMALL", small)
    monkeypatch.setattr(loading, "usual_dtype", lambda base, device: "bfloat16")
    taught = teaching.Teaching(get_scenario("frozen-lake"), "nano", 0, 4, USUAL, "words")
    assert {p.dtype for p in taught.parameters} == {torch.float32}
    assert {buffer.dtype for buffer in taught.model.buffers()} == {torch.float32}
    own = load_base("nano", dtype="float32")[0].state_dict()
    if small:
        assert all(torch.equal(weights, own[name]) for name, weights in taught.model.state_dict().items())
    rows = [row for (row,) in itertools.islice(taught._turns(7), 6)]
    assert taught._learn(rows) > taught._learn(rows)
    assert taught.facts()["dtype"] == ("float32" if small else "bfloat16")
    learned = {name: weights.detach().clone() for name, weights in taught.model.named_parameters()}
    taught.write(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    if small:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(written[name], learned[name])
        return
    name = "model.layers.0.self_attn.q_proj"
    a, b = (learned[f"base_model.model.{name}.lora_{side}.default.weight"] for side in "AB")
    change = written[f"{name}.weight"] - own[f"{name}.weight"]
    assert change.abs().max() > 0
    torch.testing.assert_close(change, 2 * b @ a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("small", [0, teaching.SMALL])
def test_a_batch_in_parts_teaches_what_it_teaches_whole(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """All 24 rows of Snake went through a model of 135 million parameters at once, in 13 GB."""
    monkeypatch.setattr(teaching, "SMALL", small)
    seen: list[int] = []
    real = answer_logprobs

    def asked(trunk: Any, head: Any, prefix: Any, pairs: Any, pad_id: int) -> Any:
        seen.append(len(pairs) * max(len(rest) + len(answer) for rest, answer in pairs))
        return real(trunk, head, prefix, pairs, pad_id)

    monkeypatch.setattr(teaching, "answer_logprobs", asked)
    whole, parts = (Teaching(LAKE, "nano", 0, 4, USUAL, "words") for _ in range(2))
    parts.at_once = 300
    rows = [row for (row,) in itertools.islice(whole._turns(7), 12)]
    assert parts._learn(rows) == pytest.approx(whole._learn(rows), rel=1e-4)
    assert len(seen) > 4
    assert max(seen[:-1]) <= 300 < seen[-1]
    for ours, theirs in zip(parts.parameters, whole.parameters, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=2e-6)
    assert max(float(ours.grad.abs().max()) for ours in parts.parameters if ours.grad is not None) > 1e-3
    together = len(seen) - 1
    seen.clear()
    monkeypatch.setattr(teaching, "longest_sharing", lambda trunk: 1)
    parts._learn(rows)
    assert len(seen) > together  # where a row is longer than what may share a prefix, each reads the prefix whole


@pytest.mark.usefixtures("near")
def test_weights_that_were_taught_are_never_there_without_how_they_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two, it left a base that was asked in the usual way, and nobody had said so."""
    out, template, written = tmp_path / "taught", make_template("none"), teaching.Teaching.write

    def killed(self: teaching.Teaching, out: Path) -> None:
        written(self, out)
        raise CutOffError

    with monkeypatch.context() as patch:
        patch.setattr(teaching.Teaching, "write", killed)
        with pytest.raises(CutOffError):
            teach(get_scenario("frozen-lake"), out, steps=1, template=template)
    agent = make_agent(f"base:{out}")
    assert isinstance(agent, LanguageAgent)
    assert agent.template == template
    teach(get_scenario("frozen-lake"), out, steps=1, template=template)
    assert not (out / BEGUN).exists()


@pytest.mark.usefixtures("near")
def test_a_full_disk_at_the_end_of_a_teaching_is_one_sentence_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lake = tmp_path / "taught", get_scenario("frozen-lake")

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(RunError, match=r"^the disk is full in .*No space left on device") as refused:
            teach(lake, out, steps=1)
    assert "the same command goes on" in (refused.value.fix or "")
    assert (out / BEGUN).exists()
    teach(lake, out, steps=1)
    assert not (out / BEGUN).exists()


@pytest.mark.usefixtures("near")
def test_a_taught_base_is_asked_as_it_was_taught(tmp_path: Path) -> None:
    """Asked with another prompt than it was taught, it gives no legal action, and nobody had said so."""
    lake, out, brief = get_scenario("frozen-lake"), tmp_path / "taught", make_template("brief")
    template = make_template("none").model_copy(update={"history": 2})
    teach(lake, out, steps=1, template=template)

    def asked(given: PromptTemplate | None) -> PromptTemplate:
        agent = make_agent(f"base:{out}", template=given)
        assert isinstance(agent, LanguageAgent)
        return agent.template

    assert asked(None) == template
    assert asked(brief) == brief
    assert make_config(given={"base": str(out)}).prompt == template
    assert make_config("nano", given={"base": str(out)}, settings=["prompt=brief"]).prompt == brief
    assert make_config(given={"base": "nano"}).prompt == brief
    held = make_config(given={"base": str(out)}, settings=["prompt=brief"])
    assert make_config("nano", held=held, given={"steps": 7}).prompt == brief  # a run that goes on keeps its own
    file = out / "taught.json"
    for damage in ("{", "[]", "{}", '{"prompt": {"name": 3}}'):
        file.write_text(damage)
        with pytest.raises(ModelError, match="nobody knows how the base was asked"):
            make_config(given={"base": str(out)})
    file.unlink()
    assert asked(None) == brief
    for elsewhere in ("a/node's.gguf", "~no-such-user/base", "~no-such-user/base.gguf"):  # only its loading fails
        assert make_config("nano", given={"base": elsewhere}).prompt == brief
    with pytest.raises(ModelError, match="is no folder"):
        preset_for("~no-such-user/base.gguf")


def test_the_chat_templates_arguments_of_a_teaching_are_kept(tmp_path: Path) -> None:
    """A thinking model was taught in another form than it was then trained and played in."""
    base, out = tmp_path / "thinker", tmp_path / "taught"
    shutil.copytree(NANO_DIR, base, ignore=shutil.ignore_patterns("adapters", "*.py"))
    written = (base / "chat_template.jinja").read_text()
    asks = "{% if enable_thinking is not defined %}{{ raise_exception('it thinks') }}{% endif %}"
    (base / "chat_template.jinja").write_text(asks + written)
    chat = {"enable_thinking": False}
    for answers in ("words", "own"):
        with pytest.raises(ModelError, match="it thinks"):
            teach(LAKE, tmp_path / "silent", base=str(base), steps=1, answers=answers)
        assert not (tmp_path / "silent").exists()
    quick = ["--base", str(base), "--steps", "1", "--out", str(out)]
    given = ["--prompt", "none", "--chat", json.dumps(chat)]
    run("teach", "frozen-lake", *quick, *given)
    taught = Taught(prompt=make_template("none"), chat=chat)
    assert taught_as(str(out)) == taught
    config = make_config(given={"base": str(out)})
    assert Taught(prompt=config.prompt, chat=config.chat) == taught
    assert make_config(given={"base": str(out)}, settings=['chat={"enable_thinking": true}']).chat != chat
    for told in (None, {"enable_thinking": True}):
        agent = make_agent(f"base:{out}", chat=told)
        assert isinstance(agent, LanguageAgent)
        assert isinstance(agent.model, LocalModel)
        assert agent.model.chat.arguments == agent.settings()["chat"] == (told or chat)
    again = ["--base", str(out), "--steps", "1", "--out", str(tmp_path / "again")]
    told = run("teach", "frozen-lake", *again).output
    assert f"asked with {taught.said}, as its base was when it was taught" in told
    assert taught_as(str(tmp_path / "again")) == taught
    small = ["groups=1", "group_size=2", "select=all", "evaluation=1(film=0)"]
    trained = ["--base", str(out), "--steps", "1", "--out", str(tmp_path / "run"), *(f"--set={one}" for one in small)]
    told = run("train", "frozen-lake", *trained).output
    assert f"asked with {taught.said}, as its base was when it was taught" in re.sub(r"\s+", " ", told)
    with pytest.raises(UsageError, match=r"^--chat is no JSON"):
        run("teach", "frozen-lake", *quick, "--chat", "no")


def test_a_teaching_goes_on_with_the_same_arguments_of_the_chat_template_alone(tmp_path: Path) -> None:
    def teaching_with(chat: dict[str, Any]) -> Teaching:
        return Teaching(LAKE, "nano", 0, 1, USUAL.but(None, chat), "words")

    teaching_with({"enable_thinking": False}).save(tmp_path / BEGUN)
    teaching_with({"enable_thinking": False}).restore(tmp_path / BEGUN)
    with pytest.raises(UsageError, match="--chat"):
        teaching_with({}).restore(tmp_path / BEGUN)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("small", [teaching.SMALL, 0])
def test_own_answers_are_the_bases_however_much_it_has_learned(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(teaching, "SMALL", small)
    monkeypatch.setattr(sampled, "AT_ONCE", 4)
    taught = teaching.Teaching(get_scenario("frozen-lake"), "nano", 0, 4, USUAL, "own")
    first = [row for (row,) in itertools.islice(taught._turns(7), 6)]
    before = {name: weights.detach().clone() for name, weights in taught.model.named_parameters()}
    for _ in range(3):
        taught._learn(first)
    assert any(not torch.equal(before[name], weights) for name, weights in taught.model.named_parameters())
    assert [row for (row,) in itertools.islice(taught._turns(7), 6)] == first


@pytest.mark.usefixtures("near")
def test_a_base_without_a_legal_answer_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "AT_ONCE", 4)
    monkeypatch.setattr(sampled, "MOST_TOKENS", 3)
    with pytest.raises(UsageError, match="gave no legal action in 16 episodes of frozen-lake"):
        teach(get_scenario("frozen-lake"), tmp_path, steps=1, answers="own")
    with pytest.raises(UsageError, match="--from own takes the base's own"):
        run("teach", "frozen-lake", "--out", "x", "--from", "own", "--no-words")


@pytest.mark.parametrize("torn", [True, False])
def test_a_damaged_beginning_is_named_and_kept(torn: bool, tmp_path: Path) -> None:
    """One that another version had written was a traceback."""
    if torn:
        (tmp_path / BEGUN).write_bytes(b"torn")
    else:
        planned = Teaching(LAKE, "nano", 0, 2, USUAL, "words").planned
        torch.save({"planned": planned, "step": 1, "rows": 48}, tmp_path / BEGUN)
    before = (tmp_path / BEGUN).read_bytes()
    with pytest.raises(RunError, match=r"teach\.pt is damaged, or of another version"):
        teach(LAKE, tmp_path, steps=2)
    assert (tmp_path / BEGUN).read_bytes() == before


@pytest.mark.usefixtures("near")
def test_a_loss_that_is_not_finite_ends_a_teaching_before_a_weight_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base of numbers that are none was written, over what had been learned."""
    calls = []

    def poisoned(*given: Any) -> Any:
        calls.append(1)
        logprobs, mask = answer_logprobs(*given)
        return logprobs * (float("nan") if len(calls) > 1 else 1.0), mask

    monkeypatch.setattr(teaching, "answer_logprobs", poisoned)
    monkeypatch.setattr(teaching, "SAVE_S", -1.0)
    with pytest.raises(RunError, match="not finite in step 2: nan"):
        teach(get_scenario("frozen-lake"), tmp_path / "out", steps=3)
    saved = torch.load(tmp_path / "out" / BEGUN, weights_only=True)
    assert saved["step"] == 1
    assert all(bool(torch.isfinite(weight).all()) for weight in saved["weights"].values())
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_base_of_another_size_never_gets_nanos_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"small": 135_000_000, "large": 3_000_000_000, "org/unknown": None, "taught": 900_000}
    monkeypatch.setattr(presets, "parameters_of", lambda base: sizes[base])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [preset_for(base) for base in sizes] == ["small", "paper", "paper", "nano"]
    for base in ("small", "large", "org/unknown"):
        chosen = make_config(given={"base": base, "scenario": "snake"})
        assert chosen.base == base
        assert chosen.learning_rate < 1e-3
        assert chosen.groups * chosen.group_size < 384
        preset = PRESETS[preset_for(base)]
        for name in ("learning_rate", "groups", "group_size", "steps"):
            assert getattr(chosen, name) == preset[name]
    assert make_config(given={"base": "small"}, settings=["learning_rate=0.5"]).learning_rate == 0.5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [preset_for(base) for base in sizes] == ["small-gpu", "paper", "paper", "nano"]


def test_one_process_teaches_in_a_folder(tmp_path: Path) -> None:
    """Two at once overwrote each other's steps: the one that was further lost a quarter of an hour.

    The same fault was in `nano build` and `train-dqn`; `train`, `lab` and `eval` had their locks.
    """
    with alone(tmp_path / "out"):
        with pytest.raises(RunError, match="another process trains in"):
            teach(LAKE, tmp_path / "out", steps=1)
        with pytest.raises(RunError, match="another process trains in"):
            build(tmp_path / "out", steps=1, scenarios=["frozen-lake"])


def test_who_waited_for_a_teaching_that_ends_does_not_overwrite_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the folder was free was seen before its lock alone, for which one waits a second."""
    model = tmp_path / "out" / "model.safetensors"

    @contextmanager
    def waited(out: Path) -> Iterator[None]:
        with alone(out):
            model.write_text("the first one's")
            yield

    monkeypatch.setattr(begun, "alone", waited)
    with pytest.raises(UsageError, match="is not empty"), begun.alone_in(tmp_path / "out", "teach.pt"):
        model.write_text("another one's")
    assert model.read_text() == "the first one's"

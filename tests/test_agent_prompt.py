"""Prompt templates: presets, files, history, examples, a system message; in evaluation, training and records."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.agent import Completion, LanguageAgent, OnText, Sampling
from msgrpo.episode import Episode, play_episode
from msgrpo.errors import ModelError, RecordError, UsageError
from msgrpo.games import get_scenario
from msgrpo.prompt import (
    PRESETS,
    Example,
    Past,
    Prompt,
    PromptTemplate,
    make_template,
    recorded_template,
)
from msgrpo.specs import make_agent
from msgrpo.train.config import TrainConfig, make_config
from tests.command_line import run

LAKE = get_scenario("frozen-lake")


class Listener:
    """Answers `down` and remembers what it was asked."""

    name = "listener"
    extra_settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.heard: list[Prompt] = []

    async def complete(
        self, prompt: Prompt, sampling: Sampling, seed: int, *, actions: Any = (), on_text: OnText | None = None
    ) -> Completion:
        self.heard.append(prompt)
        return Completion("<action>down</action>", "stop")

    async def close(self) -> None:
        """Nothing to close."""


def play(template: PromptTemplate, seed: int = 3) -> tuple[Episode, list[Prompt]]:
    model = Listener()
    agent = LanguageAgent("listener", model, Sampling(), template)
    episode = asyncio.run(play_episode(LAKE, {"player": agent}, start_seed=seed, chance_seed=0, sampling_seed=0))
    return episode, model.heard


def test_the_usual_template_is_the_one_that_records_know() -> None:
    """Its hash stands in every record of this suite version."""
    assert PromptTemplate().hash == make_template("brief").hash == "c202e38ccaf6"
    assert PromptTemplate().settings == {"template": "c202e38ccaf6"}
    assert len({make_template(name).hash for name in PRESETS}) == len(PRESETS)
    assert PromptTemplate(name="mine").hash == PromptTemplate().hash  # what it is called changes no prompt


def test_a_turn_without_an_action_is_told_so() -> None:
    prompt = PromptTemplate(history=1).render(LAKE, "now", [Past("before", None)])
    assert prompt.state == "before\nYou chose no legal action.\nState: now"


def test_history_tells_the_last_turns_and_only_these() -> None:
    episode, heard = play(PromptTemplate(name="h", history=2))
    assert len(heard) == len(episode.turns) > 3
    states = [turn.state for turn in episode.turns]
    label = "State: "
    assert heard[0].state == states[0]
    assert heard[1].state == f"{states[0]}\nYou chose down.\n{label}{states[1]}"
    for i, prompt in enumerate(heard):
        assert prompt.prefix == heard[0].prefix
        for j, state in enumerate(states):
            assert (state in prompt.state) == (i - 2 <= j <= i)
    assert [turn.state for turn in episode.turns] == states  # the record holds observations


def test_examples_and_system_stand_in_the_fixed_part() -> None:
    template = PromptTemplate(name="few", system="Be quick.", examples=(Example(state="S1", answer="A1"),))
    _, heard = play(template)
    assert heard[0].prefix.endswith("State: S1\nA1\nState: ")
    assert heard[0].messages == [
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": heard[0].prefix + heard[0].state},
    ]


def test_what_follows_the_state_stands_after_it() -> None:
    _, heard = play(PromptTemplate(name="x", instructions="Rules: {rules}\nNow: {state}\nChoose from {actions}."))
    assert heard[0].state.endswith("\nChoose from up, down, left, right.")
    assert heard[0].prefix.endswith("\nNow: ")


@given(st.integers(0, 5), st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["up", None])), max_size=8))
def test_at_most_history_turns_are_kept(history: int, past: list[tuple[str, str | None]]) -> None:
    turns = [Past(*one) for one in past]
    assert list(PromptTemplate(history=history).kept(turns)) == (turns[-history:] if history else [])


@given(st.text())
def test_rules_with_braces_are_text(rules: str) -> None:
    """What a game says is never taken for a field."""
    from dataclasses import replace

    prompt = PromptTemplate(instructions="{rules}|{state}").render(replace(LAKE, rules=rules), "{rules}{state}")
    assert prompt.prefix + prompt.state == f"{rules}|{{rules}}{{state}}"


def test_a_toml_file_has_all_fields_and_any_other_text_is_the_instructions(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('system = "s"\nhistory = 3\n[[examples]]\nstate = "a"\nanswer = "b"\n')
    found = make_template(str(file))
    assert (found.name, found.system, found.history, found.examples[0].answer) == ("mine", "s", 3, "b")
    plain = tmp_path / "plain.txt"
    plain.write_text('Use JSON {"a": 1}. {rules} {state}')
    assert make_template(str(plain)).instructions == 'Use JSON {"a": 1}. {rules} {state}'


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.toml", "history = -1", "history"),
        ("x.toml", "histroy = 1", "histroy"),
        ("x.toml", "history = ", "cannot be read"),
        ("x.txt", "{rulez}", "no field {rulez}"),
        ("x.txt", "{state} and {state}", "twice"),
        ("x.txt", None, "neither a preset nor a file"),
    ],
)
def test_a_wrong_template_is_refused_with_what_is_wrong(
    tmp_path: Path, name: str, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=told.replace("{", r"\{")):
        make_template(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"histroy": 1}', 'histroy'),
        ('{"history": -1}', "history"),
        ('{"history": 1', "--prompt is no JSON"),
        ('{"instructions": "{rulez}"}', "no field {rulez}"),
        ('{"instructions": "{state} {state}"}', "twice"),
        (json.dumps({"instructions": "Play well. " * 500, "x": 1}), "x"),
        ('{state} and what now?', "neither a preset nor a file"),
    ],
)  # fmt: skip
def test_wrong_fields_in_json_are_refused_with_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told.replace("{", r"\{")) as refused:
        make_template(text)
    assert len(str(refused.value)) < 400


def test_a_template_is_written_as_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('system = "It\'s \u00fcber"\nhistory = 3\n[[examples]]\nstate = "a\\nb"\nanswer = "c"\n')
    renamed = PromptTemplate(name="none", history=1)
    for template in (*map(make_template, (*PRESETS, str(file))), renamed):
        assert make_template(template.written) == template
        assert make_config(settings=[f"prompt={template.written}"]).prompt == template
        assert (template.written in PRESETS) == (template.name in PRESETS and template != renamed)
    assert make_template('{"history": 2}') == PromptTemplate(name="given", history=2)


def test_a_prompt_in_place_of_a_files_name_is_told_shortly() -> None:
    with pytest.raises(UsageError, match="neither a preset nor a file") as told:
        make_template("Play well. " * 500)
    assert len(str(told.value)) < 300


def test_a_record_holds_the_template_and_verify_asks_again_with_it(tmp_path: Path) -> None:
    template = PromptTemplate(name="h", system="s", history=1, instructions="{rules} {state}")
    episode, _ = play(template)
    assert recorded_template(json.loads(episode.model_dump_json())["settings"]["player"]) == template
    from msgrpo.evals.verify import first_difference

    assert first_difference(episode) is None
    episode.prefix["player"] += "!"
    assert "prompt of player" in str(first_difference(episode))
    assert recorded_template({"template": "0", "prompt": {"name": "h"}}) is None


def test_training_takes_the_same_template_and_the_adapter_is_asked_with_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    assert torch is not None
    from msgrpo.models.asked import trained_as

    config = make_config(settings=["prompt=none"])
    assert config.prompt == make_template("none")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert trained_as(tmp_path).prompt == make_template("none")
    nothing = json.loads(config.model_dump_json()) | {"chat": None}
    (tmp_path / "config.json").write_text(json.dumps(nothing))
    assert trained_as(tmp_path).chat == TrainConfig.model_validate(nothing).chat == {}  # null was called damaged
    (tmp_path / "config.json").write_text('{"prompt": {"of a later version": 1}}')
    of_tomorrow = "or of a later version, so nobody knows how the adapter was asked"
    with pytest.raises(ModelError, match=of_tomorrow) as later:  # it was asked as usual, then called damaged
        trained_as(tmp_path)
    assert "take the msgrpo that wrote it" in str(later.value.fix)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()  # as a file that nobody may read; a copy would not help
    with pytest.raises(ModelError, match="cannot be read, so nobody knows") as unread:
        trained_as(tmp_path)
    assert unread.value.fix is None
    file = tmp_path / "h.toml"
    file.write_text("history = 1")
    with pytest.raises(UsageError, match="history"):
        make_config(settings=[f"prompt={file}", "explore=branch(episodes=2)"])


def test_the_command_plays_with_a_file_and_the_table_does_not_mix_prompts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "short.txt"
    file.write_text("Rules: {rules}\nActions: {actions}\nState: ")
    arguments = ["eval", "nano", "--scenario", "frozen-lake", "--episodes", "2", "--max-tokens", "48"]
    for out, extra in (("a", []), ("b", ["--prompt", str(file)])):
        run(*arguments, "--out", str(tmp_path / out), *extra)
    with pytest.raises(RecordError, match="template"):
        run("leaderboard", str(tmp_path / "a"), str(tmp_path / "b"))


def test_an_endpoint_gets_the_chat_templates_arguments_in_every_request() -> None:
    spec, chat = "endpoint:http://127.0.0.1:8000/v1#m", {"enable_thinking": False}
    body = {"min_p": 0.1}
    for told, sent in ((None, body), (chat, {"chat_template_kwargs": chat} | body)):
        agent = make_agent(spec, endpoint={"body": body}, chat=told)
        assert agent.settings()["body"] == sent
    assert make_agent(spec, chat=chat).settings()["body"] == {"chat_template_kwargs": chat}


def test_the_study_of_words_asks_with_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """It began the prompt without it, so what it measured was another prompt's."""
    pytest.importorskip("torch")
    from msgrpo.models.loading import nano

    root = Path(__file__).parents[1] / "benchmarks"
    for folder in (root, root / "studies"):
        monkeypatch.syspath_prepend(folder)
    study = importlib.import_module("words")
    model = nano()
    for template in (PromptTemplate(), PromptTemplate(name="s", system="You play to win.", history=1)):
        continued = study.Continued("nano", template)
        prompt = template.render(LAKE, "Step 2 of 8.", [Past("Step 1 of 8.", "up")])
        begun = Prompt(prompt.prefix, prompt.state + continued._tail)
        assert continued._ids([begun]) == model.chat.ids([prompt])

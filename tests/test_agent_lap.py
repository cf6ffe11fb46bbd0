"""The language-agent policy: ψ is total, T keeps what never changes in front."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msgrpo_agent.errors import MsgrpoError, UsageError
from msgrpo_agent.games import SCENARIOS, get_scenario
from msgrpo_agent.parse import ParseFailure, parse_action, thought
from msgrpo_agent.prompt import PromptTemplate
from msgrpo_agent.specs import make_agent

ACTIONS = ("up", "down", "left", "right")
PIECES = st.sampled_from(
    ["<action>", "</action>", "up", " UP ", "<ACTION>", "</think>", "\n", "jump", "x", "é", "\x00"]
)


@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
def test_any_text_gives_an_action_or_a_named_failure(text: str) -> None:
    parsed = parse_action(text, ACTIONS)
    assert (parsed.action in ACTIONS) != (parsed.failure is not None)


@given(
    st.text(alphabet=st.characters(blacklist_characters="<>")),
    st.sampled_from(ACTIONS),
    st.sampled_from([str.upper, str.lower, str.title]),
)
def test_a_closed_tag_is_found_behind_any_words(words: str, action: str, case: object) -> None:
    assert parse_action(f"{words}<action> {case(action)}\n</action>", ACTIONS).action == action  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "action", "failure"),
    [
        ("", None, ParseFailure.EMPTY),
        (" \n", None, ParseFailure.EMPTY),
        ("go up", None, ParseFailure.NO_TAG),
        ("<action>up", None, ParseFailure.NO_TAG),
        ("<action></action>", None, ParseFailure.ILLEGAL),
        ("<action>jump</action>", None, ParseFailure.ILLEGAL),
        ("<action>up</action> no, <action>left</action>", "left", None),
        ("<action>up</action> no, <action>jump</action>", None, ParseFailure.ILLEGAL),
        ("<think><action>up</action></think><action>down</action>", "down", None),
        ("<think><action>up</action></think>", None, ParseFailure.EMPTY),
    ],
)
def test_named_cases(text: str, action: str | None, failure: ParseFailure | None) -> None:
    parsed = parse_action(text, ACTIONS)
    assert (parsed.action, parsed.failure) == (action, failure)


def test_thought_is_what_comes_before_the_last_tag() -> None:
    assert thought("a hole ahead <action>left</action>") == "a hole ahead"
    assert thought("no tag") == "no tag"


@pytest.mark.parametrize("id", SCENARIOS)
def test_the_prefix_is_fixed_and_says_rules_and_actions(id: str) -> None:
    scenario, template = get_scenario(id), PromptTemplate()
    game = scenario.new(1, 1)
    prompts = [template.render(scenario, scenario.new(s, 1).observe(game.players[0])) for s in (1, 2)]
    assert prompts[0].prefix == prompts[1].prefix
    assert scenario.rules in prompts[0].prefix
    assert ", ".join(game.actions) in prompts[0].prefix
    assert prompts[0].messages[0]["content"].endswith(game.observe(game.players[0]))


def test_the_poison_is_in_the_rules() -> None:
    assert "Apples (A) are worth +1 point" in get_scenario("snake").rules
    assert "Apples (A) are worth -1 point" in get_scenario("snake-poison-apple").rules


@pytest.mark.parametrize("spec", ["nanoo", "adapter:", "endpoint:http://x", "", "human", "gpt:4"])
def test_a_wrong_agent_is_one_clear_error(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_agent(spec)
    assert isinstance(caught.value, MsgrpoError)
    assert caught.value.fix

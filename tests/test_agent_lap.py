"""The language-agent policy: ψ is total, T keeps what never changes in front."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.agent import LONGEST_TEXT, Completion, LanguageAgent, ParseFailure, cleaned, parse_action, thought
from msgrpo.episode import view_of
from msgrpo.errors import MsgrpoError, UsageError
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.prompt import PromptTemplate
from msgrpo.specs import make_agent
from msgrpo.text import duration, printable

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
        ("<think>hm <action>up</action>", None, ParseFailure.EMPTY),  # cut off while it thought
        ("<action>left</action> <think>or <action>up</action>", "left", None),
        ("<action>up</action> then <action>left", "up", None),  # what is not closed is no answer
        ("<action><action>down</action>", "down", None),
        ("<action>up</action> </action>", "up", None),
        ("<act\u0130on>up</act\u0130on>", None, ParseFailure.NO_TAG),  # a letter that lower() would turn into an i
    ],
)
def test_named_cases(text: str, action: str | None, failure: ParseFailure | None) -> None:
    parsed = parse_action(text, ACTIONS)
    assert (parsed.action, parsed.failure) == (action, failure)


def spelled_out(text: str) -> tuple[str | None, ParseFailure | None]:
    """The rule of `parse_action`, character by character: the last closed tag outside of reasoning."""
    answer = text.split("</think>")[-1].split("<think>")[0]
    if not answer.strip():
        return None, ParseFailure.EMPTY
    inside = None
    lowered = "".join(c.lower() if c.isascii() else c for c in answer)
    for end in range(len(lowered)):
        if lowered.startswith("</action>", end):
            before = lowered[:end]
            start = before.rfind("<action>")
            if start >= 0 and "</action>" not in before[start:]:
                inside = answer[start + len("<action>") : end]
    if inside is None:
        return None, ParseFailure.NO_TAG
    named = inside.strip().casefold()
    return (named, None) if named in ACTIONS else (None, ParseFailure.ILLEGAL)


@given(st.lists(st.one_of(PIECES, st.sampled_from(["<think>", "<", ">"])), max_size=30).map("".join))
def test_the_parser_says_what_its_rule_spells_out(text: str) -> None:
    parsed = parse_action(text, ACTIONS)
    assert (parsed.action, parsed.failure) == spelled_out(text)


class Counted(str):
    """A text that counts how many of its characters are copied out of it."""

    copied = 0

    def __getitem__(self, key: object) -> str:
        found = super().__getitem__(key)  # type: ignore[index]
        Counted.copied += len(found)
        return found


@pytest.mark.parametrize("piece", ["<action>", "<action>up</action>", "<think>", "</think>", "</action>"])
def test_a_model_that_loops_does_not_cost_the_square(piece: str) -> None:
    """No time is asserted: 64 s became milliseconds, and a test that hangs has failed."""
    text = Counted(piece * 100_000)
    Counted.copied = 0
    parse_action(text, ACTIONS)
    assert Counted.copied <= 2 * len(text)


async def test_what_a_model_says_is_cleaned_and_bounded_once_for_screen_record_and_parser() -> None:
    said: list[str] = []
    evil = "\x1b[2J" + "x" * (LONGEST_TEXT + 5) + "\r\n\x9b<action>up</action>"

    class Evil:
        name, extra_settings = "evil", {}

        async def complete(self, prompt: Any, sampling: Any, seed: int, *, actions: Any, on_text: Any) -> Completion:
            on_text(evil)
            return Completion(evil, "stop", reasoning="\x1b]0;x\x07")

        async def close(self) -> None: ...

    scenario = get_scenario("snake")
    view = view_of(scenario.new(0, 0), scenario, "snake1", 0)
    decision = await LanguageAgent("evil", Evil()).act(view, on_text=said.append)
    assert decision.action == "up"
    assert decision.completion is not None
    for text in (*said, decision.completion.text, decision.completion.reasoning or ""):
        assert len(text) <= LONGEST_TEXT
        assert not set(text) & set("\x1b\x07\x9b\r")


@given(st.text())
def test_printable_text_is_printable_and_stays_so(text: str) -> None:
    clean = printable(text)
    assert printable(clean) == clean
    assert all(c in "\n\t" or unicodedata.category(c) != "Cc" for c in clean)
    clean.encode()


def test_a_prompt_builds_no_game(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = get_scenario("snake")
    monkeypatch.setattr(type(scenario), "new", lambda *_: pytest.fail("a game was built"))
    assert "up, down, left, right" in PromptTemplate().render(scenario, "state").prefix


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


# ── found by mutation ──


@pytest.mark.parametrize(
    ("text", "action", "failure"),
    [
        # reasoning that is never closed: what stands in it is no answer
        ("<think><action>up</action>", None, ParseFailure.EMPTY),
        ("first <think><action>up</action>", None, ParseFailure.NO_TAG),
        ("<action>up</action><think>or <action>left</action>", "up", None),
        ("<think>a</think><action>up</action><think>b <action>left</action><think>c", "up", None),
        ("<ACTION>up</Action>", "up", None),
        # reasoning whose start is in the prompt; and two reasonings: the last end counts
        ("</think>", None, ParseFailure.EMPTY),
        ("a</think><action>up</action>b</think>", None, ParseFailure.EMPTY),
        # white space, tags without a partner, letters that only Unicode takes for an i
        ("<action>up</action> \n", "up", None),
        ("<think>a</think> \n", None, ParseFailure.EMPTY),
        ("<action>up</action></action>", "up", None),
        ("<action>up <action>left</action>", "left", None),
        ("<actıon>up</actıon>", None, ParseFailure.NO_TAG),
        ("<action>u</action>", None, ParseFailure.ILLEGAL),
    ],
)
def test_named_cases_of_reasoning_and_odd_tags(text: str, action: str | None, failure: ParseFailure | None) -> None:
    parsed = parse_action(text, ACTIONS)
    assert (parsed.action, parsed.failure) == (action, failure)


def test_a_games_own_spelling_of_an_action_is_kept() -> None:
    assert parse_action("<action>NORTH</action>", ("North", "South")).action == "North"


@pytest.mark.parametrize(
    ("said", "legal", "action"),
    [
        ("BXC3", ("Bxc3",), "Bxc3"),
        ("BXC3", ("bxc3",), "bxc3"),
        ("BXC3", ("bxc3", "Bxc3"), "bxc3"),
        ("Bxc3", ("bxc3", "Bxc3"), "Bxc3"),
        ("bxc3", ("Bxc3",), None),  # the pawn's move, which is not legal, and not the bishop's
        ("BXC3", ("e4",), None),
        ("BXC3", (), None),  # nothing is legal here
    ],
)
def test_of_actions_that_differ_in_case_only_a_legal_one_is_meant(
    said: str, legal: tuple[str, ...], action: str | None
) -> None:
    parsed = parse_action(f"<action>{said}</action>", ("bxc3", "Bxc3", "e4"), legal)
    assert (parsed.action, parsed.failure) == (action, None if action else ParseFailure.NOT_NOW)


def test_a_thought_cannot_drive_the_terminal() -> None:
    assert thought(" red \x1b[31m<action>left</action>") == "red \N{REPLACEMENT CHARACTER}[31m"


def test_reasoning_that_was_cut_off_stays_reasoning() -> None:
    """Of a very long answer the end is kept; the tag that opened its reasoning lies before that."""
    long = "<think>" + "x" * LONGEST_TEXT + "<action>up</action>"
    assert parse_action(long, ACTIONS) == parse_action(cleaned(long), ACTIONS)
    assert len(cleaned(long)) == LONGEST_TEXT
    closed = "<think>" + "x" * LONGEST_TEXT + "</think><action>up</action>"
    assert parse_action(cleaned(closed), ACTIONS).action == "up"
    plain = "x" * LONGEST_TEXT + "<action>up</action>"
    assert parse_action(cleaned(plain), ACTIONS).action == "up"


def test_durations() -> None:
    assert [duration(seconds) for seconds in (9.9, 185, 7800)] == ["9 s", "3:05 min", "2:10 h"]

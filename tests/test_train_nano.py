"""nano's text: what it is taught is true, lies are found, words can be acted on; a build goes on after a stop."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from msgrpo.errors import RunError, UsageError
from msgrpo.game import Game, Outcome, stream
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.snake import DELTA
from msgrpo.train.nano import build as nano
from msgrpo.train.nano.build import Build, build, lists_only, rows_of
from msgrpo.train.nano.words import Sight, Words, follow, look, truth
from tests.command_line import invoked


def position(scenario_id: str, start: int, moves: int) -> Game:
    """A game some random moves after its start, not over."""
    scenario = get_scenario(scenario_id)
    game, generator = scenario.new(start, start), stream(start, "moves")
    for _ in range(moves):
        after = game.copy()
        after.step({player: str(generator.choice(game.actions)) for player in game.players})
        if after.outcome is not Outcome.PLAYING:
            break
        game = after
    return game


positions = st.builds(position, st.sampled_from(sorted(SCENARIOS)), st.integers(0, 500), st.integers(0, 12))


@given(positions, st.booleans())
def test_what_is_taught_can_be_read_and_is_true(game: Game, further: bool) -> None:
    for player in game.players:
        text = look(game, player, further=further)
        words = Words.read(text + "<action>up</action>")
        assert words is not None, text
        found = truth(words, game, player)
        assert found.directions, text
        assert found.target, text
        assert found.whole, text
        assert words.looks_ahead == further
        assert found.ahead is (True if words.looks_ahead else None)


@given(
    positions,
    st.sampled_from(sorted(DELTA)),
    st.sampled_from(["free", "hole", "body", "wall", "edge", "apple", "goal"]),
)
def test_a_wrong_word_about_a_neighbour_is_found(game: Game, action: str, seen: str) -> None:
    player = game.players[0]
    words = Words.read(look(game, player))
    assert words is not None
    changed = replace(words, beside=words.beside | {action: (words.beside[action][0], seen)})
    assert truth(changed, game, player).directions == (words.beside[action][1] == seen)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"at": (3, 3)}, "directions"),
        ({"target": ("goal", (2, 0), "right down")}, "target"),
        ({"target": ("goal", (3, 0), "right")}, "target"),
        ({"target": ("hole", (1, 3), "right")}, "target"),
        ({"target": None}, "target"),
        ({"path": ((0, 2), (2, 2))}, "ahead"),  # a jump
        ({"path": ((1, 3), (2, 3))}, "ahead"),  # over a hole
        ({"path": ((0, 2), (0, 1))}, "ahead"),  # not to the goal
        ({"path": ((0, 2), (0, 3)) * 6}, "ahead"),  # to and fro
        ({"path": ()}, "ahead"),  # there is one
        ({"chances": dict.fromkeys(DELTA, 100), "path": None}, "ahead"),  # there is no chance on dry ice
    ],
)
def test_each_kind_of_lie_is_found(change: dict[str, object], part: str) -> None:
    game = get_scenario("frozen-lake").new(1, 1)
    assert game.board().text().startswith("3 P O _ O\n2 _ _ O _")
    words = Words.read(look(game, "player", further=True))
    assert words is not None
    found = truth(replace(words, **change), game, "player")  # type: ignore[arg-type]
    assert getattr(found, part) is False
    assert not found.whole


def test_chances_are_those_of_the_exact_optimum_within_five_points() -> None:
    game = get_scenario("frozen-lake-4x4").new(0, 0)
    words = Words.read(look(game, "player", further=True))
    assert words is not None
    assert words.chances is not None
    assert truth(words, game, "player").ahead
    wrong = replace(words, chances={action: chance + 6 for action, chance in words.chances.items()})
    assert truth(wrong, game, "player").ahead is False


@pytest.mark.parametrize("text", ["", "up", "at (0,3).", "at (0,3) up free. goal (3,0) down.", "<action>up</action>"])
def test_words_of_another_form_are_no_words_and_not_true(text: str) -> None:
    assert Words.read(text) is None
    assert not truth(None, get_scenario("frozen-lake").new(1, 1), "player").whole


def follows(scenario_id: str, episodes: int, further: bool) -> float:
    """The mean return of somebody who acts on true words."""
    total, scenario, generator = 0.0, get_scenario(scenario_id), stream(0, "follow")
    for start in islice(scenario.starts("train"), episodes):
        game = scenario.new(start, start)
        while game.outcome is Outcome.PLAYING:
            sight = Sight(game, game.players[0])
            words = Words.read(look(game, game.players[0], further=further))
            game.step({game.players[0]: follow(words, sight.values, sight.slippery, generator)})
        total += game.returns[game.players[0]]
    return total / episodes


def test_true_words_are_worth_following() -> None:
    """A path never fails on dry ice; four neighbours sometimes do; in Snake both find most apples; nothing is at
    random.
    """
    assert follows("frozen-lake", 60, further=True) == 1.0
    assert 0.6 < follows("frozen-lake", 60, further=False) < 1.0
    assert follows("snake", 20, further=True) > 4
    assert follows("snake", 20, further=False) > 4
    assert follows("snake-poison-apple", 20, further=False) > -0.5


def test_words_that_cannot_be_read_are_followed_anywhere() -> None:
    generator = stream(0, "nowhere")
    assert {follow(None, {}, False, generator) for _ in range(100)} == set(DELTA)


def test_a_lesson_ends_with_its_own_thought_and_a_list_has_no_board() -> None:
    scenario = get_scenario("snake")
    (row,) = islice(rows_of(scenario, 1, further=0.0, cells=3), 1)
    thoughts = row.answer.partition("<action>")[0].split(" at ")
    assert len(thoughts) == 4
    (short,) = lists_only(iter([row]))
    assert short.answer == row.answer
    assert short.prompt.prefix == ""
    assert row.prompt.state.startswith(short.prompt.state)
    assert short.prompt.state.splitlines()[-1].startswith("Enemy snake 2")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano, "MIX", {"frozen-lake": 1})
    monkeypatch.setattr(nano, "BLOCK", 2)


@pytest.mark.usefixtures("small")
def test_a_build_that_was_cut_off_goes_on_to_the_same_model(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", steps=6)

    def stop(step: int, steps: int, loss: float) -> None:
        if step == 4:  # in the middle of a block
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "cut", steps=6, progress=stop)
    assert (tmp_path / "cut" / "build.pt").exists()
    again = build(tmp_path / "cut", steps=6)
    assert again["loss"] == whole["loss"]
    names = [sorted(file.name for file in (tmp_path / folder).iterdir()) for folder in ("whole", "cut")]
    assert names[0] == names[1]
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("whole", "cut")]
    assert weights[0] == weights[1]
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "whole").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # not for its owner alone


@pytest.mark.usefixtures("small")
def test_a_full_disk_at_the_end_of_a_build_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(RunError, match="No space left on device"):
        build(tmp_path / "full", steps=2)
    assert (tmp_path / "full" / "build.pt").exists()  # the same command goes on


@pytest.mark.usefixtures("small")
def test_a_loss_that_is_not_finite_ends_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nano.answer_loss
    monkeypatch.setattr(nano, "answer_loss", lambda *given: whole(*given) * float("inf"))
    with pytest.raises(RunError, match="not finite in step 1: inf"):
        build(tmp_path / "out", steps=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small")
def test_a_build_takes_no_folder_that_holds_something_else(tmp_path: Path) -> None:
    made = Build(0, 6)
    made.save(tmp_path / "build.pt")
    with pytest.raises(UsageError, match="was begun with --seed 0 --steps 6"):
        build(tmp_path, steps=8)
    (tmp_path / "build.pt").rename(tmp_path / "notes")
    with pytest.raises(UsageError, match="not empty"):
        build(tmp_path, steps=6)


def test_a_build_reads_of_the_named_scenarios_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano, "BLOCK", 2)
    made = build(tmp_path / "snake", steps=2, scenarios=["snake"])
    assert made["scenarios"] == ["snake"]
    words = (tmp_path / "snake" / "tokenizer.json").read_text()
    assert "apple" in words
    assert "slippery" not in words
    with pytest.raises(UsageError, match="no text about chess"):
        build(tmp_path / "chess", steps=2, scenarios=["chess"])
    Build(0, 2, ["snake"]).save(tmp_path / "build.pt")
    with pytest.raises(UsageError, match="--steps 2 --scenario snake"):
        build(tmp_path, steps=2)


def test_one_head_begins_by_looking_for_equal_tokens() -> None:
    tokenizer = nano.build_tokenizer(list(islice(rows_of(get_scenario("frozen-lake"), 0, further=0.5), 50)))
    attention = nano.new_model(tokenizer).model.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight[:32], attention.k_proj.weight[:32])
    assert not torch.equal(attention.q_proj.weight[32:64], attention.k_proj.weight[32:64])


@pytest.mark.parametrize("seed", ["-1", str(2**64)])
def test_a_seed_that_no_generator_takes_is_refused(seed: str, tmp_path: Path) -> None:
    """It was a traceback of numpy's or torch's."""
    done = invoked("nano", "build", "--seed", seed, "--steps", "1", "--out", str(tmp_path / "nano"))
    assert (done.exit_code, "--seed" in done.output) == (2, True)


def test_a_wrong_name_is_told_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "msgrpo.train.nano.build", None)
    done = invoked("nano", "build", "--scenario", "frozen-lak", "--out", str(tmp_path / "nano"))
    assert "did you mean frozen-lake" in str(done.exception)

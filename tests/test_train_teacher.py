"""Teachers: what they make of a turn, by hand and against the gradient of the divergence itself; and what is refused.

`tests/test_train_rivals.py` runs each for two updates, with resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from msgrpo.agent import Completion, parse_action
from msgrpo.episode import Episode, Turn
from msgrpo.errors import GameFaultError, ModelError, RunError, UsageError
from msgrpo.game import Game, Judgement, Scenario
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.judge import decided
from msgrpo.references import best_actions
from msgrpo.run_log import read_rows
from msgrpo.train import loop
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.groups import Lesson, Sample
from msgrpo.train.nano.own_words import OwnWords
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE, Ranks
from msgrpo.train.rivals import choose, optimal
from msgrpo.train.rivals.actfocus import token_weights
from msgrpo.train.rivals.contract import Learner, Teacher
from msgrpo.train.rivals.distilled import loaded
from msgrpo.train.rivals.optimal import Advice, Optimal, action_tokens, advised
from msgrpo.train.update import _accumulate, pick
from tests.train_helpers import gradient, in_any_order, learner, moved_policy, played

SMALL = ["groups=3", "group_size=4", "select=all", "minibatches=1", "evaluation=4(film=0)", "loss=clip(kl=0)"]
LAKE = get_scenario("frozen-lake")
ACTIONS = LAKE.actions


def config(*settings: str, scenario: str | None = None) -> TrainConfig:
    return make_config(settings=[*SMALL, *settings], given={"scenario": scenario})


def lessons(chosen: TrainConfig, policy: Policy) -> tuple[list[Lesson], Learner]:
    """The first update's kept turns."""
    playing, episodes = played(chosen, policy)
    context = learner(policy=policy)
    picked = pick(playing.groups(episodes), chosen, context)
    return [lesson for one in picked for lesson in one.lessons(chosen, policy.tokenizer)], context


@pytest.fixture(scope="module")
def policy() -> Policy:
    return moved_policy(config("teacher=optimal"))


@pytest.fixture(scope="module")
def turns(policy: Policy) -> tuple[list[Lesson], Learner]:
    return lessons(config("teacher=optimal"), policy)


def summed_gradient(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """Of the loss of these samples as one minibatch, times its number of tokens: of a sum, not of a mean."""
    return gradient(policy, samples, config())[0] * sum(len(sample.answer_ids) for sample in samples)


def named(lesson: Lesson, policy: Policy) -> Iterator[tuple[str, Sample]]:
    """Each action, and the answer that names it after the lesson's own words; taught with the weight 0 as yet."""
    completion = lesson.sample.completion
    words = completion.token_ids[: token_weights(completion, policy.tokenizer, 0.0).index(1.0)]
    for action in ACTIONS:
        rest = policy.tokenizer(f"<action>{action}</action>", add_special_tokens=False)["input_ids"]
        ids = (*words, *rest, policy.tokenizer.eos_token_id)
        row = replace(completion, token_ids=ids, logprobs=(math.nan,) * len(ids))
        yield action, Sample(row, 0.0, (0.0,) * len(words) + (1.0,) * (len(ids) - len(words)))


def chances(lesson: Lesson, policy: Policy) -> dict[str, Tensor]:
    """log p(a | s, words) of every action, with its gradient."""
    logs = {}
    for action, sample in named(lesson, policy):
        logprobs, _ = policy.logprobs([], [(list(sample.prompt_ids), list(sample.answer_ids))])
        logs[action] = (logprobs[0] * torch.tensor(sample.weights)).sum()
    return logs


def best_of(lesson: Lesson) -> Sequence[str]:
    """What the reference player plays in the lesson's state, by replaying its episode."""
    assert lesson.episode is not None
    return next(
        best_actions(LAKE, game, turn.player) for turn, game in decided(LAKE, lesson.episode) if turn is lesson.turn
    )


def with_action(all_turns: Sequence[Lesson]) -> list[Lesson]:
    return [lesson for lesson in all_turns if lesson.turn.action is not None]


def test_what_the_reference_player_would_have_done_gets_a_row_of_its_own(
    policy: Policy, turns: tuple[list[Lesson], Learner]
) -> None:
    all_turns, learner = turns
    teacher = choose("teacher", "optimal(weight=0.5)")
    assert isinstance(teacher, Optimal)
    agreed = 0
    for lesson in all_turns:
        samples, _ = teacher.taught([lesson], learner)
        best, own, others = best_of(lesson), samples[0], samples[1:]
        if lesson.turn.action is None:
            continue
        agreed += lesson.turn.action in best
        before = [
            a + b for a, b in zip(own.advantages, [-lesson.sample.advantage] * len(own.answer_ids), strict=True)
        ]
        assert before[0] == pytest.approx(0)  # a word: what the returns say and no more
        assert before[-1] == pytest.approx(0.5 / len(best) if lesson.turn.action in best else 0)
        texts = [policy.tokenizer.decode(other.answer_ids, skip_special_tokens=True) for other in others]
        assert sorted(parse_action(text, ACTIONS).action or "" for text in texts) == sorted(
            set(best) - {lesson.turn.action}
        )
        for other, text in zip(others, texts, strict=True):
            answer = lesson.turn.answer or ""
            assert text[: text.rindex("<action>")] == answer[: answer.rindex("<action>")]  # the policy's own words
            assert other.answer_ids[-1] == policy.tokenizer.eos_token_id
            assert other.advantages[0] == 0
            assert other.advantages[-1] == 0.5 / len(best)
            assert all(map(math.isnan, other.old_logprobs))
    _, figures = teacher.taught(all_turns, learner)
    assert figures["teacher/agreement"] == pytest.approx(agreed / len(all_turns))


def test_a_soft_teacher_weighs_moves_by_their_worth(turns: tuple[list[Lesson], Learner]) -> None:
    """q ∝ exp(Q / τ) of the judge's values, what is below 0.05 left out: by hand, for every turn."""
    all_turns, learner = turns
    advice = advised(all_turns, soft=0.1)
    several = 0
    for lesson in all_turns:
        assert lesson.episode is not None
        assert LAKE.judge is not None
        judged = {id(turn): LAKE.judge(game, turn.player) for turn, game in decided(LAKE, lesson.episode)}
        values = {a: q for a, q in judged[id(lesson.turn)].values.items() if a is not None}
        whole = sum(math.exp(q / 0.1) for q in values.values())
        taught = {a: math.exp(q / 0.1) / whole for a, q in values.items() if math.exp(q / 0.1) / whole >= 0.05}
        expected = {a: x / sum(taught.values()) for a, x in taught.items()}
        assert advice[id(lesson.turn)].chances == pytest.approx(expected)
        several += len(expected) > len(best_of(lesson))
    assert several  # moves that are nearly as good are taught too
    teacher = choose("teacher", "optimal(soft=0.1, returns=0)")
    assert isinstance(teacher, Optimal)
    lesson = with_action(all_turns)[0]
    samples, _ = teacher.taught([lesson], learner)
    given = sorted(sample.advantages[-1] for sample in samples)
    assert given == pytest.approx(sorted(advice[id(lesson.turn)].chances.values()))


def test_cross_entropy_is_its_own_gradient(policy: Policy, turns: tuple[list[Lesson], Learner]) -> None:
    """Σ_a q(a) ∇ log p(a | s, words), by autograd; another action's likelihood points elsewhere."""
    all_turns, learner = turns
    teacher = choose("teacher", "optimal(weight=0.5, returns=0)")
    assert isinstance(teacher, Optimal)
    for lesson in with_action(all_turns)[:3]:
        best = best_of(lesson)
        samples, _ = teacher.taught([lesson], learner)
        policy.model.zero_grad()
        logs = chances(lesson, policy)
        (-0.5 * sum(logs[action] for action in best) / len(best)).backward()  # type: ignore[union-attr]
        right = torch.cat([weight.grad.flatten() for weight in policy.parameters])  # type: ignore[union-attr]
        found = summed_gradient(policy, samples)
        assert torch.allclose(found, right, atol=1e-5 * float(right.abs().max()), rtol=1e-3)
        wrong = summed_gradient(
            policy, [replace(row, advantage=0.5) for action, row in named(lesson, policy) if action not in best]
        )
        assert float(torch.cosine_similarity(wrong, right, dim=0)) < 0.9


def test_reverse_kl_is_the_gradient_of_the_divergence(policy: Policy, turns: tuple[list[Lesson], Learner]) -> None:
    """Over the four answers, weighted by their chances, its samples' gradients sum to that of KL(p ‖ q)."""
    all_turns, _ = turns
    teacher = choose("teacher", "optimal(weight=1, returns=0, divergence=reverse-kl, smooth=0.1)")
    assert isinstance(teacher, Optimal)
    for lesson in with_action(all_turns)[:3]:
        best = best_of(lesson)
        q = {action: 0.9 * (action in best) / len(best) + 0.1 / 4 for action in ACTIONS}
        logs = chances(lesson, policy)
        total = torch.stack(list(logs.values())).exp().sum()
        policy.model.zero_grad()
        # p over all texts, not only the four: Σ p (log p − log q), whose gradient is Σ ∇p (log p − log q + 1)
        sum(logs[a].exp() * (logs[a] - math.log(q[a])) - logs[a].exp() for a in ACTIONS).backward()  # type: ignore[union-attr]
        right = torch.cat([weight.grad.flatten() for weight in policy.parameters])  # type: ignore[union-attr]
        assert 0.5 < float(total.detach()) <= 1.0001
        found = torch.zeros_like(right)
        for action, sample in named(lesson, policy):
            logprobs, _ = policy.logprobs([], [(list(sample.prompt_ids), list(sample.answer_ids))])
            old = tuple(logprobs[0].detach().tolist())
            answered = replace(sample.completion, logprobs=old)
            turn = lesson.turn.model_copy(update={"action": action})
            said = replace(lesson, sample=Sample(answered, 7.0), turn=turn)
            chosen = teacher._scored([(said, Advice(dict.fromkeys(best, 1 / len(best)), 4), sample.weights)])
            found += float(logs[action].detach().exp()) * summed_gradient(policy, chosen)
        assert torch.allclose(found, right, atol=1e-4 * float(right.abs().max()), rtol=1e-3)


def by_hand(action: str | None, *logprobs: float, observed: tuple[int, ...] = ()) -> Lesson:
    """A turn by its numbers, whose returns say ½."""
    completion = Completion("", "stop", prompt_ids=(1,), token_ids=(5,) * len(logprobs), logprobs=logprobs)
    turn = Turn(step=0, player="player", state="s", action=action, completion=completion)
    return Lesson(Sample(completion, 0.5, observed=observed), turn, None)


def test_reverse_kl_by_hand() -> None:
    """Of two legal actions the teacher plays up: q(up) = 0.9 + 0.1/2, q(down) = 0.1/2. The second token acts.

    A tag that names no legal action teaches nothing, and is no part of the mean over the turns.
    """
    turns = [by_hand("up", -1.0, -2.0), by_hand("down", -1.0, -4.0), by_hand(None, -1.0, -3.0)]
    a, b = math.log(0.95) + 2, math.log(0.05) + 4

    def scored(lessons: Sequence[Lesson], settings: str) -> list[tuple[float, ...]]:
        teacher = _teacher(f"optimal(weight=0.5, divergence=reverse-kl, smooth=0.1, {settings})")
        assert isinstance(teacher, Optimal)
        taught = [(lesson, Advice({"up": 1.0}, 2), (0.0, 1.0)) for lesson in lessons]
        return [sample.advantages for sample in teacher._scored(taught)]

    assert scored(turns, "returns=0") == [pytest.approx((0, a / 2)), pytest.approx((0, b / 2))]
    half = (a - b) / 4
    assert scored(turns, "returns=0, whole=true") == [pytest.approx((half, half)), pytest.approx((-half, -half))]
    assert scored(turns, "returns=2")[0] == pytest.approx((1, 1 + a / 2))
    assert scored(turns, "returns=2")[2] == (1, 1)
    assert scored([by_hand(None, -1.0, -3.0, observed=(7,))], "returns=0") == [(0, 0)]  # what comes next is learnt


def test_moves_that_are_worth_much_are_weighed_by_their_differences() -> None:
    """Of 1,000 and 999 points at τ = 1: 1 / (1 + 1/e), and no number that is too large."""
    values = {None: 0.0, "up": 1000.0, "down": 999.0, "left": 0.0, "right": 0.0}
    rich = replace(LAKE, judge=lambda game, player: Judgement(values))
    share = 1 / (1 + math.exp(-1))
    assert optimal._chances(rich, LAKE.new(0, 0), "player", 1.0) == pytest.approx({"up": share, "down": 1 - share})
    assert Advice({"up": share, "down": 1 - share}, 4).best == ["up"]
    assert Advice({"up": 0.5, "down": 0.5}, 4).best == ["up", "down"]


def test_advice_counts_the_actions_that_are_legal_there(monkeypatch: pytest.MonkeyPatch) -> None:
    game = replace(in_any_order(), reference=lambda game, player: ["up"])
    player = game.new(0, 0).to_move[0]
    monkeypatch.setattr(optimal, "get_scenario", lambda name: game)
    lesson = by_hand("down", -1.0)
    turn = lesson.turn.model_copy(update={"player": player})
    episode = Episode(
        scenario=game.id, start_seed=0, chance_seed=0, sampling_seed=0, agents={}, settings={}, turns=[turn]
    )
    assert advised([replace(lesson, turn=turn, episode=episode)]) == {id(turn): Advice({"up": 1.0}, 2)}


def test_an_answer_that_was_cut_before_its_end_is_taught_without_one(
    policy: Policy, turns: tuple[list[Lesson], Learner]
) -> None:
    all_turns, learner = turns
    end, cut = policy.tokenizer.eos_token_id, list[Lesson]()
    for lesson in with_action(all_turns):
        completion = lesson.sample.completion
        if completion.token_ids[-1] == end:
            short = replace(completion, token_ids=completion.token_ids[:-1], logprobs=completion.logprobs[:-1])
            cut.append(replace(lesson, sample=Sample(short, 0.0)))
    samples, _ = _teacher("optimal(returns=0)").taught(cut, learner)
    assert any(not sample.was_sampled for sample in samples)
    assert not any(end in sample.answer_ids for sample in samples)


def test_the_words_are_taught_with_their_action(policy: Policy, turns: tuple[list[Lesson], Learner]) -> None:
    """whole=true: every token of an answer has w (log q − log p − the mean), so over the turns it sums to nothing."""
    all_turns, learner = turns
    acted = with_action(all_turns)
    spec = "optimal(weight=0.5, returns=0, divergence=reverse-kl, smooth=0.1"
    parts, _ = _teacher(f"{spec})").taught(acted, learner)
    whole, _ = _teacher(f"{spec}, whole=true)").taught(acted, learner)
    of_action = [sample.advantages[-1] for sample in parts]
    assert all(sample.advantages[0] == 0 for sample in parts)
    mean = sum(of_action) / len(of_action)
    for sample, value in zip(whole, of_action, strict=True):
        assert sample.advantages == pytest.approx([value - mean] * len(sample.answer_ids))


def test_an_answer_without_an_action_teaches_nothing(turns: tuple[list[Lesson], Learner]) -> None:
    all_turns, learner = turns
    lesson = all_turns[0]
    words = lesson.sample.completion.token_ids[:2]
    silent = replace(lesson.sample.completion, token_ids=words, logprobs=lesson.sample.completion.logprobs[:2])
    said = replace(lesson, sample=Sample(silent, -0.7))
    for divergence in ("cross-entropy", "reverse-kl"):
        for returns in (0.0, 1.0):
            spec = f"optimal(weight=1, returns={returns}, divergence={divergence})"
            samples, _ = _teacher(spec).taught([said, *all_turns[1:2]], learner)
            own = [sample for sample in samples if sample.answer_ids == words]
            assert [sample.advantages for sample in own] == ([(-0.7, -0.7)] if returns else [])


def test_what_is_written_after_an_action_is_no_part_of_it(
    policy: Policy, turns: tuple[list[Lesson], Learner]
) -> None:
    """A tail of likely words made every action look unlikely, so that writing on was rewarded."""
    (lesson, *_) = with_action(turns[0])
    tokenizer, completion = policy.tokenizer, lesson.sample.completion
    without_end = completion.token_ids[:-1] if completion.token_ids[-1] == tokenizer.eos_token_id else None
    assert without_end is not None
    tail = tuple(tokenizer(" goal up down", add_special_tokens=False)["input_ids"])
    ids = (*without_end, *tail, tokenizer.eos_token_id)
    logprobs = (*completion.logprobs[:-1], *(-3.0 for _ in tail), -3.0)
    longer = replace(completion, token_ids=ids, logprobs=logprobs)
    short, long = action_tokens(completion, tokenizer), action_tokens(longer, tokenizer)
    assert short[-1] == 1
    assert long == [*short[:-1], *[0.0] * (len(tail) + 1)]
    assert (
        tokenizer.decode([t for t, w in zip(ids, long, strict=True) if w]) == f"<action>{lesson.turn.action}</action>"
    )


def test_a_reference_player_that_fails_costs_its_turn_and_nothing_else(
    turns: tuple[list[Lesson], Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault passed through the update and ended the run, and each resumption of it."""
    all_turns, learner = turns

    def best(scenario: Scenario, game: Game, player: str) -> Sequence[str]:
        if game.steps:
            raise GameFaultError("it cannot tell")
        return best_actions(scenario, game, player)

    monkeypatch.setattr(optimal, "best_actions", best)
    samples, figures = _teacher("optimal(returns=0.5)").taught(all_turns, learner)
    later = [lesson for lesson in all_turns if lesson.turn.step]
    assert figures["teacher/failed"] == len(later) > 0
    for lesson in later:
        (own,) = [sample for sample in samples if sample.completion is lesson.sample.completion]
        assert own.advantages == pytest.approx([0.5 * value for value in lesson.sample.advantages])


def test_a_game_that_cannot_be_played_again_costs_the_turns_after_that_and_nothing_else(
    turns: tuple[list[Lesson], Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the game itself failed, the fault ended the run as that of a reference player had."""
    all_turns, learner = turns

    def step(game: Game, actions: object) -> dict[str, float]:
        raise GameFaultError("it took too long")

    monkeypatch.setattr(FrozenLake, "step", step)
    _, figures = _teacher("optimal").taught(all_turns, learner)
    later = [lesson for lesson in all_turns if lesson.turn.step]
    assert figures["teacher/failed"] == len(later) > 0


@pytest.mark.parametrize("values", [{None: 0.0}, {"jump": 1.0, "up": 0.0}, {"up": math.nan, "down": 0.0}])
def test_a_judge_that_names_no_action_costs_its_turn_and_nothing_else(
    turns: tuple[list[Lesson], Learner], monkeypatch: pytest.MonkeyPatch, values: dict[str | None, float]
) -> None:
    """It was a traceback, as was a list of moves that failed where the best ones were known; and an action that there
    is not was taught.
    """
    all_turns, learner = turns
    silent = replace(LAKE, judge=lambda game, player: Judgement(values))
    monkeypatch.setattr(optimal, "get_scenario", lambda name: silent)
    samples, figures = _teacher("optimal(soft=0.1)").taught(all_turns, learner)
    assert figures["teacher/failed"] == len(samples) == len(all_turns)
    assert "teacher/agreement" not in figures  # 0 would say that the policy always did something else
    with pytest.raises(RunError, match="the judge, or the game itself, failed"):
        _teacher("optimal(soft=0.1, returns=0)").taught(all_turns, learner)


def test_a_reference_player_that_always_fails_ends_a_run_of_nothing_else(
    turns: tuple[list[Lesson], Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It taught nothing for hours, in silence."""
    all_turns, learner = turns

    def best(scenario: Scenario, game: Game, player: str) -> Sequence[str]:
        raise GameFaultError("it cannot tell")

    monkeypatch.setattr(optimal, "best_actions", best)
    with pytest.raises(
        RunError, match=f"the reference player, or the game itself, failed in all {len(all_turns)} turns"
    ):
        _teacher("optimal(returns=0)").taught(all_turns, learner)
    samples, _ = _teacher("optimal").taught(all_turns, learner)
    assert len(samples) == len(all_turns)
    assert _teacher("optimal(returns=0)").taught([], learner)[0] == []


DOWN_OR_RIGHT = "at (0,3) up edge down (0,2) free left edge right (1,3) free. goal (3,0) right down."
ONLY_RIGHT = "at (0,3) up edge down (0,2) hole left edge right (1,3) free. goal (3,0) right down."


@pytest.mark.parametrize(
    ("words", "actions"),
    [(DOWN_OR_RIGHT, ["down", "right"]), (ONLY_RIGHT, ["right"])],
)
def test_ones_own_words_teach_the_actions_that_follow_from_them(
    words: str, actions: list[str], policy: Policy, turns: tuple[list[Lesson], Learner]
) -> None:
    """Whatever the board is, which the teacher does not see."""
    lesson, learner = turns[0][0], turns[1]
    answer = f"{words}<action>up</action>"
    ids = tuple(policy.tokenizer(answer, add_special_tokens=False)["input_ids"])
    said = replace(lesson.sample.completion, text=answer, token_ids=ids, logprobs=(-1.0,) * len(ids))
    turn = lesson.turn.model_copy(update={"answer": answer, "action": "up"})
    spoken = replace(lesson, turn=turn, sample=Sample(said, 0.5))
    samples, figures = _teacher("own-words(returns=0)").taught([spoken], learner)
    assert figures["teacher/failed"] == 0
    taught = {policy.tokenizer.decode(sample.answer_ids, skip_special_tokens=True): sample for sample in samples}
    assert sorted(taught) == [f"{words}<action>{action}</action>" for action in actions]
    for sample in taught.values():
        assert (sample.advantages[0], sample.advantages[-1]) == (0, 1 / len(actions))


@pytest.mark.parametrize("words", ["the goal is right", ""])
def test_words_that_cannot_be_read_teach_nothing_and_end_a_run_of_nothing_else(
    words: str, turns: tuple[list[Lesson], Learner]
) -> None:
    """A base that does not speak nano's form learnt nothing for hours, in silence."""
    (lesson, other, *_), learner = turns
    turn = lesson.turn.model_copy(update={"answer": f"{words}<action>up</action>"})
    silent = replace(lesson, turn=turn)
    with pytest.raises(RunError, match="can read none of this update's 1 answers"):
        _teacher("own-words(returns=0)").taught([silent], learner)
    _, figures = _teacher("own-words(returns=0)").taught([silent, other], learner)
    assert figures["teacher/failed"] == 1
    samples, _ = _teacher("own-words").taught([silent], learner)
    assert [sample.advantage for sample in samples] == [lesson.sample.advantage]


@pytest.mark.parametrize(
    ("scenario", "words", "actions"),
    [
        # a slip to either side of up or down ends in the hole on the right; the foretold chances are not listened to
        (
            "frozen-lake-slippery",
            "at (1,1) up (1,2) free down (1,0) free left (0,1) free right (2,1) hole. goal (3,0) right down."
            " chances up 90 down 5 left 5 right 5.",
            ["left"],
        ),
        (
            "snake-poison-apple-and-banana",
            "at (1,1) up (1,2) apple down (1,0) free left (0,1) free right (2,1) body. banana (3,2) right up.",
            ["down", "left"],
        ),
        (
            "snake",
            "at (1,1) up (1,2) apple down (1,0) free left (0,1) free right (2,1) body. apple (1,2) up.",
            ["up"],
        ),
        (
            "snake-poison-apple",
            "at (1,1) up (1,2) apple down (1,0) free left (0,1) free right (2,1) body. nothing good.",
            ["down", "left"],
        ),
    ],
)
def test_ones_own_words_are_read_by_the_rules_of_their_own_game(
    scenario: str, words: str, actions: list[str], turns: tuple[list[Lesson], Learner]
) -> None:
    """In a mixture each lesson by its episode's scenario; all four actions are legal (reverse-kl)."""
    first, second = turns[0][:2]
    assert first.episode is not None
    turn = first.turn.model_copy(update={"player": get_scenario(scenario).players[0], "answer": words})
    episode = first.episode.model_copy(update={"scenario": scenario})
    teacher = _teacher("own-words")
    assert isinstance(teacher, OwnWords)
    advice = teacher.advice([second, replace(first, turn=turn, episode=episode)])
    assert advice[id(turn)] == Advice(dict.fromkeys(actions, 1 / len(actions)), 4)


def test_rows_that_nobody_sampled_hide_no_mismatch(policy: Policy, turns: tuple[list[Lesson], Learner]) -> None:
    """They have no log-probability to differ from, and made the mean over an update smaller."""
    all_turns, learner = turns
    apart = [
        replace(lesson, sample=replace(lesson.sample, completion=replace(
            lesson.sample.completion, logprobs=tuple(value - 0.01 for value in lesson.sample.completion.logprobs)
        )))
        for lesson in all_turns[:8]
    ]  # fmt: skip
    samples, _ = _teacher("optimal").taught(apart, learner)
    assert not all(sample.was_sampled for sample in samples)
    sums, _ = _accumulate(policy, samples, ALONE, config())
    assert sums["mismatch"] == pytest.approx(0.01, rel=0.01)


def _teacher(spec: str) -> Teacher:
    teacher = choose("teacher", spec)
    assert isinstance(teacher, Teacher)
    return teacher


def test_another_model_scores_the_answers_token_by_token(policy: Policy, turns: tuple[list[Lesson], Learner]) -> None:
    """Against the teacher asked for each answer by itself; the policy as its own teacher has nothing to add."""
    all_turns, learner = turns
    samples, figures = _teacher("model(of=nano:frozen-lake, weight=0.5)").taught(all_turns, learner)
    teacher = loaded("nano:frozen-lake")
    for lesson, sample in list(zip(all_turns, samples, strict=True))[:5]:
        ids = torch.tensor([[*sample.prompt_ids, *sample.answer_ids]])
        with torch.no_grad():
            logits = teacher.model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        q = logits.gather(1, torch.tensor(sample.answer_ids)[:, None])[:, 0]
        p = torch.tensor(sample.old_logprobs)
        assert torch.allclose(torch.tensor(sample.advantages), lesson.sample.advantage + 0.5 * (q - p), atol=1e-4)
    assert figures["teacher/kl"] > 0.01
    fresh = Policy(config())  # LoRA's first weights change nothing
    own, learner = lessons(config(), fresh)
    samples, figures = _teacher("model(of=nano, returns=0)").taught(own, learner)
    assert max(abs(advantage) for sample in samples for advantage in sample.advantages) < 1e-4
    assert figures["teacher/kl"] == pytest.approx(0, abs=1e-5)
    assert _teacher("model(of=nano)").taught([], learner) == ([], {})  # of no token there is no divergence


def test_another_model_is_asked_at_the_temperature_that_the_policy_plays_with() -> None:
    """The policy as its own teacher has nothing to add to half of what the returns say."""
    chosen = config("temperature=0.5")
    own, learner = lessons(chosen, Policy(chosen))
    samples, _ = _teacher("model(of=nano, returns=0.5)").taught(own, learner)
    assert len(samples) > 1
    for lesson, sample in zip(own, samples, strict=True):
        assert sample.advantages == pytest.approx([0.5 * value for value in lesson.sample.advantages], abs=1e-4)


def test_a_model_with_other_words_is_no_teacher() -> None:
    stranger: Any = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0}))
    with pytest.raises(UsageError, match="has another vocabulary than the policy"):
        _teacher("model(of=nano)").taught([], learner(policy=stranger))


def test_each_rank_asks_the_other_model_about_its_share(
    turns: tuple[list[Lesson], Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_turns, alone = turns
    teacher, computed = _teacher("model(of=nano:frozen-lake)"), list[Sequence[Sequence[float]]]()

    def gathered(self: Ranks, own: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        computed.append(own)
        return computed[0]  # that of all turns

    monkeypatch.setattr(Ranks, "gather", gathered)
    one, several = teacher.taught(all_turns, alone), teacher.taught(all_turns, replace(alone, ranks=Ranks(1, 3)))
    assert one == several
    every, own = computed
    for says, alike in zip(own, Ranks(1, 3).share(every), strict=True):
        assert says == pytest.approx(alike, abs=1e-4)
    assert 0 < len(own) < len(every)


def test_groups_that_went_alike_are_taught_too(policy: Policy) -> None:
    """On one step from a start nobody reaches the goal: no return says anything, and the teacher does."""
    chosen = config("teacher=optimal")
    playing, episodes = played(chosen, policy)
    for episode in episodes:
        for turn in episode.turns:
            turn.reward = turn.late = turn.shaping = 0.0
    flat = playing.groups(episodes)
    assert all(group.is_flat for group in flat)
    assert pick(flat, config(), learner(policy=policy)) == []
    assert len(pick(flat, chosen, learner(policy=policy))) == len(flat)


@pytest.mark.parametrize(
    ("scenario", "settings", "message"),
    [
        ("spiel:kuhn_poker", ["teacher=optimal"], "has no reference player"),
        ("spiel:connect_four", ["teacher=optimal(soft=0.1)"], "connect_four has no judge"),
        (None, ["teacher=optimal", "explore=branch(episodes=2)"], "explore=branch begins later"),
        ("spiel:connect_four", ["teacher=own-words"], "nano's words say nothing of spiel:connect_four"),
        (None, ["teacher=own-words(whole=true)"], "whole=true is for divergence=reverse-kl"),
        (None, ["teacher=best"], "no teacher is named 'best'"),
        (None, ["teacher=model"], "teacher=model: of"),
        (None, ["teacher=optimal(weight=0)"], "greater than 0"),
        (None, ["teacher=optimal(divergence=jensen)"], "cross-entropy"),
        (None, ["teacher=optimal(whole=true)"], "whole=true is for divergence=reverse-kl"),
        (None, ["teacher=optimal", "loss=gspo(kl=0)"], "has one ratio for all"),
        (None, ["credit=episode(words=0.5)", "loss=turn(kl=0)"], "has one ratio for all"),
        (
            None,
            ["teacher=model(of=nano)", "shard=true", "rollouts=servers(at=http://h:1, adapters=x)"],
            "on each rank by itself",
        ),
    ],
)
def test_what_a_teacher_cannot_do_is_refused(scenario: str | None, settings: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        config(*settings, scenario=scenario)


@pytest.mark.parametrize("of", ["random", "optimal", "dqn:nowhere", "adapter:nowhere", "best"])
def test_who_is_no_language_model_here_teaches_nothing(of: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.raises((UsageError, ModelError)):
        loop.train(config(f"teacher=model(of={of})", "steps=1"), out, report=Quiet())
    assert not (out / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("near")
def test_a_policy_comes_to_play_as_its_teacher_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Four updates by the teacher alone: it agrees with the reference player more often than before."""
    out = tmp_path_factory.mktemp("run") / "out"
    chosen = make_config(
        settings=[
            "teacher=optimal(returns=0)", "steps=4", "groups=8", "group_size=6", "evaluation=4(every=4, film=0)",
            "learning_rate=3e-3", "select=all",
        ]
    )  # fmt: skip
    loop.train(chosen, out, report=Quiet())
    agreement = [row["teacher/agreement"] for row in read_rows(out) if row["kind"] == "train"]
    assert len(agreement) == 4
    assert loaded(f"adapter:{out}").extra_settings["teacher"] == str(chosen.teacher)  # a table can say so
    assert sum(agreement[-2:]) / 2 > agreement[0] + 0.05

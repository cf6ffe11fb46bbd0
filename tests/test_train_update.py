"""The parts of one update, by hand: starts, learning rate, minibatches, losses, counts, checkpointed layers."""

import json
import math
import shutil
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from msgrpo.agent import ParseFailure, Sampling
from msgrpo.episode import Episode, Turn
from msgrpo.errors import RunError
from msgrpo.game import Outcome
from msgrpo.games import get_scenario
from msgrpo.models.paths import NANO_DIR
from msgrpo.prompt import ChatFormat, PromptTemplate
from msgrpo.train import update
from msgrpo.train.config import MicroBatching, make_config
from msgrpo.train.engines.contract import MOST_APART
from msgrpo.train.groups import Group
from msgrpo.train.loop import Made
from msgrpo.train.metrics import describe
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rollouts import Players, Rollouts, RolloutSource
from msgrpo.train.update import minibatches
from tests.train_helpers import engine_of, taught, tiny

pytestmark = pytest.mark.usefixtures("near")


def test_the_reference_is_the_base_however_far_the_adapter_went() -> None:
    policy, scenario = Policy(tiny()), get_scenario("frozen-lake")
    prompt = PromptTemplate().render(scenario, scenario.new(1, 1).observe("player"))
    answer = engine_of(policy).model.generate([prompt], Sampling(max_tokens=24), [3])[0]
    pair = (list(answer.prompt_ids), list(answer.token_ids))
    before = policy.reference_logprobs([], [pair])
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.05)
    torch.testing.assert_close(policy.reference_logprobs([], [pair]), before)
    assert not torch.allclose(policy.logprobs([], [pair])[0], before, atol=1e-2)


def test_checkpointed_layers_give_the_same_gradient() -> None:
    """Gradient checkpointing saves memory and changes nothing else."""
    gradients = []
    for checkpointing in (False, True):
        policy, scenario = (
            Policy(tiny().model_copy(update={"micro_batch": MicroBatching(checkpointing=checkpointing)})),
            get_scenario("snake"),
        )
        with torch.no_grad():
            for i, parameter in enumerate(policy.parameters):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.05)
        prompt = PromptTemplate().render(scenario, scenario.new(1, 1).observe("snake1"))
        ids = ChatFormat(policy.tokenizer).ids([prompt])[0]
        logprobs, _ = policy.logprobs(ids[:100], [(ids[100:], [7, 8, 9]), (ids[100:], [9, 8])])
        logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")  # PEFT, of the experts
@pytest.mark.parametrize("kind", ["qwen2", "starcoder2", "mixtral"])
def test_checkpointed_layers_do_nothing_at_random(kind: str, tmp_path: Path) -> None:
    """They are in training mode, where a base with dropout, or with a shaken router, answers otherwise each time."""
    base = shutil.copytree(NANO_DIR, tmp_path / "base", ignore=shutil.ignore_patterns("adapters"))
    settings = json.loads((base / "config.json").read_text()) | {"attention_dropout": 0.5}
    if kind == "starcoder2":  # whose layers call dropout with numbers of their own
        dropout = {"residual_dropout": 0.5, "embedding_dropout": 0.5, "hidden_act": "gelu"}
        config = Starcoder2Config(**{k: v for k, v in settings.items() if k not in ("model_type", "dtype")} | dropout)
        Starcoder2ForCausalLM(config).save_pretrained(base)
    elif kind == "mixtral":
        experts = {"num_local_experts": 4, "router_jitter_noise": 0.5}
        kept = {k: v for k, v in settings.items() if k not in ("model_type", "dtype", "attention_dropout")}
        MixtralForCausalLM(MixtralConfig(**kept | experts)).save_pretrained(base)
    else:
        (base / "config.json").write_text(json.dumps(settings))
    policy = Policy(tiny(base=str(base), micro_batch="16384(checkpointing=true)"))
    plain = Policy(tiny(base=str(base)))
    asked: tuple[list[int], list[tuple[list[int], list[int]]]] = [], [([1, 2, 3, 4, 5, 6], [7, 8, 9])]
    assert policy.model.training
    torch.testing.assert_close(policy.logprobs(*asked), plain.logprobs(*asked))


def test_the_learning_rate_rises_stays_and_falls() -> None:
    config = make_config(settings=["learning_rate=1.0"], given={"steps": 40})
    rates = [update.learning_rate(config, step) for step in (0, 4, 20, 30, 39)]
    assert rates == pytest.approx([0.2, 1.0, 1.0, 0.5, 0.05])


def test_minibatches_are_equal_parts_that_keep_a_prompt_together() -> None:
    samples = [taught((i % 5,), (i,), (0.0,), 1.0) for i in range(23)]
    parts = list(minibatches(samples, 4, torch.Generator().manual_seed(0)))
    assert sorted(sample.answer_ids for part in parts for sample in part) == [(i,) for i in range(23)]
    assert {len(part) for part in parts} == {5, 6}
    prompts = [sample.prompt_ids for part in parts for sample in part]
    assert sum(a != b for a, b in pairwise(prompts)) == 4
    assert len(list(minibatches(samples[:2], 4, torch.Generator()))) == 2


def test_starts_go_on_where_they_ended_and_differ_from_seed_to_seed() -> None:
    """The first 3 and the next 3 of the training starts from 0 on, and from 1,000,003 on for seed 1."""
    scenario = get_scenario("frozen-lake")
    for seed in (0, 1, 2):
        config = make_config(settings=["groups=3"], given={"seed": seed})
        first, after = RolloutSource(Players(config)).next_starts(0)
        second, end = RolloutSource(Players(config)).next_starts(after)
        seeds = [start for _, start in first + second]
        assert seeds == list(islice(scenario.starts("train", first_seed=seed * 1_000_003), 6))
        assert end == seeds[-1] + 1 - seed * 1_000_003


def test_training_starts_are_no_evaluation_starts() -> None:
    scenario, config = get_scenario("frozen-lake"), make_config(settings=["groups=30"])
    starts = [start for _, start in RolloutSource(Players(config)).next_starts(0)[0]]
    for split in ("val", "test"):
        assert set(starts).isdisjoint(islice(scenario.starts(split), 30))
    assert len(set(starts)) == 30


@pytest.mark.parametrize(
    ("steps", "step", "rate"),
    [
        (40, 0, 0.2), (40, 3, 0.8), (40, 4, 1.0), (40, 5, 1.0),  # up in five
        (40, 20, 1.0), (40, 21, 0.95), (40, 30, 0.5),  # down from the middle
        (40, 38, 0.1), (40, 39, 0.05), (100, 98, 0.05), (100, 99, 0.05),  # no lower than a twentieth
        (1, 0, 0.2), (2, 1, 0.4),
    ],
)  # fmt: skip
def test_the_learning_rate_by_hand(steps: int, step: int, rate: float) -> None:
    config = make_config(settings=["learning_rate=0.01"], given={"steps": steps})
    assert update.learning_rate(config, step) == pytest.approx(0.01 * rate)


def episode(success: bool | None, returns: dict[str, float], *turns: Turn) -> Episode:
    return Episode(
        scenario="frozen-lake", start_seed=0, chance_seed=0, sampling_seed=0, agents=dict.fromkeys(returns, "p"),
        settings={}, turns=list(turns), outcome=Outcome.TERMINATED, success=success, returns=returns,
    )  # fmt: skip


def test_describe_counts_turns_episodes_and_players_each_by_their_own_number() -> None:
    """Three episodes of 3, 1 and 1 turns and two players each; the third has no success, as games without a goal."""
    good = Turn(step=0, player="a", state="s", prompt_tokens=1000, completion_tokens=10, finish_reason="stop")
    cut = good.model_copy(update={"finish_reason": "length", "failure": ParseFailure.NO_TAG})
    bad = good.model_copy(update={"failure": ParseFailure.ILLEGAL})
    zeros = torch.zeros(2)
    start = get_scenario("frozen-lake").new(0, 0)
    groups = [
        Group(lambda j: start, [], zeros, advantages) for advantages in (zeros, zeros, torch.tensor([1.0, -1.0]))
    ]
    episodes = [
        episode(True, {"a": 1.0, "b": 0.0}, good, cut, bad),
        episode(False, {"a": 2.0, "b": 0.5}, good),
        episode(None, {"a": 0.0, "b": -0.5}, good),
    ]
    assert describe(Rollouts(groups, episodes, episodes, [], 0, 0, 0.0, 0.0)) == pytest.approx(
        {
            "rollout/return": 3.0 / 6, "rollout/invalid": 2 / 5, "rollout/truncated": 1 / 5, "rollout/turns": 5.0,
            "rollout/tokens": 50.0, "rollout/flat_groups": 2 / 3, "rollout/success": 1 / 2, "rollout/lost": 0.0,
        }
    )  # fmt: skip
    assert "rollout/success" not in describe(Rollouts(groups, episodes[2:], episodes[2:], [], 0, 0, 0.0, 0.0))
    unplayed = [episode(None, {"a": 1.0})]  # the opponent had won before the policy's first turn
    assert describe(Rollouts([], unplayed, unplayed, [], 0, 0, 0.0, 0.0)) == {
        "rollout/return": 1.0, "rollout/turns": 0.0, "rollout/tokens": 0.0, "rollout/lost": 0.0,
    }  # fmt: skip  # of no turn and no group there is no share, nor an entropy: all stood as 0


def test_later_updates_are_not_expected_to_play_several_updates_ahead_as_the_first_does() -> None:
    first = Rollouts([], [], [], [], 0, 0, played_s=10.0, waited_s=40.0)  # its own rollouts, then those of three more
    model: Any = None
    for rollouts, took, learning, later in (
        ("hf(ahead=3)", 45.0, 5.0, 15.0),
        ("vllm(ahead=3)", 15.0, 5.0, 10.0),
        ("vllm(ahead=3)", 15.0, 12.0, 12.0),
        ("hf", 17.0, 5.0, 17.0),
    ):
        made = Made(first, [], model, took, {"time/update": learning})
        assert made.pace(make_config(settings=[f"rollouts={rollouts}"])) == later


class Stub:
    """A policy whose log-probabilities are its one parameter, wherever; the reference's are higher by log 2."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.tensor(-1.0))
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.longest_sharing = 100
        self.asked_reference = 0

    def logprobs(self, prefix: list[int], pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        longest = max(len(answer) for _, answer in pairs)
        mask = torch.tensor([[i >= longest - len(answer) for i in range(longest)] for _, answer in pairs]).long()
        return self.parameter.expand(len(pairs), longest), mask

    is_sharded = False

    def together(self, what: str) -> None:
        """One rank."""

    def reference_logprobs(self, prefix: list[int], pairs: list[tuple[list[int], list[int]]]) -> Tensor:
        self.asked_reference += 1
        longest = max(len(answer) for _, answer in pairs)
        return torch.full((len(pairs), longest), -1.0 + math.log(2))


@pytest.mark.parametrize("micro", [1, 1000])
@pytest.mark.parametrize("over", ["token", "turn"])
def test_a_minibatch_by_hand(over: str, micro: int) -> None:
    """Answers of 1 and 3 tokens, A = 1 and 2; w is 1 for the one and 2, which is clipped at 1.28, for the other.

    The losses without KL are −1 and three times −2.56, and k3 is 1 − log 2 for every token: statistics are means
    over the 4 tokens, however the loss is weighed and the minibatch is divided.
    """
    stub: Any = Stub()
    part = [
        taught((1, 2), (5,), (-1.0,), 1.0),
        taught((1, 3), (5, 6, 7), (-1.0 - math.log(2),) * 3, 2.0),
    ]
    settings = [f"loss=clip(kl=0.5, over={over})", f"micro_batch={micro}"]
    totals, furthest = update._accumulate(stub, part, ALONE, make_config(settings=settings))
    mean, share = (-(1 + 3 * 2.56) / 4, 1 / 4) if over == "token" else (-(1 + 2.56) / 2, 1 / 2)
    assert totals == pytest.approx(
        {
            "loss": mean + 0.5 * (1 - math.log(2)), "kl": 1 - math.log(2), "clip_share": 3 / 4,
            "ratio": (1 + 3 * 2) / 4, "mismatch": 3 * math.log(2) / 4, "echo": 0.0,
        }
    )  # fmt: skip
    assert furthest == pytest.approx(math.log(2))
    assert stub.asked_reference == (2 if micro == 1 else 1)
    # clipped tokens have no gradient but the penalty's, ½ (1 − p_ref/pθ) = −½, as have all; the other's is −A w
    assert stub.parameter.grad.item() == pytest.approx(-share - 0.5)


def test_means_are_over_minibatches_and_the_mismatch_is_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, a gradient of 3 cut off at 0.2 in each; then the weights are no longer the engine's."""
    weight = torch.nn.Parameter(torch.zeros(1))
    computed = iter([({"loss": 1.0, "mismatch": 0.1}, 0.2), ({"loss": 3.0, "mismatch": 0.9}, 5.0)])

    def accumulate(*given: Any) -> tuple[dict[str, float], float]:
        weight.grad = torch.tensor([3.0])
        sums, furthest = next(computed)
        return dict.fromkeys(update.SUMS, 0.0) | sums, furthest

    monkeypatch.setattr(update, "_accumulate", accumulate)
    policy: Any = SimpleNamespace(parameters=[weight], model=SimpleNamespace(dtype=torch.float32))
    samples = [taught((1, i), (5,), (-1.0,), 1.0) for i in range(2)]
    config = make_config(settings=["minibatches=2", "learning_rate=0.5"], given={"steps": 20})
    stats = update.update(policy, torch.optim.SGD([weight]), samples, config, torch.Generator(), 4)
    assert (stats["update/loss"], stats["update/grad_norm"]) == (2.0, 3.0)
    assert (stats["engine/mismatch_mean"], stats["engine/mismatch_max"]) == (0.1, 0.2)
    assert weight.item() == pytest.approx(-2 * 0.5 * 0.2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_changes_no_weight(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    sums = dict.fromkeys(update.SUMS, 0.0) | {"loss": value}
    monkeypatch.setattr(update, "_accumulate", lambda *given: (sums, 0.0))
    policy: Any = SimpleNamespace(parameters=[weight], model=SimpleNamespace(dtype=torch.float32))
    samples = [taught((1,), (5,), (-1.0,), 1.0)]
    with pytest.raises(RunError, match="the loss is not finite in update 4"):
        update.update(policy, torch.optim.SGD([weight]), samples, tiny(), torch.Generator(), 3)
    assert weight.item() == 0


def test_ranks_sums_are_added_and_the_furthest_is_the_furthest_of_all() -> None:
    one, other = (dict.fromkeys(update.SUMS, value) for value in (1.0, 2.0))
    assert update._joined([(one, 0.3), (other, 0.1)]) == (dict.fromkeys(update.SUMS, 3.0), 0.3)


def test_an_update_that_learns_from_nothing_writes_no_mean_of_it() -> None:
    """Loss, ratio and gradient stood as 0, as if they had been measured, and pulled every curve and median down."""
    policy, config = Policy(tiny()), tiny()
    stats = update.update(policy, torch.optim.SGD(policy.parameters), [], config, torch.Generator(), 0)
    assert stats == {"engine/mismatch_bound": MOST_APART[torch.float32], "update/kept_turns": 0.0}


def test_without_a_penalty_no_reference_is_computed() -> None:
    stub: Any = Stub()
    config = make_config(settings=["loss=clip(kl=0)"])
    part = [taught((1, 2), (5,), (-1.0,), 1.0)]
    totals, _ = update._accumulate(stub, part, ALONE, config)
    assert (stub.asked_reference, totals["kl"], totals["loss"]) == (0, 0.0, -1.0)

"""Training at a service that speaks Tinker's protocol: a fake one over a real socket, that computes with nano."""

from __future__ import annotations

import errno
import gc
import json
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from msgrpo.errors import MsgrpoError, RunError, UsageError
from msgrpo.train.checkpoint import Progress
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.engines.contract import Engine
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.tinker import cost, download, service
from msgrpo.train.tinker.cost import LimitReachedError, Meter, ServicePrice, price_of
from msgrpo.train.tinker.estimate import estimate
from msgrpo.train.update import update
from tests.command_line import run
from tests.train_helpers import Told, learner, taught

pytest.importorskip("tinker", reason="needs the extra `tinker`")

from msgrpo.train.loop import train
from msgrpo.train.tinker.weights import TinkerWeights, rows
from tests.tinker_fake import KEY, Fake

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK leaves a connection open

SMALL = [
    "groups=1",
    "group_size=6",
    "select=aaw(keep=4)",
    "minibatches=2",
    "evaluation=2(film=0)",
    "max_tokens=24",
]


PRICED = "tinker(prefill=1, sample=2, train=3)"
LIMITED = "tinker(prefill=1, sample=2, train=3, max_cost=0.05)"


def settings(*more: str, steps: int = 1, **given: Any) -> TrainConfig:
    return make_config(settings=[*SMALL, *more], given={"backend": "tinker", "base": "nano", "steps": steps} | given)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves open is collected here, and not after the last test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with Fake() as started:
        monkeypatch.setenv("TINKER_BASE_URL", started.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        monkeypatch.setattr(service, "PATIENCE_S", 60.0)
        monkeypatch.setattr(service, "REACH_S", 60.0)
        yield started


def saved(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "checkpoints").glob("step-*"))


# ---- one turn, one row


def test_the_mean_is_in_the_advantages() -> None:
    """By hand: 2 and 1 tokens; over tokens all are divided by 3, over turns by 2 turns times their own length."""
    part = [taught((1, 2), (3, 4), (-0.1, -0.2), 1.5), taught((1, 2), (5,), (-0.3,), -3.0)]
    assert [row.advantages for row in rows(part, "token")] == [[0.5, 0.5], [-1.0]]
    assert [row.advantages for row in rows(part, "turn")] == [[0.375, 0.375], [-1.5]]


@pytest.mark.parametrize("over", ["token", "turn"])
def test_an_update_there_is_the_update_here(fake: Fake, tmp_path: Path, over: str) -> None:
    """The same turns, the same first weights: after two minibatches adapter, loss and gradient agree.

    Without the mean in the advantages the gradient would be longer by their number.
    """
    config = settings(f"loss=clip(kl=0, over={over})", "learning_rate=1e-3", steps=20)
    here = Policy(config)
    begun = here.adapter_state()
    prompts = [tuple(range(10 + i, 60 + i)) for i in range(4)]
    answers = [(100, 101, 102, 2)[: i + 1] for i in range(4)]
    with torch.no_grad():
        pairs = [(list(prompt), list(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        own, mask = here.logprobs([], pairs)
    samples = [
        taught(prompt, answer, tuple((own[i][mask[i].bool()] - 0.3).tolist()), advantage)
        for i, (prompt, answer, advantage) in enumerate(zip(prompts, answers, (1.0, -2.0, 0.5, 3.0), strict=True))
    ]
    remote = TinkerWeights(config, tmp_path, ALONE, Told())
    there = remote.update(samples, learner().generator, 4, lambda done: None)
    optimizer = torch.optim.AdamW(here.parameters, weight_decay=0.0)
    ours = update(here, optimizer, samples, config, learner().generator, 4)
    assert not {"update/loss", "update/ratio"} & remote.update([], learner().generator, 5, lambda done: None).keys()
    remote.service.close()
    (model,) = fake.models.values()
    state, other = here.adapter_state(), model.policy.adapter_state()
    moved, apart = (
        sum(float((state[name] - one[name]).square().sum()) for name in state) ** 0.5 for one in (begun, other)
    )
    assert moved > 0.1
    assert apart < 1e-3 * moved  # AdamW makes whole steps of gradients that are nothing but rounding
    for name in ("update/loss", "update/clip_share", "update/ratio", "update/grad_norm", "engine/mismatch_mean"):
        assert there[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-5), name
    assert there["update/clip_share"] > 0  # the bounds were tried
    assert "update/kl" not in there  # a service has no reference model
    assert fake.steps == 2


# ---- whole runs


@pytest.mark.usefixtures("near")
def test_a_run_trains_there_and_its_adapter_comes_home(fake: Fake, tmp_path: Path) -> None:
    told, out = Told(), tmp_path / "run"
    summary = train(settings("evaluation=2(film=1)", backend=PRICED), out, report=told)
    assert fake.steps == 2  # two minibatches
    assert fake.keys == {KEY}
    assert summary["service"] == fake.url.removeprefix("http://")
    assert summary["adapter_here"] == str(out)
    spent = summary["cost"]["tokens"]
    assert summary["cost"]["usd_at_most"] == pytest.approx(
        (spent["prefill"] + 2 * spent["sample"] + 3 * spent["train"]) / 1e6
    )
    # what is trained on is counted token by token: the rows of the update, and those of two canaries
    assert spent["train"] == sum(
        len(row.model_input[0].encoded_text.tokens) // 4 + 1 for b in fake.bodies for row in b.data
    )
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "nano"
    assert not (tmp_path.parent / "evil").exists()
    from msgrpo.models.loading import load_adapted

    model, _ = load_adapted(out)
    there = next(iter(fake.models.values())).policy.model
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, there(ids).logits, atol=1e-4)
    assert {path.name for path in (out / "film").iterdir()}
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3  # an update, two evaluations


@pytest.mark.usefixtures("near")
def test_a_service_that_goes_away_ends_the_run_and_it_goes_on(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes in the second update; the first one's checkpoint brings back weights and optimizer."""
    out = tmp_path / "run"

    class Leaves(Told):
        def doing(self, text: str) -> None:
            if "learning from" not in text and text.startswith("update 2"):
                monkeypatch.setattr(service, "PATIENCE_S", 1.0)
                monkeypatch.setattr(service, "REACH_S", 1.0)
                fake.faults.add("gone")

    config = settings("checkpoint_every=1", steps=2)
    with pytest.raises(RunError, match=r"the service at 127.* failed at .*: no answer within 1 s") as raised:
        train(config, out, report=Leaves())
    assert "--resume" in str(raised.value)
    assert KEY not in str(raised.value)
    assert saved(out) == ["step-000001"]
    fake.faults = {"no download"}
    monkeypatch.setattr(service, "PATIENCE_S", 60.0)
    monkeypatch.setattr(service, "REACH_S", 60.0)
    first, told = next(iter(fake.models.values())), Told()
    summary = train(config, out, resume=True, report=told)
    assert "going on after update 1" in told.said
    second = list(fake.models.values())[-1]
    assert second is not first
    counts = {int(state["step"]) for state in second.optimizer.state_dict()["state"].values()}
    assert counts == {4}  # AdamW's own count went on
    assert summary["steps"] == 2
    assert summary["adapter_here"] is None  # and the summary names where it is
    assert summary["adapter_there"].startswith("tinker://")
    assert any("and not here" in line for line in told.said)
    assert not (out / "adapter_model.safetensors").exists()


@pytest.mark.usefixtures("near")
def test_an_update_that_cannot_be_saved_is_not_called_kept(fake: Fake, tmp_path: Path) -> None:
    """The service fails once the second update has changed its weights: the first one's are gone."""

    class Stale(Told):
        def doing(self, text: str) -> None:
            if text.startswith("update 2") and "learning from" in text:
                fake.faults.add("stale")

    told = Stale()
    with pytest.raises(RunError, match="with the weights of the version before"):
        train(settings("checkpoint_every=100", steps=3), tmp_path / "run", report=told)
    assert saved(tmp_path / "run") == []
    *_, why, kept = told.said
    assert why.startswith("update 1 is not saved")
    assert kept.startswith("kept: 0 updates")


def test_a_second_service_of_a_process_is_asked_for_its_own_adapter(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK keeps one client for all that name neither address nor key: the first service was asked again."""
    asked: dict[str, str] = {}

    def client(**given: str) -> None:
        asked.update(given)
        raise RuntimeError

    remote = TinkerWeights(settings(), tmp_path, ALONE, Told())
    monkeypatch.setattr(remote.service._sdk, "RestClient", client)
    with pytest.raises(MsgrpoError):
        remote.service.urls("tinker://run-0/external_weights/final")
    remote.service.close()
    assert asked == {"base_url": fake.url, "api_key": KEY}


@pytest.mark.usefixtures("near")
def test_an_adapter_of_fewer_updates_is_not_left_in_the_place_of_one_that_cannot_be_had(
    fake: Fake, tmp_path: Path
) -> None:
    """It was evaluated as that of all updates, and nobody had said so."""
    out = tmp_path / "run"
    train(settings(), out, report=Told())
    weights = out / "adapter_model.safetensors"
    before = weights.read_bytes()
    fake.faults = {"no download"}
    train(settings(), out, resume=True, report=Told())
    assert weights.read_bytes() == before  # no update has come since
    train(settings(steps=2), out, resume=True, report=Told())
    assert not weights.exists()
    assert not (out / "adapter_config.json").exists()


@pytest.mark.usefixtures("near")
def test_a_full_disk_does_not_take_the_summary_of_a_run_that_was_paid_for(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter's files were written after the check of what the service offers, and their error ended the run."""
    written = download.replace_json

    def full(file: Path, values: Any) -> None:
        if file.name == "adapter_config.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, values)

    monkeypatch.setattr(download, "replace_json", full)
    told = Told()
    summary = train(settings(), tmp_path / "run", report=told)
    assert summary["adapter_here"] is None
    assert any("No space left on device" in note for note in told.said)
    assert not list((tmp_path / "run").glob("*adapter*"))


@pytest.mark.usefixtures("near")
def test_max_cost_stops_before_it_is_passed(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(LimitReachedError, match=r"max_cost is \$0\.05"):
        train(settings(steps=50, backend=LIMITED), out, report=Told())
    spent = json.loads((out / "cost.json").read_text())
    assert 0.025 < spent["usd_at_most"] <= 0.05
    steps = fake.steps
    assert bool(saved(out)) == (steps > 0)  # what was learned is kept
    with pytest.raises(LimitReachedError):  # what was spent stays spent
        train(
            settings(steps=50, backend=LIMITED),
            out,
            resume=True,
            report=Told(),
        )
    assert fake.steps == steps


# ---- what a service does wrong


def one_version(remote: TinkerWeights, engine: Engine) -> None:
    """What a run does with a service, without its games."""
    engine.load(0)
    remote.update([taught((1, 2, 3), (4, 5), (-3.0, -3.0), 1.0)], learner().generator, 0, lambda done: None)
    engine.load(1)
    remote.kept(remote.copy(Progress(step=1)))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stale", "with the weights of the version before"),
        ("temperature", "differ by 1 nats a token"),
        ("nan", "cannot be read"),
        ("alien", "it has another one"),
        ("path", "which is none"),
    ],
)
def test_what_is_wrong_there_ends_the_run(fake: Fake, tmp_path: Path, fault: str, said: str) -> None:
    config = settings()
    remote = TinkerWeights(config, tmp_path, ALONE, Told())
    with closing(remote.engine(tmp_path, None)) as engine:
        fake.faults.add(fault)
        with pytest.raises(RunError, match=said):
            one_version(remote, engine)


@pytest.mark.usefixtures("fake")
def test_a_loss_that_is_not_finite_says_to_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It advised a smaller learning rate, which `--resume` refuses."""
    monkeypatch.setattr(TinkerWeights, "_measured", lambda *given: ({"loss": float("nan")}, torch.zeros(1)))
    remote = TinkerWeights(settings("learning_rate=1e-3"), tmp_path, ALONE, Told())
    sample = taught((1, 2, 3), (4, 5), (-3.0, -3.0), 1.0)
    with pytest.raises(RunError, match="the loss is not finite in update 1: nan") as raised:
        remote.update([sample], learner().generator, 0, lambda done: None)
    remote.service.close()
    assert "in another --out with --set learning_rate=0.0001 (it was 0.001)" in str(raised.value)


def test_a_wrong_key_is_told_and_not_repeated(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    with pytest.raises(RunError, match="Invalid API key") as raised:
        train(settings(), tmp_path / "run", report=Told())
    assert "tml-wrong" not in str(raised.value)
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(UsageError, match="TINKER_API_KEY is not set"):
        train(settings(), tmp_path / "run", report=Told())
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match="nobody answers"):
        train(settings(), tmp_path / "run", report=Told())


# ---- what cannot be, and what it costs


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("loss=clip(kl=0.1)", r"'loss=clip\(kl=0\)'"),
        ("loss=gspo(kl=0)", "whose loss is that of clip"),
        ("credit=critic", "computes with the policy"),
        ("loss=decoupled(kl=0)", "computes with the policy"),
        ("teacher=optimal", "sampled answers alone"),
        ("rollouts=vllm", "which also plays"),
        ("temperature=0.7", "temperature 1"),
        ("explore=entropy(target=0.1)", "temperature 1"),
        ("backend=tinker(prefill=1, sample=2)", "a price has three parts"),
        ("backend=tinker(prefill=-1, sample=2, train=3)", "prefill"),
        ("backend=tinkr", "is not local, or tinker"),
        ("backend=local(max_cost=1)", "it takes nothing"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(wrong: str, said: str) -> None:
    backend = [] if wrong.startswith("backend") else ["backend=tinker"]
    with pytest.raises(UsageError, match=said):
        make_config(settings=[*SMALL, *backend, wrong])


def test_a_gguf_file_and_opponent_base_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as the service does"):
        make_config("small", given={"backend": "tinker", "base": str(tmp_path / "model.gguf")})
    with pytest.raises(UsageError, match="the base's too"):
        make_config(settings=["opponent=base"], given={"backend": "tinker", "scenario": "snake-duel"})


def test_a_price_is_known_given_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    known = price_of(make_config(given={"backend": "tinker", "base": "Qwen/Qwen3-8B"}))
    assert known.of({"prefill": 10**6, "sample": 10**6, "train": 10**6}) == pytest.approx(0.195 + 0.60 + 0.44)
    with pytest.raises(UsageError, match="no price of 'some/model'"):
        price_of(make_config(given={"backend": "tinker", "base": "some/model"}))
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:8000")
    assert price_of(make_config(given={"backend": "tinker", "base": "some/model"})).of({"train": 10**9}) == 0
    with pytest.raises(UsageError, match="needs a price"):
        price_of(make_config(given={"backend": "tinker(max_cost=1)", "base": "some/model"}))


@pytest.mark.parametrize("count", ["Infinity", "NaN", "1e400", "1" + "0" * 400, "-1", "null", '"1"'])
def test_a_ledger_that_is_damaged_is_told_and_not_counted_from_0(count: str, tmp_path: Path) -> None:
    """An infinite count ended in a traceback, and one below 0 counted as nothing spent."""
    (tmp_path / "cost.json").write_text(f'{{"tokens": {{"prefill": {count}, "sample": 1, "train": 1}}}}')
    with pytest.raises(RunError, match="nobody knows what was spent"):
        Meter.of(settings(backend=PRICED), tmp_path)


def test_a_ledger_that_the_disk_refuses_is_not_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To remove it and count from 0 was the advice."""

    def refuse(file: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(cost, "read_regular", refuse)
    with pytest.raises(PermissionError):  # `run_folder.writing` makes one sentence of it
        Meter.of(settings(backend=PRICED), tmp_path)


def test_a_meter_never_passes_its_limit() -> None:
    meter = Meter(ServicePrice(1.0, 2.0, 3.0, "here"), limit=10e-6)
    meter.reserve(prefill=2, sample=4)  # 2 + 8
    with pytest.raises(LimitReachedError):
        meter.reserve(prefill=1)
    meter.unused(sample=3)
    meter.reserve(train=2)
    assert meter.spent == pytest.approx(10e-6)


def test_an_estimate_counts_what_may_be_played_again_for_flat_groups() -> None:
    plain, again = (estimate(settings(*more), None) for more in ((), ("explore=refill(rounds=2)",)))
    assert again.parts["rollouts"]["sample"] == pytest.approx(3 * plain.parts["rollouts"]["sample"], rel=1e-3)
    assert again.parts["update"] == plain.parts["update"]  # of each start at most one group teaches


def test_a_dry_run_says_what_it_costs_and_sends_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train", "frozen-lake", "--backend", PRICED, "--dry-run", "--base", "nano", "--json", "--steps", "2"]
    found = json.loads(run(*command, *(part for one in SMALL for part in ("--set", one))).stdout)
    rollouts, update = found["parts"]["rollouts"], found["parts"]["update"]
    turns = rollouts["sample"] / 24  # of 12 episodes, each of at most 8 steps
    assert 12 < turns < 96
    assert rollouts["prefill"] == pytest.approx(turns * found["prompt_tokens"], abs=1)
    assert update["train"] == pytest.approx(turns * 4 / 6 * (found["prompt_tokens"] + 24), abs=1)
    assert found["usd"] == pytest.approx(
        sum(found["tokens"][k] * p for k, p in zip(("prefill", "sample", "train"), (1, 2, 3), strict=True)) / 1e6
    )
    assert fake.asked == []
    dry = ("train", "--backend", "tinker", "--base", "Qwen/Qwen3-8B", "--dry-run")
    assert "nothing was sent" in run(*dry).stdout
    monkeypatch.delenv("TINKER_BASE_URL")
    assert "2026-10-07" in run(*dry).stdout
    with pytest.raises(MsgrpoError, match="costs at a service"):
        run("train", "--dry-run")


def test_a_runs_folder_sends_nothing_anywhere_unless_a_person_says_so(fake: Fake, tmp_path: Path) -> None:
    from msgrpo.train.run_folder import config_of, resume_command

    (tmp_path / "config.json").write_text(settings().model_dump_json())
    with pytest.raises(UsageError, match="backend 'tinker'"):
        config_of(tmp_path, {})
    assert config_of(tmp_path, {"backend": "tinker"}) is not None
    assert "--allow tinker" in resume_command(tmp_path)

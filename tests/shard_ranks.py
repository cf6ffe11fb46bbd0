"""One of the two processes of `test_train_shard.py`: measures sharded against whole, and writes what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import msgrpo.models.shared_prefix as shared_prefix
from msgrpo.agent import Completion
from msgrpo.errors import MsgrpoError
from msgrpo.games import get_scenario
from msgrpo.models.local import LocalModel
from msgrpo.models.paths import NANO_DIR
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.engines import contract
from msgrpo.train.groups import Sample
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE, Ranks, open_ranks
from msgrpo.train.update import _accumulate

FOUND: dict[str, Any] = {}


def turns(count: int, seed: int, *, equal: bool) -> list[Sample]:
    """Turns after one long prefix; four share each prompt, or none does."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 500, (length,), generator=generator).tolist())

    head = ids(40)
    prompts = [head + ids(3 + i) for i in range(count // 4)]
    samples = []
    for i in range(count):
        prompt, answer = prompts[i % len(prompts)] if equal else head + ids(5 + i % 4), ids(3 + i % 5)
        completion = Completion("", "stop", prompt_ids=prompt, token_ids=answer, logprobs=(-6.0,) * len(answer))
        samples.append(Sample(completion, float(torch.randn((), generator=generator))))
    return samples


def policy_of(*settings: str) -> tuple[Policy, TrainConfig]:
    """A policy whose adapter is not 0, the same at every rank."""
    config = make_config(settings=["rollouts=vllm", *settings])
    policy = Policy(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return policy, config


def gradient(policy: Policy, config: TrainConfig, part: Sequence[Sample], ranks: Ranks) -> torch.Tensor:
    for parameter in policy.parameters:
        parameter.grad = None
    _accumulate(policy, part, ranks, config)
    ranks.sum_gradients(policy.parameters)
    return torch.cat([p.grad.flatten() for p in policy.parameters if p.grad is not None]).clone()


def compare(case: str, part: Sequence[Sample], ranks: Ranks, *settings: str) -> tuple[Policy, Policy, TrainConfig]:
    whole, config = policy_of(*settings)
    wanted = gradient(whole, config, part, ALONE)
    sharded, config = policy_of("shard=true", *settings)
    gradient(sharded, config, part, ranks)  # twice: the first leaves nothing behind that the second would meet
    found = gradient(sharded, config, part, ranks)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    FOUND[case] = {"relative error": error, "norm": float(wanted.norm())}
    return whole, sharded, config


def held(whole: Policy, sharded: Policy) -> None:
    def layers(policy: Policy) -> list[Any]:
        return [p for name, p in policy.model.named_parameters() if ".layers." in name and "lora_" not in name]

    own = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in layers(sharded)[:-12])
    mine, theirs = sharded.adapter_state(), whole.adapter_state()
    pairs = [([5, 6, 7 + i], [9, 10, 11]) for i in range(3)]
    with torch.no_grad():
        apart = (sharded.logprobs([3, 4], pairs)[0] - whole.logprobs([3, 4], pairs)[0]).abs().max()
    FOUND["held"] = {
        "layers, share": own / sum(p.numel() for p in layers(whole)[:-12]),  # but the last layer's, which stay
        "adapter is plain and equal to the one beside a whole base": mine.keys() == theirs.keys()
        and all(type(v) is torch.Tensor and torch.equal(v, theirs[k]) for k, v in mine.items()),
        "log-probabilities differ": float(apart),
    }


def canary(whole: Policy, sharded: Policy) -> None:
    prompts = contract.canary_prompts(get_scenario("frozen-lake"))
    model = LocalModel("policy", whole.model, whole.tokenizer)
    answers = model.generate(prompts, contract.canary_sampling(1.0), contract.SEEDS)
    gap = contract.check(sharded, "the engine", answers, [{k: v * 0.5 for k, v in whole.adapter_state().items()}])
    stale = whole.adapter_state()
    sharded.load_adapter_state({name: tensor * 1.5 for name, tensor in stale.items()})
    try:
        contract.check(sharded, "the engine", answers, [stale])
        said = ""
    except MsgrpoError as error:
        said = error.message
    FOUND["canary"] = {"gap": gap, "stale": said}


def other_order(ranks: Ranks) -> None:
    """Rank 0 computes what takes three calls of the trunk where rank 1 computes what takes two."""
    policy, _ = policy_of("shard=true")
    policy._lockstep, lockstep = None, policy._lockstep  # let equal prompts be merged: a call more
    equal, different = turns(8, 1, equal=True), turns(8, 2, equal=False)
    said = ""
    try:
        for part in (equal, different) if ranks.first else (different, equal):
            pairs = [(list(s.prompt_ids[40:]), list(s.answer_ids)) for s in part]
            logprobs, _ = policy.logprobs(list(part[0].prompt_ids[:40]), pairs)
            assert lockstep is not None
            lockstep.at("a backward pass")
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
    except MsgrpoError as error:
        said = error.message
    FOUND["other order"] = said


def tied(folder: Path, ranks: Ranks) -> str:
    """A base whose head is its embeddings."""
    if ranks.first:
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(NANO_DIR)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=2,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    dist.barrier()
    return str(folder)


def main() -> None:
    file = Path(sys.argv[1])
    torch.set_num_threads(1)
    with open_ranks() as ranks:
        whole, sharded, _ = compare("equal prompts", turns(12, 0, equal=True), ranks)
        held(whole, sharded)
        canary(whole, sharded)
        compare("different prompts", turns(12, 0, equal=False), ranks)
        usual, shared_prefix.LOGITS = shared_prefix.LOGITS, 768 * 4
        compare("the head in parts", turns(12, 0, equal=True), ranks)
        shared_prefix.LOGITS = usual
        compare("checkpointed", turns(12, 0, equal=True), ranks, "micro_batch=16384(checkpointing=true)")
        compare("many micro-batches", turns(14, 3, equal=True), ranks, "micro_batch=60")
        compare("tied", turns(12, 0, equal=True), ranks, f"base={tied(file.parent / 'tied', ranks)}")
        other_order(ranks)
        if ranks.first:
            file.write_text(json.dumps(FOUND))


if __name__ == "__main__":
    main()

"""MS-GRPO in one file: play, compare, keep, update. Run it: `python -m msgrpo.train.mini`.

nano learns Frozen Lake here, in one process, from top to bottom of this file. The four equations are those of
`msgrpo.py`; games, agents and episodes are the library's. From the same seed the first update is that of
`msgrpo train frozen-lake` (`tests/test_train_mini.py`), which adds what a long run needs and nothing of the method:

- checkpoints, resume and a clean stop; metrics, curves and evaluations on starts that no update plays;
- micro-batches, bfloat16 and checkpointed layers, for models that fill a GPU;
- rollouts by vLLM, several processes, games of several players, and the method's rivals.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from msgrpo.agent import Completion, LanguageAgent, Sampling
from msgrpo.episode import Episode, derive_seed, play_episode
from msgrpo.games import get_scenario
from msgrpo.loops import run_async
from msgrpo.models.loading import load_base
from msgrpo.models.local import LocalModel, pad_id
from msgrpo.models.shared_prefix import answer_logprobs, common_prefix_length, trunk_and_head
from msgrpo.train.msgrpo import aaw_sample, composite_returns, group_advantages, policy_loss

Taught = tuple[Completion, float]  # what the model wrote in one turn, and its advantage


@dataclass(frozen=True)
class Settings:
    """The values of `msgrpo train frozen-lake`, which makes twice as many updates."""

    scenario: str = "frozen-lake"
    seed: int = 0
    steps: int = 20  # updates
    groups: int = 16  # starts an update
    group_size: int = 24  # G, episodes from each start
    keep: int = 8  # G′, episodes of a group that the update sees
    minibatches: int = 6  # optimizer steps an update
    learning_rate: float = 1e-3
    warm_up: int = 5  # updates
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.1
    max_grad_norm: float = 0.2
    format_penalty: float = 0.1
    max_tokens: int = 48


async def play(agent: LanguageAgent, settings: Settings, step: int, starts: Sequence[int]) -> list[list[Episode]]:
    """G episodes from each start, each with luck of its own: [group][j]."""
    scenario = get_scenario(settings.scenario)

    async def one(g: int, j: int) -> Episode:
        return await play_episode(
            scenario,
            {scenario.players[0]: agent},
            start_seed=starts[g],
            chance_seed=derive_seed("chance", settings.seed, step, g, j),
            sampling_seed=derive_seed("sampling", settings.seed, step, g, j),
            format_penalty=settings.format_penalty,
        )

    size = settings.group_size
    episodes = await asyncio.gather(*(one(g, j) for g in range(len(starts)) for j in range(size)))
    await agent.close()
    return [list(episodes[g * size : (g + 1) * size]) for g in range(len(starts))]


def compare(groups: Sequence[Sequence[Episode]], keep: int, generator: torch.Generator) -> list[Taught]:
    """Every turn of the kept episodes, with its episode's advantage. Groups whose returns are equal teach nothing."""
    taught = []
    for episodes in groups:
        turns = [episode.turns for episode in episodes]
        returns_G = composite_returns(
            [[turn.paid for turn in one] for one in turns], [[turn.shaping for turn in one] for one in turns]
        )
        advantages_G = group_advantages(returns_G)
        if not advantages_G.any():
            continue
        for j in aaw_sample(advantages_G, keep, generator).tolist():
            taught += [(turn.completion, float(advantages_G[j])) for turn in turns[j] if turn.completion is not None]
    return taught


def parts(taught: Sequence[Taught], count: int, generator: torch.Generator) -> list[list[Taught]]:
    """A random partition into minibatches, in which the answers to one prompt stand side by side."""
    prompts = list(dict.fromkeys(completion.prompt_ids for completion, _ in taught))
    place = dict(zip(prompts, torch.randperm(len(prompts), generator=generator).tolist(), strict=True))
    ordered = sorted(taught, key=lambda one: place[one[0].prompt_ids])
    bounds = [len(ordered) * part // count for part in range(count + 1)]
    return [ordered[low:high] for low, high in pairwise(bounds) if low < high]


def loss_of(model: Any, pad: int, part: Sequence[Taught], settings: Settings) -> Tensor:
    """`policy_loss` over N turns, with the log-probabilities of the policy, of its sampler and of its reference."""
    prompts = [list(completion.prompt_ids) for completion, _ in part]
    answers = [list(completion.token_ids) for completion, _ in part]
    shared = common_prefix_length(prompts)  # computed once
    pairs = [(prompt[shared:], answer) for prompt, answer in zip(prompts, answers, strict=True)]
    trunk, head = trunk_and_head(model)
    with torch.no_grad(), model.disable_adapter():
        reference_NT, _ = answer_logprobs(trunk, head, prompts[0][:shared], pairs, pad)
    logprobs_NT, mask_NT = answer_logprobs(trunk, head, prompts[0][:shared], pairs, pad)
    old_NT = torch.zeros_like(reference_NT)  # answers end together, so the padding is on the left
    for row, (completion, _) in enumerate(part):
        old_NT[row, -len(completion.logprobs) :] = torch.tensor(completion.logprobs)
    loss, _ = policy_loss(
        logprobs_NT,
        old_NT,
        reference_NT,
        torch.tensor([advantage for _, advantage in part]),
        mask_NT,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_coef=settings.kl_coef,
        aggregate="token",
    )
    return loss


def learn(settings: Settings) -> Any:
    """Run MS-GRPO, print the share of episodes that reach the goal in each update, and return the adapted model."""
    base, tokenizer = load_base("nano")
    torch.manual_seed(settings.seed)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, lora)
    pad = pad_id(model, tokenizer)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)
    starts = get_scenario(settings.scenario).starts("train", first_seed=settings.seed * 1_000_003)
    sampling = Sampling(temperature=1.0, max_tokens=settings.max_tokens)
    for step in range(settings.steps):
        model.merge_adapter()  # plain matrices are faster while it plays
        agent = LanguageAgent("policy", LocalModel("policy", model, tokenizer), sampling)
        groups = run_async(play(agent, settings, step, list(islice(starts, settings.groups))))
        model.unmerge_adapter()

        # the rate rises at first, and from the middle of the run falls in a line, to no less than a twentieth
        rate = min(1.0, (step + 1) / settings.warm_up, max(0.05, 2 * (1 - step / settings.steps)))
        optimizer.param_groups[0]["lr"] = settings.learning_rate * rate
        generator = torch.Generator().manual_seed(derive_seed("update", settings.seed, step))
        taught = compare(groups, settings.keep, generator)
        for part in parts(taught, settings.minibatches, generator):
            optimizer.zero_grad()
            loss_of(model, pad, part, settings).backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(weights, settings.max_grad_norm)
            optimizer.step()

        won = [bool(episode.success) for episodes in groups for episode in episodes]
        share = sum(won) / len(won)
        print(f"update {step + 1:3} of {settings.steps}   reached the goal {share:6.1%}  {'█' * round(40 * share)}")
    return model


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("it takes no arguments: change Settings in this file")
    learn(Settings())

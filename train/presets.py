"""What runs begin with: a preset by the base's size, and what was chosen for the package's own scenarios.

[P] arXiv 2508.10839.
"""

from __future__ import annotations

from typing import Any

from msgrpo.models.paths import NANO_SIZED, parameters_of

PRESETS: dict[str, dict[str, Any]] = {
    # Two CPU cores, minutes. All values ours; several were compared in single trial runs only.
    "nano": {},
    # A model of up to a billion parameters on a CPU, where an update of nano's 384 episodes would take an hour. All
    # values ours. Without KL the reference's forward pass, a fifth of the update, is saved.
    "small": {
        "groups": 4,
        "group_size": 16,
        "steps": 30,
        "evaluation": "50(every=10)",
        "checkpoint_every": 1,
        "learning_rate": 5e-4,
        "loss": "clip(kl=0)",
        "minibatches": 2,
        "micro_batch": "2048",
    },
    # The same on a GPU, where many rows cost what a few do. All values ours; a 0.5B learned with them on one seed
    # (docs/results/qwen-0.5b.md); the only others, a rate of 3e-4 without `explore`, lost their entropy.
    "small-gpu": {
        "groups": 32,
        "group_size": 16,
        "steps": 40,
        "evaluation": "100(every=10)",
        "checkpoint_every": 10,
        "learning_rate": 2.5e-4,
        "explore": "entropy(target=0.04)",
        "loss": "clip(kl=0)",
        "minibatches": 4,
    },
    # The paper's run. [P]: base, G, G′, 700 updates, one group, evaluation on the same 50 episodes, LoRA on all
    # linear layers. Ours, because no source gives them: learning rate, rank, alpha, KL, clip range, temperature,
    # token limit, format penalty, passes and minibatches.
    "paper": {
        "base": "Qwen/Qwen2.5-3B-Instruct",
        "groups": 1,
        "group_size": 100,
        "select": "aaw(keep=25)",
        "steps": 700,
        "evaluation": "50(every=50)",
        "max_tokens": 200,
        "learning_rate": 2e-5,
        "lora_rank": 32,
        "minibatches": 1,
        "micro_batch": "16384(checkpointing=true)",
    },
}


# Parameters up to which a base has the settings of `small`, or of `small-gpu`.
SMALL = 1_200_000_000


def preset_for(base: str) -> str:
    """The preset of a base that none was named for: by its size, and by whether there is a GPU.

    `nano` for models of nano's size (nano taught a game is one), `small` for those that a CPU can train, on a GPU
    `small-gpu`, else `paper`; that too where the size cannot be seen, since nothing of a hub's model lies here yet.
    """
    size = parameters_of(base)
    if size is not None and size <= NANO_SIZED:
        return "nano"
    if size is None or size > SMALL:
        return "paper"
    import torch

    return "small-gpu" if torch.cuda.is_available() else "small"


# What `msgrpo train SCENARIO` begins with for nano, so that it ends in time on two cores. Those of `frozen-lake`,
# `frozen-lake-slippery` and `snake` come from trial runs, looked at on validation starts only; the others were chosen
# for their time alone (`benchmarks/default_runs.py`), and nothing is known of what they reach. A game that is not
# here takes the preset.
FEW: dict[str, Any] = {  # for long episodes
    "groups": 2,
    "group_size": 12,
    "select": "aaw(keep=6)",
    "steps": 40,
    "evaluation": "50",
}
CHOSEN: dict[str, dict[str, Any]] = {
    "frozen-lake": {"steps": 40},
    "frozen-lake-slippery": {  # luck decides most of an episode, and simulated episodes average it away
        "credit": "simulated(playouts=16)",
        "groups": 16,
        "group_size": 12,
        "select": "all",
        "minibatches": 12,
        "loss": "clip(kl=0.02)",
        "steps": 24,
        "evaluation": "1000(every=12)",  # on 200 no gain is seen
    },
    "frozen-lake-big-slippery": {"groups": 8},
    "frozen-lake-4x4": {"groups": 8, "evaluation": "100"},
    "frozen-lake-8x8": FEW,
    "snake": {  # several rewards an episode: what comes much later is not a turn's doing, and dying must be named
        "credit": "to-go(gamma=0.6)",
        "groups": 8,
        "group_size": 12,
        "select": "aaw(keep=12)",
        "minibatches": 24,
        "loss": "clip(kl=0.05)",
        "steps": 40,
        "evaluation": "100(every=10)",
    },
    "snake-poison-apple": {"groups": 4, "steps": 40, "evaluation": "100"},
    "snake-poison-apple-and-banana": {"groups": 4, "steps": 40, "evaluation": "100"},
    "snake-solo": FEW,
    "snake-duel": {"groups": 2, "steps": 40, "evaluation": "100"},
}

"""loss="clip(echo=0.1)": beside any loss, the policy learns to predict the next observation.

    ℓ + λ · mean over tokens of −log pθ(o_i | s, y, o_<i)

s is the prompt, y the answer, and o the observation with which the player's next turn begins; λ is `echo`. All of it
comes from the forward pass that the answers need anyhow, which is longer by the observations. Neither advantage nor
the penalty on the divergence touches these tokens, and a group in which all episodes went alike teaches them too: its
answers, whose advantage is 0, then count in the mean of ℓ and have their penalty, so the returns weigh a little less.
The last turn of an episode has no observation behind it.

A prompt of this method holds one state alone, so the observation follows the answer as it would in a prompt with a
history: after `State: `, whatever words of its own a template has there.

Source: ECHO (arXiv 2605.24517), where λ is about 0.1 and the observation is what a terminal prints.
"""

from __future__ import annotations

from typing import Any


def observed_tokens(state: str, tokenizer: Any) -> tuple[int, ...]:
    """The next observation as it follows an answer."""
    return tuple(tokenizer(f"\nState: {state}", add_special_tokens=False)["input_ids"])

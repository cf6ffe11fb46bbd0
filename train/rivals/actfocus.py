"""Weights of tokens: the words before the action may count for less than the action (`credit="episode(words=0.3)"`).

ActFocus (arXiv 2605.14558): what correlates with the return stands in the few tokens of the action. Here the
advantage of every token before the last `<action>` is multiplied by `words`; its KL penalty is not. The paper's
second part, more weight for actions of which the policy is unsure, is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from msgrpo.agent import Completion, action_span


def token_weights(completion: Completion, tokenizer: Any, words: float) -> tuple[float, ...]:
    """One weight for each token of the answer: `words` before the action's tag, 1 from it on.

    An answer without an action has words only.
    """
    ids = list(completion.token_ids)

    def characters(count: int) -> int:
        return len(tokenizer.decode(ids[:count], skip_special_tokens=True))

    span = action_span(tokenizer.decode(ids, skip_special_tokens=True))
    before = len(ids)
    if span is not None:  # the last count of tokens that reaches no further than the words
        before = bisect_right(range(len(ids) + 1), span[0] - len("<action>"), key=characters) - 1
    return tuple(words if i < before else 1.0 for i in range(len(ids)))

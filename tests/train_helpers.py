"""What tests of training share."""

from __future__ import annotations

from msgrpo.agent import Completion
from msgrpo.train.batch import Sample
from msgrpo.train.display import Quiet


class Told(Quiet):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def taught(
    prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...], logprobs: tuple[float, ...], advantage: float
) -> Sample:
    """A turn by its numbers alone."""
    return Sample(Completion("", "stop", prompt_ids=prompt_ids, token_ids=answer_ids, logprobs=logprobs), advantage)

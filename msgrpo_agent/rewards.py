"""Φ: shaping terms, added to the environment's reward of a step in training and never in an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from msgrpo.parse import ParseFailure


@dataclass(frozen=True)
class Shaping:
    """Φ_jt = −format_penalty where the answer was ⊥, else 0. The composite return is Σ_t (r_jt + Φ_jt)."""

    format_penalty: float = 0.0

    def __call__(self, failure: ParseFailure | None) -> float:
        return 0.0 if failure is None else -self.format_penalty

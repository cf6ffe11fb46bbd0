"""T: the prompt of one turn, built from the current observation alone.

What never changes within an episode (instructions, rules) comes first and the state last, so that all turns of
a scenario share one prefix, which engines compute once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from msgrpo_agent.game import Scenario

INSTRUCTIONS = (
    "You are playing a text game. Look at the state, think briefly, then choose one action. "
    "End your answer with the action in tags, like <action>{example}</action>.\n"
    "Rules: {rules}\n"
    "Actions: {actions}\n"
    "State: "
)


MOST_LISTED = 40  # actions; where there are more, those that are legal stand with the state


@dataclass(frozen=True)
class Prompt:
    """`prefix` is the same in every turn of a scenario; `state` is this turn's observation."""

    prefix: str
    state: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """One user message: chat templates without a system role take it too."""
        return [{"role": "user", "content": self.prefix + self.state}]


@dataclass(frozen=True)
class PromptTemplate:
    """`instructions` may use {rules}, {actions} and {example}; the observation follows it."""

    instructions: str = INSTRUCTIONS

    def render(self, scenario: Scenario, observation: str) -> Prompt:
        actions = scenario.actions if len(scenario.actions) <= MOST_LISTED else ()
        prefix = self.instructions.format(
            rules=scenario.rules,
            actions=", ".join(actions) or "those that the state names as legal",
            example=actions[0] if actions else "…",
        )
        return Prompt(prefix, observation)

    @property
    def hash(self) -> str:
        """Names the template in records; two results with different hashes are not comparable."""
        return hashlib.sha256(self.instructions.encode()).hexdigest()[:12]

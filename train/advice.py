"""What a person should hear after a run's first update: that it cannot learn, why, and the command that helps."""

from __future__ import annotations

from collections.abc import Mapping

from msgrpo.train.config import TrainConfig, names_of

NEARLY_ALL = 0.9


def advice(stats: Mapping[str, float], config: TrainConfig) -> str | None:
    """One sentence for a person where nearly all answers are invalid or nearly all groups flat; else None."""
    invalid, truncated = stats["rollout/invalid"], stats["rollout/truncated"]
    if invalid > NEARLY_ALL and truncated > 0.5:
        return (
            f"{invalid:.0%} of the answers held no legal action, and {truncated:.0%} were cut off at max_tokens="
            f"{config.max_tokens}: with --set max_tokens={4 * config.max_tokens} they could end"
        )
    if invalid > NEARLY_ALL:
        name = names_of(config.scenario)[0]
        helps = f"msgrpo teach {name} --out runs/taught, then --base runs/taught"
        if config.base != "nano":
            helps = "look at transcripts.jsonl in the run's folder: does this base follow the prompt's form at all?"
        return f"{invalid:.0%} of the answers held no legal action, so there is nothing to compare: {helps}"
    if stats["rollout/gated_groups"] > NEARLY_ALL:
        return (
            f"the gate {config.gate} rejected {stats['rollout/gated_groups']:.0%} of the groups, and those teach "
            "nothing: look at transcripts.jsonl in the run's folder, or train without --set gate"
        )
    if stats["rollout/flat_groups"] > NEARLY_ALL:
        return (
            f"{stats['rollout/flat_groups']:.0%} of the groups are flat: all their episodes have the same return, so "
            "nothing is learnt. More episodes a group (--set group_size=…), a warmer policy (--set temperature=…), "
            "easier starts, or rewards on the way would give them something to differ in"
        )
    return None

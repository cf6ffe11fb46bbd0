"""What a person should hear before a long run: settings that do nothing in it, and, after its first update, that it
cannot learn, why, and the command that helps.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgrpo.train.config import TrainConfig, names_of

NEARLY_ALL = 0.9
HEARD_BY: dict[str, tuple[str, ...]] = {  # the credits that a setting belongs to
    "gamma": ("to-go", "state", "state-action", "lambda", "critic"),
    "lam": ("lambda", "critic"),
    "state_weight": ("state",),
}


def idle(config: TrainConfig) -> list[str]:
    """A sentence for each setting that is not its default and that nothing in this run looks at."""
    fields = TrainConfig.model_fields
    said = [
        f"{name}={getattr(config, name)} does nothing with credit={config.credit}: it belongs to {', '.join(credits)}"
        for name, credits in HEARD_BY.items()
        if config.credit not in credits and getattr(config, name) != fields[name].default
    ]
    if config.objective_weights != fields["objective_weights"].default and not config.objectives:
        said.append(f"objective_weights={config.objective_weights} does nothing without objectives")
    return said


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

"""What an update's rollouts looked like, before any selection."""

from __future__ import annotations

from collections.abc import Sequence

from msgrpo.episode import Episode
from msgrpo.run_log import own_seats
from msgrpo.train.information import state_information
from msgrpo.train.rollouts import Rollouts, entropy, own_turns


def left_out(episodes: Sequence[Episode]) -> str:
    """How many episodes the game's own faults have cost, and the last of them."""
    last = episodes[-1]
    return f"{len(episodes)} episodes without a result are left out; the last: {last.error}: {last.error_message}"


def describe(rollouts: Rollouts) -> dict[str, float]:
    """What the update's rollouts looked like, before any selection."""
    turns = own_turns(rollouts.all_episodes)
    returns = [episode.returns[player] for episode in rollouts.episodes for player in own_seats(episode)]
    successes = [float(episode.success) for episode in rollouts.episodes if episode.success is not None]
    values = {
        "rollout/return": sum(returns) / len(returns),
        "rollout/invalid": sum(turn.failure is not None for turn in turns) / max(len(turns), 1),
        "rollout/truncated": sum(turn.finish_reason == "length" for turn in turns) / max(len(turns), 1),
        "rollout/turns": float(len(turns)),
        "rollout/entropy": entropy(rollouts.all_episodes),
        "rollout/tokens": float(sum(turn.completion_tokens for turn in turns)),
        "rollout/lost": len(rollouts.lost) / (len(rollouts.lost) + len(rollouts.all_episodes)),
        "rollout/flat_groups": sum(group.is_flat for group in rollouts.groups) / max(len(rollouts.groups), 1),
        **state_information(turns),
    }
    return values | ({"rollout/success": sum(successes) / len(successes)} if successes else {})

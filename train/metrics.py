"""The figures of an update's rollouts before any selection: what `metrics.jsonl` calls `rollout/…`."""

from __future__ import annotations

from collections.abc import Sequence

from msgrpo.episode import Episode
from msgrpo.run_log import own_seats
from msgrpo.text import counted
from msgrpo.train.information import state_information
from msgrpo.train.rollouts import Rollouts, entropy, own_turns


def left_out(episodes: Sequence[Episode]) -> str:
    """How many episodes the game's own faults have cost, and the last of them."""
    last = episodes[-1]
    left = counted(len(episodes), "episode")
    return f"left out: {left} without a result; the last: {last.error}: {last.error_message}"


def describe(rollouts: Rollouts) -> dict[str, float]:
    """The figures, by their names in `metrics.jsonl`."""
    turns = own_turns(rollouts.all_episodes)
    returns = [episode.returns[player] for episode in rollouts.episodes for player in own_seats(episode)]
    successes = [float(episode.success) for episode in rollouts.episodes if episode.success is not None]
    shares: dict[str, Sequence[float]] = {
        "rollout/invalid": [turn.failure is not None for turn in turns],
        "rollout/truncated": [turn.finish_reason == "length" for turn in turns],
        "rollout/flat_groups": [group.is_flat for group in rollouts.groups],
        "rollout/success": successes,
    }
    spread = entropy(rollouts.all_episodes)
    return {
        "rollout/return": sum(returns) / len(returns),
        **{name: sum(each) / len(each) for name, each in shares.items() if each},  # of none there is no share
        "rollout/turns": float(len(turns)),
        **({} if spread is None else {"rollout/entropy": spread}),
        "rollout/tokens": float(sum(turn.completion_tokens for turn in turns)),
        "rollout/lost": len(rollouts.lost) / (len(rollouts.lost) + len(rollouts.all_episodes)),
        **state_information(turns),
    }

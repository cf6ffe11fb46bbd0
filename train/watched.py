"""What a person can watch of an update: of its groups every episode in numbers, and a few with all their turns."""

from __future__ import annotations

from collections.abc import Sequence

from msgrpo.run_log import GroupRow, Member, Update, WatchedEpisode
from msgrpo.train.rollouts import Rollouts
from msgrpo.train.update import Picked

GROUPS, WHOLE = 16, 3  # groups that are listed; those of them whose best and worst episode are kept whole


def watched(step: int, rollouts: Rollouts, picked: Sequence[Picked]) -> Update:
    """What is kept of the update's rollouts; `picked` are the groups that taught."""
    episode_of = {id(turn): episode for episode in rollouts.all_episodes for turn in episode.turns}
    taught = {id(choice.group): choice for choice in picked}
    listed = sorted(rollouts.groups, key=lambda group: id(group) not in taught)[:GROUPS]
    rows, samples = [], list[WatchedEpisode]()
    for number, group in enumerate(listed):
        pick = taught.get(id(group))
        totals, advantages = group.returns_G.tolist(), group.advantages_G.tolist()
        members = [
            Member(total=total, advantage=advantage, kept=pick is not None and j in pick.kept)
            for j, (total, advantage) in enumerate(zip(totals, advantages, strict=True))
        ]
        if number < WHOLE:
            order = sorted(range(len(members)), key=lambda j: advantages[j])
            for j in dict.fromkeys((order[-1], order[0])):
                members[j].sample = len(samples)
                turns = group.turns[j]
                credits = pick.credits[j] if pick else [0.0] * len(turns)
                samples.append(
                    WatchedEpisode(episode=episode_of[id(turns[0])], player=turns[0].player, credits=list(credits))
                )
        origin = episode_of[id(group.turns[0][0])]
        rows.append(
            GroupRow(
                scenario=origin.scenario,
                start_seed=origin.start_seed,
                player=group.turns[0][0].player,
                members=members,
            )
        )
    return Update(step=step, groups=rows, samples=samples)

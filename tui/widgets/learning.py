"""What is shown of a training run: its curve, an update's groups, the turns of one episode with their credit."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget
from textual_plotext import PlotextPlot

from msgrpo.parse import thought
from msgrpo.run_log import Member
from msgrpo.tui.learning import Learning, measured, sign
from msgrpo.tui.session import Session, points

NOTHING_YET = "nothing measured yet"


def draw_curve(curve: PlotextPlot, run: Learning) -> None:
    """The training score of every update, and the evaluations with their 95 % intervals."""
    plot = curve.plt
    plot.clear_data()
    key = f"rollout/{run.score}"
    played = [(row["step"], value) for row in run.train_rows if (value := measured(row, key)) is not None]
    if played:
        plot.plot(*zip(*played, strict=True), marker="braille")
    for step, _, low, high in run.evaluations:
        plot.plot([step, step], [low, high], marker="│", color="green+")
    if run.evaluations:
        plot.scatter(
            *zip(*((step, mean) for step, mean, *_ in run.evaluations), strict=True), marker="┼", color="green+"
        )
    if run.step:
        plot.vline(run.step)
    updates = run.settings["steps"]
    plot.xlim(0, updates)
    plot.xticks(sorted({round(updates * quarter / 4) for quarter in range(5)}))
    if run.score == "success":
        plot.ylim(0, 1)
        plot.yticks([0, 0.5, 1])
    curve.refresh()


class Groups(Widget):
    """One line a group, one sign an episode, the best first."""

    def __init__(self) -> None:
        super().__init__(id="groups")
        self._run: Learning | None = None

    def show(self, run: Learning) -> None:
        self._run = run
        self.refresh(layout=True)

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self._run.update.groups) if self._run and self._run.update else 1

    def render(self) -> Content:
        run = self._run
        if run is None or run.update is None:
            return Content.styled(NOTHING_YET, "$text-muted")
        largest = max((abs(m.advantage) for row in run.update.groups for m in row.members), default=1.0) or 1.0
        lines = []
        for number, row in enumerate(run.update.groups):
            here = number == run.group
            line = Content.styled(f"{'▸' if here else ' '}{row.start_seed:>8} ", "bold $accent" if here else "")
            for member in sorted(row.members, key=lambda member: -member.advantage):
                line += Content.styled(sign(member), paint(member, largest, chosen=here and member is run.member))
            lines.append(line + Content.styled("  flat" if row.flat else "", "$text-muted"))
        return Content("\n").join(lines)


def paint(member: Member, largest: float, *, chosen: bool) -> str:
    """The colour of an advantage: green or red, the paler the smaller."""
    if chosen:
        return "bold reverse $accent"
    if member.advantage == 0:
        return "$text-muted"
    colour = "$success" if member.advantage > 0 else "$error"
    return f"{colour} {round(40 + 60 * abs(member.advantage) / largest)}%"


def turns(run: Learning, session: Session) -> Content:
    """The episode's turns up to the one that is shown: action, reward, credit."""
    sample, member = run.shown, run.member
    if sample is None or member is None:
        return Content("")
    kept = "the update learnt from it" if member.kept else "not among those that the update saw"
    lines = [Content.styled(f"return {points(member.total)}, advantage {member.advantage:+.3f}; {kept}", "bold")]
    own = sample.episode.turns_of(sample.player)
    for turn, credit in zip(own, sample.credits, strict=True):
        here = turn.step + 1 == session.cursor
        text = f"{'▸' if here else ' '}{turn.step + 1:>3}  {turn.action or '⊥':<8} {points(turn.paid):>6}"
        colour = "$success" if credit > 0 else "$error" if credit < 0 else "$text-muted"
        lines.append(
            Content.styled(text, "bold $accent" if here else "") + Content.styled(f"  {credit:+.3f}", colour)
        )
    return Content("\n").join(lines)


def words(run: Learning, session: Session) -> Content:
    """What the model said before the move that is shown."""
    turn = session.frame.turns.get(run.shown.player) if run.shown else None
    thought_of_turn = thought(turn.answer or "") if turn is not None else ""
    return Content.styled(f"“{thought_of_turn}”", "italic") if thought_of_turn else Content("")

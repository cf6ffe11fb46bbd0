"""What is shown of a training run: its curve, an update's groups, the turns of one episode with their credit."""

from __future__ import annotations

from textual.color import Color
from textual.content import Content
from textual.widget import Widget
from textual_plotext import PlotextPlot

from msgrpo.agent import thought
from msgrpo.episode import Turn
from msgrpo.run_log import Member
from msgrpo.tui.learning import Learning, measured, sign
from msgrpo.tui.scenes import learner_of, scale_of, scene_legend, scene_sign
from msgrpo.tui.session import Session, points
from msgrpo.tui.shades import MUTED

NOTHING_YET = "no groups yet"
FLAT = "  flat"
PALEST, PALEST_LIGHT = 60, 85  # percent of the colour of the smallest advantage: still read on dark, on light ground
HERE = "▸"  # marks the turn that led to what the board shows
FILM_TURNS = 6  # lines of moves below the board of a film


def draw_curve(curve: PlotextPlot, run: Learning) -> None:
    """The training score of every update, and the evaluations with their 95 % intervals.

    A film shows both as far as they were known then, on axes that stay.
    """
    plot, colours = curve.plt, curve.app.theme_variables
    line, interval, here = (Color.parse(colours[name]).rgb for name in ("primary", "success", "foreground"))
    plot.clear_data()
    key = f"rollout/{run.score}"
    played = [(row["step"], value) for row in run.train_rows if (value := measured(row, key)) is not None]
    shown = [(step, value) for step, value in played if step <= run.updates_shown]
    if shown:
        plot.plot(*zip(*shown, strict=True), marker="braille", color=line)
    evaluations = [row for row in run.evaluations if row[0] <= run.updates_shown]
    for step, _, low, high in evaluations:
        if low is not None and high is not None:
            plot.plot([step, step], [low, high], marker="│", color=interval)
    if evaluations:
        plot.scatter(*zip(*((step, mean) for step, mean, *_ in evaluations), strict=True), marker="┼", color=interval)
    if run.step and not run.filming:
        plot.vline(run.step, color=here)
    updates = run.settings["steps"]
    plot.xlim(0, updates)
    plot.xticks(sorted({round(updates * quarter / 4) for quarter in range(5)}))
    if run.score == "success":
        plot.ylim(0, 1)
        plot.yticks([0, 0.5, 1])
    elif played:
        measurements = (value for _, *values in (*played, *run.evaluations) for value in values)
        values = [value for value in measurements if value is not None]
        low, high = min(values), max(values)
        around = 0.0 if low < high else max(0.5, abs(low) / 100)  # plotext divides by the height of the axis
        plot.ylim(low - around, high + around)
    curve.refresh()


class Groups(Widget):
    """One line a group, one sign an episode, the best first; while the film is shown, its scenes."""

    def __init__(self) -> None:
        super().__init__(id="groups")
        self._run: Learning | None = None
        self._lines = 1

    def show(self, run: Learning) -> None:
        self._run = run
        shown = self._content(max(1, self.size.width))
        height = len(shown.wrap(max(1, self.size.width)))
        self.refresh(layout=height != self._lines)
        self._lines = height

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self._content(width).wrap(max(1, width)))

    def render(self) -> Content:
        return self._content(self.size.width)

    def _content(self, width: int) -> Content:
        if self._run is None:
            return Content("")
        return (
            scenes(self._run, width)
            if self._run.filming
            else groups(self._run, width, light=not self.app.current_theme.dark)
        )


def groups(run: Learning, width: int, *, light: bool = False) -> Content:
    """The groups of the update that is shown, each on one line."""
    if run.update is None:
        text = run.nothing if run.done or run.trouble else NOTHING_YET
        return Content.styled(text, "$text-error" if text != NOTHING_YET else MUTED)
    largest = max((abs(m.advantage) for row in run.update.groups for m in row.members), default=1.0) or 1.0
    digits = max((len(str(row.start_seed)) for row in run.update.groups), default=1)
    lines = [Content.styled("start".rjust(digits + 1), MUTED)]
    for number, row in enumerate(run.update.groups):
        here = number == run.group
        line = Content.styled(
            f"{'▸' if here else ' '}{row.start_seed:>{digits}} ", "bold $text-accent" if here else ""
        )
        room = width - line.cell_length - (len(FLAT) if row.flat else 0)
        members = sorted(row.members, key=lambda member: -member.advantage)
        for member in members if len(members) <= room else ends(members, room):
            if member is None:
                line += Content.styled("…", MUTED)
            else:
                line += Content.styled(
                    sign(member), paint(member, largest, chosen=here and member is run.member, light=light)
                )
        lines.append(line + Content.styled(FLAT if row.flat else "", MUTED))
    if run.trouble:
        lines.append(Content.styled(run.trouble, "$text-error"))
    return Content("\n").join(lines)


def ends(members: list[Member], room: int) -> list[Member | None]:
    """The best and the worst that have room, and None for those between them."""
    half = max(1, (room - 1) // 2)
    return [*members[:half], None, *members[-half:]]


def scenes(run: Learning, width: int) -> Content:
    """How the start of the film went after so many updates: one sign a scene, the one that is shown marked."""
    results = [one for _, one in run.film.results()]
    low, high = scale_of(results)
    line = Content("")
    for place, one in enumerate(results):
        sign, colour = scene_sign(one, low, high)
        line += Content.styled(sign, f"{'reverse ' if place == run.film.place else ''}{colour}")
    title = f"start {run.film.start + 1} of {run.film.starts}: {scene_legend(results)}"
    return Content.styled(title + "\n", MUTED) + line


def paint(member: Member, largest: float, *, chosen: bool, light: bool) -> str:
    """The colour of an advantage: green or red, the paler the smaller; how pale depends on the theme."""
    if chosen:
        return "bold reverse $text-accent"
    if member.advantage == 0:
        return MUTED
    colour = "$text-success" if member.advantage > 0 else "$text-error"
    palest = PALEST_LIGHT if light else PALEST
    return f"{colour} {round(palest + (100 - palest) * abs(member.advantage) / largest)}%"


def facts(run: Learning, width: int) -> Content:
    """What the update that is shown measured, in lines of so many columns; no fact is cut in two."""
    lines = [Content("")]
    for name, value in run.facts():
        fact = Content.styled(f"{name} ", MUTED) + Content(value)
        if lines[-1] and lines[-1].cell_length + 2 + fact.cell_length > width:
            lines.append(fact)
        else:
            lines[-1] += Content("  ") + fact if lines[-1] else fact
    return Content("\n").join(lines)


def film_turns(session: Session) -> Content:
    """The last moves up to the one that is shown and what each was paid, in as many lines at every step: the board
    stays where it is.
    """
    player = learner_of(session.episode)
    lines = []
    for turn in session.episode.turns_of(player):
        if turn.step < session.cursor:
            lines.append(_move(turn, session.cursor))
    height = min(FILM_TURNS, session.scenario.step_limit)
    lines = lines[-height:]
    return Content("\n").join([*lines, *[Content(" ")] * (height - len(lines))])


def _move(turn: Turn, cursor: int) -> Content:
    """A turn's step, action and reward; the one that led to what the board shows is marked."""
    here = turn.step + 1 == cursor
    text = f"{HERE if here else ' '}{turn.step + 1:>3}  {turn.action or '⊥':<8} {points(turn.paid):>6}"
    return Content.styled(text, "bold $text-accent" if here else "")


def turns(run: Learning, session: Session) -> Content:
    """The episode's turns up to the one that is shown: action, reward, credit."""
    if run.filming:
        return film_turns(session)
    sample, member = run.shown, run.member
    if sample is None or member is None:
        return Content("")
    heading = f"return {points(member.total)}, advantage {member.advantage:+.3f}; "
    heading += "the update learnt from it" if member.kept else "left out by the selection"
    same = len(set(sample.credits)) <= 1  # the whole episode's advantage on every turn
    if same and sample.credits:
        each = f"{sample.credits[0]:+.3f}"
        heading += f"; every turn's credit is {each}" if member.kept else f" (its credit would have been {each})"
    elif not member.kept:
        heading += " (the credits are those that it would have had)"
    lines = [Content.styled(heading, "bold")]
    own = sample.episode.turns_of(sample.player)
    for turn, credit in zip(own, sample.credits, strict=True):
        colour = "$text-success" if credit > 0 else "$text-error" if credit < 0 else MUTED
        credited = Content("") if same else Content.styled(f"  {credit:+.3f}", colour)
        lines.append(_move(turn, session.cursor) + credited)
    return Content("\n").join(lines)


def words(run: Learning, session: Session) -> Content:
    """What the model said before the move that is shown."""
    player = learner_of(session.episode) if run.filming else run.shown.player if run.shown else ""
    turn = session.frame.turns.get(player)
    thought_of_turn = thought(turn.answer or "") if turn is not None else ""
    return Content.styled(f"“{thought_of_turn}”", "italic") if thought_of_turn else Content("")

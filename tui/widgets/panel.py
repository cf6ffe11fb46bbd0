"""What is known about one seat: its numbers, its words, what it thinks of each action, how the sitting went."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.markup import escape
from textual.widget import Widget
from textual.widgets import Sparkline, Static

from msgrpo.agent import Decision, ParseFailure, thought
from msgrpo.episode import Turn
from msgrpo.prompt import Prompt
from msgrpo.tui.agents import EmptySeat, HumanAgent
from msgrpo.tui.clock import once_drawn
from msgrpo.tui.hands import numbers
from msgrpo.tui.judging import Judging
from msgrpo.tui.session import Session, points
from msgrpo.tui.shades import MUTED
from msgrpo.tui.widgets.bars import ActionBars
from msgrpo.tui.widgets.moves import MoveList
from msgrpo.tui.widgets.text import Text

NOTHING = "⊥"
MORE = "… page down: more"
BESIDES = 6  # rows of a panel besides its actions: the border, the numbers, words, two of what is to be done
DRAWN = 4000  # characters of a text that are drawn: more than a screen holds


def stat(name: str, value: str, style: str = "") -> Content:
    return Content.styled(f"{name} ", MUTED) + Content.styled(value, style)


def numbers_in(groups: list[list[Content]], width: int) -> Content:
    """All on one line if so many columns hold it, else a line or more for each group; no number leaves its name."""
    groups = [group for group in groups if group]
    whole = spaced(each for group in groups for each in group)
    if whole.cell_length <= width or not width:  # before the first layout there is none
        return whole
    rows: list[list[Content]] = []
    for group in groups:
        rows.append([])
        for each in group:
            if rows[-1] and spaced([*rows[-1], each]).cell_length > width:
                rows.append([])
            rows[-1].append(each)
    return Content("\n").join(map(spaced, rows))


def spaced(parts: Iterable[Content]) -> Content:
    return Content("  ").join(parts)


class Words(VerticalScroll):
    """What scrolls; while more of it follows below, the last line says so."""

    def __init__(self) -> None:
        super().__init__(classes="words", can_focus=False)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.mark_more()

    def watch_virtual_size(self) -> None:
        self.mark_more()

    def on_resize(self) -> None:
        self.mark_more()

    def mark_more(self) -> None:
        follows = self.size.height > 1 and self.scroll_offset.y < self.max_scroll_y
        for more in self.query(".more"):
            more.visible = follows


class AgentPanel(Widget):
    """`show` redraws it from the session at its cursor; `stream` and `say` tell what goes on meanwhile."""

    def __init__(self, index: int, player: str, session: Session) -> None:
        super().__init__(id=f"panel-{index}-{player}", classes="panel")
        self.index = index
        self.player = player
        self.bars = ActionBars(index, player, session.game.own_actions(player))
        self._session = session
        self._returns: list[float] = []  # of this sitting
        self._begun: Content | None = None  # the words that are shown from their beginning
        self._following = False  # the words scroll to the end of a growing answer
        self.border_title = escape(session.title(player))

    def compose(self) -> ComposeResult:
        yield Text(classes="stats")
        with Words():
            yield Text(classes="text")
            yield Static(MORE, classes="more", markup=False)
        yield Text(classes="status")
        yield self.bars
        yield MoveList(self.index, self.player)
        with Horizontal(classes="sitting"):
            yield Text(classes="returns")
            yield Sparkline([], summary_function=max)

    def show(
        self,
        session: Session,
        judging: Judging,
        returns: list[float],
        decision: Decision | None,
        *,
        details: bool,
        prompt: Prompt | None,
        rules: str = "",
        idle: str = NOTHING,
    ) -> None:
        """`decision` is the choice that the step waits to play, where it may be seen; `prompt` what the seat is
        about to read, shown with `details` where no turn is shown; `rules` stand where there are no words yet; `idle`
        is what a turn without an action is called."""
        frame = session.frame
        turn = frame.turns.get(self.player)
        self._session, self._returns = session, returns
        title, subtitle = escape(session.title(self.player)), escape(about(session, self.player))
        if (self.border_title, self.border_subtitle) != (title, subtitle):
            self.border_title, self.border_subtitle = title, subtitle
        words = details_text(turn, decision, prompt) if details else thought_text(turn, decision)
        if session.covers(self.player):
            words = Content("")
        unlisted = frame.board is not None and not self.bars.actions  # no bar shows the move
        if unlisted and not details and turn is not None and turn.action:
            words = Content.styled(f"played {turn.action}\n", "bold") + words
        self._begin(words or Content(rules))
        self._bars(session, turn, decision)
        self.query_one(MoveList).show(session, judging, idle=idle)
        nobody = isinstance(session.agents[self.player], EmptySeat)  # who is named in a record plays in no sitting
        self.query_one(".sitting").set_class(nobody, "-nobody")
        self._sitting(returns)

    def _sitting(self, returns: list[float]) -> None:
        """The returns of the games that this seat's agent has ended in this sitting."""
        spark = self.query_one(Sparkline)
        spark.data = [value - min(returns) for value in returns] if returns else []
        spark.display = len(returns) > 1
        self._fit()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        """The numbers and the sitting in as many columns as there are; rows for all actions of the only person."""
        session, width = self._session, self.size.width
        tally, returns = session.frame.tallies[self.player], self._returns
        stats = [
            stat("return", points(tally.total), "bold"),
            stat("step", f"{session.frame.step}/{session.scenario.step_limit}"),
            stat("invalid", str(tally.invalid), "bold $text-warning" if tally.invalid else ""),
        ]
        if not tally.invalid and spaced(stats).cell_length > width > 0:
            stats.pop()
        costs = []
        if tally.tokens:
            costs.append(stat("tokens", str(tally.tokens)))
        if tally.seconds:
            costs.append(stat("time", f"{tally.seconds:.1f} s"))
        self.query_one(".stats", Text).show(numbers_in([stats, costs], width))
        mean = sum(returns) / len(returns) if returns else 0.0
        text = f"this sitting: {len(returns)} played, mean {mean:+.2f}" if returns else "this sitting: none finished"
        if len(text) > width > 0:
            text = text.removeprefix("this sitting: ")
        self.query_one(".returns", Text).show(Content.styled(text, MUTED))
        people = [player for player in session.players if isinstance(session.agents[player], HumanAgent)]
        only = people == [self.player] and len(session.players) > 1
        self.styles.min_height = BESIDES + self.bars.rows(width) if only else None

    def _bars(self, session: Session, turn: Turn | None, decision: Decision | None) -> None:
        completion = decision.completion if decision else None
        chosen = (decision.action if decision else None) or (turn.action if turn else None)
        shares = completion.action_probabilities if completion else None
        if decision is None and turn is not None:
            shares = turn.action_probabilities
        game = session.game_at(session.cursor)
        moving = self.player in game.to_move
        legal = game.legal(self.player) if moving else game.own_actions(self.player)
        person = isinstance(session.agents[self.player], HumanAgent)
        self.bars.show(shares, chosen, legal=legal, numbers=numbers(game, self.player) if person else {})

    def _words(self, text: Content) -> None:
        self._begun = None
        self.query_one(".text", Text).show(text)

    def _begin(self, text: Content) -> None:
        """Show words from their beginning; the same ones stay where a person has scrolled to."""
        if self._begun is None or not text.is_same(self._begun):
            self._words(text)
            self._begun, self._following = text, False
            scroll = self.query_one(Words)
            scroll.anchor(False)
            scroll.scroll_home(animate=False, immediate=True)

    def stream(self, text: str, prompt: Prompt | None) -> None:
        """The end of the answer so far, always in sight; with `prompt`, above what it answers."""
        words = Content.styled(f"…{text[-DRAWN:]}" if len(text) > DRAWN else text, "italic")
        if prompt is not None:
            words = Content.styled("raw answer\n", "bold $primary") + words + Content("\n")
            words += details_text(None, None, prompt)
        self._words(words)
        if prompt is None and not self._following:
            once_drawn(self, self._follow)

    def _follow(self) -> None:
        """Keep the end of the words in sight, once they do not fit; a person may scroll back meanwhile."""
        scroll = self.query_one(Words)
        too_long = scroll.max_scroll_y > 0  # a text that fits would be put at the bottom
        if too_long and not self._following and self._begun is None:
            scroll.anchor()
            self._following = True

    def scroll_words(self, pages: int) -> None:
        words = self.query_one(Words)
        words.release_anchor()
        words.scroll_relative(y=pages * max(1, words.size.height - 1), animate=False)

    def say(self, text: str, kind: str = "note") -> None:
        """The status line, whose `kind` (of `status`) colours it; empty text clears it."""
        status = self.query_one(".status", Text)
        if kind not in status.classes:
            status.set_classes(f"status {kind}")
        status.show(Content(text or " "))


def about(session: Session, player: str) -> str:
    """The model and the temperature of who sits there, as far as they say more than the name."""
    settings = session.agents[player].settings()  # a record's may hold anything
    name, sampling = str(settings.get("model", "")), settings.get("sampling")
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
    parts = [name] if name not in ("", session.agents[player].spec, "a person") else []
    return " · ".join([*parts, f"temperature {temperature:g}"] if isinstance(temperature, (int, float)) else parts)


def thought_text(turn: Turn | None, decision: Decision | None) -> Content:
    if decision is not None and decision.completion is not None:
        return answer_words(decision.completion.reasoning, decision.completion.text)
    if turn is None:
        return Content("")
    words = answer_words(turn.reasoning, turn.answer)
    if turn.failure is not None:
        words += Content.styled(f"\n⊥ no action: {turn.failure.value.replace('_', ' ')}", "bold $text-warning")
    return words


def shortened(text: str) -> str:
    """A text as far as it is drawn: where it is longer, its beginning and its end."""
    if len(text) <= DRAWN:
        return text
    half = DRAWN // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are not shown …\n{text[-half:]}"


def answer_words(reasoning: str | None, answer: str | None) -> Content:
    words = " ".join(part for part in (shortened(reasoning or ""), thought(shortened(answer or ""))) if part)
    return Content.styled(f"“{words}”", "italic") if words else Content("")


def details_text(turn: Turn | None, decision: Decision | None, prompt: Prompt | None) -> Content:
    """All that the seat reads and answers: the turn that is being answered, else the last one and what comes next."""
    parts: list[Content] = []

    def section(title: str, text: str, style: str = "") -> None:
        if text:
            parts.append(Content.styled(f"{title}\n", "bold $primary") + Content.styled(shortened(text), style))

    if decision is not None:
        read = decision.prompt or prompt
        section("raw answer", decision.completion.text if decision.completion else "")
        section("parsed", parsed_text(decision.action, decision.failure), "bold $text-accent")
        section("it read", read.state if read else "")
        section("after", read.prefix if read else "", MUTED)
        return Content("\n").join(parts)
    if turn is not None:
        section("raw answer", turn.answer or "")
        section(
            "parsed → reward",
            f"{parsed_text(turn.action, turn.failure)} → {points(turn.reward)}",
            "bold $text-accent",
        )
        section("it read", turn.state if prompt is None else "")
    if prompt is not None:
        section("next it reads", prompt.state)
        section("after", prompt.prefix, MUTED)
    return Content("\n").join(parts)


def parsed_text(action: str | None, failure: ParseFailure | None) -> str:
    return action if action is not None else f"⊥ {failure.value.replace('_', ' ') if failure else ''}"

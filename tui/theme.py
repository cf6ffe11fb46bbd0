"""The app's own colours: night ice and day ice.

Letters have the colours `$text-…`, which Textual darkens in light themes of others; here they are the plain colours.

What can stand side by side on a board has colours of its own in 16 and in 256 colours, too (a test holds that): the
own snake is green, the other violet, what is good to eat yellow, what is bad red.
"""

from __future__ import annotations

from textual.theme import Theme

NIGHT = Theme(
    name="msgrpo-night",
    primary="#5cc8ff",
    secondary="#8b9cff",
    accent="#ffb454",
    success="#7ddc8b",
    warning="#ffd166",
    error="#ff6b7a",
    foreground="#d7e0ee",
    background="#0c1220",
    surface="#131b2d",
    panel="#1c2740",
    dark=True,
    variables={
        "text-secondary": "#8b9cff",
        "text-accent": "#ffb454",
        "text-success": "#7ddc8b",
        "text-warning": "#ffd166",
        "text-error": "#ff6b7a",
        "board-a": "#16213a",
        "board-b": "#1a2744",
        "board-mark": "#4a6089",
        "ice-a": "#24476b",
        "ice-b": "#28507a",
        "ice-mark": "#6d9cc9",
        "hole": "#05080f",
        "goal": "#ffd166",
        "snake-1": "#2fe37a",
        "snake-2": "#ff5fd7",
        "snake-body-1": "#1d7f2f",
        "snake-body-2": "#871f87",
        "sign-1": "#2fe37a",
        "sign-2": "#ff5fd7",
        "good": "#ffd75f",
        "bad": "#d7263d",
        "lost": "#af0000",
        "footer-key-foreground": "#ffb454",
    },
)
DAY = Theme(
    name="msgrpo-day",
    primary="#0b6fb8",
    secondary="#5a55c9",
    accent="#b35900",
    success="#157f2a",
    warning="#946200",
    error="#c2263e",
    foreground="#1b2433",
    background="#f4f7fb",
    surface="#ffffff",
    panel="#e3eaf4",
    dark=False,
    variables={
        "text-secondary": "#5a55c9",
        "text-accent": "#b35900",
        "text-success": "#157f2a",
        "text-warning": "#946200",
        "text-error": "#c2263e",
        "board-a": "#e9eff7",
        "board-b": "#dfe8f3",
        "board-mark": "#9db0c9",
        "ice-a": "#cfe6f7",
        "ice-b": "#c0def4",
        "ice-mark": "#7fa9c9",
        "hole": "#23364d",
        "goal": "#ffca3a",
        "snake-1": "#00ff5f",
        "snake-2": "#ff5fff",
        "snake-body-1": "#1d7f2f",
        "snake-body-2": "#871f87",
        "sign-1": "#157f2a",
        "sign-2": "#871f87",
        "good": "#ffd75f",
        "bad": "#d7263d",
        "lost": "#af0000",
        "footer-key-foreground": "#b35900",
    },
)
THEMES = (NIGHT, DAY)

"""The app's own colours: night ice and day ice."""

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
        "board-a": "#16213a",
        "board-b": "#1a2744",
        "board-mark": "#4a6089",
        "ice-a": "#24476b",
        "ice-b": "#28507a",
        "ice-mark": "#6d9cc9",
        "hole": "#05080f",
        "goal": "#ffd166",
        "snake-1": "#2fb872",
        "snake-2": "#e0643c",
        "snake-body-1": "#1d7f4f",
        "snake-body-2": "#9a4327",
        "footer-key-foreground": "#ffb454",
    },
)
DAY = Theme(
    name="msgrpo-day",
    primary="#0b6fb8",
    secondary="#5a55c9",
    accent="#b35900",
    success="#1c7f3c",
    warning="#946200",
    error="#c2263e",
    foreground="#1b2433",
    background="#f4f7fb",
    surface="#ffffff",
    panel="#e3eaf4",
    dark=False,
    variables={
        "board-a": "#e9eff7",
        "board-b": "#dfe8f3",
        "board-mark": "#9db0c9",
        "ice-a": "#cfe6f7",
        "ice-b": "#c0def4",
        "ice-mark": "#7fa9c9",
        "hole": "#23364d",
        "goal": "#ffca3a",
        "snake-1": "#1f9d5c",
        "snake-2": "#d9552b",
        "snake-body-1": "#7fd0a4",
        "snake-body-2": "#f3b096",
        "footer-key-foreground": "#b35900",
    },
)
THEMES = (NIGHT, DAY)

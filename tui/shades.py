"""The colours of words that matter less, and of what is not possible now.

Textual's own $text-muted is a share of black or white over the ground. A style inside a text does not know the
ground: there it is drawn as pure white, brighter than the words that matter.
"""

MUTED = "$foreground 65%"
DISABLED = "$foreground 40%"  # what is not possible now

"""msgrpo: language-model agents for text-mediated stochastic games, trained with MS-GRPO (arXiv 2508.10839)."""

__version__ = "0.1.0"

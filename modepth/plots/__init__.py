"""Figures from arrays and rows, for a paper or a page. Needs matplotlib, and never torch."""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'modepth[plots]'") from error

from matplotlib.figure import Figure

from modepth.plots.curves import loss_against_flops
from modepth.plots.routing import score_histograms, token_map
from modepth.plots.style import figure_bytes, save_figure

__all__ = ["Figure", "figure_bytes", "loss_against_flops", "save_figure", "score_histograms", "token_map"]

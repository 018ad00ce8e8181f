"""Where the compute went: a map of tokens and layers, and the router's scores.

Arrays come in, as `modepth.trace` records them; L layers, T tokens.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import ArrayLike, NDArray

from modepth.formats import percent, power_of_ten
from modepth.plots.style import (
    COLUMN,
    DENSE,
    EXPERT_COLOURS,
    INK,
    MONO,
    MUTED,
    ROUTED,
    SKIPPED,
    SMALL,
    add_key,
    in_style,
    printable,
)

# -- tokens x layers

SKIPS, COMPUTES, IS_DENSE, FIRST_EXPERT = 0, 1, 2, 3  # the values of the map's cells; more experts count on
MAX_TOKENS = 48  # in one row of the map
MAX_LETTERS = 12  # of a token's label
SHOWN = str.maketrans({"\n": "⏎", " ": "·", "\t": "⇥", "\r": "←"})
TOKEN_SIZE = 6.5  # points
CELL = 0.122  # inches
ROUTED_HEIGHT, DENSE_HEIGHT = 0.15, 0.105  # of a layer: the eye should go to the routed ones
LEFT, RIGHT, TOP, GAP = 0.66, 0.42, 0.26, 0.16


def readable(token: str) -> str:
    """A token as a label: white space visible, long ones cut, a box for what the font lacks."""
    label = printable(token.translate(SHOWN), MONO)
    return label if len(label) <= MAX_LETTERS else label[: MAX_LETTERS - 1] + "…"


@in_style()
def token_map(
    tokens: Sequence[str], chosen: ArrayLike, routed_layers: Collection[int], experts: ArrayLike | None = None
) -> Figure:
    """Which layers computed each token of a snippet: `chosen` is (L, T), layer 0 at the bottom.

    Long snippets are broken into rows of equal length. Beside each routed layer stands the share of the
    snippet that it computed.

    experts   which expert computed each token, (L, T): -1 for none, -2 in layers without experts; None: there are none

    >>> figure = token_map(["a", "\\n", "b"], [[1, 1, 1], [0, 1, 0], [1, 1, 1]], routed_layers=[1])
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['a', '⏎', 'b']
    """
    cells = map_cells(tokens, chosen, routed_layers, experts)
    labels = [readable(token) for token in tokens]
    row_length = math.ceil(len(labels) / math.ceil(len(labels) / MAX_TOKENS))
    parts = [slice(start, start + row_length) for start in range(0, len(labels), row_length)]
    edges = layer_edges(cells)
    below = [0.07 + 0.6 * TOKEN_SIZE / 72 * max(len(label) for label in labels[part]) for part in parts]

    width = max(COLUMN, LEFT + row_length * CELL + RIGHT)
    height = TOP + sum(edges[-1] + depth for depth in below) + GAP * (len(parts) - 1)
    figure = Figure(figsize=(width, height))
    bottom = height - TOP
    for part, depth in zip(parts, below, strict=True):
        bottom -= edges[-1]
        size = (len(labels[part]) * CELL / width, edges[-1] / height)
        axes = figure.add_axes((LEFT / width, bottom / height, *size))
        draw_cells(axes, cells[:, part], edges, labels[part])
        bottom -= depth + GAP
    add_shares(figure.axes[0], cells, edges)
    meanings = {COMPUTES: "computed", SKIPS: "skipped", IS_DENSE: "dense layer"}
    names = {name: cell_colour(cell) for cell, name in meanings.items() if experts is None or (cells == cell).any()}
    for number in range(min(len(EXPERT_COLOURS), int(cells.max()) - FIRST_EXPERT + 1)):
        names[str(number) if number else "expert 0"] = cell_colour(FIRST_EXPERT + number)
    add_key(figure, names, left=LEFT)
    return figure


def cell_colour(cell: int) -> str:
    """Of what a cell of the map says; experts beyond the palette begin it anew."""
    if cell < FIRST_EXPERT:
        return (SKIPPED, ROUTED, DENSE)[cell]
    return EXPERT_COLOURS[(cell - FIRST_EXPERT) % len(EXPERT_COLOURS)]


def is_dense(cells: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which layers are dense."""
    return (cells == IS_DENSE).all(axis=1)


def layer_edges(cells: NDArray[np.int64]) -> NDArray[np.float64]:
    """Where the layers begin and the last one ends, in inches from the bottom."""
    return np.concatenate([[0.0], np.where(is_dense(cells), DENSE_HEIGHT, ROUTED_HEIGHT).cumsum()])


def map_cells(
    tokens: Sequence[str], chosen: ArrayLike, routed_layers: Collection[int], experts: ArrayLike | None = None
) -> NDArray[np.int64]:
    """SKIPS, COMPUTES, IS_DENSE or an expert of every layer and token."""
    chosen = np.asarray(chosen)
    if chosen.ndim != 2 or chosen.shape[1] != len(tokens) or chosen.size == 0:
        raise ValueError(f"chosen must have the shape (layers, {len(tokens)}), a column a token, got {chosen.shape}")
    outside = sorted(set(routed_layers) - set(range(len(chosen))))
    if outside:
        raise ValueError(f"routed_layers must be in 0..{len(chosen) - 1} for {len(chosen)} layers, got {outside}")
    cells = np.where(chosen.astype(bool), COMPUTES, SKIPS)
    cells[sorted(set(range(len(chosen))) - set(routed_layers))] = IS_DENSE
    if experts is None:
        return cells
    experts = np.asarray(experts)
    if experts.shape != chosen.shape:
        raise ValueError(f"experts must have the shape {chosen.shape} of chosen, got {experts.shape}")
    used = np.where(experts >= 0, FIRST_EXPERT + experts, SKIPS)
    return np.where(experts == -2, cells, used)


def draw_cells(axes: Axes, cells: NDArray[np.int64], edges: NDArray[np.float64], labels: Sequence[str]) -> None:
    """One row of the map: cells where tokens are routed, a band where all are computed."""
    # A mesh, not an image: it stays sharp in an SVG.
    columns = np.arange(len(labels) + 1)
    last = max(IS_DENSE, int(cells.max()))
    colours = ListedColormap([cell_colour(cell) for cell in range(last + 1)])
    axes.pcolormesh(columns, edges, cells, cmap=colours, vmin=0, vmax=last)
    white: dict[str, Any] = {"colors": "white", "linewidth": 0.8}
    axes.hlines(edges, 0, len(labels), **white)
    for layer in np.flatnonzero(~is_dense(cells)):
        axes.vlines(columns, edges[layer], edges[layer + 1], **white)
    axes.set_xticks(columns[:-1] + 0.5, labels, rotation=90, family=MONO, size=TOKEN_SIZE)
    names = [f"dense {layer}" if dense else str(layer) for layer, dense in enumerate(is_dense(cells))]
    axes.set_yticks((edges[:-1] + edges[1:]) / 2, names, size=TOKEN_SIZE)
    for label, dense in zip(axes.get_yticklabels(), is_dense(cells), strict=True):
        label.set(color=MUTED if dense else INK, size=TOKEN_SIZE - 0.5 if dense else TOKEN_SIZE)
    axes.tick_params(length=0, pad=1.5)
    axes.set_ylabel("layer", labelpad=2, size=SMALL)
    axes.set(xlim=(0, len(labels)), ylim=(0, edges[-1]))
    axes.spines[:].set_visible(False)


def add_shares(axes: Axes, cells: NDArray[np.int64], edges: NDArray[np.float64]) -> None:
    for layer in np.flatnonzero(~is_dense(cells)):
        axes.annotate(
            percent(float(np.mean(cells[layer] != SKIPS))),
            xy=(1, (edges[layer] + edges[layer + 1]) / 2),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            size=TOKEN_SIZE,
        )


# -- the router's scores

NUM_BINS = 50
PANEL_WIDTH, PANEL_HEIGHT = 1.8, 0.95  # inches
PANEL_LEFT, PANEL_RIGHT, PANEL_BOTTOM, PANEL_TOP = 0.55, 0.12, 0.42, 0.48
ACROSS, BETWEEN = 0.4, 0.5  # from panel to panel


@in_style()
def score_histograms(
    logits: Mapping[int, ArrayLike], chosen: Mapping[int, ArrayLike], cutoffs: Mapping[int, float] | None = None
) -> Figure:
    """How many tokens have which score sigmoid(logit), routed and skipped apart, a panel a routed layer.

    Counts are on a log scale: most tokens skip, with scores close together, and would hide the others.

    cutoffs   the logit above which each layer routes, drawn as a line; None: the lowest that it routed

    >>> figure = score_histograms({1: [-1.0, 0.5, 2.0]}, {1: [False, False, True]})
    >>> figure.axes[0].get_title(loc="left")
    'layer 1: 33.3 % routed, lowest 0.88'
    """
    check_layers(logits, chosen)
    columns = 2 if len(logits) in (2, 4) else min(3, len(logits))
    rows = math.ceil(len(logits) / columns)
    panel = PANEL_WIDTH if columns > 1 else COLUMN - PANEL_LEFT - PANEL_RIGHT
    width = PANEL_LEFT + columns * panel + (columns - 1) * ACROSS + PANEL_RIGHT
    height = PANEL_TOP + rows * PANEL_HEIGHT + (rows - 1) * BETWEEN + PANEL_BOTTOM
    figure = Figure(figsize=(width, height))
    for number, layer in enumerate(sorted(logits)):
        row, column = divmod(number, columns)
        left = PANEL_LEFT + column * (panel + ACROSS)
        bottom = height - PANEL_TOP - PANEL_HEIGHT - row * (PANEL_HEIGHT + BETWEEN)
        axes = figure.add_axes((left / width, bottom / height, panel / width, PANEL_HEIGHT / height))
        scores, routed = sigmoid(logits[layer]), np.asarray(chosen[layer], dtype=bool)
        draw_histogram(axes, scores, routed)
        facts = f"layer {layer}: {percent(float(routed.mean()))} routed"
        if cutoffs is not None and layer in cutoffs:
            facts += f", cutoff {draw_cutoff(axes, float(sigmoid(cutoffs[layer]))):.2f}"
        elif routed.any():
            facts += f", lowest {draw_cutoff(axes, float(scores[routed].min())):.2f}"
        axes.set_title(facts, loc="left", pad=4, size=SMALL)
        if column == 0:
            axes.set_ylabel("tokens")
        if number + columns >= len(logits):
            axes.set_xlabel("router score, sigmoid(logit)")
    add_key(figure, {"routed": ROUTED, "skipped": SKIPPED}, left=PANEL_LEFT)
    return figure


def check_layers(logits: Mapping[int, ArrayLike], chosen: Mapping[int, ArrayLike]) -> None:
    if not logits or set(logits) != set(chosen):
        raise ValueError(
            f"logits and chosen must be of the same layers, one or more, got {sorted(logits)} and {sorted(chosen)}"
        )
    for layer in logits:
        shapes = np.shape(logits[layer]), np.shape(chosen[layer])
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or shapes[0] == (0,):
            raise ValueError(f"layer {layer}: logits and chosen must be two lists of equal length, got {shapes}")
        if not np.isfinite(np.asarray(logits[layer], dtype=float)).all():
            raise ValueError(f"layer {layer}: logits must be finite: leave out padding, look for an overflow")


def sigmoid(logit: ArrayLike) -> NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(logit, dtype=np.float64)))  # no overflow at either end


def draw_histogram(axes: Axes, scores: NDArray[np.float64], routed: NDArray[np.bool_]) -> None:
    """The skipped tokens, the routed ones before them, and the outline of the skipped where those hide it."""
    edges = np.linspace(0, 1, NUM_BINS + 1)
    num_routed, num_skipped = (np.histogram(scores[part], edges)[0] for part in (routed, ~routed))
    axes.set_yscale("log")
    axes.stairs(num_skipped, edges, fill=True, color=SKIPPED, label="skipped", zorder=1)
    axes.stairs(num_routed, edges, fill=True, color=ROUTED, label="routed", zorder=2)
    axes.stairs(num_skipped, edges, color=INK, linewidth=0.4, zorder=3)
    axes.set(xlim=(0, 1), ylim=(0.6, 1.6 * max(5, num_routed.max(), num_skipped.max())))
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: power_of_ten(value) if value > 9999 else f"{value:g}")
    )
    axes.yaxis.set_minor_locator(NullLocator())


def draw_cutoff(axes: Axes, score: float) -> float:
    axes.axvline(score, color=INK, linewidth=0.8, linestyle=(0, (3, 2)), zorder=4)
    return score

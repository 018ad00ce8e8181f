"""Loss against compute, for runs that are compared at equal FLOPs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import OffsetFrom
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from modepth.formats import power_of_ten
from modepth.plots.style import (
    COLUMN,
    INK,
    MUTED,
    RUN_COLOURS,
    RUN_MARKERS,
    SMALL,
    in_style,
    printable,
    text_width,
)

Row = Mapping[str, Any]  # of a run's log
Points = NDArray[np.float64]  # (points, 2): FLOPs, loss

LEFT, PLOT, GAP, EDGE = 0.5, 2.1, 0.13, 0.06  # inches across: labels, plot, space, edge
BOTTOM, HEIGHT, TOP = 0.42, 1.95, 0.24
LABEL_HEIGHT = 0.26  # of a name with its loss below it


class Curve(NamedTuple):
    """One run: what it trained on, what was held out."""

    name: str
    training: Points
    validation: Points

    @property
    def marked(self) -> Points:
        """The points that the label goes by."""
        return self.validation if len(self.validation) else self.training

    @property
    def end(self) -> tuple[float, float]:
        """The last point that can be drawn: a run may have diverged."""
        flops, loss = finite(self.marked)[-1]
        return float(flops), float(loss)


@in_style()
def loss_against_flops(runs: Mapping[str, Sequence[Row]]) -> Figure:
    """Training loss (light) and validation loss (marked) of each run against its training FLOPs.

    Rows are those of a run's log. The language-model loss alone is drawn, never the router's. The view
    begins at the first validation: the fall from random weights is cut off.

    >>> rows = [{"step": n, "loss": 3 / (n + 1), "flops": 1e9 * (n + 1)} for n in range(9)]
    >>> len(loss_against_flops({"dense": rows}).axes)
    1
    """
    curves = [read_curve(name, rows) for name, rows in runs.items()]
    if not curves:
        raise ValueError("no run to draw: give at least one, as {name: rows}")
    labels = [f"{printable(curve.name)}\n{curve.marked[-1, 1]:.3f}" for curve in curves]
    right = GAP + max(text_width(line, SMALL) for label in labels for line in label.split("\n")) + EDGE
    width = max(COLUMN, LEFT + PLOT + right)
    tall = max(HEIGHT, LABEL_HEIGHT * len(curves))
    height = BOTTOM + tall + TOP
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((LEFT / width, BOTTOM / height, (width - LEFT - right) / width, tall / height))
    set_view(axes, curves)
    for number, curve in enumerate(curves):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        alone = len(curve.validation) == 0
        axes.plot(*curve.training.T, color=colour, alpha=0.9 if alone else 0.35, linewidth=0.6, zorder=2)
        axes.plot(
            *curve.validation.T,
            color=colour,
            marker=RUN_MARKERS[number % len(RUN_MARKERS)],
            markersize=3,
            markeredgecolor="white",
            markeredgewidth=0.4,
            zorder=3,
        )
    add_labels(axes, curves, labels, LABEL_HEIGHT / tall)
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("loss (nats per token)")
    if any(len(curve.validation) for curve in curves):
        figure.text(
            LEFT / width, 1 - 0.05 / height, "marked: validation, light: training", va="top", color=MUTED, size=SMALL
        )
    return figure


def read_curve(name: str, rows: Iterable[Row]) -> Curve:
    """The losses of a run's rows; rows of other kinds, such as events, have none."""
    rows = list(rows)
    training = [(row["flops"], row["loss"]) for row in rows if "loss" in row and "flops" in row]
    validation = [(row["flops"], row["validation"]["loss"]) for row in rows if "validation" in row and "flops" in row]
    curve = Curve(name, *(np.array(points, dtype=float).reshape(-1, 2) for points in (training, validation)))
    if len(finite(curve.marked)) == 0:
        raise ValueError(f"run {name!r}: none of its {len(rows)} rows has a loss and its flops: is it a training log?")
    return curve


def finite(points: Points) -> Points:
    return points[np.isfinite(points).all(axis=1)]


# -- the view


def set_view(axes: Axes, curves: Sequence[Curve]) -> None:
    """Limits and ticks: where the runs can be compared; FLOPs by powers of ten if they span one."""
    compared = np.concatenate([late_points(curve) for curve in curves])
    left, right = compared[:, 0].min(), compared[:, 0].max()
    training = finite(np.concatenate([curve.training for curve in curves]))
    seen = training[training[:, 0] >= left, 1]
    losses = np.concatenate([compared[:, 1], np.quantile(seen, [0.01, 0.95]) if len(seen) else seen])
    low, high = losses.min(), losses.max()
    margin = 0.06 * (high - low) or 0.1  # 0: a single point
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="y")
    if left > 0 and right / left >= 10:
        axes.set_xscale("log")
        axes.set_xlim(left / 1.15, right * 1.08)
        wide = right / left >= 1000
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 3.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        margin = 0.04 * (right - left) or 0.1 * right or 1.0
        axes.set_xlim(left - margin, right + margin)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))


def late_points(curve: Curve) -> Points:
    """The measurements of a run; all of its last nine tenths, if there is at most one."""
    measured = finite(curve.validation)
    if len(measured) > 1:
        return measured
    points = finite(np.concatenate([curve.training, curve.validation]))
    return points[points[:, 0] >= 0.1 * points[:, 0].max()]


# -- the labels


def add_labels(axes: Axes, curves: Sequence[Curve], labels: Sequence[str], gap: float) -> None:
    """Each run's name and last loss beside its end, moved apart where they would overlap, with a line to the end."""
    low, high = axes.get_ylim()
    heights = [float(np.clip((curve.end[1] - low) / (high - low), 0, 1)) for curve in curves]
    for number, place in enumerate(spread(heights, gap)):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        axes.annotate(
            labels[number],
            xy=curves[number].end,
            xytext=(GAP * 72, 0),
            xycoords="data",
            textcoords=offset_from(axes, place),
            va="center",
            color=darker(colour),
            size=SMALL,
            linespacing=1.0,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )


def offset_from(axes: Axes, place: float) -> Any:
    """Points to the right of the axes, at a share of their height."""
    return OffsetFrom(axes.patch, (1, place), unit="points")


def darker(colour: str) -> str:
    """A line's colour, dark enough to read as text."""
    return INK if colour == INK else "#" + "".join(f"{int(int(colour[i : i + 2], 16) * 0.8):02x}" for i in (1, 3, 5))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The places in 0..1 moved as little as needed to be `gap` apart and half a gap from 0 and 1.

    >>> spread([0.5, 0.0, 0.5], 0.25)
    [0.625, 0.125, 0.375]
    """
    order = sorted(range(len(places)), key=lambda index: (places[index], -index))
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and first(groups[-1], places, gap) < first(groups[-2], places, gap) + gap * len(
            groups[-2]
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(places)
    for group in groups:
        for number, index in enumerate(group):
            moved[index] = first(group, places, gap) + gap * number
    return moved


def first(group: Sequence[int], places: Sequence[float], gap: float) -> float:
    """Where the lowest of a group stands: the group centred on its own places, half a gap from 0 and 1."""
    start = sum(places[index] for index in group) / len(group) - gap * (len(group) - 1) / 2
    return max(gap / 2, min(start, 1 - gap * (len(group) - 0.5)))

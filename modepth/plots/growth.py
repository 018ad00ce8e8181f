"""What a training step costs as rows get longer and capacities larger, beside what its FLOPs say.

Takes the rows of a bench: `modepth bench`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from modepth.plots.style import DENSE, INK, PAGE, ROUTED, add_key, in_style

Row = Mapping[str, Any]
HEIGHT = 2.0  # inches


@in_style()
def cost_growth(rows: Sequence[Row]) -> Figure | None:
    """Time and memory of a step: against the tokens of a row at the lowest capacity, against capacity at one length.

    Of the width, and for the latter the length, that most rows have. None where there is nothing to draw.
    """
    steps = [row for row in rows if row["task"] == "train" and row["contestant"] in ("dense", "routed")]
    if not steps:
        return None
    dim = most_common(steps, "dim")
    steps = [row for row in steps if row["dim"] == dim]
    lowest, length = min(row["capacity"] for row in steps), most_common(steps, "length")
    by_length = sorted((row for row in steps if row["capacity"] == lowest), key=lambda row: row["length"])
    by_capacity = sorted((row for row in steps if row["length"] == length), key=lambda row: row["capacity"])
    below_key = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.2 / HEIGHT))
    figure = Figure(figsize=(PAGE, HEIGHT), layout=below_key)
    long_time, long_memory, wide_time, wide_memory = figure.subplots(1, 4)
    # Cells of one length are measured at different times, and only their ratios are alike.
    for axes, drawn, x, time in (
        (long_time, by_length, "length", ms_a_token),
        (wide_time, by_capacity, "capacity", part_of_dense),
    ):
        draw(axes, drawn, x, time)
        routed = [row for row in drawn if row["contestant"] == "routed"]
        dense = {row[x]: time(row) for row in drawn if row["contestant"] == "dense"}
        ideal = [dense[row[x]] * row["flop_ratio"] for row in routed]
        axes.plot([row[x] for row in routed], ideal, color=INK, linestyle="--", linewidth=0.8)
    draw(long_memory, by_length, "length", peak_of_a_token)
    draw(wide_memory, by_capacity, "capacity", peak_of_a_token)
    for axes in (long_time, long_memory):
        axes.set_xlabel(f"tokens of a row ({100 * lowest:g} %)")
        axes.set_xscale("log", base=2)
        lengths = sorted({row["length"] for row in by_length})
        axes.xaxis.set_major_locator(FixedLocator(lengths[:: max(1, len(lengths) // 3)]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    for axes in (wide_time, wide_memory):
        axes.set_xlabel(f"capacity (rows of {length})")
        axes.set_xlim(0, 1)
    for axes, label in (
        (long_time, f"ms a token, width {dim}"),
        (long_memory, "peak KB a token"),
        (wide_time, "time / dense"),
        (wide_memory, "peak KB a token"),
    ):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    add_key(figure, {"dense": DENSE, "routed": ROUTED, "dense, times the ratio of FLOPs": INK}, left=0.1)
    return figure


def most_common(rows: Sequence[Row], name: str) -> Any:
    """The value that most rows have; of several the lowest."""
    values = [row[name] for row in rows]
    return max(sorted(set(values)), key=values.count)


def draw(axes: Axes, rows: Sequence[Row], x: str, y: Any) -> None:
    for contestant, colour in (("dense", DENSE), ("routed", ROUTED)):
        own = [row for row in rows if row["contestant"] == contestant]
        points = [row[x] for row in own], [y(row) for row in own]
        axes.plot(*points, color=colour, marker="o", markersize=3, clip_on=False)


def ms_a_token(row: Row) -> float:
    return float(row["ms"]) / (row["batch"] * row["length"])


def part_of_dense(row: Row) -> float:
    return float(row["of_dense"])


def peak_of_a_token(row: Row) -> float:
    """In KB."""
    return float(row["peak_bytes"]) / 1e3 / (row["batch"] * row["length"])

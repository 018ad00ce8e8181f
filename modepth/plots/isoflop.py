"""Models compared at equal training FLOPs: loss against size, the best size against the budget, and time.

Takes the rows of a sweep and what was fitted to them. An arm has one colour and marker in all figures.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from modepth.formats import compact, power_of_ten
from modepth.plots.style import (
    COLUMN,
    MUTED,
    RUN_COLOURS,
    RUN_MARKERS,
    SMALL,
    in_style,
    printable,
    text_width,
)
from modepth.sweep.arms import arms_of
from modepth.sweep.fit import Fit, Optimum, PowerLaw
from modepth.sweep.results import FITTED, Row

PANEL_WIDTH, PANEL_HEIGHT = 2.0, 1.6  # inches
LEFT, RIGHT, BOTTOM = 0.55, 0.12, 0.42
ACROSS, BETWEEN, TITLE = 0.5, 0.62, 0.24  # from panel to panel; a panel's title
KEY_LINE, KEY_MARK, KEY_GAP = 0.16, 0.26, 0.16  # of the key: a line's height, the marker, from entry to entry
SUBDIVISIONS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 4, 5, 6, 7, 8.5))
NARROWEST = 1.05  # an axis reaches at least so far to either side of what is on it

Label = Callable[[str], str]


def look(arms: Sequence[str], arm: str) -> dict[str, Any]:
    """Colour and marker; beyond the colours, other pairs of them."""
    number, num = arms.index(arm), len(RUN_COLOURS)
    return {"color": RUN_COLOURS[number % num], "marker": RUN_MARKERS[(number + number // num) % num]}


# -- figures


@in_style()
def loss_against_parameters(rows: Sequence[Row], fit: Fit) -> Figure:
    """Validation loss against parameters, a panel a budget: runs, parabolas, and optima with their intervals.

    A parabola without an optimum to claim is dashed.
    """
    finished = drawable(rows)
    arms = arms_of(finished)
    figure, panels = budget_panels(finished, arms)
    for budget, axes in panels.items():
        here = [row for row in finished if row.budget == budget]
        for row in here:
            draw_point(axes, row.params, loss_of(row), arms, row.arm)
        for optimum in fit.optima:
            if optimum.budget == budget and optimum.curve is not None and optimum.arm in arms:
                sizes = [row.params for row in here if row.arm == optimum.arm]
                draw_parabola(axes, optimum, min(sizes), max(sizes), look(arms, optimum.arm)["color"])
        set_log_x(axes, [row.params for row in here], compact)
    label_panels(panels, "parameters", "validation loss (nats per token)")
    return figure


@in_style()
def loss_against_forward_flops(rows: Sequence[Row]) -> Figure:
    """Validation loss against the FLOPs of a forward pass, a panel a budget; lines join the means over seeds."""
    finished = drawable(rows)
    arms = arms_of(finished)
    figure, panels = budget_panels(finished, arms)
    for budget, axes in panels.items():
        here = [row for row in finished if row.budget == budget]
        for row in here:
            draw_point(axes, row.flops_per_token, loss_of(row), arms, row.arm)
        for arm in arms:
            by_cost: dict[float, list[float]] = defaultdict(list)
            for row in here:
                if row.arm == arm:
                    by_cost[row.flops_per_token].append(loss_of(row))
            means = [(cost, statistics.mean(losses)) for cost, losses in sorted(by_cost.items())]
            axes.plot(*np.array(means).reshape(-1, 2).T, color=look(arms, arm)["color"], linewidth=0.9, zorder=2)
        set_log_x(axes, [row.flops_per_token for row in here], compact)
    label_panels(panels, "forward FLOPs per token", "validation loss (nats per token)")
    return figure


@in_style()
def optimum_against_budget(fit: Fit) -> Figure:
    """The best number of parameters against the budget, with intervals, and the power law where there is one."""
    known = [optimum for optimum in fit.optima if optimum.params is not None]
    if not known:
        raise ValueError("no optimum to draw: every fit was refused")
    arms = list(dict.fromkeys(optimum.arm for optimum in known))
    laws = {law.arm: law for law in fit.power_laws}
    figure, axes = one_panel(arms, lambda arm: f"{printable(arm)}{exponent_text(laws.get(arm))}")
    budgets = [optimum.budget for optimum in known]
    for number, arm in enumerate(arms):
        style = look(arms, arm)
        mine = [optimum for optimum in known if optimum.arm == arm]
        for optimum in mine:
            draw_optimum(axes, optimum, optimum.budget * aside(number, len(arms), budgets), style)
        law = laws.get(arm)
        if law is not None and law.exponent is not None and law.factor is not None:
            ends = np.array([min(budgets), max(budgets)])
            axes.plot(ends, law.factor * ends**law.exponent, color=style["color"], linewidth=0.9, zorder=2)
    set_log_x(axes, budgets, power_of_ten)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator(log_ticks(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="training FLOPs", ylabel="best number of parameters")
    return figure


@in_style()
def step_time_ratio(rows: Sequence[Row], baseline: str) -> Figure:
    """Time of a training token over the baseline's at the same depth of the dial; hollow, the ratio of FLOPs.

    Only runs of the same hardware, torch, threads and number of runs at a time are compared.
    """
    points = time_ratios(rows, baseline)
    if not points:
        raise ValueError(f"no run to compare the step time of with {baseline!r}: run another arm at the same depth")
    arms = list(dict.fromkeys([baseline, *arms_of(drawable(rows))]))
    others = [arm for arm in arms if any(arm == each[0] for each in points)]
    figure, axes = one_panel(others, printable, looks=arms)
    axes.axhline(1, color=MUTED, linewidth=0.6, zorder=1)
    costs = [cost for _, cost, _, _ in points]
    for arm, at, time, flops in points:
        style, cost = look(arms, arm), at * aside(others.index(arm), len(others), costs)
        axes.plot([cost, cost], [flops, time], color=style["color"], linewidth=0.5, zorder=2)
        axes.plot([cost], [flops], **style, markersize=4, markerfacecolor="white", markeredgewidth=0.7, zorder=3)
        axes.plot([cost], [time], **style, markersize=4, markeredgecolor="white", markeredgewidth=0.4, zorder=4)
    set_log_x(axes, costs, compact)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y")
    axes.set(xlabel=f"forward FLOPs per token of {printable(baseline)}", ylabel=f"relative to {printable(baseline)}")
    axes.set_title("a training token: time filled, FLOPs hollow", loc="left", pad=4, size=SMALL, color=MUTED)
    return figure


def time_ratios(rows: Iterable[Row], baseline: str) -> list[tuple[str, float, float, float]]:
    """(arm, forward FLOPs of the baseline, ratio of time, ratio of FLOPs) for each arm, depth and setting."""
    groups: dict[tuple[str, float, object], list[Row]] = defaultdict(list)
    for row in rows:
        if row.finished and row.step_seconds:
            groups[row.arm, row.depth, (row.hardware, row.torch, row.threads, row.jobs)].append(row)
    found = []
    for (arm, depth, setting), mine in groups.items():
        theirs = groups.get((baseline, depth, setting))
        if arm != baseline and theirs:
            time, flops = (cost(mine) / cost(theirs) for cost in (median_time, median_flops))
            found.append((arm, theirs[0].flops_per_token, time, flops))
    return found


def median_time(rows: Iterable[Row]) -> float:
    """Seconds of a training token."""
    return statistics.median(row.steps * (row.step_seconds or math.nan) / row.tokens for row in rows)


def median_flops(rows: Iterable[Row]) -> float:
    return statistics.median(row.training_flops / row.tokens for row in rows)


# -- what is drawn


def drawable(rows: Iterable[Row]) -> list[Row]:
    finished = [row for row in rows if row.finished]
    if not finished:
        raise ValueError("no finished run to draw")
    return finished


def loss_of(row: Row) -> float:
    return float(getattr(row, FITTED))


def draw_point(axes: Axes, x: float, y: float, arms: Sequence[str], arm: str) -> None:
    axes.plot([x], [y], **look(arms, arm), markersize=3.5, markeredgecolor="white", markeredgewidth=0.4, zorder=3)


def draw_parabola(axes: Axes, optimum: Optimum, low: float, high: float, colour: str) -> None:
    assert optimum.curve is not None
    sizes = np.geomspace(low, high, 100)
    claimed = optimum.params is not None
    line = "-" if claimed else (0, (4, 2))
    axes.plot(sizes, optimum.curve.loss(sizes), color=colour, linewidth=0.9, linestyle=line, zorder=2)
    if optimum.params is not None and optimum.loss is not None:
        if optimum.params_interval is not None:
            axes.plot(optimum.params_interval, [optimum.loss] * 2, color=colour, linewidth=0.6, zorder=4)
        if optimum.loss_interval is not None:
            axes.plot([optimum.params] * 2, optimum.loss_interval, color=colour, linewidth=0.6, zorder=4)
        axes.plot(
            [optimum.params], [optimum.loss], marker="*", color=colour, markersize=9, markeredgecolor="white",
            markeredgewidth=0.6, zorder=5,
        )  # fmt: skip


def draw_optimum(axes: Axes, optimum: Optimum, x: float, style: dict[str, Any]) -> None:
    if optimum.params_interval is not None:
        axes.plot([x, x], optimum.params_interval, color=style["color"], linewidth=0.8, marker="_", zorder=3)
    axes.plot(
        [x], [optimum.params or math.nan], **style, markersize=4, markeredgecolor="white", markeredgewidth=0.4, zorder=4
    )


def exponent_text(law: PowerLaw | None) -> str:
    if law is None or law.exponent is None:
        return ""
    interval = "" if law.interval is None else f" ({law.interval.low:.2f} to {law.interval.high:.2f})"
    return f" ∝ FLOPs^{law.exponent:.3f}{interval}"


def aside(number: int, count: int, values: Sequence[float]) -> float:
    """What to multiply x by, so that of `count` arms at one place none covers another."""
    width = max(max(values) / min(values), NARROWEST**2)
    return float(width ** (0.012 * (number - (count - 1) / 2)))


# -- panels, axes, key


def budget_panels(rows: Sequence[Row], arms: Sequence[str]) -> tuple[Figure, dict[float, Axes]]:
    """A panel for each budget, smallest first, under a key of the arms."""
    budgets = sorted({row.budget for row in rows})
    columns = 2 if len(budgets) in (2, 4) else min(3, len(budgets))
    lines = math.ceil(len(budgets) / columns)
    panel = PANEL_WIDTH if columns > 1 else COLUMN - LEFT - RIGHT
    width = LEFT + columns * panel + (columns - 1) * ACROSS + RIGHT
    key = key_lines(arms, printable, width)
    top = 0.05 + KEY_LINE * len(key) + TITLE
    height = top + lines * PANEL_HEIGHT + (lines - 1) * BETWEEN + BOTTOM
    figure = Figure(figsize=(width, height))
    panels = {}
    for number, budget in enumerate(budgets):
        line, column = divmod(number, columns)
        left, bottom = LEFT + column * (panel + ACROSS), height - top - PANEL_HEIGHT - line * (PANEL_HEIGHT + BETWEEN)
        axes = figure.add_axes((left / width, bottom / height, panel / width, PANEL_HEIGHT / height))
        axes.set_title(f"{power_of_ten(budget)} training FLOPs", loc="left", pad=4, size=SMALL)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y")
        panels[budget] = axes
    draw_key(figure, key, printable, arms)
    return figure, panels


def one_panel(arms: Sequence[str], label: Label, looks: Sequence[str] | None = None) -> tuple[Figure, Axes]:
    widest = max(text_width(label(arm), SMALL) for arm in arms)
    width = max(COLUMN, LEFT + KEY_MARK + widest + RIGHT)
    key = key_lines(arms, label, width)
    top = 0.05 + KEY_LINE * len(key) + TITLE
    height = top + PANEL_HEIGHT + BOTTOM
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((LEFT / width, BOTTOM / height, (width - LEFT - RIGHT) / width, PANEL_HEIGHT / height))
    draw_key(figure, key, label, looks or arms)
    return figure, axes


def key_lines(arms: Sequence[str], label: Label, width: float) -> list[list[str]]:
    """The arms in lines that fit the width, none alone wider than it."""
    lines: list[list[str]] = [[]]
    used = LEFT
    for arm in arms:
        needed = KEY_MARK + text_width(label(arm), SMALL) + KEY_GAP
        if lines[-1] and used + needed > width:
            lines.append([])
            used = LEFT
        lines[-1].append(arm)
        used += needed
    return lines


def draw_key(figure: Figure, lines: Sequence[Sequence[str]], label: Label, arms: Sequence[str]) -> None:
    width, height = figure.get_size_inches()
    for number, line in enumerate(lines):
        x, y = LEFT, height - 0.05 - KEY_LINE * (number + 0.5)
        for arm in line:
            mark = Line2D([(x + 0.1) / width], [y / height], **look(arms, arm), markersize=4, linestyle="none")
            figure.add_artist(mark)
            figure.text((x + KEY_MARK) / width, y / height, label(arm), va="center_baseline", size=SMALL)
            x += KEY_MARK + text_width(label(arm), SMALL) + KEY_GAP


def label_panels(panels: dict[float, Axes], x: str, y: str) -> None:
    """The name of y beside the first panel, of x below all."""
    for number, axes in enumerate(panels.values()):
        axes.set_xlabel(x)
        if number == 0:
            axes.set_ylabel(y)


def set_log_x(axes: Axes, values: Sequence[float], label: Callable[[float], str]) -> None:
    axes.set_xscale("log")
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.06, NARROWEST)
    axes.set_xlim(low / margin, high * margin)
    ticks = [low] if low == high else log_ticks(low / margin, high * margin)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, three to six of them where there are any so close together.

    >>> log_ticks(90, 1100), log_ticks(4e5, 1.3e6)
    ([100.0, 300.0, 1000.0], [500000.0, 700000.0, 1000000.0])
    """
    ticks: list[float] = []
    for parts in SUBDIVISIONS:
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [float(f"{part * 10.0**power:.6g}") for power in powers for part in parts]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    if len(ticks) < 2:  # so narrow that it is nearly straight
        places = MaxNLocator(4).tick_values(low, high)
        ticks = [tick for place in places if low <= (tick := float(f"{place:.3g}")) <= high]
    return ticks[:: math.ceil(len(ticks) / 6)] or [low]

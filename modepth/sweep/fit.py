"""What the rows of a sweep say: the best size at each budget, arms against a baseline, power laws. Never torch.

Per arm and budget, a parabola through the validation losses in the logarithm of the parameters; its lowest point is
the optimum, and its interval comes from resampled residuals. No optimum is claimed from fewer than three sizes, from
a curve that bends the wrong way, or at the edge of what was tried. Arms are compared by differences between runs of
the same seed, which share the order of the data: with a t-interval, in test loss, which nothing was chosen by.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

try:
    from scipy.special import ndtri, stdtrit
except ImportError as error:
    raise ImportError("fits need scipy: pip install 'modepth[plots]'") from error

from modepth.sweep.results import FITTED, REPORTED, Row

Array = NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 2000
MAX_WITHOUT_MINIMUM = 0.05  # share of the resamples, beyond which there is no interval
FEWEST_SIZES = FEWEST_BUDGETS = 3


class Interval(NamedTuple):
    low: float
    high: float


class Parabola(NamedTuple):
    """loss = a + b x + c x², where x is the logarithm of the parameters less `centre`."""

    centre: float
    a: float
    b: float
    c: float

    def loss(self, params: ArrayLike) -> Array:
        x = np.log(np.asarray(params, dtype=np.float64)) - self.centre
        return self.a + self.b * x + self.c * x**2

    @property
    def vertex(self) -> float:
        """The parameters at the lowest point, if c is positive."""
        return math.exp(self.centre - self.b / (2 * self.c))


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best size of an arm at a budget and its loss, by the parabola; or why none is claimed.

    note   why there is no interval
    """

    arm: str
    budget: float
    num_sizes: int
    num_runs: int
    curve: Parabola | None = None
    params: float | None = None
    params_interval: Interval | None = None
    loss: float | None = None
    loss_interval: Interval | None = None
    refused: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm less the baseline, in test loss, over the seeds that both have.

    best    each at its own best size by validation loss, of those with the most seeds; else both at one depth
    """

    budget: float
    arm: str
    baseline: str
    best: bool
    depth: float
    baseline_depth: float
    num_seeds: int
    loss: float
    baseline_loss: float
    difference: float
    interval: Interval | None
    percent: float


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """Best parameters = factor * budget ** exponent; or why none is claimed."""

    arm: str
    num_budgets: int
    exponent: float | None = None
    interval: Interval | None = None
    factor: float | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All that the rows say; `left_out` names the runs and comparisons that had no say, and why."""

    baseline: str
    optima: tuple[Optimum, ...]
    comparisons: tuple[Comparison, ...]
    power_laws: tuple[PowerLaw, ...]
    left_out: tuple[tuple[str, str], ...]


def fit_rows(rows: Sequence[Row], baseline: str | None = None) -> Fit:
    """Fit everything that the finished rows allow."""
    finished = [row for row in rows if row.finished]
    if not finished:
        raise ValueError(f"none of {len(rows)} rows is of a finished run: nothing to fit; see modepth sweep run")
    base = baseline_of(finished) if baseline is None else baseline
    optima, resampled = [], {}
    for (arm, budget), group in grouped(finished).items():
        params, losses = [row.params for row in group], [getattr(row, FITTED) for row in group]
        optimum, vertices = find_optimum(arm, budget, params, losses)
        optima.append(optimum)
        resampled[arm, budget] = vertices
    return Fit(
        baseline=base,
        optima=tuple(optima),
        comparisons=tuple(compare(finished, base)),
        power_laws=tuple(power_law(arm, optima, resampled) for arm in arms_of(finished)),
        left_out=(
            *((row.name, row.reason or "no reason given") for row in rows if not row.finished),
            *unpaired(finished, base),
        ),
    )


def baseline_of(rows: Sequence[Row]) -> str:
    """The first arm that is dense, else the first."""
    return next((row.arm for row in rows if row.dense), rows[0].arm)


def arms_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.arm for row in rows))


def grouped(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """By arm and budget, budgets in order."""
    groups: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.budget):
        groups[row.arm, row.budget].append(row)
    return groups


# -- the optimum of one arm at one budget


def find_optimum(
    arm: str, budget: float, params: Sequence[float], losses: Sequence[float]
) -> tuple[Optimum, Array | None]:
    """The optimum, and that of each resample where there is an interval, for the power law."""
    sizes = sorted(set(params))
    facts = Optimum(arm=arm, budget=budget, num_sizes=len(sizes), num_runs=len(params))
    if len(sizes) < FEWEST_SIZES:
        few = f"{len(sizes)} size{'s' * (len(sizes) > 1)}: a parabola needs {FEWEST_SIZES} or more"
        return replace(facts, refused=few), None
    x, y = np.log(np.array(params, dtype=np.float64)), np.array(losses, dtype=np.float64)
    curve = fit_parabola(x, y)
    refused = why_not(curve, sizes, params, y)
    if refused is not None:
        return replace(facts, curve=curve, refused=refused), None
    vertices, lowest, note = resample(curve, x, y)
    optimum = replace(
        facts,
        curve=curve,
        params=curve.vertex,
        params_interval=None if vertices is None else interval_of(vertices),
        loss=float(curve.loss(curve.vertex)),
        loss_interval=None if lowest is None else interval_of(lowest),
        note=note,
    )
    return optimum, vertices


def fit_parabola(x: Array, y: Array) -> Parabola:
    centre = float(x.mean())  # so that the three columns are far from parallel
    (a, b, c), *_ = np.linalg.lstsq(design(x - centre), y, rcond=None)
    return Parabola(centre, float(a), float(b), float(c))


def design(x: Array) -> Array:
    return np.stack([np.ones_like(x), x, x**2], axis=1)


def why_not(curve: Parabola, sizes: Sequence[float], params: Sequence[float], losses: Array) -> str | None:
    """Why the parabola has no optimum to claim."""
    if curve.c <= 0:
        return "the curve bends the wrong way: it has no lowest point"
    tried = f"{sizes[0]:,.0f} to {sizes[-1]:,.0f} parameters"
    # In logarithms: far outside, the vertex itself may be beyond any float.
    place = curve.centre - curve.b / (2 * curve.c)
    if not math.log(sizes[0]) < place < math.log(sizes[-1]):
        side = "smaller" if place <= math.log(sizes[0]) else "larger"
        return f"the lowest point of the curve is outside what was tried, {tried}: try {side} sizes"
    means = [losses[np.array(params) == size].mean() for size in sizes]
    best = int(np.argmin(means))
    if best in (0, len(sizes) - 1):
        side = "smaller" if best == 0 else "larger"
        return f"the lowest loss is at the edge of what was tried, {tried}: try {side} sizes"
    return None


def resample(curve: Parabola, x: Array, y: Array) -> tuple[Array | None, Array | None, str | None]:
    """Vertices and lowest losses of parabolas through resampled residuals; or why there are none."""
    num_free = len(y) - 3
    if num_free < 1:
        return None, None, "no interval: the curve goes through its three points exactly"
    columns = design(x - curve.centre)
    fitted = columns @ np.array(curve[1:])
    # As wide as the noise, not as what a fit leaves of it; and wider, as a t is than a normal, since few residuals
    # do not say how wide that is.
    level = (1 + CONFIDENCE) / 2
    wider = math.sqrt(len(y) / num_free) * stdtrit(num_free, level) / ndtri(level)
    residuals = (y - fitted) * wider
    drawn = np.random.default_rng(0).choice(residuals - residuals.mean(), size=(RESAMPLES, len(y)))
    a, b, c = np.linalg.pinv(columns) @ (fitted + drawn).T
    good = c > 0
    if 1 - good.mean() > MAX_WITHOUT_MINIMUM:
        return None, None, f"no interval: {1 - good.mean():.0%} of the resampled curves have no lowest point"
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        vertices = np.where(good, np.exp(curve.centre - b / (2 * c)), np.nan)
        lowest = np.where(good, a - b**2 / (4 * c), np.nan)
    return vertices, lowest, None


def interval_of(values: Array) -> Interval:
    low, high = np.nanquantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


# -- across budgets


def power_law(arm: str, optima: Iterable[Optimum], resampled: dict[tuple[str, float], Array | None]) -> PowerLaw:
    """A straight line through the logarithms of an arm's optima; its interval from theirs, if all have one."""
    known = [(each.budget, each.params) for each in optima if each.arm == arm and each.params is not None]
    if len(known) < FEWEST_BUDGETS:
        refused = f"{len(known)} budget{'s' * (len(known) != 1)} with an optimum: a power law needs {FEWEST_BUDGETS}"
        return PowerLaw(arm=arm, num_budgets=len(known), refused=refused)
    budgets, params = np.log(np.array(known, dtype=np.float64)).T
    exponent, start = np.polyfit(budgets - budgets.mean(), params, 1)
    vertices = [resampled[arm, budget] for budget, _ in known]
    interval = None
    if all(each is not None for each in vertices):
        logs_BN = np.log(np.stack([each for each in vertices if each is not None]))
        slopes = (budgets - budgets.mean()) @ logs_BN / ((budgets - budgets.mean()) ** 2).sum()
        interval = interval_of(slopes)
    return PowerLaw(
        arm=arm,
        num_budgets=len(known),
        exponent=float(exponent),
        interval=interval,
        factor=float(np.exp(start - exponent * budgets.mean())),
    )


# -- arms


def opponents(rows: Sequence[Row], baseline: str) -> list[tuple[list[Row], list[Row]]]:
    """Of every other arm and budget its rows, and the baseline's of that budget if there are any."""
    groups = grouped(rows)
    return [
        (mine, groups[baseline, budget])
        for (arm, budget), mine in groups.items()
        if arm != baseline and (baseline, budget) in groups
    ]


def compare(rows: Sequence[Row], baseline: str) -> list[Comparison]:
    """Every other arm less the baseline at each budget: at the best size of each, then size by size."""
    found = []
    for mine, theirs in opponents(rows, baseline):
        depths = sorted({row.depth for row in mine} & {row.depth for row in theirs})
        pairs = [(best_depth(mine), best_depth(theirs), True)] + [(depth, depth, False) for depth in depths]
        for depth, other, best in pairs:
            found += compare_sizes(at_depth(mine, depth), at_depth(theirs, other), best)
    return found


def unpaired(rows: Sequence[Row], baseline: str) -> list[tuple[str, str]]:
    """The comparisons at best sizes that cannot be made, since no seed was run at both, and why."""
    found = []
    for mine, theirs in opponents(rows, baseline):
        depth, other = best_depth(mine), best_depth(theirs)
        if not at_depth(mine, depth).keys() & at_depth(theirs, other).keys():
            name = f"{mine[0].arm} less {baseline} at budget {mine[0].budget:g}, each at its best size"
            found.append((name, f"no seed was run at both depth {depth:g} and depth {other:g}: run one at both"))
    return found


def best_depth(rows: Sequence[Row]) -> float:
    """The depth of the lowest mean validation loss, of those with the most seeds."""
    by_depth = {depth: at_depth(rows, depth) for depth in sorted({row.depth for row in rows})}
    most = max(len(group) for group in by_depth.values())
    means = {
        depth: np.mean([getattr(row, FITTED) for row in group.values()])
        for depth, group in by_depth.items()
        if len(group) == most
    }
    return min(means, key=lambda depth: means[depth])


def at_depth(rows: Iterable[Row], depth: float) -> dict[int, Row]:
    """By seed."""
    return {row.seed: row for row in rows if row.depth == depth}


def compare_sizes(mine: dict[int, Row], theirs: dict[int, Row], best: bool) -> list[Comparison]:
    """One comparison, or none if no seed is in both."""
    seeds = sorted(set(mine) & set(theirs))
    if not seeds:
        return []
    ours, base = (np.array([getattr(rows[seed], REPORTED) for seed in seeds]) for rows in (mine, theirs))
    one, other = mine[seeds[0]], theirs[seeds[0]]
    return [
        Comparison(
            budget=one.budget,
            arm=one.arm,
            baseline=other.arm,
            best=best,
            depth=one.depth,
            baseline_depth=other.depth,
            num_seeds=len(seeds),
            loss=float(ours.mean()),
            baseline_loss=float(base.mean()),
            difference=float((ours - base).mean()),
            interval=t_interval(ours - base),
            percent=float(100 * (ours - base).mean() / base.mean()),
        )
    ]


def t_interval(values: Array) -> Interval | None:
    """Of the mean of independent values; None for one value.

    >>> [round(end, 4) for end in t_interval(np.array([1.0, 2.0, 3.0]))]
    [-0.4841, 4.4841]
    """
    if len(values) < 2:
        return None
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2) * values.std(ddof=1) / math.sqrt(len(values)))
    return Interval(float(values.mean() - half), float(values.mean() + half))

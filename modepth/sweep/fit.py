"""What the rows of a sweep say: the best size at each budget, arms against a baseline, power laws. Never torch.

Per arm and budget, a parabola through the validation losses in the logarithm of the parameters; its lowest point is
the optimum, and its interval comes from resampled residuals. No optimum is claimed from fewer than three sizes, from
a curve that bends the wrong way, or at the edge of what was tried. Arms are compared in `modepth.sweep.arms`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from modepth.sweep.arms import Comparison, Pooled, arms_of, baseline_of, compare, grouped, pool, unpaired
from modepth.sweep.intervals import Array, Interval, interval_of, wider_than_normal
from modepth.sweep.results import FITTED, Row

RESAMPLES = 2000
MAX_WITHOUT_MINIMUM = 0.05  # share of the resamples, beyond which there is no interval
FEWEST_SIZES = FEWEST_BUDGETS = 3


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
    pooled: tuple[Pooled, ...]
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
        pooled=tuple(pool(finished, base)),
        power_laws=tuple(power_law(arm, optima, resampled) for arm in arms_of(finished)),
        left_out=(
            *((row.name, row.reason or "no reason given") for row in rows if not row.finished),
            *unpaired(finished, base),
        ),
    )


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
    wider = math.sqrt(len(y) / num_free) * wider_than_normal(num_free)
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

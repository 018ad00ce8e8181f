"""Intervals of what is estimated from few runs. Never torch."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

try:
    from scipy.special import ndtri, stdtrit
except ImportError as error:
    raise ImportError("fits need scipy: pip install 'modepth[plots]'") from error

Array = NDArray[np.float64]
CONFIDENCE = 0.95
LEVEL = (1 + CONFIDENCE) / 2


class Interval(NamedTuple):
    low: float
    high: float


def t_quantile(num_free: int) -> float:
    """Standard errors to either side, where so many numbers are free to say how large one is."""
    return float(stdtrit(num_free, LEVEL))


def wider_than_normal(num_free: int) -> float:
    return t_quantile(num_free) / float(ndtri(LEVEL))


def interval_of(values: Array) -> Interval:
    """Of resampled values."""
    low, high = np.nanquantile(values, [1 - LEVEL, LEVEL])
    return Interval(float(low), float(high))


def t_interval(values: Array) -> Interval | None:
    """Of the mean of independent values; None for one value.

    >>> [round(end, 4) for end in t_interval(np.array([1.0, 2.0, 3.0]))]
    [-0.4841, 4.4841]
    """
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(float(values.mean() - half), float(values.mean() + half))


def fit_slope(x: Array, y: Array) -> tuple[float, Interval] | None:
    """How y changes with x, by least squares; None where fewer than three points or equal x do not say.

    >>> slope, interval = fit_slope(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 2.0, 1.0, 3.0]))
    >>> round(slope, 4), [round(end, 4) for end in interval]
    (0.8, [-1.0255, 2.6255])
    """
    if len(x) < 3 or len(set(x)) == 1:
        return None
    x = x - x.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residuals = y - y.mean() - slope * x
    half = t_quantile(len(x) - 2) * math.sqrt(float(residuals @ residuals) / (len(x) - 2) / spread)
    return slope, Interval(slope - half, slope + half)

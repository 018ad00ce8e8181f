"""Arms against a baseline, by differences between runs of the same seed, which share the order of the data.

In test loss, which nothing was chosen by, with t-intervals. Never torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from modepth.sweep.intervals import Interval, fit_slope, t_interval
from modepth.sweep.results import FITTED, REPORTED, Row


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
class Pooled:
    """An arm less the baseline in percent of test loss, over all pairs of one depth and seed.

    budget         None: of all budgets
    per_doubling   what is added to the difference as the baseline's updates double, by least squares
    """

    budget: float | None
    arm: str
    baseline: str
    num_pairs: int
    percent: float
    interval: Interval | None
    per_doubling: float | None
    per_doubling_interval: Interval | None


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


# -- over all sizes


def pool(rows: Sequence[Row], baseline: str) -> list[Pooled]:
    """Every other arm less the baseline: at each budget, then at all where there are more than one."""
    found = []
    for arm in arms_of(rows):
        pairs = paired(rows, arm, baseline) if arm != baseline else []
        budgets = sorted({mine.budget for mine, _ in pairs})
        for budget in [*budgets, *([None] if len(budgets) > 1 else [])]:
            found.append(pool_pairs([pair for pair in pairs if budget in (None, pair[0].budget)], budget))
    return found


def paired(rows: Sequence[Row], arm: str, baseline: str) -> list[tuple[Row, Row]]:
    """The runs of an arm, each with the baseline's of its budget, depth and seed."""
    of_baseline = {(row.budget, row.depth, row.seed): row for row in rows if row.arm == baseline}
    cells = [(row, (row.budget, row.depth, row.seed)) for row in rows if row.arm == arm]
    return [(row, of_baseline[cell]) for row, cell in cells if cell in of_baseline]


def pool_pairs(pairs: Sequence[tuple[Row, Row]], budget: float | None) -> Pooled:
    percent = np.array([100 * (getattr(mine, REPORTED) / getattr(theirs, REPORTED) - 1) for mine, theirs in pairs])
    slope = fit_slope(np.log2([float(theirs.steps) for _, theirs in pairs]), percent)
    return Pooled(
        budget=budget,
        arm=pairs[0][0].arm,
        baseline=pairs[0][1].arm,
        num_pairs=len(pairs),
        percent=float(percent.mean()),
        interval=t_interval(percent),
        per_doubling=None if slope is None else slope[0],
        per_doubling_interval=None if slope is None else slope[1],
    )

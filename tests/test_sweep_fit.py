"""Fits: planted truth comes back, no optimum where there is none, seeds are paired, and no torch is needed."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from modepth.sweep.fit import find_optimum, fit_parabola, fit_rows
from modepth.sweep.intervals import fit_slope, t_interval
from tests.sweeps import failed_row, new_row
from tests.test_project import loaded

BUDGETS = (1e13, 3e13, 1e14)


def planted_rows(exponent=0.5, factor=0.3, noise=0.0, seeds=1, seed=0):
    """Losses that are parabolas around factor * budget ** exponent parameters."""
    generator = np.random.default_rng(seed)
    for budget in BUDGETS:
        best = factor * budget**exponent
        for depth in range(3, 9):
            for number in range(seeds):
                params = round(best * 1.5 ** (depth - 5.3))
                loss = 3 * (budget / 1e13) ** -0.05 + 0.04 * math.log(params / best) ** 2
                loss += noise * generator.normal()
                yield new_row(
                    budget=budget,
                    depth=depth,
                    seed=number,
                    params=params,
                    validation_loss=loss,
                    test_loss=loss + 0.1,
                )


# -- planted truth


@given(st.floats(0.3, 0.7), st.floats(0.05, 3))
def test_the_planted_exponent_and_optima_come_back(exponent, factor):
    fit = fit_rows(list(planted_rows(exponent, factor)))
    (law,) = fit.power_laws
    assert law.exponent == pytest.approx(exponent, abs=1e-3)
    assert law.num_budgets == 3
    for optimum in fit.optima:
        best = factor * optimum.budget**exponent
        assert optimum.refused is None
        assert optimum.params == pytest.approx(best, rel=1e-3)
        assert optimum.loss == pytest.approx(3 * (optimum.budget / 1e13) ** -0.05, abs=1e-5)
        assert law.factor * optimum.budget**law.exponent == pytest.approx(best, rel=1e-3)


def test_the_exponent_comes_back_through_the_noise_of_many_seeds():
    (law,) = fit_rows(list(planted_rows(0.49, noise=5e-4, seeds=40))).power_laws
    assert law.exponent == pytest.approx(0.49, abs=3e-3)
    assert law.interval.low < 0.49 < law.interval.high
    assert law.interval.high - law.interval.low < 0.02


@pytest.mark.parametrize("seeds", [1, 2])
def test_intervals_hold_the_truth_about_as_often_as_they_say(seeds):
    held = {"params": 0, "loss": 0}
    for seed in range(60):
        fit = fit_rows(list(planted_rows(noise=0.004, seeds=seeds, seed=seed)))
        for optimum in fit.optima:
            truth = {"params": 0.3 * optimum.budget**0.5, "loss": 3 * (optimum.budget / 1e13) ** -0.05}
            for name, value in truth.items():
                low, high = getattr(optimum, f"{name}_interval")
                held[name] += low <= value <= high
    for name, count in held.items():
        assert 0.91 <= count / 180 <= 0.99, name


@given(st.lists(st.tuples(st.floats(8, 20), st.floats(1, 8)), min_size=4, max_size=9))
def test_the_parabola_is_the_one_that_polyfit_finds(points):
    x, y = np.array(points).T
    if len(np.unique(x.round(1))) < 3:
        return
    curve = fit_parabola(x, y)
    c, b, a = np.polyfit(x - x.mean(), y, 2)
    np.testing.assert_allclose(curve[1:], (a, b, c), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(curve.loss(np.exp(x)), np.polyval((c, b, a), x - x.mean()), rtol=1e-6, atol=1e-6)


# -- what is refused


@given(st.lists(st.floats(2, 4), min_size=1, max_size=8), st.integers(1, 2))
def test_fewer_than_three_sizes_are_refused_however_many_seeds(losses, sizes):
    params = [10**6 * (1 + number % sizes) for number in range(len(losses))]
    optimum, _ = find_optimum("dense", 1e13, params, losses)
    assert optimum.params is optimum.loss is optimum.curve is None
    assert optimum.refused == (
        "1 size: a parabola needs 3 or more" if len(set(params)) == 1 else "2 sizes: a parabola needs 3 or more"
    )


@given(st.floats(-3, 3), st.floats(0.01, 1), st.integers(3, 7))
def test_an_optimum_is_claimed_only_inside_what_was_tried(place, bend, num):
    params = [int(1e6 * 2.0**number) for number in range(num)]
    centre = math.log(1e6) + math.log(2) * (num - 1) * (0.5 + place)
    losses = [3 + bend * (math.log(each) - centre) ** 2 for each in params]
    optimum, _ = find_optimum("dense", 1e13, params, losses)
    if 0 < int(np.argmin(losses)) < num - 1:
        assert math.log(optimum.params) == pytest.approx(centre, abs=1e-6)
    else:
        side = "smaller" if int(np.argmin(losses)) == 0 else "larger"
        assert optimum.params is None
        assert optimum.refused.endswith(f"1,000,000 to {params[-1]:,} parameters: try {side} sizes")


@given(st.floats(-3, 3), st.floats(0, 1))
def test_a_curve_that_bends_the_wrong_way_is_refused(place, bend):
    params = [int(1e6 * 2.0**number) for number in range(5)]
    losses = [3 - bend * (math.log(each / 4e6) - place) ** 2 - 1e-6 * math.log(each) ** 2 for each in params]
    optimum, _ = find_optimum("dense", 1e13, params, losses)
    assert optimum.refused == "the curve bends the wrong way: it has no lowest point"


def test_three_points_have_an_optimum_but_no_interval():
    optimum, vertices = find_optimum("dense", 1e13, [1e6, 2e6, 4e6], [3.1, 3.0, 3.1])
    assert optimum.params == pytest.approx(2e6)
    assert optimum.params_interval is optimum.loss_interval is vertices is None
    assert optimum.note == "no interval: the curve goes through its three points exactly"


def test_an_interval_is_refused_where_the_noise_hides_the_curve():
    params = [1e6, 2e6, 4e6, 8e6, 16e6] * 2
    losses = [mean + noise for noise in (0.05, -0.05) for mean in (3.01, 3.0, 2.99, 3.0, 3.01)]
    optimum, _ = find_optimum("dense", 1e13, params, losses)
    assert optimum.params is not None
    assert optimum.params_interval is None
    assert optimum.note.startswith("no interval: ")
    assert optimum.note.endswith("% of the resampled curves have no lowest point")


def test_a_power_law_needs_three_budgets_with_an_optimum():
    rows = [row for row in planted_rows() if row.budget < 1e14]
    (law,) = fit_rows(rows).power_laws
    assert law.exponent is None
    assert law.refused == "2 budgets with an optimum: a power law needs 3"
    edge = [row for row in planted_rows() if row.budget < 1e14 or row.depth < 6]
    assert fit_rows(edge).power_laws == (law,)


def test_what_failed_is_left_out_and_named():
    rows = [*planted_rows(), failed_row(arm="mod", seed=7), failed_row(depth=9)]
    fit = fit_rows(rows)
    assert fit.left_out == (
        ("mod at depth 4, budget 1e+13, seed 7", "diverged: the loss is not finite"),
        ("dense at depth 9, budget 1e+13, seed 0", "diverged: the loss is not finite"),
    )
    assert fit.optima == fit_rows(rows[:-2]).optima
    with pytest.raises(ValueError, match="none of 2 rows is of a finished run: nothing to fit"):
        fit_rows(rows[-2:])


# -- arms


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_the_t_interval_is_that_of_scipy(values):
    values = np.array(values)
    low, high = t_interval(values)
    if values.std() > 1e-9:
        wanted = stats.t.interval(0.95, len(values) - 1, loc=values.mean(), scale=stats.sem(values))
        np.testing.assert_allclose((low, high), wanted, rtol=1e-9, atol=1e-12)
    else:
        assert low == pytest.approx(high)


@pytest.mark.parametrize("x", [[], [1.0], [1.0, 2.0], [3.0, 3.0, 3.0]])
def test_two_points_or_one_place_have_no_slope(x):
    assert fit_slope(np.array(x), np.arange(float(len(x)))) is None


@given(st.lists(st.tuples(st.integers(-9, 9), st.floats(-1, 1)), min_size=3, max_size=9))
def test_the_slope_is_that_of_scipy(points):
    x, y = np.array(points, dtype=float).T
    assume(len(set(x)) > 1 and np.ptp(y) > 1e-3)  # scipy has no interval for a constant
    slope, interval = fit_slope(x, y)
    wanted = stats.linregress(x, y)
    half = stats.t.ppf(0.975, len(x) - 2) * wanted.stderr
    np.testing.assert_allclose(
        (slope, *interval), (wanted.slope, wanted.slope - half, wanted.slope + half), rtol=1e-6, atol=1e-6
    )


def test_arms_are_compared_seed_by_seed_in_test_loss():
    """Seeds differ far more than arms: only pairs show the difference."""
    noise = {0: 0.3, 1: -0.2, 2: 0.1, 3: 5.0}
    rows = [
        new_row(arm=arm, seed=seed, validation_loss=9.0, test_loss=3 + noise[seed] + less + 0.001 * seed * (less < 0))
        for arm, less, seeds in (("dense", 0.0, (0, 1, 2)), ("mod", -0.05, (2, 0, 1, 3)))
        for seed in seeds
    ]
    best, same = fit_rows(rows).comparisons
    assert (best.best, same.best) == (True, False)
    for each in (best, same):
        assert (each.arm, each.baseline, each.num_seeds) == ("mod", "dense", 3)
        assert each.difference == pytest.approx(-0.049)
        assert each.interval.low == pytest.approx(-0.049 - 4.302653 * 0.001 / math.sqrt(3), rel=1e-6)
        assert each.percent == pytest.approx(100 * each.difference / each.baseline_loss)


def test_the_best_size_is_chosen_by_validation_loss_among_sizes_with_the_most_seeds():
    losses = {3: (3.2, 1.0), 4: (3.1, 2.0), 5: (3.15, 0.5), 6: (2.0, 0.1)}  # the lowest test loss is not the choice
    rows = [
        new_row(arm=arm, depth=depth, seed=seed, validation_loss=losses[depth][0] - 0.1 * (arm == "mod") * (depth == 5))
        for arm in ("dense", "mod")
        for depth in losses
        for seed in range(1 if depth == 6 else 2)
    ]
    rows = [new_row(**{**vars(row), "test_loss": losses[row.depth][1]}) for row in rows]
    comparisons = fit_rows(rows).comparisons
    assert [(each.best, each.depth, each.baseline_depth) for each in comparisons] == [
        (True, 5, 4),
        (False, 3, 3),
        (False, 4, 4),
        (False, 5, 5),
        (False, 6, 6),
    ]
    assert (comparisons[0].loss, comparisons[0].baseline_loss) == (0.5, 2.0)
    assert comparisons[-1].interval is None  # one seed


def test_arms_without_a_common_seed_or_budget_are_not_compared():
    rows = [new_row(), new_row(arm="mod", seed=1), new_row(arm="mod", budget=3e13)]
    fit = fit_rows(rows)
    assert fit.comparisons == ()
    ((name, reason),) = fit.left_out
    assert name == "mod less dense at budget 1e+13, each at its best size"
    assert reason.startswith("no seed was run at both depth")


def test_pairs_of_all_sizes_are_pooled_in_percent_with_what_a_doubling_of_updates_adds():
    """The planted difference is 1 % at 1000 updates and a quarter of a percent less with each doubling."""
    steps = {(1e13, 3): 1000, (1e13, 4): 500, (3e13, 3): 4000, (3e13, 4): 2000}
    rows = [
        new_row(arm=arm, budget=budget, depth=depth, seed=seed, steps=number, test_loss=(3 + seed) * factor)
        for (budget, depth), number in steps.items()
        for seed in range(2)
        for arm, factor in (("dense", 1.0), ("mod", 1 + (1 - 0.25 * math.log2(number / 1000)) / 100))
    ]
    rows.append(new_row(arm="mod", budget=1e14, test_loss=99.0))  # without a partner
    small, large, whole = fit_rows(rows).pooled
    assert [(each.budget, each.num_pairs) for each in (small, large, whole)] == [(1e13, 4), (3e13, 4), (None, 8)]
    assert [each.percent for each in (small, large, whole)] == pytest.approx([1.125, 0.625, 0.875])
    for each in (small, large, whole):
        assert (each.arm, each.baseline) == ("mod", "dense")
        assert each.interval.low < each.percent < each.interval.high
        assert each.per_doubling == pytest.approx(-0.25)
        assert each.per_doubling_interval == pytest.approx((-0.25, -0.25))


def test_one_pair_has_neither_an_interval_nor_a_slope():
    (only,) = fit_rows([new_row(), new_row(arm="mod")]).pooled
    assert (only.num_pairs, only.interval, only.per_doubling) == (1, None, None)


def test_the_baseline_is_the_first_dense_arm_unless_named():
    routed = {"model": {"routing": {"capacity": 0.5}}, "train": {}}
    rows = [new_row(arm="mod", config=routed), new_row(arm="plain"), new_row(arm="other")]
    assert fit_rows(rows).baseline == "plain"
    assert fit_rows(rows, "other").baseline == "other"
    assert fit_rows(rows[:1]).baseline == "mod"
    experts = {"model": {"routing": None, "experts": {"num_experts": 4}}, "train": {}}
    assert fit_rows([new_row(arm="experts", config=experts), *rows]).baseline == "plain"


# -- what it needs


@pytest.mark.parametrize("module", ["modepth.sweep.fit", "modepth.sweep.arms", "modepth.sweep.results"])
def test_fits_load_neither_torch_nor_matplotlib(module):
    assert loaded(f"import {module}") == []


def test_without_scipy_the_error_says_what_to_install():
    script = "import sys; sys.modules['scipy.special'] = None\nimport modepth.sweep.fit"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ImportError: fits need scipy: pip install 'modepth[plots]'" in result.stderr

"""Figures of a sweep: what is drawn is what rows and fits say, all of it can be read, and no torch is needed."""

import math

import numpy as np
import pytest

from modepth.formats import power_of_ten
from modepth.plots.isoflop import (
    log_ticks,
    look,
    loss_against_forward_flops,
    loss_against_parameters,
    optimum_against_budget,
    step_time_ratio,
    time_ratios,
)
from modepth.plots.style import figure_bytes
from modepth.sweep.fit import fit_rows
from modepth.sweep.page import comparison_table, optimum_table, write_sweep_page
from tests.sweeps import failed_row, new_row
from tests.test_plots import check_readable
from tests.test_project import loaded
from tests.test_report import EVIL, read

ROUTED = {"model": {"routing": {"capacity": 0.125}}, "train": {}}


def planted(arms=("dense", "mod"), budgets=(1e13, 3e13, 1e14), seeds=2):
    generator = np.random.default_rng(0)
    for number, arm in enumerate(arms):
        for budget in budgets:
            best = 0.3 * budget**0.49 * (1 + 0.2 * number)
            for depth in range(3, 8):
                for seed in range(seeds):
                    params = round(best * 1.5 ** (depth - 5.2))
                    loss = 3 - 0.02 * number + 0.04 * math.log(params / best) ** 2 + 0.002 * generator.normal()
                    yield new_row(
                        arm=arm,
                        budget=budget,
                        depth=depth,
                        seed=seed,
                        params=params,
                        flops_per_token=2.0 * params,
                        validation_loss=loss,
                        test_loss=loss + 0.1,
                        step_seconds=0.5 + 0.1 * number,
                        training_flops=10**13 + number * 10**12,
                        config=ROUTED if number else new_row().config,
                    )


@pytest.fixture(scope="module")
def rows():
    return [*planted(), failed_row(arm="dense", seed=9)]


def points_of(axes, style):
    """The single points drawn in an arm's colour and marker."""
    lines = [line for line in axes.get_lines() if (line.get_color(), line.get_marker()) == tuple(style.values())]
    return sorted(tuple(line.get_xydata()[0]) for line in lines if len(line.get_xydata()) == 1)


def test_every_finished_run_is_a_point_in_the_panel_of_its_budget(rows):
    for figure, x in (
        (loss_against_parameters(rows, fit_rows(rows)), "params"),
        (loss_against_forward_flops(rows), "flops_per_token"),
    ):
        assert [axes.get_title(loc="left") for axes in figure.axes] == [
            f"{budget} training FLOPs" for budget in ("10¹³", "3·10¹³", "10¹⁴")
        ]
        for axes, budget in zip(figure.axes, (1e13, 3e13, 1e14), strict=True):
            for arm in ("dense", "mod"):
                mine = [row for row in rows if (row.arm, row.budget, row.status) == (arm, budget, "finished")]
                wanted = sorted((getattr(row, x), row.validation_loss) for row in mine)
                assert points_of(axes, look(["dense", "mod"], arm)) == wanted
        check_readable(figure)


def test_the_parabolas_and_their_optima_are_those_of_the_fit(rows):
    fit = fit_rows(rows)
    figure = loss_against_parameters(rows, fit)
    for axes, budget in zip(figure.axes, (1e13, 3e13, 1e14), strict=True):
        stars = {tuple(line.get_xydata()[0]) for line in axes.get_lines() if line.get_marker() == "*"}
        assert stars == {(each.params, each.loss) for each in fit.optima if each.budget == budget}
        curves = [line for line in axes.get_lines() if len(line.get_xydata()) == 100]
        assert [line.get_linestyle() for line in curves] == ["-", "-"]
        for line, optimum in zip(curves, [each for each in fit.optima if each.budget == budget], strict=True):
            sizes, losses = line.get_xydata().T
            np.testing.assert_allclose(losses, optimum.curve.loss(sizes))


def test_a_curve_without_an_optimum_is_dashed_and_has_no_star(rows):
    edge = [row for row in rows if row.depth <= 5]
    fit = fit_rows(edge)
    assert all(optimum.refused for optimum in fit.optima)
    for axes in loss_against_parameters(edge, fit).axes:
        assert not [line for line in axes.get_lines() if line.get_marker() == "*"]
        assert {line.get_linestyle() for line in axes.get_lines() if len(line.get_xydata()) == 100} == {"--"}
    with pytest.raises(ValueError, match="no optimum to draw: every fit was refused"):
        optimum_against_budget(fit)


def test_the_optima_lie_on_their_power_law_with_its_exponent_beside(rows):
    fit = fit_rows(rows)
    figure = optimum_against_budget(fit)
    shown = check_readable(figure)
    for law in fit.power_laws:
        low, high = law.interval
        assert f"{law.arm} ∝ FLOPs^{law.exponent:.3f} ({low:.2f} to {high:.2f})" in shown
    (axes,) = figure.axes
    laws = [line.get_xydata() for line in axes.get_lines() if line.get_linewidth() == 0.9]
    for law, ends in zip(fit.power_laws, laws, strict=True):
        np.testing.assert_allclose(ends[:, 1], law.factor * ends[:, 0] ** law.exponent)


def test_the_step_time_is_relative_to_the_baseline_of_the_same_depth_and_setting(rows):
    for arm, _, time, flops in time_ratios(rows, "dense"):
        assert (arm, time, flops) == ("mod", pytest.approx(1.2), pytest.approx(1.1))
    check_readable(step_time_ratio(rows, "dense"))
    other = [
        new_row(),
        new_row(arm="mod", threads=2),
        new_row(arm="far", depth=9),
        new_row(arm="same", step_seconds=1.0),
    ]
    assert time_ratios(other, "dense") == [("same", 2e6, 2.0, 1.0)]
    with pytest.raises(ValueError, match="no run to compare the step time of with 'dense'"):
        step_time_ratio(other[:3], "dense")


@pytest.mark.parametrize("num", [1, 3, 12])
def test_arms_of_any_number_are_told_apart_and_named(num):
    arms = [f"arm_number_{number}" for number in range(num)]
    looks = {tuple(look(arms, arm).values()) for arm in arms}
    assert len(looks) == num
    mine = list(planted(arms, budgets=(1e13, 3e13), seeds=1))
    for figure in (loss_against_parameters(mine, fit_rows(mine)), optimum_against_budget(fit_rows(mine))):
        assert {text.split(" ")[0] for text in check_readable(figure)} >= set(arms)


@pytest.mark.parametrize(
    ("low", "high"), [(1.08e6, 1.19e6), (2.38e13, 2.63e13), (1e3, 1.3e3), (1e3, 2e3), (4e5, 9e5), (1e5, 1e8), (7, 1e9)]
)
def test_axes_have_a_few_round_ticks(low, high):
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 6
    assert all(low <= tick <= high for tick in ticks)
    assert len(ticks) >= 3 or (len(ticks) == 2 and high / low < 1.6)
    assert all(float(f"{tick:.3g}") == tick for tick in ticks)  # as they are shown


@pytest.mark.parametrize("budget", [2e13, 2.5e13])
def test_at_one_budget_arms_stand_beside_each_other_and_the_budget_is_named(budget):
    mine = list(planted(("dense", "mod", "other"), budgets=(budget,)))
    for figure in (
        optimum_against_budget(fit_rows(mine)),
        step_time_ratio([row for row in mine if row.depth == 4], "dense"),
    ):
        (axes,) = figure.axes
        places = {
            arm: {x for x, _ in points_of(axes, look(["dense", "mod", "other"], arm))} for arm in ("mod", "other")
        }
        assert places["mod"].isdisjoint(places["other"])
    figure = optimum_against_budget(fit_rows(mine))
    assert power_of_ten(budget) in check_readable(figure)
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    assert all(low < tick < high for tick in axes.get_yticks())


def test_a_single_run_can_be_drawn_and_none_cannot():
    row = [new_row()]
    check_readable(loss_against_parameters(row, fit_rows(row)))
    check_readable(loss_against_forward_flops(row))
    with pytest.raises(ValueError, match="no finished run to draw"):
        loss_against_forward_flops([failed_row()])


def test_the_page_says_what_was_fitted_refused_compared_and_left_out(rows, tmp_path):
    fit = fit_rows(rows)
    written = write_sweep_page(rows, fit, tmp_path, missing=["mod at depth 9"])
    names = ["loss_against_parameters", "loss_against_forward_flops", "optimum_against_budget", "step_time_ratio"]
    assert written == [tmp_path / "sweep.html", *(tmp_path / f"{name}.png" for name in names)]
    assert all((tmp_path / f"{name}.svg").exists() for name in names)
    page = read(tmp_path / "sweep.html")
    assert len(page.of("img")) == 4
    headings = ["Arms compared", "Arms compared over all sizes", "Best size against budget", "Left out", "Runs"]
    assert page.text("h2") == headings
    cells = page.text("td")
    assert "not run yet" in cells
    assert "diverged: the loss is not finite" in cells
    for each in fit.optima:
        assert f"{each.loss:.4f}" in cells
    for each in fit.comparisons:
        assert f"{each.difference:+.4f}" in cells
    for each in fit.pooled:
        assert f"{each.percent:+.2f}" in cells
    few = [row for row in rows if row.depth < 5]
    write_sweep_page(few, fit_rows(few), tmp_path / "few")
    assert "2 sizes: a parabola needs 3 or more" in read(tmp_path / "few" / "sweep.html").text("td")


def test_a_picture_of_what_is_no_longer_claimed_does_not_stay(rows, tmp_path):
    write_sweep_page(rows, fit_rows(rows), tmp_path)
    (tmp_path / "mine.png").write_bytes(b"")
    edge = [row for row in rows if row.depth <= 5]
    written = write_sweep_page(edge, fit_rows(edge), tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in written[1:]} | {"mine.png"}
    assert {path.stem for path in tmp_path.glob("*.svg")} == {path.stem for path in written[1:]}


def test_the_page_runs_nothing_that_a_reason_says(tmp_path):
    rows = [new_row(), new_row(id="x", seed=1, status="failed", reason=EVIL)]
    write_sweep_page(rows, fit_rows(rows), tmp_path)
    page = read(tmp_path / "sweep.html")
    assert not page.of("script")
    assert EVIL in "".join(page.text("td"))


def test_tables_tell_one_seed_from_several(rows):
    (line, *_) = comparison_table(fit_rows([new_row(), new_row(arm="mod")]).comparisons)
    assert line["95 %"] == "one seed: none"
    assert line["depth"] == "best with 1 seed: 4, 4"
    assert " to " in comparison_table(fit_rows(rows).comparisons)[0]["95 %"]
    assert " to " in optimum_table(fit_rows(rows).optima)[0]["95 %"]


@pytest.mark.parametrize("module", ["modepth.plots.isoflop", "modepth.sweep.page"])
def test_pictures_of_sweeps_load_neither_torch_nor_pyplot(module):
    assert loaded(f"import {module}") == ["matplotlib"]


def test_equal_rows_give_equal_bytes(rows):
    fit = fit_rows(rows)
    assert figure_bytes(optimum_against_budget(fit)) == figure_bytes(optimum_against_budget(fit))

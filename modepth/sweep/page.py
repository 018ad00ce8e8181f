"""A sweep as one self-contained page and as pictures. Needs the extra `plots`, and never torch.

OUT/sweep.html                      everything, in one file
OUT/loss_against_parameters.*       PNG and SVG, and so the other figures
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from modepth.formats import compact
from modepth.plots import Figure, save_figure
from modepth.plots.isoflop import (
    loss_against_forward_flops,
    loss_against_parameters,
    optimum_against_budget,
    step_time_ratio,
    time_ratios,
)
from modepth.plots.style import FORMATS
from modepth.report import Table, write_report
from modepth.sweep.arms import Comparison, Pooled
from modepth.sweep.fit import Fit, Optimum, PowerLaw
from modepth.sweep.intervals import Interval
from modepth.sweep.results import Row

FIGURES = ("loss_against_parameters", "loss_against_forward_flops", "optimum_against_budget", "step_time_ratio")
INTRO = (
    "Models trained with the same FLOPs (forward and backward, logits included, causal attention counted half, Muon's "
    "own products too where it is the optimiser), each on a cosine of the length of its own run. All losses are "
    "causal: every token is decided about without seeing those after it.\n\n"
    "Curves, optima and the choice of a best size use the validation loss. Comparisons of arms are in test loss, by "
    "which nothing was chosen, between runs of the same seed, with 95 % t-intervals. Intervals of optima come from "
    "resampled residuals."
)

POOLED = (
    "Percent of the baseline's test loss, over all pairs of one budget, depth and seed, as if each were a draw of its "
    "own; and what is added as the baseline's updates double."
)


def write_sweep_page(rows: Sequence[Row], fit: Fit, out: Path, *, missing: Sequence[str] = ()) -> list[Path]:
    """Write the page and the pictures; the paths of what was written. `missing` names runs without a row."""
    figures = draw(rows, fit)
    left_out = [{"run": name, "reason": reason} for name, reason in fit.left_out]
    left_out += [{"run": name, "reason": "not run yet"} for name in missing]
    sections: list[tuple[str, str, Table]] = [
        ("Arms compared", "Test loss, differences over the seeds that both have.", comparison_table(fit.comparisons)),
        ("Arms compared over all sizes", POOLED, pooled_table(fit.pooled)),
        ("Best size against budget", "", law_table(fit.power_laws)),
        ("Left out", "" if left_out else "No run was left out.", left_out),
        ("Runs", "", run_table(rows)),
    ]
    page = write_report(
        out / "sweep.html",
        title="Equal training FLOPs",
        intro=INTRO,
        table=optimum_table(fit.optima),
        figures=[(caption, figure) for _, caption, figure in figures],
        sections=sections,
    )
    for name in set(FIGURES) - {name for name, _, _ in figures}:
        for format in FORMATS:  # of a time when there was something to draw
            (out / f"{name}.{format}").unlink(missing_ok=True)
    return [page, *(save_figure(figure, out / name)[0] for name, _, figure in figures)]


def draw(rows: Sequence[Row], fit: Fit) -> list[tuple[str, str, Figure]]:
    """Name, caption and figure of all that the rows have points for."""
    found = [
        (
            "loss_against_parameters",
            "Validation loss against parameters. Stars: optima with intervals. Dashed: no optimum claimed.",
            loss_against_parameters(rows, fit),
        ),
        (
            "loss_against_forward_flops",
            "Validation loss against the FLOPs of a forward pass. Lines join means over seeds.",
            loss_against_forward_flops(rows),
        ),
    ]
    if any(optimum.params is not None for optimum in fit.optima):
        caption = "The best number of parameters against the budget."
        found.append(("optimum_against_budget", caption, optimum_against_budget(fit)))
    if time_ratios(rows, fit.baseline):
        caption = f"Time and FLOPs of a training token, relative to {fit.baseline} at the same depth of the dial."
        found.append(("step_time_ratio", caption, step_time_ratio(rows, fit.baseline)))
    return found


# -- tables, for the page and the terminal


def optimum_table(optima: Sequence[Optimum]) -> Table:
    return [
        {
            "arm": each.arm,
            "budget": f"{each.budget:g}",
            "sizes": each.num_sizes,
            "runs": each.num_runs,
            "best parameters": None if each.params is None else compact(each.params),
            "95 %": spanned(each.params_interval, compact),
            "validation loss": None if each.loss is None else f"{each.loss:.4f}",
            "95 % ": spanned(each.loss_interval, "{:.4f}".format),
            "note": each.refused or each.note or "",
        }
        for each in optima
    ]


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    return [
        {
            "arm": each.arm,
            "less": each.baseline,
            "budget": f"{each.budget:g}",
            "depth": best_text(each) if each.best else f"{each.depth:g}",
            "seeds": each.num_seeds,
            "test loss": f"{each.loss:.4f}",
            "baseline's": f"{each.baseline_loss:.4f}",
            "difference": f"{each.difference:+.4f}",
            "95 %": spanned(each.interval, "{:+.4f}".format) or "one seed: none",
            "percent": f"{each.percent:+.2f}",
        }
        for each in comparisons
    ]


def best_text(each: Comparison) -> str:
    return f"best with {each.num_seeds} seed{'s' * (each.num_seeds > 1)}: {each.depth:g}, {each.baseline_depth:g}"


def pooled_table(pooled: Sequence[Pooled]) -> Table:
    return [
        {
            "arm": each.arm,
            "less": each.baseline,
            "budget": "all" if each.budget is None else f"{each.budget:g}",
            "pairs": each.num_pairs,
            "percent": f"{each.percent:+.2f}",
            "95 %": spanned(each.interval, "{:+.2f}".format) or "one pair: none",
            "per doubling of updates": None if each.per_doubling is None else f"{each.per_doubling:+.2f}",
            "95 % ": spanned(each.per_doubling_interval, "{:+.2f}".format),
        }
        for each in pooled
    ]


def law_table(laws: Sequence[PowerLaw]) -> Table:
    return [
        {
            "arm": law.arm,
            "budgets": law.num_budgets,
            "exponent": None if law.exponent is None else f"{law.exponent:.4f}",
            "95 %": spanned(law.interval, "{:.3f}".format),
            "note": law.refused or "",
        }
        for law in laws
    ]


def run_table(rows: Sequence[Row]) -> Table:
    return [
        {
            "run": row.id,
            "layers": row.layers,
            "width": row.width,
            "parameters": row.params,
            "FLOPs a token": round(row.flops_per_token),
            "training FLOPs": f"{row.training_flops:.4g}",
            "steps": row.steps,
            "learning rate": row.learning_rate,
            "validation": row.validation_loss,
            "validation, top-k": row.validation_topk_loss,
            "test": row.test_loss,
            "step, s": row.step_seconds,
            "status": row.status,
        }
        for row in rows
    ]


def spanned(interval: Interval | None, form: Callable[[float], str]) -> str | None:
    return None if interval is None else f"{form(interval.low)} to {form(interval.high)}"

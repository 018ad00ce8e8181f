"""`modepth sweep plan|run|fit|plot`: models compared at equal training FLOPs."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from modepth.commands.table import print_table, printable
from modepth.formats import duration, shown
from modepth.progress import SweepProgress
from modepth.sweep.config import SweepConfig, read_sweep
from modepth.sweep.executors import Executor, Local, Submitted
from modepth.sweep.plan import DataFacts, PlannedRun, expected_seconds, plan_runs, read_facts
from modepth.sweep.rate import measured_rate, rate_of_rows
from modepth.sweep.results import Row, cell_name
from modepth.sweep.run import Progress, results_of, run_sweep
from modepth.validation import check_count, check_number

PLAN_EXAMPLES = """\
examples:
  modepth sweep plan examples/sweep_tiny.yaml
  modepth sweep plan examples/sweep_tiny.yaml --jobs 2 --flops-per-second 2e10

The depth of the dial sets width, heads and learning rate; an arm has as many layers as bring it nearest to the
forward FLOPs of the dense model of that depth. See docs/sweeps.md for the fields of CONFIG.
"""
RUN_EXAMPLES = """\
examples:
  modepth sweep run examples/sweep_tiny.yaml
  modepth sweep run examples/sweep_tiny.yaml --jobs 2
  modepth sweep run examples/sweep_tiny.yaml --retry
  modepth sweep run examples/sweep_tiny.yaml --executor slurm --jobs 64

The same command again goes on where it was stopped, in whatever way.
"""
FIT_EXAMPLES = """\
examples:
  modepth sweep fit examples/sweep_tiny.yaml
"""
PLOT_EXAMPLES = """\
examples:
  modepth sweep plot examples/sweep_tiny.yaml
  modepth sweep plot examples/sweep_tiny.yaml --out pictures
"""
SHOWN_FACTS = ("arm", "budget", "depth", "layers", "width", "heads", "learning_rate", "params", "steps", "tokens")


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sweep = commands.add_parser(
        "sweep", help="compare models at equal training FLOPs", description="Models compared at equal training FLOPs."
    )
    actions = sweep.add_subparsers(dest="action", required=True, metavar="ACTION")
    plan = add_action(
        actions, "plan", run_plan, "show the runs of a sweep, their FLOPs and the time they will take", PLAN_EXAMPLES
    )
    plan.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    plan.add_argument(
        "--flops-per-second",
        type=float,
        metavar="F",
        help="of one run (default: that of the finished runs, else of a few steps done now)",
    )
    run = add_action(actions, "run", run_run, "carry out the runs that have no result yet", RUN_EXAMPLES)
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    run.add_argument("--retry", action="store_true", help="try runs that failed again, from their checkpoints")
    run.add_argument(
        "--executor", choices=["local", "slurm"], default="local", help="where they run (default: %(default)s)"
    )
    add_action(actions, "fit", run_fit, "the best size at each budget, and arms compared", FIT_EXAMPLES)
    plot = add_action(actions, "plot", run_plot, "a page and pictures of a sweep", PLOT_EXAMPLES)
    plot.add_argument("--out", metavar="DIR", help="where to write (default: the sweep's own folder)")


def add_action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], None],
    what: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}. The last line is JSON.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML or JSON file with the fields of SweepConfig")
    parser.set_defaults(run=run, command=f"sweep {name}")
    return parser


def read_plan(options: argparse.Namespace) -> tuple[SweepConfig, DataFacts, list[PlannedRun]]:
    config = read_sweep(options.config)
    data = read_facts(config.data)
    try:
        return config, data, plan_runs(config, data)
    except ValueError as error:
        raise ValueError(f"{options.config}: {error}") from error


# -- plan


def run_plan(options: argparse.Namespace) -> None:
    check_count("--jobs", options.jobs, low=1)
    config, data, runs = read_plan(options)
    rows = planned_rows(config, runs)
    todo = [run for run in runs if run.id not in rows]
    print_rows(plan_table(runs, rows))
    rate, source = rate_for(options.flops_per_second, config, runs, rows)
    seconds = expected_seconds(todo, data, config, flops_per_second=rate, jobs=options.jobs)
    summary = {
        "runs": len(runs),
        "to_run": len(todo),
        "training_flops": sum(run.training_flops for run in runs),
        "training_flops_to_run": sum(run.training_flops for run in todo),
        "tokens": sum(run.tokens for run in runs),
        "repeating": sum(run.epochs > 1 for run in runs),
        "flops_per_second": rate,
        "expected_seconds": round(seconds, 1),
    }
    print(
        f"\n{len(runs)} runs, {shown(float(summary['training_flops']))} training FLOPs, {summary['tokens']:,} tokens; "
        f"{len(runs) - len(todo)} have a row.\nThe other {len(todo)}: about {duration(seconds)}, {options.jobs} at a "
        f"time at {shown(rate)} FLOP/s each ({source}).\n"
    )
    print(json.dumps(summary))


def plan_table(runs: Sequence[PlannedRun], rows: dict[str, Row]) -> list[dict[str, object]]:
    """A line for each arm, budget and depth; its seeds together."""
    groups: dict[tuple[str, float, float], list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault((run.arm, run.budget, run.depth), []).append(run)
    table = []
    for group in groups.values():
        facts = group[0].facts()
        line = {name.replace("_", " "): facts[name] for name in SHOWN_FACTS}
        line |= {
            "budget": f"{facts['budget']:g}",
            "FLOPs a token": round(facts["flops_per_token"]),
            "epochs": f"{facts['epochs']:.2f}{' repeats' if facts['epochs'] > 1 else ''}",
            "seeds": len(group),
            "with a row": sum(run.id in rows for run in group),
        }
        table.append(line)
    return table


def planned_rows(config: SweepConfig, runs: Sequence[PlannedRun]) -> dict[str, Row]:
    """The rows that the planned runs have, by id, in the order of the plan."""
    rows = {row.id: row for row in results_of(config).rows()}
    return {run.id: rows[run.id] for run in runs if run.id in rows}


def rate_for(
    given: float | None, config: SweepConfig, runs: Sequence[PlannedRun], rows: dict[str, Row]
) -> tuple[float, str]:
    """FLOP/s of a run, and how that is known."""
    if given is not None:
        check_number("--flops-per-second", given, low=1.0)
        return given, "as given"
    known = rate_of_rows(rows.values())
    if known is not None:
        return known, "of the finished runs"
    middle = sorted(runs, key=lambda run: run.flops_per_token)[len(runs) // 2]
    return measured_rate(middle, config.threads), "of a few steps just now"


# -- run


def run_run(options: argparse.Namespace) -> None:
    check_count("--jobs", options.jobs, low=1)
    config, _, runs = read_plan(options)
    executor: Executor = Local(config.threads)
    if options.executor == "slurm":
        executor = Submitted(Path(config.out) / "submitit", config.slurm, threads=config.threads)
    with SweepProgress(len(runs), sum(run.training_flops for run in runs)) as show:

        def tell(progress: Progress) -> None:
            if progress.row is not None:
                show.say(outcome(progress.row))
            show(progress.num_done, progress.num_failed, progress.flops, progress.flops_given_up)

        rows = run_sweep(config, runs, executor, jobs=options.jobs, retry=options.retry, on_progress=tell)
    failed = [row for row in rows if not row.finished]
    for row in failed:
        print(f"failed: {row.name}: {printable(row.reason or '')}")
    if failed:
        print("to try them again: --retry\n")
    print(
        json.dumps(
            {"results": str(results_of(config).path), "finished": len(rows) - len(failed), "failed": len(failed)}
        )
    )


def outcome(row: Row) -> str:
    if not row.finished:
        return f"{row.name}: failed: {printable(row.reason or '')}"
    return f"{row.name}: validation loss {row.validation_loss:.4f}"


# -- fit and plot


def run_fit(options: argparse.Namespace) -> None:
    # Here, because the other commands need no scipy.
    from modepth.sweep.fit import fit_rows  # noqa: PLC0415
    from modepth.sweep.page import comparison_table, law_table, optimum_table, pooled_table  # noqa: PLC0415

    config, _, runs = read_plan(options)
    rows = planned_rows(config, runs)
    fit = fit_rows(list(rows.values()), config.baseline)
    print("Best size at each budget, by validation loss")
    print_rows(optimum_table(fit.optima))
    if fit.comparisons:
        print(f"\nArms less {fit.baseline}, in test loss")
        print_rows(comparison_table(fit.comparisons))
    if fit.pooled:
        print(f"\nArms less {fit.baseline} over all sizes, in percent of its test loss")
        print_rows(pooled_table(fit.pooled))
    print("\nBest size against budget")
    print_rows(law_table(fit.power_laws))
    left_out = [*fit.left_out, *((name, "not run yet") for name in missing(runs, rows))]
    if left_out:
        print("\nLeft out:", *(f"{name}: {printable(reason)}" for name, reason in left_out), sep="\n  ")
    print()
    print(json.dumps({**asdict(fit), "left_out": left_out}))


def run_plot(options: argparse.Namespace) -> None:
    from modepth.sweep.fit import fit_rows  # noqa: PLC0415
    from modepth.sweep.page import write_sweep_page  # noqa: PLC0415

    config, _, runs = read_plan(options)
    rows = planned_rows(config, runs)
    fit = fit_rows(list(rows.values()), config.baseline)
    out = Path(config.out if options.out is None else options.out)
    written = write_sweep_page(list(rows.values()), fit, out, missing=missing(runs, rows))
    print("written:", *written, sep="\n  ")
    print(json.dumps({"runs": len(rows), "written": [str(path) for path in written]}))


def missing(runs: Sequence[PlannedRun], rows: dict[str, Row]) -> list[str]:
    return [cell_name((run.arm, run.budget, run.depth, run.seed)) for run in runs if run.id not in rows]


def print_rows(rows: Sequence[Mapping[str, object]]) -> None:
    """Rows of one shape as a table."""
    if rows:
        print_table([list(rows[0]), *([shown(value) for value in row.values()] for row in rows)])

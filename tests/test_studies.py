"""The studies in benchmarks/: their plans hold, and what they say about trained routers is what a slow loop finds."""

import argparse
import json
import runpy
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from modepth.data import open_tokens, read_windows, spread_windows
from modepth.loading import load
from modepth.run import train
from modepth.sweep.config import read_sweep
from modepth.sweep.plan import plan_runs
from tests.documents import ROOT
from tests.sweeps import FACTS
from tests.training import CONFIG, make_data, new_model

STUDIES = sorted((ROOT / "benchmarks" / "studies").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_plans_runs_of_equal_cost(path):
    config = read_sweep(path)
    facts = FACTS._replace(vocab_size=512, tokens=dict.fromkeys(FACTS.tokens, 48_000_000))
    runs = plan_runs(config, facts)
    assert {run.arm for run in runs} == set(config.arms)
    assert all(0.99 * run.budget < run.training_flops <= run.budget for run in runs)
    dense = {run.depth: run.flops_per_token for run in runs if run.arm == "dense"}
    sized = [run for run in runs if config.arms[run.arm].size == "flops"]
    assert all(abs(run.flops_per_token / dense[run.depth] - 1) < 0.15 for run in sized)


@pytest.fixture
def analysis(monkeypatch):
    """The command, given its words."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = runpy.run_path(str(ROOT / "benchmarks" / "routing_analysis.py"))

    def command(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["routing_analysis.py", *map(str, words)])
        names["main"]()

    return command


def test_what_is_said_of_trained_routers_is_what_a_slow_loop_finds(tmp_path, analysis):
    train(new_model(max_length=16), CONFIG, make_data(tmp_path), tmp_path / "run")
    shutil.copy(tmp_path / "validation.tokens", tmp_path / "test.tokens")
    analysis(tmp_path, tmp_path / "run", "--windows", 6, "--out", tmp_path / "rows.jsonl")
    row = json.loads((tmp_path / "rows.jsonl").read_text())

    model = load(tmp_path / "run").eval()
    tokens = open_tokens(tmp_path / "test.tokens")
    windows_BT = read_windows(tokens, spread_windows(tokens, 16, 6), 16)
    with torch.no_grad():
        out = model(windows_BT[:, :-1])
    (routing,) = out.routings
    entropies = {False: [], True: []}
    for window in range(6):
        for position in range(16):
            p_V = out.logits_BTV[window, position].softmax(-1)
            chosen = routing.chosen_BT[window, position].item()
            entropies[chosen].append(-sum(p * p.log() for p in p_V).item())
    means = {int(chosen): sum(values) / len(values) for chosen, values in entropies.items() if values}
    for chosen, (entropy, count) in row["entropy_by_times_chosen"].items():
        assert count == len(entropies[chosen == "1"])
        assert entropy == pytest.approx(means[int(chosen)], abs=1e-3)
    assert row["tokens"] == 96
    assert row["share"] == {"1": pytest.approx(len(entropies[True]) / 96, abs=1e-4)}
    assert row["score_above_half"] == {"1": pytest.approx((routing.logit_BT > 0).float().mean().item(), abs=1e-4)}
    assert row["entropy_of_chosen_less_others"] == {"1": pytest.approx(means[1] - means[0], abs=1e-3)}
    assert set(row["predictor"]["1"]) >= {"accuracy", "precision", "recall", "f1"}


def test_a_dense_run_has_no_routing_to_look_at_and_is_refused(tmp_path, analysis, capsys):
    train(new_model(max_length=16, routing=None), CONFIG, make_data(tmp_path), tmp_path / "dense")
    with pytest.raises(SystemExit):
        analysis(tmp_path, tmp_path / "dense")
    assert "dense is a dense model: it routes no token" in capsys.readouterr().err


# -- what a layer is worth


@pytest.fixture(scope="module")
def worth():
    return runpy.run_path(str(ROOT / "benchmarks" / "worth.py"))


def test_worth_compares_the_model_without_the_layers_with_the_dense_one_and_routed_ones_between(worth):
    options = argparse.Namespace(layers=5, dim=48)
    none, some, random, whole = (
        worth["model_of"](options, capacity, selection, 512)
        for capacity, selection in ((0.0, "topk"), (0.25, "topk"), (0.25, "random"), (1.0, "topk"))
    )
    assert [(each.num_layers, each.routed_layers) for each in (none, some, random, whole)] == [
        (3, ()),
        (5, (1, 3)),
        (5, (1, 3)),
        (5, ()),
    ]
    assert replace(some, routing=None) == replace(random, routing=None) == whole == replace(none, num_layers=5)
    assert (some.routing.selection, random.routing.selection) == ("topk", "random")


def test_shares_of_cost_and_worth_are_the_planted_ones(worth):
    def row(capacity, selection, cost, loss, seed):
        return {"capacity": capacity, "selection": selection, "step_flops": cost, "test_loss": loss, "seed": seed}

    rows = [
        row(*facts, loss + noise, seed)
        for seed, noise in ((1, -0.01), (2, 0.01))
        for *facts, loss in ((0.0, "topk", 100, 3.5), (1.0, "topk", 200, 3.0), (0.25, "topk", 120, 3.2))
    ]
    rows += [row(0.25, "random", 120, 3.4, 1)]
    found = worth["shares"](rows)
    assert found["topk"] == [(0.25, pytest.approx(0.2), pytest.approx(0.6))]
    assert found["random"] == [(0.25, pytest.approx(0.2), pytest.approx(0.2))]

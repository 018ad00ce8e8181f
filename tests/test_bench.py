"""`modepth bench`: contestants compute the same, what is compared is what was measured."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from modepth.bench import contest
from modepth.bench.contest import Shape, compared, contestants, run_cell
from modepth.bench.table import bench_table
from modepth.bench.worker import Bench
from modepth.cli import main
from modepth.plots.growth import cost_growth
from modepth.run_folder import RunLock


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(contest, "LAYERS", {64: 3})
    monkeypatch.setattr(contest, "DECODE_LAYERS", 3)
    monkeypatch.setattr(contest, "PROMPT", 30)
    monkeypatch.setattr(contest, "NEW_TOKENS", 5)


@pytest.mark.usefixtures("small")
def test_contestants_of_a_training_cell_compute_the_same_tokens_and_weigh_the_same():
    rows = {row["contestant"]: row for row in run_cell(Shape("train", 64, 128, 2, 0.25), 2, 1, None)}
    assert list(rows) == ["dense", "routed", "llama", "converted"]
    assert rows["dense"]["computed"] == rows["llama"]["computed"] == [256, 256, 256]
    assert rows["routed"]["computed"] == rows["converted"]["computed"] == [256, 64, 256]
    assert rows["dense"]["parameters"] == rows["llama"]["parameters"]
    assert rows["routed"]["parameters"] == rows["converted"]["parameters"] == rows["dense"]["parameters"] + 64
    assert rows["routed"]["peak_bytes"] < 0.95 * rows["dense"]["peak_bytes"]
    assert 0 < rows["routed"]["lowest"] <= rows["routed"]["of_dense"] <= rows["routed"]["highest"]
    assert rows["dense"]["of_dense"] == 1.0


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_compiled_contestants_compute_the_same_tokens():
    beside = ["dense_compiled", "routed_compiled", "llama_compiled"]
    rows = {row["contestant"]: row for row in run_cell(Shape("train", 64, 128, 2, 0.25), 1, 1, None, beside)}
    assert list(rows) == ["dense", "routed", *beside]
    assert rows["llama_compiled"]["computed"] == [256, 256, 256]
    assert rows["routed_compiled"]["computed"] == [256, 64, 256]
    assert rows["routed_compiled"]["of_dense"] > 0


def test_who_takes_part_depends_on_the_task_and_on_who_is_asked_for():
    for task in ("train", "prefill", "decode"):
        assert [name for name, _ in contestants(task, None, [])] == ["dense", "routed"]
        assert [name for name, _ in contestants(task, None, ["llama", "soup"])] == ["dense", "routed", "llama"]
        compiled = ["routed_compiled"] if task == "train" else []
        assert [name for name, _ in contestants(task, None, ["routed_compiled"])] == ["dense", "routed", *compiled]


@pytest.mark.usefixtures("small")
def test_a_peer_that_does_not_run_is_a_row_that_says_why(monkeypatch):
    monkeypatch.setattr(contest, "peer_python", lambda folder, name: Path(sys.executable) if name == "soup" else None)
    monkeypatch.setattr(
        contest, "CONTESTANTS", {name: contest.CONTESTANTS[name] for name in ("dense", "routed", "soup")}
    )
    rows = {row["contestant"]: row for row in run_cell(Shape("prefill", 64, 128, 2, 0.25), 1, 1, Path("peers"))}
    assert rows["soup"]["failed"] == "soup cannot build: ModuleNotFoundError: No module named 'soup_cli'"
    assert rows["routed"]["of_dense"] > 0


@pytest.mark.usefixtures("small")
def test_a_peer_that_fails_at_its_first_step_is_a_row_too(monkeypatch):
    monkeypatch.setattr(contest, "PEERS", {"llama": []})
    monkeypatch.setattr(
        contest, "CONTESTANTS", {name: contest.CONTESTANTS[name] for name in ("dense", "routed", "llama")}
    )
    monkeypatch.setattr(contest, "peer_python", lambda folder, name: Path(sys.executable))
    do = contest.Worker.do

    def fail(worker, what, **options):
        if what == "prefill" and worker.name == "llama":
            raise ValueError("llama cannot prefill: it is lost")
        return do(worker, what, **options)

    monkeypatch.setattr(contest.Worker, "do", fail)
    rows = {row["contestant"]: row for row in run_cell(Shape("prefill", 64, 128, 2, 0.25), 1, 1, Path("peers"))}
    assert rows["llama"]["failed"] == "llama cannot prefill: it is lost"
    assert rows["routed"]["of_dense"] > 0


def test_a_peer_is_compiled_in_its_own_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(contest, "peer_python", lambda folder, name: folder / name if name == "soup" else None)
    found = dict(contestants("train", tmp_path, ["soup", "soup_compiled", "mixture_of_depth"]))
    assert found["soup_compiled"] == found["soup"] == tmp_path / "soup"
    assert "mixture_of_depth" not in found


@pytest.mark.usefixtures("small")
def test_a_generation_is_compared_with_the_least_that_it_could_take():
    rows = {row["contestant"]: row for row in run_cell(Shape("decode", 64, 35, 2, 0.25), 1, 1, None)}
    assert list(rows) == ["dense", "routed", "llama", "converted"]
    assert math.isfinite(rows["routed"]["ideal_of_dense"])  # how large is noise: see the next test
    assert "ideal_of_dense" not in rows["converted"]
    assert rows["dense"]["parameters"] == rows["llama"]["parameters"]  # though ours are packed
    assert rows["routed"]["parameters"] == rows["converted"]["parameters"]


def test_ratios_are_those_of_each_round_and_the_ideal_swaps_the_routed_blocks():
    times = {
        "dense": [{"seconds": 2.0, "blocks": 1.0}, {"seconds": 4.0, "blocks": 2.0}, {"seconds": 1.0, "blocks": 0.5}],
        "routed": [{"seconds": 1.5, "blocks": 0.2}, {"seconds": 2.0, "blocks": 0.4}, {"seconds": 0.9, "blocks": 0.1}],
    }
    row = compared(times, "routed")
    assert row == {"ms": 1500.0, "of_dense": 0.75, "lowest": 0.5, "highest": 0.9, "ideal_of_dense": 0.6}


def generation(num_logits):
    """A bench whose contestant makes logits so many times; blocks take 100 s of the prompt, 1 s of each token after."""
    bench = Bench("anywhere.py")
    bench.model = torch.nn.Module()
    bench.model.lm_head = torch.nn.Identity()
    bench.tokens = torch.zeros(2, 9)

    def generate(tokens, count):
        assert tokens.shape == (2, 7)
        for number in range(num_logits):
            bench.entry.block_seconds += 1 if number else 100
            bench.model.lm_head(tokens)

    bench.entry = SimpleNamespace(generate=generate, block_seconds=5.0)
    return bench


def test_a_tokens_time_is_without_the_prompts():
    answer = generation(4).decode(prompt=7, count=4)
    assert answer["blocks"] == 1.0
    assert 0 < answer["seconds"] < 1


def test_logits_that_are_not_made_once_a_token_are_refused():
    with pytest.raises(ValueError, match="4 tokens were asked for, 3 times logits were made"):
        generation(3).decode(prompt=7, count=4)


@pytest.mark.parametrize("size", [10**6, 2 * 10**6])
def test_peak_memory_is_what_a_step_allocates_beyond_weights_and_gradients(size):
    bench = Bench("anywhere.py")
    bench.model = torch.nn.Linear(1, 1, bias=False)
    bench.optimizer = torch.optim.AdamW(bench.model.parameters())
    bench.tokens = None
    bench.entry = SimpleNamespace(loss=lambda _: (bench.model.weight * torch.ones(size)).sum())
    assert bench.memory()["peak"] == pytest.approx(8 * size, rel=0.01)


def row_of(contestant, of_dense, **more):
    cell = {"task": "train", "dim": 256, "length": 1024, "batch": 4, "capacity": 0.125, "flop_ratio": 0.62}
    measured = {"of_dense": of_dense, "lowest": of_dense, "highest": of_dense}
    return {"contestant": contestant, **cell, **measured, **more}


ROWS = [
    row_of("dense", 1.0, peak_bytes=200, ms=10.0),
    row_of("routed", 0.6, peak_bytes=100, ms=6.0),
    row_of("llama", 1.25, peak_bytes=300, ms=12.5),
    row_of("converted", 0.75, peak_bytes=200, ms=7.5),
    row_of("soup", 0.0, failed="soup cannot build: it is too hot"),
]


def test_a_line_of_the_table_has_ratios_to_dense_and_of_the_converted_to_its_own_base():
    head, line = bench_table(ROWS)
    assert dict(zip(head, line, strict=True)) == {
        "task": "train",
        "dim": "256",
        "length": "1024",
        "batch": "4",
        "capacity": "0.125",
        "routed": "0.600 (0.60-0.60)",
        "least": "0.620",
        "converted": "0.600",
        "llama": "1.250 (1.25-1.25)",
        "soup": "failed",
        "mixture_of_depth": "",
        "memory": "0.500",
    }


def test_compiled_steps_have_columns_where_there_are_some():
    head, line = bench_table([*ROWS, row_of("dense_compiled", 0.9, peak_bytes=100, ms=9.0)])
    assert dict(zip(head, line, strict=True))["dense_compiled"] == "0.900 (0.90-0.90)"
    assert "routed_compiled" not in head


def test_who_took_no_part_leaves_an_empty_column():
    head, line = bench_table(ROWS[:2])
    found = dict(zip(head, line, strict=True))
    assert found["routed"] == "0.600 (0.60-0.60)"
    assert found["llama"] == found["converted"] == ""


def step_rows():
    """Of two widths, of which 256 has more rows; the routed step takes what its FLOPs say."""
    return [
        row_of(
            name,
            ratio,
            dim=dim,
            length=length,
            batch=2,
            capacity=capacity,
            ms=ratio * length,
            peak_bytes=ratio * length * 2e3,
        )
        for dim, lengths in ((256, (512, 256)), (512, (1024,)))
        for length in lengths
        for capacity in (0.5, 0.125)
        for name, ratio in (("dense", 1.0), ("routed", 0.62))
    ]


def test_the_picture_of_costs_draws_what_was_measured_beside_what_flops_say():
    long_time, long_memory, wide_time, wide_memory = cost_growth(step_rows()).axes
    drawn = [line.get_xydata().tolist() for line in long_time.lines]
    assert drawn == [[[256, 0.5], [512, 0.5]], [[256, 0.31], [512, 0.31]], [[256, 0.31], [512, 0.31]]]
    assert [line.get_xydata().tolist() for line in long_memory.lines] == [
        [[256, 1], [512, 1]],
        [[256, 0.62], [512, 0.62]],
    ]
    drawn = [line.get_xydata().tolist() for line in wide_time.lines]
    assert drawn == [[[0.125, 1], [0.5, 1]], [[0.125, 0.62], [0.5, 0.62]], [[0.125, 0.62], [0.5, 0.62]]]
    assert [line.get_ydata().tolist() for line in wide_memory.lines] == [[1, 1], [0.62, 0.62]]
    assert wide_time.get_xlabel() == "capacity (rows of 256)"


def test_without_training_steps_there_is_no_picture():
    assert cost_growth([row_of("dense", 1.0, task="decode")]) is None


COMMAND = ["--tasks", "train", "--dims", "256", "--lengths", "1024", "--capacities", "0.125"]


def test_a_bench_goes_on_where_it_was(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["bench", str(tmp_path), *COMMAND]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["measured"] == 0
    assert "0.600 (0.60-0.60)" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_a_step_of_more_tokens_is_another_cell(tmp_path, capsys):
    rows = [{**row, "batch": 16} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["bench", str(tmp_path), *COMMAND, "--tokens", "16384"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["measured"] == 0


def test_two_benches_of_one_folder_are_refused(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with RunLock(tmp_path):
        assert main(["bench", str(tmp_path), *COMMAND]) == 2
    assert "in use by process" in capsys.readouterr().err
    assert not (tmp_path / "table.md").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dims", "300"], "--dims must be among 256, 512, 1024, got 300"),
        (["--capacities", "1.5"], "capacity must be a number in (0, 1], got 1.5"),
        (["--tasks", "sing"], "--tasks must be one of"),
        (["--rounds", "0"], "--rounds must be a whole number >= 1, got 0"),
        (["--tokens", "0"], "--tokens must be a whole number >= 1, got 0"),
        (["--beside", "swan"], "--beside must be among llama, converted, soup, mixture_of_depth, dense_compiled"),
        (["--beside", "llama", "soup_compiled"], "--beside soup_compiled needs the peers' environments: add --peers"),
        (["--threads", "0"], "--threads must be a whole number >= 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path, capsys, flags, message):
    assert main(["bench", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""TensorBoard: its event files say what log.jsonl says, however often a run was stopped."""

import time
from dataclasses import replace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from modepth.config import LossWeights
from modepth.run import train
from modepth.tracking import Tracker
from tests.training import CONFIG, make_data, new_model, rows_of

CONFIG = replace(CONFIG, eval_every=4)  # so that a measurement falls on a checkpoint
ALL = {"scalars": 0}  # keep every scalar, not a sample


def new_routed_model():
    return new_model(losses=LossWeights(router=0.01, z=0.001), num_layers=5)


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path)


def accumulated(run, **options):
    return EventAccumulator(str(run / "tensorboard"), size_guidance=ALL, **options)


def read_scalars(events):
    events.Reload()
    return sorted((tag, each.step, each.value) for tag in events.Tags()["scalars"] for each in events.Scalars(tag))


def logged_scalars(run):
    """The same from log.jsonl, its numbers in the precision of an event file."""
    found = []
    for row in rows_of(run):
        values = {}
        if "validation" in row:
            values["validation/loss"] = row["validation"]["loss"]
            values["validation/bits_per_byte"] = row["validation"]["bits_per_byte"]
        elif "loss" in row:
            for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "share_of_peak"):
                values[f"train/{name}"] = row[name]
            for name in ("predictor", "router", "z"):
                values[f"router/{name}"] = row["router_losses"][name]
            for layer in (1, 3):
                for name in ("share", "gate", "cutoff", "f1"):
                    values[f"{name}/layer_{layer}"] = row["layers"][str(layer)][name]
        found += [(tag, row["step"], float(np.float32(value))) for tag, value in values.items()]
    return sorted(found)


def test_the_event_file_says_what_the_log_says(data, tmp_path):
    with Tracker() as tracker:
        train(new_routed_model(), CONFIG, data, tmp_path / "run", on_start=tracker.start, on_row=tracker)
    found = read_scalars(accumulated(tmp_path / "run"))
    assert found == logged_scalars(tmp_path / "run")
    assert len(found) == 12 * (5 + 3 + 2 * 4) + 3 * 2


def test_a_row_can_be_read_as_soon_as_it_is_logged(data, tmp_path, monkeypatch):
    write, seen = RecordWriter.write, []

    def write_slowly(self, record):
        time.sleep(0.005)
        write(self, record)

    monkeypatch.setattr(RecordWriter, "write", write_slowly)
    with Tracker() as tracker:

        def look(row):
            tracker(row)
            seen.append(read_scalars(accumulated(tmp_path / "run")) == logged_scalars(tmp_path / "run"))

        train(new_routed_model(), replace(CONFIG, steps=3), data, tmp_path / "run", on_start=tracker.start, on_row=look)
    assert seen == [True] * 4


def test_a_run_that_goes_on_has_no_step_twice_and_loses_none(data, tmp_path):
    def train_until(last_step):
        with Tracker() as tracker:

            def on_row(row):
                tracker(row)
                if row["step"] == last_step and "loss" in row:
                    raise KeyboardInterrupt

            train(new_routed_model(), CONFIG, data, tmp_path / "run", on_start=tracker.start, on_row=on_row)

    with pytest.raises(KeyboardInterrupt):
        train_until(6)
    (tmp_path / "run" / "tensorboard" / "notes.txt").write_text("mine")
    watching = accumulated(tmp_path / "run")
    assert ("validation/loss", 4) in {(tag, step) for tag, step, _ in read_scalars(watching)}
    for _ in range(2):  # the second finds a run that is done
        train_until(None)
        expected = logged_scalars(tmp_path / "run")
        assert read_scalars(accumulated(tmp_path / "run", purge_orphaned_data=False)) == expected
        assert read_scalars(watching) == expected
    assert (tmp_path / "run" / "tensorboard" / "notes.txt").read_text() == "mine"


def test_a_run_begun_without_tensorboard_shows_all_of_it(data, tmp_path):
    train(new_routed_model(), replace(CONFIG, steps=8), data, tmp_path / "run")
    with Tracker() as tracker:
        train(new_routed_model(), CONFIG, data, tmp_path / "run", on_start=tracker.start, on_row=tracker)
    assert read_scalars(accumulated(tmp_path / "run")) == logged_scalars(tmp_path / "run")

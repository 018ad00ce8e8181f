"""Small runs for the tests: their data, model, config and rows."""

import json
import os
import signal

import torch

from modepth import Transformer, checkpoint
from modepth.config import TrainConfig
from modepth.data import TokenWriter, open_tokens
from modepth.run import Data
from modepth.train import Batch
from tests.checkpoints import names_in
from tests.oracles import tiny_config, tiny_tokens

CONFIG = TrainConfig(
    steps=12, batch_size=4, length=16, eval_every=5, eval_windows=3, save_every=4, log_every=1, learning_rate=1e-2
)


def make_data(folder, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name in Data._fields:
        writer = TokenWriter(folder / f"{name}.tokens", vocab_size=97)
        writer.add((torch.rand(3000, generator=generator).square() * 97).long().tolist(), num_bytes=6000)
        writer.finish()
    return read_data(folder)


def read_data(folder):
    return Data(*(open_tokens(folder / f"{name}.tokens") for name in Data._fields))


def new_model(seed=11, **changes):
    torch.manual_seed(seed)
    return Transformer(tiny_config(**{"num_layers": 3, "dropout": 0.1, "predictor": 5} | changes))


def ragged_batch():
    tokens = tiny_tokens(B=8, T=16)
    # A token that repeats all before it has their very state, and a tie is decided by rounding.
    tokens[:, 0] = (tokens[:, 1] + 1) % 97
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(8, 16, generator=torch.Generator().manual_seed(1)) < 0.2, -100)
    targets[2] = -100
    return Batch(tokens, targets, torch.tensor([16, 3, 9, 16, 1, 12, 0, 7]))


def rows_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


TIMING = {"seconds", "tokens_per_second", "flops_per_second", "share_of_peak"}


def assert_same_end(run, other):
    """The last checkpoints are equal byte for byte, nothing was left behind, and the logs tell one story."""
    ends = [checkpoint.newest(each) for each in (run, other)]
    assert ends[0].step == ends[1].step
    files = [{path.name: path.read_bytes() for path in end.folder.glob("*.safetensors")} for end in ends]
    assert files[0] == files[1]
    assert names_in(run) == names_in(other)
    told = [[{k: v for k, v in row.items() if k not in TIMING} for row in rows_of(each)] for each in (run, other)]
    assert told[0] == told[1]


def stop_after(step):
    """For a run's `on_row`: end it, politely, in the step of this number."""

    def on_row(row):
        if row["step"] == step and "loss" in row:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_row


def contents(folder):
    """Every file below a folder, by name: to see that nothing changed."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

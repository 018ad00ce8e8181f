"""A run's rows as TensorBoard scalars, in RUN/tensorboard. Needs the extra `track`.

log.jsonl is the truth: a run that is started writes its kept rows anew, so what a killed run logged of steps that
are done again is gone, and a run first trained without TensorBoard shows all of it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modepth.runlog import RunLog

OF_A_STEP = ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "share_of_peak")
OF_A_LAYER = ("share", "gate", "cutoff", "f1")
OF_VALIDATION = ("loss", "bits_per_byte")


def check_tensorboard() -> None:
    """Raise, before there is anything to lose, if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401, PLC0415
    except ImportError as error:
        raise ValueError("--tensorboard needs tensorboard: pip install 'modepth[track]'") from error


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by tag; router losses stand apart from the language model's.

    >>> scalars({"step": 7, "loss": 5.5, "router_losses": {"predictor": 0.7}, "layers": {"3": {"share": 0.25}}})
    {'train/loss': 5.5, 'router/predictor': 0.7, 'share/layer_3': 0.25}
    """
    found = {f"train/{name}": row[name] for name in OF_A_STEP if name in row}
    found |= {f"router/{name}": value for name, value in row.get("router_losses", {}).items()}
    for layer, values in row.get("layers", {}).items():
        found |= {f"{name}/layer_{layer}": values[name] for name in OF_A_LAYER if name in values}
    for layer, values in row.get("experts", {}).items():
        found |= {f"experts_{name}/layer_{layer}": value for name, value in values.items()}
    return found | {f"validation/{name}": row["validation"][name] for name in OF_VALIDATION if "validation" in row}


class Tracker:
    """Writes rows from when it is told the folder of the run: `with Tracker() as tracker`."""

    def __init__(self) -> None:
        self.writer: Any = None

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def start(self, run: Path) -> None:
        """Begin with the rows that the run keeps; its folder must be held, so that no one else writes there."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        folder = run / "tensorboard"
        for path in folder.glob("events.out.tfevents.*"):
            os.truncate(path, 0)  # removed, a TensorBoard that reads it now would wait for it for ever
        self.writer = SummaryWriter(folder, purge_step=0)  # which tells it to forget what it has read
        for row in RunLog(run).rows():
            self.write(row)
        self.writer.flush()

    def __call__(self, row: Mapping[str, Any]) -> None:
        """A new row; those before `start` are in the log that it reads."""
        if self.writer is not None:
            self.write(row)
            self.writer.flush()

    def write(self, row: Mapping[str, Any]) -> None:
        for tag, value in scalars(row).items():
            self.writer.add_scalar(tag, value, row["step"])

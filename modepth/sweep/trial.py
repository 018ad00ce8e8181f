"""One run of a sweep, in a process of its own: python -m modepth.sweep.trial RUN

    RUN/trial.json     what to do, written by the sweep
    RUN/output.txt     what the process printed
    RUN/result.json    what it came to; there only when all was measured
    RUN/failure.txt    why it ended without

The training is `modepth.run.train` and nothing else, so a run that was killed goes on from its checkpoint. The test
split is measured once, at the end. The process ends with the sweep that started it, however that ends.
"""

import json
import math
import os
import platform
import statistics
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from modepth.allocator import keep_freed_memory
from modepth.config import ModelConfig, TrainConfig, build, model_config_from_dict
from modepth.files import read_json, remove
from modepth.model import Transformer
from modepth.run import DivergedError, Stopped, open_data, open_split, train
from modepth.run_data import remember_data
from modepth.runlog import RunLog
from modepth.schedule import window_length
from modepth.textfile import replace_text
from modepth.train import evaluate
from modepth.world import World, join_world

# Of the loss of guessing, ln(vocabulary), where a model is that has learned nothing or has forgotten it all.
NEARLY_GUESSING = 0.999


def main(folder: Path) -> int:
    """Perform the trial of a folder; the exit code."""
    (folder / "failure.txt").unlink(missing_ok=True)
    try:
        perform(folder)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal
    except (DivergedError, FloatingPointError) as error:
        replace_text(folder / "failure.txt", f"diverged: {error}\n")
        return 1
    except Exception as error:
        traceback.print_exc()
        replace_text(folder / "failure.txt", f"crashed: {type(error).__name__}: {error}\n")
        return 1
    return 0


def perform(folder: Path) -> None:
    """Train, measure, and write the result, or do what is left of that."""
    if (folder / "result.json").exists():
        return
    trial = read_json(folder / "trial.json")
    torch.set_num_threads(trial["threads"])
    keep_freed_memory()
    world = join_world()
    model_config = model_config_from_dict(trial["config"]["model"])
    train_config: TrainConfig = build(TrainConfig, trial["config"]["train"], where="train.")
    data = Path(trial["data"])
    torch.manual_seed(train_config.seed)
    model = Transformer(model_config)
    last = train(
        model,
        train_config,
        open_data(data, model_config, world),
        folder,
        world=world,
        on_start=lambda run: remember_data(run, data),
    )
    check_learned(last["validation"]["loss"], model_config)
    result = {
        "validation_loss": last["validation"]["loss"],
        "validation_topk_loss": last["validation"].get("topk_loss"),
        **losses_on_test(model, train_config, data, trial["test_windows"], world),
        "step_seconds": step_seconds(folder, train_config, model_config),
        "hardware": hardware(world),
        "torch": torch.__version__,
        "threads": trial["threads"],
        "jobs": trial["jobs"],
    }
    replace_text(folder / "result.json", json.dumps(result, allow_nan=False) + "\n")
    if not trial["keep"]:
        remove(folder / "checkpoints")


def check_learned(loss: float, model: ModelConfig) -> None:
    """A run can be broken by too high a learning rate and still be finite: all its logits equal, say."""
    guessing = math.log(model.vocab_size)
    if loss > NEARLY_GUESSING * guessing:
        raise DivergedError(
            f"the validation loss is {loss:.4g}, no better than guessing, {guessing:.4g}: lower the learning rate, "
            "or raise the budget"
        )


def losses_on_test(
    model: Transformer, config: TrainConfig, data: Path, num_windows: int | None, world: World
) -> dict[str, float | None]:
    """The test split, causal; of a model whose training looks ahead also in that mode."""
    tokens = open_split(data, "test", model.config)
    losses: dict[str, float | None] = {"test_loss": None, "test_topk_loss": None}
    modes = {"test_loss": "causal"} | ({"test_topk_loss": "topk"} if model.config.looks_ahead else {})
    for name, mode in modes.items():
        losses[name] = evaluate(
            model,
            tokens,
            length=window_length(config, model.config),
            num_windows=tokens.count if num_windows is None else num_windows,
            batch_size=config.micro_batch or config.batch_size,
            world=world,
            mode="causal" if mode == "causal" else "topk",
        )["loss"]
    return losses


def step_seconds(folder: Path, config: TrainConfig, model: ModelConfig) -> float:
    """The median over the logged steps, evaluations and checkpoints left out."""
    rates = [row["tokens_per_second"] for row in RunLog(folder).rows() if "tokens_per_second" in row]
    return config.batch_size * window_length(config, model) / statistics.median(rates)


def hardware(world: World) -> str:
    """The name of the GPU, or of the CPU and the number of its cores that we may use."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def end_with_parent() -> None:
    """Leave when the process that holds the other end of stdin is gone: what is saved is enough to go on from."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a trial came to, if it did."""
    result: dict[str, Any] | None = read_json(folder / "result.json") if (folder / "result.json").exists() else None
    return result


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(Path(sys.argv[1])))

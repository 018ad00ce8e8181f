"""Parts of a step as we do them against what they replaced: what each is worth.

    python benchmarks/parts.py [--rounds N] [--out FILE]

    norm, rotation, gate, attention, loss   forward and backward, against torch's own operations
    memory                                  a dense training step whose freed memory is kept, against glibc's defaults
    layout                                  a token of a dense model made ready to generate, against the same as it was

float32, the two sides interleaved, CPU time; a ratio is the median over the rounds. Last line: JSON.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modepth import ModelConfig, Transformer
from modepth.attention import causal_attention
from modepth.bench.contest import Shape
from modepth.blocks import rotary
from modepth.cache import Cache
from modepth.config import TrainConfig
from modepth.cross_entropy import loss_of_logits, loss_of_states
from modepth.fused import RMSNorm, rotate, swiglu
from modepth.ready import ready_to_generate
from modepth.run import ALONE
from modepth.train import make_optimizer, train_step, windows_to_batch

TOKENS, VOCABULARY, HEAD = 4096, 2048, 64
WIDTHS = {256: 704, 512: 1408, 1024: 2752}  # and those of their feed-forwards

Row = dict[str, Any]


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(ours: Callable[[], float], other: Callable[[], float], rounds: int) -> Row:
    ours(), other()
    times = [(ours(), other()) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in times)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3),
        "ours_ms": round(1000 * statistics.median(a for a, _ in times), 3),
    }


def there_and_back(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], float]:
    """The seconds of a forward and a backward."""
    slope = torch.randn_like(run(*inputs))

    def measured() -> float:
        return cpu_seconds(lambda: torch.autograd.grad(run(*inputs), inputs, slope))

    return measured


def parts(rounds: int) -> Iterator[Row]:
    rope = rotary(torch.arange(TOKENS).unsqueeze(0), HEAD, 10000.0)
    targets, real = torch.randint(VOCABULARY, (1, TOKENS)), torch.ones(1, TOKENS, dtype=torch.bool)
    pairs = {
        "norm": [lambda x, weight, kind=kind: with_weight(kind, x, weight) for kind in (RMSNorm, nn.RMSNorm)],
        "rotation": [lambda x, turn=turn: turn(x, rope) for turn in (rotate, rotate_by_parts)],
        "gate": [swiglu, lambda gate, up: F.silu(gate) * up],
        "loss": [
            lambda x, head: loss_of_states(x, head, targets, real),
            lambda x, head: loss_of_logits(x @ head.T, targets, real),
        ],
        "attention": [causal_attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)],
    }

    def both(what: str, *shapes: tuple[int, ...], **at: int) -> Row:
        inputs = [(0.2 * torch.randn(shape)).requires_grad_() for shape in shapes]  # as large as in a model
        ours, other = (there_and_back(run, *inputs) for run in pairs[what])
        return row(what, ours, other, rounds, **at)

    for dim, mlp_dim in WIDTHS.items():
        yield both("norm", (1, TOKENS, dim), (dim,), dim=dim)
        yield both("rotation", (1, TOKENS, dim // HEAD, HEAD), dim=dim)
        yield both("gate", (1, TOKENS, mlp_dim), (1, TOKENS, mlp_dim), dim=dim)
        yield both("loss", (1, TOKENS, dim), (VOCABULARY, dim), dim=dim)
    for length in (256, 512, 1024, 2048):
        yield both("attention", *[(TOKENS // length, 4, length, HEAD)] * 3, length=length)


def row(what: str, ours: Callable[[], float], other: Callable[[], float], rounds: int, **at: int) -> Row:
    return {"what": what, **at, **compare(ours, other, rounds)}


def with_weight(kind: type[nn.RMSNorm], x: Tensor, weight: Tensor) -> Tensor:
    norm = kind(x.shape[-1], eps=1e-5)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def rotate_by_parts(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope.unsqueeze(2).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


# -- freed memory: a setting of the process, so a process for each side

KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # as modepth.allocator sets it


class Stepper:
    """A process that takes a training step at a time."""

    def __init__(self, dim: int, settings: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--steps-of", str(dim)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )

    def step(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def take_steps(dim: int) -> None:
    config = Shape("train", dim, 1024, TOKENS // 1024, 1.0).config
    training = TrainConfig(steps=1)
    model = Transformer(ModelConfig(**{**vars(config), "routing": None})).train()
    optimizer = make_optimizer(model, training)
    batch = windows_to_batch(torch.randint(VOCABULARY, (TOKENS // 1024, 1025)))
    for _ in range(3):  # until the heap is as large as it will be
        train_step(model, optimizer, batch, training, ALONE)
    for _ in sys.stdin:
        print(cpu_seconds(lambda: train_step(model, optimizer, batch, training, ALONE)), flush=True)


def memory(rounds: int) -> Iterator[Row]:
    for dim in WIDTHS:
        kept, given_back = Stepper(dim, KEEP_FREED_MEMORY), Stepper(dim, {})
        with kept.process, given_back.process:
            yield row("memory", kept.step, given_back.step, min(rounds, 7), dim=dim)


# -- generation


def layout(rounds: int) -> Iterator[Row]:
    plain = Transformer(ModelConfig(vocab_size=VOCABULARY, num_layers=12, dim=512, num_heads=8, max_length=512)).eval()
    ready = ready_to_generate(copy.deepcopy(plain))
    for batch in (1, 2, 8, 32):
        sides = [token_seconds(model, batch) for model in (ready, plain)]
        yield row("layout", *sides, rounds, dim=512, batch=batch)


def token_seconds(model: Transformer, batch: int) -> Callable[[], float]:
    caches = [Cache(model.config, expected=512) for _ in range(batch)]
    with torch.inference_mode():
        model.extend([list(range(256))] * batch, caches)

    def measured() -> float:
        with torch.inference_mode():
            seconds = cpu_seconds(lambda: model.lm_head(model.extend([[1]] * batch, caches)[0]))
        for cache in caches:
            cache.crop(256)
        return seconds

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of each comparison (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=("parts", "memory", "layout"))
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    parser.add_argument("--steps-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.steps_of is not None:
        take_steps(options.steps_of)
        return
    rows = []
    for measure in (parts, memory, layout):
        if options.only is not None and measure.__name__ not in options.only:
            continue
        for each in measure(options.rounds):
            rows.append(each)
            at = ", ".join(f"{key} {each[key]}" for key in ("dim", "length", "batch") if key in each)
            spread = f"{each['lowest']:.2f}-{each['highest']:.2f}"
            print(f"{each['what']:10} {at:18} {each['ratio']:6.3f} ({spread})  {each['ours_ms']} ms", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(each) + "\n" for each in rows))
    print(json.dumps({"rows": rows, "torch": torch.__version__, "threads": options.threads}))


if __name__ == "__main__":
    main()

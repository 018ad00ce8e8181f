"""Parts of a step as we do them against what they replaced: what each is worth.

    python benchmarks/parts.py [--only floor ready] [--rounds N] [--threads N] [--out FILE]

    norm, rotation, gate, attention, loss   forward and backward, against torch's own operations
    map                                     a product of states and weights, forward and backward, against torch's own
    floor                                   a dense training step against its products and its attention alone
    rate                                    attention against a product of as many FLOPs, what is masked not counted
    memory                                  a dense training step whose freed memory is kept, against glibc's defaults
    ready                                   a token of a dense model made ready to generate, against the same as it was

float32, the two sides in turns, wall time on as many threads as steps have: what is faster on one thread need not be on
two. A ratio is the median over the rounds. Last line: JSON.
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
from modepth.allocator import keep_freed_memory
from modepth.attention import causal_attention
from modepth.bench.contest import TOKENS, Shape
from modepth.blocks import rotary
from modepth.cache import Cache
from modepth.config import TrainConfig
from modepth.cross_entropy import loss_of_logits, loss_of_states
from modepth.fused import RMSNorm, rotate, swiglu
from modepth.products import Linear, Mapped, product
from modepth.ready import ready_to_generate
from modepth.run import ALONE
from modepth.train import make_optimizer, train_step, windows_to_batch

VOCABULARY, HEAD = 2048, 64
WIDTHS = {256: 704, 512: 1408, 1024: 2752}  # and those of their feed-forwards

Row = dict[str, Any]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


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
        return seconds(lambda: torch.autograd.grad(run(*inputs), inputs, slope))

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
        "map": [Mapped.apply, F.linear],
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
        for tokens in (TOKENS, TOKENS // 8):
            yield both("map", (1, tokens, dim), (mlp_dim, dim), dim=dim, tokens=tokens)
    for length in (320, 512, 640):
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
            [sys.executable, __file__, "--steps-of", str(dim), "--threads", str(torch.get_num_threads())],
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
    step = training_step(dense_model(dim, 1024))
    for _ in range(3):  # until the heap is as large as it will be
        step()
    for _ in sys.stdin:
        print(step(), flush=True)


def dense_model(dim: int, length: int) -> Transformer:
    config = Shape("train", dim, length, TOKENS // length, 1.0).config
    return Transformer(ModelConfig(**{**vars(config), "routing": None})).train()


def training_step(model: Transformer) -> Callable[[], float]:
    """The seconds of a step."""
    training, length = TrainConfig(steps=1), model.config.max_length
    optimizer = make_optimizer(model, training)
    batch = windows_to_batch(torch.randint(VOCABULARY, (TOKENS // length, length + 1)))
    return lambda: seconds(lambda: train_step(model, optimizer, batch, training, ALONE))


def memory(rounds: int) -> Iterator[Row]:
    for dim in WIDTHS:
        kept, given_back = Stepper(dim, KEEP_FREED_MEMORY), Stepper(dim, {})
        with kept.process, given_back.process:
            yield row("memory", kept.step, given_back.step, min(rounds, 7), dim=dim)


# -- what a step cannot do without


def floor(rounds: int) -> Iterator[Row]:
    keep_freed_memory()
    for dim, length in ((256, 256), (256, 1024), (512, 1024), (1024, 1024)):
        model = dense_model(dim, length)
        yield row("floor", training_step(model), products_alone(model), min(rounds, 7), dim=dim, length=length)


def products_alone(model: Transformer) -> Callable[[], float]:
    """The seconds of the products of a step, forward and backward, and of its attention, on any numbers."""
    config = model.config
    maps = [each.weight.detach() for each in model.modules() if isinstance(each, Linear)]
    inputs = {width: torch.randn(TOKENS, width) for weight in maps for width in weight.shape}
    heads = (TOKENS // config.max_length, config.num_heads, config.max_length, config.head_dim)
    attention = there_and_back(causal_attention, *(torch.randn(heads, requires_grad=True) for _ in range(3)))

    def multiply() -> None:
        for weight_OI in maps:
            x, slope = inputs[weight_OI.shape[1]], inputs[weight_OI.shape[0]]
            product(x, weight_OI), product(slope, weight_OI.T), slope.T @ x

    def measured() -> float:
        return seconds(multiply) + sum(attention() for _ in model.layers)

    return measured


def rate(rounds: int) -> Iterator[Row]:
    dim, mlp_dim = next(iter(WIDTHS.items()))
    sides = [torch.randn(shape, requires_grad=True) for shape in ((1, TOKENS, dim), (mlp_dim, dim))]
    multiply, multiply_flops = there_and_back(Mapped.apply, *sides), 6 * TOKENS * dim * mlp_dim
    for length in (256, 512, 1024, 2048, 4096):
        heads = (TOKENS // length, dim // HEAD, length, HEAD)
        attend = there_and_back(causal_attention, *(torch.randn(heads, requires_grad=True) for _ in range(3)))
        attend_flops = 6 * TOKENS * length * dim  # two products of T by T by E a head, half of them masked
        yield row("rate", attend, lambda more=attend_flops / multiply_flops: more * multiply(), rounds, length=length)


# -- generation


def ready(rounds: int) -> Iterator[Row]:
    plain = Transformer(ModelConfig(vocab_size=VOCABULARY, num_layers=12, dim=512, num_heads=8, max_length=512)).eval()
    rebuilt = ready_to_generate(copy.deepcopy(plain))
    for batch in (1, 2, 8, 32):
        sides = [token_seconds(model, batch) for model in (rebuilt, plain)]
        yield row("ready", *sides, rounds, dim=512, batch=batch)


def token_seconds(model: Transformer, batch: int) -> Callable[[], float]:
    caches = [Cache(model.config, expected=512) for _ in range(batch)]
    with torch.inference_mode():
        model.extend([list(range(256))] * batch, caches)

    def measured() -> float:
        with torch.inference_mode():
            taken = seconds(lambda: model.lm_head(model.extend([[1]] * batch, caches)[0]))
        for cache in caches:
            cache.crop(256)
        return taken

    return measured


MEASURES = (parts, floor, rate, memory, ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of each comparison (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=[each.__name__ for each in MEASURES])
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    parser.add_argument("--steps-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.steps_of is not None:
        take_steps(options.steps_of)
        return
    rows = []
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("")
    for measure in MEASURES:
        if options.only is not None and measure.__name__ not in options.only:
            continue
        for each in measure(options.rounds):
            rows.append(each)
            at = ", ".join(f"{key} {each[key]}" for key in ("dim", "tokens", "length", "batch") if key in each)
            spread = f"{each['lowest']:.2f}-{each['highest']:.2f}"
            print(f"{each['what']:10} {at:22} {each['ratio']:6.3f} ({spread})  {each['ours_ms']} ms", flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(each) + "\n")
    print(json.dumps({"rows": rows, "torch": torch.__version__, "threads": options.threads}))


if __name__ == "__main__":
    main()

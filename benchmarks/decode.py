"""Decoding with a routed decoder against the dense one of the same shape, beside what its skips could save at best.

    python benchmarks/decode.py [--quick] [--steps N] [--out FILE]
    python benchmarks/decode.py --batches 1 4 16 64 --head-dim 32 --prompt 64 --threads 1  # as serve.py serves

One process, float32, one step of each model in turn; ratios are medians over the steps. Thresholds are
calibrated, so that a random model routes its capacity. The ideal step is the dense one, with the blocks of the
routed layers replaced by what those of the routed model took for the rows they were given: what remains above it
is routing. Then, for the batches of ROUNDS, the same dense weights in transformers' `generate`. Last line: JSON.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from modepth import ModelConfig, RoutingConfig, Sampling, Transformer, calibrate
from modepth.generation import Row, advance, generate, inference, start_rows
from modepth.hf import export

VOCABULARY = 2048
NEW = 256
ROUNDS = {1: 5, 8: 3, 32: 2}  # against transformers, by batch


def shape(dim: int, layers: int, head_dim: int) -> ModelConfig:
    return ModelConfig(vocab_size=VOCABULARY, num_layers=layers, dim=dim, num_heads=dim // head_dim, max_length=1024)


def prompts_of(batch: int, longest: int) -> list[list[int]]:
    """Of mixed lengths, from half the longest on."""
    generator = torch.Generator().manual_seed(1)
    lengths = [longest - (longest // 2) * row // batch for row in range(batch)]
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


class BlockTimer:
    """Adds up the seconds that some layers spend in their attention and feed-forward."""

    def __init__(self, model: Transformer, layers: tuple[int, ...]) -> None:
        self.seconds = 0.0
        for number in layers:
            for name in ("attend", "feed"):
                setattr(model.layers[number], name, self.timed(getattr(model.layers[number], name)))

    def timed(self, run):  # type: ignore[no-untyped-def]
        def timed_run(*arguments):  # type: ignore[no-untyped-def]
            start = time.perf_counter()
            out = run(*arguments)
            self.seconds += time.perf_counter() - start
            return out

        return timed_run


class Decoder:
    """A model with a batch of rows, decoding one token of each at a time."""

    def __init__(
        self, model: Transformer, routing: RoutingConfig | None, prompts: list[list[int]], routed: tuple[int, ...]
    ) -> None:
        self.model, self.routing = model, routing
        others = tuple(set(range(model.config.num_layers)) - set(routed))
        self.routed_blocks, self.other_blocks = BlockTimer(model, routed), BlockTimer(model, others)
        self.rows: list[Row] = start_rows(model, prompts, Sampling(max_tokens=NEW), None)
        with inference(model):
            advance(model, self.rows, routing=routing)

    def step(self) -> dict[str, float]:
        for timer in (self.routed_blocks, self.other_blocks):
            timer.seconds = 0.0
        start = time.perf_counter()
        with inference(self.model):
            advance(self.model, self.rows, routing=self.routing)
        return {
            "step": time.perf_counter() - start,
            "routed_blocks": self.routed_blocks.seconds,
            "other_blocks": self.other_blocks.seconds,
        }

    def bytes_ratio(self) -> float:
        caches = [row.cache for row in self.rows]
        return sum(cache.bytes_allocated for cache in caches) / sum(cache.bytes_written for cache in caches)


def measure(
    dense: Transformer, routed: Transformer, routing: RoutingConfig, prompts: list[list[int]], steps: int
) -> dict:
    layers, batch = routed.config.routed_layers, len(prompts)
    ours, beside = Decoder(routed, routing, prompts, layers), Decoder(dense, None, prompts, layers)
    for _ in range(3):
        ours.step(), beside.step()
    times = [(ours.step(), beside.step()) for _ in tqdm(range(steps), desc=f"batch {batch}", leave=False)]
    ratios = sorted(a["step"] / b["step"] for a, b in times)
    ideals = [(b["step"] - b["routed_blocks"] + a["routed_blocks"]) / b["step"] for a, b in times]
    outside = [(b["step"] - b["routed_blocks"] - b["other_blocks"]) / b["step"] for _, b in times]
    while any(len(row.tokens) - row.num_prompt < NEW for row in ours.rows):
        ours.step()
    entries = sum(sum(row.cache.num_entries) for row in ours.rows)
    of_dense = sum(row.cache.length * routed.config.num_layers for row in ours.rows)
    return {
        "d": routed.config.dim,
        "layers": routed.config.num_layers,
        "batch": batch,
        "time_ratio": round(statistics.median(ratios), 4),
        "ideal_ratio": round(statistics.median(ideals), 4),
        "over_ideal": round(
            statistics.median(r / i for r, i in zip((a["step"] / b["step"] for a, b in times), ideals, strict=True)), 4
        ),
        "lowest": round(ratios[0], 4),
        "highest": round(ratios[-1], 4),
        "outside_blocks": round(statistics.median(outside), 4),
        "cache_entries_ratio": round(entries / of_dense, 4),
        "allocated_over_written": round(ours.bytes_ratio(), 4),
        "dense_ms": round(1000 * statistics.median(b["step"] for _, b in times), 2),
        "steps": steps,
    }


def against_transformers(dense: Transformer, batch: int, prompt: int, rounds: int, new: int) -> dict[str, float]:
    """Our seconds over those of transformers' generate on the same weights: for prompts of equal length and `new`
    tokens each, and for the tokens after the first alone."""
    theirs = export(dense.config, dense.state_dict())
    theirs.generation_config.eos_token_id = None
    tokens = torch.randint(VOCABULARY, (batch, prompt), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)

    def ours(count: int) -> list[list[int]]:
        return [each.tokens for each in generate(dense, tokens.tolist(), Sampling(max_tokens=count))]

    def other(count: int) -> list[list[int]]:
        with torch.inference_mode():
            out = theirs.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True)
        return out[:, prompt:].tolist()

    if ours(4) != other(4):
        print("note: transformers chose other tokens somewhere, as rounding may")
    whole, steps = [], []
    for _ in range(rounds):
        first, all_of_them = ([seconds(run, count) for run in (ours, other)] for count in (1, new))
        whole.append(all_of_them[0] / all_of_them[1])
        steps.append((all_of_them[0] - first[0]) / (all_of_them[1] - first[1]))
    return {
        "against_transformers": round(statistics.median(whole), 4),
        "against_transformers_after_the_prompt": round(statistics.median(steps), 4),
    }


def seconds(run: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    run(count)
    return time.perf_counter() - start


@contextmanager
def plain_layers(model: Transformer) -> Iterator[None]:
    """Take the timers off again."""
    yield
    for layer in model.layers:
        for name in ("attend", "feed"):
            layer.__dict__.pop(name, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a narrower model, fewer steps")
    parser.add_argument("--steps", type=int, default=60, help="steps of each model (default: %(default)s)")
    parser.add_argument("--capacity", type=float, default=0.125, help="default: %(default)s")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--head-dim", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the longest prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = shape(256, 8, options.head_dim) if options.quick else shape(512, 12, options.head_dim)
    batches, steps = ((1, 8), 12) if options.quick else (options.batches, options.steps)
    dense = Transformer(config).eval()
    routed = Transformer(replace(config, routing=RoutingConfig(capacity=options.capacity, every=2))).eval()
    held_out = torch.randint(VOCABULARY, (16, 512))
    routing = calibrate(routed, held_out, options.capacity)
    rows = []
    for batch in batches:
        with plain_layers(dense), plain_layers(routed):
            row = measure(dense, routed, routing, prompts_of(batch, options.prompt), steps)
        print(
            f"batch {batch:2}: time {row['time_ratio']:.3f} of dense, ideal {row['ideal_ratio']:.3f}, over ideal "
            f"{row['over_ideal']:.3f}; outside the blocks {row['outside_blocks']:.3f}; allocated/written "
            f"{row['allocated_over_written']:.3f}"
        )
        if batch in ROUNDS:
            rounds, new = (1, 16) if options.quick else (ROUNDS[batch], 64)
            row |= against_transformers(dense, batch, options.prompt, rounds, new)
            print(
                f"          dense / transformers {row['against_transformers']:.3f}, after the prompt "
                f"{row['against_transformers_after_the_prompt']:.3f}"
            )
        rows.append(row)
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps({**row, **machine}) + "\n" for row in rows))
    print(json.dumps({"rows": rows, **machine}))


if __name__ == "__main__":
    main()

"""The server under load: tokens a second and waiting times, routed and dense, at 1 to 64 parallel streams.

    python benchmarks/serve.py [--quick] [--threads N] [--rounds N] [--out FILE]

A process serves each model, this one asks them in turns over HTTP; a row has the medians of the rounds. Beside it is
the bare decode loop at that batch (`advance` on the same rows, no server) with as many threads. Then long prompts
arrive while streams run: the time between the tokens of those, against the median step. Weights are random, thresholds
calibrated. Last line: JSON.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from modepth import ModelConfig, RoutingConfig, Sampling, Transformer, calibrate, ready_to_generate
from modepth.generation import advance, inference, start_rows
from modepth.serve.http import Settings
from modepth.serve.limits import Limits
from modepth.serve.listen import new_listener, serve
from modepth.serve.served import Served

VOCABULARY = 2048
CAPACITY = 0.125


class Numbers:
    """A tokenizer for a model of random weights: ids as they are, and no end of text."""

    vocab_size = VOCABULARY
    end_of_text = VOCABULARY
    end_of_text_name = ""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f" {token}" for token in ids)

    def to_json(self) -> str:
        return "{}"


class Size(NamedTuple):
    dim: int
    layers: int
    prompt: int
    new: int
    streams: tuple[int, ...]
    long_prompt: int


FULL = Size(dim=512, layers=12, prompt=64, new=128, streams=(1, 4, 16, 64), long_prompt=768)
QUICK = Size(dim=64, layers=4, prompt=8, new=12, streams=(1, 4), long_prompt=64)


def models_of(size: Size) -> dict[str, tuple[Transformer, RoutingConfig | None]]:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCABULARY, num_layers=size.layers, dim=size.dim, num_heads=size.dim // 32, max_length=1024
    )
    dense = Transformer(config).eval()
    routed = Transformer(replace(config, routing=RoutingConfig(capacity=CAPACITY, every=2))).eval()
    held_out = torch.randint(VOCABULARY, (8, 256))
    calibrated = calibrate(routed, held_out, CAPACITY)
    return {"dense": (ready_to_generate(dense), None), "MoD": (ready_to_generate(routed), calibrated)}


def serve_one(name: str, size: Size, threads: int, port: Any) -> None:
    """In a process of its own: one of the two models, its port told through a pipe."""
    torch.set_num_threads(threads)
    model, routing = models_of(size)[name]
    listener = new_listener("127.0.0.1", 0)
    port.send(listener.getsockname()[1])
    dial = {} if routing is None else {CAPACITY: routing}
    served = Served(name=name, model=model, tokenizer=Numbers(), dial=dial)
    serve(lambda: served, Settings(limits=Limits()), listener, drain=5)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Stream(NamedTuple):
    """When it was asked for, and when each of its tokens came."""

    start: float
    times: list[float]

    @property
    def first(self) -> float:
        return self.times[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


async def stream(client: httpx.AsyncClient, prompt: list[int], new: int, capacity: float | None) -> Stream:
    # Not greedy, at temperature 1: random models repeat themselves.
    body = {"prompt": prompt, "max_tokens": new, "temperature": 1.0, "seed": 1, "stream": True, "capacity": capacity}
    start, times = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return Stream(start, times)


async def parallel(client: httpx.AsyncClient, count: int, size: Size, capacity: float | None) -> list[Stream]:
    prompts = [prompt_of(size.prompt, seed) for seed in range(count)]
    return await asyncio.gather(*(stream(client, prompt, size.new, capacity) for prompt in prompts))


async def in_company(
    client: httpx.AsyncClient, count: int, size: Size, capacity: float | None
) -> tuple[list[Stream], list[Stream]]:
    """The streams, and long prompts that arrive one after the other while they run."""
    running = asyncio.ensure_future(parallel(client, count, size, capacity))
    long: list[Stream] = []
    while not running.done() or not long:
        long.append(await stream(client, prompt_of(size.long_prompt, 100 + len(long)), 1, capacity))
    return await running, long


def bare(model: Transformer, routing: RoutingConfig | None, count: int, size: Size) -> tuple[float, float]:
    """Of the decode loop alone: tokens a second, prompts included, as the streams' are; seconds of the median step."""
    rows = start_rows(
        model,
        [prompt_of(size.prompt, seed) for seed in range(count)],
        Sampling(max_tokens=size.new, temperature=1.0),
        None,
    )
    times = [time.perf_counter()]
    for _ in range(size.new):
        with inference(model):
            advance(model, rows, routing=routing)
        times.append(time.perf_counter())
    step = statistics.median(after - before for before, after in pairwise(times[1:]))
    return count * size.new / (times[-1] - times[0]), step


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row_of(streams: Sequence[Stream]) -> dict[str, float]:
    tokens = sum(len(each.times) for each in streams)
    seconds = max(each.times[-1] for each in streams) - min(each.start for each in streams)
    gaps = [gap for each in streams for gap in each.gaps]
    firsts = [each.first for each in streams]
    named = {"first_p50": (firsts, 0.5), "first_p95": (firsts, 0.95), "gap_p50": (gaps, 0.5), "gap_p95": (gaps, 0.95)}
    return {"tokens_per_second": tokens / seconds} | {
        f"{name}_ms": 1000 * quantile(*how) for name, how in named.items()
    }


async def measure(urls: dict[str, str], size: Size, rounds: int) -> list[dict[str, Any]]:
    models, limits = models_of(size), httpx.Limits(max_connections=200)
    rows = []
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=600, limits=limits))
            for name, url in urls.items()
        }
        for name, client in clients.items():
            await ready(client)
            await parallel(client, 2, size, capacity_of(models[name][1]))  # to warm up
        for count in size.streams:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
            for _ in range(rounds):
                for name, client in clients.items():
                    found[name].append(await one_round(client, *models[name], count, size))
            for name, of_rounds in found.items():
                medians = {key: round(statistics.median(each[key] for each in of_rounds), 4) for key in of_rounds[0]}
                rows.append({"model": name, "streams": count, **medians})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def capacity_of(routing: RoutingConfig | None) -> float | None:
    return None if routing is None else CAPACITY


async def one_round(
    client: httpx.AsyncClient, model: Transformer, routing: RoutingConfig | None, count: int, size: Size
) -> dict[str, float]:
    row = row_of(await parallel(client, count, size, capacity_of(routing)))
    rate, step = bare(model, routing, count, size)
    company, long = await in_company(client, count, size, capacity_of(routing))
    gap = quantile([gap for each in company for gap in each.gaps], 0.95)
    return row | {
        "bare_tokens_per_second": rate,
        "bare_step_ms": 1000 * step,
        "over_bare": row["tokens_per_second"] / rate,
        "gap_p95_with_long_prompts_ms": 1000 * gap,
        "gap_p95_over_bare_step": gap / step,
        "gap_p95_over_median_gap": 1000 * gap / row["gap_p50_ms"],  # of the same streams without long prompts
        "long_prompts": len(long),
        "long_first_p50_ms": 1000 * statistics.median(each.first for each in long),
    }


async def ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.ConnectError:
            pass
        await asyncio.sleep(0.1)
    raise TimeoutError("the server did not become ready")


def compare(rows: list[dict[str, Any]]) -> None:
    """Against one stream of the same model, and the dense one at the same number of streams."""
    rates = {(row["model"], row["streams"]): row["tokens_per_second"] for row in rows}
    for row in rows:
        row["over_one_stream"] = round(row["tokens_per_second"] / rates[row["model"], 1], 4)
        row["over_dense"] = round(row["tokens_per_second"] / rates["dense", row["streams"]], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few tokens: to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a model (default: torch's)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = QUICK if options.quick else FULL
    processes = multiprocessing.get_context("spawn")
    servers, urls = [], {}
    for name in ("dense", "MoD"):
        receiver, sender = processes.Pipe(duplex=False)
        servers.append(processes.Process(target=serve_one, args=(name, size, options.threads, sender)))
        servers[-1].start()
        urls[name] = f"http://127.0.0.1:{receiver.recv()}"
    try:
        rows = asyncio.run(measure(urls, size, options.rounds))
    finally:
        for process in servers:
            process.terminate()
            process.join()
    compare(rows)
    machine = {"torch": torch.__version__, "threads": options.threads, "machine": platform.machine()}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps({**row, "rounds": options.rounds, **machine}) + "\n" for row in rows))
    print(json.dumps({"rows": rows, **machine}))


if __name__ == "__main__":
    main()

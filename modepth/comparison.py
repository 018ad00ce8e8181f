"""Runs side by side: what each is and came to, where its routers spent the compute, as one page and pictures.

    OUT/report.html            everything, in one file
    OUT/loss_against_flops.*   PNG and SVG
    OUT/token_map_NAME.*       a snippet of validation text, of each routed run
    OUT/router_scores_NAME.*

Needs the extra `plots`.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modepth import flops
from modepth.data import TokenFile, read_windows, spread_windows
from modepth.depth import read_depth
from modepth.formats import percent
from modepth.generation import generate, run_rows, start_rows
from modepth.model import Transformer
from modepth.plots import Figure, loss_against_flops, save_figure, score_histograms, token_map
from modepth.report import View, read_log, results, write_run_report
from modepth.routing import Router
from modepth.sampling import Sampling
from modepth.tokenizer import Tokenizer
from modepth.trace import record

SNIPPET = 96  # tokens of the map
PROMPT, SAMPLE = 32, 96  # tokens of the sample of text
SCORED = 64  # windows whose scores are counted


class Picture(NamedTuple):
    name: str  # of its files
    caption: str
    figure: Figure


class Opened(NamedTuple):
    """A run that was loaded for a comparison."""

    folder: Path
    model: Transformer


def compare(
    runs: Mapping[str, Opened], validation: TokenFile, tokenizer: Tokenizer, out: Path, *, title: str, intro: str
) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Write the page and the pictures; returns the table, a column a run, and the paths of what was written."""
    said = {name: speak(run.model, validation, tokenizer) for name, run in runs.items()}
    facts = {name: model_facts(run.model) | said[name].facts for name, run in runs.items()}
    logs = {name: read_log(run.folder) for name, run in runs.items()}
    routed = {name: run.model for name, run in runs.items() if run.model.config.routing is not None}
    maps = {name: map_picture(name, model, validation, tokenizer) for name, model in routed.items()}
    scores = [score_picture(name, model, validation) for name, model in routed.items()]
    page = write_run_report(
        out / "report.html",
        {name: run.folder for name, run in runs.items()},
        title=title,
        intro=intro,
        facts=facts,
        views=[
            View(f"Depth of {name}", picture.caption, view, picture.figure) for name, (picture, view) in maps.items()
        ],
        figures=[(picture.caption, picture.figure) for picture in scores],
        sections=[(f"A sample of {name}", speech.text, ()) for name, speech in said.items()],
    )
    curves = Picture("loss_against_flops", "", loss_against_flops(logs))
    pictures = (curves, *(picture for picture, _ in maps.values()), *scores)
    files = [save_figure(picture.figure, out / picture.name)[0] for picture in pictures]
    return {name: facts[name] | results(logs[name]) for name in runs}, [page, *files]


class Speech(NamedTuple):
    """What a model wrote, and at what cost."""

    text: str
    facts: dict[str, object]


def speak(model: Transformer, validation: TokenFile, tokenizer: Tokenizer) -> Speech:
    """Continue the beginning of the validation text, token by token."""
    prompt = validation.ids[: max(1, min(PROMPT, model.config.max_length // 2))].tolist()
    sampling = Sampling(max_tokens=SAMPLE, temperature=0.7, top_p=0.95)
    generate(model, [prompt], Sampling(max_tokens=2))  # the first pass sets kernels up
    rows = start_rows(model, [prompt], sampling, tokenizer)
    start = time.perf_counter()
    text = "".join(each.text for each in run_rows(model, rows))
    seconds = time.perf_counter() - start
    (row,) = rows
    return Speech(
        f"{tokenizer.decode(prompt)} | {text}",
        {
            "decode tokens/s": round((len(row.tokens) - row.num_prompt) / seconds),
            f"cache bytes written by {row.cache.length} tokens": row.cache.bytes_written,
        },
    )


def model_facts(model: Transformer) -> dict[str, object]:
    """What a model is and costs, counted at its own length and capacity."""
    config, length = model.config, model.config.max_length
    layers = f"{config.num_layers}"
    if config.routing is not None:
        layers += f", {len(config.routed_layers)} routed at {percent(config.routing.capacity)}"
    return {
        "layers": layers,
        "parameters": flops.num_parameters(config),
        "FLOPs a token": flops.forward_flops(config, length, half_causal=True) // length,
        f"cache bytes of {length} tokens": flops.cache_bytes(config, length),
    }


def map_picture(
    name: str, model: Transformer, validation: TokenFile, tokenizer: Tokenizer
) -> tuple[Picture, dict[str, object]]:
    """A map of a snippet, decided as generation decides, token by token: to print, and to look into."""
    depth = read_depth(model, validation_windows(model, validation, 1)[0].tolist(), tokenizer)
    # The end of a window: its tokens have the most to look back on.
    tokens = depth["tokens"][-SNIPPET:]
    chosen = [[layer in token["layers"] for token in tokens] for layer in range(depth["num_layers"])]
    picture = Picture(
        f"token_map_{name}",
        f"Which layers of {name} compute each token of a validation snippet, decided token by token.",
        token_map([token["text"] for token in tokens], chosen, depth["routed_layers"]),
    )
    label = f"A validation snippet, read by {name}"
    return picture, {"kind": "depth", "label": label, "depth": {**depth, "tokens": tokens}}


def score_picture(name: str, model: Transformer, validation: TokenFile) -> Picture:
    windows_BT = validation_windows(model, validation, SCORED)
    with torch.no_grad(), record(model) as trace:
        model(windows_BT)
    return Picture(
        f"router_scores_{name}",
        f"Router scores of {windows_BT.numel():,} validation tokens in the routed layers of {name}.",
        score_histograms(*trace.scores(), cutoffs=causal_cutoffs(model)),
    )


def validation_windows(model: Transformer, validation: TokenFile, count: int) -> torch.Tensor:
    length = model.config.max_length
    return read_windows(validation, spread_windows(validation, length, count), length)[:, :-1]


def causal_cutoffs(model: Transformer) -> dict[int, float] | None:
    """The logit from which each layer routes in causal mode, if it goes by a cutoff."""
    routing = model.config.routing
    if routing is None or routing.selection not in ("topk", "soft") or routing.rule != "cutoff":
        return None
    return {router.layer: router.cutoff.item() for router in model.modules() if isinstance(router, Router)}

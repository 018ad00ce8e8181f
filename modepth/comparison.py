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
from modepth.text_stream import token_texts
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
    pictures = {
        name: routing_pictures(name, run.model, validation, tokenizer)
        for name, run in runs.items()
        if run.model.config.looks_ahead
    }
    # What a page can be looked into with stands in place of its figure.
    views = {
        name: View(
            f"Depth of {name}", figures[0].caption, depth_data(name, model, validation, tokenizer), figures[0].figure
        )
        for name, figures in pictures.items()
        if (model := runs[name].model).config.routing is not None
    }
    left = [picture for name, each in pictures.items() for picture in each[name in views :]]
    page = write_run_report(
        out / "report.html",
        {name: run.folder for name, run in runs.items()},
        title=title,
        intro=intro,
        facts=facts,
        views=list(views.values()),
        figures=[(picture.caption, picture.figure) for picture in left],
        sections=[(f"A sample of {name}", speech.text, ()) for name, speech in said.items()],
    )
    curves = Picture("loss_against_flops", "", loss_against_flops(logs))
    drawn = (curves, *(picture for each in pictures.values() for picture in each))
    files = [save_figure(picture.figure, out / picture.name)[0] for picture in drawn]
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
        layers += "" if config.routing.flow == "rejoin" else f" ({config.routing.flow})"
    if config.experts is not None:
        noops = f" and {config.experts.num_noops} no-ops" if config.experts.num_noops else ""
        layers += f", {len(config.expert_layers)} of {config.experts.num_experts} experts{noops}"
    return {
        "layers": layers,
        "parameters": flops.num_parameters(config),
        "FLOPs a token": flops.forward_flops(config, length, half_causal=True) // length,
        f"cache bytes of {length} tokens": flops.cache_bytes(config, length),
    }


def routing_pictures(name: str, model: Transformer, validation: TokenFile, tokenizer: Tokenizer) -> list[Picture]:
    """A map of a snippet and the histograms of the scores, decided as generation decides: token by token."""
    windows_BT = validation_windows(model, validation)
    with torch.no_grad(), record(model) as trace:
        model(windows_BT)
    # The end of a window: its tokens have the most to look back on.
    snippet = windows_BT[0, -SNIPPET:].tolist()
    tokens, config = token_texts(tokenizer, snippet), model.config
    partial_layers = [layer for layer in range(config.num_layers) if config.decided_by(layer) is not None]
    experts = None if config.experts is None else trace.expert_map()[:, -SNIPPET:]
    which = "layers" if experts is None else "layers and experts"
    pictures = [
        Picture(
            f"token_map_{name}",
            f"Which {which} of {name} compute each token of a validation snippet, decided token by token.",
            token_map(tokens, trace.chosen_map()[:, -SNIPPET:], partial_layers, experts),
        )
    ]
    if config.routing is not None:
        scores = score_histograms(*trace.scores(), cutoffs=causal_cutoffs(model))
        caption = f"Router scores of {windows_BT.numel():,} validation tokens in the routed layers of {name}."
        pictures.append(Picture(f"router_scores_{name}", caption, scores))
    return pictures


def depth_data(name: str, model: Transformer, validation: TokenFile, tokenizer: Tokenizer) -> dict[str, object]:
    """The same snippet, to look into."""
    depth = read_depth(model, validation_windows(model, validation)[0].tolist(), tokenizer)
    snippet = {**depth, "num_read": len(depth["tokens"]), "tokens": depth["tokens"][-SNIPPET:]}
    return {"kind": "depth", "label": f"A validation snippet, read by {name}", "depth": snippet}


def validation_windows(model: Transformer, validation: TokenFile) -> torch.Tensor:
    length = model.config.max_length
    return read_windows(validation, spread_windows(validation, length, SCORED), length)[:, :-1]


def causal_cutoffs(model: Transformer) -> dict[int, float] | None:
    """The logit from which each layer routes in causal mode, if it goes by a cutoff."""
    routing = model.config.routing
    if routing is None or routing.selection not in ("topk", "soft") or routing.rule != "cutoff":
        return None
    return {router.layer: router.cutoff.item() for router in model.modules() if isinstance(router, Router)}

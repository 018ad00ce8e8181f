"""`modepth generate`: text from a run, as it comes."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from modepth import flops
from modepth.calibration import calibrate
from modepth.commands.table import LAYOUT, printable
from modepth.config import ModelConfig, RoutingConfig, Rule
from modepth.generation import Row, note_layers, run_rows, start_rows
from modepth.loading import load_native
from modepth.model import Transformer
from modepth.ready import ready_to_generate
from modepth.run_data import data_of, held_out_tokens
from modepth.sampling import Sampling
from modepth.text_stream import TextStream
from modepth.tokenizer import Tokenizer, load_tokenizer

EXAMPLES = """\
examples:
  modepth generate runs/tiny -p "def main("
  modepth generate runs/tiny -p "import " --temperature 0.8 --top-p 0.95 --seed 1
  modepth generate runs/tiny -p "class " --show-depth
  modepth generate runs/tiny -p "class " --capacity 0.25    # thresholds from the run's validation data
"""
CALIBRATION_TOKENS = 2**15
# From cold, few layers, to warm, all of them: of the 256 colours that terminals have.
COLOURS = (27, 33, 39, 44, 43, 42, 76, 148, 184, 214, 208, 202, 196)
END = "\x1b[0m"


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text with the model of a run",
        description="Continue one or more prompts. Each layer computes only the tokens that it routes, decided token "
        "by token. Text comes as it is made; the last line is JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("-p", "--prompt", action="append", required=True, metavar="TEXT", help="repeat it for a batch")
    for flag, kind, help_text in (
        ("max-tokens", int, "new tokens at most"),
        ("temperature", float, "0: always the likeliest token"),
        ("top-k", int, "draw among so many of the likeliest"),
        ("top-p", float, "draw among the likeliest that together reach this probability"),
        ("repetition-penalty", float, "more than 1: against repetition"),
        ("seed", int, "of the draws"),
    ):
        default = getattr(Sampling, flag.replace("-", "_"))
        parser.add_argument(
            f"--{flag}", type=kind, default=default, metavar="N", help=f"{help_text} (default: {default})"
        )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    parser.add_argument("--rule", choices=get_args(Rule), help="how tokens are routed (default: the model's)")
    parser.add_argument("--capacity", type=float, metavar="SHARE", help="route this share, by calibrated thresholds")
    parser.add_argument("--data", metavar="DIR", help="prepared data to calibrate on (default: that of the run)")
    parser.add_argument("--chunk", type=int, metavar="N", help="read prompts in pieces of N tokens")
    parser.add_argument("--show-depth", action="store_true", help="colour each token by the number of its layers")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    model, tokenizer = ready_to_generate(load_native(options.folder)), load_tokenizer(options.folder)
    routing = routing_for(model, options)
    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop_ids=(tokenizer.end_of_text,),
        stop_strings=tuple(options.stop),
    )
    # A text begins where another ended, as in training.
    prompts = [tokenizer.encode(prompt) or [tokenizer.end_of_text] for prompt in options.prompt]
    rows = start_rows(model, prompts, sampling, tokenizer)
    start = time.perf_counter()
    texts = write_text(model, rows, tokenizer, routing, options)
    seconds = time.perf_counter() - start
    facts = [row_facts(row, text) for row, text in zip(rows, texts, strict=True)]
    rate = sum(fact["new_tokens"] for fact in facts) / seconds
    written, dense = (sum(fact[name] for fact in facts) for name in ("cache_bytes", "dense_cache_bytes"))
    print(f"{rate:,.1f} tokens/s; cache {written:,} bytes, {written / dense:.0%} of a dense model's", file=sys.stderr)
    print(json.dumps({"run": options.folder, "tokens_per_second": round(rate, 2), "rows": facts}))


def routing_for(model: Transformer, options: argparse.Namespace) -> RoutingConfig | None:
    """The model's routing with what the flags change."""
    routing = model.config.routing
    if options.rule is None and options.capacity is None:
        return routing
    if routing is None:
        raise ValueError(f"{options.folder}: a dense model, which routes nothing: drop --rule and --capacity")
    if options.rule is not None:
        routing = replace(routing, rule=options.rule)
    if options.capacity is None:
        return routing
    data = Path(options.data) if options.data is not None else data_of(Path(options.folder))
    held_out_BT = held_out_tokens(data, model.config, CALIBRATION_TOKENS)
    return calibrate(model, held_out_BT, options.capacity, routing=routing)


def write_text(
    model: Transformer,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    routing: RoutingConfig | None,
    options: argparse.Namespace,
) -> list[str]:
    """Print the texts, one alone as it comes, several each in one piece; the new texts."""
    texts = [""] * len(rows)
    prompts = [tokenizer.decode(row.tokens) for row in rows]
    streams = len(rows) == 1
    coloured = [TextStream(tokenizer) for _ in rows]
    if streams and not options.show_depth:
        write(prompts[0])
    note = note_layers if options.show_depth else lambda reading: None
    for emitted in run_rows(model, rows, routing, options.chunk, note):
        texts[emitted.row] += emitted.text
        if streams and options.show_depth:
            sys.stdout.write(in_colours(rows[0], coloured[0]))
            sys.stdout.flush()
        elif streams:
            write(emitted.text)
    for number, row in enumerate(rows):
        if not streams:
            print(f"--- prompt {number + 1}")
            sys.stdout.write(in_colours(row, coloured[number]) if options.show_depth else "")
            write("" if options.show_depth else prompts[number] + texts[number])
        if options.show_depth:
            unread = row.tokens[len(row.layers) :]  # so no layer computed it
            write("".join(coloured[number].token_texts(unread, last=True)))
        print()
    if options.show_depth:
        print(legend(model))
    return texts


def write(text: str) -> None:
    print(printable(text, keep=LAYOUT), end="", flush=True)


def in_colours(row: Row, before: TextStream) -> str:
    """The tokens after those `before` that were read, each in the colour of its depth."""
    start, end = len(before.tokens), len(row.layers)
    texts = before.token_texts(row.tokens[start:end], last=False)
    return "".join(
        paint(printable(text, keep=LAYOUT), len(layers), row.cache.config)
        for text, layers in zip(texts, row.layers[start:], strict=True)
    )


def paint(text: str, depth: int, config: ModelConfig) -> str:
    shallowest = config.num_layers - len(config.routed_layers)
    place = 1.0 if depth == config.num_layers else (depth - shallowest) / max(1, len(config.routed_layers))
    return f"\x1b[38;5;{COLOURS[round(place * (len(COLOURS) - 1))]}m{text}{END}"


def legend(model: Transformer) -> str:
    config = model.config
    depths = range(config.num_layers - len(config.routed_layers), config.num_layers + 1)
    return "layers: " + " ".join(paint(str(depth), depth, config) for depth in depths)


def row_facts(row: Row, text: str) -> dict[str, Any]:
    config = row.cache.config
    return {
        "text": text,
        "prompt_tokens": row.num_prompt,
        "new_tokens": len(row.tokens) - row.num_prompt,
        "reason": row.reason,
        "cache_bytes": row.cache.bytes_written,
        "dense_cache_bytes": flops.cache_bytes(flops.dense(config), row.cache.length),
    }

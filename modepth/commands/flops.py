"""`modepth flops`: count a model, dense beside routed."""

import argparse
import json

from modepth import flops
from modepth.commands.table import millions, print_table, ratio
from modepth.config import ModelConfig, read_model_config
from modepth.validation import check_count

EXAMPLES = """\
examples:
  modepth flops model.yaml
  modepth flops model.yaml --length 2048 --value-bytes 2

where model.yaml holds the fields of ModelConfig, or has them under `model`:
  vocab_size: 2048
  num_layers: 12
  dim: 256
  num_heads: 4
  routing: {capacity: 0.125, every: 2}
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "flops",
        help="count FLOPs, parameters and cache bytes of a model",
        description="FLOPs per layer of a model, beside those of the dense model of the same shape; "
        "parameters; cache bytes. The last line is JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML or JSON file with the fields of ModelConfig")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default: the config's max_length)")
    parser.add_argument("--value-bytes", type=int, default=4, help="bytes of a cached number (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    config = read_model_config(options.config)
    length = config.max_length if options.length is None else options.length
    check_count("--length", length, low=1)
    check_count("--value-bytes", options.value_bytes, low=1)
    print(f"One sequence of {length} tokens. FLOPs of a forward, causal attention counted in full.\n")
    print_table(layer_rows(config, length))
    print()
    totals = count_totals(config, length, options.value_bytes)
    beside = count_totals(flops.dense(config), length, options.value_bytes)
    rows = [["", "this model", "dense", "ratio"]]
    rows += [[name, f"{totals[name]:,}", f"{beside[name]:,}", ratio(totals[name], beside[name])] for name in totals]
    print_table(rows)
    print()
    print(json.dumps({"length": length, "model": keyed(totals), "dense": keyed(beside)}))


def keyed(totals: dict[str, int]) -> dict[str, int]:
    """The names of a table as keys for programs."""
    return {name.replace(",", "").replace(" ", "_"): number for name, number in totals.items()}


def layer_rows(config: ModelConfig, length: int) -> list[list[str]]:
    rows = [["layer", "attends", "feeds", "attention", "mlp", "router", "predictor", "total", "dense", "ratio"]]
    dense_layers = flops.layer_flops(flops.dense(config), length)
    for layer, dense in zip(flops.layer_flops(config, length), dense_layers, strict=True):
        parts = (layer.attention, layer.mlp, layer.router, layer.predictor, layer.total, dense.total)
        rows.append(
            [f"{layer.layer}{' routed' if layer.routed else ''}", str(layer.num_attended), str(layer.num_fed)]
            + [millions(part) for part in parts]
            + [ratio(layer.total, dense.total)]
        )
    logits = millions(flops.logits_flops(config, length))
    return [*rows, ["logits", "", "", "", "", "", "", logits, logits, ratio(1, 1)]]


def count_totals(config: ModelConfig, length: int, value_bytes: int) -> dict[str, int]:
    totals = {}
    for title, count in (("forward", flops.forward_flops), ("training step", flops.training_flops)):
        for logits in (True, False):
            for half_causal in (False, True):
                name = f"{title}, {'with' if logits else 'without'} logits, causal {'half' if half_causal else 'full'}"
                totals[name] = count(config, length, logits=logits, half_causal=half_causal)
    totals["parameters"] = flops.num_parameters(config)
    totals["cache bytes"] = flops.cache_bytes(config, length, value_bytes=value_bytes)
    return totals

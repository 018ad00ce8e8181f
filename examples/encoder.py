"""Recall the marked one of 20 steps: a dense encoder, one that computes a quarter of the steps, and a control.

Each step shows one of 8 symbols, and one step is marked; the encoder must say which symbol it shows. Run it with
`python examples/encoder.py`: three small encoders are trained in under a minute, and the last line is JSON.
`--seed N` draws other sequences and weights.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional as F

from modepth import build, num_routed

NUM_STEPS, NUM_SYMBOLS, WIDTH = 20, 8, 32
FORMS = {
    "dense": {"capacity_ratio": 1.0, "gate": "one"},
    "topk": {"capacity_ratio": 0.25},
    "random": {"capacity_ratio": 0.25, "routing": "random"},
}


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, each step a symbol and whether it is marked, and the symbol that was marked. The last never is."""
    symbol = torch.randint(NUM_SYMBOLS, (count, NUM_STEPS), generator=generator)
    place = torch.randint(NUM_STEPS - 1, (count, 1), generator=generator)
    marked = torch.arange(NUM_STEPS) == place
    x = torch.cat((F.one_hot(symbol, NUM_SYMBOLS), marked.unsqueeze(-1)), dim=-1)
    return x.float(), symbol[marked]


def accuracy_after_training(options: dict, num_updates: int = 250, seed: int = 0) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "num_heads": 2, "num_layers": 2, "dropout": 0.0, "window_size": NUM_STEPS}
    encoder = build(embed_dim=NUM_SYMBOLS + 1, **sizes, **options)
    model = nn.Sequential(encoder, nn.Linear(WIDTH, NUM_SYMBOLS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_updates):
        x, target = draw(64, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    x, target = draw(2000, generator)
    with torch.no_grad():
        return (model.eval()(x).argmax(-1) == target).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    seed = parser.parse_args(arguments).seed
    started, accuracy = time.perf_counter(), {}
    print("encoder   steps computed   accuracy")
    for name, options in FORMS.items():
        accuracy[name] = round(accuracy_after_training(options, seed=seed), 4)
        computed = f"{num_routed(NUM_STEPS, options['capacity_ratio'])} of {NUM_STEPS}"
        print(f"{name:8}  {computed:>14}   {accuracy[name]:8.3f}")
    print(json.dumps({"seed": seed, "accuracy": accuracy, "seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()

"""The routing's own operations, each against its alternative: why the core is written as it is.

    python benchmarks/core_ops.py [--rounds N] [--out FILE]

One process, float32, the two sides interleaved; a ratio is the median over the rounds. Last line: JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from modepth import Router, RoutingConfig
from modepth.routing import choose_best, lay_out, num_routed

SHAPES = [(16, 256, 256), (4, 1024, 256), (16, 256, 512), (4, 1024, 512)]  # batch, tokens, width


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(ours: Callable[[], object], other: Callable[[], object], rounds: int) -> dict[str, float]:
    ours(), other()
    times = [(seconds(ours), seconds(other)) for _ in range(rounds)]
    return {
        "ratio": round(statistics.median(a / b for a, b in times), 3),
        "ours_ms": round(1000 * statistics.median(a for a, _ in times), 3),
    }


def rows_for(B: int, T: int, D: int, rounds: int) -> list[dict[str, object]]:
    x_BTD = torch.randn(B, T, D, requires_grad=True)
    routing = Router(D, RoutingConfig(capacity=0.5))(x_BTD.detach())
    expanded_BKD = routing.index_BK.unsqueeze(-1).expand(-1, -1, D)
    score_BT, k = torch.randn(B, T), num_routed(T, 0.5)
    real_BT, k_B = torch.ones(B, T, dtype=torch.bool), torch.full((B,), k)

    def index_rows() -> None:
        routing.scatter(x_BTD, routing.gather(x_BTD) * 2).sum().backward()

    def gather_elements() -> None:
        x_BTD.scatter(1, expanded_BKD, x_BTD.gather(1, expanded_BKD) * 2).sum().backward()

    shape = {"B": B, "T": T, "D": D, "capacity": 0.5}
    return [
        {
            "what": "index_select + index_copy / gather + scatter",
            **shape,
            **compare(index_rows, gather_elements, rounds),
        },
        {
            "what": "choose_best + lay_out / topk + sort",
            **shape,
            **compare(
                lambda: lay_out(choose_best(score_BT, real_BT, k_B), k),
                lambda: score_BT.topk(k, dim=1).indices.sort(dim=1),
                rounds,
            ),
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="rounds of each comparison (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON lines")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for shape in SHAPES for row in rows_for(*shape, options.rounds)]
    for row in rows:
        print(
            f"{row['what']:46} B={row['B']:<3} T={row['T']:<5} D={row['D']:<4} {row['ratio']:6.2f}  {row['ours_ms']} ms"
        )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(json.dumps({"rows": rows, "torch": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()

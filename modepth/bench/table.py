"""What a bench came to: a line for each cell."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
CELL = ("task", "dim", "length", "batch", "capacity")


def bench_table(rows: Sequence[Row]) -> list[list[str]]:
    """Times as ratios: to our dense decoder or, for the converted Llama, to transformers' own; then the least possible.

    That is the ratio of FLOPs; for generation, a dense step whose routed blocks take what they took for routed tokens.
    """
    others = ["llama", "soup", "mixture_of_depth"]
    others += dict.fromkeys(row["contestant"] for row in rows if row["contestant"].endswith("_compiled"))
    table = [[*CELL, "routed", "least", "converted", *others, "memory"]]
    for cell in dict.fromkeys(tuple(row[name] for name in CELL) for row in rows):
        found = {row["contestant"]: row for row in rows if tuple(row[name] for name in CELL) == cell}
        routed, dense = found["routed"], found["dense"]
        least = routed.get("ideal_of_dense", routed["flop_ratio"])
        memory = f"{routed['peak_bytes'] / dense['peak_bytes']:.3f}" if "peak_bytes" in dense else ""
        converted = ""
        if "converted" in found and "llama" in found:
            converted = f"{found['converted']['of_dense'] / found['llama']['of_dense']:.3f}"
        table.append(
            [
                *map(str, cell),
                spread(routed),
                f"{least:.3f}",
                converted,
                *(spread(found.get(name)) for name in others),
                memory,
            ]
        )
    return table


def spread(row: Row | None) -> str:
    """The median, and the lowest and highest of the rounds."""
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    return f"{row['of_dense']:.3f} ({row['lowest']:.2f}-{row['highest']:.2f})"

"""Tables and text for people."""

import sys
from collections.abc import Mapping

from modepth.formats import shown

LAYOUT = "\n\t"  # the control characters that a text is laid out with


def print_table(rows: list[list[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def print_columns(table: Mapping[str, Mapping[str, object]]) -> None:
    """A line for each quantity, a column for each thing that has it."""
    names = dict.fromkeys(name for column in table.values() for name in column)
    print_table([["", *table]] + [[name, *(shown(column.get(name)) for column in table.values())] for name in names])


def millions(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number else "-"


def ratio(number: int, base: int) -> str:
    return f"{number / base:.3f}"


def printable(text: str, keep: str = "") -> str:
    """Text without what could steer a terminal, or what stdout cannot encode; of control characters only `keep`."""
    text = "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)

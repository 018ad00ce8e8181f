"""Tables for people."""

import sys


def print_table(rows: list[list[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def millions(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number else "-"


def ratio(number: int, base: int) -> str:
    return f"{number / base:.3f}"


def printable(text: str, keep: str = "") -> str:
    """Text without what could steer a terminal, or what stdout cannot encode; of control characters only `keep`."""
    text = "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)

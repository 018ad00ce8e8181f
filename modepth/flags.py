"""Command-line flags made from config dataclasses: a flag for every field, its help from the docstring.

A flag's value is read as YAML is, laid over the config file, and checked where all configs are: at birth.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

import yaml

from modepth.config import NESTED, StrictLoader

Tree = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """A flag `--a.b.c` for every field of a dataclass and of those inside it."""
    for path, owner, each in leaves(kind):
        default = "" if each.default is MISSING else f" (default: {each.default})"
        parser.add_argument(
            f"--{path}",
            dest=f"flag:{path}",
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=(documentation(owner).get(each.name, "") + default).replace("%", "%%").strip(),
        )


def flags_given(options: argparse.Namespace) -> Tree:
    """The flags of the command line as a tree of values."""
    tree: Tree = {}
    for name, text in sorted(vars(options).items()):  # a whole before its parts
        if name.startswith("flag:"):
            *parents, leaf = name.removeprefix("flag:").split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
                if not isinstance(branch, dict):
                    flag, whole = name.removeprefix("flag:"), ".".join(parents)
                    raise ValueError(f"--{flag} and --{whole} contradict each other: drop one")
            branch[leaf] = read_value(name.removeprefix("flag:"), text)
    return tree


def read_value(path: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=StrictLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--{path}: not a YAML value: {' '.join(str(error).split())}") from error


def laid_over(below: Tree, above: Tree) -> Tree:
    """The two trees as one, `above` deciding where both have a value."""
    both = dict(below)
    for name, value in above.items():
        inner = both.get(name)
        both[name] = laid_over(inner or {}, value) if isinstance(value, dict) and not isinstance(inner, list) else value
    return both


def leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, type, "Field[Any]"]]:
    """Dotted path, owner and field of each field; of a nested dataclass its own fields, and itself where optional."""
    for each in fields(kind):
        if each.name in NESTED:
            yield from leaves(NESTED[each.name], f"{prefix}{each.name}.")
        if each.name not in NESTED or each.default is None:
            yield f"{prefix}{each.name}", kind, each


def documentation(kind: type) -> dict[str, str]:
    """What a docstring says of each field, in lines of a name, two spaces or more, and a text."""
    return dict(re.findall(r"^    (\w+)  +(\S.*)$", kind.__doc__ or "", re.MULTILINE))

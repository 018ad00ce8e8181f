"""The documents' own code, for the tests that run it."""

import contextlib
import io
import re
import shlex
from pathlib import Path

from modepth.cli import main

ROOT = Path(__file__).parent.parent


def text_of(name):
    """README.md, or a page of docs/."""
    return (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text()


def blocks(text, language):
    """The blocks of one language in a page's text, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def smaller(text, changes):
    """The text with some of its sizes replaced, each of which must stand there once."""
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def run_commands(text, on_done=lambda line: None):
    """Run every line of the `sh` blocks, which must all be commands of ours."""
    for line in "".join(blocks(text, "sh")).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "modepth"
        assert main(arguments) == 0, line
        on_done(line)


def run_snippets(text):
    """Run the `python` blocks one after the other; what a `print(...)  # ...` says must be printed. Their names."""
    names = {}
    for block in blocks(text, "python"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(block, names)
        printed = out.getvalue().splitlines()
        for said in re.findall(r"^print\(.*\)  # ([^{\n]+)$", block, flags=re.MULTILINE):
            assert said in printed, f"{said!r} is not among {printed}"
    return names

"""For the site, used by mkdocs.yml alone: results beside the pages, docstrings as they were meant.

The rows that numbers come from stand beside `docs/`; their READMEs and pictures are pages and pictures of the site too.
Docstrings are plain text: their examples and aligned lists become blocks of code.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files, InclusionLevel

RESULTS = Path(__file__).parent.parent / "results"


def on_files(files: Files, config: Any) -> Files:
    for path in sorted((*RESULTS.glob("*/README.md"), *RESULTS.glob("*/*.png"))):
        name = f"results/{path.relative_to(RESULTS).as_posix()}"
        # Not in the list of pages, and no warning for that: they are reached by links.
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    return markdown if page.file.src_uri.startswith("results/") else markdown.replace("](../results/", "](results/")


class PlainDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(as_markdown, obj.docstring.value.split("\n\n")))


def as_markdown(paragraph: str) -> str:
    if paragraph.startswith(">>>"):
        return f"```pycon\n{paragraph}\n```"
    lines = paragraph.splitlines()
    aligned = all(re.match(r"\s+\S|\S+( \S+)*\s{2,}\S", line) for line in lines)
    return f"```text\n{paragraph}\n```" if aligned else paragraph

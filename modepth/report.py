"""A report is one HTML page that needs nothing else: no font, no file beside it, nothing to fetch.

Views, which one can look into, are those of the page that a server shows (`modepth.page`). Text, captions and table
cells are escaped. Figures are SVG inside the page, as images rather than inline markup, so that the ids of one cannot
meet those of another. The page follows the reader's light or dark setting; figures stay on white paper. On a phone
tables and wide figures scroll by themselves.
"""

import base64
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modepth.formats import shown
from modepth.page import VIEWS, curve_rows, document
from modepth.plots import Figure, figure_bytes, loss_against_flops
from modepth.runlog import RunLog
from modepth.textfile import replace_bytes

Table = Sequence[Mapping[str, object]]  # a row each, columns by name
Figures = Sequence[tuple[str, Figure]]  # caption, figure
Section = tuple[str, str, Table]  # heading, text, table

PIXELS_AN_INCH = 125  # a printed figure is small on a screen


class View(NamedTuple):
    """What a reader can look into: drawn by the page's script; without scripts its figure stands there."""

    heading: str
    caption: str  # of the figure
    data: Mapping[str, object]  # {"kind": "depth", "label", "depth"} or {"kind": "curves", "runs"}
    figure: Figure


def write_report(
    path: str | Path,
    *,
    title: str,
    intro: str = "",
    table: Table = (),
    views: Sequence[View] = (),
    figures: Figures = (),
    sections: Iterable[Section] = (),
) -> Path:
    """Write one self-contained page: title, text, table, views, figures, then sections of (heading, text, table)."""
    body = [f"<h1>{escaped(title)}</h1>", paragraphs(intro), html_table(table)]
    body += [html_view(f"view-{number}", view) for number, view in enumerate(views)]
    body += [html_figure(caption, figure) for caption, figure in figures]
    for heading, text, rows in sections:
        body += [f"<h2>{escaped(heading)}</h2>", paragraphs(text), html_table(rows)]
    page = document(
        title=title,
        body="\n".join(part for part in body if part),
        styles=("base.css", "report.css", *(("views.css",) if views else ())),
        scripts=(*VIEWS, "report.js") if views else (),
        data={f"view-{number}": view.data for number, view in enumerate(views)},
    )
    path = Path(path)
    replace_bytes(path, page.encode("utf-8", "replace"))
    return path


# -- pieces of the page


def escaped(value: object) -> str:
    return html.escape(str(value), quote=True)


def paragraphs(text: str) -> str:
    """A paragraph for each part between empty lines."""
    return "\n".join(f"<p>{escaped(part.strip())}</p>" for part in text.split("\n\n") if part.strip())


def html_table(rows: Table) -> str:
    """The columns of all rows, in the order in which they first appear; the first column names the row."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = {column: [row.get(column) for row in rows] for column in columns}
    # Numbers to the right; to the left a column that holds nothing but text.
    sides = {
        column: " class=text" if all(isinstance(cell, str) for cell in cells[column]) else "" for column in columns
    }
    head = "".join(f'<th scope="col"{sides[column]}>{escaped(column)}</th>' for column in columns)
    lines = [f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    first, *others = columns
    for number in range(len(rows)):
        row = "".join(f"<td{sides[column]}>{escaped(shown(cells[column][number]))}</td>" for column in others)
        lines.append(f'<tr><th scope="row">{escaped(shown(cells[first][number]))}</th>{row}</tr>')
    return "\n".join(('<div class="scroll"><table>', *lines, "</tbody>", "</table></div>"))


def html_figure(caption: str, figure: Figure) -> str:
    data = base64.b64encode(figure_bytes(figure, "svg")).decode()
    wide = round(figure.get_size_inches()[0] * PIXELS_AN_INCH)
    return (
        f'<figure style="--wide: {wide}px"><div class="scroll"><img alt="{escaped(caption)}" '
        f'src="data:image/svg+xml;base64,{data}"></div>\n<figcaption>{escaped(caption)}</figcaption></figure>'
    )


def html_view(name: str, view: View) -> str:
    return (
        f'<section><h2>{escaped(view.heading)}</h2><div data-view="{name}"></div>\n'
        f"<noscript>{html_figure(view.caption, view.figure)}</noscript></section>"
    )


# -- a report of runs


def write_run_report(
    path: str | Path,
    runs: Mapping[str, str | Path],
    *,
    title: str = "Training runs",
    intro: str = "",
    facts: Mapping[str, Mapping[str, object]] | None = None,
    views: Sequence[View] = (),
    figures: Figures = (),
    sections: Iterable[Section] = (),
) -> Path:
    """Write a page of run folders by name: a table of results, loss against FLOPs, what the routers did, events.

    facts      more columns for a run, such as its parameters, before those of its log
    views      more of them, before the curves
    figures    (caption, figure), after the curves
    sections   more (heading, text, table), before those of the logs
    """
    logs = {name: read_log(folder) for name, folder in runs.items()}
    known = facts or {}
    curves = View(
        "Training",
        "Language-model loss against training FLOPs: validation marked, training light.",
        {"kind": "curves", "runs": {name: curve_rows(rows) for name, rows in logs.items()}},
        loss_against_flops(logs),
    )
    sections = list(sections)
    for name, rows in logs.items():
        routing = routing_table(rows)
        if routing:
            sections.append((f"Routing of {name}", "Per routed layer, at the last logged step.", routing))
        experts = routing_table(rows, "experts")
        if experts:
            text = "Share of a layer's tokens that each expert computed and none did, at the last logged step."
            sections.append((f"Experts of {name}", text, experts))
    events = [{"run": name, **event} for name, rows in logs.items() for event in events_of(rows)]
    if events:
        sections.append(("Events", "", events))
    return write_report(
        path,
        title=title,
        intro=intro,
        table=side_by_side({name: {**known.get(name, {}), **results(rows)} for name, rows in logs.items()}),
        views=[*views, curves],
        figures=figures,
        sections=sections,
    )


def side_by_side(facts: Mapping[str, Mapping[str, object]]) -> Table:
    """A row for each quantity, a column for each run."""
    names = dict.fromkeys(name for each in facts.values() for name in each)
    return [{"": name, **{run: each.get(name) for run, each in facts.items()}} for name in names]


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    rows = list(RunLog(folder).rows())
    if not rows:
        raise ValueError(f"{folder}: no rows in log.jsonl: name the folder of a run that has begun to train")
    return rows


def results(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """What a run came to, by column."""
    training = [row for row in rows if "loss" in row]
    measured = [row for row in rows if "validation" in row]
    last = measured[-1]["validation"] if measured else {}
    rates = [row["tokens_per_second"] for row in training if "tokens_per_second" in row]
    return {
        "steps": max((row["step"] + ("loss" in row) for row in (*training, *measured)), default=0),
        "training FLOPs": max((row["flops"] for row in (*training, *measured)), default=None),
        "training loss": training[-1]["loss"] if training else None,
        "validation loss": last.get("loss"),
        "validation loss, top-k": last.get("topk_loss"),
        "perplexity": last.get("perplexity"),
        "bits per byte": last.get("bits_per_byte"),
        "training tokens/s": round(statistics.median(rates)) if rates else None,
    }


def routing_table(rows: Sequence[Mapping[str, Any]], kind: str = "layers") -> Table:
    """What each routed layer did, or with "experts" the experts of each layer, at the last step that says so."""
    layers: Mapping[str, Mapping[str, object]] = next((row[kind] for row in reversed(rows) if row.get(kind)), {})
    return [{"layer": int(layer), **values} for layer, values in sorted(layers.items(), key=lambda item: int(item[0]))]


def events_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    return [{name: row.get(name) for name in ("step", "event", "reason")} for row in rows if "event" in row]

"""A report is one HTML page that needs nothing else: no script, no font, no file beside it.

Text, captions and table cells are escaped. Figures are SVG inside the page, as images rather than inline
markup, so that the ids of one cannot meet those of another. The page follows the reader's light or dark
setting; figures stay on white paper. On a phone tables and wide figures scroll by themselves.
"""

import base64
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modepth.formats import shown
from modepth.plots import Figure, figure_bytes, loss_against_flops
from modepth.plots.style import write_atomically
from modepth.runlog import RunLog

Table = Sequence[Mapping[str, object]]  # a row each, columns by name
Figures = Sequence[tuple[str, Figure]]  # caption, figure
Section = tuple[str, str, Table]  # heading, text, table

PIXELS_AN_INCH = 125  # a printed figure is small on a screen

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #59636e; --line: #d1d9e0; --back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --muted: #9198a1; --line: #3d444d; --back: #0d1117; }
}
body { margin: 0 auto; max-width: 56rem; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; }
p { max-width: 42rem; white-space: pre-line; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: 0.35rem 0.9rem 0.35rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--muted); font-weight: 500; vertical-align: bottom; }
th:first-child, .text { text-align: left; }
figure { margin: 1.5rem 0; }
figure img { display: block; background: #ffffff; border-radius: 6px; padding: 0.75rem; box-sizing: border-box;
  width: 100%; min-width: min(30rem, var(--wide)); max-width: var(--wide); height: auto; }
figcaption { color: var(--muted); font-size: 0.9rem; max-width: 42rem; margin-top: 0.5rem; overflow-wrap: anywhere; }
""".strip()

# Nothing is fetched, whatever a text smuggles in.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    path: str | Path,
    *,
    title: str,
    intro: str = "",
    table: Table = (),
    figures: Figures = (),
    sections: Iterable[Section] = (),
) -> Path:
    """Write one self-contained page: title, text, table, figures, then sections of (heading, text, table)."""
    body = [f"<h1>{escaped(title)}</h1>", paragraphs(intro), html_table(table)]
    body += [html_figure(caption, figure) for caption, figure in figures]
    for heading, text, rows in sections:
        body += [f"<h2>{escaped(heading)}</h2>", paragraphs(text), html_table(rows)]
    content = "\n".join(part for part in body if part)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escaped(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
{content}
</body>
</html>
"""
    path = Path(path)
    write_atomically(path, page.encode("utf-8", "replace"))
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


# -- a report of runs


def write_run_report(
    path: str | Path,
    runs: Mapping[str, str | Path],
    *,
    title: str = "Training runs",
    intro: str = "",
    facts: Mapping[str, Mapping[str, object]] | None = None,
    figures: Figures = (),
    sections: Iterable[Section] = (),
) -> Path:
    """Write a page of run folders by name: a table of results, loss against FLOPs, what the routers did, events.

    facts      more columns for a run, such as its parameters, before those of its log
    figures    more (caption, figure), after the curves
    sections   more (heading, text, table), before those of the logs
    """
    logs = {name: read_log(folder) for name, folder in runs.items()}
    known = facts or {}
    curves = (
        "Language-model loss against training FLOPs: validation marked, training light.",
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
        figures=[curves, *figures],
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

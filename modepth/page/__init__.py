"""The page: its looks and its views, for the server at `/` and for the reports. Never torch, never HTTP.

    base.css  report.css  views.css  live.css     looks: of all pages, of reports, of views, of the served page
    formats.js                                    numbers as people read them; elements
    depth.js  chart.js  curves.js                 the views: tokens shaded by depth with their map; curves of runs
    asking.js  live.js  report.js                 what shows them: from a server, or from data inside the page
    live.html                                     the body of the served page

A page is one document: looks, scripts and data stand in it, and its policy lets it run those scripts and no others.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
VIEWS = ("formats.js", "depth.js", "chart.js", "curves.js")
ROW_FIELDS = ("step", "flops", "loss", "validation", "gradient_norm", "tokens_per_second", "event", "reason")
LAYER_FIELDS = ("share", "gate")


@cache
def asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8").strip()


@cache
def live_page() -> str:
    """The page that a server shows: it asks for the rest by itself."""
    return document(
        title="modepth: where the depth goes",
        body=asset("live.html"),
        styles=("base.css", "views.css", "live.css"),
        scripts=(*VIEWS, "asking.js", "live.js"),
        connects=True,
    )


def document(
    *,
    title: str,
    body: str,
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    data: Mapping[str, object] | None = None,
    connects: bool = False,
) -> str:
    """A whole page of a body that is HTML already. `data` is for its scripts, by the id of the element with it."""
    script = "\n".join(asset(name) for name in scripts)
    # Nothing is fetched and no other script runs, whatever a text smuggles in.
    policy = ["default-src 'none'", "img-src data:", "style-src 'unsafe-inline'"]
    if script:
        script = f'"use strict";\n{script}\n'
        policy.append(f"script-src '{digest(script)}'")
    if connects:
        policy.append("connect-src 'self'")
    style = "\n".join(asset(name) for name in styles)
    held = "".join(f"{json_element(name, value)}\n" for name, value in (data or {}).items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">
<title>{html.escape(title)}</title>
<style>
{style}
</style>
</head>
<body>
{body}
{held}{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def json_element(name: str, value: object) -> str:
    """Data inside a page; no text in it can end the element."""
    text = json.dumps(finite(value), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{html.escape(name)}">{text}</script>'


def curve_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of a run's rows what its curves are drawn from."""
    found = []
    for row in rows:
        kept = {name: row[name] for name in ROW_FIELDS if name in row}
        if row.get("layers"):
            kept["layers"] = {
                layer: {name: values[name] for name in LAYER_FIELDS if name in values}
                for layer, values in row["layers"].items()
            }
        found.append(finite(kept))
    return found


def finite(value: Any) -> Any:
    """A value as JSON can hold it: None for a number that is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value

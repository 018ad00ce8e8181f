"""One look for all figures: sizes of a printed page, colours for every reader, files with the same bytes each time.

Sizes are inches and points as printed, so figures go into a paper unscaled. Colours are those of Okabe and
Ito, which colour-blind readers tell apart; routed and skipped differ in lightness too, so they survive a
black-and-white printer. Fonts are the ones that come with matplotlib. No pyplot: nothing global is changed.
"""

import io
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any, cast

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from modepth.textfile import replace_bytes

COLUMN = 3.4  # inches, of a two-column page
PAGE = 6.9
FORMATS = ("png", "svg")

INK = "#24292f"
MUTED = "#6e7781"
FAINT = "#d8dee4"
ROUTED = "#0072b2"
SKIPPED = "#dfe5ec"
DENSE = "#c2b8a8"
EXPERT_COLOURS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#24292f", "#8c6d1f", "#7b5ea7")
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#24292f")
RUN_MARKERS = ("o", "s", "D", "^", "v", "P", "X")

SANS = "DejaVu Sans"
MONO = "DejaVu Sans Mono"
TEXT = 8.0  # points
SMALL = 7.0

RC: dict[str, Any] = {
    "font.family": SANS,
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "text.color": INK,
    "text.parse_math": False,  # a token or a name may hold any number of dollars
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "xtick.minor.width": 0.4,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "svg.hashsalt": "modepth",  # ids in the file follow from its contents
    "svg.fonttype": "path",
}


def in_style() -> ContextDecorator:
    """The look of all figures, whatever the user's own settings: `@in_style()` around what draws or saves."""
    context: AbstractContextManager[None] = matplotlib.style.context(["default", RC])
    return cast(ContextDecorator, context)


def text_width(text: str, size: float = TEXT) -> float:
    """Inches that a line of text takes."""
    if not text.strip():
        return 0.0  # matplotlib makes no path of nothing
    return float(TextPath((0, 0), text, size=size, prop=FontProperties(family=SANS)).get_extents().width) / 72


def printable(text: str, font: str = SANS) -> str:
    """The text with a box for what the font cannot show."""
    known = get_font(findfont(FontProperties(family=font))).get_charmap()
    return "".join(letter if ord(letter) in known else "□" for letter in text)


def add_key(figure: Figure, colours: dict[str, str], *, left: float) -> None:
    """A line of coloured squares with their meaning, at the top, `left` inches from the edge."""
    width, height = figure.get_size_inches()
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in colours.items()],
        loc="upper left",
        bbox_to_anchor=(left / width, 1 - 0.03 / height),
        ncols=len(colours),
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.5,
        borderpad=0,
        borderaxespad=0.2,
    )


# -- files


@in_style()
def figure_bytes(figure: Figure, format: str = "svg") -> bytes:
    """The figure as a file of one of FORMATS, equal bytes for equal figures."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    file = io.BytesIO()
    metadata = {"Software": None} if format == "png" else {"Date": None, "Creator": None}
    figure.savefig(file, format=format, dpi=200, metadata=metadata)
    return file.getvalue()


def save_figure(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write path.png, 200 dots an inch, and path.svg; a suffix of either kind in `path` is dropped."""
    path = Path(path)
    stem = path.with_suffix("") if path.suffix[1:] in FORMATS else path
    png, svg = (stem.with_name(f"{stem.name}.{format}") for format in FORMATS)
    for file in (png, svg):
        replace_bytes(file, figure_bytes(figure, file.suffix[1:]))
    return png, svg

"""The report: one page that needs nothing else, says what it was told, and runs nothing that it was told."""

import base64
import json
import math
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from modepth import report
from modepth.plots import figure_bytes, score_histograms, token_map
from modepth.report import write_report, write_run_report
from tests.test_plots import rows
from tests.test_project import loaded

EVIL = "</title><script>alert('x')</script>\" onload=\"x & <img src=http://evil.example/x>"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """A page read strictly: every tag closed in order; its text by tag, its attributes by tag."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data))

    def text(self, tag):
        return [data for name, data in self.texts if name == tag]

    def of(self, tag):
        return [attributes for name, attributes in self.attributes if name == tag]


def histogram():
    return score_histograms({1: [0.0, 1.0]}, {1: [False, True]})


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_holds_everything_it_was_given(tmp_path):
    figure = histogram()
    path = write_report(
        tmp_path / "new" / "report.html",
        title="A study",
        intro="First.\n\nSecond.",
        table=[{"run": "dense", "loss": 2.34567}, {"run": "MoD", "parameters": 1234567}],
        figures=[("Scores of a layer", figure)],
        sections=[("More", "Third.", [{"layer": 1, "share": 0.125}])],
    )
    page = read(path)
    assert page.text("h1") == page.text("title") == ["A study"]
    assert page.text("p") == ["First.", "Second.", "Third."]
    assert page.text("h2") == ["More"]
    assert page.text("th") == ["run", "loss", "parameters", "dense", "MoD", "layer", "share", "1"]
    assert page.text("td") == ["2.346", "-", "-", "1,234,567", "0.125"]
    assert page.text("figcaption") == ["Scores of a layer"]
    (image,) = page.of("img")
    assert image["alt"] == "Scores of a layer"
    kind, data = image["src"].split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == figure_bytes(figure, "svg")


def test_the_page_fetches_nothing_and_fits_a_phone_in_light_and_dark(tmp_path):
    path = write_report(tmp_path / "report.html", title="A study", figures=[("Scores", histogram())])
    text = path.read_text()
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    page = read(path)
    assert {tag for tag, _ in page.attributes}.isdisjoint({"script", "link", "iframe", "object", "embed", "base"})
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert any(meta.get("content", "").startswith("default-src 'none'") for meta in page.of("meta"))
    assert "prefers-color-scheme: dark" in text
    assert "overflow-x: auto" in text


def test_everything_is_escaped(tmp_path):
    tokens = ["<script>", "</svg>", "&amp;", '"']
    path = write_report(
        tmp_path / "report.html",
        title=EVIL,
        intro=EVIL,
        table=[{EVIL: EVIL, "b": EVIL}],
        figures=[(EVIL, token_map(tokens, [[1, 0, 1, 0]], [0]))],
        sections=[(EVIL, EVIL, [{EVIL: [EVIL]}])],
    )
    page = read(path)
    assert page.of("script") == []
    assert len(page.of("img")) == 1
    assert page.of("img")[0].keys() == {"alt", "src"}
    assert page.of("img")[0]["alt"] == EVIL
    for tag in ("title", "h1", "h2", "figcaption", "td"):
        assert page.text(tag) == [EVIL]
    assert page.text("p") == [EVIL, EVIL]


def test_no_table_and_no_figure_leave_nothing_behind(tmp_path):
    page = read(write_report(tmp_path / "report.html", title="Empty"))
    assert {tag for tag, _ in page.attributes} == {"html", "head", "meta", "title", "style", "body", "h1"}


def test_equal_reports_have_equal_bytes_and_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    before = write_report(path, title="A", figures=[("Scores", histogram())]).read_bytes()
    assert write_report(path, title="A", figures=[("Scores", histogram())]).read_bytes() == before
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"report\.html: cannot be written: No space left"):
        write_report(path, title="B")
    assert path.read_bytes() == before


def test_a_figure_that_cannot_be_drawn_leaves_no_page(tmp_path):
    class Broken(Figure):
        def savefig(self, *args, **options):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        write_report(tmp_path / "report.html", title="A", figures=[("x", Broken())])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-12345, "-12,345"), (True, "True"), (math.nan, "nan"), (math.inf, "inf"), (0.00012344, "0.0001234")],
)
def test_numbers_are_shown_for_people(value, text):
    assert report.shown(value) == text


# -- runs


@pytest.fixture
def runs(tmp_path):
    """Two run folders with logs, the second cut by a kill and routed."""
    found = {}
    for name, floor in (("dense", 2.0), ("<MoD>", 1.9)):
        folder = tmp_path / name.strip("<>")
        folder.mkdir()
        lines = [
            {**row, "tokens_per_second": 1000.0 + row["step"]} if "loss" in row else row for row in rows(floor=floor)
        ]
        if name == "<MoD>":
            layers = {str(layer): {"share": 0.125, "gate": 0.6, "cutoff": -1.5} for layer in (11, 3)}
            lines = [{**row, "layers": layers if "loss" in row else {}} for row in lines]
        cut = '{"step": 99, "lo' if name == "<MoD>" else ""
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
        found[name] = folder
    return found


def test_a_run_report_is_made_from_the_rows_of_its_logs(tmp_path, runs):
    extra = ("Scores", histogram())
    facts = {"dense": {"parameters": 4321}}
    page = read(write_run_report(tmp_path / "report.html", runs, title="Two", facts=facts, figures=[extra]))
    cells = page.text("td")
    for name, floor in (("dense", 2.0), ("<MoD>", 1.9)):
        last = floor + 3 / math.sqrt(40)
        assert f"{last:.4g}" in cells
        assert f"{last + 0.01:.4g}" in cells
        assert name in page.text("th")
    assert cells.count("40") == 2  # steps
    assert cells.count("1.2·10¹⁴") == 2  # FLOPs
    assert cells.count("77") == 2  # perplexity
    assert "4,321" in cells
    assert page.text("figcaption")[1:] == ["Scores"]
    assert page.text("h2") == ["Training", "Routing of <MoD>", "Events"]
    rows_of_layers = [text for text in page.text("th") if text in ("3", "11")]
    assert rows_of_layers == ["3", "11"]
    assert cells.count("update not applied") == 2
    assert "99" not in cells  # a router loss


def test_the_reports_curves_are_those_of_the_logs(tmp_path, runs, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "loss_against_flops", lambda logs: drawn.append(logs) or histogram())
    write_run_report(tmp_path / "report.html", runs)
    (logs,) = drawn
    assert list(logs) == ["dense", "<MoD>"]
    assert [row for row in logs["dense"] if "validation" in row] == [row for row in rows() if "validation" in row]


def test_a_run_that_still_trains_is_reported_as_far_as_it_is(tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 6, "loss": 2.5, "flops": 7e12}) + "\n")
    page = read(write_run_report(tmp_path / "report.html", {"begun": tmp_path}))
    assert page.text("td") == ["7", "7·10¹²", "2.5", "-", "-", "-", "-", "-"]
    assert page.text("h2") == ["Training"]


def test_a_folder_without_a_log_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing: no rows in log\.jsonl: name the folder of a run"):
        write_run_report(tmp_path / "report.html", {"a": tmp_path / "nothing"})


def test_a_report_needs_no_torch():
    assert loaded("import modepth.report") == ["matplotlib"]

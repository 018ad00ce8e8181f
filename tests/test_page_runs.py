"""The curves of a run on the page, and the reports, in a real browser."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from modepth.cli import main
from modepth.plots import token_map
from modepth.report import View, write_run_report
from modepth.serve.served import SHIPPED
from tests.browser import (
    CONTRAST,
    TEXT,
    depth_of,
    expected_readout,
    layers_shown,
    message,
    open_page,
    skip_without_chromium,
)
from tests.serving import serving
from tests.test_serve_rows import layers, row, write_log

pytestmark = skip_without_chromium()


@pytest.fixture(scope="module")
def client(shipped):
    with serving(lambda: shipped) as client:
        yield client


@pytest.fixture
def run(tmp_path):
    return write_log(tmp_path)


def test_the_curves_of_a_run_follow_its_log(browser, shipped, run):
    with serving(lambda: replace(shipped, log=run)) as client, open_page(browser, client.base_url) as page:
        page.get_by_role("tab", name="Depth").press("ArrowRight")
        loss = page.locator(".chart").first
        expect(loss.locator("polyline")).to_have_count(2)
        expect(page.locator("#progress")).to_contain_text("modepth: step 41")
        expect(page.locator(".events li")).to_have_text("modepth, step 41: update not applied: <b>loss</b> is nan")
        for title in ("Share of tokens routed, by layer", "Mean gate, by layer", "Gradient norm"):
            expect(page.locator("figure", has_text=title)).to_be_visible()
        run.add(row(45, **layers(0.2)))
        expect(page.locator("#progress")).to_contain_text("step 45")
        loss.locator(".plot").press("End")
        expect(loss.locator(".readout")).to_contain_text("step 45: training 4.1, validation 4.5")
        page.get_by_label("training FLOPs").check()
        loss.locator(".plot").press("End")
        expect(loss.locator(".readout")).to_contain_text("FLOPs 45B")
        run.add(row(12345, **layers(0.2)))
        expect(page.locator("#progress")).to_contain_text("step 12345")
        page.get_by_label("steps").check()
        loss.locator(".plot").press("End")
        expect(loss.locator(".readout")).to_contain_text("step 12,345: training")
        run.drop_from(20)  # as a run that goes on from an older checkpoint
        expect(page.locator("#progress")).to_contain_text("step 15")


def test_each_view_has_messages_of_its_own_and_a_refusal_does_not_end_the_curves(browser, shipped, run):
    with serving(lambda: replace(shipped, log=run)) as client, open_page(browser, client.base_url) as page:
        expect(page.locator(".token").first).to_be_visible()
        page.locator("#text").fill("word " * 900)
        message(page, "refused", "more than the model's context of 512")
        page.route("**/v1/run?*", lambda route: route.fulfill(status=500, json={"error": {"message": "a bad moment"}}))
        page.get_by_role("tab", name="Training").click()
        expect(page.locator("#run-message")).to_have_text("a bad moment")
        expect(page.locator("#message")).to_be_hidden()
        page.unroute("**/v1/run?*")
        expect(page.locator("#progress")).to_contain_text("modepth: step 41")
        expect(page.locator("#run-message")).to_be_hidden()
        page.get_by_role("tab", name="Depth").click()
        message(page, "refused", "more than the model's context of 512")
        expect(page.locator("#message")).to_be_visible()


def test_a_report_has_the_same_views_in_one_file(browser, client, run, tmp_path):
    depth = depth_of(client, TEXT)
    shown = {**depth, "tokens": [{**depth["tokens"][0], "text": "</script><img src=x>"}, *depth["tokens"][1:]]}
    view = View("Depth", "A map.", {"kind": "depth", "label": "A text", "depth": shown}, token_map(["a"], [[1]], [0]))
    path = write_run_report(tmp_path / "report.html", {"mine": run.path.parent, "twin": run.path.parent}, views=[view])
    with open_page(browser, f"file://{path}", width=340, color_scheme="dark") as page:
        assert layers_shown(page) == [len(token["layers"]) for token in depth["tokens"]]
        assert page.locator(".token").first.inner_text() == "</script><img src=x>"
        assert page.locator("img").count() == 0
        page.locator(".column").nth(1).locator("i").nth(3).hover()
        expect(page.locator(".readout").first).to_have_text(expected_readout(depth, 1, 3))
        expect(page.locator(".chart").first.locator("polyline")).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") == 340
        assert min(page.locator(".token, .legend, .readout").evaluate_all(CONTRAST)) >= 4.5


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A report that the command itself has written of a run, and the run's data."""
    folder = tmp_path_factory.mktemp("reported")
    run, data, texts = folder / "mine", folder / "data", folder / "texts"
    shutil.copytree(SHIPPED, run)
    write_log(run)
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"def café_{number}(): return '日本 😀'\n" * 30, encoding="utf-8")
    prepare = ["data", "prepare", str(texts), str(data), "--tokenizer", str(SHIPPED / "tokenizer.json")]
    assert main([*prepare, "--validation", "0.3"]) == 0
    assert main(["report", str(run), "--data", str(data), "--out", str(folder / "out")]) == 0
    return folder / "out" / "report.html"


READ = "h1, h2, p, dt, dd, td, th, li, figcaption, .token, .swatch, .key, .label, .choice span, .plot text"


def check_fit(page, width, scheme):
    """Nothing is wider than the screen, all text can be read, and the scheme is the one asked for."""
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert min(page.locator(READ).filter(visible=True).evaluate_all(CONTRAST)) >= 4.5
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 340])
def test_a_report_of_the_command_fits_and_can_be_read_on_any_screen(browser, reported, scheme, width):
    with open_page(browser, f"file://{reported}", width=width, color_scheme=scheme) as page:
        expect(page.locator(".token")).to_have_count(96)
        expect(page.locator("polyline").first).to_be_visible()
        for plot in page.locator(".plot").all():
            plot.press("End")  # its readout is text too
        check_fit(page, width, scheme)
        table = page.locator("table").first
        for cell in table.locator("td").all():
            box = cell.bounding_box()
            assert box["x"] + box["width"] <= width  # seen without scrolling
        assert "\ufffd" not in page.locator(".tokens").text_content()[8:]  # the first may be the rest of a character


def test_a_report_tells_what_its_text_cost(browser, reported):
    held = re.search(r'id="view-0">(.*?)</script>', reported.read_text(encoding="utf-8"))
    depth = json.loads(held[1])["depth"]
    cost = depth["cost"]
    with open_page(browser, f"file://{reported}") as page:
        flops, cache, routed = page.locator(".totals > div").all()
        assert flops.inner_text().split("\n") == [
            "FLOPs spent",
            f"{100 * cost['flops_share']:.3g} %",
            "of the dense model's",
        ]
        share = 100 * cost["cache_bytes"] / cost["dense_cache_bytes"]
        assert f"{share:.3g} % of" in cache.inner_text()
        computed = [chosen for token in depth["tokens"] for chosen in token["routed"]]
        assert f"{100 * sum(computed) / len(computed):.3g} %" in routed.inner_text()
        expect(page.locator("[data-view=view-0]")).to_contain_text(
            "all 512 tokens that were read. The last 96 are shown."
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 340])
def test_the_curves_fit_and_can_be_read_on_any_screen(browser, shipped, run, scheme, width):
    with (
        serving(lambda: replace(shipped, log=run)) as client,
        open_page(browser, client.base_url, width=width, color_scheme=scheme) as page,
    ):
        page.get_by_role("tab", name="Training").click()
        expect(page.locator("#progress")).to_contain_text("step 41")
        for plot in page.locator(".plot").all():
            plot.press("End")
        check_fit(page, width, scheme)

"""The curves of a run on the page, and the reports, in a real browser."""

from dataclasses import replace

import pytest
from playwright.sync_api import expect

from modepth.plots import token_map
from modepth.report import View, write_run_report
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

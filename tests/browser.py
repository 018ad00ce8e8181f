"""A real Chromium for the tests of the page: the one that is installed, driven by Playwright."""

import os
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TEXT = "def add(one, other):\n    return one + other\n"
REQUIRED = "MODEPTH_NEEDS_CHROMIUM"  # set where the tests must not be skipped, as by CI


def find_chromium():
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


def skip_without_chromium():
    """A mark for a module: its tests are skipped, and the reason said, where there is no Chromium."""
    missing = find_chromium() is None
    if missing and os.environ.get(REQUIRED):
        raise RuntimeError(f"{REQUIRED} is set and there is no Chromium: install one, as by apt-get install chromium")
    return pytest.mark.skipif(
        missing, reason="NO CHROMIUM FOUND, the page is not tested: install one, as by apt-get install chromium"
    )


@contextmanager
def new_browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser, url, *, width=1000, height=900, **context):
    """A page in a context of its own; at the end it must have raised nothing and asked nobody else for anything."""
    origin = "/".join(str(url).split("/")[:3])
    problems = []
    context = browser.new_context(viewport={"width": width, "height": height}, **context)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(origin) or problems.append(asked.url))
    page.goto(str(url))
    try:
        yield page
    finally:
        context.close()
    assert problems == []


# -- what a page shows


def layers_shown(page):
    """How many layers computed each token, as the shading has it; None: not read."""
    return page.locator(".token").evaluate_all("all => all.map(each => Number(each.dataset.depth) || null)")


def write(page, text):
    """Type a text in place of the one that is there, and wait for its shading."""
    page.locator("#text").fill(text)
    expect(page.locator(".tokens")).to_have_text(text.replace("\n", "⏎\n"), use_inner_text=False)
    expect(page.locator(".token.unread")).to_have_count(0)


def settled(page):
    expect(page.locator("#shown")).to_have_attribute("aria-busy", "false", timeout=30_000)


def message(page, kind, text):
    expect(page.locator("#message")).to_contain_text(text)
    expect(page.locator("#message")).to_have_attribute("data-kind", kind)


def depth_of(client, text, capacity=None):
    return client.post("/v1/depth", json={"text": text, "capacity": capacity}).json()


def expected_readout(answer, place, layer):
    token, number = answer["tokens"][place], answer["routed_layers"].index(layer)
    decided = "routed, computed" if token["routed"][number] else "not routed, skipped"
    score, threshold = token["scores"][number], answer["thresholds"][number]
    why = f"score {score:.2f} (threshold {threshold:.2f})"
    return f"Token {place + 1} “{token['text'].replace(' ', '·')}”, layer {layer}, {why}: {decided}."


CONTRAST = """(places) => {
  const context = document.createElement("canvas").getContext("2d");
  const light = (colour) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255);
    const [red, green, blue] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const back = (place) => {
    const colour = getComputedStyle(place).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && place.parentElement ? back(place.parentElement) : colour;
  };
  return places.map((place) => {
    const { fill, color } = getComputedStyle(place);
    const ink = place instanceof SVGElement ? fill : color;
    const [one, other] = [light(ink), light(back(place))].sort((a, b) => b - a);
    return (one + 0.05) / (other + 0.05);
  });
}"""

"""A real Chromium for the tests of the page: the one that is installed, driven by Playwright."""

import os
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

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

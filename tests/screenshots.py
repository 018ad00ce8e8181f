"""Take the pictures of the page that the documents show: `python -m tests.screenshots` writes docs/images/."""

from pathlib import Path

from playwright.sync_api import expect

from modepth.serve.served import open_served
from tests.browser import new_browser, open_page
from tests.serving import serving

OUT = Path(__file__).parent.parent / "docs" / "images"
SHOTS = {  # width and scheme; the whole page is taken
    "page_light.png": (960, "light"),
    "page_dark.png": (390, "dark"),
}


def take(page, path):
    expect(page.locator(".token").first).to_be_visible()
    page.get_by_label("25 %", exact=True).check()
    page.locator("#most").fill("28")
    page.locator("#temperature").fill("0.8")
    page.locator("#generate").click()
    expect(page.locator(".token.made")).to_have_count(28, timeout=60_000)
    expect(page.locator("#stop")).to_be_disabled()
    page.locator(".map").evaluate("map => { map.scrollLeft = 0 }")
    page.locator(".column").nth(10).locator("i").nth(3).hover()
    page.screenshot(path=path, full_page=True)
    print(path, f"{path.stat().st_size:,} bytes")


def main():
    shipped = open_served(None)
    OUT.mkdir(exist_ok=True)
    with serving(lambda: shipped) as client, new_browser() as browser:
        for name, (width, scheme) in SHOTS.items():
            with open_page(browser, client.base_url, width=width, color_scheme=scheme) as page:
                take(page, OUT / name)


if __name__ == "__main__":
    main()

"""The page in a real browser: what it shows is what the server says, and what it says when the server cannot."""

import re
import threading
from contextlib import ExitStack

import pytest
from playwright.sync_api import expect

from modepth.serve.engine import Limits
from tests.browser import (
    CONTRAST,
    TEXT,
    depth_of,
    expected_readout,
    layers_shown,
    message,
    open_page,
    settled,
    skip_without_chromium,
    write,
)
from tests.oracles import tiny_model
from tests.serving import engine_of, serving, tiny_served, wait_for

pytestmark = skip_without_chromium()


@pytest.fixture(scope="module")
def client(shipped):
    with serving(lambda: shipped) as client:
        yield client


@pytest.fixture
def page(browser, client):
    with open_page(browser, client.base_url) as page:
        expect(page.locator(".token").first).to_be_visible()
        yield page


# -- what is shown


def test_the_shading_is_what_the_server_says_of_the_text_that_was_typed(page, client):
    seen = []
    for text in (TEXT, "import os\nimport sys\n"):
        write(page, text)
        answer = depth_of(client, text)
        assert layers_shown(page) == [len(token["layers"]) for token in answer["tokens"]]
        seen.append(layers_shown(page))
        assert page.locator("#flops").inner_text() == f"{100 * answer['cost']['flops_share']:.3g} %"
        assert "dense" in page.locator("#cache-share").inner_text()
        assert float(page.locator("#speed").inner_text().removesuffix("K")) > 0
    assert seen[0] != seen[1]
    colours = page.locator(".token").evaluate_all("all => all.map(each => getComputedStyle(each).backgroundColor)")
    assert len(set(colours)) == len(set(seen[1])) > 1
    write(page, "ab")
    page.locator("#text").fill("")
    expect(page.locator(".token")).to_have_count(0)
    expect(page.locator("#count")).to_have_text("Type a text, or take an example.")


def test_a_character_of_several_tokens_is_shown_once_and_each_token_has_its_cell(page, client):
    text = "café 日本 😀"
    write(page, text)
    tokens = depth_of(client, text)["tokens"]
    assert len(tokens) > len(text)
    assert layers_shown(page) == [len(token["layers"]) for token in tokens]
    for token in page.locator(".token, .column .label").all():
        box = token.bounding_box()
        assert min(box["width"], box["height"]) > 3
    parts = [place for place, token in enumerate(tokens) if not token["text"]]
    page.locator(".token").nth(parts[0]).hover()
    expect(page.locator("#shown .readout")).to_contain_text(
        f"Token {parts[0] + 1} (a part of a character): computed by"
    )
    page.locator("#most").fill("3")
    page.locator("#generate").click()
    expect(page.locator(".token.made")).to_have_count(3)
    expect(page.locator(".tokens")).to_contain_text(text)


def test_examples_are_one_key_away(page):
    before = layers_shown(page)
    page.get_by_role("button", name="English").press("Enter")
    expect(page.locator("#text")).to_have_value(re.compile("^The router looks"))
    expect(page.locator(".tokens")).to_contain_text("The router looks")
    assert layers_shown(page) != before


def test_generation_streams_with_the_shading_of_its_answer(page, client):
    write(page, TEXT)
    page.locator("#most").fill("40")
    page.locator("#temperature").fill("0")
    page.locator("#text").press("Control+Enter")
    expect(page.locator("#stop")).to_be_enabled()
    expect(page.locator(".token.made").nth(1)).to_be_visible()  # before the end
    settled(page)
    asked = {"prompt": TEXT, "max_tokens": 40, "temperature": 0, "depth": True}
    (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
    assert layers_shown(page) == [*map(len, choice["depth"]["layers"]), None]
    assert page.locator(".token.made").count() == 40
    assert page.locator(".tokens").text_content().replace("⏎\n", "\n") == "".join(choice["depth"]["tokens"])
    assert page.locator("#flops").inner_text() == f"{100 * choice['depth']['cost']['flops_share']:.3g} %"
    assert page.locator("#speed-of").inner_text() == "generated"
    expect(page.locator("#stop")).to_be_disabled()
    page.locator(".map").focus()
    page.keyboard.press("End")
    expect(page.locator("#shown .readout")).to_contain_text("not read yet")
    page.keyboard.press("ArrowLeft")
    (threshold,) = depth_of(client, TEXT)["thresholds"][-1:]
    score = choice["depth"]["scores"][-1][-1]
    expect(page.locator("#shown .readout")).to_contain_text(f"score {score:.2f} (threshold {threshold:.2f})")


def test_escape_stops_the_answer_and_frees_its_place(page, client):
    before = engine_of(client).endings["cancelled"]
    page.locator("#most").fill("400")
    page.locator("#generate").press("Enter")
    expect(page.locator(".token.made").nth(2)).to_be_visible()
    page.keyboard.press("Escape")
    wait_for(lambda: not engine_of(client).busy)
    assert engine_of(client).endings["cancelled"] == before + 1
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#message")).to_be_hidden()


def test_the_dial_decides_what_is_computed(page, client):
    write(page, TEXT)
    page.get_by_label("100 %").check()
    expect(page.locator("#routed")).to_have_text("100 %")
    assert set(layers_shown(page)) == {7}
    assert 100 <= float(page.locator("#flops").inner_text().split()[0]) < 103  # routers and predictors on top
    page.keyboard.press("ArrowLeft")  # the setting before it
    expect(page.locator("#routed")).not_to_have_text("100 %")
    answer = depth_of(client, TEXT, 0.5)
    assert layers_shown(page) == [len(token["layers"]) for token in answer["tokens"]]
    assert page.get_by_label("50 %", exact=True).is_checked()


def test_the_map_tells_token_layer_score_and_decision(page, client):
    text = "class Stack(list):"
    write(page, text)
    answer = depth_of(client, text)
    readout, columns = page.locator("#shown .readout"), page.locator(".column")
    for place in (0, 2):
        for row, layer in ((1, 5), (3, 3), (5, 1)):
            columns.nth(place).locator("i").nth(row).hover()
            expect(readout).to_have_text(expected_readout(answer, place, layer))
    columns.nth(1).locator("i").nth(0).hover()
    expect(readout).to_contain_text("layer 6: not a routed layer")
    page.locator(".token").nth(2).hover()
    expect(readout).to_contain_text(f"computed by {len(answer['tokens'][2]['layers'])} of 7 layers")


def test_the_map_is_read_by_keyboard_alone(page, client):
    write(page, TEXT)
    answer = depth_of(client, TEXT)
    page.locator("#stop").focus()
    page.locator("#generate").focus()
    page.keyboard.press("Tab")  # past the totals and the text
    assert page.evaluate("document.activeElement.className") == "map"
    readout = page.locator("#shown .readout")
    expect(readout).to_have_text(expected_readout(answer, 0, 5))
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    expect(readout).to_contain_text("Token 2")
    expect(readout).to_contain_text("layer 3, score")
    assert page.locator(".here").count() == 2  # the token and its cell
    page.keyboard.press("End")
    expect(readout).to_contain_text(f"Token {len(answer['tokens'])} ")


def test_the_thresholds_are_those_of_the_setting_that_generates(page, client):
    write(page, TEXT)
    page.route("**/v1/depth", lambda route: route.continue_() if len(route.request.post_data) < 40 else None)
    page.locator("#most").fill("2")
    page.get_by_label("25 %", exact=True).check()
    page.locator("#generate").click()  # before the text was read at this setting, which is now never answered
    expect(page.locator(".token.made")).to_have_count(2)
    settled(page)
    page.locator(".map").focus()
    answer = depth_of(client, TEXT, 0.25)
    assert answer["thresholds"] != depth_of(client, TEXT)["thresholds"]
    expect(page.locator("#shown .readout")).to_have_text(expected_readout(answer, 0, 5))


def test_a_dense_model_says_that_it_is_one(browser):
    dense = tiny_served(model=tiny_model(vocab_size=256, max_length=999, routing=None).double().eval(), dial={})
    with serving(lambda: dense) as client, open_page(browser, client.base_url) as page:
        expect(page.locator(".legend").first).to_have_text("A dense model: every layer computes every token.")
        expect(page.locator("#dial")).to_be_hidden()
        expect(page.locator("#flops")).to_have_text("100 %")


def test_a_model_that_is_no_run_has_no_curves(page, client):
    expect(page.locator("#views")).to_be_hidden()
    answer = client.get("/v1/run")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "'modepth' is no training run with a log"


# -- on any screen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 340])
def test_it_fits_and_can_be_read_on_any_screen(browser, client, scheme, width):
    with open_page(browser, client.base_url, width=width, color_scheme=scheme) as page:
        expect(page.locator(".token").first).to_be_visible()
        page.get_by_label("50 %", exact=True).check()
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for place in ("#text", "#generate", "#stop", "#totals", ".map"):
            box = page.locator(place).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
        read = ".token, .swatch, .quiet, .legend, .readout, h1, textarea, button:enabled, .choice span, dt, .label"
        assert min(page.locator(read).evaluate_all(CONTRAST)) >= 4.5
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        assert dark == (scheme == "dark")


# -- when the server cannot


def test_a_busy_server_is_said_to_be_and_asked_again(browser):
    asked = {"prompt": "some prompt", "max_tokens": 2900, "stream": True}
    with serving(tiny_served, limits=Limits(requests=1)) as client, open_page(browser, client.base_url) as page:
        write(page, "some text")
        with client.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()  # held: a stream whose reader is gone is closed
            next(lines)
            page.locator("#text").fill("other text")
            message(page, "busy", "The server is busy with other requests. Trying again in 1 s.")
        expect(page.locator(".tokens")).to_have_text("other text")
        expect(page.locator("#message")).to_be_hidden()


def test_a_server_that_is_loading_is_waited_for(browser, shipped):
    go = threading.Event()

    def slowly():
        go.wait()
        return shipped

    with serving(slowly, ready=False) as client, open_page(browser, client.base_url) as page:
        message(page, "loading", "The server is still loading the model.")
        page.get_by_role("button", name="English").click(force=True)  # it waits too: nothing can be asked yet
        page.locator("#text").press("Control+Enter")
        go.set()
        expect(page.locator(".token").first).to_be_visible()
        expect(page.locator("#message")).to_be_hidden()
        page.get_by_label("50 %", exact=True).check()
        page.get_by_role("button", name="English").click()
        expect(page.locator(".tokens")).to_contain_text("The router looks")


def test_a_server_that_stops_midway_is_missed_and_taken_up_again(browser):
    served = tiny_served()
    with ExitStack() as first:
        client = first.enter_context(serving(lambda: served))
        port = client.base_url.port
        with open_page(browser, client.base_url) as page:
            write(page, "some text")
            page.locator("#most").fill("2900")
            page.locator("#generate").click()
            expect(page.locator(".token.made").nth(3)).to_be_visible()
            first.close()
            message(page, "gone", "The server stopped in the middle of the answer. What came until then is shown.")
            assert page.locator(".token.made").count() > 3
            page.locator("#text").fill("other text")
            message(page, "gone", "The server cannot be reached")
            with serving(lambda: served, port=port):
                expect(page.locator("#message")).to_be_hidden()
                expect(page.locator(".tokens")).to_have_text("other text")


def test_a_server_that_comes_back_is_asked_which_model_it_has(browser, shipped):
    """Whether it went in the middle of an answer or in between; the chosen setting stays, where there is one."""
    with ExitStack() as first:
        client = first.enter_context(serving(tiny_served))
        port = client.base_url.port
        with open_page(browser, client.base_url) as page:
            write(page, "some text")
            page.get_by_label("25 %", exact=True).check()
            page.locator("#most").fill("2900")
            page.locator("#generate").click()
            expect(page.locator(".token.made").nth(3)).to_be_visible()
            first.close()
            message(page, "gone", "The server stopped in the middle of the answer.")
            with serving(lambda: shipped, port=port):
                message(page, "back", "The server is back.")
                expect(page.locator("#model")).to_contain_text("Model modepth: 7 layers")
                assert page.locator("#dial label").all_inner_texts()[1:] == [
                    "6.25 %",
                    "12.5 %",
                    "25 %",
                    "50 %",
                    "100 %",
                ]
                assert page.get_by_label("25 %", exact=True).is_checked()
                page.get_by_label("50 %", exact=True).check()
                settled(page)
            page.locator("#text").fill("other text")
            message(page, "gone", "The server cannot be reached")
            with serving(tiny_served, port=port):
                expect(page.locator(".tokens")).to_have_text("other text")
                expect(page.locator("#model")).to_contain_text("Model tiny: 3 layers")
                expect(page.locator("#message")).to_be_hidden()
                assert page.get_by_label("as trained").is_checked()  # this model has no 50 %


def test_what_the_server_refuses_is_shown_in_its_own_words(page):
    page.locator("#text").fill("word " * 900)
    message(page, "refused", "more than the model's context of 512")
    write(page, "short")
    expect(page.locator("#message")).to_be_hidden()


def test_a_key_is_asked_for_as_a_password(browser, shipped):
    with serving(lambda: shipped, api_key="open sesame") as client:
        credentials = {"username": "anybody", "password": "open sesame"}
        with open_page(browser, client.base_url, http_credentials=credentials) as page:
            expect(page.locator(".token").first).to_be_visible()
        with open_page(browser, client.base_url, http_credentials=credentials | {"password": "wrong"}) as page:
            expect(page.locator("body")).to_contain_text("API key is missing or wrong")

"""The page in a real browser: what it shows is what the server says, and what it says when the server cannot."""

import json
import re
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from modepth.plots import token_map
from modepth.report import View, write_run_report
from modepth.runlog import RunLog
from modepth.serve.engine import Limits
from modepth.serve.served import open_served
from tests.browser import new_browser, open_page, skip_without_chromium
from tests.oracles import tiny_model
from tests.serving import engine_of, serving, tiny_served, wait_for

pytestmark = skip_without_chromium()

TEXT = "def add(one, other):\n    return one + other\n"


@pytest.fixture(scope="module")
def browser():
    with new_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def shipped():
    return open_served(None)


@pytest.fixture(scope="module")
def client(shipped):
    with serving(lambda: shipped) as client:
        yield client


@pytest.fixture
def page(browser, client):
    with open_page(browser, client.base_url) as page:
        expect(page.locator(".token").first).to_be_visible()
        yield page


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


def depth_of(client, text, capacity=None):
    return client.post("/v1/depth", json={"text": text, "capacity": capacity}).json()


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


def expected_readout(answer, place, layer):
    token, number = answer["tokens"][place], answer["routed_layers"].index(layer)
    decided = "routed, computed" if token["routed"][number] else "not routed, skipped"
    score, threshold = token["scores"][number], answer["thresholds"][number]
    why = f"score {score:.2f} (threshold {threshold:.2f})"
    return f"Token {place + 1} “{token['text'].replace(' ', '·')}”, layer {layer}, {why}: {decided}."


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


def test_a_dense_model_says_that_it_is_one(browser):
    dense = tiny_served(model=tiny_model(vocab_size=256, max_length=999, routing=None).double().eval(), dial={})
    with serving(lambda: dense) as client, open_page(browser, client.base_url) as page:
        expect(page.locator(".legend").first).to_have_text("A dense model: every layer computes every token.")
        expect(page.locator("#dial")).to_be_hidden()
        expect(page.locator("#flops")).to_have_text("100 %")


# -- on any screen

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
    const [one, other] = [light(getComputedStyle(place).color), light(back(place))].sort((a, b) => b - a);
    return (one + 0.05) / (other + 0.05);
  });
}"""


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


def message(page, kind, text):
    expect(page.locator("#message")).to_contain_text(text)
    expect(page.locator("#message")).to_have_attribute("data-kind", kind)


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
        go.set()
        expect(page.locator(".token").first).to_be_visible()
        expect(page.locator("#message")).to_be_hidden()


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


# -- runs


def row(step, **more):
    trained = {"step": step, "loss": 5 - step / 50, "flops": 1e9 * step}
    return {**trained, "gradient_norm": 1.0, "tokens_per_second": 9e3, **more}


def layers(share):
    return {"layers": {"1": {"share": share, "gate": 0.5, "cutoff": 0.1}, "3": {"share": 0.125, "gate": 0.4}}}


@pytest.fixture
def run(tmp_path):
    log = RunLog(tmp_path)
    for step in range(0, 40, 5):
        log.add(row(step, **layers(0.1 + step / 1000), gradient_norm=1.5 if step < 35 else float("nan")))
    log.add({"step": 40, "flops": 4e10, "validation": {"loss": 4.5}})
    log.add({"step": 41, "event": "update not applied", "reason": "<b>loss</b> is nan"})
    return log


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


def test_a_model_that_is_no_run_has_no_curves(page, client):
    expect(page.locator("#views")).to_be_hidden()
    answer = client.get("/v1/run")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "'modepth' is no training run with a log"


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


def test_rows_are_sent_once_and_hold_no_number_that_is_none(shipped, run):
    with serving(lambda: replace(shipped, log=run)) as client:
        first = client.get("/v1/run").json()
        assert len(first["rows"]) == 10
        assert first["rows"][0]["layers"]["1"] == {"share": 0.1, "gate": 0.5}
        assert first["rows"][7]["gradient_norm"] is None
        known = {"start": 10, "log": first["log"]}
        assert client.get("/v1/run", params=known).json()["rows"] == []
        run.add(row(45))
        assert [each["step"] for each in client.get("/v1/run", params=known).json()["rows"]] == [45]
        run.drop_from(10)
        again = client.get("/v1/run", params=known).json()
        assert (again["start"], [each["step"] for each in again["rows"]]) == (0, [0, 5])
        assert client.get("/v1/run", params=known | {"start": 1}).json()["start"] == 0  # the first was of another log
        assert client.get("/v1/run?start=-1").status_code == 400
        run.path.unlink()
        assert client.get("/v1/run").json()["rows"] == []
        assert json.loads(client.get("/openapi.json").text)["paths"]["/v1/run"]

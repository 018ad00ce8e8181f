"""Faults 30 to 33: clients that leave, more than there is room for, keys, failures, signals."""

import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from modepth.serve.limits import Limits
from tests.serving import (
    alone,
    asking,
    complete,
    engine_of,
    long_stream,
    refused,
    serving,
    streamed,
    tiny_served,
    wait_for,
)


@pytest.mark.parametrize("stream", [True, False])
def test_after_a_client_has_left_at_most_one_more_token_is_drawn(client, monkeypatch, stream):
    engine, counts = engine_of(client), {}
    before, cancel = engine.endings["cancelled"], engine.cancel

    def spy(ticket):
        counts[ticket] = len(ticket.row.tokens)
        cancel(ticket)

    monkeypatch.setattr(engine, "cancel", spy)
    body = {"prompt": "some prompt", "max_tokens": 2900, "n": 2}
    if stream:
        chunks = streamed(client, body)
        assert all(next(chunks)["choices"][0]["finish_reason"] is None for _ in range(5))
        chunks.close()
    else:
        with asking(client, body):
            wait_for(lambda: all_generate(engine, 2))
    wait_for(lambda: not engine.busy)
    assert engine.endings["cancelled"] == before + 2
    assert len(counts) == 2
    for ticket, count in counts.items():
        assert ticket.row.num_prompt < count <= len(ticket.row.tokens) <= count + 1
    assert engine.cache_bytes == 0


def all_generate(engine, count):
    seated = list(engine.seated)
    return len(seated) == count and all(len(each.row.tokens) > each.row.num_prompt for each in seated)


def test_when_there_is_no_room_a_request_is_told_to_come_again(served):
    with serving(lambda: served, limits=Limits(requests=2)) as client:
        with long_stream(client, n=2) as response:
            lines = response.iter_lines()  # kept, or the stream would be closed
            assert next(lines).startswith("data: {")
            busy = complete(client)
            assert "try again later" in refused(busy, 429)
            assert int(busy.headers["Retry-After"]) >= 1
            refused(complete(client, n=3), 400, "n")  # that never fits
        wait_for(lambda: not engine_of(client).busy)
        assert complete(client, n=2).status_code == 200


def test_alive_is_not_yet_loaded(served):
    go = threading.Event()

    def slowly():
        go.wait()
        return served

    with serving(slowly, ready=False) as client:
        assert client.get("/health").json() == {"status": "ok"}
        for response in (client.get("/ready"), client.get("/metrics"), complete(client)):
            assert "being loaded" in refused(response, 503)
        go.set()
        wait_for(lambda: client.get("/ready").status_code == 200)
        assert complete(client).status_code == 200


def test_16_parallel_requests_are_answered_as_alone(client, served):
    prompts = ["x" * length for length in (1, 200, 3, 17, 90, 2, 31, 5, 23, 12, 1, 44, 9, 160, 27, 14)]
    counts = [3 + 7 * number % 19 for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda p, n: complete(client, prompt=p, max_tokens=n).json(), prompts, counts, timeout=60)
        )
    for prompt, count, answer in zip(prompts, counts, answers, strict=True):
        assert answer["choices"][0]["text"] == alone(served, prompt, max_tokens=count).text


def test_the_key_is_asked_for_everywhere_but_health(served):
    with serving(lambda: served, api_key="open sesame") as client:
        routes = {(method, route.path) for route in client.app.routes for method in route.methods}
        assert {("GET", "/health"), ("GET", "/openapi.json"), ("POST", "/v1/depth")} <= routes
        for method, path in [*routes, ("GET", "/nowhere"), ("POST", "/health/")]:
            url = re.sub(r"\{.*\}", "tiny", path)
            statuses = {
                client.request(method, url, headers={"Authorization": key.encode()}).status_code
                for key in ("", "Bearer wrong", "open sesame", "Bearer öpen", "Basic öpen", "Basic OndyZQ==")
            }
            assert statuses == {401} or (path == "/health" and 401 not in statuses)
            for scheme in ("Bearer", "bearer", "BEARER"):
                headers = {"Authorization": f"{scheme} open sesame"}
                assert client.request(method, url, headers=headers).status_code != 401
        wrong = client.get("/ready", headers={"Authorization": "Bearer wrong"})
        assert "API key is missing or wrong" in refused(wrong, 401)
        assert complete(client).status_code == 200


def test_other_sites_are_not_let_in(client):
    origin = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    for response in (client.options("/v1/completions", headers=origin), client.get("/v1/models", headers=origin)):
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert refused(client.options("/v1/completions", headers=origin), 405)
    assert refused(client.get("/nowhere"), 404)


def test_a_failure_of_the_model_is_an_error_and_not_the_end(served):
    broken = tiny_served()
    with torch.no_grad():
        broken.model.layers[1].router.score.weight[0, 0] = torch.nan
    with serving(lambda: broken) as client:
        assert "layer 1: the router score" in refused(complete(client), 500)
        with long_stream(client) as response:
            lines = [line for line in response.iter_lines() if line]
        assert "layer 1: the router score" in json.loads(lines[0].removeprefix("data: "))["error"]["message"]
        assert len(lines) == 1
        assert client.get("/ready").status_code == 200


def test_an_engine_that_stops_ends_its_requests_and_says_that_it_is_not_ready(served, monkeypatch, caplog):
    with serving(lambda: served) as client:
        engine, steps = engine_of(client), itertools.count()
        original = engine.step
        monkeypatch.setattr(engine, "step", lambda: original() if next(steps) < 5 else {}["planted"])
        with long_stream(client, n=2) as response:
            lines = [line for line in response.iter_lines() if line]
        assert "KeyError: 'planted'" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        assert len(lines) > 2
        for refusal in (client.get("/ready"), complete(client)):
            assert "the engine has stopped (KeyError: 'planted')" in refused(refusal, 503)
        assert client.get("/health").status_code == 200
        assert (engine.num_admitted, engine.num_reserved, engine.cache_bytes) == (0, 0, 0)
        (record,) = [each for each in caplog.records if "the engine has stopped" in each.message]
        assert isinstance(record.exc_info[1], KeyError)


def test_metrics_count_what_was_done(served):
    with serving(lambda: served) as client:
        complete(client, n=2)
        lines = dict(
            line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#")
        )
    assert lines['modepth_tokens_total{kind="prompt"}'] == "22"
    assert lines['modepth_tokens_total{kind="generated"}'] == "8"
    assert lines['modepth_requests_total{ending="length"}'] == "2"
    assert lines["modepth_first_token_seconds_count"] == "2"
    assert lines['modepth_between_tokens_seconds_bucket{le="+Inf"}'] == "6"
    assert lines["modepth_cache_bytes"] == "0"
    assert lines['modepth_cache_entries_total{kind="dense"}'] == str(2 * 3 * 14)

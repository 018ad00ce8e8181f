"""The server as its clients meet it: answers, refusals, leaving, load."""

import itertools
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY

import httpx
import openai
import pytest
import torch

from modepth.flops import cache_bytes, dense
from modepth.generation import generate
from modepth.sampling import Sampling
from modepth.serve.chat import ChatTemplate
from modepth.serve.limits import Limits
from modepth.serve.protocol import ChatBody, CompletionBody
from modepth.tokenizer import ByteTokenizer, as_library
from tests.oracles import tiny_model
from tests.serving import LONGEST, engine_of, serving, tiny_served, wait_for


@pytest.fixture(scope="module")
def served():
    return tiny_served()


@pytest.fixture(scope="module")
def client(served):
    with serving(lambda: served) as client:
        yield client
        assert engine_of(client).cache_bytes == 0
        assert engine_of(client).num_admitted == 0


@pytest.fixture(scope="module")
def official(client):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
        yield official


def alone(served, prompt, routing=None, **sampling):
    how = Sampling(**{"max_tokens": 16, "stop_ids": (256,)} | sampling)
    (answer,) = generate(served.model, [prompt], how, tokenizer=served.tokenizer, routing=routing, layers=True)
    return answer


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": "some prompt", "temperature": 0, "max_tokens": 4} | body)


# -- the official client


def test_a_completion_is_what_generate_gives(official, served):
    for options in ({"temperature": 0}, {"temperature": 1, "top_p": 0.9, "seed": 7}):
        answer = official.completions.create(model="tiny", prompt="some prompt", max_tokens=12, **options)
        expected = alone(served, "some prompt", max_tokens=12, **options)
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 12, 23)


def test_a_stream_tells_what_the_whole_answer_does(official):
    asked = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 9, "seed": 3, "logprobs": 2, "echo": True}
    whole = official.completions.create(**asked, extra_body={"depth": True})
    chunks = list(
        official.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body={"depth": True}
        )
    )
    assert chunks[-1].usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 36)
    for choice in whole.choices:
        mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.text for each in mine) == choice.text
        assert [each.finish_reason for each in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        for field in ("tokens", "token_logprobs", "text_offset"):
            pieces = [getattr(each.logprobs, field) for each in mine]
            assert [value for piece in pieces for value in piece] == getattr(choice.logprobs, field)
        for field in ("tokens", "layers", "scores"):
            assert [value for each in mine for value in each.depth[field]] == choice.depth[field]
        assert mine[-1].depth["cost"] == choice.depth["cost"]
    assert len({choice.text for choice in whole.choices}) == 4


def test_seeds_belong_to_requests(official, served):
    asked = {"model": "tiny", "max_tokens": 9, "temperature": 1, "seed": 5}
    texts = [each.text for each in official.completions.create(prompt=["one", "two"], n=2, **asked).choices]
    assert texts == [
        alone(served, prompt, max_tokens=9, temperature=1.0, seed=seed).text
        for prompt in ("one", "two")
        for seed in (5, 6)
    ]
    unseeded = {official.completions.create(model="tiny", prompt="one", max_tokens=9).choices[0].text for _ in "ab"}
    assert len(unseeded) == 2


def test_a_stop_ends_the_text_and_is_not_in_it(official, served):
    whole = alone(served, "some prompt", max_tokens=12, temperature=1.0, seed=5)
    stop = whole.text[4:6]
    answer = official.completions.create(
        model="tiny", prompt="some prompt", max_tokens=12, seed=5, stop=["nowhere", stop]
    )
    assert answer.choices[0].text == whole.text[: whole.text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_one_full_forward(official, served):
    choice = official.completions.create(
        model="tiny", prompt="some", max_tokens=5, temperature=0, logprobs=3, echo=True
    ).choices[0]
    tokens = [*served.tokenizer.encode("some"), *alone(served, "some", max_tokens=5).tokens]
    with torch.no_grad():
        log = served.model(torch.tensor([tokens])).logits_BTV[0].log_softmax(-1)
    expected = [log[place, token].item() for place, token in enumerate(tokens[1:])]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-12)
    best = [served.tokenizer.decode([token]) for token in log[2].topk(3).indices.tolist()]
    assert list(choice.logprobs.top_logprobs[3]) == list(dict.fromkeys(best))
    assert choice.text == "some" + served.tokenizer.decode(tokens[4:])
    without = official.completions.create(model="tiny", prompt="some", max_tokens=5, temperature=0, logprobs=0)
    assert without.choices[0].logprobs.token_logprobs == pytest.approx(expected[3:], abs=1e-12)


def test_depth_tells_the_layers_of_each_token_and_what_they_cost(client, official, served):
    config = served.model.config
    for capacity in (None, 0.25, 1.0):
        extra = {"depth": True} | ({} if capacity is None else {"capacity": capacity})
        choice = official.completions.create(
            model="tiny", prompt="some prompt", max_tokens=20, temperature=0, extra_body=extra
        ).choices[0]
        expected = alone(served, "some prompt", max_tokens=20, routing=served.routing(capacity))
        assert choice.depth["layers"] == [list(layers) for layers in expected.layers]
        told = client.post("/v1/depth", json={"text": "some prompt", "capacity": capacity}).json()["tokens"]
        assert choice.depth["scores"][:11] == [pytest.approx(token["scores"], abs=1e-12) for token in told]
        assert "".join(choice.depth["tokens"][:11]) == "some prompt"
        assert len(choice.depth["tokens"]) == 31
        cost = choice.depth["cost"]
        share = sum(map(len, expected.layers)) / (3 * 30)
        assert cost["cache_bytes"] / cost["dense_cache_bytes"] == pytest.approx(share)
        assert cost["dense_cache_bytes"] == cache_bytes(dense(config), 30, value_bytes=8)
        assert cost["flops_share"] == pytest.approx(1.0, abs=0.01) if capacity == 1 else cost["flops_share"] < 0.95


def test_a_chat_is_a_completion_of_its_template(official, served):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "seed": 2}
    expected = alone(served, "u:hi\na:", max_tokens=7, temperature=1.0, seed=2)
    answer = official.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == 7
    assert [each.token for each in answer.choices[0].logprobs.content] == [
        served.tokenizer.decode([token]) for token in expected.tokens
    ]
    chunks = list(official.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected.text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 6
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_models_are_listed_with_their_dial(official):
    (model,) = official.models.list().data
    assert (model.id, model.modepth["dial"]) == ("tiny", [0.25, 1.0])
    assert official.models.retrieve("tiny").modepth["routed_layers"] == [1]


def test_the_official_client_raises_its_own_errors(official):
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be less than or equal to 2, got 9"):
        official.completions.create(model="tiny", prompt="a", temperature=9)
    for name in ("gpt", "../../etc/passwd", "/etc/passwd"):
        with pytest.raises(openai.NotFoundError, match="is not served, 'tiny' is"):
            official.completions.create(model=name, prompt="a")


# -- depth of a text


def test_the_depth_of_a_text_is_what_one_full_forward_routes(client, served):
    for capacity in (None, 0.25):
        answer = client.post("/v1/depth", json={"text": "Where does it go?", "capacity": capacity}).json()
        with torch.no_grad():
            tokens = torch.tensor([served.tokenizer.encode("Where does it go?")])
            (routing,) = served.model(tokens, routing=served.routing(capacity)).routings
        assert "".join(token["text"] for token in answer["tokens"]) == "Where does it go?"
        assert [token["routed"] for token in answer["tokens"]] == [[bool(c)] for c in routing.chosen_BT[0]]
        scores = [token["scores"][0] for token in answer["tokens"]]
        assert scores == pytest.approx(routing.logit_BT[0].tolist(), abs=1e-12)
        (threshold,) = answer["thresholds"]
        assert [score >= threshold for score in scores] == routing.chosen_BT[0].tolist()
        assert [token["layers"] for token in answer["tokens"]] == [
            [0, 1, 2] if chosen else [0, 2] for chosen in routing.chosen_BT[0]
        ]
        kept = (2 * 17 + int(routing.chosen_BT.sum())) / (3 * 17)
        assert answer["cost"]["cache_bytes"] / answer["cost"]["dense_cache_bytes"] == pytest.approx(kept)


# -- faults 27 to 29: what is sent


def refused(response, status, field=None):
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    return error["message"]


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{", JSON),
        (b"", JSON),
        (b"[]", JSON),
        (b"null", JSON),
        (b"\xff\xfe", JSON),
        (b'"prompt"', JSON),
        (b"[" * 100_000, JSON),
        (b'{"prompt": ' + b"[" * 100_000, JSON),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", JSON),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}),
        (b'{"prompt": "a"}', {}),
        (b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/depth"])
def test_a_body_that_is_none_is_refused_in_the_shape_of_openai(client, path, content, headers):
    assert refused(client.post(path, content=content, headers=headers), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in ("NaN", "Infinity", "-1", "2.1", '"1"', "true", "1e999")),
        *(("max_tokens", value) for value in ("-5", "0", "1e30", "true", '"7"', "1.5", "9" * 400)),
        *(("stop", value) for value in ('""', '[""]', "7", '[["a"]]', json.dumps(["a"] * 17), f'"{"a" * 1001}"')),
        *(("n", value) for value in ("0", "-1", "129", "1.0")),
        *(("top_p", value) for value in ("0", "1.01", "NaN")),
        *(("logprobs", value) for value in ("6", "-1", "true")),
        *(("seed", value) for value in ("1.5", "9223372036854775808")),
        *(("prompt", value) for value in ('""', "[]", "[[]]", "[257]", "[-1]", "[1.5]", "[true]", '[1, "a"]', "7")),
        *(("prompt", value) for value in ("[9223372036854775808]", "[[1], [257]]", "null")),
        *(("capacity", value) for value in ("0.3", "0", "1.5", "NaN")),
        ("stream_options", '{"other": 1}'),
        ("frequency_penalty", "0.5"),
        ("logit_bias", '{"5": 1}'),
        ("unheard_of", "1"),
        ("unheard_of", "null"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(client, field, value):
    body = {"prompt": '"a"', field: value}
    content = "{" + ", ".join(f'"{name}": {text}' for name, text in body.items()) + "}"
    message = refused(client.post("/v1/completions", content=content, headers=JSON), 400, field)
    assert message.startswith(f"{field}: ")
    assert not engine_of(client).busy


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)], ids=["text", "chat"]
)
def test_null_is_a_field_that_is_not_there(client, path, kind):
    nulls = {name: None for name, field in kind.model_fields.items() if not field.is_required()}
    asked = {"prompt": "a"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "a"}]}
    few = {"max_tokens": 5, "seed": 3}
    told, plain = (client.post(path, json=body).json() for body in (asked | nulls | few, asked | few))
    assert told["choices"] == plain["choices"]
    assert client.post(path, json=asked | nulls | {"max_tokens": 1}).status_code == 200
    schema = client.get("/openapi.json").json()["components"]["schemas"][kind.__name__]["properties"]
    for name in nulls:
        assert schema[name].get("type") == "null" or {"type": "null"} in schema[name]["anyOf"]


def test_parts_of_text_are_a_text(client):
    def say(content):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "seed": 3}
        return client.post("/v1/chat/completions", json=body)

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert say(parts).json()["choices"] == say("one\ntwo").json()["choices"]
    picture = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    for wrong in ([*parts, picture], [], [{"type": "text"}], ["one"], 7, None):
        assert refused(say(wrong), 400, "messages").startswith("messages: ")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (r'"prompt": "a", "\ud800": 1', 400),
        (r'"prompt": "a", "stream_options": {"\ud800": 1}', 400),
        (r'"prompt": "\ud800"', 400),
        (r'"prompt": ["\ud800", 1]', 400),
        (r'"prompt": "a", "stop": "\ud800"', 400),
        (r'"prompt": "a", "model": "\ud800"', 404),
    ],
)
def test_half_a_character_is_refused(client, content, status):
    assert refused(client.post("/v1/completions", content=f"{{{content}}}", headers=JSON), status, ANY)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), as_library(ByteTokenizer())], ids=["bytes", "library"])
def test_ids_that_only_the_model_has_are_refused_in_prompts_and_answered_as_generate_does(tokenizer):
    model = tiny_model(vocab_size=400, num_layers=3, cutoff=0.3).double().eval()
    served = tiny_served(model=model, tokenizer=tokenizer, dial={})
    with serving(lambda: served) as client:
        message = refused(complete(client, prompt=[[5], [7, 300]]), 400, "prompt")
        assert "token ids must be in 0..256, got 300" in message
        asked = {"max_tokens": 30, "temperature": 1, "seed": 4}
        expected = alone(served, "some prompt", **asked | {"temperature": 1.0})
        assert max(expected.tokens) > 256
        answer = complete(client, **asked, logprobs=5, depth=True).json()
        assert answer["choices"][0]["text"] == expected.text


def test_more_than_the_context_is_refused_with_both_counts(client):
    message = refused(complete(client, prompt=[1] * 2990, max_tokens=11), 400, "prompt")
    assert f"2990 tokens and max_tokens is 11, together 3001: more than the model's context of {LONGEST}" in message
    assert "3100 tokens" in refused(client.post("/v1/depth", json={"text": "a" * 3100}), 400, "text")


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"prompt": [[1]] * 2**17}, "prompt", "131072 answers at once are more than the 256 that are admitted"),
        ({"prompt": ["a"] * 200, "n": 2}, "n", "400 answers at once are more than the 256 .*: 200 times n, which is 2"),
    ],
    ids=["prompts", "n"],
)
def test_more_answers_than_fit_are_refused_before_any_is_asked_for(client, monkeypatch, body, field, message):
    monkeypatch.setattr("modepth.serve.answers.Request", lambda **_: pytest.fail("made"))
    monkeypatch.setattr(type(client.server.running[0].tokenizer), "encode", lambda *_: pytest.fail("encoded"))
    assert re.search(message, refused(client.post("/v1/completions", json=body), 400, field))


def test_a_body_over_the_limit_is_refused_unread(client, served):
    assert complete(client, prompt="a" * (2**20 + 1)).status_code == 413

    # In pieces, without saying how long: refused at the first byte too many, and the connection closed.
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as sender:
        sender.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n")
        sender.sendall(b"Content-Type: application/json\r\n\r\n")
        for _ in range(16):
            sender.sendall(b"10000\r\n" + b"[" * 2**16 + b"\r\n")
        sender.sendall(b"1\r\n[\r\n")
        answer = b"".join(iter(lambda: sender.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"the body has more than 1048576 bytes" in answer
    assert complete(client).status_code == 200


def test_a_chat_without_a_template_is_refused(served):
    with serving(lambda: tiny_served(template=None)) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert "no chat template" in refused(client.post("/v1/chat/completions", json=body), 400, "messages")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only one message') }}", "only one message"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages.pop() }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[9].content.x }}", "has no element 9"),
    ],
)
def test_what_goes_wrong_in_a_template_is_told_to_who_asked(source, reason):
    tokenizer = as_library(ByteTokenizer())
    with serving(lambda: tiny_served(template=ChatTemplate(source, {}, tokenizer.tokenizer))) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        message = refused(client.post("/v1/chat/completions", json=body), 400, "messages")
        assert "messages do not fit the model's chat template" in message
        assert reason in message
        assert complete(client).status_code == 200


# -- faults 30 to 33: load


def long_stream(client, **body):
    asked = {"prompt": "some prompt", "max_tokens": 2900, "stream": True, "stop": None} | body
    return client.stream("POST", "/v1/completions", json=asked)


def test_a_client_that_leaves_a_stream_ends_its_request(client):
    engine = engine_of(client)
    before = engine.endings["cancelled"], engine.num_read["generated"]
    with long_stream(client, n=2) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        assert len(engine.seated) == 2
    wait_for(lambda: not engine.busy)
    assert engine.endings["cancelled"] == before[0] + 2
    assert engine.num_read["generated"] < before[1] + 2000
    assert engine.cache_bytes == 0


def test_a_client_that_leaves_a_whole_answer_ends_its_request(client):
    engine = engine_of(client)
    before = engine.endings["cancelled"], engine.num_read["generated"]
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=client.base_url, timeout=0.3) as impatient:
        complete(impatient, max_tokens=2900, temperature=1)
    wait_for(lambda: not engine.busy)
    assert engine.endings["cancelled"] == before[0] + 1
    assert engine.num_read["generated"] < before[1] + 2000


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
        routes = [("GET", path) for path in ("/ready", "/metrics", "/v1/models", "/openapi.json", "/nowhere")]
        routes += [("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/v1/depth")]
        for method, path in routes:
            assert client.request(method, path).status_code != 401
            for key in ("", "Bearer wrong", "open sesame", "Bearer öpen", "Basic öpen", "Basic OndyZQ=="):
                response = client.request(method, path, headers={"Authorization": key.encode()})
                assert "API key is missing or wrong" in refused(response, 401)
        assert client.get("/health", headers={"Authorization": ""}).status_code == 200
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

"""Faults 27 to 29: what is sent that cannot be answered, and how it is refused."""

import json
import re
import socket
from unittest.mock import ANY

import pytest
from pydantic import ValidationError

from modepth.serve.chat import ChatTemplate
from modepth.serve.protocol import ChatBody, CompletionBody
from modepth.tokenizer import ByteTokenizer, as_library
from tests.oracles import tiny_model
from tests.serving import LONGEST, alone, complete, engine_of, refused, serving, tiny_served

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
        *(("frequency_penalty", value) for value in ("0.5", "false")),
        *(("best_of", value) for value in ("2", "true")),
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
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [1.5] * 200_000}),
        (CompletionBody, {"prompt": [[1.5]] * 150_000}),
        (CompletionBody, {"prompt": "a", "stop": [7] * 200_000}),
        (ChatBody, {"messages": [{}] * 200_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 200_000}]}),
    ],
)
def test_a_body_full_of_mistakes_is_refused_at_the_first(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10


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

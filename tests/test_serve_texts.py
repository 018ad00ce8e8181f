"""Characters that several tokens spell, in the server's answers: whole in the depth, as bytes beside probabilities."""

import json

import pytest

from tests.serving import serving, tiny_served

TEXT = "café 日本 😀"


@pytest.fixture(scope="module")
def client():
    with serving(tiny_served) as client:
        yield client


def test_the_depth_of_a_text_has_whole_characters_at_their_last_tokens(client):
    tokens = client.post("/v1/depth", json={"text": TEXT}).json()["tokens"]
    assert len(tokens) == len(TEXT.encode())
    assert [token["text"] for token in tokens if token["text"]] == list(TEXT)
    assert [token["text"] for token in tokens[-5:]] == [" ", "", "", "", "😀"]


def test_the_tokens_of_a_streamed_depth_make_the_text(client):
    """The random model writes bytes that are no text, up to the last one."""
    asked = {"prompt": TEXT, "max_tokens": 40, "temperature": 1, "seed": 3, "depth": True}
    (whole,) = client.post("/v1/completions", json=asked | {"echo": True}).json()["choices"]
    assert "".join(whole["depth"]["tokens"]) == whole["text"]
    assert "\ufffd" in whole["text"]
    with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    told = [token for line in lines[:-1] for token in json.loads(line)["choices"][0]["depth"]["tokens"]]
    assert told == whole["depth"]["tokens"]
    assert len(told) == len(TEXT.encode()) + 40


def test_the_bytes_beside_probabilities_are_those_of_the_tokens(client):
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 2}
    (choice,) = client.post("/v1/chat/completions", json=asked | {"logprobs": True, "top_logprobs": 2}).json()[
        "choices"
    ]
    told = choice["logprobs"]["content"]
    assert (
        bytes(byte for token in told for byte in token["bytes"]).decode("utf-8", "replace")
        == choice["message"]["content"]
    )
    entries = [entry for token in told for entry in (token, *token["top_logprobs"])]
    assert all(len(entry["bytes"]) == 1 for entry in entries)  # each token of this model is a byte
    assert any(entry["bytes"][0] >= 128 for entry in entries)

"""The server as its clients meet it: what they are answered is what `generate` and full forwards give."""

from dataclasses import replace

import openai
import pytest
import torch

from modepth.flops import cache_bytes, dense
from modepth.serve.answers import chat_requests
from modepth.serve.protocol import ChatBody
from tests.serving import LONGEST, alone, complete, serving


@pytest.fixture(scope="module")
def official(client):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official:
        yield official


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


@pytest.mark.parametrize(
    ("length", "limit", "most"),
    [
        (10, {}, 1024),
        (LONGEST - 1000, {}, 1000),
        (10, {"max_tokens": 2000}, 2000),
        (10, {"max_completion_tokens": 3}, 3),
    ],
)
def test_a_chat_without_a_limit_does_not_reserve_the_whole_context(served, length, limit, most):
    body = ChatBody(messages=[{"role": "user", "content": "x" * (length - 5)}], **limit)
    (request,) = chat_requests(body, served)
    assert (len(request.prompt), request.sampling.max_tokens) == (length, most)


def test_the_models_are_listed_with_their_dial(official):
    (model,) = official.models.list().data
    assert (model.id, model.modepth["dial"]) == ("tiny", [0.25, 1.0])
    assert official.models.retrieve("tiny").modepth["routed_layers"] == [1]


def test_a_name_may_hold_a_slash(served):
    with serving(lambda: replace(served, name="org/tiny")) as client:
        assert client.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
        assert client.get("/v1/models/org").status_code == 404
        assert complete(client, model="org/tiny").status_code == 200


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

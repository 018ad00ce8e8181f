"""Where a text's depth went, as the report and the server tell it, against one full forward."""

import pytest
import torch

from modepth.depth import read_depth, thresholds
from modepth.flops import cache_bytes, dense
from modepth.tokenizer import ByteTokenizer, as_library
from tests.oracles import tiny_model
from tests.serving import tiny_served

TEXT = b"Where does the depth go?"


def test_the_depth_of_tokens_is_what_one_full_forward_routes():
    served = tiny_served()
    model, tokens = served.model, list(TEXT)
    depth = read_depth(model, tokens, served.tokenizer)
    with torch.no_grad():
        (routing,) = model(torch.tensor([tokens])).routings
    chosen = routing.chosen_BT[0].tolist()
    assert 0 < sum(chosen) < len(tokens)
    assert [token["routed"] for token in depth["tokens"]] == [[each] for each in chosen]
    assert [token["layers"] for token in depth["tokens"]] == [[0, 1, 2] if each else [0, 2] for each in chosen]
    assert [token["scores"][0] for token in depth["tokens"]] == pytest.approx(routing.logit_BT[0].tolist(), abs=1e-12)
    assert "".join(token["text"] for token in depth["tokens"]) == TEXT.decode()
    whole = cache_bytes(dense(model.config), len(tokens), value_bytes=8)
    kept = (2 * len(tokens) + sum(chosen)) / (3 * len(tokens))
    assert (depth["cost"]["dense_cache_bytes"], depth["cost"]["cache_bytes"] / whole) == (whole, pytest.approx(kept))


def test_thresholds_are_those_of_the_routing_that_was_asked_for():
    served = tiny_served()
    ((layer, calibrated),) = served.dial[0.25].thresholds
    assert layer == 1
    assert thresholds(served.model, served.dial[0.25]) == [calibrated]
    assert thresholds(served.model) == [pytest.approx(0.3)]  # the cutoff
    assert thresholds(served.model, served.dial[1.0]) == [None]


def test_a_dense_model_spends_everything():
    depth = read_depth(tiny_model(vocab_size=256, routing=None).eval(), list(TEXT), as_library(ByteTokenizer()))
    assert (depth["routed_layers"], depth["thresholds"], depth["cost"]["flops_share"]) == ([], [], 1.0)
    assert depth["tokens"][0]["scores"] == []

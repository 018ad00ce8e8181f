"""Drawing tokens: the distribution that temperature, top-k, top-p and the penalty define, and no other."""

import math

import pytest
import torch
from scipy.stats import chisquare

from modepth.sampling import Sampling, draw, new_generator, penalized, probabilities

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.4, 1.4, 0.0, -3.0, 0.9], dtype=torch.float64)
HOWS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 100},
]


def reference(logits, temperature, top_k=None, top_p=None):
    """The distribution in plain Python, from its definition."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))[:top_k]
    total = sum(weights[token] for token in ranked)
    kept, reached = [], 0.0
    for token in ranked:
        if kept and top_p is not None and reached >= top_p:
            break
        kept.append(token)
        reached += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in weights]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_probabilities_are_those_of_the_definition(how):
    expected = torch.tensor(reference(LOGITS.tolist(), **how), dtype=torch.float64)
    torch.testing.assert_close(probabilities(LOGITS, Sampling(**how)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_draws_follow_the_distribution(how):
    sampling = Sampling(**how, seed=3)
    generator, counts = new_generator(sampling), [0] * len(LOGITS)
    for _ in range(4000):
        counts[draw(LOGITS, sampling, [], generator)] += 1
    shares = reference(LOGITS.tolist(), **how)
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0)
    possible = [(count, 4000 * share) for count, share in zip(counts, shares, strict=True) if share]
    if len(possible) > 1:
        assert chisquare(*zip(*possible, strict=True)).pvalue > 1e-3


def test_the_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    expected = LOGITS.clone()
    expected[1], expected[2] = 1.0, -2.0
    assert torch.equal(penalized(LOGITS, [1, 2], 2.0), expected)
    assert draw(LOGITS, Sampling(), [], new_generator(Sampling())) == 1
    assert draw(LOGITS, Sampling(repetition_penalty=2.0), [1, 1], new_generator(Sampling())) == 3


def test_temperature_zero_is_the_likeliest_and_the_lowest_of_equals():
    assert draw(torch.tensor([1.0, 5.0, 5.0]), Sampling(), [], new_generator(Sampling())) == 1


def test_a_temperature_near_zero_overflows_nothing():
    assert draw(LOGITS * 1e4, Sampling(temperature=1e-300), [], new_generator(Sampling())) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be a whole number >= 1, got 0"),
        ("max_tokens", True, "max_tokens must be a whole number >= 1, got True"),
        ("temperature", math.nan, "temperature must be a finite number >= 0.0, got nan"),
        ("temperature", -0.1, "temperature must be a finite number >= 0.0, got -0.1"),
        ("top_k", 0, "top_k must be a whole number >= 1, got 0"),
        ("top_p", 1.1, r"top_p must be a number in \[0.0, 1.0\), got 1.1"),
        ("repetition_penalty", 0, "repetition_penalty must be more than 0, got 0"),
        ("seed", -1, r"seed must be a whole number from 0 to 2\^64 - 1, as torch takes seeds, got -1"),
        ("seed", 2**64, r"seed must be a whole number from 0 to 2\^64 - 1"),
        ("stop_ids", (1.5,), "stop_ids must be a whole number >= 0, got 1.5"),
        ("stop_strings", ("",), "stop_strings must be texts of one or more characters"),
    ],
)
def test_a_bad_setting_is_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{field: value})

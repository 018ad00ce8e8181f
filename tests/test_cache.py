"""The laws of the cache: however a text is read, in whatever company, its logits are those of one full forward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modepth.cache import Cache
from tests.oracles import PARTS, SELECTIONS, tiny_config, tiny_model, tiny_tokens

pytestmark = pytest.mark.usefixtures("fp64")

RULES = [{"rule": "cutoff", "cutoff": 0.3}, {"rule": "router"}, {"rule": "predictor", "predictor": 5}]
CHOICES = [
    *RULES,
    *({"selection": name} for name in SELECTIONS if name != "topk"),
    {"capacity": 1.0},
    {"weigh_bypass": True},
]
LENGTHS = (23, 11, 17, 1)


def model_of(**changes):
    """A model each of whose routed layers computes some tokens and not others; at capacity 1, all."""
    model, tokens = tiny_model(**changes).eval(), tiny_tokens(B=4)
    if model.config.routing.rule == "predictor":
        with torch.no_grad():
            for place, number in enumerate(model.config.routed_layers):
                hidden, _, out = model.layers[number].router.predictor
                hidden.weight.normal_(std=2.0)
                out.bias -= model(tokens).routings[place].predicted_BT.median() + 0.01  # no token at the threshold
    for routing in model(tokens).routings:
        assert changes.get("capacity") == 1.0 or 0.1 < routing.chosen_BT.double().mean() < 0.9
    return model


def full(model, rows):
    """The logits of each row, read alone in one causal forward without a cache."""
    with torch.no_grad():
        return [model(torch.tensor([row])).logits_BTV[0] for row in rows]


def read(model, rows, caches, counts):
    """The logits of the next `counts` tokens of the rows."""
    pieces = [row[cache.length : cache.length + count] for row, cache, count in zip(rows, caches, counts, strict=True)]
    with torch.no_grad():
        states_ND, _ = model.extend(pieces, caches)
        return model.lm_head(states_ND).split([len(piece) for piece in pieces])


def read_all(model, rows, next_counts):
    """The logits of all tokens of the rows, read by steps of `next_counts(cache lengths)`, and the caches."""
    caches, parts = [Cache(model.config) for _ in rows], [[] for _ in rows]
    while any(cache.length < len(row) for cache, row in zip(caches, rows, strict=True)):
        for row_parts, part in zip(parts, read(model, rows, caches, next_counts(caches)), strict=True):
            row_parts.append(part)
    return [torch.cat(row_parts) for row_parts in parts], caches


def rows_of(lengths, seed=1):
    return [row[:length] for row, length in zip(tiny_tokens(B=4, seed=seed).tolist(), lengths, strict=False)]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


WAYS = {
    "whole": lambda caches: [64] * len(caches),
    "in chunks of 5": lambda caches: [5] * len(caches),
    "one at a time": lambda caches: [1] * len(caches),
    "prefill, then one at a time": lambda caches: [9 if cache.length == 0 else 1 for cache in caches],
}


@pytest.mark.law
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("choice", [*CHOICES, *({**RULES[0], "num_kv_heads": heads} for heads in (6, 1))], ids=str)
def test_every_way_of_reading_equals_one_full_forward(choice, part, way):
    model = model_of(part=part, **choice)
    rows = rows_of(LENGTHS)
    got, _ = read_all(model, rows, WAYS[way])
    assert_same(got, full(model, rows))


@pytest.mark.law
@given(st.data())
def test_any_steps_of_any_batch_equal_one_full_forward(data):
    torch.set_default_dtype(torch.float64)
    model = model_of(part=data.draw(st.sampled_from(PARTS)), **data.draw(st.sampled_from(RULES)))
    rows = rows_of(data.draw(st.lists(st.integers(1, 23), min_size=1, max_size=4)))

    def next_counts(caches):
        counts = [data.draw(st.integers(0, 6)) for _ in caches]
        unfinished = [n for n, (row, cache) in enumerate(zip(rows, caches, strict=True)) if cache.length < len(row)]
        counts[unfinished[0]] += 1
        return counts

    got, _ = read_all(model, rows, next_counts)
    assert_same(got, full(model, rows))


@pytest.mark.law
@pytest.mark.parametrize("part", PARTS)
def test_rows_may_join_leave_and_change_places(part):
    model = model_of(part=part, **RULES[0])
    rows = rows_of(LENGTHS)
    caches = [Cache(model.config) for _ in rows]
    parts = [[] for _ in rows]
    # Who is read, in which order, and by how many tokens.
    for members, count in [((0,), 4), ((1, 0), 2), ((2, 0, 1), 3), ((0, 2), 5), ((3, 2), 1), ((2, 1), 9), ((0,), 9)]:
        picked = [[which[member] for member in members] for which in (rows, caches)]
        for member, part_logits in zip(members, read(model, *picked, [count] * len(members)), strict=True):
            parts[member].append(part_logits)
    read_so_far = [torch.cat(row_parts) for row_parts in parts]
    assert [len(logits) for logits in read_so_far] == [23, 11, 17, 1]
    assert_same(read_so_far, full(model, rows))


@pytest.mark.law
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("choice", RULES, ids=str)
def test_a_skipped_token_writes_nothing(choice, part):
    model = model_of(part=part, **choice)
    rows = rows_of(LENGTHS)
    _, caches = read_all(model, rows, WAYS["in chunks of 5"])
    for row, cache in zip(rows, caches, strict=True):
        routings = {routing.layer: routing for routing in model(torch.tensor([row])).routings}
        for number, layer in enumerate(cache.layers):
            computed = list(range(len(row)))
            if number in routings and part != "mlp":
                computed = [place for place in computed if routings[number].chosen_BT[0, place]]
            assert layer.count == len(computed)
            assert computed == [] or layer.position_S[: layer.count].tolist() == computed
        assert cache.num_entries == [layer.count for layer in cache.layers]
        entry = 2 * 3 * 10 * 8 + 4  # keys and values of 3 heads of 10 in float64, and a position
        assert cache.bytes_written == entry * sum(cache.num_entries)
        assert cache.bytes_written <= cache.bytes_allocated


@pytest.mark.parametrize("part", PARTS)
def test_a_block_receives_exactly_the_tokens_that_are_routed_and_runs_for_no_other(part):
    model = model_of(part=part, **RULES[0])
    rows = rows_of(LENGTHS)
    received = {number: [] for number in model.config.routed_layers}
    for number, seen in received.items():
        module = model.layers[number].mlp if part != "attention" else model.layers[number].self_attn
        module.register_forward_hook(lambda _, inputs, out, seen=seen: seen.append(inputs[0].shape[1]))
    caches = [Cache(model.config) for _ in rows]
    for _ in range(23):
        for seen in received.values():
            seen.clear()
        pieces = [row[cache.length : cache.length + 1] for row, cache in zip(rows, caches, strict=True)]
        with torch.no_grad():
            _, routings = model.extend(pieces, caches)
        for routing in routings:
            count = int(routing.chosen_BT.sum())
            assert received[routing.layer] == ([count] if count else [])


def test_what_was_expected_is_allocated_at_once_and_more_grows_by_an_eighth():
    config = tiny_config(capacity=0.25)
    rows = rows_of([23])
    _, (unexpected,) = read_all(tiny_model(capacity=0.25).eval(), rows, WAYS["one at a time"])
    cache = Cache(config, expected=20)
    layer = cache.layers[0]
    entry, position = torch.zeros(1, 3, 10), torch.zeros(1, dtype=torch.int64)
    rooms = []
    for _ in range(40):
        layer.append(entry, entry, position)
        rooms.append(layer.room)
    assert rooms == [20] * 20 + [30] * 10 + [41] * 10
    assert [each.expected for each in cache.layers] == [20, 5, 20, 5, 20]
    assert unexpected.bytes_allocated >= unexpected.bytes_written
    assert [each.expected for each in Cache(config, expected=10**6).layers] == [64, 16, 64, 16, 64]


def test_top_k_with_a_cache_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="with a cache the mode must be 'causal', got 'topk': top-k looks at tokens"):
        model.extend([[1]], [Cache(model.config)], mode="topk")


def test_more_than_the_context_is_refused_before_anything_is_written():
    model = tiny_model(max_length=8).eval()
    cache = Cache(model.config)
    with torch.no_grad():
        model.extend([[1, 2, 3, 4, 5]], [cache])
        with pytest.raises(ValueError, match="5 tokens in the cache and 4 more are more than the model's max_length 8"):
            model.extend([[1, 2, 3, 4]], [cache])
    assert (cache.length, cache.num_entries[0]) == (5, 5)


@pytest.mark.parametrize(("tokens", "caches"), [([[1]], 2), ([[], []], 2), ([], 0)])
def test_extend_needs_a_cache_a_row_and_a_token(tokens, caches):
    model = tiny_model()
    with pytest.raises(ValueError, match="a cache for each row and at least one new token"):
        model.extend(tokens, [Cache(model.config) for _ in range(caches)])

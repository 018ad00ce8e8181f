"""How much of each prompt a step reads: shares that are fair, long steps that are rare."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modepth.serve import pace
from modepth.serve.limits import Limits, next_counts, share_out
from tests.oracles import tiny_model


@given(st.lists(st.integers(1, 300), max_size=20), st.integers(1, 64))
def test_a_budget_is_shared_out_fairly(wanted, budget):
    shares = share_out(wanted, budget)
    assert all(1 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) <= max(budget, len(wanted))
    cut = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert not cut or max(shares) - min(cut) <= 1  # who got less than they wanted got no less than anybody
    assert not cut or sum(shares) >= min(budget, sum(wanted))
    prompts = [want + 1 for want in wanted]
    many = [1] * 201
    counts, _ = next_counts([*many, *prompts], Limits(prompt_piece=budget + 100), 0)
    assert counts == [*many, *share_out(prompts, budget + 160)]
    assert next_counts(prompts, Limits(prompt_piece=1), 0)[0] == share_out(prompts, 512)


@pytest.mark.parametrize(
    ("fixed", "row", "token", "piece", "row_piece"),
    [(0.0, 1.0, 1.0, 1, 0.3), (9.0, 1.0, 1.0, 3, 0.3), (9.0, 3.0, 0.5, 7, 1.8), (1.0, 0.0, 0.0, 512, 0.0)],
)
def test_pieces_are_what_lengthens_a_step_by_three_tenths(monkeypatch, fixed, row, token, piece, row_piece):
    def planted(model, counts):
        return fixed + row * len(counts) + token * (sum(counts) - len(counts))

    monkeypatch.setattr(pace, "step_seconds", planted)
    limits = pace.with_measured_piece(Limits(), tiny_model(max_length=2048))
    assert (limits.prompt_piece, limits.row_piece) == (piece, pytest.approx(row_piece))
    assert token * (limits.piece(20) - 1) <= 0.3 * (fixed + 20 * row)  # a step of 20 rows is no longer than by that


@given(
    st.integers(1, 60),
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(0, 30), st.integers(2, 900)), max_size=60),
)
def test_long_steps_are_forty_apart_and_on_average_prompts_read_their_piece(piece, generating, arrivals):
    limits = Limits(prompt_piece=piece, row_piece=0.0)
    rested, prompts, read = limits.prompt_alone, [], []
    for pause, length in arrivals:
        prompts = [*prompts[: generating - 1], length]  # never more than generate
        for _ in range(pause):
            counts, rested = next_counts([1] * generating + prompts, limits, rested)
            assert counts[:generating] == [1] * generating
            left = [whole - count for whole, count in zip(prompts, counts[generating:], strict=True)]
            prompts = [count for count in left if count > 1]
            read.append(sum(counts[generating:]))
    long = [step for step, count in enumerate(read) if count > piece]
    assert all(later - sooner > 40 for sooner, later in pairwise(long))
    assert all(read[step] <= 512 for step in long)
    assert sum(read) <= 512 + 2 * max(piece, generating) * len(read)  # each in a long step reads a token at least


def test_a_short_prompt_does_not_wait_behind_a_long_one():
    limits, unread, rested = Limits(prompt_piece=4, row_piece=0.0), [1, 1, 1, 700, 14], 40
    (*_, long, short), rested = next_counts(unread, limits, rested)
    assert (long, short, rested) == (146, 14, 0)
    assert [next_counts([1, 1, 1, 554, left], limits, 0)[0][3:] for left in (17, 16, 3)] == [[0, 0], [0, 4], [0, 3]]


def test_what_comes_after_a_pause_is_read_at_once():
    assert next_counts([1, 1, 400], Limits(prompt_piece=4, row_piece=0.0), 100) == ([1, 1, 400], 0)
    assert next_counts([1, 1, 400], Limits(prompt_piece=4, row_piece=0.0), 50) == ([1, 1, 200], 0)


def test_where_more_wait_than_generate_prompts_are_read_as_if_nobody_did():
    limits = Limits(prompt_piece=4, row_piece=0.0)
    assert next_counts([1, 100, 200], limits, 0) == ([1, 100, 200], 1)
    assert next_counts([1, 1, 100, 200], limits, 0) == ([1, 1, 0, 0], 1)


def test_a_long_prompt_is_read_however_many_short_ones_come():
    limits, rested, left = Limits(prompt_piece=2, row_piece=0.0), 0, 300
    for _ in range(1000):
        counts, rested = next_counts([1] * 9 + [left] + [3] * 5, limits, rested)  # five new ones at every step
        left -= counts[9]
        if left <= 1:
            break
    assert left <= 1

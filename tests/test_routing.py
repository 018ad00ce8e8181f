"""Laws of the core: choosing, laying out, applying; gates, padding, ties, bad scores."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modepth import Router, RoutingConfig, apply_routed, num_routed
from modepth.routing import choose_best, lay_out
from tests.oracles import GATES, HARD_SELECTIONS, SELECTIONS, MixingBlock, apply_slowly, top_slowly

capacities = st.integers(1, 10**4).map(lambda parts: parts / 10**4) | st.sampled_from([1 / 3, 0.07, 0.125, 1.0])
lengths = st.integers(1, 64)
seeds = st.integers(0, 10**6)


def make_router(dim=7, **options):
    router = Router(dim, RoutingConfig(**options), layer=3)
    torch.nn.init.normal_(router.score.weight)
    return router


def ragged_mask(B, T, generator):
    """Rows with padding anywhere; the last is padding alone."""
    real_BT = torch.rand((B, T), generator=generator) < 0.7
    real_BT[-1] = False
    return real_BT


# -- k


@pytest.mark.law
@given(parts=st.integers(1, 10**6), length=st.integers(0, 10**5))
def test_k_is_the_exact_ceiling_for_ints_and_tensors(parts, length):
    expected = -(-parts * length // 10**6)
    assert num_routed(length, parts / 10**6) == expected
    assert num_routed(torch.tensor([length]), parts / 10**6).item() == expected


@pytest.mark.law
def test_k_of_capacities_that_floating_point_gets_wrong():
    assert num_routed(100, 0.07) == 7 != math.ceil(0.07 * 100)
    assert num_routed(3, 1 / 3) == 1
    assert num_routed(10**6, 1e-12) == 1
    assert num_routed(torch.tensor([100], dtype=torch.int16), 0.123456789).item() == 13
    assert [num_routed(T, 1.0) for T in range(5)] == [0, 1, 2, 3, 4]


# -- law 3: which tokens, in which slots


@pytest.mark.law
@pytest.mark.parametrize("selection", ["topk", "random", "stride"])
def test_exactly_k_valid_slots_sorted_and_unique_for_every_length(selection):
    for T in range(1, 65):
        for capacity in (0.01, 0.07, 0.125, 1 / 3, 0.5, 0.95, 1.0):
            generator = torch.Generator().manual_seed(T)
            check_slots(
                T, capacity, selection, torch.randn((5, T, 7), generator=generator), ragged_mask(5, T, generator)
            )


@pytest.mark.law
@given(T=lengths, capacity=capacities, selection=st.sampled_from(["topk", "random", "stride"]), seed=seeds)
def test_exactly_k_valid_slots_sorted_and_unique_for_any_capacity(T, capacity, selection, seed):
    generator = torch.Generator().manual_seed(seed)
    x_BTD = torch.randn((5, T, 7), generator=generator)
    check_slots(T, capacity, selection, x_BTD, ragged_mask(5, T, generator))


def check_slots(T, capacity, selection, x_BTD, real_BT):
    routing = make_router(capacity=capacity, selection=selection)(x_BTD, real_BT)
    assert routing.index_BK.shape == (5, num_routed(T, capacity))
    for row in range(5):
        members = routing.index_BK[row][routing.valid_BK[row]].tolist()
        assert len(members) == num_routed(int(real_BT[row].sum()), capacity)
        assert members == sorted(members)
        assert all(real_BT[row, token] for token in members)
        assert len(set(routing.index_BK[row].tolist())) == routing.index_BK.shape[1]
        assert routing.chosen_BT[row].nonzero().flatten().tolist() == members
        num_valid = len(members)
        assert routing.valid_BK[row].tolist() == [True] * num_valid + [False] * (len(routing.valid_BK[row]) - num_valid)


@pytest.mark.law
@given(T=lengths, capacity=capacities, seed=seeds, levels=st.sampled_from([1, 2, 5, 1000]))
def test_top_k_chooses_the_best_real_tokens_and_the_lowest_index_among_equals(T, capacity, seed, levels):
    generator = torch.Generator().manual_seed(seed)
    score_BT = torch.randint(levels, (4, T), generator=generator).float()
    real_BT = ragged_mask(4, T, generator)
    chosen_BT = choose_best(score_BT, real_BT, num_routed(real_BT.sum(1), capacity))
    for row in range(4):
        real = real_BT[row].nonzero().flatten().tolist()
        expected = top_slowly(score_BT[row].tolist(), real, num_routed(len(real), capacity))
        assert chosen_BT[row].nonzero().flatten().tolist() == expected


@pytest.mark.law
@given(
    T=lengths, capacity=capacities, seed=seeds, selection=st.sampled_from(["topk", "soft", "token_choice", "threshold"])
)
def test_a_learned_selection_takes_the_tokens_of_highest_logit(T, capacity, seed, selection):
    generator = torch.Generator().manual_seed(seed)
    x_BTD, real_BT = torch.randn((3, T, 7), generator=generator), ragged_mask(3, T, generator)
    routing = make_router(capacity=capacity, selection=selection, cutoff=0.4)(x_BTD, real_BT)
    lowest = {"token_choice": 0.0, "threshold": 0.4}.get(selection, -math.inf)
    for row in range(3):
        logits, real = routing.logit_BT[row].tolist(), real_BT[row].nonzero().flatten().tolist()
        willing, k = [token for token in real if logits[token] >= lowest], num_routed(len(real), capacity)
        members = top_slowly(logits, willing, k)
        assert routing.chosen_BT[row].nonzero().flatten().tolist() == members
        assert routing.num_unfilled_B[row] == k - len(members)
        assert routing.num_dropped_B[row] == len(willing) - len(members)


@pytest.mark.law
@given(
    T=lengths, capacity=capacities, seed=seeds, selection=st.sampled_from(SELECTIONS), share=st.sampled_from([0.1, 0.7])
)
def test_tokens_always_chosen_come_first_and_count_within_k(T, capacity, seed, selection, share):
    generator = torch.Generator().manual_seed(seed)
    x_BTD, real_BT = torch.randn((3, T, 7), generator=generator), ragged_mask(3, T, generator)
    always_BT = torch.rand((3, T), generator=generator) < share
    router = make_router(capacity=capacity, selection=selection, cutoff=0.4)
    free, routing = router(x_BTD, real_BT), router(x_BTD, real_BT, always_BT=always_BT)
    free_causal = router(x_BTD, real_BT, mode="causal")
    causal = router(x_BTD, real_BT, mode="causal", always_BT=always_BT)
    assert torch.equal(causal.chosen_BT, free_causal.chosen_BT | (real_BT & always_BT))
    assert routing.index_BK.shape == free.index_BK.shape
    for row in range(3):
        logits, real = routing.logit_BT[row].tolist(), real_BT[row].nonzero().flatten().tolist()
        chosen, k = routing.chosen_BT[row].nonzero().flatten().tolist(), num_routed(len(real), capacity)
        first = [token for token in real if always_BT[row, token]]
        assert len(chosen) == min(k, len(set(first) | set(free.chosen_BT[row].nonzero().flatten().tolist())))
        if selection in ("topk", "soft"):
            others = [token for token in real if token not in first]
            assert chosen == sorted(
                [*top_slowly(logits, first, k), *top_slowly(logits, others, max(0, k - len(first)))]
            )
        assert set(first) <= set(chosen) or set(chosen) <= set(first)
        gates = routing.scatter(torch.zeros(3, T), routing.gate_BK)[row]
        assert gates[first].tolist() == [float(token in chosen) for token in first]


def test_a_mask_of_tokens_always_chosen_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"tokens always chosen must be a bool tensor of shape \(2, 5\), got"):
        make_router()(torch.randn(2, 5, 7), always_BT=torch.zeros(2, 4, dtype=torch.bool))


@pytest.mark.law
@pytest.mark.parametrize("selection", SELECTIONS)
def test_gradients_are_finite_for_every_length(selection):
    for T in range(1, 65):
        for capacity in (0.01, 0.125, 0.5, 1.0):
            x_BTD = torch.randn(3, T, 7, requires_grad=True)
            router = make_router(capacity=capacity, selection=selection)
            routing = router(x_BTD, ragged_mask(3, T, torch.Generator().manual_seed(T)))
            apply_routed(x_BTD, routing, lambda x: x + x.tanh()).square().sum().backward()
            assert x_BTD.grad.isfinite().all()
            assert router.score.weight.grad.isfinite().all()


@pytest.mark.law
def test_equal_scores_give_the_lowest_indices():
    routing = Router(7, RoutingConfig(capacity=0.4, router_init="zero"))(torch.randn(2, 10, 7))
    assert routing.index_BK.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.law
def test_a_real_token_of_score_minus_infinity_goes_before_padding():
    score_BT = torch.tensor([[-math.inf, -math.inf, 1.0]])
    chosen_BT = choose_best(score_BT, torch.tensor([[False, True, True]]), torch.tensor([2]))
    assert chosen_BT.tolist() == [[False, True, True]]


@pytest.mark.law
@given(T=lengths, seed=seeds, num_slots=st.integers(1, 64))
def test_invalid_slots_come_last_at_distinct_tokens_not_chosen(T, seed, num_slots):
    chosen_BT = torch.rand((3, T), generator=torch.Generator().manual_seed(seed)) < 0.3
    num_slots = min(T, max(num_slots, int(chosen_BT.sum(1).max())))
    index_BK, valid_BK = lay_out(chosen_BT, num_slots)
    for row in range(3):
        chosen = chosen_BT[row].nonzero().flatten().tolist()
        others = (~chosen_BT[row]).nonzero().flatten().tolist()
        assert index_BK[row].tolist() == (chosen + others)[:num_slots]
        assert valid_BK[row].tolist() == [slot < len(chosen) for slot in range(num_slots)]


@pytest.mark.law
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_found_by_the_check_which_names_the_layer(bad):
    x_BTD = torch.randn(2, 11, 7)
    router = make_router(capacity=0.5)
    healthy = router(x_BTD)
    healthy.check()
    assert healthy.finite
    x_BTD[1, 4] = torch.tensor([bad] + [0.0] * 6)  # alone, or infinities of both signs would make it NaN
    real_BT = torch.ones(2, 11, dtype=torch.bool)
    routing = router(x_BTD, real_BT)  # the forward itself does not raise
    assert not routing.finite
    with pytest.raises(FloatingPointError, match=r"layer 3: the router score of row 1, token 4 is (nan|-?inf)"):
        routing.check()
    assert routing.logit_BT[1, 4].abs().item() == pytest.approx(abs(bad), nan_ok=True)
    real_BT[1, 4] = False
    router(x_BTD, real_BT).check()  # padding may hold anything


def test_a_predictor_score_that_is_not_finite_is_found_too():
    router = make_router(capacity=0.5, predictor=5, rule="predictor")
    torch.nn.init.constant_(router.predictor[2].bias, math.nan)
    with pytest.raises(FloatingPointError, match="layer 3: the router score of row 0, token 0 is nan"):
        router(torch.randn(2, 11, 7), mode="causal").check()


@pytest.mark.law
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_infinite_block_output_in_an_invalid_slot_leaves_token_and_gradients_untouched(bad):
    x_BTD = torch.randn(2, 10, 7, requires_grad=True)
    router = make_router(capacity=0.5)
    real_BT = torch.arange(10) < torch.tensor([[10], [4]])
    routing = router(x_BTD, real_BT)
    assert routing.valid_BK.sum(1).tolist() == [5, 2]
    out_BTD = apply_routed(x_BTD, routing, lambda x: torch.where(routing.valid_BK[..., None], 2 * x, bad))
    skipped_BT = ~routing.chosen_BT
    assert torch.equal(out_BTD[skipped_BT].view(torch.int32), x_BTD[skipped_BT].view(torch.int32))
    out_BTD.square().sum().backward()
    assert x_BTD.grad.isfinite().all()
    assert router.score.weight.grad.isfinite().all()


# -- law 2: using a routing


@pytest.mark.law
@given(
    T=st.integers(1, 24),
    capacity=capacities,
    selection=st.sampled_from(HARD_SELECTIONS),
    gate=st.sampled_from(list(GATES)),
    mode=st.sampled_from(["topk", "causal"]),
    seed=seeds,
)
def test_apply_routed_equals_a_loop_over_tokens(T, capacity, selection, gate, mode, seed):
    torch.manual_seed(seed)
    x_BTD = torch.randn(3, T, 7, dtype=torch.float64)
    real_BT = ragged_mask(3, T, torch.Generator().manual_seed(seed))
    router = make_router(capacity=capacity, selection=selection, gate=gate).double()
    block = MixingBlock(7).double()
    routing = router(x_BTD, real_BT, mode=mode)
    with torch.no_grad():
        fast, slow = apply_routed(x_BTD, routing, block), apply_slowly(x_BTD, routing, block, GATES[gate])
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    skipped_BT = ~routing.chosen_BT
    assert torch.equal(fast[skipped_BT].view(torch.int64), x_BTD[skipped_BT].view(torch.int64))


@pytest.mark.law
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_block_that_returns_its_input_leaves_x_unchanged(selection, gate, dtype):
    x_BTD = torch.randn(3, 13, 7).to(dtype)
    routing = make_router(capacity=0.5, selection=selection, gate=gate).to(dtype)(x_BTD)
    assert torch.equal(apply_routed(x_BTD, routing, lambda x: x), x_BTD)


@pytest.mark.law
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gate_0_is_the_identity_and_gate_1_is_the_block(dtype):
    x_BTD = torch.randn(3, 13, 7).to(dtype)
    closed = make_router(capacity=0.5, gate="raw", router_init="zero")
    torch.nn.init.zeros_(closed.score.weight)
    assert torch.equal(apply_routed(x_BTD, closed(x_BTD), lambda x: x.exp() * 100), x_BTD)
    routing = make_router(capacity=0.5, gate="one")(x_BTD)
    out_BTD = apply_routed(x_BTD, routing, lambda x: x.exp() * 100)
    assert torch.equal(out_BTD[routing.chosen_BT], (x_BTD.exp() * 100)[routing.chosen_BT])
    assert not torch.equal(out_BTD, x_BTD)


@pytest.mark.law
@pytest.mark.parametrize("gate", list(GATES))
def test_the_gate_is_its_formula(gate):
    routing = make_router(capacity=1.0, gate=gate)(torch.randn(2, 13, 7))
    expected = [[GATES[gate](logit) for logit in row] for row in routing.logit_BT.tolist()]
    torch.testing.assert_close(routing.gate_BK, torch.tensor(expected))


@pytest.mark.law
def test_weigh_bypass_multiplies_skipped_tokens_by_their_gate_and_no_others():
    x_BTD = torch.randn(3, 13, 7)
    real_BT = ragged_mask(3, 13, torch.Generator().manual_seed(0))
    plain = make_router(capacity=0.4)
    weighed = Router(7, RoutingConfig(capacity=0.4, weigh_bypass=True))
    weighed.load_state_dict(plain.state_dict())
    routing = weighed(x_BTD, real_BT)
    out_BTD, plain_BTD = (apply_routed(x_BTD, r, torch.exp) for r in (routing, plain(x_BTD, real_BT)))
    skipped_BT = real_BT & ~routing.chosen_BT
    assert skipped_BT.any()
    expected = x_BTD[skipped_BT] * torch.sigmoid(routing.logit_BT[skipped_BT]).unsqueeze(-1)
    torch.testing.assert_close(out_BTD[skipped_BT], expected)
    assert torch.equal(out_BTD[~skipped_BT], plain_BTD[~skipped_BT])


@pytest.mark.law
def test_soft_computes_every_token_and_blends_those_of_the_top_capacity():
    x_BTD = torch.randn(3, 13, 7)
    real_BT = torch.arange(13) < torch.tensor([[13], [6], [0]])
    routing = make_router(capacity=0.4, selection="soft")(x_BTD, real_BT)
    seen = []
    out_BTD = apply_routed(x_BTD, routing, lambda x: seen.append(x) or MixingBlock(7)(x))
    assert torch.equal(seen[0], x_BTD)
    assert routing.chosen_BT.sum(1).tolist() == [6, 3, 0]
    changed_BT = (out_BTD != x_BTD).any(-1)
    assert torch.equal(changed_BT, routing.chosen_BT)
    infinite_BTD = apply_routed(x_BTD, routing, lambda x: torch.full_like(x, math.inf))
    assert torch.equal(infinite_BTD[~routing.chosen_BT], x_BTD[~routing.chosen_BT])


@pytest.mark.law
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_causal_block_never_sees_padding_wherever_it_stands(selection):
    router, block = make_router(capacity=0.5, selection=selection).double(), MixingBlock(7).double()
    x_BTD = torch.randn(3, 13, 7, dtype=torch.float64)
    real_BT = torch.rand(3, 13) < 0.6
    real_BT[:, :3] = False
    with torch.no_grad():
        together_BTD = apply_routed(x_BTD, router(x_BTD, real_BT), block)
        for row in range(3):
            alone_1KD = x_BTD[row : row + 1, real_BT[row]]
            out_1KD = apply_routed(alone_1KD, router(alone_1KD), block)
            torch.testing.assert_close(together_BTD[row, real_BT[row]], out_1KD[0], rtol=0, atol=1e-12)
            assert torch.equal(together_BTD[row, ~real_BT[row]], x_BTD[row, ~real_BT[row]])


def test_a_block_of_another_shape_is_refused():
    x_BTD = torch.randn(2, 8, 7)
    routing = make_router(capacity=0.5)(x_BTD)
    with pytest.raises(
        ValueError, match=r"output of a routed block must be a tensor of shape \(2, 4, 7\), got .* \(2, 4, 3\)"
    ):
        apply_routed(x_BTD, routing, lambda x: x[..., :3])
    with pytest.raises(ValueError, match="got tuple"):
        apply_routed(x_BTD, routing, lambda x: (x, None))


# -- law 4: padding


@pytest.mark.law
@given(T=lengths, capacity=capacities, selection=st.sampled_from(SELECTIONS), seed=seeds)
def test_a_row_among_others_is_routed_as_the_same_row_alone(T, capacity, selection, seed):
    torch.manual_seed(seed)
    x_BTD = torch.randn(4, T, 7, dtype=torch.float64)
    real_BT = ragged_mask(4, T, torch.Generator().manual_seed(seed))
    router = make_router(capacity=capacity, selection=selection).double()
    for mode in ("topk", "causal"):
        together = router(x_BTD, real_BT, mode=mode)
        for row in range(4):
            real = real_BT[row].nonzero().flatten()
            alone = router(x_BTD[row, real].unsqueeze(0), mode=mode) if len(real) else None
            expected = [] if alone is None else real[alone.chosen_BT[0]].tolist()
            assert together.chosen_BT[row].nonzero().flatten().tolist() == expected


# -- selections


@pytest.mark.law
def test_random_and_stride_depend_on_seed_layer_and_position_alone():
    x_BTD, other_BTD = torch.randn(2, 40, 7), torch.randn(2, 40, 7)
    for mode in ("topk", "causal"):
        stride, random = (RoutingConfig(capacity=0.3, selection=name) for name in ("stride", "random"))
        for config in (stride, random):
            chosen = Router(7, config, layer=1)(x_BTD, mode=mode).chosen_BT
            assert torch.equal(chosen, Router(7, config, layer=1)(other_BTD, mode=mode).chosen_BT)
        other_layer, other_seed = Router(7, random, layer=2), Router(7, replace(random, seed=5), layer=1)
        assert not torch.equal(chosen, other_layer(x_BTD, mode=mode).chosen_BT)
        assert not torch.equal(chosen, other_seed(x_BTD, mode=mode).chosen_BT)


@pytest.mark.law
def test_random_chooses_its_capacity_of_positions_evenly_in_causal_mode():
    x_BTD = torch.zeros(1, 20_000, 7)
    chosen_BT = Router(7, RoutingConfig(capacity=0.25, selection="random"))(x_BTD, mode="causal").chosen_BT
    assert abs(chosen_BT.float().mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 20_000)
    both_BT = chosen_BT[:, 1:] & chosen_BT[:, :-1]  # neighbours are independent
    assert abs(both_BT.float().mean().item() - 0.0625) < 4 * math.sqrt(0.0625 / 20_000)


@pytest.mark.law
def test_stride_is_even_and_the_same_in_both_modes():
    router = make_router(capacity=0.25, selection="stride")
    for mode in ("topk", "causal"):
        assert router(torch.randn(1, 13, 7), mode=mode).index_BK.tolist() == [[0, 4, 8, 12]]


@pytest.mark.law
def test_token_choice_leaves_slots_unfilled_and_drops_the_surplus_by_score_in_training_only():
    router = Router(1, RoutingConfig(capacity=0.5, selection="token_choice"))
    torch.nn.init.ones_(router.score.weight)
    x_BTD = torch.tensor([[0.0, 3, 1, 2, -1, -2], [-1, -1, -1, 5, -1, -1]]).unsqueeze(-1)
    routing = router(x_BTD)
    assert routing.chosen_BT.tolist() == [[False, True, True, True, False, False], [False] * 3 + [True] + [False] * 2]
    assert routing.num_dropped_B.tolist() == [1, 0]
    assert routing.num_unfilled_B.tolist() == [0, 2]
    causal = router(x_BTD, mode="causal")
    assert torch.equal(causal.chosen_BT, x_BTD.squeeze(-1) >= 0)  # a logit of 0 is willing
    assert causal.num_dropped_B.tolist() == [0, 0]


@pytest.mark.law
def test_threshold_takes_at_most_k_of_those_that_reach_the_cutoff():
    router = Router(1, RoutingConfig(capacity=0.5, selection="threshold", cutoff=1.0))
    torch.nn.init.ones_(router.score.weight)
    x_BTD = torch.tensor([[0.0, 3, 1, 2, 4, 0.5], [0, 0, 1, 0, 0, 0]]).unsqueeze(-1)
    routing = router(x_BTD)
    assert routing.index_BK.shape == (2, 3)
    assert routing.index_BK[0].tolist() == [1, 3, 4]
    assert routing.index_BK[1][routing.valid_BK[1]].tolist() == [2]
    assert router(x_BTD, mode="causal").chosen_BT.sum(1).tolist() == [4, 1]


@pytest.mark.law
@pytest.mark.parametrize("rule", ["cutoff", "router", "predictor"])
def test_in_causal_mode_a_token_is_chosen_when_its_score_reaches_the_threshold_of_the_rule(rule):
    router = make_router(capacity=0.5, rule=rule, predictor=5)
    router.cutoff.fill_(0.7)
    x_BTD = torch.randn(2, 31, 7)
    routing = router(x_BTD, mode="causal")
    score_BT, threshold = {
        "cutoff": (routing.logit_BT, 0.7),
        "router": (routing.logit_BT, 0.0),
        "predictor": (routing.predicted_BT, 0.0),
    }[rule]
    assert 0 < routing.chosen_BT.sum() < routing.chosen_BT.numel()
    assert torch.equal(routing.chosen_BT, score_BT >= threshold)
    everyone = make_router(capacity=1.0, rule=rule, predictor=5, cutoff=9.0)
    assert everyone(x_BTD, mode="causal").chosen_BT.all()


@pytest.mark.law
@pytest.mark.parametrize("rule", ["cutoff", "router", "predictor"])
def test_a_score_equal_to_the_threshold_is_enough(rule):
    router = Router(7, RoutingConfig(capacity=0.5, rule=rule, predictor=5, router_init="zero"))
    for parameter in router.predictor.parameters():
        torch.nn.init.zeros_(parameter)
    assert router(torch.randn(2, 11, 7), mode="causal").chosen_BT.all()


def test_when_nobody_is_chosen_the_block_is_not_called():
    router = make_router(capacity=0.5)
    router.cutoff.fill_(math.inf)
    x_BTD = torch.randn(2, 5, 7)
    routing = router(x_BTD, mode="causal")
    assert routing.index_BK.shape == (2, 0)
    assert torch.equal(apply_routed(x_BTD, routing, lambda x: pytest.fail("called")), x_BTD)


# -- precision


@pytest.mark.law
def test_the_router_stays_float32_when_its_model_is_cast_and_computes_in_float32():
    router = make_router(dim=61, capacity=0.5, predictor=5)
    exact = copy.deepcopy(router)
    for narrow in (router.bfloat16(), router.half(), router.to(torch.bfloat16)):
        assert {tensor.dtype for tensor in narrow.state_dict().values()} == {torch.float32}
    assert torch.equal(router.score.weight, exact.score.weight)
    x_BTD = torch.randn(2, 11, 61).bfloat16()
    routing = router(x_BTD)
    assert torch.equal(routing.logit_BT, exact(x_BTD.float()).logit_BT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x_BTD).logit_BT, routing.logit_BT)
    assert {tensor.dtype for tensor in router.double().state_dict().values()} == {torch.float64}


def test_routers_begin_as_configured():
    assert Router(4000, RoutingConfig()).score.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not Router(7, RoutingConfig(router_init="zero")).score.weight.any()
    assert Router(7, RoutingConfig(cutoff=0.3)).cutoff.item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(4, 7),), r"x must be a tensor of shape \(any, any, 7\), got torch.float32 of shape \(4, 7\)"),
        ((torch.randn(1, 4, 6),), r"x must be a tensor of shape \(any, any, 7\), got .* \(1, 4, 6\)"),
        ((torch.randn(1, 4, 7), torch.ones(1, 5).bool()), r"must be a bool tensor of shape \(1, 4\), got .* \(1, 5\)"),
        ((torch.randn(1, 4, 7), torch.ones(1, 4).long()), r"must be a bool tensor of shape \(1, 4\), got torch.int64"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_router(capacity=0.5)(*arguments)


@pytest.mark.parametrize("mode", ["topk", "causal"])
@pytest.mark.parametrize("shape", [(0, 4, 7), (2, 0, 7)])
def test_an_empty_batch_passes(shape, mode):
    x_BTD = torch.zeros(shape)
    assert apply_routed(x_BTD, make_router(capacity=0.5)(x_BTD, mode=mode), torch.exp).shape == shape


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of topk, causal, got 'train'"):
        make_router(capacity=0.5)(torch.randn(1, 4, 7), mode="train")

"""Laws of the native decoder: dense at capacity 1, equal to its oracles, trainable, one graph."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from modepth import ModelConfig, RoutingConfig, Transformer, check_tokens
from modepth.blocks import Context
from modepth.decoder_layer import Stream
from modepth.losses import predictor_loss
from tests.oracles import (
    GATES,
    PARTS,
    SELECTIONS,
    apply_slowly,
    attend_masked,
    layer_masked,
    tiny_config,
    tiny_model,
    tiny_tokens,
)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def train_loss(out):
    return out.loss + out.router_loss


def dense_twin(model):
    """The same weights, nothing routed."""
    dense = Transformer(replace(model.config, routing=None))
    dense.load_state_dict({name: value for name, value in model.state_dict().items() if ".router." not in name})
    return dense


def assert_some_tokens_skip(out):
    for routing in out.routings:
        chosen = routing.chosen_BT[routing.real_BT]
        assert chosen.any()
        assert not chosen.all()


# -- law 1


@pytest.mark.law
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("selection", ["topk", "random", "stride", "soft"])
def test_capacity_1_with_gate_1_is_the_dense_model_bit_for_bit(selection, part):
    model = tiny_model(capacity=1.0, gate="one", selection=selection, part=part, every=1, dropout=0.1)
    dense, tokens = dense_twin(model), tiny_tokens()
    for each in (model, dense):
        torch.manual_seed(7)  # of dropout
        each.logits = each(tokens, mode="topk").logits_BTV.detach()
        torch.manual_seed(7)
        each.loss = each(tokens, targets=tokens.roll(-1, 1), mode="topk").loss
        each.loss.backward()
    assert torch.equal(model.logits, dense.logits)
    assert torch.equal(model.loss, dense.loss)
    for name, gradient in gradients(dense).items():
        assert torch.equal(gradients(model)[name], gradient), name
    causal = model.eval()(tokens)
    assert torch.equal(causal.logits_BTV, dense.eval()(tokens).logits_BTV)


@pytest.mark.parametrize("part", PARTS)
def test_capacity_one_half_is_not_the_dense_model(part):
    model = tiny_model(capacity=0.5, gate="one", part=part)
    dense, tokens = dense_twin(model), tiny_tokens()
    difference = model(tokens, mode="topk").logits_BTV - dense(tokens).logits_BTV
    assert difference.abs().amax() > 0.1


# -- law 4


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("mode", ["topk", "causal"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_each_row_of_a_ragged_batch_equals_the_same_row_alone(selection, part, mode):
    model, tokens = tiny_model(selection=selection, part=part, predictor=5), tiny_tokens(B=4)
    lengths = torch.tensor([23, 11, 1, 0])
    together = model(tokens, lengths=lengths, mode=mode).logits_BTV
    for row, length in enumerate(lengths.tolist()):
        if length:
            alone = model(tokens[row : row + 1, :length], mode=mode).logits_BTV
            torch.testing.assert_close(together[row, :length], alone[0], rtol=0, atol=1e-12)


@pytest.mark.law
def test_an_all_padding_row_is_untouched_and_its_loss_is_zero():
    model, tokens = tiny_model(predictor=5), tiny_tokens(B=2)
    x_BTD = torch.randn(2, 23, 60)
    real_BT = torch.zeros(2, 23, dtype=torch.bool)
    out, (routing, _) = model.layers[1](Stream(x_BTD, Context(torch.ones(2, 23, 10)), real_BT), "topk")
    assert torch.equal(out.x_BTD, x_BTD)
    assert not routing.valid_BK.any()
    out = model(tokens, targets=tokens, lengths=torch.tensor([0, 0]), mode="topk")
    assert train_loss(out).item() == 0
    train_loss(out).backward()
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize(("changes", "length"), [({}, 0), ({"selection": "threshold", "cutoff": 1e9}, 23)])
def test_where_no_token_is_routed_gradients_are_zero_and_not_none(changes, length):
    model, tokens = tiny_model(tie_embeddings=False, **changes), tiny_tokens()
    out = model(tokens, targets=tokens, lengths=torch.tensor([length] * 3), mode="topk")
    assert not any(routing.chosen_BT.any() for routing in out.routings)
    train_loss(out).backward()
    for number in model.config.routed_layers:
        for name, parameter in model.layers[number].named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


# -- law 5


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("mode", ["topk", "causal"])
@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("num_kv_heads", [None, 3, 1])
def test_a_routed_layer_equals_the_dense_one_with_unselected_keys_masked_out(num_kv_heads, part, gate, mode):
    model = tiny_model(num_kv_heads=num_kv_heads, part=part, gate=gate)
    layer, seen = model.layers[1], []
    layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], *output)))
    lengths = torch.tensor([23, 17, 5])
    with torch.no_grad():
        assert_some_tokens_skip(model(tiny_tokens(), lengths=lengths, mode=mode))
        before, after, (routing, _) = seen[0]
        x_BTD, out_BTD = before.x_BTD, after.x_BTD
        expected_BTD = layer_masked(layer, model.config, x_BTD, routing)
        stream_BTD = attend_masked(layer, model.config, x_BTD, torch.ones(3, 23) > 0) if part == "mlp" else x_BTD
        score_BT = (stream_BTD * layer.router.score.weight).sum(-1)  # of the stream that the routed part reads
    real_BT = routing.real_BT
    torch.testing.assert_close(out_BTD[real_BT], expected_BTD[real_BT], rtol=0, atol=1e-12)
    torch.testing.assert_close(routing.logit_BT, score_BT, rtol=0, atol=1e-12)


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_routed_layer_equals_the_block_on_each_row_alone_at_the_tokens_own_positions(selection):
    model = tiny_model(selection=selection, capacity=1.0 if selection == "soft" else 0.3)
    layer, tokens = model.layers[1], tiny_tokens()
    with torch.no_grad():
        x_BTD = model.embed_tokens(tokens)
        rope_TE = torch.randn(23, 10)
        real_BT = torch.ones(3, 23, dtype=torch.bool)
        out, (routing, _) = layer(Stream(x_BTD, Context(rope_TE.expand(3, 23, 10)), real_BT), "topk")
        members = iter(Context(rope_TE[chosen].unsqueeze(0)) for chosen in routing.chosen_BT if chosen.any())

        def block(x):
            return layer.feed(layer.attend(x, next(members)), real_BT, "topk")[0]

        slow_BTD = apply_slowly(x_BTD, routing, block, GATES["sigmoid"])
    torch.testing.assert_close(out.x_BTD, slow_BTD, rtol=0, atol=1e-12)


# -- law 6


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("selection", ["topk", "token_choice", "soft"])
def test_gradients_reach_router_block_and_input_and_are_right(selection, part):
    model = tiny_model(
        dim=12, num_heads=2, num_kv_heads=1, mlp_dim=5, selection=selection, part=part, weigh_bypass=selection == "topk"
    )
    layer = model.layers[1]
    names = ["router.score.weight", "self_attn.v_proj.weight", "mlp.down_proj.weight"]
    weights = [layer.get_parameter(name).detach().requires_grad_() for name in names]
    x_BTD = torch.randn(2, 7, 12, requires_grad=True)
    rope_BTE, real_BT = torch.randn(2, 7, 6), torch.arange(7) < torch.tensor([[7], [4]])

    def run(x, *values):
        replaced = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, replaced, (Stream(x, Context(rope_BTE), real_BT), "topk"))[0].x_BTD

    assert torch.autograd.gradcheck(run, (x_BTD, *weights))
    for gradient in torch.autograd.grad(run(x_BTD, *weights).square().sum(), (x_BTD, *weights)):
        assert gradient.abs().sum() > 0


@pytest.mark.law
def test_the_predictors_loss_reaches_the_predictor_only():
    model, tokens = tiny_model(predictor=5), tiny_tokens()
    predictor_loss(model(tokens, mode="topk").routings).backward()
    for name, gradient in gradients(model).items():
        reached = gradient is not None and bool(gradient.abs().sum() > 0)
        assert reached == (".predictor." in name), name


# -- law 7


@pytest.mark.law
def effect_of_the_future(model, mode):
    """How much changing the last 8 of 23 tokens changes the logits of the others."""
    tokens, differences = tiny_tokens(), []
    first = model(tokens, mode=mode)
    assert_some_tokens_skip(first)
    for seed in range(5):
        changed = torch.cat((tokens[:, :15], tiny_tokens(T=8, seed=seed + 2)), dim=1)
        differences.append((first.logits_BTV - model(changed, mode=mode).logits_BTV)[:, :15].abs().max().item())
    return max(differences)


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("part", PARTS)
def test_top_k_is_not_causal(part):
    assert effect_of_the_future(tiny_model(part=part), "topk") > 1e-3


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("rule", ["cutoff", "router", "predictor"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_causal_mode_is_causal(selection, rule):
    model = tiny_model(selection=selection, rule=rule, predictor=5, cutoff=0.5, weigh_bypass=selection != "soft")
    assert effect_of_the_future(model, "causal") < 1e-12


# -- law 8


@pytest.mark.law
@pytest.mark.parametrize("part", PARTS)
def test_activation_checkpointing_changes_neither_routing_nor_gradients(part):
    plain = tiny_model(part=part, dropout=0.1, predictor=5, router_init="normal")
    saving = copy.deepcopy(plain)
    saving.checkpoint_activations = True
    tokens, outputs = tiny_tokens(), []
    for model in (plain, saving):
        torch.manual_seed(7)
        outputs.append(model(tokens, targets=tokens.roll(-1, 1), mode="topk"))
        train_loss(outputs[-1]).backward()
    for kept, recomputed in zip(outputs[0].routings, outputs[1].routings, strict=True):
        assert torch.equal(kept.index_BK, recomputed.index_BK)
    for name, gradient in gradients(plain).items():
        assert gradient is not None
        assert torch.equal(gradients(saving)[name], gradient), name


def test_activation_checkpointing_keeps_fewer_activations():
    saved = {}
    for saving in (False, True):
        model, sizes = tiny_model(), []
        model.checkpoint_activations = saving
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            model(tiny_tokens(), mode="topk")
        saved[saving] = sum(sizes)
    assert saved[True] < saved[False] / 2


# -- law 9


@pytest.mark.law
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "selection", [pytest.param(each, marks=[] if each == "topk" else [pytest.mark.long]) for each in SELECTIONS]
)
def test_compiled_training_is_one_graph_and_equals_eager(selection):
    model = tiny_model(num_layers=3, selection=selection, predictor=5, weigh_bypass=selection != "soft")
    compiled_model = copy.deepcopy(model)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(compiled_model, fullgraph=True, backend=counter)
    tokens, lengths = tiny_tokens(), torch.tensor([23, 17, 0])
    outputs = []
    for run in (model, compiled):
        outputs.append(run(tokens, targets=tokens.roll(-1, 1), lengths=lengths, mode="topk"))
        train_loss(outputs[-1]).backward()
    eager, fast = outputs
    assert counter.frame_count == 1
    assert torch.equal(eager.routings[0].index_BK, fast.routings[0].index_BK)
    torch.testing.assert_close(fast.loss, eager.loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        # By the largest of a tensor: each sums many terms, in another order, and eager itself is 1e-5 from float64.
        limit = 5e-5 * gradient.abs().max().item()
        torch.testing.assert_close(gradients(compiled_model)[name], gradient, rtol=0, atol=limit, msg=name)


@pytest.mark.law
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_form_of_training_is_one_graph(selection, part):
    model, tokens = tiny_model(num_layers=3, selection=selection, part=part, predictor=5), tiny_tokens()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    eager, fast = (
        run(tokens, targets=tokens, lengths=torch.tensor([23, 17, 0]), mode="topk") for run in (model, compiled)
    )
    assert torch.equal(eager.routings[0].index_BK, fast.routings[0].index_BK)
    torch.testing.assert_close(fast.loss, eager.loss)


@pytest.mark.law
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_training_forward_and_backward_never_branch_on_data(selection):
    with FakeTensorMode():
        model = Transformer(tiny_config(selection=selection, predictor=5))
        tokens = torch.randint(97, (3, 23))
        out = model(tokens, targets=tokens, lengths=torch.tensor([23, 17, 0]), mode="topk")
        train_loss(out).backward()
    assert model.lm_head.weight.grad.shape == (97, 60)
    assert model.layers[1].router.score.weight.grad.shape == (1, 60)


# -- law 12


def train_thirty_steps(seed):
    torch.manual_seed(seed)
    model = Transformer(tiny_config(predictor=5, dropout=0.1))
    start = copy.deepcopy(model.state_dict())
    tokens = tiny_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        out = model(tokens, targets=tokens.roll(-1, 1), mode="topk")
        optimizer.zero_grad()
        train_loss(out).backward()
        optimizer.step()
        losses.append(out.loss.item())
    return model, start, losses


@pytest.mark.law
def test_thirty_steps_on_a_fixed_batch_lower_the_loss_and_move_the_routers():
    model, start, losses = train_thirty_steps(seed=3)
    assert losses[-1] < 0.5 * losses[0]
    for number in model.config.routed_layers:
        name = f"layers.{number}.router.score.weight"
        assert not torch.equal(model.state_dict()[name], start[name])


@pytest.mark.law
def test_two_seeded_runs_agree_bit_for_bit():
    (first, _, losses), (second, _, again) = train_thirty_steps(seed=3), train_thirty_steps(seed=3)
    assert losses == again
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    assert train_thirty_steps(seed=4)[2] != losses


# -- the rest


def test_copy_and_pickle_work_after_a_training_forward():
    model, tokens = tiny_model(), tiny_tokens()
    train_loss(model(tokens, targets=tokens, mode="topk")).backward()
    expected = model(tokens).logits_BTV
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens).logits_BTV, expected)


def test_a_model_cast_to_bfloat16_runs_with_routers_in_float32():
    model, tokens = tiny_model().bfloat16(), tiny_tokens()
    out = model(tokens, targets=tokens, mode="topk")
    train_loss(out).backward()
    assert model(tokens).logits_BTV.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    assert out.routings[0].logit_BT.dtype == torch.float32
    assert model.layers[1].router.score.weight.grad.abs().sum() > 0


def test_under_autocast_the_stream_keeps_its_dtype_and_routes():
    model, tokens = tiny_model(), tiny_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens, targets=tokens, mode="topk")
    train_loss(out).backward()
    assert_some_tokens_skip(out)
    assert out.loss.dtype == torch.float32


@pytest.mark.law
def test_the_loss_is_the_mean_over_real_targets():
    model, tokens = tiny_model(), tiny_tokens()
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    lengths = torch.tensor([23, 9, 0])
    out = model(tokens, targets=targets, lengths=lengths, mode="topk")
    log_probability = model(tokens, lengths=lengths, mode="topk").logits_BTV.log_softmax(-1)
    terms = [
        -log_probability[row, t, targets[row, t]]
        for row in range(3)
        for t in range(int(lengths[row]))
        if targets[row, t] != -100
    ]
    torch.testing.assert_close(out.loss, torch.stack(terms).mean())


def test_int32_tokens_and_targets_train():
    model, tokens = tiny_model(), tiny_tokens()
    expected = model(tokens, targets=tokens, mode="topk").loss
    assert torch.equal(model(tokens.int(), targets=tokens.int(), mode="topk").loss, expected)


def test_router_losses_belong_to_top_k_mode_with_or_without_targets():
    model, tokens = tiny_model(predictor=5), tiny_tokens()
    assert set(model(tokens, mode="topk").router_losses) == {"predictor"}
    assert model(tokens, targets=tokens, mode="causal").router_losses == {}


@pytest.mark.parametrize("dim", [64, 256])
def test_weights_begin_at_a_size_that_follows_width_and_depth(dim):
    model = Transformer(ModelConfig(vocab_size=97, num_layers=8, dim=dim, num_heads=4))
    block = model.layers[0]
    for inner in (model.embed_tokens, block.self_attn.q_proj, block.mlp.up_proj):
        assert inner.weight.std().item() == pytest.approx(0.64 / dim**0.5, rel=0.05)
    for into_stream in (block.self_attn.o_proj, block.mlp.down_proj):
        assert into_stream.weight.std().item() == pytest.approx(0.16 / dim**0.5, rel=0.05)


def test_a_model_without_storage_is_filled_by_reset_parameters():
    torch.manual_seed(5)
    expected = Transformer(tiny_config(predictor=5, cutoff=0.5)).state_dict()
    with torch.device("meta"):
        model = Transformer(tiny_config(predictor=5, cutoff=0.5))
    model.to_empty(device="cpu")
    for value in model.state_dict().values():
        value.fill_(float("nan"))
    model.reset_parameters()
    for name, value in model.state_dict().items():
        assert value.isfinite().all(), name
        assert value.shape == expected[name].shape


def test_a_forward_may_route_otherwise_than_the_config_says():
    model, tokens = tiny_model(capacity=0.3), tiny_tokens()
    other = replace(model.config.routing, capacity=0.6)
    built = Transformer(replace(model.config, routing=other))
    built.load_state_dict(model.state_dict())
    expected = built(tokens, mode="topk").logits_BTV
    assert torch.equal(model(tokens, mode="topk", routing=other).logits_BTV, expected)
    assert not torch.equal(model(tokens, mode="topk").logits_BTV, expected)
    with pytest.raises(ValueError, match="routing may not change part of a model that stands"):
        model(tokens, routing=replace(other, part="mlp"))
    with pytest.raises(ValueError, match="routing may not change layers of a model that stands"):
        tiny_model(routing=None)(tokens, routing=other)


def test_layers_named_outright_may_be_the_first_and_the_last():
    model = tiny_model(layers=(4, 0))
    assert [routing.layer for routing in model(tiny_tokens(), mode="topk").routings] == [0, 4]


@pytest.mark.law
def test_each_routed_layer_has_its_own_router():
    model = tiny_model(every=1)
    routers = [layer.router.score.weight for layer in model.layers if layer.router is not None]
    assert len({weight.data_ptr() for weight in routers}) == len(routers) == 3


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[1, 2], [3, 97]]), "token ids must be in 0..96, got 97 at row 1, position 1"),
        (torch.tensor([[1, -5]]), "got -5 at row 0, position 1"),
        (torch.tensor([[1.0, 2.0]]), "tokens must be an int64 or int32 tensor of .* got torch.float32"),
        (torch.tensor([1, 2]), r"of shape \(any, any\), got torch.int64 of shape \(2,\)"),
    ],
)
def test_bad_tokens_are_refused_with_their_position(tokens, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(tokens, vocab_size=97)


def test_good_tokens_pass():
    check_tokens(torch.tensor([[0, 96]]), vocab_size=97)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens_BT": torch.zeros(1, 65, dtype=torch.int64)}, "65 tokens .* max_length 64"),
        (
            {"targets": torch.zeros(3, 5, dtype=torch.int64)},
            r"targets must be an .* of shape \(3, 23\), got .* \(3, 5\)",
        ),
        ({"lengths": torch.tensor([23])}, r"lengths must be an .* of shape \(3\), got torch.int64 of shape \(1,\)"),
        ({"lengths": torch.ones(3)}, r"lengths must be .* got torch.float32 of shape \(3,\)"),
        ({"lengths": [23, 23, 23]}, r"lengths must be .* got list"),
        ({"tokens_BT": tiny_tokens().numpy()}, "tokens must be .* got ndarray"),
    ],
)
def test_a_forward_refuses_shapes_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(**{"tokens_BT": tiny_tokens(), **arguments})


def test_a_routed_model_of_every_form_runs(subtests):
    for gate in GATES:
        for init in ("zero", "normal"):
            with subtests.test(gate=gate, init=init):
                routing = RoutingConfig(capacity=0.5, gate=gate, router_init=init, layers=(1,))
                model = Transformer(ModelConfig(vocab_size=11, num_layers=2, dim=8, num_heads=2, routing=routing))
                score = model.layers[1].router.score.weight
                assert bool((score == 0).all()) == (init == "zero")
                out = model(torch.randint(11, (2, 9)), mode="topk")
                assert out.logits_BTV.isfinite().all()

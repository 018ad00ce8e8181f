"""Counts from a config against torch's own counter and the module's parameters; the command that prints them."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modepth import ExpertsConfig, ModelConfig, RoutingConfig, Transformer, flops, num_routed
from modepth.cli import main
from modepth.config import TrainConfig
from modepth.train import make_optimizer
from tests.oracles import PARTS, SELECTIONS, tiny_config

aten = torch.ops.aten


def attention_flops(query, key, value, *_, out_shape=None, **__):
    """torch counts 0 for attention on CPU: scores and values, 2 FLOPs a multiply-add."""
    B, H, Q, E = query
    return 2 * 2 * B * H * Q * key[2] * E


def attention_backward_flops(grad_out, query, key, value, *_, out_shape=None, **__):
    """Of each of the two products, the gradient of both factors."""
    return 2 * attention_flops(query, key, value)


COUNT_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def counted(config, length, batch=2):
    """FLOPs of a sequence's forward and of its training step, as torch counts them."""
    model, tokens = Transformer(config), torch.randint(config.vocab_size, (batch, length))
    with FlopCounterMode(display=False, custom_mapping=COUNT_ATTENTION) as forward:
        model(tokens, mode="topk")
    with FlopCounterMode(display=False, custom_mapping=COUNT_ATTENTION) as training:
        out = model(tokens, targets=tokens, mode="topk")
        (out.loss + out.router_loss).backward()
    return forward.get_total_flops() / batch, training.get_total_flops() / batch


@pytest.mark.law
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_flops_equal_an_independent_count_within_one_percent(selection, part):
    config = tiny_config(selection=selection, part=part, predictor=23, every=1, max_length=128)
    check_count(config, length=101)


@pytest.mark.parametrize("routing", [None, RoutingConfig(capacity=0.125), RoutingConfig(capacity=0.5, predictor=64)])
def test_flops_of_a_larger_model_equal_an_independent_count(routing):
    check_count(ModelConfig(vocab_size=512, num_layers=6, dim=128, num_heads=4, routing=routing), length=255)


@pytest.mark.law
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 1}, {"routing": RoutingConfig(capacity=0.5, predictor=23)}, {"experts": ExpertsConfig()}],
)
def test_flops_of_an_update_by_muon_equal_an_independent_count(options):
    config = ModelConfig(vocab_size=101, num_layers=4, dim=24, num_heads=2, **options)
    model = Transformer(config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for name in ("adamw", "muon"):
        optimizer = make_optimizer(model, TrainConfig(steps=1, optimizer=name))
        with FlopCounterMode(display=False) as update:
            optimizer.step()
        assert flops.update_flops(config, name) == update.get_total_flops()


def check_count(config, length):
    forward, training = counted(config, length)
    assert flops.forward_flops(config, length) == pytest.approx(forward, rel=0.01)
    assert flops.training_flops(config, length) == pytest.approx(training, rel=0.01)
    # what the options leave out is exactly the logits, and half of the scores
    few = config.routing is not None and config.routing.part != "mlp" and config.routing.selection != "soft"
    k = math.ceil(round(length * config.routing.capacity, 6)) if few else length
    attended = [k if layer in config.routed_layers else length for layer in range(config.num_layers)]
    for count, times in ((flops.forward_flops, 1), (flops.training_flops, 3)):
        logits = 2 * length * config.dim * config.vocab_size
        assert count(config, length) - count(config, length, logits=False) == times * logits
        half = 2 * config.dim * sum(k * k for k in attended)
        assert count(config, length) - count(config, length, half_causal=True) == times * half


@pytest.mark.law
@pytest.mark.parametrize("predictor", [None, 23])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("routed", [True, False])
def test_parameters_equal_those_of_the_module(routed, tied, predictor):
    config = tiny_config(predictor=predictor, every=1, tie_embeddings=tied)
    config = config if routed else flops.dense(config)
    assert flops.num_parameters(config) == sum(parameter.numel() for parameter in Transformer(config).parameters())


@pytest.mark.law
@pytest.mark.parametrize(("part", "written"), [("block", 13), ("attention", 13), ("mlp", 100)])
def test_cache_bytes_count_the_tokens_that_each_layer_attends(part, written):
    config = tiny_config(part=part, capacity=0.125, layers=(1, 3), max_length=128)  # 5 layers, 3 heads of 10
    assert flops.cache_bytes(config, 100, value_bytes=2) == (3 * 100 + 2 * written) * (2 * 3 * 10 * 2 + 4)
    assert num_routed(100, 0.125) == 13


def test_a_length_below_one_is_refused():
    with pytest.raises(ValueError, match="length must be a whole number >= 1, got -3"):
        flops.forward_flops(tiny_config(), -3)


def test_the_papers_ratio():
    config = ModelConfig(vocab_size=256, num_layers=24, dim=1024, num_heads=16, mlp_dim=2731)
    routing = RoutingConfig(capacity=0.125, layers=tuple(range(1, 24, 2)))
    routed = ModelConfig(**{**config.__dict__, "routing": routing})
    ratio = flops.forward_flops(routed, 2048, logits=False) / flops.forward_flops(config, 2048, logits=False)
    assert ratio == pytest.approx(0.549, abs=0.002)


# -- the command

CONFIG = "vocab_size: 64\nnum_layers: 4\ndim: 32\nnum_heads: 2\nrouting: {capacity: 0.25, predictor: 8}\n"


def test_the_command_prints_layers_totals_and_json(tmp_path, capsys):
    path = tmp_path / "model.yaml"
    path.write_text(CONFIG)
    assert main(["flops", str(path), "--length", "40", "--value-bytes", "2"]) == 0
    text = capsys.readouterr().out
    config = ModelConfig(
        vocab_size=64, num_layers=4, dim=32, num_heads=2, routing=RoutingConfig(capacity=0.25, predictor=8)
    )
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["1 routed"][2:4] == ["10", "10"]
    assert rows["2"][1:3] == ["40", "40"]
    assert float(rows["1 routed"][-1]) == pytest.approx(
        flops.layer_flops(config, 40)[1].total / flops.layer_flops(config, 40)[0].total, abs=1e-3
    )
    result = json.loads(text.splitlines()[-1])
    assert result["model"]["parameters"] == flops.num_parameters(config)
    assert result["model"]["cache_bytes"] == flops.cache_bytes(config, 40, value_bytes=2)
    assert result["model"]["training_step_without_logits_causal_half"] == flops.training_flops(
        config, 40, logits=False, half_causal=True
    )
    assert result["dense"]["forward_with_logits_causal_full"] == flops.forward_flops(flops.dense(config), 40)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CONFIG.replace("capacity", "capcity"), [], "unknown field routing.capcity; did you mean 'capacity'?"),
        (CONFIG.replace("0.25", "1.25"), [], "routing.capacity must be a number in (0, 1], got 1.25 (to keep"),
        (CONFIG.replace("dim: 32", "dim: 33"), [], "dim must be an even multiple of num_heads"),
        ("dim: [", [], "not valid YAML"),
        (CONFIG, ["--length", "0"], "--length must be a whole number >= 1, got 0"),
    ],
)
def test_the_command_answers_a_mistake_with_one_line_and_exit_code_2(tmp_path, capsys, text, options, message):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    assert main(["flops", str(path), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("modepth flops: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_command_names_a_missing_file(tmp_path, capsys):
    assert main(["flops", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read: No such file or directory" in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["flops", "--help"])
    assert stop.value.code == 0
    assert "modepth flops model.yaml --length 2048" in capsys.readouterr().out

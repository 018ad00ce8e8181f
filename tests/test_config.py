"""Configs refuse what they do not understand, naming field, value and fix."""

import json
import math
from dataclasses import FrozenInstanceError, fields

import pytest

from modepth import LossWeights, ModelConfig, RoutingConfig
from modepth.config import TrainConfig, model_config_from_dict, model_config_to_dict, read_model_config, read_plain
from tests.oracles import tiny_config

SHAPE = {"vocab_size": 97, "num_layers": 12, "dim": 64, "num_heads": 4}


@pytest.mark.parametrize("capacity", [0, 0.0, -0.5, math.nan, math.inf, 1.25, True, "0.5", None, [0.5]])
def test_capacity_outside_0_to_1_is_refused_at_construction(capacity):
    with pytest.raises(ValueError, match=r"capacity must be a number in \(0, 1\], got "):
        RoutingConfig(capacity=capacity)


def test_the_error_of_a_large_capacity_gives_the_fix():
    with pytest.raises(ValueError, match=r"got 1.25 \(to keep a layer dense, leave it out of the routed layers\)"):
        RoutingConfig(capacity=1.25)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every", 0),
        ("every", 2.0),
        ("every", True),
        ("layers", ()),
        ("layers", (1, 1)),
        ("layers", (-1,)),
        ("layers", [1]),
        ("layers", (1.5,)),
        ("part", "head"),
        ("selection", "top_k"),
        ("selection", ["topk"]),
        ("gate", "softmax"),
        ("weigh_bypass", 1),
        ("router_init", "ones"),
        ("predictor", 0),
        ("rule", "topk"),
        ("rule", "predictor"),
        ("seed", -1),
        ("losses", {"z": 1.0}),
        ("cutoff", math.nan),
        ("cutoff", "0"),
    ],
)
def test_a_bad_routing_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        RoutingConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("num_layers", -3),
        ("num_layers", "12"),
        ("dim", 64.0),
        ("num_heads", 5),
        ("num_kv_heads", 3),
        ("num_kv_heads", 0),
        ("mlp_dim", -1),
        ("max_length", math.nan),
        ("rope_theta", math.inf),
        ("rope_theta", 10**400),
        pytest.param("dim", -(10**5000), id="dim-long"),
        ("norm_eps", math.nan),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("tie_embeddings", "yes"),
        ("routing", {"capacity": 0.5}),
    ],
)
def test_a_bad_model_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        ModelConfig(**{**SHAPE, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("steps", True),
        ("tokens", 1.5),
        ("target_flops", math.nan),
        ("target_flops", "1e9"),
        ("length", -1),
        ("batch_size", 0),
        ("micro_batch", 0),
        ("learning_rate", math.nan),
        ("learning_rate", -1e-3),
        ("warmup", 1.5),
        ("final_fraction", math.inf),
        ("weight_decay", "0.1"),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("clip", None),
        ("seed", -1),
        ("capacity_warmup", 1.0),
        ("capacity_stages", 0),
        ("eval_every", 2.0),
        ("eval_windows", 0),
        ("save_every", -5),
        ("keep_checkpoints", 0),
        ("log_every", [1]),
        ("max_bad_steps", 0),
        ("compile", 1),
        ("checkpoint_activations", "yes"),
        ("precision", "float8"),
        ("parallel", "tensor"),
        ("optimizer", "sgd"),
    ],
)
def test_a_bad_training_field_is_named(field, value):
    lengths = {name: None for name in ("steps", "tokens", "target_flops") if name != field}
    given = lengths if field in ("steps", "tokens", "target_flops") else {"steps": 5}
    with pytest.raises(ValueError, match=f"^{field} must be "):
        TrainConfig(**given, **{field: value})


def test_there_is_a_bad_value_for_every_training_field():
    (cases,) = (mark.args[1] for mark in test_a_bad_training_field_is_named.pytestmark)
    assert {name for name, _ in cases} == {each.name for each in fields(TrainConfig)}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1", True])
def test_a_bad_loss_weight_is_named(weight):
    with pytest.raises(ValueError, match="router must be a finite number >= 0"):
        LossWeights(router=weight)


def test_soft_selection_has_no_bypass_to_weigh():
    with pytest.raises(ValueError, match="weigh_bypass does nothing with selection 'soft'"):
        RoutingConfig(selection="soft", weigh_bypass=True)


def test_configs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        RoutingConfig().capacity = 0.5


@pytest.mark.parametrize(
    ("options", "num_layers", "expected"),
    [
        ({"every": 2}, 12, (1, 3, 5, 7, 9)),
        ({"every": 2}, 13, (1, 3, 5, 7, 9, 11)),
        ({"every": 1}, 5, (1, 2, 3)),
        ({"every": 3}, 9, (2, 5)),
        ({"every": 5}, 5, ()),
        ({"layers": (3, 0, 4)}, 5, (0, 3, 4)),
    ],
)
def test_which_layers_are_routed(options, num_layers, expected):
    assert RoutingConfig(**options).routed_layers(num_layers) == expected


def test_a_model_that_would_route_no_layer_or_a_missing_one_is_refused():
    with pytest.raises(ValueError, match="every=2 routes none of 2 layers"):
        ModelConfig(**{**SHAPE, "num_layers": 2, "routing": RoutingConfig()})
    with pytest.raises(ValueError, match=r"layers must be in 0..11 for 12 layers, got \[12\]"):
        ModelConfig(**SHAPE, routing=RoutingConfig(layers=(3, 12)))


def test_defaults_follow_from_the_shape():
    config = ModelConfig(**SHAPE)
    assert (config.kv_heads, config.head_dim, config.mlp_width) == (4, 16, 192)
    assert config.routed_layers == ()


# -- plain data and files


def test_a_config_survives_the_round_trip_through_json(tmp_path):
    for config in (tiny_config(layers=(1, 3), losses=LossWeights(z=0.5)), ModelConfig(**SHAPE)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(model_config_to_dict(config)))
        assert read_model_config(path) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"format 2 is newer than this modepth reads \(1\): upgrade modepth"),
        ({"format": "x"}, "format must be a whole number"),
        ({"routing": {"capcity": 0.5}}, "unknown field routing.capcity; did you mean 'capacity'"),
        ({"routing": {"losses": {"q": 1}}}, "unknown field routing.losses.q; known: predictor, router, balance, z"),
        ({"routing": {"losses": {"z": -1}}}, "routing.losses.z must be a finite number >= 0.0, got -1"),
        ({"routing": {"capacity": "half"}}, "routing.capacity must be a number"),
        ({"routing": 3}, "routing must be a mapping of RoutingConfig fields, got 3"),
        ({"num_layers": -1}, "num_layers must be a whole number >= 1, got -1"),
        ({"layres": 2}, "unknown field layres"),
        ({3: 2}, "unknown field 3"),
    ],
)
def test_plain_data_is_read_strictly(change, message):
    with pytest.raises(ValueError, match=message):
        model_config_from_dict({**SHAPE, **change})


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="missing field num_heads"):
        model_config_from_dict({name: value for name, value in SHAPE.items() if name != "num_heads"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"dim: [", "a.yaml: not valid YAML"),
        ("a.json", b"{'dim': 3}", "a.json: not valid JSON"),
        ("a.json", b"[" * 100_000, "a.json: not valid JSON"),
        ("a.json", b'{"dim": ' + b"9" * 5000 + b"}", "a.json: not valid JSON"),
        ("a.yaml", b"dim: 2020-13-45", "a.yaml: not valid YAML"),
        ("a.yaml", b"dim: 4\ndim: 8", "a.yaml: not valid YAML: the key 'dim' is given twice"),
        ("a.yaml", b"- 1\n- 2\n", "a.yaml: expected a mapping of config fields, got list"),
        ("a.yaml", b"", "a.yaml: expected a mapping of config fields, got NoneType"),
        ("a.yaml", b"\xff\xfe\x00", "a.yaml: not UTF-8 text"),
        ("a.yaml", b"!!python/object/apply:os.system ['exit 1']", "a.yaml: not valid YAML"),
        ("a.yaml", b"vocab_size: .nan\nnum_layers: 2\ndim: 4\nnum_heads: 1\n", "a.yaml: vocab_size must be .* got nan"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_model_config(path)


def test_yaml_reads_exponents_as_numbers(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("vocab_size: 9\nnum_layers: 2\ndim: 4\nnum_heads: 1\nnorm_eps: 1e-5\nrope_theta: 5E5\n")
    config = read_model_config(path)
    assert (config.norm_eps, config.rope_theta) == (1e-5, 5e5)


def test_a_yaml_mapping_may_begin_with_another_and_change_its_keys(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("first: &first {gate: tanh, capacity: 0.5}\nsecond: {<<: *first, capacity: 0.25}\n")
    assert read_plain(path)["second"] == {"gate": "tanh", "capacity": 0.25}


def test_a_directory_is_not_a_config(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_model_config(tmp_path)

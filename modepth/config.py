"""What a user sets: frozen dataclasses, validated at birth, read from YAML or JSON.

Defaults are written here and nowhere else. `RoutingConfig` says how tokens are routed,
`ModelConfig` describes the native decoder. Unknown keys, wrong types and impossible values
raise a ValueError that names the field, the value and the fix.
"""

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from modepth.validation import (
    check_capacity,
    check_choice,
    check_count,
    check_flag,
    check_instance,
    check_layers,
    check_number,
    check_thresholds,
)

FORMAT = 1  # of a saved config; a file with a higher number is refused, not half understood

Part = Literal["block", "attention", "mlp"]
Selection = Literal["topk", "random", "stride", "token_choice", "threshold", "soft"]
Gate = Literal["sigmoid", "raw", "double_sigmoid", "tanh", "one"]
Rule = Literal["cutoff", "router", "predictor"]
Init = Literal["normal", "zero"]
Mode = Literal["topk", "causal"]
Precision = Literal["bfloat16", "float16"]
Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What each router loss counts beside the language-model loss; 0 leaves one out.

    `predictor` and `balance` apply only where there is a predictor, or token-choice.

    >>> RoutingConfig(losses=LossWeights(router=0.001)).losses.predictor
    1.0
    """

    predictor: float = 1.0
    router: float = 0.0
    balance: float = 1.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            check_number(each.name, getattr(self, each.name), low=0.0)


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How tokens are routed around a block, and around which blocks.

    capacity    the share of a row's tokens that a routed layer computes, in (0, 1]
    every       in a decoder: route layers every-1, 2*every-1, ... but not the first or last
    layers      in a decoder: exactly these layers; `every` is then not consulted
    part        what skipped tokens skip in a decoder layer: the block, its attention, its mlp
    selection   how tokens are chosen in training
    gate        what multiplies a routed token's update, as a function of its router logit
    weigh_bypass  multiply skipped tokens by their gate too
    router_init   normal (std 0.02) or zero
    predictor   hidden width of the predictor of routing, None for no predictor
    rule        how a single token is decided in causal mode, where top-k and soft cannot look ahead
    cutoff      the score that threshold selection and the rule "cutoff" start from
    thresholds  pairs (layer, score): from which score the rule routes, if not from its own; `calibrate` finds them
    seed        of random selection
    losses      weights of the router losses

    >>> RoutingConfig(capacity=0.125, every=2).routed_layers(12)
    (1, 3, 5, 7, 9)
    """

    capacity: float = 0.125
    every: int = 2
    layers: tuple[int, ...] | None = None
    part: Part = "block"
    selection: Selection = "topk"
    gate: Gate = "sigmoid"
    weigh_bypass: bool = False
    router_init: Init = "normal"
    predictor: int | None = None
    rule: Rule = "cutoff"
    cutoff: float = 0.0
    thresholds: tuple[tuple[int, float], ...] | None = None
    seed: int = 0
    losses: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        check_capacity(self.capacity)
        check_count("every", self.every, low=1)
        if self.layers is not None:
            check_layers(self.layers)
        check_choice("part", self.part, Part)
        check_choice("selection", self.selection, Selection)
        check_choice("gate", self.gate, Gate)
        check_flag("weigh_bypass", self.weigh_bypass)
        check_choice("router_init", self.router_init, Init)
        if self.predictor is not None:
            check_count("predictor", self.predictor, low=1)
        check_choice("rule", self.rule, Rule)
        check_number("cutoff", self.cutoff)
        if self.thresholds is not None:
            check_thresholds(self.thresholds)
        check_count("seed", self.seed, low=0)
        check_instance("losses", self.losses, LossWeights)
        if self.rule == "predictor" and self.predictor is None:
            raise ValueError("rule 'predictor' needs a predictor: set predictor to its hidden width, for instance 64")
        if self.selection == "soft" and self.weigh_bypass:
            raise ValueError("weigh_bypass does nothing with selection 'soft', where every token is computed: drop one")

    def routed_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a decoder that are routed, in order."""
        if self.layers is None:
            return tuple(layer for layer in range(self.every - 1, num_layers - 1, self.every) if layer > 0)
        outside = [layer for layer in self.layers if layer >= num_layers]
        if outside:
            raise ValueError(f"layers must be in 0..{num_layers - 1} for {num_layers} layers, got {outside}")
        return tuple(sorted(self.layers))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The native decoder: Llama-shaped, with any set of its layers routed.

    num_kv_heads   heads of keys and values; None: as many as num_heads
    mlp_dim        inner width of the SwiGLU; None: 8/3 of dim, up to a multiple of 32
    max_length     the longest sequence that the model is meant for
    routing        None for a dense model

    >>> config = ModelConfig(vocab_size=256, num_layers=6, dim=64, num_heads=4, routing=RoutingConfig())
    >>> config.routed_layers, config.mlp_width
    ((1, 3), 192)
    """

    vocab_size: int
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    max_length: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    dropout: float = 0.0
    routing: RoutingConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "dim", "num_heads", "max_length"):
            check_count(name, getattr(self, name), low=1)
        for name in ("num_kv_heads", "mlp_dim"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), low=1)
        check_number("rope_theta", self.rope_theta, low=1.0)
        check_number("norm_eps", self.norm_eps, low=0.0)
        check_number("dropout", self.dropout, low=0.0, high=1.0)
        check_flag("tie_embeddings", self.tie_embeddings)
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"dim must be an even multiple of num_heads (rotary positions turn pairs), "
                f"got dim {self.dim} and num_heads {self.num_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_kv_heads {self.kv_heads} and num_heads {self.num_heads}"
            )
        if self.routing is not None:
            check_instance("routing", self.routing, RoutingConfig)
            if not self.routed_layers:
                raise ValueError(
                    f"routing with every={self.routing.every} routes none of {self.num_layers} layers "
                    "(the first and last stay dense): name them with layers=(...), or set routing to None"
                )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        return 32 * math.ceil(self.dim * 8 / (3 * 32)) if self.mlp_dim is None else self.mlp_dim

    @property
    def routed_layers(self) -> tuple[int, ...]:
        return () if self.routing is None else self.routing.routed_layers(self.num_layers)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained; exactly one of steps, tokens and target_flops says for how long.

    length            tokens of a training window; None: the model's max_length
    batch_size        windows of a step, over all processes
    micro_batch       windows of one forward in one process; None: all of the process's share at once
    warmup            share of the run over which the learning rate rises
    final_fraction    of the learning rate, reached by a cosine at the end of the run
    capacity_warmup   share of the run over which the capacity falls from 1 to the model's own
    capacity_stages   number of levels on the way there
    max_bad_steps     stop after so many updates in a row that were not applied
    precision         of autocast; None: the precision of the weights
    parallel          with several processes: ddp, the whole model on each, or fsdp, its tensors shared out
    """

    steps: int | None = None
    tokens: int | None = None
    target_flops: float | None = None
    length: int | None = None
    batch_size: int = 16
    micro_batch: int | None = None
    learning_rate: float = 3e-3
    warmup: float = 0.05
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    capacity_warmup: float = 0.0
    capacity_stages: int = 8
    eval_every: int = 100
    eval_windows: int = 64
    save_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 10
    max_bad_steps: int = 5
    compile: bool = False
    checkpoint_activations: bool = False
    precision: Precision | None = None
    parallel: Parallel = "ddp"

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "tokens", "target_flops") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of steps, tokens and target_flops, got {', '.join(given) or 'none'}")
        if self.target_flops is not None and self.capacity_warmup:
            raise ValueError(
                "capacity_warmup changes the FLOPs of a step: with it, give steps or tokens, not target_flops"
            )
        for name in ("steps", "tokens", "length", "micro_batch"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), low=1)
        if self.target_flops is not None:
            check_number("target_flops", self.target_flops, low=1.0)
        counts = ("batch_size", "capacity_stages", "eval_every", "eval_windows", "save_every", "keep_checkpoints")
        for name in (*counts, "log_every", "max_bad_steps"):
            check_count(name, getattr(self, name), low=1)
        check_count("seed", self.seed, low=0)
        for name in ("learning_rate", "weight_decay", "clip"):
            check_number(name, getattr(self, name), low=0.0)
        for name in ("warmup", "capacity_warmup", "beta1", "beta2"):
            check_number(name, getattr(self, name), low=0.0, high=1.0)
        check_number("final_fraction", self.final_fraction, low=0.0, high=1.0)
        for name in ("compile", "checkpoint_activations"):
            check_flag(name, getattr(self, name))
        if self.precision is not None:
            check_choice("precision", self.precision, Precision)
        check_choice("parallel", self.parallel, Parallel)
        if self.parallel == "fsdp" and self.compile:
            raise ValueError("compile does not go with parallel 'fsdp' yet: drop compile, or train with 'ddp'")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run is: a model, and how it is trained."""

    model: ModelConfig
    train: TrainConfig


# -- reading and writing


def model_config_from_dict(data: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig from plain data, refusing what it does not know."""
    model: ModelConfig = build(ModelConfig, data, where="")
    return model


def without_format(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a saved config, once its format is seen to be one that is known here."""
    rest = dict(data)
    version = rest.pop("format", FORMAT)
    check_count(f"{where}format", version, low=1)
    if version > FORMAT:
        raise ValueError(f"{where}format {version} is newer than this modepth reads ({FORMAT}): upgrade modepth")
    return rest


def model_config_to_dict(config: Any) -> dict[str, Any]:
    """Plain data that `model_config_from_dict` reads back; of a model from elsewhere, `adopted.config_from_dict`."""
    return {"format": FORMAT, **asdict(config)}


def read_model_config(path: str | Path) -> ModelConfig:
    """A ModelConfig from a YAML or JSON file that holds its fields, or has them under `model`."""
    data = read_plain(path)
    try:
        return model_config_from_dict(data["model"] if isinstance(data.get("model"), Mapping) else data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_plain(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; every error names the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    try:
        # JSON is YAML, but for tabs, which only the JSON reader takes.
        data = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=StrictLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        kind, reason = ("JSON" if path.suffix == ".json" else "YAML"), " ".join(str(error).split())
        raise ValueError(f"{path}: not valid {kind}: {reason}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: expected a mapping of config fields, got {type(data).__name__}")
    return dict(data)


class StrictLoader(yaml.SafeLoader):
    """YAML that reads 1e-5 as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"the key {key!r} is given twice")
        return super().construct_mapping(node, deep)


StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


NESTED: dict[str, type] = {
    "model": ModelConfig,
    "train": TrainConfig,
    "routing": RoutingConfig,
    "losses": LossWeights,
}


def as_tuples(value: object) -> object:
    """Lists, as YAML and JSON have them, as the tuples of a config."""
    return tuple(as_tuples(each) for each in value) if isinstance(value, list) else value


def build(kind: type, data: object, where: str, nested: Mapping[str, type] = NESTED) -> Any:
    """An instance of dataclass `kind` from a mapping, nested ones included; `where` prefixes field names.

    nested   which fields are dataclasses themselves, by name
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where.rstrip('.')} must be a mapping of {kind.__name__} fields, got {data!r}")
    data = without_format(data, where) if kind is ModelConfig else data
    known = {each.name: each for each in fields(kind)}
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown field {where}{name}; {hint}")
    missing = [
        name for name, each in known.items() if name not in data and each.default is MISSING is each.default_factory
    ]
    if missing:
        raise ValueError(f"missing field {', '.join(where + name for name in missing)}")
    values = {
        name: build(nested[name], value, f"{where}{name}.", nested)
        if name in nested and value is not None
        else as_tuples(value)
        for name, value in data.items()
    }
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error

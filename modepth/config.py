"""What a user sets: frozen dataclasses, validated at birth, read from YAML or JSON.

Defaults are written in the dataclasses and nowhere else. `RoutingConfig` says how tokens are routed,
`ModelConfig` describes the native decoder; `ExpertsConfig` and `TrainConfig` have files of their own.
Unknown keys, wrong types and impossible values raise a ValueError that names the field, the value and
the fix.
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

from modepth.experts_config import ExpertsConfig as ExpertsConfig  # noqa: PLC0414 - exported from here too
from modepth.train_config import TrainConfig as TrainConfig  # noqa: PLC0414
from modepth.validation import (
    check_capacity,
    check_choice,
    check_count,
    check_flag,
    check_instance,
    check_layers,
    check_number,
    check_thresholds,
    named_layers,
)

FORMAT = 1  # of a saved config; a file with a higher number is refused, not half understood

Part = Literal["block", "attention", "mlp"]
Selection = Literal["topk", "random", "stride", "token_choice", "threshold", "soft"]
Gate = Literal["sigmoid", "raw", "double_sigmoid", "tanh", "one"]
Rule = Literal["cutoff", "router", "predictor"]
Init = Literal["normal", "zero"]
Flow = Literal["rejoin", "filter", "exit"]
Mode = Literal["topk", "causal"]


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
    flow        where a token that was not chosen goes on: at the next layer (rejoin), at the next layer that is not
                routed, since routed ones choose among those that the last one chose (filter), nowhere (exit)
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
    flow: Flow = "rejoin"
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
        check_choice("flow", self.flow, Flow)
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
        self.check_flow()

    def check_flow(self) -> None:
        if self.flow == "rejoin":
            return
        if self.selection in ("soft", "stride"):
            why = {"soft": "computes every token", "stride": "takes the same positions in every layer"}[self.selection]
            raise ValueError(f"flow {self.flow!r} does not go with selection {self.selection!r}, which {why}: use topk")
        if self.flow == "exit" and self.part != "block":
            raise ValueError(
                f"part must be block with flow 'exit', got {self.part!r}: a token that stopped is computed by nothing"
            )

    def routed_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a decoder that are routed, in order."""
        if self.layers is None:
            return tuple(layer for layer in range(self.every - 1, num_layers - 1, self.every) if layer > 0)
        return named_layers(self.layers, num_layers)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The native decoder: Llama-shaped, with any set of its layers routed, and any with experts.

    num_kv_heads   heads of keys and values; None: as many as num_heads
    mlp_dim        inner width of the SwiGLU; None: 8/3 of dim, up to a multiple of 32
    max_length     the longest sequence that the model is meant for
    routing        which tokens skip which layers; None: all are computed
    experts        several feed-forwards in the place of one; None: one

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
    experts: ExpertsConfig | None = None

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
        if self.experts is not None:
            check_instance("experts", self.experts, ExpertsConfig)
            if not self.expert_layers:
                raise ValueError(
                    f"experts with every={self.experts.every} are in none of {self.num_layers} layers: "
                    "lower every, or set experts to None"
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

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return () if self.experts is None else self.experts.expert_layers(self.num_layers)

    @property
    def looks_ahead(self) -> bool:
        """Whether training chooses by what it knows of later tokens, so that its loss is not that of generation."""
        return self.routing is not None or self.experts is not None

    def decided_by(self, layer: int) -> int | None:
        """The layer whose router says which tokens a layer computes; None: it computes all."""
        before = [number for number in self.routed_layers if number <= layer]
        exits = self.routing is not None and self.routing.flow == "exit"
        return before[-1] if before and (exits or before[-1] == layer) else None


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
        # `<<: *other` begins with another mapping's keys, of which some may be given anew.
        keys = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
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
    "experts": ExpertsConfig,
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

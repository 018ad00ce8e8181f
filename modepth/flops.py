"""FLOPs, parameters and cache bytes of a model, from its config alone.

A multiply-add counts 2. Counted are the matrix products: projections, attention scores and values,
feed-forward, router, predictor, logits; not norms, rotations, gathers. A routed layer and an expert are
counted at their capacity, since that, not the outcome of routing, fixes their cost. Numbers are for one
sequence, but for those of an update, which no batch changes.

`half_causal` counts only the lower triangle of attention, what a perfect causal kernel would do;
published figures differ in this, so both are offered.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from modepth.adopted import AdoptedConfig, AnyConfig, Costs
from modepth.config import ExpertsConfig, ModelConfig, RoutingConfig
from modepth.muon import ROUNDS
from modepth.routing import num_routed
from modepth.validation import check_count

POSITION_BYTES = 4
Config = TypeVar("Config", bound=AnyConfig)


class LayerFlops(NamedTuple):
    """Forward FLOPs of one layer, and the number of tokens that its two parts compute."""

    layer: int
    routed: bool
    num_attended: int
    num_fed: int  # with experts, those that come to them; each expert has room for some
    attention: int
    mlp: int
    router: int
    predictor: int

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.router + self.predictor


def layer_flops(config: AnyConfig, length: int, *, half_causal: bool = False) -> list[LayerFlops]:
    """Forward FLOPs of every layer for one sequence of `length` tokens."""
    check_count("length", length, low=1)
    return [
        one_layer(config, layer, length, num_computed(config, layer, length), half_causal)
        for layer in range(config.num_layers)
    ]


def one_layer(config: AnyConfig, layer: int, length: int, computed: tuple[int, int], half_causal: bool) -> LayerFlops:
    """FLOPs of a layer whose attention and feed-forward compute so many of `length` tokens."""
    costs, (num_attended, num_fed) = costs_of(config), computed
    routed = layer in config.routed_layers
    return LayerFlops(
        layer=layer,
        routed=routed,
        num_attended=num_attended,
        num_fed=num_fed,
        attention=num_attended * costs.attention[layer]
        + num_attended**2 * costs.scores[layer] // (2 if half_causal else 1),
        mlp=num_expert_tokens(config, layer, num_fed) * costs.mlp[layer],
        router=costs.router * ((length if routed else 0) + num_fed * num_alternatives(config, layer)),
        predictor=length * costs.predictor if routed else 0,
    )


def costs_of(config: AnyConfig) -> Costs:
    """What the parts of a model cost: of a transformers model, as it was counted when it was taken in."""
    if isinstance(config, AdoptedConfig):
        return config.costs
    dim, kv_dim, width = config.dim, config.kv_heads * config.head_dim, predictor_width(config)
    embeddings = config.vocab_size * dim * (1 if config.tie_embeddings else 2)
    attention, mlp = 2 * dim * (dim + kv_dim), 3 * dim * config.mlp_width
    routers = len(config.routed_layers) * (dim + ((dim + 2) * width + 1 if width else 0))
    norms = (2 * config.num_layers + 1) * dim
    experts = sum(
        mlp * (config.experts.num_experts - 1) + dim * num_alternatives(config, layer)
        for layer in config.expert_layers
        if config.experts is not None
    )
    projections = 2 * muon_flops(dim, dim) + 2 * muon_flops(dim, kv_dim)
    num_mlps = config.num_layers + sum(
        config.experts.num_experts - 1 for _ in config.expert_layers if config.experts is not None
    )
    return Costs(
        attention=(2 * attention,) * config.num_layers,
        mlp=(2 * mlp,) * config.num_layers,
        scores=(4 * dim,) * config.num_layers,
        router=2 * dim,
        predictor=2 * (dim + 1) * width,
        logits=2 * dim * config.vocab_size,
        parameters=embeddings + config.num_layers * (attention + mlp) + experts + routers + norms,
        muon=config.num_layers * projections + num_mlps * 3 * muon_flops(dim, config.mlp_width),
    )


def num_computed(config: AnyConfig, layer: int, length: int) -> tuple[int, int]:
    """How many of a row's tokens the attention and the feed-forward of a layer compute."""
    routing, decides = config.routing, config.decided_by(layer)
    if routing is None or decides is None or routing.selection == "soft":
        return length, length
    k = num_routed(length, routing.capacity)
    if routing.flow != "rejoin":
        # Every routed layer on the way chose among those that the one before it chose.
        for _ in range(config.routed_layers.index(decides)):
            k = num_routed(k, routing.capacity)
    return computed_parts(routing, length, k)


def computed_parts(routing: RoutingConfig, length: int, k: int) -> tuple[int, int]:
    """What attention and feed-forward compute where k tokens of `length` are routed."""
    return {"block": (k, k), "attention": (k, length), "mlp": (length, k)}[routing.part]


def num_expert_tokens(config: AnyConfig, layer: int, num_fed: int) -> int:
    """How many tokens the feed-forwards of a layer compute: the room of all its experts, if it has some."""
    experts = experts_in(config, layer)
    return num_fed if experts is None else experts.num_experts * num_routed(num_fed, experts.capacity)


def num_alternatives(config: AnyConfig, layer: int) -> int:
    """What a layer's tokens are scored for: experts and no-ops."""
    experts = experts_in(config, layer)
    return 0 if experts is None else experts.num_experts + experts.num_noops


def experts_in(config: AnyConfig, layer: int) -> ExpertsConfig | None:
    """The experts of a layer; a transformers model's were counted with its feed-forward."""
    return config.experts if isinstance(config, ModelConfig) and layer in config.expert_layers else None


def predictor_width(config: AnyConfig) -> int:
    return 0 if config.routing is None else config.routing.predictor or 0


def logits_flops(config: AnyConfig, length: int) -> int:
    """Forward FLOPs of the projection to the vocabulary."""
    return length * costs_of(config).logits


def forward_flops(config: AnyConfig, length: int, *, logits: bool = True, half_causal: bool = False) -> int:
    """FLOPs of one forward pass over one sequence.

    >>> config = ModelConfig(vocab_size=256, num_layers=2, dim=64, num_heads=2)
    >>> forward_flops(config, 128) == 2 * 128 * num_parameters(replace(config, tie_embeddings=False)) \\
    ...     - 2 * 128 * (256 * 64 + 5 * 64) + 2 * 4 * 128**2 * 64  # weights, less lookup and norms, plus attention
    True
    """
    layers = sum(layer.total for layer in layer_flops(config, length, half_causal=half_causal))
    return layers + (logits_flops(config, length) if logits else 0)


def spent_share(config: AnyConfig, length: int, num_chosen: Mapping[int, int]) -> float:
    """FLOPs of one sequence over those of the dense model, where each routed layer computed so many of its tokens.

    What was spent, not what the capacity allows; attention looks back only.

    >>> config = ModelConfig(vocab_size=256, num_layers=3, dim=64, num_heads=2, routing=RoutingConfig(every=2))
    >>> round(spent_share(config, 128, {1: 16}), 2), round(spent_share(config, 128, {1: 128}), 2)
    (0.73, 1.0)
    """
    check_count("length", length, low=1)
    routing, spent = config.routing, logits_flops(config, length)
    for layer in range(config.num_layers):
        computed, decides = (length, length), config.decided_by(layer)
        if routing is not None and decides is not None and decides in num_chosen:
            computed = computed_parts(routing, length, num_chosen[decides])
        spent += one_layer(config, layer, length, computed, half_causal=True).total
    return spent / forward_flops(dense(config), length, half_causal=True)


def training_flops(config: AnyConfig, length: int, *, logits: bool = True, half_causal: bool = False) -> int:
    """FLOPs of a forward and backward pass over one sequence: three times the forward.

    But for the predictor, whose input is detached: its first layer passes no gradient on.
    """
    not_passed_on = len(config.routed_layers) * length * costs_of(config).router * predictor_width(config)
    return 3 * forward_flops(config, length, logits=logits, half_causal=half_causal) - not_passed_on


def muon_flops(rows: int, columns: int) -> int:
    """FLOPs of Muon's update of one matrix: each round a square, the square of that, and its product with the matrix.

    >>> muon_flops(64, 176) == muon_flops(176, 64) == 5 * (2 * 2 * 64 * 64 * 176 + 2 * 64 * 64 * 64)
    True
    """
    small, large = sorted((rows, columns))
    return ROUNDS * (4 * small**2 * large + 2 * small**3)


def update_flops(config: AnyConfig, optimizer: str) -> int:
    """FLOPs of one update, whatever the batch; AdamW multiplies no matrices."""
    return costs_of(config).muon if optimizer == "muon" else 0


def num_parameters(config: AnyConfig) -> int:
    """All parameters, embeddings included, tied ones once."""
    return costs_of(config).parameters


def cache_bytes(config: ModelConfig, length: int, *, value_bytes: int = 4) -> int:
    """Bytes of keys, values and positions that one sequence leaves, each layer keeping what it attended."""
    entry = 2 * config.kv_heads * config.head_dim * value_bytes + POSITION_BYTES
    return entry * sum(num_computed(config, layer, length)[0] for layer in range(config.num_layers))


def dense(config: Config) -> Config:
    """The same shape with nothing routed and a single feed-forward in each layer."""
    if isinstance(config, ModelConfig):
        config = replace(config, experts=None)
    return replace(config, routing=None)

"""FLOPs, parameters and cache bytes of a model, from its config alone.

A multiply-add counts 2. Counted are the matrix products: projections, attention scores and values,
feed-forward, router, predictor, logits; not norms, rotations, gathers. A routed layer and an expert are
counted at their capacity, since that, not the outcome of routing, fixes their cost. Numbers are for one
sequence.

`half_causal` counts only the lower triangle of attention, what a perfect causal kernel would do;
published figures differ in this, so both are offered.
"""

from dataclasses import replace
from typing import NamedTuple

from modepth.config import ModelConfig
from modepth.routing import num_routed
from modepth.validation import check_count

POSITION_BYTES = 4


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


def layer_flops(config: ModelConfig, length: int, *, half_causal: bool = False) -> list[LayerFlops]:
    """Forward FLOPs of every layer for one sequence of `length` tokens."""
    check_count("length", length, low=1)
    return [one_layer(config, layer, length, half_causal) for layer in range(config.num_layers)]


def one_layer(config: ModelConfig, layer: int, length: int, half_causal: bool) -> LayerFlops:
    num_attended, num_fed = num_computed(config, layer, length)
    kv_dim = config.kv_heads * config.head_dim
    projections = 4 * num_attended * config.dim * (config.dim + kv_dim)
    scores_and_values = 4 * num_attended**2 * config.dim // (2 if half_causal else 1)
    routed = layer in config.routed_layers
    return LayerFlops(
        layer=layer,
        routed=routed,
        num_attended=num_attended,
        num_fed=num_fed,
        attention=projections + scores_and_values,
        mlp=6 * num_expert_tokens(config, layer, num_fed) * config.dim * config.mlp_width,
        router=2 * config.dim * ((length if routed else 0) + num_fed * num_alternatives(config, layer)),
        predictor=2 * length * (config.dim + 1) * predictor_width(config) if routed else 0,
    )


def num_computed(config: ModelConfig, layer: int, length: int) -> tuple[int, int]:
    """How many of a row's tokens the attention and the feed-forward of a layer compute."""
    routing, decides = config.routing, config.decided_by(layer)
    if routing is None or decides is None or routing.selection == "soft":
        return length, length
    k = num_routed(length, routing.capacity)
    if routing.flow != "rejoin":
        # Every routed layer on the way chose among those that the one before it chose.
        for _ in range(config.routed_layers.index(decides)):
            k = num_routed(k, routing.capacity)
    return {"block": (k, k), "attention": (k, length), "mlp": (length, k)}[routing.part]


def num_expert_tokens(config: ModelConfig, layer: int, num_fed: int) -> int:
    """How many tokens the feed-forwards of a layer compute: the room of all its experts, if it has some."""
    if config.experts is None or layer not in config.expert_layers:
        return num_fed
    return config.experts.num_experts * num_routed(num_fed, config.experts.capacity)


def num_alternatives(config: ModelConfig, layer: int) -> int:
    """What a layer's tokens are scored for: experts and no-ops."""
    if config.experts is None or layer not in config.expert_layers:
        return 0
    return config.experts.num_experts + config.experts.num_noops


def predictor_width(config: ModelConfig) -> int:
    return 0 if config.routing is None else config.routing.predictor or 0


def logits_flops(config: ModelConfig, length: int) -> int:
    """Forward FLOPs of the projection to the vocabulary."""
    return 2 * length * config.dim * config.vocab_size


def forward_flops(config: ModelConfig, length: int, *, logits: bool = True, half_causal: bool = False) -> int:
    """FLOPs of one forward pass over one sequence.

    >>> config = ModelConfig(vocab_size=256, num_layers=2, dim=64, num_heads=2)
    >>> forward_flops(config, 128) == 2 * 128 * num_parameters(replace(config, tie_embeddings=False)) \\
    ...     - 2 * 128 * (256 * 64 + 5 * 64) + 2 * 4 * 128**2 * 64  # weights, less lookup and norms, plus attention
    True
    """
    layers = sum(layer.total for layer in layer_flops(config, length, half_causal=half_causal))
    return layers + (logits_flops(config, length) if logits else 0)


def training_flops(config: ModelConfig, length: int, *, logits: bool = True, half_causal: bool = False) -> int:
    """FLOPs of a forward and backward pass over one sequence: three times the forward.

    But for the predictor, whose input is detached: its first layer passes no gradient on.
    """
    not_passed_on = len(config.routed_layers) * 2 * length * config.dim * predictor_width(config)
    return 3 * forward_flops(config, length, logits=logits, half_causal=half_causal) - not_passed_on


def num_parameters(config: ModelConfig) -> int:
    """All parameters, embeddings included, tied ones once."""
    embeddings = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    attention = 2 * config.dim * (config.dim + config.kv_heads * config.head_dim)
    mlp = 3 * config.dim * config.mlp_width
    layer = attention + mlp + 2 * config.dim
    experts = 0
    if config.experts is not None:
        router = config.dim * num_alternatives(config, config.expert_layers[0])
        experts = mlp * (config.experts.num_experts - 1) + router
    width = predictor_width(config)
    predictor = (config.dim + 2) * width + 1 if width else 0
    return (
        embeddings
        + config.num_layers * layer
        + len(config.routed_layers) * (config.dim + predictor)
        + len(config.expert_layers) * experts
        + config.dim  # the final norm
    )


def cache_bytes(config: ModelConfig, length: int, *, value_bytes: int = 4) -> int:
    """Bytes of keys, values and positions that one sequence leaves, each layer keeping what it attended."""
    entry = 2 * config.kv_heads * config.head_dim * value_bytes + POSITION_BYTES
    return entry * sum(num_computed(config, layer, length)[0] for layer in range(config.num_layers))


def dense(config: ModelConfig) -> ModelConfig:
    """The same shape with nothing routed and a single feed-forward in each layer."""
    return replace(config, routing=None, experts=None)

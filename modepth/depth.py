"""Where a text's depth went: what each layer made of each token, by which threshold, at what cost.

As plain values, for the server's answers and the report's pictures alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from modepth import flops
from modepth.config import RoutingConfig
from modepth.generation import Reading, inference, read_next, start_rows
from modepth.model import Transformer
from modepth.sampling import Sampling
from modepth.selection import rule_score
from modepth.text_stream import token_texts
from modepth.tokenizer import Tokenizer


class DepthToken(TypedDict):
    id: int
    text: str
    layers: list[int]  # that computed it
    scores: list[float]  # of the routed layers, in order
    routed: list[bool]  # by the routed layers, in order


class Cost(TypedDict):
    """What was spent, of what the dense model would have."""

    flops_share: float
    cache_bytes: int
    dense_cache_bytes: int


class Depth(TypedDict):
    num_layers: int
    routed_layers: list[int]
    thresholds: list[float | None]  # of the routed layers; None where the decision is not by a threshold
    tokens: list[DepthToken]
    cost: Cost


class Score(NamedTuple):
    """What a layer made of a token; the score is the one that its rule looks at."""

    layer: int
    score: float
    routed: bool


def read_depth(model: Transformer, tokens: Sequence[int], tokenizer: Tokenizer) -> Depth:
    """Read tokens as generation does, each decided by itself, and tell where their depth went."""
    with inference(model):
        (row,) = start_rows(model, [tokens], Sampling(max_tokens=1), None)
        reading = read_next(model, [row], [len(tokens)])
        layers, scores = layers_used(model, reading, 0), router_scores(model, reading, 0)
    return depth_of(
        model,
        list(zip(tokens, token_texts(tokenizer, tokens), strict=True)),
        layers,
        scores,
        cache_bytes=row.cache.bytes_written,
    )


def depth_of(
    model: Transformer,
    tokens: Iterable[tuple[int, str]],
    layers: Sequence[Sequence[int]],
    scores: Sequence[Sequence[Score]],
    *,
    cache_bytes: int,
    routing: RoutingConfig | None = None,
) -> Depth:
    """Put together what was noted of (id, text) tokens that were read with `routing`, or the model's own."""
    config = model.config
    num_chosen = {layer: sum(layer in used for used in layers) for layer in config.routed_layers}
    return {
        "num_layers": config.num_layers,
        "routed_layers": list(config.routed_layers),
        "thresholds": thresholds(model, routing),
        "tokens": [
            {
                "id": token,
                "text": text,
                "layers": list(used),
                "scores": [score.score for score in of_token],
                "routed": [score.routed for score in of_token],
            }
            for (token, text), used, of_token in zip(tokens, layers, scores, strict=True)
        ],
        "cost": cost(model, len(layers), num_chosen, cache_bytes),
    }


def layers_used(model: Transformer, reading: Reading, number: int) -> list[tuple[int, ...]]:
    """The layers that computed each token that was just read of a row."""
    return reading.layers_used(number)


def router_scores(model: Transformer, reading: Reading, number: int) -> list[tuple[Score, ...]]:
    """What each routed layer decided by, and whether it computed the token, of each token that was just read."""
    part, config = reading.parts[number], model.config.routing
    by_layer = []
    for routing in reading.routings:
        assert config is not None  # or nothing is routed
        scores, chosen = rule_score(routing, config.rule)[0, part].tolist(), routing.chosen_BT[0, part].tolist()
        by_layer.append([Score(routing.layer, *each) for each in zip(scores, chosen, strict=True)])
    return list(zip(*by_layer, strict=True)) if by_layer else [()] * (part.stop - part.start)


def thresholds(model: Transformer, routing: RoutingConfig | None = None) -> list[float | None]:
    """What the scores of each routed layer are compared with, None where they are not."""
    routing = routing or model.config.routing
    if routing is None or routing.capacity == 1 or routing.selection not in ("topk", "soft"):
        return [None] * len(model.config.routed_layers)
    calibrated = dict(routing.thresholds or ())
    found: list[float | None] = []
    for layer in model.config.routed_layers:
        router: Any = model.layers[layer].router
        found.append(calibrated.get(layer, router.cutoff.item() if routing.rule == "cutoff" else 0.0))
    return found


def cost(model: Transformer, num_read: int, num_chosen: Mapping[int, int], cache_bytes: int) -> Cost:
    element = model.embed_tokens.weight.element_size()
    return {
        "flops_share": flops.spent_share(model.config, num_read, num_chosen),
        "cache_bytes": cache_bytes,
        "dense_cache_bytes": flops.cache_bytes(flops.dense(model.config), num_read, value_bytes=element),
    }

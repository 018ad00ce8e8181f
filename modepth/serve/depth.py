"""Where a text's depth goes: which layers compute each token, by what scores, at what cost. For the page."""

from collections.abc import Sequence
from typing import Any

from modepth.config import RoutingConfig
from modepth.sampling import Sampling
from modepth.serve.answers import Told, cost, routing_of
from modepth.serve.engine import Request
from modepth.serve.protocol import DepthAnswer, DepthBody, DepthToken
from modepth.serve.served import Served
from modepth.serve.watch import Score, layers_used, router_scores


def depth_request(body: DepthBody, served: Served) -> Request:
    """The text as a prompt: it is read as any other is, in pieces and in company; the one token drawn is not told."""
    return Request(
        prompt=served.tokenizer.encode(body.text),
        sampling=Sampling(max_tokens=1),
        routing=routing_of(body.capacity, served),
        watches={"layers": layers_used, "scores": router_scores},
    )


def depth_answer(body: DepthBody, told: Told) -> DepthAnswer:
    piece, served, config = told.take(), told.served, told.served.model.config
    layers: Sequence[Sequence[int]] = piece.notes["layers"]
    scores: Sequence[Sequence[Score]] = piece.notes["scores"]
    num_chosen = {layer: sum(layer in used for used in layers) for layer in config.routed_layers}
    tokens: list[DepthToken] = [
        {
            "id": token,
            "text": told.shown(token),
            "layers": list(used),
            "scores": [score.score for score in of_token],
            "routed": [score.routed for score in of_token],
        }
        for token, used, of_token in zip(piece.prompt, layers, scores, strict=True)
    ]
    return {
        "model": served.name,
        "capacity": body.capacity,
        "num_layers": config.num_layers,
        "routed_layers": list(config.routed_layers),
        "thresholds": thresholds(served, told.ticket.request.routing),
        "tokens": tokens,
        "cost": cost(served, told.ticket, num_chosen),
    }


def thresholds(served: Served, routing: RoutingConfig | None) -> list[float | None]:
    """What the scores of each routed layer are compared with, None where they are not."""
    config = served.model.config
    routing = routing or config.routing
    if routing is None or routing.capacity == 1 or routing.selection not in ("topk", "soft"):
        return [None] * len(config.routed_layers)
    calibrated = dict(routing.thresholds or ())
    found: list[float | None] = []
    for layer in config.routed_layers:
        router: Any = served.model.layers[layer].router
        found.append(calibrated.get(layer, router.cutoff.item() if routing.rule == "cutoff" else 0.0))
    return found

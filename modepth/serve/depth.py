"""Where a text's depth goes: which layers compute each token, by what scores, at what cost. For the page."""

from modepth.depth import depth_of, layers_used, router_scores
from modepth.sampling import Sampling
from modepth.serve.answers import Told, routing_of
from modepth.serve.engine import Request
from modepth.serve.protocol import DepthAnswer, DepthBody
from modepth.serve.served import Served
from modepth.text_stream import token_texts


def depth_request(body: DepthBody, served: Served) -> Request:
    """The text as a prompt: it is read as any other is, in pieces and in company; the one token drawn is not told."""
    return Request(
        prompt=served.tokenizer.encode(body.text),
        sampling=Sampling(max_tokens=1),
        routing=routing_of(body.capacity, served),
        watches={"layers": layers_used, "scores": router_scores},
    )


def depth_answer(body: DepthBody, told: Told) -> DepthAnswer:
    piece, ticket = told.take(), told.ticket
    depth = depth_of(
        told.served.model,
        zip(piece.prompt, token_texts(told.served.tokenizer, piece.prompt), strict=True),
        piece.notes["layers"],
        piece.notes["scores"],
        cache_bytes=ticket.cache_bytes,
        routing=ticket.request.routing,
    )
    return {"model": told.served.name, "capacity": body.capacity, **depth}

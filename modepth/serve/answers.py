"""From a request's body to what the engine is asked, and from the engine's events to an answer, whole or in chunks.

Both ways of answering use the same parts: a `Told` is what one answer has told so far, and `choice` is a piece of it.
A whole answer is one piece.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from modepth.config import RoutingConfig
from modepth.depth import cost, layers_used, router_scores
from modepth.sampling import Sampling
from modepth.serve.engine import Engine, Event, Request, Ticket, Watch
from modepth.serve.protocol import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_MAX_TOKENS,
    ChatBody,
    Choice,
    Completion,
    CompletionBody,
    Depth,
    Sampled,
    Usage,
)
from modepth.serve.served import Served
from modepth.serve.watch import NextToken, drawn_logprobs, next_logprobs
from modepth.text_stream import TextStream
from modepth.tokenizer import token_bytes

FINISH: Mapping[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length", "context": "length"}


class FieldError(ValueError):
    """What is wrong with one field of a body."""

    def __init__(self, field: str, message: object) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


# -- asking


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    prompt: Any = body.prompt
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


def check_count(engine: Engine, body: Sampled, num_prompts: int = 1) -> None:
    """Refuse more answers than there is room for, before anything is made of a body that may ask for millions."""
    try:
        engine.check_room(num_prompts * body.n, 0)
    except ValueError as error:
        field = "prompt" if num_prompts > engine.limits.requests else "n"
        raise FieldError(field, f"{error}: {num_prompts} times n, which is {body.n}") from error


def chat_prompt(body: ChatBody, served: Served) -> list[int]:
    if served.template is None:
        raise FieldError("messages", "this model's tokenizer has no chat template: use /v1/completions")
    try:
        return served.template.encode([{"role": message.role, "content": message.text} for message in body.messages])
    except ValueError as error:
        raise FieldError("messages", error) from error


def completion_requests(body: CompletionBody, served: Served) -> list[Request]:
    watches: dict[str, Watch] = {}
    if body.logprobs is not None:
        watches["logprobs"] = partial(next_logprobs if body.echo else drawn_logprobs, top=body.logprobs)
    most = body.max_tokens or DEFAULT_MAX_TOKENS
    prompts = [served.tokenizer.encode(each) if isinstance(each, str) else each for each in prompts_of(body)]
    return [each for prompt in prompts for each in n_requests(body, served, prompt, most, watches)]


def chat_requests(body: ChatBody, served: Served) -> list[Request]:
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldError("top_logprobs", "set logprobs to true as well")
    prompt = chat_prompt(body, served)
    watches: dict[str, Watch] = {}
    if body.logprobs:
        watches["logprobs"] = partial(drawn_logprobs, top=body.top_logprobs or 0)
    room = max(1, served.model.config.max_length - len(prompt))
    # Not all of a long context: what may be generated is reserved, and two such chats would fill the server.
    most = body.max_tokens or body.max_completion_tokens or min(room, DEFAULT_CHAT_TOKENS)
    return n_requests(body, served, prompt, most, watches)


def n_requests(
    body: Sampled, served: Served, prompt: Sequence[int], most: int, watches: Mapping[str, Watch]
) -> list[Request]:
    """`n` requests for one prompt; the first has the seed that was given, the others those after it."""
    routing = routing_of(body.capacity, served)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    seed = secrets.randbits(32) if body.seed is None else body.seed % 2**63
    if body.depth:
        watches = {**watches, "layers": layers_used, "scores": router_scores}
    return [
        Request(
            prompt=prompt,
            sampling=Sampling(
                max_tokens=most,
                temperature=body.temperature,
                top_p=body.top_p,
                seed=(seed + number) % 2**63,
                stop_ids=(served.tokenizer.end_of_text,),
                stop_strings=stops,
            ),
            routing=routing,
            watches=watches,
        )
        for number in range(body.n)
    ]


def routing_of(capacity: float | None, served: Served) -> RoutingConfig | None:
    try:
        return served.routing(capacity)
    except ValueError as error:
        raise FieldError("capacity", error) from error


# -- answering


class Told:
    """What one request was told so far, and the whole of what it will be told."""

    def __init__(self, index: int, ticket: Ticket, served: Served, echo: bool = False) -> None:
        self.index, self.ticket, self.served, self.echo = index, ticket, served, echo
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.notes: dict[str, list[Any]] = {name: [] for name in ticket.request.watches}
        self.ending: str | None = None
        self.num_chosen: dict[int, int] = {}
        self.num_new = 0  # tokens
        self.begun = False
        self.offset = 0  # in the text, of the next token
        self.stream = TextStream(served.tokenizer)  # of all tokens, for their depth

    def add(self, event: Event) -> None:
        self.texts.append(event.text)
        if event.token is not None:
            self.tokens.append(event.token)
            self.num_new += 1
        for name, new in event.notes.items():
            self.notes[name] += new
        self.ending = event.ending

    def take(self) -> "Piece":
        """All that was added since the last piece."""
        first = not self.begun
        prompt = list(self.ticket.request.prompt) if first else []
        piece = Piece("".join(self.texts), self.tokens, prompt, self.notes)
        self.texts, self.tokens, self.begun = [], [], True
        self.notes = {name: [] for name in self.ticket.request.watches}
        return piece

    def shown(self, token: int) -> str:
        return self.served.tokenizer.decode([token])

    def token_texts(self, piece: "Piece") -> list[str]:
        """Of the tokens of the next piece, which together make the text: a character is its last token's."""
        return self.stream.token_texts(piece.prompt + piece.tokens, last=self.ending is not None)


class Piece(NamedTuple):
    """Of an answer: new text and tokens; the prompt with the first piece; what was noted."""

    text: str
    tokens: list[int]
    prompt: list[int]
    notes: dict[str, list[Any]]


def text_choice(told: Told) -> Choice:
    """The next piece of a completion: all of it if it is the first and only one."""
    piece = told.take()
    before = told.served.tokenizer.decode(piece.prompt) if told.echo and piece.prompt else ""
    choice = bare_choice(told)
    choice["text"] = before + piece.text
    if "logprobs" in piece.notes:
        choice["logprobs"] = completion_logprobs(told, piece)
    return with_depth(choice, told, piece)


def chat_choice(told: Told, part: Literal["message", "delta"]) -> Choice:
    opening = part == "message" or not told.begun
    piece = told.take()
    content = {"content": piece.text}
    choice = bare_choice(told)
    if part == "message":
        choice["message"] = {"role": "assistant", **content}
    else:
        choice["delta"] = {"role": "assistant", **content} if opening else content
    if "logprobs" in piece.notes:
        notes = zip(piece.tokens, piece.notes["logprobs"], strict=True)
        choice["logprobs"] = {"content": [chat_logprob(told, token, note) for token, note in notes]}
    return with_depth(choice, told, piece)


def bare_choice(told: Told) -> Choice:
    reason = None if told.ending is None else FINISH[told.ending]
    return {"index": told.index, "finish_reason": reason, "logprobs": None}


def completion_logprobs(told: Told, piece: Piece) -> dict[str, Any]:
    """In the form of the completions API: lists over tokens. Of a prompt's first token there is no probability."""
    notes: list[NextToken | None] = list(piece.notes["logprobs"])
    tokens = piece.tokens
    if told.echo and piece.prompt:
        tokens, notes = piece.prompt + piece.tokens, [None, *notes]
    texts, offsets = [told.shown(token) for token in tokens], []
    for text in texts:
        offsets.append(told.offset)
        told.offset += len(text)
    top = [None if note is None else {told.shown(each.token): each.logprob for each in note.top} for note in notes]
    return {
        "tokens": texts,
        "token_logprobs": [None if note is None else note.logprob for note in notes],
        "top_logprobs": top if any(top) else None,
        "text_offset": offsets,
    }


def chat_logprob(told: Told, token: int, note: NextToken) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": told.shown(token),
            "logprob": logprob,
            "bytes": list(token_bytes(told.served.tokenizer, token)),
        }

    return {**entry(token, note.logprob), "top_logprobs": [entry(*each) for each in note.top]}


def with_depth(choice: Choice, told: Told, piece: Piece) -> Choice:
    if "layers" not in piece.notes:
        return choice
    layers: list[Sequence[int]] = piece.notes["layers"]
    for layer in told.served.model.config.routed_layers:
        told.num_chosen[layer] = told.num_chosen.get(layer, 0) + sum(layer in used for used in layers)
    depth: Depth = {
        "tokens": told.token_texts(piece),
        "layers": [list(used) for used in layers],
        "scores": [[score.score for score in of_token] for of_token in piece.notes["scores"]],
    }
    if told.ending is not None:
        ticket = told.ticket
        depth["cost"] = cost(told.served.model, ticket.num_read, told.num_chosen, ticket.cache_bytes)
    choice["depth"] = depth
    return choice


class Envelope:
    """What all pieces of one answer have in common."""

    def __init__(self, prefix: str, kind: Literal["text_completion", "chat.completion"], model: str) -> None:
        self.id, self.kind, self.model = f"{prefix}-{secrets.token_hex(12)}", kind, model
        self.created = int(time.time())

    def completion(self, choices: list[Choice], *, chunk: bool = False) -> Completion:
        kind = "chat.completion.chunk" if chunk and self.kind == "chat.completion" else self.kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage(told: Sequence[Told], n: int) -> Usage:
    """A prompt counts once, however many answers it gets."""
    prompts = sum(len(each.ticket.request.prompt) for each in told[::n])
    new = sum(each.num_new for each in told)
    return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}

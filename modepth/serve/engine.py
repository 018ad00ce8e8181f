"""Continuous batching: requests join and leave between steps, and what a layer routes is computed together.

    submit   a request is admitted, or refused at once where there is no room      any thread
    cancel   it leaves before the next step                                        any thread
    step     each row reads its last token, or a piece of its prompt, and draws    one thread

A row is one request on its way, as in `generation`, whose step this is: read, then draw. What a row says
does not depend on its neighbours, so an answer is the one that the request gets alone. Rows that ask for different
routings, as the dial allows, are read in passes of their own. Knows nothing of HTTP.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from modepth.cache import Cache
from modepth.config import RoutingConfig
from modepth.generation import Emitted, Reading, Reason, Row, draw_row, inference, next_logits, read_next
from modepth.model import Transformer, check_tokens
from modepth.sampling import Sampling
from modepth.serve.limits import STEPS_BETWEEN, Limits, next_counts
from modepth.text_stream import TextStream
from modepth.tokenizer import Tokenizer

# Looks at what was just read of one row, after its token was drawn: one note for each token that it has one for.
Watch = Callable[[Transformer, Reading, int], list[Any]]
Ending = Reason | Literal["cancelled", "failed"]
ENDINGS: tuple[str, ...] = (*get_args(Reason), "cancelled", "failed")


class BusyError(Exception):
    """There is no room now; later there may be."""


class StoppedError(Exception):
    """The engine has failed as a whole: nothing is admitted any more."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; `routing` is how to route, if not as the model does."""

    prompt: Sequence[int]
    sampling: Sampling
    routing: RoutingConfig | None = None
    watches: Mapping[str, Watch] = field(default_factory=dict)


class Ticket:
    """An admitted request."""

    def __init__(self, request: Request, row: Row, owner: object) -> None:
        self.request, self.row, self.owner = request, row, owner
        self.reserved = len(request.prompt) + request.sampling.max_tokens
        self.cancelled = False
        self.at, self.has_token = time.perf_counter(), False  # when it came, or its last token did
        self.notes: dict[str, list[Any]] = {name: [] for name in request.watches}  # since the last event
        self.cache_bytes = 0  # when it ended
        self.num_read = 0
        self.num_entries: list[int] = []

    def take_notes(self) -> dict[str, list[Any]]:
        taken, self.notes = self.notes, {name: [] for name in self.request.watches}
        return taken


class Event(NamedTuple):
    """A new token of a request, or its end, or both."""

    ticket: Ticket
    token: int | None
    text: str  # what can be shown by now
    ending: Ending | None
    notes: Mapping[str, list[Any]]
    error: str = ""


class Engine:
    """The requests of one model.

    >>> from modepth import ModelConfig, Sampling, Transformer
    >>> model = Transformer(ModelConfig(vocab_size=101, num_layers=2, dim=32, num_heads=2))
    >>> engine = Engine(model)
    >>> tickets = engine.submit([Request(prompt=[1, 2, 3], sampling=Sampling(max_tokens=2))])
    >>> [[event.ending for event in engine.step()] for _ in range(2)], engine.busy
    ([[None], ['length']], False)
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None = None, limits: Limits | None = None) -> None:
        self.model, self.tokenizer, self.limits = model.eval(), tokenizer, limits or Limits()
        self.lock = threading.Lock()  # of the three below, which `submit` changes too
        self.arrived: deque[Ticket] = deque()
        self.num_admitted = 0
        self.num_reserved = 0  # tokens
        self.seated: list[Ticket] = []  # those with rows, in order of arrival
        self.rested = max(STEPS_BETWEEN, self.limits.prompt_alone)  # steps since the last long one
        self.num_steps = 0
        self.num_read: Counter[str] = Counter()  # tokens, of prompts and generated
        self.endings: Counter[str] = Counter()
        self.failure = ""  # why it has stopped, once it has

    # -- from any thread

    def submit(self, requests: Sequence[Request], owner: object = None) -> list[Ticket]:
        """Admit all of these, or none: a ValueError for what can never be, a BusyError for what cannot now."""
        reserved = [self.needed(request) for request in requests]
        self.reserve(len(requests), sum(reserved))
        # Only now, with room for them: rows are what costs.
        try:
            tickets = [Ticket(request, self.new_row(request), owner) for request in requests]
        except BaseException:
            self.release(len(requests), sum(reserved))
            raise
        with self.lock:
            self.check_going()
            self.arrived.extend(tickets)
        return tickets

    def needed(self, request: Request) -> int:
        """The tokens to reserve for a request."""
        length, most = self.model.config.max_length, request.sampling.max_tokens
        needed = len(request.prompt) + most
        if needed > length:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {most}, together {needed}: more than "
                f"the model's context of {length}"
            )
        return needed

    def check_room(self, count: int, needed: int) -> None:
        """Raise if so many requests that need so many tokens cannot be admitted: ever, or now."""
        if count > self.limits.requests:
            raise ValueError(f"{count} answers at once are more than the {self.limits.requests} that are admitted")
        if needed > self.limits.tokens:
            raise ValueError(
                f"prompts and max_tokens add up to {needed} tokens, more than the {self.limits.tokens} that are "
                "admitted: ask for fewer answers at once, or lower max_tokens"
            )
        if self.num_admitted + count > self.limits.requests or self.num_reserved + needed > self.limits.tokens:
            raise BusyError(
                f"{self.num_admitted} requests with {self.num_reserved} tokens are on their way; with "
                f"{count} and {needed} more there would be more than {self.limits.requests} and "
                f"{self.limits.tokens}: try again later"
            )

    def reserve(self, count: int, needed: int) -> None:
        with self.lock:
            self.check_going()
            self.check_room(count, needed)
            self.num_admitted += count
            self.num_reserved += needed

    def check_going(self) -> None:
        if self.failure:
            raise StoppedError(f"the engine has stopped ({self.failure}): the server must be started again")

    def release(self, count: int, needed: int) -> None:
        with self.lock:
            self.num_admitted -= count
            self.num_reserved -= needed

    def new_row(self, request: Request) -> Row:
        self.model.own_or(request.routing)
        if self.tokenizer is not None:  # which may know fewer ids than the model has, and could not show the others
            check_tokens(torch.tensor([list(request.prompt)], dtype=torch.int64), self.tokenizer.vocab_size)
        stops = request.sampling.stop_strings
        text = None if self.tokenizer is None else TextStream(self.tokenizer, stops)
        return Row(self.model, request.prompt, request.sampling, text)

    def cancel(self, ticket: Ticket) -> None:
        """Let it leave before the next step; one that has ended already stays as it is."""
        ticket.cancelled = True

    @property
    def busy(self) -> bool:
        return self.num_admitted > 0

    @property
    def num_waiting(self) -> int:
        return len(self.arrived)

    @property
    def cache_bytes(self) -> int:
        """What the caches of all requests hold."""
        return sum(ticket.row.cache.bytes_allocated for ticket in list(self.seated))

    # -- from one thread

    def step(self) -> list[Event]:
        """Read some tokens of every seated request; what came of it. Each ticket has one event with an ending."""
        events = [self.leave(ticket, "cancelled") for ticket in self.take_cancelled()]
        self.take_seats()
        counts, self.rested = next_counts([ticket.row.num_unread for ticket in self.seated], self.limits, self.rested)
        together: dict[RoutingConfig | None, list[tuple[Ticket, int]]] = {}
        for ticket, count in zip(self.seated, counts, strict=True):
            if count:
                together.setdefault(ticket.request.routing, []).append((ticket, count))
        with inference(self.model):
            for group in together.values():
                events += self.advance(group)
        self.num_steps += bool(counts)
        return events

    def fail(self, error: Exception) -> list[Event]:
        """Give up after what no single request caused: all that were admitted end, and no others are."""
        with self.lock:
            self.failure = described(error)
            tickets = [*self.arrived, *self.seated]
            self.arrived.clear()
        return [self.leave(ticket, "failed", self.failure) for ticket in tickets]

    def take_cancelled(self) -> list[Ticket]:
        with self.lock:
            gone = [ticket for ticket in (*self.arrived, *self.seated) if ticket.cancelled]
            self.arrived = deque(ticket for ticket in self.arrived if not ticket.cancelled)
        return gone

    def take_seats(self) -> None:
        with self.lock:
            while self.arrived and len(self.seated) < self.limits.rows:
                self.seated.append(self.arrived.popleft())

    def advance(self, group: Sequence[tuple[Ticket, int]]) -> list[Event]:
        """One pass over the layers for tickets of one routing. If it fails each is tried alone, from where it stood."""
        tickets, counts = [ticket for ticket, _ in group], [count for _, count in group]
        rows = [ticket.row for ticket in tickets]
        before = [row.cache.length for row in rows]
        try:
            reading = read_next(self.model, rows, counts, tickets[0].request.routing)
            logits = next_logits(self.model, reading)
        except Exception as error:  # whatever it is: one request must not end the others, nor the engine
            return list(self.recover(group, before, error))
        self.num_read["prompt"] += sum(
            max(0, min(start + count, row.num_prompt) - start)
            for row, count, start in zip(rows, counts, before, strict=True)
        )
        events = [self.draw(ticket, reading, number, logits.get(number)) for number, ticket in enumerate(tickets)]
        return [event for event in events if event is not None]

    def recover(self, group: Sequence[tuple[Ticket, int]], before: Sequence[int], error: Exception) -> Iterator[Event]:
        for (ticket, count), length in zip(group, before, strict=True):
            ticket.row.cache.crop(length)
            if len(group) == 1:
                yield self.leave(ticket, "failed", described(error))
            else:
                yield from self.advance([(ticket, count)])

    def draw(self, ticket: Ticket, reading: Reading, number: int, logits_V: Tensor | None) -> Event | None:
        """A new token for one row, if it has logits for one, and what it watches. If that fails, it ends alone."""
        try:
            emitted = None if logits_V is None else draw_row(reading, number, logits_V)
            for name, watch in ticket.request.watches.items():
                ticket.notes[name] += watch(self.model, reading, number)
        except Exception as error:  # as above
            return self.leave(ticket, "failed", described(error))
        if emitted is None:
            return None
        self.num_read["generated"] += 1
        return self.event_of(ticket, emitted)

    def event_of(self, ticket: Ticket, emitted: Emitted) -> Event:
        ended = None if emitted.reason is None else self.leave(ticket, emitted.reason)
        if ended is None:
            return Event(ticket, emitted.token, emitted.text, None, ticket.take_notes())
        return ended._replace(token=emitted.token, text=emitted.text)

    def leave(self, ticket: Ticket, ending: Ending, error: str = "") -> Event:
        """Free what the request holds: its seat, its cache, its share of what is admitted."""
        if ticket in self.seated:
            self.seated.remove(ticket)
        cache = ticket.row.cache
        ticket.cache_bytes, ticket.num_read, ticket.num_entries = cache.bytes_written, cache.length, cache.num_entries
        ticket.row.cache = Cache(self.model.config)  # the old one's memory is free
        self.release(1, ticket.reserved)
        self.endings[ending] += 1
        return Event(ticket, None, "", ending, ticket.take_notes(), error)


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

"""What the server counts, in the text that Prometheus reads."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from modepth.serve.engine import ENDINGS, Engine, Event

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds


class Histogram:
    """How many values fell under each bound.

    >>> times = Histogram()
    >>> times.add(0.02)
    >>> times.count, times.sum
    (1, 0.02)
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {below}"


class Latencies:
    """From a request's arrival to its first token, and from one token to the next."""

    def __init__(self) -> None:
        self.first, self.between = Histogram(), Histogram()
        self.num_entries = self.num_dense_entries = 0  # of the caches of requests that have ended

    def note(self, event: Event, now: float) -> None:
        ticket = event.ticket
        if event.token is not None:
            (self.between if ticket.has_token else self.first).add(now - ticket.at)
            ticket.has_token, ticket.at = True, now
        if event.ending is not None:
            self.num_entries += sum(ticket.num_entries)
            self.num_dense_entries += ticket.num_read * len(ticket.num_entries)


def text(engine: Engine, latencies: Latencies) -> str:
    """All of it."""
    return "\n".join(lines(engine, latencies)) + "\n"


def lines(engine: Engine, latencies: Latencies) -> Iterator[str]:
    yield from metric("requests_running", "gauge", "Requests that are computed", len(engine.seated))
    yield from metric("requests_waiting", "gauge", "Requests that wait for a row", engine.num_waiting)
    yield from metric("tokens_reserved", "gauge", "Tokens of all admitted requests", engine.num_reserved)
    yield from metric("cache_bytes", "gauge", "Bytes that caches hold", engine.cache_bytes)
    yield from metric("steps_total", "counter", "Steps", engine.num_steps)
    read = {kind: engine.num_read[kind] for kind in ("prompt", "generated")}
    yield from labelled("tokens_total", "Tokens read of prompts, and generated", "kind", read)
    endings = {ending: engine.endings[ending] for ending in ENDINGS}
    yield from labelled("requests_total", "Requests that ended, by the reason", "ending", endings)
    entries = {"written": latencies.num_entries, "dense": latencies.num_dense_entries}
    yield from labelled("cache_entries_total", "Cache entries of ended requests, and of a dense model", "kind", entries)
    for name, histogram in (("first_token", latencies.first), ("between_tokens", latencies.between)):
        yield f"# TYPE modepth_{name}_seconds histogram"
        yield from histogram.lines(f"modepth_{name}_seconds")


def metric(name: str, kind: str, meaning: str, value: float) -> Iterator[str]:
    yield f"# HELP modepth_{name} {meaning}."
    yield f"# TYPE modepth_{name} {kind}"
    yield f"modepth_{name} {value}"


def labelled(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP modepth_{name} {meaning}."
    yield f"# TYPE modepth_{name} counter"
    for value, count in values.items():
        yield f'modepth_{name}{{{label}="{value}"}} {count}'

"""The engine in a thread of its own, and the way from there to asyncio: a mailbox for each call."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence

from modepth.serve.engine import Engine, Event, Request
from modepth.serve.metrics import Latencies

LOG = logging.getLogger(__name__)


class Mailbox:
    """The events of the requests of one call, as they come. Close it when nobody reads it any more."""

    def __init__(self, worker: "Worker", requests: Sequence[Request]) -> None:
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self.worker = worker
        self.tickets = worker.engine.submit(requests, owner=self)
        self.open = set(self.tickets)
        worker.wake.set()

    async def events(self) -> AsyncIterator[Event]:
        """Until all requests have ended."""
        while self.open:
            event = await self.queue.get()
            if event.ending is not None:
                self.open.discard(event.ticket)
            yield event

    def close(self) -> None:
        for ticket in self.open:
            self.worker.engine.cancel(ticket)
        self.worker.wake.set()


class Worker:
    """Steps an engine while there is something to do."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.loop = engine, loop
        self.latencies = Latencies()
        self.wake = threading.Event()
        self.stopping = False
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            self.step_while_busy()
        except Exception as error:  # nobody else would see it: those who wait would wait for ever
            LOG.critical("the engine has stopped, and all requests with it", exc_info=error)
            self.deliver(self.engine.fail(error))

    def step_while_busy(self) -> None:
        while not self.stopping:
            if not self.engine.busy:
                self.wake.wait()
                self.wake.clear()
                continue
            self.deliver(self.engine.step())

    def deliver(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            self.latencies.note(event, now)
        if events and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(hand_over, events)

    def stop(self) -> None:
        """After the step that is under way."""
        self.stopping = True
        self.wake.set()
        self.thread.join()


def hand_over(events: Sequence[Event]) -> None:
    """All events of a step at once: to wake the other thread for each would cost more than they do."""
    for event in events:
        if isinstance(event.ticket.owner, Mailbox):
            event.ticket.owner.queue.put_nowait(event)

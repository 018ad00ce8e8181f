"""One HTTP call on its way: its requests in the engine, answered whole or as a stream, and given up when the client
leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from modepth.serve.answers import Envelope, FieldError, Told, usage
from modepth.serve.engine import Request
from modepth.serve.guards import Refused, compact
from modepth.serve.protocol import Choice, Completion
from modepth.serve.served import Served
from modepth.serve.worker import Mailbox, Worker

LEFT = 499  # who asked has gone: nobody sees this


class Call:
    """The answers that one HTTP call waits for; `n` of them for each prompt."""

    def __init__(
        self, worker: Worker, served: Served, requests: Sequence[Request], *, field: str, n: int = 1, echo: bool = False
    ) -> None:
        try:
            self.mailbox = Mailbox(worker, requests)
        except ValueError as error:
            raise FieldError(field, error) from error
        self.told = [Told(index, ticket, served, echo) for index, ticket in enumerate(self.mailbox.tickets)]
        self.n = n

    async def news(self) -> AsyncIterator[Told]:
        """Who was told something new, until all have ended."""
        by_ticket = {id(told.ticket): told for told in self.told}
        async for event in self.mailbox.events():
            if event.ending == "failed":
                raise Refused(500, f"the model failed: {event.error}", code="model_failed")
            told = by_ticket[id(event.ticket)]
            told.add(event)
            yield told

    async def wait(self, http: HttpRequest) -> None:
        """Until all is told, or the client has left: then the requests end too."""
        telling, leaving = asyncio.ensure_future(self.wait_for_all()), asyncio.ensure_future(left(http))
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not telling.done():
                raise Refused(LEFT, "the client has left")
            telling.result()
        finally:
            telling.cancel()
            leaving.cancel()
            self.mailbox.close()

    async def wait_for_all(self) -> None:
        async for _ in self.news():
            pass

    async def answer(self, http: HttpRequest, envelope: Envelope, choice: Callable[[Told], Choice]) -> Completion:
        await self.wait(http)
        completion = envelope.completion([choice(told) for told in self.told])
        completion["usage"] = usage(self.told, self.n)
        return completion

    def stream(self, envelope: Envelope, choice: Callable[[Told], Choice], with_usage: bool) -> "EventStream":
        return EventStream(self.server_sent(envelope, choice, with_usage), self.mailbox.close)

    async def server_sent(
        self, envelope: Envelope, choice: Callable[[Told], Choice], with_usage: bool
    ) -> AsyncIterator[str]:
        try:
            async for told in self.news():
                yield f"data: {compact(envelope.completion([choice(told)], chunk=True))}\n\n"
        except Refused as refused:  # too late for a status
            yield f"data: {compact(refused.body)}\n\n"
            return
        if with_usage:
            last = envelope.completion([], chunk=True)
            last["usage"] = usage(self.told, self.n)
            yield f"data: {compact(last)}\n\n"
        yield "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Server-sent events; `close` is called however the stream ends, even before it has begun."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store"})
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


async def left(http: HttpRequest) -> None:
    """Returns when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass

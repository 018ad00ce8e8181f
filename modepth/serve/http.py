"""The routes: OpenAI's, what shows depth, and what a supervisor asks.

/v1/models  /v1/completions  /v1/chat/completions   as OpenAI's clients call them
/v1/depth                                           which layers compute each token of a text, and their scores
/  /v1/run                                         the page; the rows of a run, while it trains
/health  /ready  /metrics                           alive; loaded; counts for Prometheus
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, PlainTextResponse

from modepth import flops
from modepth.page import live_page
from modepth.serve import metrics
from modepth.serve.answers import (
    Envelope,
    chat_choice,
    chat_requests,
    check_count,
    completion_requests,
    prompts_of,
    text_choice,
)
from modepth.serve.calls import Call
from modepth.serve.depth import depth_answer, depth_request
from modepth.serve.engine import Engine
from modepth.serve.guards import RETRY_AFTER, BodyLimit, KeyCheck, Refused, add_error_handlers
from modepth.serve.limits import Limits
from modepth.serve.pace import with_measured_piece
from modepth.serve.protocol import (
    ChatBody,
    Completion,
    CompletionBody,
    DepthAnswer,
    DepthBody,
    ErrorAnswer,
    ModelCard,
    ModelList,
    RunRows,
    Status,
)
from modepth.serve.rows import rows_since
from modepth.serve.served import Served
from modepth.serve.worker import Worker

Errors = dict[int | str, dict[str, Any]]
ERRORS: Errors = {
    400: {"model": ErrorAnswer, "description": "A field is wrong: the message names it"},
    401: {"model": ErrorAnswer, "description": "The API key is missing or wrong"},
    404: {"model": ErrorAnswer, "description": "No such model"},
    413: {"model": ErrorAnswer, "description": "The body is too long"},
    429: {"model": ErrorAnswer, "description": "No room now: try again after Retry-After seconds"},
    503: {"model": ErrorAnswer, "description": "The model is being loaded, or its engine has stopped"},
}
STREAMED: Errors = {200: {"content": {"text/event-stream": {}}, "description": "The answer; with `stream`, in events"}}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the server meets the world.

    limits      of what is admitted
    api_key     asked for on every route but /health; None: not
    body_bytes  longer bodies are refused unread
    """

    limits: Limits
    api_key: str | None = None
    body_bytes: int = 2**20


class Server:
    """A model that is being loaded, then served."""

    def __init__(self, open_model: Callable[[], Served], settings: Settings) -> None:
        self.open_model, self.settings = open_model, settings
        self.running: tuple[Served, Worker] | None = None
        self.failure: Exception | None = None
        self.on_ready: Callable[[Served], None] = lambda served: None
        self.on_failure: Callable[[], None] = lambda: None

    def load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            served = self.open_model()
            limits = self.settings.limits
            if limits.prompt_piece is None:
                limits = with_measured_piece(limits, served.model)
            engine = Engine(served.model, served.tokenizer, limits)
        except Exception as error:  # it is raised where the server was started
            self.failure = error
            self.on_failure()
            return
        self.running = served, Worker(engine, loop)
        self.on_ready(served)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=self.load, args=(asyncio.get_running_loop(),), daemon=True).start()
        yield
        if self.running is not None:
            self.running[1].stop()

    def ready(self, model: str | None = None) -> tuple[Served, Worker]:
        """What answers a call for `model`, which is a name and never a path."""
        if self.running is None:
            raise Refused(503, "the model is being loaded", code="loading", headers=RETRY_AFTER)
        self.running[1].engine.check_going()
        name = self.running[0].name
        if model is not None and model != name:
            message = f"model: {model[:100]!r} is not served, {name!r} is"
            raise Refused(404, message, field="model", code="model_not_found")
        return self.running


def make_app(server: Server) -> FastAPI:
    app = FastAPI(title="modepth", lifespan=server.lifespan, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, limit=server.settings.body_bytes)
    if server.settings.api_key is not None:
        app.add_middleware(KeyCheck, key=server.settings.api_key)
    add_supervision(app, server)
    add_page(app, server)
    add_models(app, server)
    add_completions(app, server)
    return app


def add_supervision(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> Status:
        return {"status": "ok"}

    @app.get("/ready", responses=errors(401, 503))
    async def ready() -> Status:
        server.ready()
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse, responses=errors(401, 503))
    async def counts() -> PlainTextResponse:
        _, worker = server.ready()
        return PlainTextResponse(metrics.text(worker.engine, worker.latencies))


def add_page(app: FastAPI, server: Server) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(live_page(), headers={"Cache-Control": "no-cache"})

    @app.get("/v1/run", responses=errors(400, 401, 404, 503))
    def run(start: Annotated[int, Query(ge=0)] = 0, log: str = "") -> RunRows:
        """The rows of the run's log from `start` on, if those before are of the same `log`: else all."""
        served, _ = server.ready()
        if served.log is None:
            raise Refused(404, f"{served.name!r} is no training run with a log", code="no_log")
        return rows_since(served.name, served.log, start, log)


def add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", responses=errors(401, 503))
    async def models() -> ModelList:
        served, _ = server.ready()
        return {"object": "list", "data": [card_of(served)]}

    @app.get("/v1/models/{model:path}", responses=errors(401, 404, 503))
    async def one_model(model: str) -> ModelCard:
        served, _ = server.ready(model)
        return card_of(served)

    @app.post("/v1/depth", responses=ERRORS)
    async def depth(body: DepthBody, http: HttpRequest) -> DepthAnswer:
        served, worker = server.ready(body.model)
        request = await run_in_threadpool(depth_request, body, served)
        call = Call(worker, served, [request], field="text")
        await call.wait(http)
        return await run_in_threadpool(depth_answer, body, call.told[0])  # a long text takes a while to spell


def add_completions(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", response_model=Completion, responses={**ERRORS, **STREAMED})
    async def completions(body: CompletionBody, http: HttpRequest) -> Any:
        served, worker = server.ready(body.model)
        check_count(worker.engine, body, len(prompts_of(body)))
        requests = await run_in_threadpool(completion_requests, body, served)
        call = Call(worker, served, requests, field="prompt", n=body.n, echo=body.echo)
        envelope = Envelope("cmpl", "text_completion", served.name)
        if body.stream:
            return call.stream(envelope, text_choice, body.wants_usage)
        return await call.answer(http, envelope, text_choice)

    @app.post("/v1/chat/completions", response_model=Completion, responses={**ERRORS, **STREAMED})
    async def chat(body: ChatBody, http: HttpRequest) -> Any:
        served, worker = server.ready(body.model)
        check_count(worker.engine, body)
        requests = await run_in_threadpool(chat_requests, body, served)
        call = Call(worker, served, requests, field="messages", n=body.n)
        envelope = Envelope("chatcmpl", "chat.completion", served.name)
        if body.stream:
            return call.stream(envelope, partial(chat_choice, part="delta"), body.wants_usage)
        return await call.answer(http, envelope, partial(chat_choice, part="message"))


def errors(*statuses: int) -> Errors:
    return {status: ERRORS[status] for status in statuses}


def card_of(served: Served) -> ModelCard:
    config = served.model.config
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "modepth",
        "modepth": {
            "num_layers": config.num_layers,
            "routed_layers": list(config.routed_layers),
            "max_length": config.max_length,
            "vocab_size": config.vocab_size,
            "num_parameters": flops.num_parameters(config),
            "capacity": None if config.routing is None else config.routing.capacity,
            "dial": list(served.dial),
            "chat": served.template is not None,
            "log": served.log is not None,
        },
    }

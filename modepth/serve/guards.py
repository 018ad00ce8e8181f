"""What stands before every route: the size of a body, the API key; and errors in the shape that clients read."""

import asyncio
import base64
import hmac
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modepth.serve.answers import FieldError
from modepth.serve.engine import BusyError, StoppedError
from modepth.serve.protocol import ErrorAnswer
from modepth.validation import shown

OPEN_PATHS = ("/health",)
RETRY_AFTER = {"Retry-After": "1"}
PATIENCE = 2.0  # seconds, with a client that sends too much,
REST = 8  # and times the limit that is thrown away


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.code, self.headers = status, field, code, headers

    @property
    def body(self) -> ErrorAnswer:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, dict(self.headers or {}))


def add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return refusal_of(error).response()

    for kind in (Refused, RequestValidationError, HTTPException, BusyError, StoppedError, FieldError, Exception):
        app.add_exception_handler(kind, answer)


def refusal_of(error: Exception) -> Refused:
    """What a client is told of an exception: nothing of ours but that it happened."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, BusyError | StoppedError):
        return not_admitted(error)
    if isinstance(error, FieldError):
        return Refused(400, str(error), field=error.field)
    if isinstance(error, HTTPException):
        return Refused(error.status_code, str(error.detail), headers=error.headers)
    return Refused(500, f"the server failed ({type(error).__name__})")


def not_admitted(error: BusyError | StoppedError) -> Refused:
    if isinstance(error, StoppedError):
        return Refused(503, str(error), code="engine_stopped")
    return Refused(429, str(error), code="busy", headers=RETRY_AFTER)


def invalid(errors: Sequence[Any]) -> Refused:
    """The first problem of a body: the field, what is wrong with it, the value."""
    first = errors[0]
    place = [str(part) for part in first["loc"][1:]]  # without "body"
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if not place:
        return Refused(400, "the body must be a JSON object, sent with Content-Type: application/json")
    value = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
    where = "" if len(place) == 1 else f" (at {'.'.join(place[1:])})"
    return Refused(400, f"{place[0]}: {first['msg']}{where}{value}", field=place[0])


class BodyLimit:
    """Reads a body whole before anything looks at it, and refuses one that is too long as soon as that is known."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        too_long = not announced.isdigit() or int(announced[:19]) > self.limit
        parts, size, more = [], 0, True
        while more and not too_long:
            message = await receive()
            if message["type"] != "http.request":
                return None  # the client has left
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            too_long = size > self.limit
        if too_long:
            return await self.refuse(receive, send)
        unread = [b"".join(parts)]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        return await self.app(scope, replay, send)

    async def refuse(self, receive: Receive, send: Send) -> None:
        """Say so at once, then let some of the rest go by: a client that is still sending would not see the answer."""
        refused = Refused(413, f"the body has more than {self.limit} bytes", code="body_too_large")
        response = refused.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                left, message = REST * self.limit, await receive()
                while left > 0 and message.get("more_body", False):
                    left, message = left - len(message.get("body", b"")), await receive()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class KeyCheck:
    """Asks for `Authorization: Bearer KEY` on every route but /health; a browser may send the key as a password."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.expected = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(key_in(given), self.expected):
                refused = Refused(
                    401,
                    "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    # For browsers, which read one challenge at most: clients send their key unasked.
                    headers={"WWW-Authenticate": 'Basic realm="modepth"'},
                )
                return await refused.response()(scope, receive, send)
        return await self.app(scope, receive, send)


def key_in(header: bytes) -> bytes:
    """The key of a client's header, or of a browser's, which asks its user for a name and a password."""
    kind, _, value = header.partition(b" ")
    kind = kind.lower()  # a scheme is one in any case (RFC 9110, 11.1)
    if kind == b"basic":
        with suppress(ValueError):
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return value if kind == b"bearer" else b""


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

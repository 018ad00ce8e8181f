"""A server on a socket, from its first word to SIGTERM: loads while it listens, and lets calls end before it does."""

import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from modepth.serve.http import Server, Settings, make_app
from modepth.serve.served import Served

SWITCH_SECONDS = 2e-4


def new_listener(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be in 0..65535, got {port}")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {host}, port {port}: {error}; choose others with --host and --port"
        ) from error
    # Connections inherit it. Without it a token may wait 40 ms for the client to acknowledge the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve(
    open_model: Callable[[], Served],
    settings: Settings,
    listener: socket.socket,
    drain: int,
    on_ready: Callable[[Served], None] = lambda served: None,
    on_listening: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Serve until a signal; then let calls go on for at most `drain` seconds. What was done, in numbers."""
    # The engine lets go of the interpreter at every product, and would wait 5 ms to have it back from the other thread.
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(open_model, settings)
    config = uvicorn.Config(make_app(server), log_level="warning", server_header=False, timeout_graceful_shutdown=drain)
    listening = uvicorn.Server(config)

    def give_up() -> None:
        listening.should_exit = True

    server.on_ready, server.on_failure = on_ready, give_up
    # For a signal that comes before uvicorn looks out for it. It raises that which ended it again, when nothing is left
    # to do.
    before = signal.signal(signal.SIGTERM, lambda *_: give_up())
    try:
        on_listening()
        listening.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
    if server.failure is not None:
        raise server.failure
    if server.running is None:
        return {"requests": {}, "tokens": {}, "steps": 0}
    engine = server.running[1].engine
    return {"requests": dict(engine.endings), "tokens": dict(engine.num_read), "steps": engine.num_steps}

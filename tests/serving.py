"""A server for the tests: real HTTP on a free port, a tiny model in float64, in a thread of this process."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import torch
import uvicorn

from modepth.calibration import calibrate
from modepth.generation import generate
from modepth.sampling import Sampling
from modepth.serve.chat import ChatTemplate
from modepth.serve.http import Server, Settings, make_app
from modepth.serve.limits import Limits
from modepth.serve.listen import new_listener
from modepth.serve.served import Served
from modepth.tokenizer import ByteTokenizer, as_library
from tests.oracles import tiny_model

LONGEST = 3000
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


def tiny_served(max_length=LONGEST, **changes):
    """Bytes in, bytes out, and never the end of text; two settings of the dial, and a template for chats."""
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_model(vocab_size=256, max_length=max_length, num_layers=3, cutoff=0.3).eval()
        held_out = torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(1))
        dial = {share: calibrate(model, held_out, share) for share in (0.25, 1.0)}
    finally:
        torch.set_default_dtype(torch.float32)
    tokenizer = as_library(ByteTokenizer())
    template = ChatTemplate(TEMPLATE, {}, tokenizer.tokenizer)
    whole = {"name": "tiny", "model": model, "tokenizer": tokenizer, "template": template, "dial": dial}
    return Served(**whole | changes)


@contextmanager
def serving(open_model, *, ready=True, port=0, **settings):
    """Yields a client whose `server` is the Server and whose `app` is its app; ends what is under way at the end."""
    server = Server(open_model, Settings(**{"limits": Limits(prompt_piece=5)} | settings))
    listener = new_listener("127.0.0.1", port)
    app = make_app(server)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    listening = uvicorn.Server(config)
    thread = threading.Thread(target=listening.run, kwargs={"sockets": [listener]})
    thread.start()
    key = {"Authorization": f"Bearer {settings['api_key']}"} if settings.get("api_key") else {}
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, headers=key, timeout=30) as client:
            client.server, client.app = server, app
            wait_for(lambda: listening.started)
            if ready:
                wait_for(lambda: server.running is not None)
            yield client
    finally:
        listening.should_exit = True
        thread.join()


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


def engine_of(client):
    return client.server.running[1].engine


# -- asking


def alone(served, prompt, routing=None, **sampling):
    how = Sampling(**{"max_tokens": 16, "stop_ids": (256,)} | sampling)
    (answer,) = generate(served.model, [prompt], how, tokenizer=served.tokenizer, routing=routing, layers=True)
    return answer


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": "some prompt", "temperature": 0, "max_tokens": 4} | body)


def long_stream(client, **body):
    asked = {"prompt": "some prompt", "max_tokens": 2900, "stream": True, "stop": None} | body
    return client.stream("POST", "/v1/completions", json=asked)


def streamed(client, body):
    """The chunks of an answer as they come; closed early, the client leaves."""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@contextmanager
def asking(client, body):
    """A request for a whole answer that nobody reads; at the end the client has left."""
    content, url = json.dumps(body).encode(), client.base_url
    with socket.create_connection((url.host, url.port), timeout=20) as sender:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        sender.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def numbers(client):
    """What /metrics counts."""
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def refused(response, status, field=None):
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    return error["message"]

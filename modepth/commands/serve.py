"""`modepth serve`: the model of a run, or of a Hugging Face folder, behind OpenAI's API."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch

from modepth.validation import check_count

EXAMPLES = """\
examples:
  modepth serve                                  # the small model that comes with the package
  modepth serve runs/tiny --port 8000
  modepth serve models/llama-mod --name llama --data data/stdlib --dial 0.25 0.5
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "import ", "depth": true}'
"""
KEY_VARIABLE = "MODEPTH_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LIMITS = {
    "requests": "requests admitted at once; more are refused with 429",
    "tokens": "tokens of all admitted requests, their prompts and max_tokens",
    "rows": "requests computed together; the others wait",
    "prompt_piece": "tokens that prompts read in a step in which one other row generates (default: measured)",
}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="answer requests as OpenAI's API does",
        description="Serve a model to the clients of OpenAI's API, many requests at a time. SIGTERM lets those under "
        f"way end. An API key, if wanted, is read from the environment variable {KEY_VARIABLE}. The last line is JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", metavar="RUN_OR_HF_DIR", nargs="?", type=Path, help="a run, or a Llama's folder (default: our own)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    parser.add_argument("--name", help="what the model is called (default: the folder's name)")
    parser.add_argument("--dial", nargs="*", type=float, metavar="SHARE", help="capacities that requests may ask for")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data to calibrate the dial on")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of the model's products (default: torch's, less one for HTTP)"
    )
    parser.add_argument("--drain", type=int, default=30, metavar="S", help="seconds to end in (default: %(default)s)")
    for name, meaning in LIMITS.items():
        parser.add_argument(f"--max-{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"this needs {package}: pip install 'modepth[serve]'")
    from modepth.serve.http import Settings  # noqa: PLC0415 - an extra
    from modepth.serve.limits import Limits  # noqa: PLC0415
    from modepth.serve.listen import new_listener, serve  # noqa: PLC0415
    from modepth.serve.served import SETTINGS, Served, open_served  # noqa: PLC0415

    # One core is left to HTTP: threads that share a product wait for the slowest of them.
    threads = max(1, torch.get_num_threads() - 1) if options.threads is None else options.threads
    check_count("--threads", threads, low=1)
    torch.set_num_threads(threads)
    given = {name: getattr(options, f"max_{name}") for name in LIMITS}
    settings = Settings(
        limits=Limits(**{name: value for name, value in given.items() if value is not None}),
        api_key=os.environ.get(KEY_VARIABLE) or None,
    )
    listener = new_listener(options.host, options.port)
    url = url_of(options.host, listener.getsockname()[1])

    def open_model() -> Served:
        dial = SETTINGS if options.dial is None else options.dial
        return open_served(options.folder, name=options.name, settings=dial, data=options.data)

    def on_listening() -> None:
        say(f"listening at {url}; loading")

    def on_ready(served: Served) -> None:
        shown = ", ".join(f"{capacity:g}" for capacity in served.dial) or "none"
        say(f"{served.name} is served at {url}/v1 (dial: {shown}); its page is at {url}")

    if options.host not in LOOPBACK and settings.api_key is None:
        say(f"anybody who reaches {options.host} can use this server: set {KEY_VARIABLE} to ask for a key")
    print(json.dumps(serve(open_model, settings, listener, options.drain, on_ready, on_listening)))


def url_of(host: str, port: int) -> str:
    """
    >>> url_of("127.0.0.1", 8000), url_of("::1", 8000)
    ('http://127.0.0.1:8000', 'http://[::1]:8000')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)

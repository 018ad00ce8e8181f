"""`modepth serve`, what it can open, and the examples of its page."""

import contextlib
import json
import re
import shlex
import signal
import socket
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import httpx
import pytest
import torch

from modepth.cli import main, make_parser
from modepth.config import RoutingConfig
from modepth.hf import convert, export
from modepth.hf.native import native_parts
from modepth.sampling import Sampling
from modepth.serve.chat import ChatTemplate, find_template
from modepth.serve.listen import new_listener
from modepth.serve.served import SETTINGS, SHIPPED, make_dial, open_native, open_served, read_dial, write_dial
from modepth.serve.ship import LARGEST, ship
from modepth.tokenizer import ByteTokenizer, as_library, load_tokenizer, save_tokenizer
from tests import tiny_models
from tests.documents import blocks, run_snippets, text_of
from tests.oracles import tiny_model, tiny_tokens
from tests.processes import command
from tests.serving import serving
from tests.test_commands import CONFIG, prepared  # noqa: F401 - a fixture

PAGE = text_of("serving.md")


@pytest.fixture(scope="module")
def shipped():
    return open_served(None)


# -- what can be served


def test_the_shipped_model_is_small_and_has_a_dial(shipped):
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= LARGEST
    assert shipped.name == "modepth"
    assert tuple(shipped.dial) == SETTINGS
    text = Path(contextlib.__file__).read_text()
    tokens = torch.tensor([shipped.tokenizer.encode(text)[:512]])
    shares = []
    for capacity in SETTINGS:
        with torch.no_grad():
            out = shipped.model(tokens, routing=shipped.routing(capacity))
        shares.append(torch.stack([each.chosen_BT.double().mean() for each in out.routings]).mean().item())
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert 0.03 < shares[1] < 0.25


def test_the_shipped_model_has_learned_something(shipped):
    tokens = torch.tensor([shipped.tokenizer.encode(Path(contextlib.__file__).read_text())[:512]])
    with torch.no_grad():
        loss = shipped.model(tokens[:, :-1], targets=tokens[:, 1:]).loss
    assert loss < 5.5  # by chance: 7.6


def test_a_run_is_served_with_a_dial_from_its_own_data(prepared, tmp_path):  # noqa: F811
    (tmp_path / "config.yaml").write_text(CONFIG)
    run = tmp_path / "run"
    assert main(["train", str(run), "--data", str(prepared), "--config", str(tmp_path / "config.yaml")]) == 0
    served = open_served(run, settings=(0.5, 1.0))
    assert served.log is not None
    assert served.log.path == run / "log.jsonl"
    assert (served.name, tuple(served.dial)) == ("run", (0.5, 1.0))
    assert len(served.routing(0.5).thresholds) == 1
    with pytest.raises(ValueError, match=r"must be one of the dial's settings \(0.5, 1.0\), got 0.3"):
        served.routing(0.3)
    assert main(["export", str(run), str(tmp_path / "llama")]) == 0
    llama = open_served(tmp_path / "llama", settings=(0.5,), data=prepared)
    assert llama.routing(0.5) == served.routing(0.5)
    assert same_weights(llama.model, served.model)
    (run / "data.txt").write_text("/nowhere")
    assert tuple(open_served(run, name="other").dial) == (1.0,)
    assert ship(run, prepared, tmp_path / "carried") < LARGEST
    carried = open_served(tmp_path / "carried")
    assert tuple(carried.dial) == SETTINGS
    assert same_weights(carried.model, served.model)


def same_weights(one, other):
    """Those of models made ready, some in a layout of oneDNN's own."""
    (names, tensors), (other_names, other_tensors) = (
        zip(*each.state_dict().items(), strict=True) for each in (one, other)
    )
    assert names == other_names
    return all(a.to_dense().equal(b.to_dense()) for a, b in zip(tensors, other_tensors, strict=True))


def test_a_dial_is_read_as_it_was_written(tmp_path):
    model = tiny_model()
    dial = {1.0: replace(model.config.routing, capacity=1.0), 0.25: replace(model.config.routing, capacity=0.25,
            thresholds=((1, 0.5), (3, -0.125)))}  # fmt: skip
    write_dial(tmp_path, dial)
    assert read_dial(tmp_path, model) == dial
    (tmp_path / "dial.json").write_text('[{"capacity": 2}]')
    with pytest.raises(ValueError, match=r"dial.json: not a dial"):
        read_dial(tmp_path, model)
    assert make_dial(tmp_path, tiny_model(routing=None), SETTINGS) == {}


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("changes", [{}, {"part": "attention"}, {"routing": None}], ids=str)
def test_a_llama_of_transformers_is_the_native_decoder_that_it_came_from(changes, tmp_path):
    model = tiny_model(tie_embeddings=False, **changes).eval()
    exported = export(model.config, model.state_dict())
    exported.save_pretrained(tmp_path)
    with torch.no_grad():
        again = open_native(tmp_path)(tiny_tokens()).logits_BTV
        torch.testing.assert_close(again, model(tiny_tokens()).logits_BTV, rtol=0, atol=1e-12)
        config, weights = native_parts(exported)
    assert replace(config, mlp_dim=model.config.mlp_dim) == model.config
    assert all(weights[name].equal(tensor) for name, tensor in model.state_dict().items())


@pytest.mark.usefixtures("fp64")
def test_a_converted_llama_answers_as_transformers_does(tmp_path):
    llama = tiny_models.tiny_model("llama").double()
    converted = convert(llama, RoutingConfig(capacity=0.5, layers=(1, 3), router_init="normal"))
    config, weights = native_parts(converted)
    from modepth import Transformer, generate  # noqa: PLC0415

    native = Transformer(config).eval()
    native.load_state_dict(weights)
    prompt = tiny_tokens(B=1, T=9)
    expected = converted.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    (answer,) = generate(native, prompt.tolist(), Sampling(max_tokens=8))
    assert answer.tokens == expected[0, 9:].tolist()


def test_other_families_are_refused_by_name():
    with pytest.raises(ValueError, match="cannot become a native decoder: it is a gpt2"):
        native_parts(tiny_models.tiny_model("gpt2"))
    with pytest.raises(ValueError, match="it has biases"):
        native_parts(tiny_models.tiny_model("llama", attention_bias=True))


def test_a_chat_template_is_that_of_the_folder_and_knows_its_marks(tmp_path):
    save_tokenizer(as_library(ByteTokenizer()), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert find_template(tmp_path, tokenizer) is None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    source = "{% for m in messages %}{{ eos_token }}{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": source}))
    template = find_template(tmp_path, tokenizer)
    assert template.encode([{"role": "user", "content": "hé"}]) == [256, *"hé".encode()]
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only one message') }}")
    with pytest.raises(ValueError, match="messages do not fit the model's chat template: only one message"):
        find_template(tmp_path, tokenizer).encode([])
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        find_template(tmp_path, tokenizer).encode([])


def rendered(source, contents=("one", "two")):
    return ChatTemplate(source, {}).render([{"role": "user", "content": text} for text in contents])


def test_what_templates_of_transformers_use_works():
    loop = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    assert rendered(loop + "{% endfor %}") == "onetwo"
    assert rendered(loop + "{% break %}{% endfor %}") == "one"
    later = "{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
    assert rendered("{% for m in messages %}" + later + "{% endfor %}") == "two"
    assert rendered("{{ strftime_now('%Y-%m') }}") == datetime.now().strftime("%Y-%m")
    assert rendered("{{ messages[0] | tojson }}", ["<é>"]) == '{"role": "user", "content": "<é>"}'
    assert rendered("{% if tools is not none %}tools{% endif %}none") == "none"


def test_of_several_templates_the_default_is_used(tmp_path):
    save_tokenizer(as_library(ByteTokenizer()), tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    for templates, expected in ((named, "plain"), (named[:1], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        template = find_template(tmp_path, load_tokenizer(tmp_path))
        assert (None if template is None else template.render([])) == expected


# -- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: not a folder: name a run, or a Hugging Face model's folder"),
        (["nowhere", "--max-rows", "0"], "rows must be a whole number >= 1, got 0"),
        (["nowhere", "--port", "70000"], "port must be in 0..65535, got 70000"),
        (["nowhere", "--host", "192.0.2.1"], "cannot listen at 192.0.2.1, port 0: "),
        (["nowhere", "--dial", "1.5"], "capacity must be a number in"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_no_token_waits_for_an_acknowledgement():
    with (
        new_listener("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_sigterm_lets_an_answer_end_and_exits_0():
    with command("-m", "modepth", "serve", "--port", "0") as process:
        url = served_url(process)
        body = {"prompt": "import ", "max_tokens": 60, "stream": True, "seed": 1}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) >= 10
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(rest.splitlines()[-1])["requests"].keys() <= {"length", "stop"}


def served_url(process):
    """Where a command serves, once it does."""
    url = re.search(r"listening at (http://127\.0\.0\.1:\d+); loading", process.stdout.readline())[1]
    assert f"modepth is served at {url}/v1" in process.stdout.readline()
    return url


def test_when_the_time_to_drain_runs_out_answers_are_cut_and_it_exits_0():
    with command("-m", "modepth", "serve", "--port", "0", "--drain", "1") as process:
        body = {"prompt": "import ", "max_tokens": 500, "stream": True, "seed": 1, "n": 64}
        with httpx.stream("POST", f"{served_url(process)}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.RemoteProtocolError):  # the stream is cut
                assert "data: [DONE]" not in list(lines)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert json.loads(rest.splitlines()[-1])["requests"].keys() <= {"cancelled", "stop"}


# Loads for ever, as a model on a slow disk does.
LOADING = """
import sys, time
from modepth.cli import main
from modepth.serve import served
served.open_served = lambda *_, **__: time.sleep(600)
sys.exit(main(["serve", "--port", "0"]))
"""


def test_sigterm_before_the_model_is_loaded_exits_0():
    with command("-c", LOADING) as process:
        assert "; loading" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert json.loads(rest.splitlines()[-1]) == {"requests": {}, "tokens": {}, "steps": 0}


# -- the page of the documentation


def test_the_pages_python_runs_and_prints_what_it_says(shipped):
    with serving(lambda: shipped) as client:
        text = PAGE.replace("http://localhost:8000", str(client.base_url).rstrip("/"))
        run_snippets(text)["client"].close()


def test_the_pages_commands_are_ones(capsys):
    lines = [line for block in blocks(PAGE, "sh") for line in block.splitlines() if line.startswith("modepth ")]
    assert len(lines) == 3
    for line in lines:
        assert make_parser().parse_args(shlex.split(line, comments=True)[1:]).command == "serve"


def test_every_route_stands_in_the_page(shipped):
    with serving(lambda: shipped) as client:
        for path in client.get("/openapi.json").json()["paths"]:
            assert path.removesuffix("/{model}") in PAGE

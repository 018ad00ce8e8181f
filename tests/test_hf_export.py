"""Native checkpoints as transformers models, and the two commands: what goes out is what was there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modepth import ModelConfig, RoutingConfig, Sampling, Transformer, calibrate, generate
from modepth.cli import main
from modepth.hf import export, routing_mode
from tests.tiny_models import tiny_model

SHAPE = ModelConfig(vocab_size=97, num_layers=5, dim=32, num_heads=4, num_kv_heads=2, max_length=64)


def routed_native(**options: object) -> Transformer:
    """A decoder whose routers choose, as is asserted."""
    torch.manual_seed(1)
    model = Transformer(replace(SHAPE, routing=RoutingConfig(capacity=0.5, **options))).eval()
    for layer in model.layers:
        if layer.router is not None:
            torch.nn.init.normal_(layer.router.score.weight)
    tokens = torch.randint(97, (4, 30))
    routing = calibrate(model, tokens, 0.5)
    other = Transformer(replace(SHAPE, routing=routing)).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for decision in other(tokens).routings:
            assert 0 < decision.chosen_BT.sum() < decision.chosen_BT.numel()
    return other


def both(model: Transformer) -> tuple[Transformer, object]:
    return model, export(model.config, model.state_dict())


@torch.no_grad()
def test_a_dense_export_is_the_same_model(fp64: None) -> None:
    ours, theirs = both(Transformer(SHAPE).eval())
    tokens = torch.randint(97, (3, 20))
    assert type(theirs).__name__ == "LlamaForCausalLM"
    # Theirs makes its rotations and their cosines in float32.
    assert torch.allclose(ours(tokens).logits_BTV, theirs(tokens).logits, atol=1e-6)


@pytest.mark.parametrize("part", ["block", "attention", "mlp"])
@pytest.mark.parametrize("predictor", [None, 8])
@torch.no_grad()
def test_a_routed_export_is_the_same_model_in_both_modes(part: str, predictor: int | None) -> None:
    rule = "cutoff" if predictor is None else "predictor"
    ours, theirs = both(routed_native(part=part, predictor=predictor, rule=rule))
    tokens = torch.randint(97, (3, 20))
    for mode in ("causal", "topk"):
        expected = ours(tokens, mode=mode)
        with routing_mode(theirs, mode):
            assert torch.allclose(theirs(tokens).logits, expected.logits_BTV, atol=1e-5)
            for a, b in zip(theirs.routings, expected.routings, strict=True):
                assert torch.equal(a.chosen_BT, b.chosen_BT)


def test_native_and_exported_generate_the_same() -> None:
    ours, theirs = both(routed_native())
    prompt = torch.randint(97, (1, 9))
    expected = generate(ours, prompt.tolist(), Sampling(max_tokens=20))[0].tokens
    found = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert found[0, 9:].tolist() == expected


# -- the commands


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "source"


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_convert_writes_a_model_that_loads(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(tmp_path / "out"), "--capacity", "0.5", "--dry-run"]) == 0
    planned = last_line(capsys)
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(source), str(tmp_path / "out"), "--capacity", "0.5"]) == 0
    done = last_line(capsys)
    assert {**planned, "out": done["out"]} == done
    assert done["routed"] == [1, 3]
    dense, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert model.routing_state.config.capacity == 0.5
    tokens = torch.randint(97, (2, 9))
    assert torch.equal(model(tokens).logits, dense(tokens).logits)  # routers that are not trained route all
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def harm_auto_map(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "evil.Config"}}))
    (source / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")


def harm_escape(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))


def harm_link(source: Path) -> None:
    (source / "model.safetensors").rename(source.parent / "elsewhere.safetensors")
    (source / "model.safetensors").symlink_to(source.parent / "elsewhere.safetensors")


def harm_pickle(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def harm_missing(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def harm_json(source: Path) -> None:
    (source / "config.json").write_text("{")


def harm_layers(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": -1}))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (harm_auto_map, "it is not run"),
        (harm_escape, "not a file of this folder"),
        (harm_link, "a link to somewhere else"),
        (harm_pickle, "pickled weights"),
        (harm_missing, "model.layers.2.mlp.up_proj.weight"),
        (harm_json, "not JSON"),
        (harm_layers, "num_hidden_layers|layers"),
    ],
)
def test_a_folder_that_cannot_be_trusted_is_refused_and_nothing_is_written(
    harm: object, reason: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(source)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert any(word in message for word in reason.split("|")), message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


def test_convert_does_not_overwrite(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(source)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "not a folder" in capsys.readouterr().err

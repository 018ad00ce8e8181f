"""transformers models in our own training loop: they train, resume, are measured and exported as native ones are."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from modepth import ModelConfig, RoutingConfig, Transformer, flops, record
from modepth.adopted import config_from_dict
from modepth.cli import main
from modepth.config import TrainConfig, model_config_to_dict
from modepth.hf import convert, export, routing_mode
from modepth.hf.adoption import Adopted
from modepth.loading import load, load_native
from modepth.run import Data, Stopped, train
from tests.processes import torchrun
from tests.tiny_models import tiny_model
from tests.training import assert_same_end, make_data, rows_of, stop_after

ROUTING = RoutingConfig(capacity=0.5, every=2, predictor=6)
SHAPE = ModelConfig(vocab_size=97, num_layers=5, dim=32, num_heads=4, num_kv_heads=2, max_length=64, routing=ROUTING)
TRAIN = TrainConfig(
    steps=6,
    batch_size=4,
    micro_batch=2,
    length=24,
    capacity_warmup=0.5,
    capacity_stages=2,
    eval_every=3,
    eval_windows=3,
    save_every=2,
    log_every=1,
    learning_rate=1e-3,
)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return make_data(tmp_path)


def native(routing: RoutingConfig | None = ROUTING) -> Transformer:
    torch.manual_seed(3)
    return Transformer(ModelConfig(**{**vars(SHAPE), "routing": routing}))


def adopted(routing: RoutingConfig | None = ROUTING) -> Adopted:
    model = native(routing)
    return Adopted(export(model.config, model.state_dict()))


@pytest.mark.parametrize("routing", [ROUTING, None])
def test_a_llama_trains_as_the_native_decoder_does(routing: RoutingConfig | None, data: Data, tmp_path: Path) -> None:
    train(native(routing), TRAIN, data, tmp_path / "native")
    train(adopted(routing), TRAIN, data, tmp_path / "llama")
    rows, others = rows_of(tmp_path / "native"), rows_of(tmp_path / "llama")
    assert len(rows) == len(others) == 8
    for row, other in zip(rows, others, strict=True):
        for name in ("loss", "gradient_norm", "flops", "learning_rate", "router_losses"):
            assert row.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-3), name
        assert row.get("validation", {}) == pytest.approx(other.get("validation", {}), rel=1e-4)
        for layer, routed in row.get("layers", {}).items():
            assert routed["share"] == other["layers"][layer]["share"]
            assert routed["cutoff"] == pytest.approx(other["layers"][layer]["cutoff"], abs=1e-3)


@pytest.mark.parametrize("part", ["block", "attention", "mlp"])
def test_it_costs_what_the_native_decoder_costs(part: str) -> None:
    routing = RoutingConfig(capacity=0.3, part=part, predictor=6)
    ours, theirs = native(routing).config, adopted(routing).config
    assert flops.num_parameters(theirs) == flops.num_parameters(ours)
    assert flops.update_flops(theirs, "muon") == flops.update_flops(ours, "muon") > 0
    for length in (1, 24, 64):
        assert flops.layer_flops(theirs, length) == flops.layer_flops(ours, length)
        assert flops.training_flops(theirs, length, half_causal=True) == flops.training_flops(
            ours, length, half_causal=True
        )


def test_its_config_comes_back_from_json() -> None:
    for model in (adopted(), adopted(None)):
        assert config_from_dict(json.loads(json.dumps(model_config_to_dict(model.config)))) == model.config


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_stopped_run_goes_on_to_the_same_end(family: str, data: Data, tmp_path: Path) -> None:
    def model() -> Adopted:
        torch.manual_seed(5)
        return Adopted(convert(tiny_model(family), ROUTING, router_init="normal"))

    train(model(), TRAIN, data, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(model(), TRAIN, data, tmp_path / "stopped", on_row=stop_after(3))
    train(model(), TRAIN, data, tmp_path / "stopped")
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")


def test_another_model_in_the_same_run_is_refused(data: Data, tmp_path: Path) -> None:
    train(adopted(), TRAIN, data, tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds another model: .*transformers"):
        train(Adopted(convert(tiny_model("gpt2"), ROUTING)), TRAIN, data, tmp_path / "run")
    with pytest.raises(ValueError, match="holds another model"):
        train(native(), TRAIN, data, tmp_path / "run")


def test_kept_activations_change_nothing(data: Data, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens, losses = torch.randint(97, (2, 24)), []
    model = adopted()
    for wanted in (False, True):
        model.checkpoint_activations = wanted
        assert model.checkpoint_activations == wanted
        model.train().zero_grad()
        out = model(tokens[:, :-1], targets=tokens[:, 1:], mode="topk")
        (out.loss + out.router_loss).backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        losses.append((out.loss.item(), out.router_loss.item(), gradients))
    (plain_loss, plain_router, plain), (loss, router, gradients) = losses
    assert (plain_loss, plain_router) == (loss, router)
    assert all(torch.allclose(gradients[name], plain[name], atol=1e-6) for name in plain)


def test_padding_is_no_token() -> None:
    model, tokens = adopted().eval(), torch.randint(97, (2, 20))
    targets, lengths = tokens.roll(-1, 1), torch.tensor([20, 9])
    other = tokens.clone()
    other[1, 9:] = 0
    with torch.no_grad():
        outs = [model(each, targets=targets, lengths=lengths, mode="topk") for each in (tokens, other)]
    assert outs[0].loss == outs[1].loss
    for routing in outs[0].routings:
        assert routing.chosen_BT.sum(1).tolist() == [10, 5]


def test_a_converted_model_can_be_recorded() -> None:
    model, tokens = convert(tiny_model("llama"), ROUTING, router_init="normal"), torch.randint(97, (2, 20))
    with torch.no_grad(), routing_mode(model, "topk"), record(model) as trace:
        model(input_ids=tokens)
    assert trace.chosen_map().sum(1).tolist() == [20, 10, 20, 10, 20]


# -- the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native run, its export, and its data."""
    folder = tmp_path_factory.mktemp("adoption")
    (folder / "text").mkdir()
    for number in range(30):
        (folder / "text" / f"{number}.txt").write_text(f"page {number}: " + "the cat sat on the mat. " * 12)
    assert main(["data", "prepare", str(folder / "text"), str(folder / "data"), "--tokenizer", "bytes"]) == 0
    shape = ["--model.vocab_size", "257", "--model.num_layers", "4", "--model.dim", "16", "--model.num_heads", "2"]
    more = ["--model.max_length", "64", "--model.routing.capacity", "0.5"]
    run = ["train", str(folder / "native"), "--data", str(folder / "data")]
    assert main([*run, *shape, *more, *STEPS, "--train.steps", "2"]) == 0
    assert main(["export", str(folder / "native"), str(folder / "llama")]) == 0
    return folder


STEPS = ["--train.batch_size", "2", "--train.length", "32", "--train.eval_windows", "2", "--train.log_every", "1"]


def adopt(folders: Path, run: Path, *more: str) -> list[str]:
    source = ["--data", str(folders / "data"), "--model", str(folders / "llama")]
    return ["train", str(run), *source, *STEPS, "--train.steps", "3", *more]


def test_train_eval_inspect_and_export(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(adopt(folders, run)) == 0
    assert main(["eval", str(run)]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    assert main(["inspect", str(run)]) == 0
    assert "mod_llama" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folders / "llama" / "tokenizer.json").read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(257, (2, 30))
    with torch.no_grad():
        for mode in ("causal", "topk"):
            with routing_mode(again, mode):
                assert torch.equal(again(input_ids=tokens).logits, load(run)(tokens, mode=mode).logits_BTV)
    assert loss < 5.6
    with pytest.raises(ValueError, match="holds a transformers model: `modepth export` it"):
        load_native(run)


def test_routers_alone_can_be_trained(folders: Path, tmp_path: Path) -> None:
    assert main(adopt(folders, tmp_path / "run", "--routers-only")) == 0
    before = AutoModelForCausalLM.from_pretrained(folders / "llama").state_dict()
    after = load(tmp_path / "run").base.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "mod_router" in name}


def test_bad_input_is_named(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, words in (
        (["--model.dim", "8"], "leave `model` out of the config and the flags"),
        (["--model", str(tmp_path)], "no config.json"),
        (["--model", str(tmp_path / "nowhere")], "not a folder"),
    ):
        assert main(adopt(folders, tmp_path / "run", *more)) == 2
        assert words in capsys.readouterr().err
    assert main(["data", "prepare", str(folders / "text"), str(tmp_path / "bpe"), "--tokenizer", "bpe:300"]) == 0
    assert main(adopt(folders, tmp_path / "run", "--data", str(tmp_path / "bpe"))) == 2
    assert "another tokenizer" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run"), "--data", str(folders / "data"), "--routers-only"]) == 2
    assert "--routers-only needs --model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_do_what_one_does(parallel: str, folders: Path, tmp_path: Path) -> None:
    assert main(adopt(folders, tmp_path / "one")) == 0
    two = adopt(folders, tmp_path / "two", "--train.parallel", parallel)
    with torchrun(2, "-m", "modepth", *two) as agent:
        output, _ = agent.communicate(timeout=120)
    assert agent.returncode == 0, output
    rows, others = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert [row["loss"] for row in rows[:-1]] == pytest.approx([row["loss"] for row in others[:-1]], rel=1e-4)
    assert rows[-1]["validation"] == pytest.approx(others[-1]["validation"], rel=1e-4)

"""The study of a real model, on a tiny one: examples/smollm2.py from text to table and picture."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from modepth.cli import main as modepth
from tests.documents import ROOT, text_of

SMALL = {"LENGTH": 32, "TEST_WINDOWS": 4}


@pytest.fixture
def example(monkeypatch):
    """The names of the example, with short windows and few of them; its functions share these globals."""
    names = runpy.run_path(str(ROOT / "examples" / "smollm2.py"))
    own = names["main"].__globals__
    own.update(names, **SMALL)
    arm = own["Arm"]
    own["ARMS"] = [
        arm("dense"),
        arm("block", "block", 2, 0.5),
        arm("attention", "attention", 2, 0.25),
        arm("random", "block", 2, 0.5, "random"),
    ]

    def command(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["smollm2.py", *map(str, words)])
        own["main"]()

    return command


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a tiny model, its tokenizer, and two texts."""
    for name, words in (("one", "the captain shut the door "), ("other", "the door of the cabin shut ")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(words * (5 + number % 7) for number in range(20_000)))
    vocabulary = ["data", "prepare", str(tmp_path / "one.txt"), str(tmp_path / "vocabulary"), "--tokenizer", "bpe:280"]
    assert modepth([*vocabulary, "--document-bytes", "32768"]) == 0
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=280, num_key_value_heads=1, **shape)).save_pretrained(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "vocabulary" / "tokenizer.json"))
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def test_the_study_of_a_real_model_runs_on_a_tiny_one(example, work, capsys):
    assert re.findall(r"^python examples/smollm2.py (\w+) work", text_of("smollm2.md"), re.M) == [
        "model",  # needs the real weights
        "data",
        "study",
        "show",
    ]
    example("data", work, "--train", work / "one.txt", "--test", work / "other.txt")
    example("study", work, "--tokens", 1280, "--arms", "dense", "block")
    example("study", work, "--tokens", 1280)
    rows = {row["arm"]["name"]: row for row in map(json.loads, (work / "rows.jsonl").read_text().splitlines())}
    assert list(rows) == ["dense", "block", "attention", "random"]
    assert rows["dense"]["layer_flops_of_dense"] == rows["dense"]["cache_of_dense"] == 1
    for name in ("block", "attention", "random"):
        assert rows[name]["layer_flops_of_dense"] < 1
        assert rows[name]["cache_of_dense"] < 1
        assert rows[name]["loss"] < rows[name]["untuned"]["loss"]
    assert 0 < rows["attention"]["share"] < rows["block"]["share"] < 1
    effects = json.loads((work / "effects.json").read_text())
    routed = json.loads((work / "tuned" / "block" / "config.json").read_text())["routing"]["layers"]
    assert routed == sorted(sorted(range(1, 5), key=effects["block"].__getitem__)[:2])  # those that matter least

    capsys.readouterr()
    example("show", work, "--map", work / "tuned" / "block")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| dense", "| block", "| attention", "| random"]
    assert (work / "map.png").stat().st_size > 10_000

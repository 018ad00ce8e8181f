"""What a run was trained on: its folder keeps the tokenizer, and where the data was."""

import shutil
from pathlib import Path

from torch import Tensor

from modepth.config import ModelConfig
from modepth.data import read_windows, spread_windows
from modepth.run import open_split
from modepth.textfile import replace_text
from modepth.tokenizer import load_tokenizer, save_tokenizer

# The files of a transformers model's tokenizer.
COPIED = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_*")


def remember_data(run: Path, data: Path) -> None:
    """A run keeps its tokenizer, and where its data was."""
    save_tokenizer(load_tokenizer(data), run)
    replace_text(run / "data.txt", f"{data.resolve()}\n")


def data_of(run: Path) -> Path:
    """The prepared data that a run was trained on."""
    if not (run / "data.txt").exists():
        raise ValueError(f"{run}: does not say what it was trained on: give --data")
    return Path((run / "data.txt").read_text().strip())


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """The files of a tokenizer, as they are."""
    found = {file.name: file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}
    for name, file in found.items():
        shutil.copyfile(file, out / name)
    return sorted(found)


def held_out_tokens(data: Path, config: ModelConfig, count: int) -> Tensor:
    """About `count` validation tokens, in windows of the model's length that are spread over the split."""
    tokens, length = open_split(data, "validation", config), config.max_length
    windows = spread_windows(tokens, length, max(1, count // length))
    return read_windows(tokens, windows, length)[:, :-1]

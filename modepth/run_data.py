"""What a run was trained on: its folder keeps the tokenizer, and where the data was."""

from pathlib import Path

from modepth.textfile import replace_text
from modepth.tokenizer import load_tokenizer, save_tokenizer


def remember_data(run: Path, data: Path) -> None:
    """A run keeps its tokenizer, and where its data was."""
    save_tokenizer(load_tokenizer(data), run)
    replace_text(run / "data.txt", f"{data.resolve()}\n")


def data_of(run: Path) -> Path:
    """The prepared data that a run was trained on."""
    if not (run / "data.txt").exists():
        raise ValueError(f"{run}: does not say what it was trained on: give --data")
    return Path((run / "data.txt").read_text().strip())

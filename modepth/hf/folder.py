"""Folders of transformers models: opened without running or trusting what lies in them, written whole or not at all."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from modepth.hf.model import refuse_misfits


def check_folder(folder: Path) -> None:
    """Refuse what would run code, read files elsewhere, or be unpickled."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a folder; download the model first, for instance with `hf download`")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json, so this is no transformers model")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'}: must hold an object, holds a {type(config).__name__}")
    if config.get("auto_map"):
        raise ValueError(f"{folder}: config.json asks to run code that came with the model (auto_map); it is not run")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no .safetensors files; pickled weights (.bin, .pt) are not opened")
    for index in folder.glob("*.index.json"):
        for name in json.loads(index.read_text()).get("weight_map", {}).values():
            if not inside(folder, name):
                raise ValueError(f"{index}: weight_map names {name!r}, which is not a file of this folder")
    for file in folder.glob("*.safetensors"):
        if not inside(folder, file.name):
            raise ValueError(f"{file}: a link to somewhere else; copy the file")


def inside(folder: Path, name: object) -> bool:
    return isinstance(name, str) and (folder / name).resolve().parent == folder.resolve()


def open_model(folder: Path) -> Any:
    """The causal language model in a folder, every tensor in its place."""
    check_folder(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    model, info = loaded
    refuse_misfits(info, f"{type(model).__name__} in {folder}")
    return model.eval()


def open_config(folder: Path) -> Any:
    check_folder(folder)
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out` when all is written."""
    if out.exists():
        raise ValueError(f"{out}: exists already; name another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=out.parent) as partial:
        inner = Path(partial) / "model"
        inner.mkdir()
        yield inner
        inner.rename(out)

"""A trained model, from the folder of its run."""

import importlib.util
from pathlib import Path

from modepth import checkpoint
from modepth.adopted import AdoptedConfig, AnyConfig
from modepth.agreement import saved_model
from modepth.model import Decoder, Transformer
from modepth.restore import load_model


def load(run: str | Path) -> Decoder:
    """The model of a run at its newest checkpoint."""
    found = checkpoint.newest(run)
    if found is None:
        raise ValueError(f"{run}: no checkpoint to load")
    model = empty_model(saved_model(found))
    load_model(model, found)
    return model.eval()


def load_native(run: str | Path) -> Transformer:
    """As `load`, for what works with the native decoder alone."""
    model = load(run)
    if not isinstance(model, Transformer):
        raise ValueError(f"{run}: holds a transformers model: `modepth export` it, then use it as one")
    return model


def empty_model(config: AnyConfig) -> Decoder:
    if not isinstance(config, AdoptedConfig):
        return Transformer(config)
    require_transformers()
    from modepth.hf import adoption  # noqa: PLC0415 - an extra, and slow to load

    return adoption.empty_model(config)


def require_transformers() -> None:
    """Models of transformers need it, and it is an extra."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("this needs transformers: pip install 'modepth[hf]'")

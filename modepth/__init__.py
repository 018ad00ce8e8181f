"""Mixture-of-Depths for PyTorch: each token decides, layer by layer, whether to be computed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modepth import flops, losses
    from modepth.calibration import calibrate
    from modepth.config import ExpertsConfig, LossWeights, ModelConfig, RoutingConfig
    from modepth.encoder import build, check_lengths, output_size, recommended_defaults
    from modepth.generation import generate, stream
    from modepth.layer import MixtureOfDepths
    from modepth.loading import load
    from modepth.model import Output, Transformer, check_tokens
    from modepth.ready import ready_to_generate
    from modepth.routing import Router, Routing, apply_routed, num_routed
    from modepth.sampling import Sampling
    from modepth.trace import record

__all__ = [
    "ExpertsConfig",
    "LossWeights",
    "MixtureOfDepths",
    "ModelConfig",
    "Output",
    "Router",
    "Routing",
    "RoutingConfig",
    "Sampling",
    "Transformer",
    "apply_routed",
    "build",
    "calibrate",
    "check_lengths",
    "check_tokens",
    "flops",
    "generate",
    "load",
    "losses",
    "num_routed",
    "output_size",
    "ready_to_generate",
    "recommended_defaults",
    "record",
    "stream",
]

# A name is loaded when it is first used, so that what needs no torch (plots, reports) does not wait for it.
_HOMES = {
    "calibration": ("calibrate",),
    "config": ("ExpertsConfig", "LossWeights", "ModelConfig", "RoutingConfig"),
    "encoder": ("build", "check_lengths", "output_size", "recommended_defaults"),
    "generation": ("generate", "stream"),
    "layer": ("MixtureOfDepths",),
    "loading": ("load",),
    "model": ("Output", "Transformer", "check_tokens"),
    "ready": ("ready_to_generate",),
    "routing": ("Router", "Routing", "apply_routed", "num_routed"),
    "sampling": ("Sampling",),
    "trace": ("record",),
}


def __getattr__(name: str) -> Any:
    if name in ("flops", "losses"):
        return import_module(f"modepth.{name}")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"modepth.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'modepth' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Mixture-of-Depths for PyTorch: each token decides, layer by layer, whether to be computed."""

from modepth import flops, losses
from modepth.config import LossWeights, ModelConfig, RoutingConfig
from modepth.layer import MixtureOfDepths
from modepth.model import Output, Transformer, check_tokens
from modepth.routing import Router, Routing, apply_routed, num_routed

__all__ = [
    "LossWeights",
    "MixtureOfDepths",
    "ModelConfig",
    "Output",
    "Router",
    "Routing",
    "RoutingConfig",
    "Transformer",
    "apply_routed",
    "check_tokens",
    "flops",
    "losses",
    "num_routed",
]

"""Mixture-of-Depths for models of the transformers library. Importing this lets its Auto classes load such models."""

from modepth.hf.calibration import calibrate
from modepth.hf.classes import register_families
from modepth.hf.convert import convert, restore, summary
from modepth.hf.export import export
from modepth.hf.model import as_dense, routing_mode, set_routing
from modepth.hf.training import CapacitySchedule, RoutingCallback, train_routers_only
from modepth.hf.verify import verify

__all__ = [
    "CapacitySchedule",
    "RoutingCallback",
    "as_dense",
    "calibrate",
    "convert",
    "export",
    "restore",
    "routing_mode",
    "set_routing",
    "summary",
    "train_routers_only",
    "verify",
]

register_families()

"""A transformers model as a run sees it: its config and its cost as plain data.

So a run of such a model is planned, resumed and inspected by the code that does it for the native decoder, and
inspected even where transformers is not installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from modepth.config import NESTED, ModelConfig, RoutingConfig, build, model_config_from_dict, without_format
from modepth.validation import check_count, check_instance


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a model's parts cost, as matrix products count: forward FLOPs, a multiply-add being 2.

    attention, mlp      of a token, in each layer's weights
    scores              of a pair of tokens, in each layer's attention
    router, predictor   of a token, in each routed layer
    logits              of a token, in the projection to the vocabulary
    parameters          their number, tied ones once
    muon                of an update by Muon, in the layers' matrices
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    scores: tuple[int, ...]
    router: int
    predictor: int
    logits: int
    parameters: int
    muon: int = 0  # not counted in runs of an earlier version

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            for number in value if isinstance(value, tuple) else (value,):
                check_count(each.name, number, low=0)
        if not len(self.attention) == len(self.mlp) == len(self.scores):
            raise ValueError(
                f"attention, mlp and scores must each have a number a layer, got {len(self.attention)}, "
                f"{len(self.mlp)} and {len(self.scores)}"
            )


@dataclass(frozen=True, kw_only=True)
class AdoptedConfig:
    """A transformers model: what our loop asks of one, and its own config, without the routing."""

    vocab_size: int
    max_length: int
    costs: Costs
    transformers: dict[str, Any]
    routing: RoutingConfig | None = None

    def __post_init__(self) -> None:
        check_count("vocab_size", self.vocab_size, low=1)
        check_count("max_length", self.max_length, low=1)
        check_instance("costs", self.costs, Costs)
        check_instance("transformers", self.transformers, dict)
        if self.routing is not None:
            check_instance("routing", self.routing, RoutingConfig)

    @property
    def num_layers(self) -> int:
        return len(self.costs.attention)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        return () if self.routing is None else self.routing.routed_layers(self.num_layers)

    @property
    def looks_ahead(self) -> bool:
        """Whether training chooses by what it knows of later tokens, so that its loss is not that of generation."""
        return self.routing is not None

    def decided_by(self, layer: int) -> int | None:
        """The layer whose router says which tokens a layer computes; None: it computes all."""
        return layer if layer in self.routed_layers else None


AnyConfig = ModelConfig | AdoptedConfig


def config_from_dict(data: Mapping[str, Any]) -> AnyConfig:
    """The config of either kind of model, from what `model_config_to_dict` wrote."""
    if "transformers" not in data:
        return model_config_from_dict(data)
    adopted: AdoptedConfig = build(AdoptedConfig, without_format(data, ""), "", NESTED | {"costs": Costs})
    return adopted

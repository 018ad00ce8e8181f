"""A mixture of experts, as a user sets it. Read from files where all configs are: config.py."""

from dataclasses import dataclass
from typing import Literal

from modepth.validation import check_choice, check_count, check_layers, check_number, named_layers

ExpertChoice = Literal["token", "expert"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A feed-forward of several experts, of which a token uses few or none.

    num_experts      each as wide as the feed-forward that they stand in for
    every            layers every-1, 2*every-1, ... have experts; 1: all
    layers           exactly these layers have experts; `every` is then not consulted
    choice           token: each token picks its experts; expert: each expert picks its tokens
    per_token        experts that a token picks, 1 or 2, or with choice expert gets in the mean
    num_noops        alternatives beside the experts that compute nothing, for tokens to pick
    capacity_factor  room of each expert, times an even share of the tokens; whom it has no room for it leaves out
    balance          weight of the loss that evens out what tokens pick

    >>> ExpertsConfig(num_experts=4, num_noops=4, capacity_factor=1.2).capacity  # of a row's tokens, in each expert
    0.15
    """

    num_experts: int = 4
    every: int = 1
    layers: tuple[int, ...] | None = None
    choice: ExpertChoice = "token"
    per_token: int = 1
    num_noops: int = 0
    capacity_factor: float = 1.0
    balance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("num_experts", "every", "per_token"):
            check_count(name, getattr(self, name), low=1)
        check_count("num_noops", self.num_noops, low=0)
        if self.layers is not None:
            check_layers(self.layers)
        check_choice("choice", self.choice, ExpertChoice)
        check_number("balance", self.balance, low=0.0)
        check_number("capacity_factor", self.capacity_factor, low=0.0)
        if self.capacity_factor == 0:
            raise ValueError("capacity_factor must be a number > 0, got 0: with no room an expert computes nothing")
        if self.per_token > min(2, self.num_experts):
            raise ValueError(
                f"per_token must be 1 or 2 and at most num_experts {self.num_experts}, got {self.per_token}"
            )
        if self.choice == "expert" and self.num_noops:
            raise ValueError(
                f"num_noops must be 0 with choice 'expert', got {self.num_noops}: there a token that no expert takes "
                "skips already (lower capacity_factor), or let tokens choose"
            )

    @property
    def capacity(self) -> float:
        """The share of a row's tokens that each expert has room for."""
        return min(1.0, self.capacity_factor * self.per_token / (self.num_experts + self.num_noops))

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a decoder that have experts, in order."""
        if self.layers is None:
            return tuple(range(self.every - 1, num_layers, self.every))
        return named_layers(self.layers, num_layers)

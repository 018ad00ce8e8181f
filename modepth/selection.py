"""Who is to be computed: the ways of choosing, each a function of what is known of the tokens.

A choice returns a priority and a mask of the willing. Training takes the best k of the willing, causal mode all of
them; the functions of causal mode look at one token only.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from modepth.config import Mode, RoutingConfig, Rule

Count = TypeVar("Count", int, Tensor)


def num_routed(length: Count, capacity: float) -> Count:
    """ceil(capacity * length), exactly: for a row's length, or a tensor of lengths.

    >>> num_routed(100, 0.07)  # 0.07 * 100 is 7.000000000000001 in floating point
    7
    """
    if isinstance(length, Tensor):
        length = length.to(torch.int64)
    # A capacity is meant as the simple fraction nearest to its float: 7/100, 1/3.
    share = Fraction(max(capacity, 1e-9)).limit_denominator(10**9)
    return -(-length * share.numerator // share.denominator)


class Scored(Protocol):
    """Anything that holds the scores of tokens: candidates, and decisions."""

    @property
    def logit_BT(self) -> Tensor: ...
    @property
    def predicted_BT(self) -> Tensor | None: ...


class Candidates(NamedTuple):
    """What a selection may look at."""

    logit_BT: Tensor
    predicted_BT: Tensor | None
    real_BT: Tensor
    position_BT: Tensor  # place in the sequence, padding not counted
    cutoff: Tensor  # the layer's score threshold
    layer: int
    most: int  # how many candidates a row can have, by shapes alone
    always_BT: Tensor | None = None  # bool: the real ones of these come before all others, within k, with gate 1


Choice = Callable[[Candidates, RoutingConfig], tuple[Tensor, Tensor]]  # -> priority_BT, willing_BT


def by_score(tokens: Candidates, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Learned top-k: all compete. Not causal: a token may lose its slot to a later one."""
    return tokens.logit_BT, tokens.real_BT


def by_noise(tokens: Candidates, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Top-k over noise, the control that shows what learning adds."""
    return noise(config.seed, tokens.layer, tokens.position_BT), tokens.real_BT


def by_noise_threshold(tokens: Candidates, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    noise_BT = noise(config.seed, tokens.layer, tokens.position_BT)
    return noise_BT, tokens.real_BT & (noise_BT >= 2**32 - num_routed(2**32, config.capacity))


def by_stride(tokens: Candidates, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Fixed, evenly spread positions: those at which k steps up, so exactly k(n) of n tokens, for every n."""
    position_BT = tokens.position_BT
    steps_BT = num_routed(position_BT + 1, config.capacity) > num_routed(position_BT, config.capacity)
    return tokens.logit_BT, tokens.real_BT & steps_BT


def by_own_score(tokens: Candidates, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Token-choice: a token is willing when its logit >= 0. Causal until a surplus is dropped by score."""
    return tokens.logit_BT, tokens.real_BT & (tokens.logit_BT >= 0)


def by_cutoff(tokens: Candidates, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """A token is willing when its logit reaches the layer's cutoff."""
    return tokens.logit_BT, tokens.real_BT & (tokens.logit_BT >= tokens.cutoff)


def by_rule(tokens: Candidates, config: RoutingConfig) -> tuple[Tensor, Tensor]:
    """What stands in for top-k where the future is unknown: a token's own score against a threshold."""
    if config.capacity == 1:
        return by_score(tokens, config)  # top-k takes all, and so does this
    score_BT = rule_score(tokens, config.rule)
    threshold = tokens.cutoff if config.rule == "cutoff" else 0.0
    for layer, calibrated in config.thresholds or ():
        if layer == tokens.layer:
            threshold = calibrated
    return score_BT, tokens.real_BT & (score_BT >= threshold)


def rule_score(tokens: "Scored", rule: Rule) -> Tensor:
    """What a causal rule looks at: the predictor's guess that top-k would choose the token, or the router's logit."""
    if rule != "predictor":
        return tokens.logit_BT
    assert tokens.predicted_BT is not None  # the config demands a predictor for this rule
    return tokens.predicted_BT


# Each selection in training, where the best k of the willing are taken, and in causal mode, where
# all the willing are: those functions look at one token only.
SELECTIONS: dict[Mode, dict[str, Choice]] = {
    "topk": {
        "topk": by_score,
        "soft": by_score,
        "random": by_noise,
        "stride": by_stride,
        "token_choice": by_own_score,
        "threshold": by_cutoff,
    },
    "causal": {
        "topk": by_rule,
        "soft": by_rule,
        "random": by_noise_threshold,
        "stride": by_stride,
        "token_choice": by_own_score,
        "threshold": by_cutoff,
    },
}


def noise(seed: int, layer: int, position_BT: Tensor) -> Tensor:
    """Whole numbers in 0..2^32-1, a pure function of (seed, layer, position), distinct within a layer."""
    return scramble(position_BT ^ scramble(layer ^ scramble(seed % 2**32)))


def scramble(number: Count) -> Count:
    """A bijection of 0..2^32-1 that looks random. The multiplier is small enough for int64 not to overflow."""
    for _ in range(2):
        number = ((number >> 16) ^ number) * 0x45D9F3B & 0xFFFFFFFF
    return (number >> 16) ^ number

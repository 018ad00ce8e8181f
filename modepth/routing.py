"""The core of Mixture-of-Depths: which tokens a block computes, and how its output comes back.

    score      a router gives every token a logit                      Router
    select     the best k tokens of each row are chosen                SELECTIONS, choose_best
    lay out    the chosen tokens get slots, in order of position       lay_out
    apply      gather -> block -> blend -> scatter; the rest skips     apply_routed

The decision is a value, `Routing`: made once, then used, drawn, and trained on. Nothing outside
this file gathers or scatters tokens.

Three things are unusual. The number of slots K depends on shapes alone, so a training forward is
one static graph; a row with fewer tokens leaves slots *invalid*. A block contains its residual,
so its output is blended, lerp(x, block(x), gate), which is the paper's x + gate * f(x) without
counting x twice. And there are two modes: "topk", the selection of training, compares a token
with the later ones; "causal" decides each token by itself, for evaluation and generation.

Shapes: B batch, T tokens, K slots of the routed tokens, D width.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from modepth.config import Mode, RoutingConfig, Rule
from modepth.validation import check_choice, check_count, check_instance, check_tensor

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


def real_tokens(lengths_B: Tensor, B: int, T: int) -> Tensor:
    """The mask of rows that hold their real tokens first, then padding."""
    check_tensor("lengths", lengths_B, (B,), kind="whole")
    return torch.arange(T, device=lengths_B.device) < lengths_B.unsqueeze(1)


# -- the decision


@dataclass(frozen=True)
class Routing:
    """Which tokens one layer computes, and with what weight.

    Valid slots come first, sorted by position; invalid ones last, at tokens that were not chosen.
    So a row's indices are unique, the scatter is deterministic, and the ordinary causal mask over
    the K slots is exact, even for ragged rows. (Soft selection has a slot for every token, so there
    "valid" means real, and which tokens are blended is said by `chosen_BT` alone.)

    >>> routing = Router(16, RoutingConfig(capacity=0.25))(torch.randn(2, 20, 16))
    >>> routing.chosen_BT.shape, routing.index_BK.shape
    (torch.Size([2, 20]), torch.Size([2, 5]))
    """

    layer: int
    logit_BT: Tensor  # the router's raw score of every token
    predicted_BT: Tensor | None  # the predictor's logit of "is chosen"
    real_BT: Tensor  # bool: not padding
    willing_BT: Tensor  # bool: asked to be chosen; in top-k every real token does
    chosen_BT: Tensor  # bool: the decision
    index_BK: Tensor  # the token in each slot
    valid_BK: Tensor  # bool: the slot holds a token that takes part
    gate_BK: Tensor  # what blends, 0 for a token not chosen
    bypass_BT: Tensor | None  # what multiplies the output of skipped tokens (1 elsewhere), None for 1
    capacity: float

    def gather(self, values: Tensor) -> Tensor:
        """The routed tokens' part of anything per token: (B, T, ...) to (B, K, ...)."""
        B, K = self.index_BK.shape
        return values.flatten(0, 1).index_select(0, self._flat_index()).unflatten(0, (B, K))

    def scatter(self, values: Tensor, routed: Tensor) -> Tensor:
        """A copy of (B, T, ...) values in which the slots' tokens are replaced by (B, K, ...)."""
        flat = values.flatten(0, 1).index_copy(0, self._flat_index(), routed.flatten(0, 1))
        return flat.view_as(values)

    def _flat_index(self) -> Tensor:
        B, T = self.logit_BT.shape
        row_start_B1 = T * torch.arange(B, device=self.index_BK.device).unsqueeze(1)
        return (self.index_BK + row_start_B1).flatten()

    @property
    def num_unfilled_B(self) -> Tensor:
        """Slots of the row's k that found no willing token."""
        return (num_routed(self.real_BT.sum(1), self.capacity) - self.chosen_BT.sum(1)).clamp(min=0)

    @property
    def num_dropped_B(self) -> Tensor:
        """Willing tokens that found no slot."""
        return self.willing_BT.sum(1) - self.chosen_BT.sum(1)

    @property
    def finite(self) -> Tensor:
        """Whether every real token's scores are finite, as a tensor: a forward must not branch on it."""
        return ~self._bad_BT().any()

    def check(self) -> None:
        """Raise if a score is NaN or infinite. Call it outside the forward."""
        if not self.finite:
            row, token = self._bad_BT().nonzero()[0].tolist()
            scores = [
                score_BT[row, token].item() for score_BT in (self.logit_BT, self.predicted_BT) if score_BT is not None
            ]
            score = next(score for score in scores if not math.isfinite(score))
            raise FloatingPointError(
                f"layer {self.layer}: the router score of row {row}, token {token} is {score}, "
                "so the routing means nothing: look for an overflow in earlier layers or too high a learning rate"
            )

    def _bad_BT(self) -> Tensor:
        finite_BT = self.logit_BT.isfinite()
        if self.predicted_BT is not None:
            finite_BT = finite_BT & self.predicted_BT.isfinite()
        return self.real_BT & ~finite_BT


def apply_routed(x_BTD: Tensor, routing: Routing, block: Callable[[Tensor], Tensor]) -> Tensor:
    """Pass the chosen tokens through `block` and blend its output; all others skip it.

    `block` maps (B, K, D) to (B, K, D) and contains its residual.

    >>> x = torch.randn(2, 20, 16)
    >>> routing = Router(16, RoutingConfig(capacity=0.25))(x)
    >>> (apply_routed(x, routing, torch.exp) != x).any(-1).equal(routing.chosen_BT)
    True
    """
    out_BTD = x_BTD
    if routing.index_BK.shape[1] > 0:
        x_BKD = routing.gather(x_BTD)
        y_BKD = block(x_BKD)
        check_tensor("the output of a routed block", y_BKD, tuple(x_BKD.shape))
        # lerp is exact at gate 0 and 1, where x + gate * (y - x) is not.
        blended_BKD = torch.lerp(x_BKD, y_BKD.to(x_BTD.dtype), routing.gate_BK.unsqueeze(-1).to(x_BTD.dtype))
        # The others in the slots are restored, not blended with gate 0: 0 * inf is NaN.
        chosen_BK = routing.chosen_BT.gather(1, routing.index_BK)
        out_BTD = routing.scatter(x_BTD, torch.where(chosen_BK.unsqueeze(-1), blended_BKD, x_BKD))
    return out_BTD if routing.bypass_BT is None else out_BTD * routing.bypass_BT.unsqueeze(-1).to(x_BTD.dtype)


# -- choosing


class Candidates(NamedTuple):
    """What a selection may look at."""

    logit_BT: Tensor
    predicted_BT: Tensor | None
    real_BT: Tensor
    position_BT: Tensor  # place in the sequence, padding not counted
    cutoff: Tensor  # the layer's score threshold
    layer: int
    always_BT: Tensor | None = None  # bool: the real ones of these come before all others, within k, with gate 1


Choice = Callable[[Candidates, RoutingConfig], tuple[Tensor, Tensor]]  # -> priority_BT, willing_BT


def choose_best(priority_BT: Tensor, willing_BT: Tensor, k_B: Tensor, always_BT: Tensor | None = None) -> Tensor:
    """The k willing tokens of highest priority in each row, as a mask; ties go to the lowest index."""
    order_BT = priority_BT.argsort(dim=1, descending=True, stable=True)
    if always_BT is not None:
        # Stable again, so that both those always chosen, now first, and the others stay in order of priority.
        order_BT = order_BT.gather(1, always_BT.gather(1, order_BT).argsort(dim=1, descending=True, stable=True))
    willing_in_order_BT = willing_BT.gather(1, order_BT)
    wins_BT = willing_in_order_BT & (willing_in_order_BT.cumsum(1) <= k_B.unsqueeze(1))
    return torch.zeros_like(willing_BT).scatter(1, order_BT, wins_BT)


def lay_out(chosen_BT: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Slots for the chosen tokens: index_BK and valid_BK. Chosen tokens first, each part in order of position."""
    if num_slots == 0:
        none_B0 = chosen_BT[:, :0]
        return none_B0.long(), none_B0
    index_BK = chosen_BT.argsort(dim=1, descending=True, stable=True)[:, :num_slots]
    return index_BK, chosen_BT.gather(1, index_BK)


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


def rule_score(tokens: "Candidates | Routing", rule: Rule) -> Tensor:
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


# -- the gate: a function of the router logit

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "raw": lambda logit: logit,
    "double_sigmoid": lambda logit: 2 * torch.sigmoid(logit),
    "tanh": lambda logit: 1 + 0.2 * torch.tanh(logit),
    "one": torch.ones_like,
}


# -- the router


class Router(nn.Module):
    """Scores the tokens of one layer and decides which are computed.

    One projection of the residual stream, in float32 or wider whatever the model's precision.
    `cutoff` is the score that threshold selection and the cutoff rule ask for. It starts at the config's,
    is saved with the weights, and no forward changes it: `router.cutoff.fill_(0.3)` does.

    >>> router = Router(16, RoutingConfig(capacity=0.25))
    >>> router(torch.randn(2, 20, 16)).chosen_BT.sum(1)
    tensor([5, 5])
    """

    cutoff: Tensor

    def __init__(self, dim: int, config: RoutingConfig, layer: int = 0) -> None:
        super().__init__()
        check_count("dim", dim, low=1)
        check_instance("routing", config, RoutingConfig)
        self.config = config
        self.layer = layer
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.score = nn.Linear(dim, 1, bias=False, dtype=dtype)
        self.predictor: nn.Sequential | None = None
        if config.predictor is not None:
            hidden = nn.Linear(dim, config.predictor, dtype=dtype)
            self.predictor = nn.Sequential(hidden, nn.SiLU(), nn.Linear(config.predictor, 1, dtype=dtype))
        self.register_buffer("cutoff", torch.zeros((), dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.config.router_init == "zero":
            nn.init.zeros_(self.score.weight)
        else:
            nn.init.normal_(self.score.weight, std=0.02)
        self.cutoff.fill_(self.config.cutoff)
        for module in self.predictor or ():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def forward(
        self,
        x_BTD: Tensor,
        real_BT: Tensor | None = None,
        mode: Mode = "topk",
        config: RoutingConfig | None = None,
        position_BT: Tensor | None = None,
        always_BT: Tensor | None = None,
    ) -> Routing:
        """Decide for every token of (B, T, D).

        real_BT       False at padding; None: there is none
        config        how to decide, if not as the router's own says
        position_BT   place in the sequence; None: counted from the row's first real token
        always_BT     True at tokens that come before all others, within k, with gate 1; None: all compete
        """
        check_choice("mode", mode, Mode)
        check_tensor("x", x_BTD, (None, None, self.score.in_features))
        if real_BT is None:
            real_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
        check_tensor("the mask of real tokens", real_BT, tuple(x_BTD.shape[:2]), kind="bool")
        logit_BT, predicted_BT = self.scores(x_BTD)
        if position_BT is None:
            position_BT = real_BT.cumsum(1) - 1
        if always_BT is not None:
            check_tensor("the mask of tokens always chosen", always_BT, tuple(x_BTD.shape[:2]), kind="bool")
        tokens = Candidates(logit_BT, predicted_BT, real_BT, position_BT, self.cutoff, self.layer, always_BT)
        return decide(tokens, self.config if config is None else config, mode)

    def scores(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Every token's logit, and the predictor's, which sees the stream but does not shape it."""
        with without_autocast(x_BTD.device.type):
            wide_BTD = x_BTD.to(self.score.weight.dtype)
            predicted = None if self.predictor is None else self.predictor(wide_BTD.detach()).squeeze(-1)
            return self.score(wide_BTD).squeeze(-1), predicted

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Scores decide by rank, so a model cast to bfloat16 keeps its routers in float32.
        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrow else moved

        return super()._apply(at_least_float32, recurse)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Leave autocast where it is on: entering a context costs more than a score at decode."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def decide(tokens: Candidates, config: RoutingConfig, mode: Mode) -> Routing:
    """Select, lay out and weigh: from scores to a Routing."""
    logit_BT, real_BT = tokens.logit_BT, tokens.real_BT
    gate = GATES[config.gate]
    priority_BT, willing_BT = SELECTIONS[mode][config.selection](tokens, config)
    if tokens.always_BT is not None:
        willing_BT = willing_BT | (real_BT & tokens.always_BT)
    chosen_BT = willing_BT
    if mode == "topk":
        k_B = num_routed(real_BT.sum(1), config.capacity)
        chosen_BT = choose_best(priority_BT, willing_BT, k_B, tokens.always_BT)
    if config.selection == "soft":
        # Every real token is computed and attends; only the chosen ones are blended.
        index_BK, valid_BK = lay_out(real_BT, real_BT.shape[1])
    elif mode == "topk":
        index_BK, valid_BK = lay_out(chosen_BT, num_routed(real_BT.shape[1], config.capacity))
    else:
        # As few slots as the fullest row needs: at inference shapes may follow the data.
        index_BK, valid_BK = lay_out(chosen_BT, max(chosen_BT.sum(1).tolist(), default=0))
    return Routing(
        layer=tokens.layer,
        logit_BT=logit_BT,
        predicted_BT=tokens.predicted_BT,
        real_BT=real_BT,
        willing_BT=willing_BT,
        chosen_BT=chosen_BT,
        index_BK=index_BK,
        valid_BK=valid_BK,
        gate_BK=weigh(tokens, gate, chosen_BT, index_BK),
        bypass_BT=torch.where(real_BT & ~chosen_BT, gate(logit_BT), 1.0) if config.weigh_bypass else None,
        capacity=config.capacity,
    )


def weigh(tokens: Candidates, gate: Callable[[Tensor], Tensor], chosen_BT: Tensor, index_BK: Tensor) -> Tensor:
    """What blends the token in each slot."""
    if index_BK.shape[1] == 0:  # nothing to weigh: most layers of most tokens, at decode
        return tokens.logit_BT[:, :0]
    gate_BK = gate(tokens.logit_BT.gather(1, index_BK))
    if tokens.always_BT is not None:
        gate_BK = torch.where(tokens.always_BT.gather(1, index_BK), 1.0, gate_BK)  # no score decided, so none weighs
    return torch.where(chosen_BT.gather(1, index_BK), gate_BK, 0.0)

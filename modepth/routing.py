"""The core of Mixture-of-Depths: which tokens a block computes, and how its output comes back.

    score      a router gives every token a logit                      Router
    select     the best k tokens of each row are chosen                selection.py, choose_best
    lay out    the chosen tokens get slots, in order of position       lay_out
    apply      gather -> block -> blend -> scatter; the rest skips     apply_routed, add_routed

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
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from modepth.config import Mode, RoutingConfig
from modepth.selection import SELECTIONS, Candidates
from modepth.selection import num_routed as num_routed  # noqa: PLC0414 - exported from here too
from modepth.validation import check_choice, check_count, check_instance, check_tensor


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
    real_BT: Tensor  # bool: neither padding nor, in a filter or after an exit, out already
    willing_BT: Tensor  # bool: asked to be chosen; in top-k every real token does
    chosen_BT: Tensor  # bool: the decision
    index_BK: Tensor  # the token in each slot
    valid_BK: Tensor  # bool: the slot holds a token that takes part
    gate_BK: Tensor  # what blends, 0 for a token not chosen
    bypass_BT: Tensor | None  # what multiplies the output of skipped tokens (1 elsewhere), None for 1
    capacity: float

    def gather(self, values: Tensor) -> Tensor:
        """The routed tokens' part of anything per token: (B, T, ...) to (B, K, ...)."""
        routed = values.flatten(0, 1).index_select(0, self._flat_index())
        return routed.view(*self.index_BK.shape, *values.shape[2:])

    def scatter(self, values: Tensor, routed: Tensor) -> Tensor:
        """A copy of (B, T, ...) values in which the slots' tokens are replaced by (B, K, ...)."""
        flat = values.flatten(0, 1).index_copy(0, self._flat_index(), routed.flatten(0, 1))
        return flat.view_as(values)

    def add(self, values: Tensor, routed: Tensor) -> Tensor:
        """(B, T, ...) values with (B, K, ...) added at the slots' tokens."""
        return values.flatten(0, 1).index_add(0, self._flat_index(), routed.flatten(0, 1)).view_as(values)

    def ungated(self) -> "Routing":
        """The same tokens, each with gate 1: for layers that compute them without a router of their own.

        Scores leave their graph: where a layer is sharded, its inputs get gradients of zero, and so would the router.
        """
        return replace(
            self,
            logit_BT=self.logit_BT.detach(),
            predicted_BT=None,
            gate_BK=self.valid_BK.to(self.gate_BK.dtype),
            bypass_BT=None,
        )

    def _flat_index(self) -> Tensor:
        B, T = self.logit_BT.shape
        if B == 1:  # generation: all its rows are one here, and it gathers often
            return self.index_BK.flatten()
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


def add_routed(out_BTD: Tensor, x_BTD: Tensor, routing: Routing, update: Callable[[Tensor], Tensor]) -> Tensor:
    """Add to the chosen tokens of `out` what `update` makes of them, times their gate; the others stay.

    `update` maps (B, K, D) to (B, K, D) and contains no residual. Called once for each of several updates, of which a
    token may get more than one.
    """
    if routing.index_BK.shape[1] == 0:
        return out_BTD
    y_BKD = update(routing.gather(x_BTD)).to(out_BTD.dtype)
    weighed_BKD = y_BKD * routing.gate_BK.unsqueeze(-1).to(out_BTD.dtype)
    # Not by a gate of 0: 0 * inf is NaN.
    return routing.add(out_BTD, torch.where(routing.valid_BK.unsqueeze(-1), weighed_BKD, 0.0))


# -- choosing


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


# -- the gate: a function of the router logit

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "raw": lambda logit: logit,
    "double_sigmoid": lambda logit: 2 * torch.sigmoid(logit),
    "tanh": lambda logit: 1 + 0.2 * torch.tanh(logit),
    "one": torch.ones_like,
}


# -- the router


class KeptWide(nn.Module):
    """A module whose weights are float32 or wider whatever its model is cast to: scores decide by rank."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrow else moved

        return super()._apply(at_least_float32, recurse)


class Router(KeptWide):
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
        among: Routing | None = None,
    ) -> Routing:
        """Decide for every token of (B, T, D).

        real_BT       False at padding; None: there is none
        config        how to decide, if not as the router's own says
        position_BT   place in the sequence; None: counted from the row's first real token
        always_BT     True at tokens that come before all others, within k, with gate 1; None: all compete
        among         choose among the tokens that this decision chose, k following their number; None: all real ones
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
        most = x_BTD.shape[1]
        if among is not None:
            real_BT, most = among.chosen_BT, among.index_BK.shape[1]
        tokens = Candidates(logit_BT, predicted_BT, real_BT, position_BT, self.cutoff, self.layer, most, always_BT)
        return decide(tokens, self.config if config is None else config, mode)

    def scores(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Every token's logit, and the predictor's, which sees the stream but does not shape it."""
        with without_autocast(x_BTD.device.type):
            wide_BTD = x_BTD.to(self.score.weight.dtype)
            predicted = None if self.predictor is None else self.predictor(wide_BTD.detach()).squeeze(-1)
            return self.score(wide_BTD).squeeze(-1), predicted


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
        index_BK, valid_BK = lay_out(chosen_BT, num_routed(tokens.most, config.capacity))
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

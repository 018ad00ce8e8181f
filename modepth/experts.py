"""Mixture of experts: several feed-forwards in the place of one, of which a token uses few or none.

    score      a router gives every token a logit for each alternative    ExpertRouter
    choose     tokens pick experts, or experts pick tokens                choose_experts
    compute    each expert its tokens, summed by their gates              add_routed

A token's shares are the softmax of its scores over all alternatives; the gate is the share times the number of
alternatives a pick, 1 for an undecided router and for a single expert. No-ops stand last among the alternatives and
compute nothing: a token that picks one keeps its residual, and so does one that no expert had room for. In mode "topk"
every expert has its slots, an equal number in every row, and takes the best of those that may come; in mode "causal" it
takes all whose share reaches its cutoff, a running mean of the lowest that training took.

Shapes: B batch, T tokens, A alternatives, E experts, K slots of an expert's tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from modepth.blocks import FeedForward
from modepth.config import ExpertsConfig, Mode, ModelConfig
from modepth.routing import KeptWide, Routing, add_routed, choose_best, lay_out, num_routed, without_autocast


@dataclass(frozen=True)
class ExpertRouting:
    """Which experts of one layer computed each token."""

    layer: int
    logit_BTA: Tensor  # the router's raw scores: experts, then no-ops
    real_BT: Tensor  # bool: the token came to the experts, being neither padding nor skipped by the layer
    wanted_BTA: Tensor  # bool: what the token picked; where experts pick, all of them
    chosen_BTE: Tensor  # bool: what computed it
    capacity: float  # of each expert

    @property
    def finite(self) -> Tensor:
        """Whether every score is finite, as a tensor: a forward must not branch on it."""
        return (self.logit_BTA.isfinite() | ~self.real_BT.unsqueeze(-1)).all()

    def check(self) -> None:
        """Raise if a score is NaN or infinite. Call it outside the forward."""
        if not self.finite:
            bad_BTA = self.real_BT.unsqueeze(-1) & ~self.logit_BTA.isfinite()
            row, token, expert = bad_BTA.nonzero()[0].tolist()
            raise FloatingPointError(
                f"layer {self.layer}: the score of expert {expert} for row {row}, token {token} is "
                f"{self.logit_BTA[row, token, expert].item()}, so the choice means nothing: look for an overflow in "
                "earlier layers or too high a learning rate"
            )

    @property
    def num_dropped_E(self) -> Tensor:
        """Tokens that picked an expert and found no room in it."""
        return (self.wanted_BTA[..., : self.chosen_BTE.shape[-1]] & ~self.chosen_BTE).sum((0, 1))

    def best_expert(self) -> Tensor:
        """The expert of highest score among those that computed each token, (B, T); -1 where none did."""
        score_BTE = self.logit_BTA[..., : self.chosen_BTE.shape[-1]].masked_fill(~self.chosen_BTE, -torch.inf)
        return torch.where(self.chosen_BTE.any(-1), score_BTE.argmax(-1), -1)

    def spread(self, routing: Routing) -> "ExpertRouting":
        """From the slots of a routed layer to all of its tokens."""

        def over_tokens(values: Tensor) -> Tensor:
            kept = values.masked_fill(~self.real_BT.reshape(*self.real_BT.shape, *[1] * (values.dim() - 2)), 0)
            return routing.scatter(values.new_zeros(*routing.real_BT.shape, *values.shape[2:]), kept)

        return replace(
            self,
            logit_BTA=over_tokens(self.logit_BTA),
            real_BT=over_tokens(self.real_BT),
            wanted_BTA=over_tokens(self.wanted_BTA),
            chosen_BTE=over_tokens(self.chosen_BTE),
        )


class ExpertRouter(KeptWide):
    """Scores every token for each alternative, in float32 or wider whatever the model's precision.

    `cutoff_E` is the share that each expert asks for in causal mode. It is saved with the weights, and no forward
    changes it. Before training it is an even share where experts pick, else 0.
    """

    cutoff_E: Tensor

    def __init__(self, dim: int, config: ExpertsConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.score = nn.Linear(dim, config.num_experts + config.num_noops, bias=False, dtype=dtype)
        self.register_buffer("cutoff_E", torch.zeros(config.num_experts, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.score.weight, std=0.02)
        self.cutoff_E.fill_(1 / self.config.num_experts if self.config.choice == "expert" else 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        with without_autocast(x_BTD.device.type):
            return self.score(x_BTD.to(self.score.weight.dtype))


class Experts(nn.Module):
    """The feed-forward of a decoder layer, made of experts.

    >>> config = ModelConfig(vocab_size=97, num_layers=1, dim=16, num_heads=2, experts=ExpertsConfig(num_experts=3))
    >>> out, routing = Experts(config, layer=0)(torch.randn(2, 12, 16), torch.ones(2, 12, dtype=torch.bool), "topk")
    >>> out.shape, bool((routing.chosen_BTE.sum(1) <= 4).all())  # each expert has room for a third of a row
    (torch.Size([2, 12, 16]), True)
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.experts is not None  # or the layer has a plain feed-forward
        self.config = config.experts
        self.router = ExpertRouter(config.dim, self.config, layer)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(self.config.num_experts))

    def forward(self, x_BTD: Tensor, real_BT: Tensor, mode: Mode) -> tuple[Tensor, ExpertRouting]:
        logit_BTA = self.router(x_BTD)
        chosen, routings = choose_experts(logit_BTA, real_BT, self.router, mode)
        out_BTD = torch.zeros_like(x_BTD)
        for routing, expert in zip(routings, self.experts, strict=True):
            out_BTD = add_routed(out_BTD, x_BTD, routing, expert)
        return out_BTD, chosen


def choose_experts(
    logit_BTA: Tensor, real_BT: Tensor, router: ExpertRouter, mode: Mode
) -> tuple[ExpertRouting, list[Routing]]:
    """From scores to decisions: one for all tokens, and one for each expert."""
    config = router.config
    share_BTA = logit_BTA.softmax(-1)
    scale = share_BTA.shape[-1] / config.per_token  # gates sum to 1 where the router is undecided
    wanted_BTA = CHOICES[config.choice](share_BTA, real_BT, config)
    share_EBT, wanted_EBT = (values.movedim(-1, 0)[: config.num_experts] for values in (share_BTA, wanted_BTA))
    if mode == "topk":
        k_B = num_routed(real_BT.sum(1), config.capacity)
        # The core's own choice, with a row of tokens for each expert.
        chosen_EBT = choose_best(
            share_EBT.flatten(0, 1), wanted_EBT.flatten(0, 1), k_B.repeat(config.num_experts)
        ).view_as(wanted_EBT)
        num_slots = [num_routed(real_BT.shape[1], config.capacity)] * config.num_experts
    else:
        chosen_EBT = wanted_EBT
        if config.capacity < 1:
            chosen_EBT = wanted_EBT & (share_EBT >= router.cutoff_E.view(-1, 1, 1))
        num_slots = chosen_EBT.sum(-1).amax(-1).tolist()  # at inference shapes may follow the data
    index_EBK, valid_EBK = (
        slots.unflatten(0, wanted_EBT.shape[:2]) for slots in lay_out(chosen_EBT.flatten(0, 1), max(num_slots))
    )
    routings = []
    for expert, count in enumerate(num_slots):
        index_BK, valid_BK = index_EBK[expert, :, :count], valid_EBK[expert, :, :count]
        routings.append(
            Routing(
                layer=router.layer,
                logit_BT=logit_BTA[..., expert],
                predicted_BT=None,
                real_BT=real_BT,
                willing_BT=wanted_EBT[expert],
                chosen_BT=chosen_EBT[expert],
                index_BK=index_BK,
                valid_BK=valid_BK,
                gate_BK=torch.where(valid_BK, scale * share_EBT[expert].gather(1, index_BK), 0.0),
                bypass_BT=None,
                capacity=config.capacity,
            )
        )
    chosen_BTE = chosen_EBT.movedim(0, -1)
    return ExpertRouting(router.layer, logit_BTA, real_BT, wanted_BTA, chosen_BTE, config.capacity), routings


def picked_by_tokens(share_BTA: Tensor, real_BT: Tensor, config: ExpertsConfig) -> Tensor:
    """Each token's best alternatives; of equal ones the first. Looks at one token only."""
    real_NA = real_BT.flatten().unsqueeze(1).expand(-1, share_BTA.shape[-1])
    count_N = torch.full_like(real_NA[:, 0], config.per_token, dtype=torch.int64)
    return choose_best(share_BTA.flatten(0, 1), real_NA, count_N).view_as(share_BTA)


def open_to_all(share_BTA: Tensor, real_BT: Tensor, config: ExpertsConfig) -> Tensor:
    """Every real token may be taken by every expert."""
    return real_BT.unsqueeze(-1).expand_as(share_BTA)


CHOICES: dict[str, Callable[[Tensor, Tensor, ExpertsConfig], Tensor]] = {
    "token": picked_by_tokens,
    "expert": open_to_all,
}

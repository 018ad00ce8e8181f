"""The one training loop: any model that returns losses and routings, one process or many.

A step is a straight line: batch -> micro-batches forward and backward -> all ranks agree that the
numbers are finite -> clip -> update. The batch, the learning rate, the capacity and the dropout are
pure functions of (seed, step), so a run resumes from weights and optimiser state alone.

Losses divide by the number of real tokens of all ranks; router losses are logged apart.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modepth.config import Mode, TrainConfig
from modepth.cross_entropy import IGNORED
from modepth.cutoffs import Place, cutoff_score, lowest_by_place, mean_cutoffs
from modepth.data import TokenFile, evaluation_windows, read_windows
from modepth.experts import ExpertRouting
from modepth.model import Decoder, Output
from modepth.muon import Muon
from modepth.parallel import clip_gradients, release, sync_gradients
from modepth.routing import KeptWide, Routing, real_tokens
from modepth.validation import check_count
from modepth.world import World


class Batch(NamedTuple):
    """Rows of a step: `lengths_B` real tokens each, targets of IGNORED not counted."""

    tokens_BT: Tensor
    targets_BT: Tensor
    lengths_B: Tensor

    @property
    def num_targets(self) -> int:
        real_BT = real_tokens(self.lengths_B, *self.tokens_BT.shape)
        return int(((self.targets_BT != IGNORED) & real_BT).sum())

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())

    def rows(self, rows: slice) -> "Batch":
        return Batch(*(value[rows] for value in self))

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(value.to(device) for value in self))


class StepResult(NamedTuple):
    """What one step did, the same on every rank but for `routings`."""

    loss: float
    router_losses: dict[str, float]
    gradient_norm: float
    num_tokens: int
    problem: str | None  # why the update was not applied
    cutoffs: dict[Place, float]  # the lowest score that was taken, the mean over the rows of all ranks
    routings: tuple[Routing, ...]  # of this rank's last micro-batch
    experts: tuple[ExpertRouting, ...]


def windows_to_batch(windows_BT: Tensor) -> Batch:
    """Windows of length T + 1, without padding, as inputs and targets."""
    B, T = windows_BT.shape[0], windows_BT.shape[1] - 1
    return Batch(windows_BT[:, :-1], windows_BT[:, 1:], torch.full((B,), T))


def make_optimizer(model: Decoder, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW, or Muon for the matrices of the layers; with weight decay on matrices only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moved = {id(parameter) for parameter in muon_matrices(model)} if config.optimizer == "muon" else set()
    rest = [parameter for parameter in parameters if id(parameter) not in moved]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() >= 2]},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    if config.optimizer == "muon":
        return Muon([parameter for parameter in parameters if id(parameter) in moved], groups, **options)
    return torch.optim.AdamW(groups, **options)


def muon_matrices(model: Decoder) -> list[nn.Parameter]:
    """The weights between states: not embeddings and logits, which look tokens up, nor routers, which only score."""
    routers = [module for module in model.blocks().modules() if isinstance(module, KeptWide)]
    scoring = {id(parameter) for router in routers for parameter in router.parameters()}
    return [each for each in model.blocks().parameters() if each.dim() == 2 and id(each) not in scoring]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, config: TrainConfig, world: World, **options: Any
) -> StepResult:
    """One update from this rank's rows; `options` go to the model's forward.

    Where a loss, a gradient or a router score of any rank is not finite, no rank applies the update.
    """
    counts = world.sum(torch.tensor([batch.num_targets, batch.num_tokens], dtype=torch.int64, device=world.device))
    num_targets, num_tokens = (max(1, count) for count in counts.tolist())
    sums: dict[str, Tensor] = {}
    lowest: list[dict[Place, Tensor]] = []
    problems: list[str] = []
    routings: tuple[Routing, ...] = ()
    experts: tuple[ExpertRouting, ...] = ()
    parts = list(micro_batches(batch, config.micro_batch))
    for number, part in enumerate(parts):
        with sync_gradients(model, last=number == len(parts) - 1), autocast(config, world):
            out: Output = model(part.tokens_BT, targets=part.targets_BT, lengths=part.lengths_B, mode="topk", **options)
            assert out.loss is not None  # targets were given
            # Means over this part become its share of the mean over the tokens of all ranks.
            lm_share, router_share = part.num_targets / num_targets, part.num_tokens / num_tokens
            total = out.loss * lm_share + out.router_loss * router_share
        (total * world.size).backward()  # gradients come out as the mean over ranks; the sum is wanted
        routings, experts = out.routings, out.experts
        shares = {"loss": out.loss * lm_share} | {name: v * router_share for name, v in out.router_losses.items()}
        for name, value in shares.items():
            sums[name] = sums.get(name, 0.0) + value.detach().double()
        decided: tuple[Routing | ExpertRouting, ...] = (*routings, *experts)
        problems += [f"a router score of layer {each.layer}" for each in decided if not each.finite]
        lowest.append(lowest_by_place(routings, experts))
    norm = clip_gradients(model, config.clip)
    problem_count = torch.tensor(len(problems), dtype=torch.float64, device=world.device)
    *totals, num_problems = world.sum(torch.stack([*sums.values(), problem_count])).tolist()
    losses = dict(zip(sums, totals, strict=True))
    # These numbers are the same on every rank, so all ranks decide alike.
    problem = first_problem(problems, world) if num_problems else not_finite(losses["loss"], norm.item())
    if problem is None:
        optimizer.step()
    optimizer.zero_grad()
    cutoffs = mean_cutoffs(lowest, world)
    return StepResult(losses.pop("loss"), losses, norm.item(), num_tokens, problem, cutoffs, routings, experts)


def first_problem(problems: list[str], world: World) -> str:
    """What all ranks call the trouble that some of them have."""
    return next(problem for rank in world.exchange(problems) for problem in rank)


def not_finite(loss: float, norm: float) -> str | None:
    if not math.isfinite(loss):
        return "the loss"
    return None if math.isfinite(norm) else "the gradient"


def micro_batches(batch: Batch, rows: int | None) -> Iterator[Batch]:
    total = batch.tokens_BT.shape[0]
    for start in range(0, total, rows or total):
        yield batch.rows(slice(start, start + (rows or total)))


def autocast(config: TrainConfig, world: World) -> contextlib.AbstractContextManager[Any]:
    if config.precision is None:
        return contextlib.nullcontext()
    return torch.autocast(world.device.type, dtype=getattr(torch, config.precision))


# -- measuring


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: TokenFile, *, length: int, num_windows: int, batch_size: int, world: World, mode: Mode
) -> dict[str, float]:
    """Loss of the first windows: nats a token, perplexity, bits a byte; `model` is left as it was.

    Where a router score of any rank or the loss is not finite, all ranks raise.
    """
    check_count("batch_size", batch_size, low=1)
    windows = evaluation_windows(tokens, length)[:num_windows]
    training, total = model.training, torch.zeros(2, dtype=torch.float64, device=world.device)
    problems: list[str] = []
    model.eval()
    for start in range(0, len(windows), batch_size * world.size):
        rows = windows[start : start + batch_size * world.size]
        mine = rows[world.rank :: world.size]
        # A rank that has none left still computes: with fsdp the others wait for its part of the weights.
        batch = windows_to_batch(read_windows(tokens, mine if len(mine) else rows[:1], length)).to(world.device)
        out = model(batch.tokens_BT, targets=batch.targets_BT, mode=mode)
        problems += [problem for each in (*out.routings, *out.experts) if (problem := trouble(each))]
        count = batch.num_targets if len(mine) else 0
        total += torch.tensor([out.loss.item() * count, count], dtype=torch.float64, device=world.device)
    release(model)
    model.train(training)
    loss_sum, count = world.sum(total).tolist()
    loss = loss_sum / count
    problems = [problem for rank in world.exchange(problems[:1]) for problem in rank]
    if not math.isfinite(loss):
        problems.append(f"the loss is {loss}: look for an overflow or too high a learning rate")
    if problems:
        raise FloatingPointError(f"{tokens.path}: {problems[0]}")
    bits_per_byte = loss / math.log(2) * tokens.count / tokens.num_bytes
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}


def trouble(decided: Routing | ExpertRouting) -> str | None:
    try:
        decided.check()
    except FloatingPointError as error:
        return str(error)
    return None


def routing_row(routing: Routing) -> dict[str, float]:
    """What a layer's routing did: share of real tokens, mean gate, score at the cutoff, the predictor's quality."""
    chosen_BT, real_BT = routing.chosen_BT, routing.real_BT
    row = {
        "share": (chosen_BT.sum() / real_BT.sum().clamp(min=1)).item(),
        "gate": (routing.gate_BK.sum() / chosen_BT.sum().clamp(min=1)).item(),
        "cutoff": cutoff_score(routing).item(),
        "dropped": routing.num_dropped_B.sum().item(),
        "unfilled": routing.num_unfilled_B.sum().item(),
    }
    if routing.predicted_BT is not None:
        said_BT = real_BT & (routing.predicted_BT >= 0)
        hits = (said_BT & chosen_BT).sum().item()
        precision, recall = hits / max(1, said_BT.sum().item()), hits / max(1, chosen_BT.sum().item())
        row |= {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(1e-12, precision + recall)}
    return row


def experts_row(decided: ExpertRouting) -> dict[str, float]:
    """What a layer's experts did: the share of its tokens that each computed, and none; how many were dropped."""
    num_tokens = decided.real_BT.sum().clamp(min=1)
    shares = (decided.chosen_BTE.sum((0, 1)) / num_tokens).tolist()
    none = (decided.real_BT & ~decided.chosen_BTE.any(-1)).sum() / num_tokens
    row = {f"share_{expert}": share for expert, share in enumerate(shares)}
    return row | {"none": none.item(), "dropped": decided.num_dropped_E.sum().item()}

"""The load-balancing loss of a converted mixture of experts, of which some layers see only the routed tokens.

transformers weighs the choices of every layer by one mask of all tokens. A routed layer chooses experts for the tokens
in its slots, so its own mask is the one that counts there: which slots hold a token. The formula is theirs.

Shapes: N tokens that a layer's experts saw, E experts.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from modepth.hf.layer import RoutedLayer
from modepth.routing import choose_best


class Seen(NamedTuple):
    """What the experts' router of one layer said."""

    layer: nn.Module
    logit_NE: Tensor


def forward_with_balance(
    model: PreTrainedModel, layers: Iterable[nn.Module], forward: Callable[..., Any], arguments: dict[str, Any]
) -> Any:
    """`forward`, the model's own; where it is asked for its experts' scores, with the loss of those that count."""
    asked = arguments.get("output_router_logits")
    text = model.config.get_text_config()
    recorder = score_recorder(model)
    if recorder is None or not (getattr(text, "output_router_logits", False) if asked is None else asked):
        return forward(**arguments)
    if not hasattr(text, "router_aux_loss_coef") or not hasattr(text, "num_experts_per_tok"):
        raise ValueError(
            f"how {type(model).__name__} balances its experts is not known, so its routed layers would be counted "
            "wrongly: pass output_router_logits=False"
        )
    seen: list[Seen] = []
    with ExitStack() as hooks:
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, recorder.target_class):
                    hooks.callback(module.register_forward_hook(note(seen, layer, recorder.index)).remove)
        out = forward(**{**arguments, "output_router_logits": False})
    if isinstance(out, tuple):
        raise ValueError("output_router_logits needs return_dict=True in a converted model")
    masks = [tokens_seen(each, arguments) for each in seen]
    out.router_logits = tuple(each.logit_NE for each in seen)
    out.aux_loss = load_balancing_loss(out.router_logits, masks, text.num_experts_per_tok)
    if out.loss is not None:
        out.loss = out.loss + text.router_aux_loss_coef * out.aux_loss.to(out.loss)
    return out


def score_recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """Where the library looks for the scores of experts, if the model has any."""
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        if "router_logits" in recorders:
            found = recorders["router_logits"]
            return found if isinstance(found, OutputRecorder) else OutputRecorder(found)
    return None


def note(seen: list[Seen], layer: nn.Module, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, out: Any) -> None:
        logit = out[index] if isinstance(out, tuple) else out
        seen.append(Seen(layer, logit.flatten(0, -2)))

    return hook


def tokens_seen(seen: Seen, arguments: dict[str, Any]) -> Tensor | None:
    """Which of the tokens count: (N,); None: all do."""
    layer = seen.layer
    if isinstance(layer, RoutedLayer) and layer.mod_router.config.part != "attention":
        assert layer.routing is not None  # its forward has just run
        return layer.routing.valid_BK.flatten()
    mask = arguments.get("attention_mask")
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(f"output_router_logits needs an attention_mask of (batch, tokens), got {tuple(mask.shape)}")
    num_new = len(seen.logit_NE) // len(mask)  # with a cache, the mask has the tokens before them too
    return mask[:, -num_new:].flatten().bool()


def load_balancing_loss(logits: Sequence[Tensor], masks: Sequence[Tensor | None], per_token: int) -> Tensor:
    """E times the sum over experts of the share of picks times the mean probability, over the tokens of all layers.

    The Switch Transformer's equations 4 to 6, as transformers has them: `per_token` where picks are even.
    """
    picks_E = probability_E = torch.zeros(logits[0].shape[-1], device=logits[0].device)
    num_tokens = torch.zeros((), device=logits[0].device)
    for logit_NE, mask_N in zip(logits, masks, strict=True):
        probability_NE = logit_NE.float().softmax(-1)
        counts_N = torch.ones_like(probability_NE[:, 0], dtype=torch.bool) if mask_N is None else mask_N
        picked_NE = choose_best(
            probability_NE,
            counts_N.unsqueeze(1).expand_as(probability_NE),
            torch.full_like(counts_N, per_token, dtype=torch.int64),
        )
        picks_E = picks_E + picked_NE.sum(0)
        probability_E = probability_E + torch.where(counts_N.unsqueeze(1), probability_NE, 0.0).sum(0)
        num_tokens = num_tokens + counts_N.sum()
    return len(picks_E) * (picks_E * probability_E).sum() / num_tokens.clamp(min=1).square()

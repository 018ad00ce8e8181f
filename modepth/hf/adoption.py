"""A transformers model in our training loop, converted or dense: `modepth train --model DIR`."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modepth.adopted import AdoptedConfig, Costs
from modepth.config import Mode, RoutingConfig
from modepth.cross_entropy import loss_of_logits
from modepth.flops import muon_flops
from modepth.hf.classes import base_of, model_class
from modepth.hf.convert import layer_flops
from modepth.hf.model import (
    PREFIX,
    ROUTER,
    RoutedModel,
    decoder_layers,
    plain,
    routed_layers,
    routing_mode,
    routing_of,
    set_routing,
)
from modepth.losses import router_losses, weighted_sum
from modepth.model import Decoder, Output
from modepth.routing import real_tokens
from modepth.tokenizer import LibraryTokenizer, as_library, load_tokenizer


class Adopted(Decoder):
    """Takes tokens and gives losses as the native decoder does; the model itself is `base`.

    Its weights become float32: small updates would be lost in fewer bits.
    """

    config: AdoptedConfig

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        self.base = base.float()
        self.config = adopted_config(base)

    def blocks(self) -> nn.ModuleList:
        return decoder_layers(self.base)

    @property
    def checkpoint_activations(self) -> bool:
        return bool(self.base.is_gradient_checkpointing)

    @checkpoint_activations.setter
    def checkpoint_activations(self, wanted: bool) -> None:
        if wanted:
            self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif self.base.is_gradient_checkpointing:
            self.base.gradient_checkpointing_disable()

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        targets: Tensor | None = None,
        lengths: Tensor | None = None,
        mode: Mode = "causal",
        routing: RoutingConfig | None = None,
    ) -> Output:
        routing = self.config.routing if routing is None else routing
        if routing is None:
            return self.measured(tokens_BT, targets, lengths)
        set_routing(self.base, routing)
        routing_mode(self.base, mode)
        out = self.measured(tokens_BT, targets, lengths)
        if not torch.is_grad_enabled():
            # Else the mode stays: where activations are made again, layers run once more in the backward.
            routing_mode(self.base, "causal")
        routings = tuple(layer.routing for layer in routed_layers(self.base).values())
        if mode == "causal":
            return out._replace(routings=routings)
        losses = router_losses(routings, routing)
        router_loss = out.router_loss + weighted_sum(losses, routing.losses).to(out.router_loss)
        return out._replace(router_losses=losses, router_loss=router_loss, routings=routings)

    def measured(self, tokens_BT: Tensor, targets: Tensor | None, lengths: Tensor | None) -> Output:
        """Logits or the language-model loss, whatever the routing."""
        real_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        if lengths is not None:
            real_BT = real_tokens(lengths, *tokens_BT.shape)
        logits_BTV = self.base(input_ids=tokens_BT, attention_mask=real_BT.long(), use_cache=False).logits
        nothing = logits_BTV.new_zeros(())
        if targets is None:
            return Output(logits_BTV, None, {}, nothing, ())
        return Output(None, loss_of_logits(logits_BTV, targets, real_BT), {}, nothing, ())


def adopted_config(model: PreTrainedModel) -> AdoptedConfig:
    """What the loop asks of a model, counted on the model as it is."""
    text, layers = model.config.get_text_config(), decoder_layers(model)
    own = json.loads(json.dumps(model.config.to_dict()))  # as it will be read back
    for name in ("routing", "_name_or_path", "transformers_version"):  # kept apart; or of where and when, not what
        own.pop(name, None)
    routing = routing_of(model.config) if isinstance(model, RoutedModel) else None
    head = model.get_output_embeddings().weight
    parts = [layer_flops(layer, model.config) for layer in layers]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    predictor = 0 if routing is None else routing.predictor or 0
    named = [each for layer in layers for each in layer.named_parameters()]
    matrices = [weight for name, weight in named if weight.ndim == 2 and not name.startswith(ROUTER)]
    return AdoptedConfig(
        vocab_size=text.vocab_size,
        max_length=text.max_position_embeddings,
        costs=Costs(
            attention=tuple(part["attention"] for part in parts),
            mlp=tuple(part["mlp"] for part in parts),
            scores=(4 * text.num_attention_heads * head_dim,) * len(layers),
            router=2 * text.hidden_size,
            predictor=2 * (text.hidden_size + 1) * predictor,
            logits=2 * head.numel(),
            parameters=sum(weight.numel() for weight in model.parameters()),
            muon=sum(muon_flops(*weight.shape) for weight in matrices),
        ),
        transformers=own,
        routing=routing,
    )


def empty_model(config: AdoptedConfig) -> Adopted:
    """The model that a config describes, to load weights into."""
    name = str(config.transformers.get("model_type"))
    try:
        base = base_of(name.removeprefix(PREFIX))
    except KeyError:
        raise ValueError(f"{name} is no causal language model of this transformers") from None
    if config.routing is None:
        return Adopted(base(base.config_class.from_dict(config.transformers)))
    made = model_class(base)
    return Adopted(made(made.config_class.from_dict(config.transformers | {"routing": plain(config.routing)})))


def check_tokenizer(model: Path, data: Path) -> None:
    """Raise if data was prepared with another tokenizer than the model's: its ids would mean other words."""
    if (model / "tokenizer.json").exists() and vocabulary(model) != vocabulary(data):
        raise ValueError(
            f"{data}: was prepared with another tokenizer than that of {model}: prepare it with "
            f"--tokenizer {model / 'tokenizer.json'}"
        )


def vocabulary(folder: Path) -> dict[str, int]:
    tokenizer = as_library(load_tokenizer(folder))
    assert isinstance(tokenizer, LibraryTokenizer)  # the other form has just been turned into it
    return tokenizer.tokenizer.get_vocab(with_added_tokens=True)

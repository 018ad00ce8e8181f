"""The native decoder: Llama-shaped, any of its layers routed, any with experts.

    tokens -> embed -> for each layer: x = layer(x) -> norm -> logits -> loss

Parameters are named as transformers names Llama's, so that a checkpoint exports without renaming;
routed layers add `router`, and experts stand under `mlp`. Rows of a batch are padded at their end.

Shapes: B batch, T tokens, N new tokens of several rows, D width, E width of a head, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modepth.adopted import AnyConfig
from modepth.blocks import Context, rotary
from modepth.cache import Cache, NewTokens
from modepth.config import Mode, ModelConfig, RoutingConfig
from modepth.cross_entropy import loss_of_states
from modepth.decoder_layer import Decisions, Layer, Stream
from modepth.experts import ExpertRouter, ExpertRouting
from modepth.fused import RMSNorm
from modepth.losses import all_losses
from modepth.products import Linear
from modepth.routing import Router, Routing, real_tokens
from modepth.validation import check_tensor


class Output(NamedTuple):
    """What a forward returns. Train on `loss + router_loss`; report `loss`."""

    logits_BTV: Tensor | None  # None with targets: the loss is taken without ever having all logits
    loss: Tensor | None  # cross-entropy alone, the mean over real targets; None without targets
    router_losses: dict[str, Tensor]  # by name, unweighted; of mode "topk", whose choices are the targets
    router_loss: Tensor  # their weighted sum, 0 if there are none
    routings: tuple[Routing, ...]  # one a routed layer, in order
    experts: tuple[ExpertRouting, ...] = ()  # one a layer with experts, in order


class Decoder(nn.Module):
    """What the training loop asks of a model, besides a forward that takes and returns what `Transformer`'s does."""

    config: AnyConfig
    checkpoint_activations: bool

    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        raise NotImplementedError


class Transformer(Decoder):
    """A decoder in which the layers that `config.routing` names compute only some of the tokens.

    >>> from modepth import ModelConfig, RoutingConfig, Transformer
    >>> routing = RoutingConfig(capacity=0.25, every=2)
    >>> model = Transformer(ModelConfig(vocab_size=101, num_layers=4, dim=32, num_heads=2, routing=routing))
    >>> tokens = torch.randint(101, (2, 24))
    >>> out = model(tokens[:, :-1], targets=tokens[:, 1:], mode="topk")
    >>> (out.loss + out.router_loss).backward()
    >>> [(routing.layer, routing.index_BK.shape[1]) for routing in out.routings]
    [(1, 6)]
    """

    config: ModelConfig

    def __init__(self, config: ModelConfig, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = Linear(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def blocks(self) -> nn.ModuleList:
        return self.layers

    def reset_parameters(self) -> None:
        """Normal, std 0.02 at width 1024 and as 1/sqrt(dim) elsewhere; by depth smaller where it adds to the stream."""
        std = 0.02 * math.sqrt(1024 / self.config.dim)
        std_into_stream = std / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, Router | ExpertRouter | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding) and ".router." not in name:
                into_stream = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=std_into_stream if into_stream else std)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        targets: Tensor | None = None,
        lengths: Tensor | None = None,
        mode: Mode = "causal",
        routing: RoutingConfig | None = None,
    ) -> Output:
        """Logits of every position or, if `targets` (B, T) are given, their loss.

        mode      "causal" decides each token by itself, as generation does; "topk" is for training
        lengths   the number of real tokens of each row, (B,), the rest being padding
        routing   how to route in this forward, if not as the model's config says: another capacity, rule, seed
        """
        routing = self.own_or(routing)
        self.check_shapes(tokens_BT, targets)
        stream = self.embed(tokens_BT, lengths)
        stream, routings, experts = self.run_layers(stream, mode, routing)
        states_BTD = self.norm(stream.x_BTD)
        logits_BTV = loss = None
        if targets is None:
            logits_BTV = self.lm_head(states_BTD)
        else:
            loss = loss_of_states(states_BTD, self.lm_head.weight, targets, stream.real_BT)
        losses: dict[str, Tensor] = {}
        router_loss = states_BTD.new_zeros(())
        if mode == "topk":
            losses, router_loss = all_losses(routings, routing, experts, self.config.experts)
        return Output(logits_BTV, loss, losses, router_loss.to(states_BTD.device), routings, experts)

    def embed(self, tokens_BT: Tensor, lengths: Tensor | None = None) -> Stream:
        """What the first layer is given."""
        B, T = tokens_BT.shape
        if lengths is None:
            lengths = torch.full((B,), T, device=tokens_BT.device)
        x_BTD = self.dropout(self.embed_tokens(tokens_BT))
        position_1T = torch.arange(T, device=tokens_BT.device).unsqueeze(0)
        rope_1TE = rotary(position_1T, self.config.head_dim, self.config.rope_theta).to(x_BTD.dtype)
        rope_BTE = rope_1TE.expand(B, -1, -1).contiguous()
        return Stream(x_BTD, Context(rope_BTE), real_tokens(lengths, B, T))

    def extend(
        self,
        tokens: Sequence[Sequence[int]],
        caches: Sequence[Cache],
        *,
        mode: Mode = "causal",
        routing: RoutingConfig | None = None,
    ) -> tuple[Tensor, tuple[Routing | ExpertRouting, ...]]:
        """Read the next tokens of some rows, each into its own cache.

        Returns the states that `lm_head` makes logits of, (N, D), for all tokens, row after row; and what was
        decided, each of one row that holds all N. A row may have any number of new tokens: a prompt, a piece of
        one, one, none.

        >>> from modepth import ModelConfig, Transformer
        >>> from modepth.cache import Cache
        >>> model = Transformer(ModelConfig(vocab_size=101, num_layers=2, dim=32, num_heads=2)).eval()
        >>> caches = [Cache(model.config), Cache(model.config)]
        >>> with torch.no_grad():
        ...     states_ND, _ = model.extend([[5, 6, 7], [8]], caches)
        >>> states_ND.shape, [cache.length for cache in caches]
        (torch.Size([4, 32]), [3, 1])
        """
        if mode != "causal":
            raise ValueError(f"with a cache the mode must be 'causal', got {mode!r}: top-k looks at tokens yet to come")
        routing = self.own_or(routing)
        self.check_room(tokens, caches)
        device = self.embed_tokens.weight.device
        counts, starts = [len(row) for row in tokens], [cache.length for cache in caches]
        row_1N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).unsqueeze(0)
        places = [start + offset for start, count in zip(starts, counts, strict=True) for offset in range(count)]
        position_1N = torch.tensor([places], device=device)
        new = NewTokens(row_1N.to(device), position_1N, tuple(caches))
        x_1ND = self.embed_tokens(torch.tensor([[token for row in tokens for token in row]], device=device))
        rope_1NE = rotary(position_1N, self.config.head_dim, self.config.rope_theta).to(x_1ND.dtype)
        real_1N = torch.ones_like(position_1N, dtype=torch.bool)
        stream, routings, experts = self.run_layers(Stream(x_1ND, Context(rope_1NE, new), real_1N), mode, routing)
        for cache, count in zip(caches, counts, strict=True):
            cache.length += count
        return self.norm(stream.x_BTD).squeeze(0), (*routings, *experts)

    def check_room(self, tokens: Sequence[Sequence[int]], caches: Sequence[Cache]) -> None:
        if len(tokens) != len(caches) or not any(len(row) for row in tokens):
            raise ValueError(
                f"extend needs a cache for each row and at least one new token, got {len(tokens)} rows with "
                f"{sum(map(len, tokens))} tokens and {len(caches)} caches"
            )
        for row, cache in zip(tokens, caches, strict=True):
            if cache.length + len(row) > self.config.max_length:
                raise ValueError(
                    f"{cache.length} tokens in the cache and {len(row)} more are more than the model's max_length "
                    f"{self.config.max_length}"
                )

    def own_or(self, routing: RoutingConfig | None) -> RoutingConfig | None:
        """The routing of a forward, which may not ask for parts that the model does not have."""
        own = self.config.routing
        if routing is None or routing is own:
            return own
        for name in ("layers", "every", "part", "flow", "predictor"):
            if own is None or getattr(routing, name) != getattr(own, name):
                raise ValueError(f"routing may not change {name} of a model that stands: {own} was built")
        return routing

    def check_shapes(self, tokens_BT: Tensor, targets: Tensor | None) -> None:
        check_tensor("tokens", tokens_BT, (None, None), kind="whole")
        if self.config.max_length < tokens_BT.shape[1]:
            raise ValueError(
                f"{tokens_BT.shape[1]} tokens are more than the model's max_length {self.config.max_length}"
            )
        if targets is not None:
            check_tensor("targets", targets, tuple(tokens_BT.shape), kind="whole")

    def run_layers(
        self, stream: Stream, mode: Mode, routing: RoutingConfig | None
    ) -> tuple[Stream, tuple[Routing, ...], tuple[ExpertRouting, ...]]:
        """All layers, and what they decided."""
        decided: list[Decisions] = []
        for layer in self.layers:
            stream, decisions = self.run_layer(layer, stream, mode, routing)
            decided.append(decisions)
        routings = tuple(each.routing for each in decided if each.routing is not None)
        return stream, routings, tuple(each.experts for each in decided if each.experts is not None)

    def run_layer(
        self, layer: nn.Module, stream: Stream, mode: Mode, routing: RoutingConfig | None
    ) -> tuple[Stream, Decisions]:
        """One layer, its activations kept or made again in the backward."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            # Not the reentrant kind: that one drops the gradient of the router losses.
            return checkpoint(layer, stream, mode, routing, use_reentrant=False)
        return layer(stream, mode, routing)


# -- tokens, where they enter


def check_tokens(tokens_BT: Tensor, vocab_size: int) -> None:
    """Raise unless all ids are in the vocabulary. Call it where tokens enter: a forward must not branch on data.

    >>> check_tokens(torch.tensor([[3, 300]]), vocab_size=256)
    Traceback (most recent call last):
    ValueError: token ids must be in 0..255, got 300 at row 0, position 1
    """
    check_tensor("tokens", tokens_BT, (None, None), kind="whole")
    outside_BT = (tokens_BT < 0) | (tokens_BT >= vocab_size)
    if outside_BT.any():
        row, position = outside_BT.nonzero()[0].tolist()
        raise ValueError(
            f"token ids must be in 0..{vocab_size - 1}, got {tokens_BT[row, position].item()} "
            f"at row {row}, position {position}"
        )

"""What a sequence leaves behind for the tokens after it: keys, values and positions, of what was computed alone.

One `Cache` is one row. A batch is a list of them, so rows join, leave and change places as members of a list do,
and a long one costs the others nothing. A token that skips a layer's attention writes nothing there; a dense layer
is the case in which every token writes.

Shapes: K new tokens, H heads, G heads of keys and values, E width of a head, S places
of a row in a layer.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from modepth.config import ModelConfig
from modepth.flops import num_computed
from modepth.routing import Routing
from modepth.validation import check_count


class Cache:
    """The keys, values and positions of one sequence, layer by layer, and its length so far.

    `expected` tokens find room without growing, if the routed layers keep to their capacity.

    >>> from modepth import ModelConfig
    >>> cache = Cache(ModelConfig(vocab_size=256, num_layers=2, dim=64, num_heads=2))
    >>> cache.length, cache.num_entries
    (0, [0, 0])
    """

    def __init__(self, config: ModelConfig, expected: int = 0) -> None:
        check_count("expected", expected, low=0)
        self.config = config
        self.length = 0
        expected = min(expected, config.max_length)
        self.layers = [LayerCache(num_computed(config, layer, expected)[0]) for layer in range(config.num_layers)]

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self.length = min(self.length, length)
        for layer in self.layers:
            layer.crop(length)

    @property
    def num_entries(self) -> list[int]:
        """Entries of each layer."""
        return [layer.count for layer in self.layers]

    @property
    def bytes_written(self) -> int:
        return sum(layer.count * layer.entry_bytes for layer in self.layers)

    @property
    def bytes_allocated(self) -> int:
        return sum(layer.room * layer.entry_bytes for layer in self.layers)


class LayerCache:
    """The entries of one row in one layer, in order of position."""

    keys_GSE: Tensor
    values_GSE: Tensor
    position_S: Tensor

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected
        self.count = 0
        self.room = 0

    @property
    def entry_bytes(self) -> int:
        if not self.room:
            return 0
        parts = (self.keys_GSE[:, 0], self.values_GSE[:, 0], self.position_S[0])
        return sum(part.numel() * part.element_size() for part in parts)

    def append(self, k_KGE: Tensor, v_KGE: Tensor, position_K: Tensor) -> None:
        """Add the entries of the next tokens."""
        start, end = self.count, self.count + k_KGE.shape[0]
        if end > self.room:
            self.grow(end, k_KGE, v_KGE)
        self.keys_GSE[:, start:end] = k_KGE.transpose(0, 1)
        self.values_GSE[:, start:end] = v_KGE.transpose(0, 1)
        self.position_S[start:end] = position_K
        self.count = end

    def grow(self, needed: int, k_KGE: Tensor, v_KGE: Tensor) -> None:
        """Make room: what was expected at first, then an eighth more each time, so that copies are few."""
        room = max(needed, self.expected if self.room == 0 else self.room + self.room // 8 + 8)
        keys_GSE, values_GSE = (x_KGE.new_empty(x_KGE.shape[1], room, x_KGE.shape[2]) for x_KGE in (k_KGE, v_KGE))
        position_S = k_KGE.new_empty(room, dtype=torch.int32)
        if self.count:
            keys_GSE[:, : self.count] = self.keys_GSE[:, : self.count]
            values_GSE[:, : self.count] = self.values_GSE[:, : self.count]
            position_S[: self.count] = self.position_S[: self.count]
        self.keys_GSE, self.values_GSE, self.position_S, self.room = keys_GSE, values_GSE, position_S, room

    def crop(self, end: int) -> None:
        """Forget the entries of positions from `end` on."""
        if self.count:
            self.count = int((self.position_S[: self.count] < end).sum())

    def drop(self, start: int) -> None:
        """Forget the entries of positions before `start`; what is left moves to the front."""
        gone = int((self.position_S[: self.count] < start).sum()) if self.count else 0
        if gone:
            left = slice(gone, self.count)
            self.keys_GSE[:, : self.count - gone] = self.keys_GSE[:, left].clone()
            self.values_GSE[:, : self.count - gone] = self.values_GSE[:, left].clone()
            self.position_S[: self.count - gone] = self.position_S[left].clone()
            self.count -= gone

    def copy(self) -> "LayerCache":
        """One that can go on by itself."""
        other = LayerCache(self.expected)
        if self.count:
            keys_SGE, values_SGE = self.keys_GSE.transpose(0, 1), self.values_GSE.transpose(0, 1)
            other.append(keys_SGE[: self.count], values_SGE[: self.count], self.position_S[: self.count])
        return other

    def attend(self, q_KHE: Tensor, position_K: Tensor) -> Tensor:
        """What the newest K tokens, whose entries are in already, see: (K, H, E)."""
        K, H, E = q_KHE.shape
        keys_GSE, values_GSE = self.keys_GSE[:, : self.count], self.values_GSE[:, : self.count]
        G = keys_GSE.shape[0]
        if K == 1:
            # All entries are visible. The heads of a group ask as so many queries, so no key is repeated.
            # Four dimensions, or torch takes its slow path.
            q_1GQE = q_KHE.view(1, G, H // G, E)
            return F.scaled_dot_product_attention(q_1GQE, keys_GSE.unsqueeze(0), values_GSE.unsqueeze(0)).view(1, H, E)
        alone = self.count == K  # then the mask is the ordinary one, for which kernels skip what it hides
        mask_KS = None if alone else visible(position_K, self.position_S[: self.count])
        out_1HKE = F.scaled_dot_product_attention(
            q_KHE.transpose(0, 1).unsqueeze(0),
            keys_GSE.unsqueeze(0),
            values_GSE.unsqueeze(0),
            attn_mask=mask_KS,
            is_causal=alone,
            enable_gqa=G < H,
        )
        return out_1HKE.squeeze(0).transpose(0, 1)


def visible(query_position_Q: Tensor, key_position_S: Tensor) -> Tensor:
    """The mask rule: a token sees what stands at its own position or before."""
    return key_position_S.unsqueeze(0) <= query_position_Q.unsqueeze(1)


class NewTokens(NamedTuple):
    """New tokens of several rows, one row after the other: whose they are and where they stand."""

    row_1N: Tensor
    position_1N: Tensor
    caches: tuple[Cache, ...]

    def gather(self, routing: Routing) -> "NewTokens":
        """Those that a layer computes."""
        return NewTokens(routing.gather(self.row_1N), routing.gather(self.position_1N), self.caches)

    def attend(self, layer: int, q_1NHE: Tensor, k_1NGE: Tensor, v_1NGE: Tensor) -> Tensor:
        """Write the tokens' entries in a layer, each row in its own cache, and let them look back: (1, N, H, E)."""
        outs = []
        for row, part in segments(self.row_1N[0].tolist()):
            cache, position_K = self.caches[row].layers[layer], self.position_1N[0, part]
            cache.append(k_1NGE[0, part], v_1NGE[0, part], position_K)
            outs.append(cache.attend(q_1NHE[0, part], position_K))
        return torch.cat(outs).unsqueeze(0)


def segments(rows: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each row and where its tokens are.

    >>> list(segments([0, 0, 2]))
    [(0, slice(0, 2, None)), (2, slice(2, 3, None))]
    """
    start = 0
    for row, members in itertools.groupby(rows):
        end = start + sum(1 for _ in members)
        yield row, slice(start, end)
        start = end

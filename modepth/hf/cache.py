"""The cache of a routed layer in a transformers model: what it computed, row by row.

transformers keeps one entry a layer, and sizes masks and positions by what any of them reports. So a routed
layer's entry reports all tokens that passed and holds only those that were computed, in the native cache of a row.

Shapes: R rows that take part in a step, K new tokens, G heads, E width of a head, S places.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from modepth.cache import LayerCache


class Keys(NamedTuple):
    """What the queries of a step look at: the place in the sequence of each key, and which keys are there."""

    slot_RS: Tensor
    present_RS: Tensor


class RoutedEntry(CacheLayerMixin):
    """Stands in a transformers cache where the layer's own entry was."""

    is_croppable = True

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.is_sliding = window is not None
        self.record_past = False
        self.length = 0  # tokens that passed, computed or not
        self.rows: list[LayerCache] = []

    def open(self, num_rows: int) -> None:
        """Make sure that there is a cache for every row of a batch."""
        if not self.rows:
            self.rows = [LayerCache() for _ in range(num_rows)]
            self.is_initialized = True
        if len(self.rows) != num_rows:
            raise ValueError(f"the cache has {len(self.rows)} rows, the batch {num_rows}: reorder or select it first")

    def advance(self, num_tokens: int) -> None:
        """So many more tokens passed; a sliding window forgets those that nobody will see again."""
        self.length += num_tokens
        if self.window is not None and not self.record_past:
            for row in self.rows:
                row.drop(self.length - self.window + 1)

    # What transformers asks of an entry

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.window is None:
            return self.length + query_length, 0
        return min(self.length, self.window - 1) + query_length, max(self.length - self.window + 1, 0)

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number, of tokens to forget, got {tokens_to_remove}")
        self.length += tokens_to_remove
        for row in self.rows:
            row.crop(self.length)
            if self.window is not None:
                row.drop(self.length - self.window + 1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = [self.rows[index].copy() for index in torch.arange(len(self.rows))[indices.cpu()].tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = [row.copy() for row in self.rows for _ in range(repeats)]

    def reset(self) -> None:
        self.length, self.rows, self.is_initialized = 0, [], False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.open(key_states.shape[0])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("this layer is routed: it writes its own cache")


class Write:
    """Stands in for the whole cache while a routed layer computes: takes the new keys, and gives back all that is seen.

    Anything else that the layer might ask of a cache fails here, at its first forward.
    """

    def __init__(self, entry: RoutedEntry, rows: Sequence[int], slot_RK: Tensor, valid_RK: Tensor) -> None:
        self.rows = [entry.rows[row] for row in rows]
        self.slot_RK, self.valid_RK = slot_RK, valid_RK
        self.fresh = not any(row.count for row in self.rows)
        self.keys = Keys(slot_RK, valid_RK) if self.fresh else self.all_keys()

    def all_keys(self) -> Keys:
        new = [slot_K[valid_K] for slot_K, valid_K in zip(self.slot_RK, self.valid_RK, strict=True)]
        old = [
            row.position_S[: row.count] if row.count else slot_K[:0] for row, slot_K in zip(self.rows, new, strict=True)
        ]
        slots = [torch.cat((old_S.to(new_S.dtype), new_S)) for old_S, new_S in zip(old, new, strict=True)]
        slot_RS = pad_sequence(slots, batch_first=True, padding_value=-1)
        return Keys(slot_RS, slot_RS >= 0)

    def update(self, k_RGKE: Tensor, v_RGKE: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for row, k_GKE, v_GKE, slot_K, valid_K in zip(
            self.rows, k_RGKE, v_RGKE, self.slot_RK, self.valid_RK, strict=True
        ):
            if valid_K.any():
                row.append(k_GKE.transpose(0, 1)[valid_K], v_GKE.transpose(0, 1)[valid_K], slot_K[valid_K])
        if self.fresh:
            return k_RGKE, v_RGKE
        if len(self.rows) == 1:  # nothing to copy
            (row,) = self.rows
            return row.keys_GSE[:, : row.count].unsqueeze(0), row.values_GSE[:, : row.count].unsqueeze(0)
        return self.padded(k_RGKE, "keys_GSE"), self.padded(v_RGKE, "values_GSE")

    def padded(self, new_RGKE: Tensor, name: str) -> Tensor:
        """Rows of different lengths as one tensor."""
        R, G, _, E = new_RGKE.shape
        out_RGSE = new_RGKE.new_zeros(R, G, self.keys.slot_RS.shape[1], E)
        for out_GSE, row in zip(out_RGSE, self.rows, strict=True):
            if row.count:
                out_GSE[:, : row.count] = getattr(row, name)[:, : row.count]
        return out_RGSE


def entry_of(cache: Any, layer: int) -> RoutedEntry:
    """The routed layer's entry of a transformers cache, put there in place of an empty one at first touch."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise ValueError(f"a routed model needs a transformers cache, got {type(cache).__name__}")
    if cache.offloading:
        raise ValueError("an offloaded cache does not go with routed layers: drop cache_implementation='offloaded'")
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= layer:
        cache.layers.append(cache.layer_class_to_replicate())
    entry: Any = cache.layers[layer]
    if isinstance(entry, RoutedEntry):
        return entry
    if type(entry) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ValueError(
            f"the cache holds {type(entry).__name__} for layer {layer}, which is routed: only dynamic caches "
            "(the default of generate) hold rows of different lengths"
        )
    if entry.get_seq_length():
        raise ValueError(f"the cache was filled by another model: its layer {layer}, here routed, holds all tokens")
    window = entry.sliding_window if isinstance(entry, DynamicSlidingWindowLayer) else None
    routed = RoutedEntry(window)
    routed.record_past = getattr(entry, "record_past", False)
    cache.layers[layer] = routed
    return routed

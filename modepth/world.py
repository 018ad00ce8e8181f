"""The processes of a run: one, or those that torchrun started.

Everything that ranks must agree on goes through here: sums, plain data, stopping.
"""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from modepth.rendezvous import fresh_store


@dataclass(frozen=True)
class World:
    """Who this process is. `size` is 1 without torchrun."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over ranks."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def highest(self, value: int) -> int:
        """The highest value of any rank."""
        if self.size == 1:
            return value
        values = torch.tensor([value], device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return int(values.item())

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, which must be plain data, in order of rank; also a barrier."""
        if self.size == 1:
            return [value]
        # As JSON: torch's own object collectives pickle.
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)], device=self.device))
        longest = int(torch.stack(sizes).max())
        texts = [torch.zeros(longest, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, sizes, strict=True)]

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_world(timeout_seconds: float = 600.0) -> World:
    """Join the processes that torchrun started, or be alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if size == 1:
        return World(rank=0, size=1, device=device)
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = fresh_store(store, rank, size, timeout_seconds)
    dist.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank=rank, size=size, device=device)

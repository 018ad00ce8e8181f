"""Where the processes of a run meet: keys of their own in a store that earlier processes may have used.

After a restart torchrun gives the new processes the store of the old ones, whose addresses are still in it
(pytorch issue 135712; the restart count that it hands out can differ between machines). So each process brings
a new name, and they begin once all hold the same list of names, which no earlier list can equal.
"""

import hashlib
import json
import secrets
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

POLL_SECONDS = 0.02


def fresh_store(store: Store, rank: int, size: int, timeout_seconds: float) -> Store:
    """The part of `store` that only these `size` processes use."""
    name = secrets.token_hex(8)
    store.set(f"name/{rank}", name)
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if rank == 0 and store.check([f"name/{each}" for each in range(size)]):
            store.set("names", json.dumps([read(store, f"name/{each}") for each in range(size)]))
        names = json.loads(read(store, "names")) if store.check(["names"]) else []
        # A list may still hold the name of a process that is gone; the one in its place does not confirm it.
        if names and names[rank] == name:
            group = hashlib.sha256(json.dumps(names).encode()).hexdigest()
            store.set(f"{group}/confirmed/{rank}", "")
            if rank == 0 and store.check([f"{group}/confirmed/{each}" for each in range(size)]):
                store.set(f"{group}/complete", "")
            if store.check([f"{group}/complete"]):
                return PrefixStore(group, store)
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"rank {rank}: not all of {size} processes came within {timeout_seconds:g} s; see their logs")


def read(store: Store, key: str) -> str:
    return store.get(key).decode()

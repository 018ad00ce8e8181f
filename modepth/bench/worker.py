"""One contestant in a process of its own, driven over a pipe: a JSON order a line, a JSON answer a line.

    python worker.py CONTESTANT.py

It imports nothing of ours, so that it runs in a peer's environment too. A contestant's file has `build(shape)`, which
returns something with `model` (with an `lm_head`), `layers` (each with an `mlp`), `loss(tokens)`, `prefill(tokens)` and
`generate(tokens, count)`; where it knows how long its routed layers' blocks took, `block_seconds` says so, and where
its weights are no longer all parameters, `num_parameters` says how many they are.

All contestants take the same step here: forward, backward, clipping, AdamW.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Bench:
    """What the orders do; times are in seconds, memory in bytes."""

    def __init__(self, path: str) -> None:
        folder, file = os.path.split(path)
        sys.path.insert(0, folder)  # contestants may import one another
        self.name = file.removesuffix(".py")

    def build(self, shape: dict[str, Any]) -> dict[str, Any]:
        """The model and its tokens; says how many tokens the feed-forward of each layer computes in training."""
        torch.set_num_threads(shape["threads"])
        torch.manual_seed(0)
        self.entry = importlib.import_module(self.name).build(shape)
        self.model = self.entry.model.train()
        self.tokens = torch.randint(shape["vocab_size"], (shape["batch"], shape["length"]))
        # So small a rate that the weights stay, and with them what was calibrated; it costs what any rate does.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, fused=True)
        computed = [0] * len(self.entry.layers)
        hooks = [
            layer.mlp.register_forward_pre_hook(counter(computed, number))
            for number, layer in enumerate(self.entry.layers)
        ]
        with torch.no_grad():
            self.entry.loss(self.tokens)
        for hook in hooks:
            hook.remove()
        if shape["compiled"]:
            self.model.compile()
        counted = sum(each.numel() for each in self.model.parameters())
        return {
            "computed": computed,
            "parameters": getattr(self.entry, "num_parameters", counted),
            "torch": torch.__version__,
        }

    def train(self) -> dict[str, float]:
        self.model.train()
        start = time.perf_counter()
        self.entry.loss(self.tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"seconds": time.perf_counter() - start}

    def memory(self) -> dict[str, int]:
        """The most that a forward and a backward need beyond weights, gradients and optimiser state."""
        self.model.train()
        for each in self.model.parameters():
            each.grad = torch.zeros_like(each)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.entry.loss(self.tokens).backward()
        self.optimizer.zero_grad()
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            most = max(most, now)
        return {"peak": most}

    def prefill(self) -> dict[str, float]:
        self.model.eval()
        start = time.perf_counter()
        with torch.inference_mode():
            self.entry.prefill(self.tokens)
        return {"seconds": time.perf_counter() - start}

    def decode(self, prompt: int, count: int) -> dict[str, float]:
        """A token after the first, on average: from logits to logits, so without the prompt's own time."""
        self.model.eval()
        moments: list[tuple[float, float]] = []

        def note(*_: object) -> None:
            moments.append((time.perf_counter(), getattr(self.entry, "block_seconds", 0.0)))

        hook = self.model.lm_head.register_forward_hook(note)
        with torch.inference_mode():
            self.entry.generate(self.tokens[:, :prompt], count)
        hook.remove()
        if len(moments) != count:
            raise ValueError(f"{count} tokens were asked for, {len(moments)} times logits were made")
        seconds, blocks = ((last - first) / (count - 1) for first, last in zip(moments[0], moments[-1], strict=True))
        return {"seconds": seconds, "blocks": blocks}


def counter(computed: list[int], number: int) -> Any:
    def count(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        computed[number] += arguments[0].shape[:-1].numel()

    return count


def main() -> None:
    # Libraries print where they like; the pipe is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = Bench(sys.argv[1])
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(bench, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

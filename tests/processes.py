"""Real processes for the tests: ranks that talk by gloo, and commands under torchrun."""

import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch

from modepth.world import join_world

ROOT = Path(__file__).parent.parent
TIMEOUT = 15  # seconds that a rank waits for another

PROCESSES = multiprocessing.get_context("forkserver")  # each is real, but torch is imported once
# What torch imports late, at every first step, is imported once here too.
PRELOADED = ["torch._dynamo", "tests.test_checkpoint_killed", "tests.test_distributed", "tests.test_kills"]
PROCESSES.set_forkserver_preload(PRELOADED)


def run_ranks(function, size, *arguments, patience=1):
    """What `function(world, *arguments)` returns in each of `size` processes; raises if any of them does."""
    port, pipes, processes = free_port(), [], []
    for rank in range(size):
        receiver, sender = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(
            target=be_rank, args=(sender, function, rank, size, port, patience, arguments), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results, problems = [], []
    for rank, (receiver, process) in enumerate(zip(pipes, processes, strict=True)):
        try:
            result, problem = receiver.recv() if receiver.poll(90 * patience) else (None, "no answer")
        except EOFError:
            result, problem = None, "died"
        process.join(30)
        if process.exitcode is None:
            process.kill()
        if problem:
            problems.append(f"rank {rank}: {problem}")
        results.append(result)
    assert not problems, "\n".join(problems)
    return results


def be_rank(sender, function, rank, size, port, patience, arguments):
    torch.set_num_threads(1)
    os.environ.update(rank_environment(rank, size, port))
    result, problem = None, None
    try:
        world = join_world(timeout_seconds=TIMEOUT * patience)
        result = function(world, *arguments)
        world.close()
    except BaseException:
        problem = traceback.format_exc()
    sender.send((result, problem))


def rank_environment(rank, size, port):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def command(*arguments):
    """A Python command in a process of its own, on one thread, its output to be read; killed at the end."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def torchrun(size, *arguments, restarts=0):
    """The same under torchrun, `size` times."""
    options = ("--standalone", "--nproc-per-node", size, "--max-restarts", restarts)
    return command("-m", "torch.distributed.run", *options, *arguments)

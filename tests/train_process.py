"""A small training process for the tests to kill: python -m tests.train_process RUN DATA CHANGES, or under torchrun.

CHANGES is JSON, of the config's fields, and `sleep`: seconds that the first rank waits in each step, until torchrun
restarts it. Prints its rank and process id. Ends with 128 + the number of the signal that stopped it.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from modepth.run import Stopped, train
from modepth.world import join_world
from tests.processes import TIMEOUT
from tests.training import CONFIG, new_model, read_data


def main(run, data, changes):
    torch.set_num_threads(1)
    changes = json.loads(changes)
    sleep = changes.pop("sleep", 0)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        sleep = 0
    world = join_world(timeout_seconds=TIMEOUT)
    os.write(1, (json.dumps({"rank": world.rank, "pid": os.getpid()}) + "\n").encode())  # whole, unlike print
    config, tokens = replace(CONFIG, **changes), read_data(Path(data))
    try:
        train(new_model(), config, tokens, run, world=world, on_row=lambda row: time.sleep(sleep))
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
import torch
from modepth.allocator import keep_freed_memory

def faults_of_steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**24)  # 64 MB, over whatever glibc learns to keep by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    keep_freed_memory()
# The fewest: a small object that lies in a freed block has the heap grow, now and then.
print(min(faults_of_steps() for _ in range(6)))
"""


def faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_kept_memory_is_not_asked_of_the_system_again():
    assert faults("kept") * 20 < faults("given back")

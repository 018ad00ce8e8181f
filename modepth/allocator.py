"""What the C library does with memory that is freed."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # as <malloc.h> numbers them


def keep_freed_memory() -> None:
    """Keep it for the next tensors, where glibc would give large blocks back to the system at once.

    A training step makes the tensors of the last one again, and the system would zero their memory again, page by page.
    For the whole process, so for a program to call and not for a library. Where there is no glibc, nothing happens.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(MMAP_MAX, 0)
        set_option(TRIM_THRESHOLD, -1)  # never

"""The rows of a run that may still be training, for those who already have some of them."""

import time

from modepth.page import curve_rows
from modepth.runlog import RunLog
from modepth.serve.protocol import RunRows


def rows_since(name: str, log: RunLog, start: int, known: str) -> RunRows:
    """Rows from `start` on. A run that goes on writes its log anew, as another file: then all rows."""
    try:
        status = log.path.stat()
    except OSError:  # it was removed
        return {"run": name, "log": "", "start": 0, "rows": [], "seconds_since": None}
    rows = list(log.rows())
    if known != str(status.st_ino) or start > len(rows):
        start = 0
    return {
        "run": name,
        "log": str(status.st_ino),
        "start": start,
        "rows": curve_rows(rows[start:]),
        "seconds_since": max(0.0, time.time() - status.st_mtime) if rows else None,
    }

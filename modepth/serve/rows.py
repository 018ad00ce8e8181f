"""The rows of a run that may still be training, for those who already have some of them.

What is told apart as `log` is a file and how far it was read: who sends it back is given what was written since, and
nothing before is read again. So a long log costs no more than a short one, and nothing is kept between calls.
"""

import re
import time
from typing import NamedTuple

from modepth.page import curve_rows
from modepth.runlog import RunLog
from modepth.serve.protocol import RunRows


class Known(NamedTuple):
    """How far a caller has read which file."""

    file: int
    rows: int
    bytes: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def parse_known(text: str) -> Known | None:
    return Known(*map(int, text.split("-"))) if re.fullmatch("[0-9]{1,18}(-[0-9]{1,18}){2}", text) else None


def rows_since(name: str, log: RunLog, start: int, known: str) -> RunRows:
    """Rows from `start` on. A run that goes on writes its log anew, as another file: then all rows."""
    try:
        status = log.path.stat()
        had = parse_known(known)
        if had is not None and (had.file != status.st_ino or had.bytes > status.st_size):
            had = None
        before = had.rows if had is not None and had.rows == start else 0
        rows, end = log.rows_from(had.bytes if had is not None and before else 0)
    except OSError:  # it was removed
        return {"run": name, "log": "", "start": 0, "rows": [], "seconds_since": None}
    count = before + len(rows)
    start = start if had is not None and start <= count else 0
    return {
        "run": name,
        "log": str(Known(status.st_ino, count, end)),
        "start": start,
        "rows": curve_rows(rows[start - before :]),
        "seconds_since": max(0.0, time.time() - status.st_mtime) if count else None,
    }

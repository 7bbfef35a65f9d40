"""Other programs that compute, for tests that run alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CORES = len(os.sched_getaffinity(0))
# Gone when we are: it must not burn on if this test is killed.
BURNER = "import os\nwhile os.getppid() == {parent}:\n for i in range(1 << 16): pass"


@contextmanager
def burners(each: int = 1) -> Iterator[None]:
    """`each` programs for each core, in sessions of their own as those of other users are."""
    code = BURNER.format(parent=os.getpid())
    running = [
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL)
        for _ in range(each * CORES)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()

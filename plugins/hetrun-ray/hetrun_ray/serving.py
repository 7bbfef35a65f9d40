"""The engine's process: `hetrun serve` on a private socket, for as long as its parent lives."""

from __future__ import annotations

import os
import shutil
import sys
import threading

SOCKET = "s"


def main(descriptor: int, folder: str) -> None:
    """`descriptor` is our end of a pipe to the actor; the folder goes with us."""
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_parent, args=(descriptor, folder), daemon=True).start()
    sys.argv = ["hetrun", "serve", "--uds", os.path.join(folder, SOCKET)]
    from hetrun.cli import main

    main()


def _end_with_parent(descriptor: int, folder: str) -> None:
    """The pipe ends with the actor, also when it was killed. The model's process ends with ours in the same
    way."""
    while os.read(descriptor, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)

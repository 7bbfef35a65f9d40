"""What a process has when it is ready to answer lasts as long as it does."""

from __future__ import annotations

import gc


def all_of_this_lasts() -> None:
    """Have the garbage collector look at nothing that is here now, any more.

    It would go through all of it now and then, modules and functions mostly: 20 to 50 ms in which the server
    answers no request, or the engine's next step waits.
    """
    gc.collect()
    gc.freeze()

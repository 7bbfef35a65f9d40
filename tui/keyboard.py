"""Keys from the terminal, without Textual's wait for what may follow an Escape."""

from __future__ import annotations

import codecs
import os
import select

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

LOOK_S = 0.1  # between two looks whether the app has ended
ESCAPE = "\x1b"


class QuickDriver(LinuxDriver):
    """Textual's reader looks again 100 ms after the last key: so long no Escape could stop an answer."""

    def run_input_thread(self) -> None:
        """Read until the app ends; after a lone Escape only for the moment that a longer key would take."""
        from textual import constants

        parser, decoder = XTermParser(self._debug), codecs.getincrementaldecoder("utf-8")("replace")
        ready, text = select.poll(), ""
        ready.register(self.fileno, select.POLLIN)
        while not self.exit_event.is_set():
            wait_s = constants.ESCAPE_DELAY if text.endswith(ESCAPE) else LOOK_S
            text = ""
            if ready.poll(1000 * wait_s):
                raw = os.read(self.fileno, 1 << 12)
                if not raw:
                    return  # the terminal is gone
                text = decoder.decode(raw)
                for message in parser.feed(text):
                    self.process_message(message)
            for message in parser.tick():
                self.process_message(message)

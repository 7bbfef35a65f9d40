"""A plugin of pytest: says in the end which sanitized libraries the tests have loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sanitizers.builds import sources


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The libraries of this checkout that this process has mapped."""
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
    found = sorted(path.stem for path in sources() if path.with_suffix(".so") in mapped)
    terminalreporter.write_line(f"sanitized libraries: {' '.join(found)}")

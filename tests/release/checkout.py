"""Whether the checkout is what a release is made of: python -m tests.release.checkout"""

from __future__ import annotations

import sys

from tests.release.machine import git
from tests.support.paths import ROOT


def faults() -> list[str]:
    """What is wrong with it."""
    if not git("rev-parse", "HEAD"):
        return ["this is no git checkout"]
    found = [f"not committed: {line}" for line in git("status", "--porcelain").splitlines()]
    if "## [Unreleased]" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        found.append("CHANGELOG.md has no section for what is not released")
    return found


def main() -> int:
    found = faults()
    print("\n".join(found) or f"{git('rev-parse', '--short=9', 'HEAD')}: nothing differs from it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

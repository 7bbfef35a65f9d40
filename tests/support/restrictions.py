"""Which of the kernel's restrictions there are here, for tests that need them."""

from __future__ import annotations

import pytest

from hetrun.system.sandbox import landlock, seccomp

needs_seccomp = pytest.mark.skipif(
    not seccomp.is_there(), reason="this kernel takes no filters of system calls from this process"
)
needs_landlock = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")
needs_landlock_of_tcp = pytest.mark.skipif(
    landlock.version() < 4, reason="this kernel's Landlock does not know of TCP (it does from Linux 6.7 on)"
)

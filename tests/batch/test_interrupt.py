"""Ctrl-C while a batch runs, at whatever moment it comes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from hetrun.cli.batch import until_told


def test_ctrl_c_in_the_midst_of_other_work_is_no_error() -> None:
    async def work() -> None:
        future = asyncio.get_running_loop().create_future()

        async def waits() -> None:
            await future
            await asyncio.Event().wait()

        async def sets() -> None:
            if not future.done():
                signal.raise_signal(signal.SIGINT)
                future.set_result(None)  # which would be wrong, had it been cancelled by now
            await asyncio.Event().wait()

        await asyncio.gather(waits(), sets())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(until_told(work()))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_twice_ends_at_once() -> None:
    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second one did not end it")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(until_told(work()))


def test_a_job_in_the_background_is_not_ended_by_ctrl_c() -> None:
    async def work() -> str:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return "done"

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start them
    try:
        assert asyncio.run(until_told(work())) == "done"
    finally:
        signal.signal(signal.SIGINT, before)

"""Places that packages bring for a scheme of `--workers`, and what they may do wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from hetrun.cli import exit_code
from hetrun.cli.workers import elsewhere
from hetrun.config import Settings
from hetrun.errors import BackendUnavailable, EngineStopped, OptionError, PluginError
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.worker import Place, PluginPlace, Wanted
from tests.batch.fakes import Echo, results
from tests.batch.test_http_worker import ASK, Talk
from tests.plugins.strangers import Register


class Farm:
    """What a package brings: places, and what became of them."""

    def __init__(self, *places: Place) -> None:
        self.places: Sequence[Place] = places or (Echo(lanes=2),)
        self.asked: list[tuple[str, Wanted]] = []
        self.ended = 0

    @asynccontextmanager
    async def __call__(self, where: str, wanted: Wanted) -> AsyncIterator[Sequence[Place]]:
        self.asked.append((where, wanted))
        try:
            yield self.places
        finally:
            self.ended += 1


def opened(
    *urls: str, settings: Settings | None = None, body: Callable[[list[Place]], None] = lambda places: None
) -> list[Place]:
    """The places of addresses, left again after `body`."""

    async def run() -> list[Place]:
        async with elsewhere(urls, settings or Settings()) as places:
            body(places)
            return places

    return asyncio.run(run())


def test_a_batch_runs_on_places_that_a_package_brings(register: Register, tmp_path: Path) -> None:
    farm = Farm(Echo(lanes=2), Echo(lanes=3))
    register("workers", "farm", farm)
    (tmp_path / "in.txt").write_text("".join(f"{i}\n" for i in range(40)))
    command = ["run", "-f", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out")]
    assert exit_code([*command, "-m", "tiny.gguf", "--ctx", "64", "--workers", "farm:here:1"]) == 0
    assert [row["text"] for row in results(tmp_path / "out")] == [f"answer to {i}" for i in range(40)]
    ((where, wanted),) = farm.asked
    assert where == "here:1"
    assert wanted.model == "tiny.gguf"  # as it was typed: it need not be here
    assert wanted.settings["ctx"] == 64
    assert farm.ended == 1


def test_results_of_another_model_are_not_gone_on_with(register: Register, tmp_path: Path) -> None:
    register("workers", "farm", Farm())
    (tmp_path / "in.txt").write_text("a\nb\n")
    command = ["run", "-f", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out"), "--workers", "farm:"]
    assert exit_code([*command, "-m", "a.gguf", "--seed", "1"]) == 0
    assert exit_code([*command, "-m", "b.gguf", "--seed", "1", "--resume"]) == 2
    assert exit_code([*command, "-m", "a.gguf", "--seed", "1", "--resume"]) == 0


def test_only_what_was_chosen_is_wanted(register: Register) -> None:
    farm = Farm()
    register("workers", "farm", farm)
    settings = Settings.resolve(environ={"HETRUN_CONFIG": "/dev/null", "HETRUN_RAM": "1GiB"}, api_key="k")
    opened("farm:x", settings=settings)
    ((_, wanted),) = farm.asked
    assert wanted == Wanted(None, {"ram": 1 << 30}, "k")
    assert "'k'" not in repr(wanted)


def test_packages_and_servers_mix(register: Register, tmp_path: Path) -> None:
    farm = Farm()
    register("workers", "farm", farm)

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = Talk(reader, writer)
        for body in ({"total_slots": 4}, {"data": [{"id": "m"}]}):
            await talk.request()
            talk.answer(json.dumps(body).encode())
        talk.hang_up()

    async def run() -> None:
        async with await asyncio.start_unix_server(met, str(tmp_path / "s")):
            async with elsewhere([f"unix:{tmp_path}/s", "farm:x", "unix:/none"], Settings()) as places:
                assert [(place.name, place.lanes) for place in places] == [
                    (f"unix:{tmp_path}/s", 6),
                    ("unix:/none", 16),
                    ("echo", 2),
                ]
                assert isinstance(places[2], PluginPlace)
        assert farm.ended == 1

    asyncio.run(run())


def test_servers_that_are_not_there_are_no_reason_to_end_where_a_package_helps(register: Register) -> None:
    register("workers", "farm", Farm())
    assert len(opened("unix:/none", "farm:x")) == 2
    with pytest.raises(BackendUnavailable, match="no worker answers"):
        opened("unix:/none")


@pytest.mark.parametrize("scheme", ["http", "https", "unix"])
def test_hetruns_own_schemes_cannot_be_taken_over(register: Register, scheme: str) -> None:
    farm = Farm()
    register("workers", scheme, farm)
    with pytest.raises((BackendUnavailable, OptionError)):
        opened(f"{scheme}:///none" if scheme == "unix" else f"{scheme}://")
    assert not farm.asked


def test_a_scheme_that_no_package_provides(register: Register) -> None:
    register("workers", "farm", Farm())
    for url, why in (
        ("ray:auto", "or begin with farm:, .*; for ray: pip install hetrun-ray$"),
        ("ray:head:6379", "pip install hetrun-ray$"),
        ("fram:x", "must be like http://host:8080, or unix:PATH for a socket, or begin with farm:"),
        ("host:99999", "Port out of range"),
    ):
        with pytest.raises(OptionError, match=why):
            opened(url)


class Odd(Place):
    """A place that does not keep to the contract."""

    name = "odd"

    def __init__(self, found: object = None, lanes: int = 1) -> None:
        self.lanes = lanes
        self._found = found

    async def answer(self, ask: Ask) -> Reply:
        if isinstance(self._found, BaseException):
            raise self._found
        return cast(Reply, self._found)  # it may be anything


@asynccontextmanager
async def _fails_late(where: str, wanted: Wanted) -> AsyncIterator[Sequence[Place]]:
    yield [Echo()]
    raise ZeroDivisionError("in the end")


def _raises(error: BaseException) -> Callable[[str, Wanted], AbstractAsyncContextManager[Sequence[Place]]]:
    def places(where: str, wanted: Wanted) -> AbstractAsyncContextManager[Sequence[Place]]:
        raise error

    return places


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (_raises(KeyError("x")), "KeyError: 'x'"),
        (_raises(SystemExit(3)), "SystemExit: 3"),
        (_fails_late, "ZeroDivisionError: in the end"),
        (7, "TypeError: 'int' object is not callable"),
        (lambda where, wanted: [Echo()], "TypeError: "),
        (Farm(Odd(lanes=0)), "its place 'odd' has 0 lanes"),
        (Farm(cast(Place, 7)), "AttributeError: "),
    ],
)
def test_whatever_else_a_package_raises_is_said_of_it(register: Register, thing: object, why: str) -> None:
    register("workers", "farm", thing)
    with pytest.raises(PluginError, match=rf"the workers farm:x of stranger 0\.1 .*{re.escape(why)}"):
        opened("farm:x")


def test_a_package_that_cannot_be_imported(register: Register, tmp_path: Path) -> None:
    register("workers", "farm", fails=ImportError("no module"))
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(PluginError, match=r"the workers farm of stranger 0\.1 is left out: .*no module"):
        opened("farm:x")
    assert exit_code(["run", "-f", str(tmp_path / "in.txt"), "--workers", "farm:x"]) == 2


def test_a_package_without_places(register: Register) -> None:
    farm = Farm()
    farm.places = ()
    register("workers", "farm", farm)
    with pytest.raises(PluginError, match="none of its workers"):
        opened("farm:x")


def test_what_is_meant_for_people_passes(register: Register) -> None:
    register("workers", "farm", _raises(BackendUnavailable("start it first")))
    with pytest.raises(BackendUnavailable, match=r"^start it first$"):
        opened("farm:x")


def test_our_own_errors_are_not_said_of_a_package(register: Register) -> None:
    farm = Farm()
    register("workers", "farm", farm)

    def body(places: list[Place]) -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        opened("farm:x", body=body)
    assert farm.ended == 1


@pytest.mark.parametrize(
    ("found", "error", "why"),
    [
        (KeyError("x"), PluginError, r"the workers farm:x of stranger 0\.1 .*KeyError: 'x'"),
        ({"status": 200}, PluginError, "what odd answers is no Reply, but {'status': 200}"),
        (EngineStopped("it is over"), EngineStopped, "^it is over$"),
    ],
)
def test_what_a_place_answers_is_looked_at(
    register: Register, found: object, error: type[Exception], why: str
) -> None:
    register("workers", "farm", Farm(Odd(found)))
    (place,) = opened("farm:x")
    with pytest.raises(error, match=why):
        asyncio.run(place.answer(ASK))

"""`hetrun bench` of servers: its client, its prompts, what is measured, and how it is told."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrun.client.engine_client import LocalClient
from hetrun.errors import HetrunError, OptionError, UserError
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.tools.bench.cases import BenchOptions
from hetrun.tools.bench.options import TypedBenchOptions, options_of
from hetrun.tools.bench.prompts import body, of_length
from hetrun.tools.bench.serving import benchmark
from hetrun.tools.bench.serving.benchmark import (
    ServingReport,
    ServingRow,
    ServingSample,
    ServingSide,
    measure,
    percentile,
)
from hetrun.tools.bench.serving.cases import ArrivalCase, LoadCase, PrefixCase, ServingOptions
from hetrun.tools.bench.serving.http_load import (
    ConnectionLost,
    HttpAnswerReader,
    RequestRefused,
    ServerEndpoint,
    TimedAnswer,
    ask,
)
from hetrun.tools.bench.serving.report import to_csv, to_json, to_table
from hetrun.tools.bench.serving.servers import FEATURES, LlamaServer, ServerCapacity, find_llama_server, tree
from tests.support.fakes import FakeEngine

# --- answers out of bytes

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Pieces of these sizes, and the rest."""
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(data[begin : begin + size])
        begin += size
    return [piece for piece in (*pieces, data[begin:]) if piece]


def read(pieces: Sequence[bytes]) -> tuple[HttpAnswerReader, list[bytes]]:
    events: list[bytes] = []
    reader = HttpAnswerReader(lambda event, at: events.append(event))
    for n, piece in enumerate(pieces):
        assert not reader.ended
        reader.feed(piece, float(n))
    return reader, events


@given(
    events=st.lists(st.binary(min_size=1, max_size=40).filter(lambda e: b"\n" not in e), max_size=6),
    inside=st.lists(st.integers(1, 30), max_size=12),
    outside=st.lists(st.integers(1, 60), max_size=12),
)
def test_a_stream_is_the_same_however_it_is_cut(
    events: list[bytes], inside: list[int], outside: list[int]
) -> None:
    text = b"".join(event + b"\n\n" for event in events)
    sent = STREAM + chunked(cut(text, inside))
    reader, found = read(cut(sent, outside))
    assert (reader.status, reader.ended, found) == (200, True, events)


@given(outside=st.lists(st.integers(1, 30), max_size=12))
def test_what_is_no_stream_is_kept(outside: list[int]) -> None:
    sent = b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 12\r\n\r\n{"error": 1}'
    reader, found = read(cut(sent, outside))
    assert (reader.status, reader.ended, bytes(reader.body), found) == (429, True, b'{"error": 1}', [])


def test_an_empty_body_ends_with_its_head() -> None:
    reader, _ = read([b"HTTP/1.1 204 No Content\r\n\r\n"])
    assert reader.ended


def test_what_is_no_http_is_said() -> None:
    with pytest.raises(HetrunError, match=r"not an HTTP server: it answered 'SSH-2\.0'"):
        read([b"SSH-2.0\r\n\r\n"])


def test_only_texts_are_tokens() -> None:
    answer = TimedAnswer(asked=1.0)
    for at, event in enumerate(
        (
            b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}',
            b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}',
            rb'data: {"choices":[{"delta":{"content":"say \"content\":\"no\" "}}]}',
            b'data: {"choices":[{"delta": {"content": "b"}}]}',
            rb'data: {"choices":[{"delta":{"role":"\"content\":\"no\""}}]}',
            b'data: {"choices":[],"usage":{"completion_tokens":2,"prompt_tokens":7,'
            b'"prompt_tokens_details":{"cached_tokens":3}}}',
            b"data: [DONE]",
        )
    ):
        answer.take(event, float(at))
    assert (answer.arrivals, answer.first, answer.gaps) == ([2.0, 3.0], 1.0, [1.0])
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (2, 7, 3)


def test_an_error_in_the_middle_ends_the_measurement() -> None:
    with pytest.raises(HetrunError, match=r"an answer ended with an error: .*the engine died"):
        TimedAnswer().take(b'data: {"error":{"message":"the engine died"}}', 1.0)


# --- prompts


def words_in(text: str) -> int:
    return len(text.split())


@given(tokens=st.integers(4, 300), seed=st.integers(0, 9))
def test_prompts_have_the_length_that_was_asked_for(tokens: int, seed: int) -> None:
    def count(text: str) -> int:
        return 3 + words_in(text)  # a template around it

    text = of_length(count, (" ab", " cd"), tokens, random.Random(seed))
    assert count(text) == tokens
    assert text == of_length(count, (" ab", " cd"), tokens, random.Random(seed))


@given(tokens=st.integers(10, 300))
def test_words_of_several_tokens_come_close(tokens: int) -> None:
    text = of_length(lambda t: 2 + 3 * words_in(t), (" ab",), tokens, random.Random(1))
    assert abs(2 + 3 * words_in(text) - tokens) <= 2


def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(OptionError, match="the chat template alone takes 31"):
        of_length(lambda text: 30 + words_in(text), (" ab",), 16, random.Random(1))


def test_a_request_says_all_that_makes_both_sides_equal() -> None:
    asked = json.loads(body("hello", 12, 5))
    assert asked["messages"] == [{"role": "user", "content": "hello"}]
    assert (asked["max_tokens"], asked["ignore_eos"], asked["seed"], asked["stream"]) == (12, True, 5, True)
    assert asked["stream_options"] == {"include_usage": True}
    assert {"temperature", "top_k", "top_p", "min_p"} < set(asked)


# --- what was asked for


TYPED = TypedBenchOptions(
    prompt="512",
    generate="64",
    depth=None,
    batch=None,
    rounds=5,
    vs=None,
    explain=False,
    clients=None,
    requests=None,
    shared_prefix=None,
    arrival=None,
    output="table",
)


def test_options_of_servers_mean_servers() -> None:
    assert options_of(TYPED) == BenchOptions()
    assert options_of(replace(TYPED, depth="0", batch="2,4")) == BenchOptions(depth=(0,), batch=(2, 4))
    found = options_of(replace(TYPED, clients="1,4", prompt="256", generate="128"))
    assert found == ServingOptions(clients=(1, 4), prompt=(256,), generate=(128,))
    assert isinstance(found, ServingOptions)
    assert [c.name for c in found.cases()] == ["pp256+tg128 x1", "pp256+tg128 x4"]


def test_prefixes_and_arrivals_are_cases_of_their_own() -> None:
    found = ServingOptions(clients=(1, 4), shared_prefix=(2000,), arrival=(4000,), prompt=(256,))
    assert found.cases() == [PrefixCase(2000), ArrivalCase(1, 256, 64, 4000), ArrivalCase(4, 256, 64, 4000)]
    assert ServingOptions(arrival=(100,)).cases() == [ArrivalCase(1, 512, 64, 100)]
    assert ServingOptions(shared_prefix=(100, 200)).cases() == [PrefixCase(100), PrefixCase(200)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"clients": "0"}, "--clients must be a number of 1 or more"),
        ({"clients": "2", "batch": "2"}, "-b is for runs in process"),
        ({"arrival": "2", "depth": "2"}, "-d is for runs in process"),
        ({"shared_prefix": "2", "explain": True}, "--explain is for runs in process"),
        ({"requests": "2"}, "give --clients too"),
        ({"clients": "2", "requests": "2,3"}, "--requests must be one number"),
        ({"clients": "2", "prompt": "0"}, "a server needs a prompt"),
        ({"clients": "2", "rounds": 0}, "-r must be 1 or more"),
        ({"clients": "2", "output": "xml"}, "-o must be one of"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        options_of(replace(TYPED, **given))


def test_the_room_holds_the_longest_conversation() -> None:
    assert LoadCase(4, 256, 128, 2).room.tokens > 256 + 128
    assert ArrivalCase(4, 256, 64, 4000).room.tokens > 4000
    assert ArrivalCase(4, 256, 64, 100).room == ServerCapacity(5, 256 + 8 + 64 + 2048 + 32)


# --- the peer


def test_another_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"llama\.cpp, its library, is for runs without"):
        find_llama_server("llama.cpp", tmp_path)
    with pytest.raises(UserError, match="nowhere is not a program here"):
        find_llama_server(f"llama-server={tmp_path}/nowhere", tmp_path)


def test_the_peer_says_what_it_is(tmp_path: Path) -> None:
    program, model = tmp_path / "llama-server", tmp_path / "model.gguf"
    program.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'version: 7 (abc)' "
        "|| echo 'system_info: n_threads = 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | AMX_INT8 = 1 |'\n"
    )
    program.chmod(0o755)
    model.touch()
    found = find_llama_server(f"llama-server={program}", model)
    assert found == LlamaServer(program, "7 (abc)", ("AVX2", "AMX_INT8"))


def test_features_are_those_that_are_on() -> None:
    assert FEATURES.findall("AVX = 1 | AVX512_VNNI = 0 | AMX_INT8 = 1 | NEON = 1") == [
        "AVX",
        "AMX_INT8",
        "NEON",
    ]


def test_a_process_comes_first_in_its_tree() -> None:
    assert tree(os.getpid())[0] == os.getpid()


# --- runs, against a real server with a scripted engine


class Scripted:
    """Messages that the scripted engine answers for ever."""

    def text(self, tokens: int, seed: object) -> str:
        return "forever"

    def more(self, words: int, seed: object) -> str:
        return " ho"


class InProcess:
    """A server on a thread of its own."""

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self.endpoint = endpoint

    def cpu_seconds(self) -> Mapping[str, float]:
        return {"front": 0.0, "others": 0.0}


@contextmanager
def served(engine: FakeEngine, path: Path) -> Iterator[InProcess]:
    ready = threading.Event()
    found: list[Callable[[], object]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        found.append(lambda: loop.call_soon_threadsafe(stop.set))
        with listen.listening(listen.ListenAddress(uds=path)) as bound:
            await listen.serve(create_app(LocalClient(engine)), bound, stop, ready.set)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(5)
    try:
        yield InProcess(ServerEndpoint(uds=path))
    finally:
        found[0]()
        thread.join()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


def test_a_load_counts_every_token(engine: FakeEngine, tmp_path: Path) -> None:
    with served(engine, tmp_path / "s") as server:
        sample = measure(server, LoadCase(3, 7, 5, requests=2), Scripted(), 1)
    assert len(engine.requests) == 6
    assert len(sample.spans["first"]) == 6
    assert len(sample.spans["gaps"]) == 6 * 4
    assert sample.value == pytest.approx(6 * 5 / sample.counts["seconds"])
    assert (sample.counts["prompt_tokens"], sample.counts["cached_tokens"]) == (7, 3)
    assert not engine.cancelled


def test_a_prefix_is_asked_for_twice(engine: FakeEngine, tmp_path: Path) -> None:
    with served(engine, tmp_path / "s") as server:
        sample = measure(server, PrefixCase(100), Scripted(), 1)
    assert [str(r.messages[0]["content"]) for r in engine.requests if r.messages] == ["forever ho"] * 2
    (first,), (second,) = sample.spans["first request"], sample.spans["second request"]
    assert sample.value == pytest.approx(first / second)


def test_a_newcomer_comes_beside_answers_that_run(engine: FakeEngine, tmp_path: Path) -> None:
    with served(engine, tmp_path / "s") as server:
        sample = measure(server, ArrivalCase(2, 7, quiet=10, arrival=100), Scripted(), 1)
        assert engine.idle.wait(5)  # who left was cancelled
    assert len(engine.requests) == 4
    assert sorted(engine.cancelled) == [2, 3]
    assert len(sample.spans["quiet"]) >= 2 * 9
    assert sample.spans["during"]
    assert min(*sample.spans["newcomer alone"], *sample.spans["newcomer beside"]) > 0


def test_running_answers_that_end_too_early_are_said(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "text", lambda self, tokens, seed: "say one two three")
    with (
        served(engine, tmp_path / "s") as server,
        pytest.raises(HetrunError, match="ended before the arriving prompt"),
    ):
        measure(server, ArrivalCase(1, 7, quiet=10, arrival=100), Scripted(), 1)


def test_answers_that_are_too_short_are_no_result(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "text", lambda self, tokens, seed: "say one two three")
    with (
        served(engine, tmp_path / "s") as server,
        pytest.raises(HetrunError, match="3 tokens instead of the 5"),
    ):
        measure(server, LoadCase(1, 7, 5, 1), Scripted(), 1)


def test_refusals_are_quoted(engine: FakeEngine, tmp_path: Path) -> None:
    with (
        served(engine, tmp_path / "s") as server,
        pytest.raises(RequestRefused, match=r"answered 400: .*messages"),
    ):
        asyncio.run(ask(server.endpoint, b"{}"))


async def test_a_server_that_hangs_up_is_said(tmp_path: Path) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(STREAM)
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / "s"):
        with pytest.raises(ConnectionLost, match="in the middle of an answer"):
            await ask(ServerEndpoint(uds=tmp_path / "s"), b"{}")


# --- how it is told


@given(st.lists(st.integers(0, 100), min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_a_value_that_this_share_does_not_exceed(values: list[int], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) * 100 >= percent * len(values)
    assert sum(v < found for v in values) * 100 < percent * len(values)


def load_sample(tok_s: float) -> ServingSample:
    spans = {"first": (0.25, 0.5), "gaps": (0.01, 0.02, 0.03)}
    counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "clients_cpu", "front_cpu", "others_cpu"), 0.5)
    return ServingSample(tok_s, spans, counts)


PEER = LlamaServer(Path("/x/llama-server"), "7 (abc)", ("AVX512",))


def report(theirs: ServingSide | None) -> ServingReport:
    ours = ServingSide("hetrun", (load_sample(30.0), load_sample(40.0)))
    smooth = {
        "quiet": (0.01, 0.02),
        "during": (0.02, 0.06),
        "newcomer alone": (1.0,),
        "newcomer beside": (1.5,),
    }
    arrival = ServingSide("hetrun", (ServingSample(3.0, smooth, {}),))
    rows = (
        ServingRow("m", LoadCase(2, 256, 128, 2), ours, theirs, (0.1, 0.2)),
        ServingRow("m", ArrivalCase(4, 256, 64, 4000), arrival, None, (0.1, 0.2)),
    )
    return ServingReport(rows, PEER if theirs else None)


THEIRS = ServingSide("llama-server", (load_sample(20.0), load_sample(20.0)), threads=2)


def test_the_ratio_is_that_of_neighbours() -> None:
    assert report(THEIRS).rows[0].ratio == pytest.approx((1.5 + 2.0) / 2)
    assert report(None).rows[0].ratio is None


def test_json_has_every_number() -> None:
    first, second = json.loads(to_json(report(THEIRS)))
    assert (first["test"], first["clients"], first["tok_s"], first["ratio"]) == (
        "pp256+tg128 x2",
        2,
        35.0,
        1.75,
    )
    assert (first["first_p99_s"], first["gap_median_s"], first["samples"]) == (0.5, 0.02, [30.0, 40.0])
    peer = first["peer"]
    assert (peer["tok_s"], peer["version"], peer["features"], peer["threads"]) == (
        20.0,
        "7 (abc)",
        ["AVX512"],
        2,
    )
    assert second["peer"] is None
    assert (second["p99_ratio"], second["newcomer_ratio"]) == (3.0, 1.5)
    assert second["median_ratio"] == pytest.approx(0.04 / 0.015)


def test_a_table_names_the_peers_build() -> None:
    text = to_table(report(THEIRS))
    assert "35.0 ± 5.0" in text
    assert "first p99 ms" in text
    assert "llama-server: 7 (abc); its CPU code: AVX512; threads: 2 for pp256+tg128 x2" in text
    assert "1.750" in text
    assert "llama-server" not in to_table(report(None))


def test_csv_has_a_line_for_each_number() -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(report(THEIRS)))))
    values = {(line["test"], line["server"], line["number"]): line["value"] for line in lines}
    assert values["pp256+tg128 x2", "hetrun", "tok_s"] == "35.0"
    assert values["pp256+tg128 x2", "llama-server", "samples"] == "20 20"
    assert values["pp256+tg128 x2", "", "ratio"] == "1.75"
    assert values["arrival4000 x4", "hetrun", "during_p99_s"] == "0.06"


def test_half_of_the_cores_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert benchmark.thread_counts() == [1, 4, 8]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert benchmark.thread_counts() == [1]

"""The file of results: whole lines only, whatever happens, and what an earlier run has left."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, strategies as st

from hetrun.errors import UserError
from hetrun.tools.batch.output_file import NoRoom, OutputFile
from hetrun.tools.batch.reorder_buffer import LineHeap, waiting_beside
from hetrun.tools.batch.request_lines import Ask, Shape
from hetrun.tools.batch.result_lines import Reply, refused, request_of, result
from hetrun.tools.batch.resume import FAR, FinishedRequests
from tests.batch.fakes import reply


def ask(index: int = 0, shape: Shape = "own", name: object = None, digest: str = "0123456789ab") -> Ask:
    return Ask(index, index + 1, digest, shape, "/v1/chat/completions", {"seed": 7}, name, metadata={"k": 1})


def test_lines_of_answers() -> None:
    own = result(ask(4, name="x"), reply("Hello"))
    assert json.loads(own.line) == {
        "index": 4, "id": "x", "text": "Hello", "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "seed": 7, "metadata": {"k": 1},
        "request": "0123456789ab",
    }  # fmt: skip
    assert (own.failed, own.answer_tokens, own.prompt_tokens) == (False, 2, 3)
    openai = json.loads(result(ask(4, "openai", "x"), reply("Hello")).line)
    assert list(openai) == ["id", "custom_id", "response", "error"]
    assert (openai["custom_id"], openai["error"], openai["response"]["status_code"]) == ("x", None, 200)
    assert openai["response"]["body"]["choices"][0]["message"]["content"] == "Hello"


def test_lines_of_failures() -> None:
    own = result(ask(), reply("too long", 400))
    assert own.failed
    assert json.loads(own.line)["error"]["message"] == "too long"
    assert own.said == "line 1: too long"
    openai = json.loads(result(ask(0, "openai"), reply("too long", 400)).line)
    assert (openai["response"]["status_code"], openai["error"]) == (400, None)
    broken = json.loads(refused(ask(0, "openai"), "it is not JSON").line)
    assert broken["response"] is None
    assert broken["error"] == {"code": "invalid_line", "message": "line 1: it is not JSON"}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_json_object_is_a_failure(body: bytes) -> None:
    found = result(ask(), Reply(200, body))
    assert found.failed
    assert "(status 200) is no JSON object" in found.said


def test_half_a_character_is_written_as_json_allows() -> None:
    line = result(ask(), Reply(200, json.dumps({"choices": [{"text": "a\ud800"}]}).encode())).line
    assert json.loads(line)["text"] == "a\ud800"


def test_with_same_nothing_differs_from_run_to_run() -> None:
    def body(token: str, at: int) -> Reply:
        call = {"id": f"call_{token}", "function": {"name": "f", "arguments": "{}"}}
        choice = {"message": {"content": "a", "tool_calls": [call]}, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": at}}
        found = {
            "id": f"chatcmpl-{token}",
            "created": at,
            "choices": [choice],
            "usage": usage,
            "timings": {"a": at},
        }
        return Reply(200, json.dumps(found).encode())

    first, second = (result(ask(3, "openai"), body(*of), same=True) for of in (("aa", 5), ("bb", 6)))
    assert first.line == second.line
    assert b'"id": "chatcmpl-' in first.line
    assert b'"id": "call_' in first.line
    assert first.line != result(ask(4, "openai"), body("aa", 5), same=True).line
    assert result(ask(3, "openai"), body("aa", 5)).line != result(ask(3, "openai"), body("bb", 6)).line


@given(
    rows=st.lists(st.tuples(st.sampled_from(["own", "openai"]), st.text(max_size=9)), max_size=8),
    data=st.data(),
)
def test_what_was_written_is_known_again_and_half_a_line_is_cut_off(
    rows: list[tuple[Shape, str]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("out") / "o"
    lines = [
        result(ask(i, shape, digest=f"{i:012x}"), reply(text)).line for i, (shape, text) in enumerate(rows)
    ]
    assert [request_of(line) for line in lines] == [(i, f"{i:012x}") for i in range(len(rows))]
    whole = b"".join(lines)
    size = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:size])
    kept = whole[:size].count(b"\n")
    with OutputFile(path, resume=True, source=None) as output:
        done = FinishedRequests(output)
        assert done.count == kept
        for i in range(len(rows)):
            assert done.has(ask(i, digest=f"{i:012x}")) == (i < kept)
        done.check_all_met()
        for line in lines[kept:]:
            output.write(line)
    assert path.read_bytes() == whole


def test_a_short_write_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, full = tmp_path / "o", os.write, [False]

    def write(fd: int, data: bytes) -> int:
        if not full[0]:
            return real(fd, data)
        if len(data) > 3:
            return real(fd, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with OutputFile(path, resume=False, source=None) as output:
        output.write(b"first\n")
        monkeypatch.setattr("hetrun.tools.batch.output_file.os.write", write)
        full[0] = True
        with pytest.raises(NoRoom, match="No space left"):
            output.write(b"second\n")
        assert path.read_bytes() == b"first\n"
        full[0] = False
        output.write(b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_files_that_cannot_be_results(tmp_path: Path) -> None:
    path = tmp_path / "o"
    path.write_bytes(refused(ask(), "no").line)

    def refuses(why: str, at: Path, resume: bool = False, source: Path | None = None) -> None:
        with pytest.raises(UserError, match=why):
            OutputFile(at, resume, source)

    refuses("exists already: continue it with --resume", path)
    refuses("is the file with the requests", path, True, path)
    refuses("cannot be opened for writing: No such file", tmp_path / "no" / "o")
    refuses("cannot be opened for writing: Is a directory", tmp_path)
    with OutputFile(path, resume=True, source=None):
        refuses("another process is writing to", path, True)
    refuses("--resume needs a file", Path("/dev/null"), True)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"hello\n", "line 1 of .* is not a result of a batch"),
        (b"[" * 100_000 + b"\n", "line 1 of .* is not a result"),
        (b'{"index": -1, "request": "0123456789ab"}\n', "line 1 of .* is not a result"),
        (b'{"index": 0, "request": "zz"}\n', "line 1 of .* is not a result"),
        (b'{"index": 0, "request": "0123456789ab"}\n' * 2, "has two results of request 0"),
        (b'{"index": %d, "request": "0123456789ab"}\n' % FAR, "which cannot have been answered yet"),
    ],
)
def test_results_that_cannot_be_resumed(content: bytes, why: str, tmp_path: Path) -> None:
    (path := tmp_path / "o").write_bytes(content)
    with OutputFile(path, resume=True, source=None) as output, pytest.raises(UserError, match=why):
        FinishedRequests(output)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"\0" * 5000, b"\0" * 9 + b"\n" + b"\0" * 30, b'{"index": 0, "te', b""])
def test_nothing_but_zeros_or_half_a_line_is_begun_anew(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "o").write_bytes(content)
    with OutputFile(path, resume=True, source=None) as output:
        done = FinishedRequests(output)
        assert list(done.take_after_damage()) == []
        output.write(b"first\n")
    assert done.count == 0
    assert path.read_bytes() == b"first\n"


@pytest.mark.parametrize("content", [b"my notes", b"\0\0\0 ftyp\nmp4", b"a\tb\nc\td\n", b"GGUF\3\0\0\0\n\0"])
def test_a_file_of_something_else_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "o").write_bytes(content)
    with (
        OutputFile(path, resume=True, source=None) as output,
        pytest.raises(UserError, match=r"line 1 of .* is not a result of a batch"),
    ):
        FinishedRequests(output)
    assert path.read_bytes() == content


@pytest.mark.parametrize("damage", [b"\0" * 40, b"\xff\xfe\x80", b'{"index": 1, \0\0\0 "0123456789ab"}\n'])
def test_results_after_what_a_power_cut_has_left_are_written_again(damage: bytes, tmp_path: Path) -> None:
    path, lines = tmp_path / "o", [refused(ask(i), "no").line for i in range(4)]
    path.write_bytes(lines[0] + damage + b"rest\n" + lines[2] + lines[3] + lines[3][:9])
    with OutputFile(path, resume=True, source=None) as output:
        done = FinishedRequests(output)
        assert list(done.take_after_damage()) == [(2, lines[2]), (3, lines[3])]
        assert path.read_bytes() == lines[0]
        assert [done.has(ask(i)) for i in range(4)] == [True, False, True, True]
        output.write(lines[1])
    assert path.read_bytes() == lines[0] + lines[1]


def test_results_of_other_requests_are_not_gone_on_with(tmp_path: Path) -> None:
    (path := tmp_path / "o").write_bytes(refused(ask(), "no").line)
    with OutputFile(path, resume=True, source=None) as output:
        done = FinishedRequests(output)
        with pytest.raises(UserError, match=r"line 1 is not the request whose result is in "):
            done.has(ask(digest="ffffffffffff"))
        with pytest.raises(UserError, match="1 result of requests that are no longer in the file"):
            done.check_all_met()


def kept(line: bytes) -> bytes:
    """A line as it waits."""
    return b"%08x " % crc32(line) + line


def test_results_that_wait_are_found_again_until_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetrun.tools.batch.reorder_buffer.SPARE", 0)
    path = tmp_path / "o.waiting"
    lines = [result(ask(i, digest=f"{i:012x}"), reply("x" * i)).line for i in range(6)]
    with OutputFile(tmp_path / "o", False, None) as output, waiting_beside(output, resume=False) as file:
        held = LineHeap(file)
        for i in (5, 2, 4, 3):
            held.push(i, lines[i])
        assert path.read_bytes() == b"".join(kept(lines[i]) for i in (5, 2, 4, 3))
        for i in (2, 3, 4):
            assert held.next == i
            held.wrote(held.pop())
        # What is written by now need not lie there any more; more than that is not copied each time.
        assert path.read_bytes() == kept(lines[5])
        assert held.nbytes == len(lines[5])
    torn = kept(lines[3])[:30] + kept(lines[4])[30:]
    path.write_bytes(kept(lines[4]) + path.read_bytes() + kept(lines[1]) + torn + kept(lines[0])[:9])
    done = FinishedRequests()
    assert done.wait(1, "000000000001")
    with OutputFile(tmp_path / "o", True, None) as output, waiting_beside(output, resume=True) as file:
        held = LineHeap(file)
        assert list(held.take(done)) == [(4, lines[4]), (5, lines[5])]
        held.push(4, lines[4], keep=False)
        held.wrote(held.pop())
    assert not path.exists()


def test_without_resume_nothing_that_waited_is_taken(tmp_path: Path) -> None:
    (path := tmp_path / "o.waiting").write_bytes(refused(ask(), "no").line)
    with OutputFile(tmp_path / "o", False, None) as output, waiting_beside(output, resume=False) as file:
        assert list(LineHeap(file).take(FinishedRequests())) == []
    assert not path.exists()


def test_beside_what_is_no_file_nothing_is_made() -> None:
    with OutputFile(Path("/dev/null"), False, None) as output, waiting_beside(output, resume=False) as file:
        assert file is None
        held = LineHeap(file)
        held.push(1, b"x")
        held.wrote(held.pop())
    assert not Path("/dev/null.waiting").exists()

"""What is asked of hetrun. A check returns texts that must be the same on a quiet machine and a busy one."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import random
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import TypeVar

from hetrun.pictures.decoder import PictureDecoder
from tests.busy.rig import HANG_S, Answer, Lost, Rig, asking, content, lines
from tests.loader.hub_stand_in import Repository, running
from tests.support.pictures import png

T = TypeVar("T")
A = TypeVar("A")

CHAT = "/v1/chat/completions"
COLOURS = ("run", "Name three colours.", "-n", "6", "--temp", "0")
WORDS = "time water and the of people small under house light seven is".split()
AT_A_TIME = 8
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer", "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
LONG_TOKENS = 500
LOOKS = ("/health", "/v1/models", "/slots", "/metrics", "/machine", "/plan")  # answered during a long prompt
CONVERSATION_BYTES = 3 << 20
BATCH = 100
PICTURE = 1600, 1500  # pixels
DOWNLOAD = 8 << 20  # bytes
AMPLE, SCARCE = 3.0, 0.6  # times as long as a burst of requests took: their deadlines
_numbers = count()


def together(act: Callable[[A], T], each: Sequence[A]) -> list[T]:
    """All at a time, from threads."""
    with ThreadPoolExecutor(len(each)) as threads:
        return list(threads.map(act, each))


def prose(seed: int, n: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(n))


# --- commands


def run_here(rig: Rig) -> list[str]:
    """`run` loads the model by itself."""
    return [rig.hetrun(*COLOURS, "-m", rig.model, "--no-server")]


def first_start(rig: Rig) -> list[str]:
    """With nothing known of this machine: backends and the disk are tried, plans measured."""
    with TemporaryDirectory(dir=rig.folder) as cache:
        env = {"XDG_CACHE_HOME": cache, "HETRUN_DETERMINISTIC": "0"}
        text = rig.hetrun(*COLOURS, "-m", rig.model, "--no-server", env=env)
    return ["an answer" if text.strip() else "none"]


def doctor(rig: Rig) -> list[str]:
    """What works here, but for what it says of busy cores."""
    said = rig.hetrun("doctor", "--json", code=None)
    rig.look_through("doctor", said)
    found = json.loads(said)
    rows = found if isinstance(found, list) else found["findings"]
    return [f"{row['name']} {row['state']}" for row in rows if row["group"] == "backends"]


def run_there(rig: Rig) -> list[str]:
    """`run` uses the server."""
    done = rig.spoken(*COLOURS, "-m", rig.model, "-v")
    if "answered by your server" not in done.stderr:
        raise Lost(f"run did not use the server: {done.stderr[-300:]}")
    return [done.stdout]


def run_url(rig: Rig) -> list[str]:
    """`run` by the server's address."""
    url = f"http://127.0.0.1:{rig.port}"
    return [rig.hetrun(*COLOURS, "--url", url)]


def ps(rig: Rig) -> list[str]:
    """`ps` lists the server with its model."""
    [server] = json.loads(rig.hetrun("ps", "--json"))
    if "error" in server:
        raise Lost(f"ps: {server['error']}")
    return [f"{model['name']} {model['status']}" for model in server["models"]]


def restart(rig: Rig) -> list[str]:
    """`stop`, and the next start."""
    rig.stop()
    rig.start()
    return []


def batch(rig: Rig) -> list[str]:
    """A file of prompts, ended in the middle and resumed."""
    questions, answers = rig.folder / "questions.jsonl", rig.folder / f"answers-{next(_numbers)}.jsonl"
    questions.write_text(lines([prose(seed, 6) for seed in range(BATCH)]))
    more = ("-n", "4", "--temp", "0", "--raw", "-o", str(answers))
    command = ("run", "-f", str(questions), "-m", rig.model, *more)
    with (rig.folder / "batch.log").open("wb+") as log:
        first = subprocess.Popen(rig.command(*command), env=rig.env, stdout=log, stderr=log)
        end = monotonic() + HANG_S
        while first.poll() is None and monotonic() < end:
            if answers.exists() and answers.read_bytes().count(b"\n") >= BATCH // 5:
                first.send_signal(signal.SIGKILL)
            sleep(0.05)
        first.kill()
        first.wait()
    rig.hetrun(*command, "--resume")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    if sorted(row["index"] for row in rows) != list(range(BATCH)):
        raise Lost(f"batch: {len(rows)} of {BATCH} results")
    if wrong := [row for row in rows if "error" in row]:
        raise Lost(f"batch: {wrong[0]}")
    return [row["text"] for row in sorted(rows, key=lambda row: int(row["index"]))]


def pull(rig: Rig) -> list[str]:
    """A download from a hub on this machine."""
    data = random.Random(0).randbytes(DOWNLOAD)
    name = f"o/r{next(_numbers)}"
    with running() as hub:
        hub.repositories[name] = Repository({"m-Q8_0.gguf": b"GGUF" + data})
        more = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(rig.folder / "hf")}
        path = rig.hetrun("pull", name, env=more).strip()
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest()]


def screen(rig: Rig) -> list[str]:
    """The chat in a terminal: a question, an answer, the end."""
    ours, theirs = pty.openpty()
    command = rig.command("chat", "--url", f"http://127.0.0.1:{rig.port}", "-n", "5", "--temp", "0")
    env = rig.env | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        killer = _after(HANG_S, process)
        try:
            with killer:
                said = _read_until(ours, b"\xe2\x94\x82|>|smollm|tiny|model")
                os.write(ours, b"hello\r")
                said += _read_until(ours, b"tokens/s")
                os.write(ours, b"\x11")  # Ctrl+Q
                while more := _read(ours):
                    said += more
                if process.wait():
                    raise Lost(f"chat: exit code {process.returncode}: {said[-300:]!r}")
        finally:
            process.kill()
            os.close(ours)
    rig.look_through("chat", said.decode(errors="replace"))
    return []


@contextmanager
def _after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a process that hangs."""
    from threading import Timer

    timer = Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the terminal's other end is closed
        return b""


def _read_until(descriptor: int, form: bytes) -> bytes:
    said = b""
    while not re.search(form, said):
        if not (more := _read(descriptor)):
            raise Lost(f"chat: it ended before {form!r}: {said[-300:]!r}")
        said += more
    return said


# --- requests


def chats(rig: Rig) -> list[str]:
    """Several at a time, half of them streamed."""

    def chat(i: int) -> str:
        body = asking(f"{prose(i, 8)}: what is this about?", 8)
        return rig.streamed(CHAT, body) if i % 2 else content(rig.post(CHAT, body))

    return together(chat, range(AT_A_TIME))


def schema(rig: Rig) -> list[str]:
    """An answer in the form of a JSON schema."""
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    return [content(rig.post(CHAT, asking("Which colour, and how many?", 24, response_format=form)))]


def tools(rig: Rig) -> list[str]:
    """A call of a tool that must be called."""
    body = asking("Paint the house.", 40, tools=[TOOL], tool_choice="required")
    return [re.sub(r"call_\w+", "call", content(rig.post(CHAT, body)))]


def template(rig: Rig) -> list[str]:
    """A long conversation, rendered by the model's template."""
    text = prose(1, 200)
    turns = [
        {"role": "assistant" if i % 2 else "user", "content": text}
        for i in range(CONVERSATION_BYTES // len(text) | 1)
    ]
    said = rig.post("/apply-template", {"messages": turns})["prompt"]
    return [hashlib.sha256(said.encode()).hexdigest()]


def picture(_: Rig) -> list[str]:
    """A large one, decoded in its process."""
    with PictureDecoder() as decoder:
        found = decoder.decode(png(*PICTURE))
    return [f"{found.width} x {found.height}"]


def embeddings(rig: Rig) -> list[str]:
    """Vectors of several texts."""
    rows = rig.post("/v1/embeddings", {"input": [prose(i, 20) for i in range(4)]})["data"]
    return [json.dumps(row["embedding"]) for row in rows]


def slow_client(rig: Rig) -> list[str]:
    """One that sends its request and reads its answer in small parts."""
    body = json.dumps(asking("Name three colours.", 8)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    data, said = head.encode() + body, b""
    with socket.create_connection(("127.0.0.1", rig.port), timeout=HANG_S) as client:
        for at in range(0, len(data), 16):
            client.sendall(data[at : at + 16])
            sleep(0.1)
        while part := client.recv(64):
            said += part
            sleep(0.02)
    status, _, rest = said.partition(b"\r\n")
    if b" 200 " not in status:
        raise Lost(f"a slow client: {said[-300:]!r}")
    return [content(json.loads(rest.partition(b"\r\n\r\n")[2]))]


def queue(rig: Rig) -> list[str]:
    """Requests behind a long prompt that no cache has, and looks at the server meanwhile."""
    unseen = next(_numbers)
    with ThreadPoolExecutor(1) as thread:
        body = {"prompt": f"{unseen} {prose(unseen, LONG_TOKENS)}", "max_tokens": 1, "temperature": 0}
        long = thread.submit(rig.post, "/v1/completions", body)
        sleep(0.2)
        short = [prose(i, 5) for i in range(4)]
        said = together(
            lambda text: _seen(rig, text) if text in LOOKS else _short(rig, text), (*LOOKS, *short)
        )
        long.result()
    return said


def _short(rig: Rig, text: str) -> str:
    return content(rig.post(CHAT, asking(text, 4)))


def _seen(rig: Rig, path: str) -> str:
    answer = rig.ask("GET", path)
    if answer.status != 200:
        raise Lost(f"GET {path} during a long prompt: {answer.status}: {answer.body[:300]!r}")
    return path


def deadlines(rig: Rig) -> list[str]:
    """What would be served in time is not refused, and what is admitted comes: each with ample time."""

    def burst(first: int, deadline_s: float | None) -> list[Answer]:
        more = {} if deadline_s is None else {"deadline_s": deadline_s}
        bodies = [asking(prose(first + i, 12), 8, ignore_eos=True, **more) for i in range(AT_A_TIME)]
        return together(lambda body: rig.ask("POST", CHAT, body), bodies)

    took = max(answer.seconds for answer in burst(1000 + 100 * next(_numbers), None))
    ample = burst(100, AMPLE * took)
    if late := [answer for answer in ample if answer.status != 200]:
        raise Lost(f"a deadline of {AMPLE:g} times {took:.1f} s: {len(late)} refused: {late[0].body[:300]!r}")
    scarce = [answer.status for answer in burst(1000 + 100 * next(_numbers), max(SCARCE * took, 0.01))]
    served, refused = scarce.count(200), scarce.count(429)
    late_s = len(scarce) - served - refused
    rig.notes.append(
        f"deadlines of {SCARCE:g} times what {AT_A_TIME} requests took ({took:.1f} s): {served} served, "
        f"{refused} refused at once, {late_s} late"
    )
    return [content(answer.json) for answer in ample]


def forecast(rig: Rig) -> list[str]:
    """What `plan` says of the speed, and what it is."""
    rates = json.loads(rig.hetrun("plan", "-m", rig.model, "--json"))["rates"] or {}
    unseen = 1000 + next(_numbers)
    body = {
        "prompt": f"{unseen} {prose(unseen, 200)}",
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    found = rig.post("/v1/completions", body)["timings"]
    for name, key in (("prompts", "prompt_per_second"), ("answers", "predicted_per_second")):
        if rates.get(name):
            rig.notes.append(
                f"{name}: plan says {rates[name]:.1f} tokens/s, measured {found[key]:.1f}, ratio "
                f"{found[key] / rates[name]:.2f}"
            )
    return []


BEFORE: tuple[Callable[[Rig], list[str]], ...] = (run_here, first_start, doctor, picture, pull, batch)
SERVED: tuple[Callable[[Rig], list[str]], ...] = (
    *(chats, schema, tools, template, embeddings, slow_client, queue, deadlines, forecast),
    *(run_there, run_url, ps, screen, restart),
)
CHECKS = {check.__name__: check for check in (*BEFORE, *SERVED)}

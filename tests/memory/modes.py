"""Every documented mode: what is run, on which model, and with how much memory.

An answer is what must be the same with and without a control group: texts, vectors, or the hash of a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hetrun.tools.bench.serving.http_load import CHAT, ServerEndpoint
from tests.loader.hub_stand_in import Repository, running
from tests.memory.models import TINY
from tests.memory.trial import Mode, Run
from tests.support.pictures import png

SKY = "Why is the sky blue?"
STORY = "The ship sailed in the morning, and the keeper of the light wrote down its name and the wind. "
N = "24"
Answer = Callable[[Run], object]
GREEDY = ("--temp", "0")


def run_text(
    *options: str, model: str = "smollm2", n: str = N, prompt: str = SKY, ram: bool = True
) -> Answer:
    """One prompt, one answer."""

    def answer(run: Run) -> object:
        limit = run.ram if ram else ()
        return run.hetrun(
            "run", "-m", str(run.models.find(model)), prompt, "-n", n, *GREEDY, *limit, *options
        )

    return answer


def raw(model: str, *options: str, n: str = "12", words: int = 40) -> Answer:
    """A text of a synthetic model: no template, no end of the text before its time."""
    prompt = (STORY * (words // 18 + 1)).split()[:words]
    return run_text("--raw", "--ignore-eos", *options, model=model, n=n, prompt=" ".join(prompt))


def fill_context(*options: str) -> Answer:
    """A prompt and an answer that take all of a context which is as long as memory has room for."""

    def answer(run: Run) -> object:
        plan = json.loads(run.hetrun("plan", "--json", *run.ram, *options))
        tokens = int(plan["context"]) // 64 * 64  # what is free for it is not the same to the byte
        prompt = (STORY * 1000)[: 4 * tokens]  # 20 tokens in 97 letters: five letters each
        words = prompt.split()[: int(tokens * 0.8)]
        asked = ("run", " ".join(words), "--raw", "--ignore-eos", "-n", str(tokens - int(tokens * 0.9)))
        return tokens, run.hetrun(*asked, "-c", str(tokens), *GREEDY, *run.ram, *options)

    return answer


def batch(run: Run) -> object:
    """Fifty prompts of different lengths at once."""
    lines = [{"prompt": f"{STORY * (1 + n % 5)}Sum up number {n}.", "max_tokens": 16} for n in range(50)]
    file, out = run.room / "prompts.jsonl", run.room / "answers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.hetrun(
        "run", "-m", str(run.models.find("smollm2")), "-f", str(file), "-o", str(out), *GREEDY, *run.ram
    )
    return [json.loads(line)["text"] for line in out.read_text().splitlines()]


def embeddings(run: Run) -> object:
    """Texts as vectors, in a batch of OpenAI's format."""
    file, out = run.room / "texts.jsonl", run.room / "vectors.jsonl"
    bodies = ({"model": "any", "input": [f"{STORY * (1 + n)}{n}" for n in range(8)]} for _ in range(4))
    lines = [
        {"custom_id": f"e{n}", "method": "POST", "url": "/v1/embeddings", "body": body}
        for n, body in enumerate(bodies)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.hetrun("run", "-m", str(run.models.find("smollm2")), "-f", str(file), "-o", str(out), *run.ram)
    answers = [json.loads(line)["response"]["body"]["data"] for line in out.read_text().splitlines()]
    return [[round(x, 2) for x in item["embedding"][:8]] for data in answers for item in data]


def prompt_file(run: Run) -> object:
    """The prefix cache on disk: written by one process, read by the next."""
    file = run.room / "prompts.cache"
    words = ("-m", str(run.models.find("smollm2")), "--prompt-cache", str(file), *GREEDY, *run.ram, "-n", N)
    first = run.hetrun("run", STORY * 30 + "What did the keeper write?", *words)
    if not file.stat().st_size:
        raise ValueError("nothing was kept")
    return first, run.hetrun("run", STORY * 30 + "Who sailed?", *words)


def conversation(run: Run) -> object:
    """Turns of `run -i`, of which each finds those before it in the prefix cache in memory."""
    turns = "".join(f"{STORY * 3}{n}?\n" for n in range(8))
    words = ("-m", str(run.models.find("smollm2")), *GREEDY, *run.ram, "-n", N)
    return run.hetrun("run", "-i", *words, stdin=turns)


def convert(model: str, kind: str) -> Answer:
    def answer(run: Run) -> object:
        out = run.room / "out.gguf"
        run.hetrun("convert", str(run.models.find(model)), "-q", kind, "-o", str(out), "--allow-requantize")
        return digest(out)

    return answer


def repack(model: str, *options: str) -> Answer:
    def answer(run: Run) -> object:
        out = run.room / "out.gguf"
        run.hetrun("repack", str(run.models.find(model)), "-o", str(out), *options)
        return digest(out)

    return answer


def check(run: Run) -> object:
    """Every weight is looked at; the line begins with the file's name."""
    return run.hetrun("check", str(run.models.find("1b"))).partition(":")[2]


def pull(run: Run) -> object:
    """A download of a file that is several times the budget."""
    path = run.models.find("1b")
    with running() as hub:
        hub.repositories["o/r"] = Repository({path.name: path.read_bytes(), "README.md": b"made"})
        home = run.room / "hub"
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
        replace(run, env={**run.env, **env}).hetrun("pull", "o/r")
    return digest(next(home.rglob(path.name)))


def read_picture(run: Run) -> object:
    """Pictures of several sizes, decoded in a process of their own and encoded by the tower."""
    text, tower = run.models.pair()
    said = []
    for width, height in ((64, 48), (640, 480), (3000, 2000)):
        file = run.room / f"{width}.png"
        file.write_bytes(png(width, height))
        words = ("-m", str(text), "--mmproj", str(tower), "-a", str(file), "--ignore-eos", "-n", "8")
        said.append(run.hetrun("run", *words, *GREEDY, *run.ram, "What is this?"))
    return said


CHAT_PROGRAM = """
import asyncio, json
from hetrun.client.engine_client import WorkerClient
from hetrun.client.worker_main import CHAT
from hetrun.config import Settings
from tests.tools.chat_memory import InWorker
import sys
models, ram = sys.argv[1:3], int(sys.argv[3])
with asyncio.Runner() as runner:
    for model in models:
        client = WorkerClient(Settings.resolve(model=model, ram=ram), engine=CHAT)
        try:
            runner.run(client.info())
            chat = InWorker(client, runner)
            messages = []
            for n in range(4):
                messages.append({"role": "user", "content": f"Tell me of light number {n}."})
                messages.append({"role": "assistant", "content": chat.say(messages, 24)})
            print(json.dumps(messages))
        finally:
            runner.run(client.close())
"""


def chat(run: Run) -> object:
    """The chat's engine in a worker: four turns with a model, then another one is opened in its place."""
    paths = [str(run.models.find(name)) for name in ("smollm2", TINY[0])]
    return run.program(CHAT_PROGRAM, *paths, str(run.budget))


def serve_one(run: Run) -> object:
    """Sixteen conversations at once, then a second turn of each."""
    with run.serve("-m", str(run.models.find("smollm2")), *run.ram, *GREEDY) as endpoint:
        bodies = [_body(f"{STORY * (n % 6)}Number {n}?", n=16) for n in range(16)]
        first = asyncio.run(_ask_all(endpoint, bodies))
        return first, asyncio.run(_ask_all(endpoint, bodies[:4]))


def serve_four(run: Run) -> object:
    """Four models that are loaded by their first requests, and answer at the same time."""
    for name in TINY:
        run.models.find(name)
    folder = run.room / "models"
    folder.mkdir()
    for name in TINY:
        (folder / f"{name}.gguf").symlink_to(run.models.find(name))
    with run.serve("--models", str(folder), "--models-max", "4", *run.ram, *GREEDY) as endpoint:
        bodies = [_body(f"Number {n}?", n=8, model=TINY[n % 4]) for n in range(16)]
        said = asyncio.run(_ask_all(endpoint, bodies))
        listed = json.loads(asyncio.run(_get(endpoint, "/v1/models")))
        return said, len(listed["data"])


def digest(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _body(text: str, n: int, **more: object) -> Mapping[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0, **more}


async def _ask_all(endpoint: ServerEndpoint, bodies: Sequence[Mapping[str, object]]) -> list[str]:
    async def one(body: Mapping[str, object]) -> str:
        connection = await endpoint.connect()
        try:
            answer = await connection.post(json.dumps(body).encode(), lambda event, at: None, CHAT)
            return str(json.loads(answer)["choices"][0]["message"]["content"])
        finally:
            connection.leave()

    return await asyncio.gather(*map(one, bodies))


async def _get(endpoint: ServerEndpoint, path: str) -> bytes:
    connection = await endpoint.connect()
    try:
        return await connection.get(path)
    finally:
        connection.leave()


def no_torch() -> str:
    """Why its backend cannot be tried here."""
    return "" if find_spec("torch") else "torch is not installed"


MODES = (
    Mode("resident", "smollm2", 320, run_text()),
    Mode("the least", "smollm2", None, raw("smollm2", words=14)),
    Mode("no --ram: what the group leaves", "smollm2", 300, run_text(ram=False)),
    Mode("streamed dense", "1b", 400, raw("1b")),
    Mode("streamed dense, the least", "1b", None, raw("1b", words=14)),
    Mode("streamed, a context that fills", "smollm2", 200, fill_context()),
    Mode("streamed mixture, slots", "mixture", 400, raw("mixture")),
    Mode("mapped weights", "1b", 400, raw("1b", "--streaming", "mmap"), is_mapped=True),
    Mode("KV in q8_0, a context that fills", "smollm2", 180, fill_context("--kv-type", "q8_0")),
    Mode("batch of fifty prompts", "smollm2", 224, batch),
    Mode("embeddings", "smollm2", 224, embeddings),
    Mode("prefix cache in memory", "smollm2", 224, conversation),
    Mode("prefix cache on disk", "smollm2", 224, prompt_file),
    Mode("speculation, lookup", "smollm2", 224, run_text("--spec", "lookup")),
    Mode("speculation, MTP", "mtp", 480, raw("mtp", "--spec", "mtp")),
    Mode("measured plan", "smollm2", 256, run_text("--planner", "measured")),
    Mode("pictures", TINY[0], 256, read_picture),
    Mode("torch (amx-lean)", "smollm2", 768, run_text("--backend", "amx-lean"), missing=no_torch),
    Mode("backend libllama", "smollm2", 512, run_text("--backend", "libllama")),
    Mode("convert f16 to q4_k_m", "wide", 256, convert("wide", "q4_k_m")),
    Mode("repack", "1b", 128, repack("1b")),
    Mode("repack a mixture", "mixture", 128, repack("mixture")),
    Mode("check", "1b", 128, check),
    Mode("pull", "1b", 128, pull),
    Mode("chat, another model opened", "smollm2", 256, chat),
    Mode("serve", "smollm2", 288, serve_one),
    Mode("serve four on demand", TINY[0], 1100, serve_four),
)

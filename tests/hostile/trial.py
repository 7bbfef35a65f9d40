"""What is done with a stranger's file, in a process that may die of it: everything that a user can ask for.

The child is given models that are as they should be, then reads a path from each line, and writes a line as
each stage begins and one at the end, so that whoever watches knows in which stage it hangs or died. Any error
that is no UserError is a finding, and so is one whose text is no sentence that names the file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetrun import LLM, SamplingParams
from hetrun import model as models
from hetrun.anatomy import entries
from hetrun.chat import ChatTemplate
from hetrun.chat.renderer import TemplateWorker
from hetrun.cli import inspection
from hetrun.convert import describe, plan
from hetrun.convert.recipe import by_option
from hetrun.errors import BackendError, ModelFileError, UserError
from hetrun.planner import Options, Wishes
from hetrun.source import ModelSource, build_graph, open_model, open_vocabulary
from hetrun.tokenizer import Tokenizer

TEXT = "The engine, <|im_end|> </s> runs\n\tdéjà vu 你好 \U0001f600 \x00\x80"
MESSAGES = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi!"})
BACKENDS = ("reference", "llamacpp")
MOST_GROWTH = 64 << 20
LONGEST = 1000  # characters of a sentence


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: loaded, refused, nan (which the weights may well say), or a finding."""

    end: str
    stage: str = ""
    what: str = ""  # a sentence, or a name for the finding that is the same whenever it is the same mistake
    trace: str = ""
    peak: int = 0  # bytes above what the process had before


def attempt(path: Path, begin: Callable[[str], None]) -> Outcome:
    """Do everything with one model; `begin` hears the name of each stage."""
    _reset_peak()
    before = _memory("VmRSS")
    refused = nan = None
    stage = "open"
    try:
        begin(stage)
        source = open_model(path)
    except UserError as e:
        return _judged(Outcome("refused", stage, str(e)), e, path, before)
    except Exception as e:
        return _finding(stage, e)
    for stage, work in STAGES.items():
        begin(stage)
        try:
            work(source, path)
        except UserError as e:
            judged = _judged(Outcome("refused", stage, str(e)), e, path, before)
            if judged.end == "finding":
                return judged
            if stage != "convert":  # what has no file of GGUF may run all the same
                refused = refused or judged
        except BackendError as e:
            if "NaN" not in str(e):
                return _finding(stage, e)
            nan = nan or Outcome("nan", stage, str(e))
        except Exception as e:
            return _finding(stage, e)
    return _judged(refused or nan or Outcome("loaded"), None, path, before)


def _judged(outcome: Outcome, error: UserError | None, path: Path, before: int) -> Outcome:
    """A refusal must be a sentence that names the file, and nothing may take much memory."""
    peak = _memory("VmHWM") - before
    folder = path if path.is_dir() else path.parent
    size = sum(p.stat().st_size for p in folder.iterdir())
    fault = ""
    if error is not None:
        text = str(error)
        if isinstance(error, ModelFileError) and str(folder) not in text:
            fault = "the error does not name the file"
        elif not text.isprintable():
            fault = "the error is not printable"
        elif len(text) > LONGEST:
            fault = "the error is longer than a sentence"
    if peak > size + MOST_GROWTH:
        fault = "memory grew by more than the file and 64 MiB"
    if fault:
        trace = traceback.format_exc() if error else ""
        what = f"{fault} ({_place(error)})" if error else fault
        return Outcome("finding", outcome.stage, what, f"{trace}\n{outcome.what!r}, {peak >> 20} MiB", peak)
    return Outcome(outcome.end, outcome.stage, outcome.what, peak=peak)


def _finding(stage: str, error: BaseException) -> Outcome:
    return Outcome("finding", stage, f"{type(error).__name__} ({_place(error)})", traceback.format_exc())


def _place(error: BaseException) -> str:
    """Where an error was raised: the innermost line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "site-packages" not in f.filename and "/lib/python" not in f.filename]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"


def _memory(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


# --- the stages


def look(source: ModelSource, path: Path) -> None:
    """What `hetrun inspect` shows, as text and as JSON."""
    found = list(entries(source))
    json.dumps(inspection.to_json(source, found, tensors=True, full=True))
    for line in inspection.to_text(source, found, tensors=True):
        line.encode()


def graph(source: ModelSource, path: Path) -> None:
    """The forward step."""
    build_graph(source)


def planned(source: ModelSource, path: Path) -> None:
    """What `hetrun plan` shows, with each backend alone and with what hetrun chooses."""
    for names in (*((name,) for name in BACKENDS), None):
        models.describe(source, Options(Wishes(threads=1), names))


def vocabulary(source: ModelSource, path: Path) -> None:
    """A text to tokens and back, in every way."""
    if (found := open_vocabulary(source)) is None:
        return
    try:
        tokenizer = Tokenizer(found)
        tokenizer.decode(tokenizer.encode(TEXT))
        tokenizer.encode(tokenizer.bos_text + TEXT + tokenizer.eos_text)
        for special in (True, False):
            found.tokenize(TEXT, special, special)
            found.tokenize("", special, special)
        for token in {*range(min(found.n_tokens, 600)), found.n_tokens - 1}:
            tokenizer.piece(token)
            tokenizer.is_end(token)
    finally:
        found.close()


def template(source: ModelSource, path: Path) -> None:
    """A conversation through the model's template."""
    worker_of(ChatTemplate.of_model(source)).render(MESSAGES, bos_token="<s>", eos_token="</s>")


@lru_cache(maxsize=2)
def worker_of(template: ChatTemplate) -> TemplateWorker:
    """Most mutations leave the template alone, and need no process of their own."""
    return TemplateWorker(template)


def converted(source: ModelSource, path: Path) -> None:
    """What `hetrun convert` would write."""
    recipe = by_option("q8_0")
    plan(source, recipe)
    describe(source, recipe)


def run(backend: str) -> Callable[[ModelSource, Path], None]:
    """Load the weights and generate two tokens, of numbers and of messages."""

    def runs(source: ModelSource, path: Path) -> None:
        ctx = 64 if backend == "reference" else None
        with LLM(path, backends=[backend], threads=1, ctx=ctx) as llm:
            two = SamplingParams(max_tokens=2, temperature=0)
            llm.generate([[t % llm.n_vocab for t in (2, 40, 77)]], two)
            if source.vocabulary:
                llm.chat(MESSAGES, SamplingParams(max_tokens=2, seed=1))

    return runs


STAGES: Mapping[str, Callable[[ModelSource, Path], None]] = {
    "inspect": look,
    "graph": graph,
    "plan": planned,
    "vocabulary": vocabulary,
    "template": template,
    "convert": converted,
    **{f"run on {name}": run(name) for name in BACKENDS},
}


# --- the child


def main() -> None:
    """Take paths from stdin until it ends, and answer on the stdout that was there at the beginning."""
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def say(**facts: Any) -> None:  # noqa: ANN401
        answers.write(json.dumps(facts) + "\n")

    for good in sys.argv[1:]:  # so that libraries are not counted as somebody's memory
        if (outcome := attempt(Path(good), lambda stage: None)).end != "loaded":
            sys.exit(f"{good} should load: {outcome}")
    say(stage="ready")
    for line in sys.stdin:
        outcome = attempt(Path(json.loads(line)), lambda stage: say(stage=stage))
        say(**asdict(outcome))


if __name__ == "__main__":
    main()

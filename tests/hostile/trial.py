"""What is done with a stranger's file, in a process that may die of it: everything that a user can ask for.

The child is given models that are as they should be, then reads a path from each line, and writes a line as
each stage begins and one at the end, so that the parent knows in which stage it hangs or died. Any error
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
from pathlib import Path
from typing import Any

import numpy as np

from hetrun import LLM, SamplingParams
from hetrun.cli.reports import inspect
from hetrun.errors import BackendError, HetrunError, ModelFileError, OptionError, UserError
from hetrun.executor import planned_model as models
from hetrun.executor.plan_prediction import predict_plans
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.architectures import build_graph, is_known
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.loader.tensor_list import entries
from hetrun.loader.weight_check import first_bad_value
from hetrun.planner.options import Options, Wishes
from hetrun.text.chat import ChatTemplate
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.tokenizer import Tokenizer, open_vocabulary
from hetrun.tools.check_model import check_model
from hetrun.tools.convert import describe, plan
from hetrun.tools.convert.gguf_writer import header
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.convert.reorder import layout, metadata

TEXT = "The engine, <|im_end|> </s> runs\n\tdéjà vu 你好 \U0001f600 \x00\x80"
MESSAGES = ({"role": "system", "content": "Hm."}, {"role": "user", "content": "Hi!"})
BACKENDS = ("reference", "llamacpp")
MOST_GROWTH = 64 << 20
LONGEST = 1000  # characters of a sentence
MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: loaded, refused, nan (results that are no numbers, as weights may give), or a finding."""

    end: str
    stage: str = ""
    what: str = ""  # a sentence, or a name for the finding that is the same whenever it is the same mistake
    trace: str = ""
    peak: int = 0  # bytes above what the process had before


class Finding(Exception):
    """What must not happen."""


def attempt(path: Path, begin: Callable[[str], None], check: bool = False) -> Outcome:
    """Do everything with one model; `begin` hears the name of each stage, `check` asks `hetrun check` too."""
    stage, peak = "open", 0

    def watched(name: str) -> None:
        nonlocal stage
        stage = name
        begin(name)

    try:
        before, files = _reset_peak(), _memory("RssFile")
        refusals = _try_all(path, watched, check)
        # Pages of libraries come and go as the machine has room for them.
        peak = _memory("VmHWM") - before - max(_memory("RssFile") - files, 0)
        if peak > MOST_GROWTH + _bytes_in(_folder(path)):
            raise Finding(f"memory grew by {peak >> 20} MiB")
    except Exception as e:
        return Outcome("finding", stage, f"{_kind(e)} ({_place(e)})", traceback.format_exc())
    for stage, error in sorted(refusals.items(), key=lambda item: _is_nan(item[1])):
        return Outcome("nan" if _is_nan(error) else "refused", stage, str(error), peak=peak)
    return Outcome("loaded", peak=peak)


def _try_all(path: Path, begin: Callable[[str], None], check: bool) -> dict[str, HetrunError]:
    """What each stage was refused with; anything else is raised."""
    begin("open")
    try:
        source = open_model(path)
    except UserError as e:
        _judge(e, "open", path)
        return {"open": e}
    refusals: dict[str, HetrunError] = {}
    for stage, work in {**STAGES, **({"whole": whole} if check else {})}.items():
        begin(stage)
        try:
            work(source, path)
        except (UserError, BackendError) as e:
            _judge(e, stage, path)
            refusals[stage] = e
    # What cannot be converted may run all the same, and so may weights of which some are no numbers.
    refusals = {stage: e for stage, e in refusals.items() if stage not in ("convert", "weights")}
    if check:
        begin("check")
        _compare(path, refusals)
    return refusals


def _compare(path: Path, refusals: Mapping[str, HetrunError]) -> None:
    """`hetrun check --structure` must refuse what is refused later, and nothing else.

    It reads no weights, and does not try all that a library tries which runs the whole model.
    """
    early = [e for stage, e in refusals.items() if stage != "whole" and "NaN or infinity" not in str(e)]
    files = [e for e in early if isinstance(e, ModelFileError)]
    try:
        check_model(path)
    except UserError as e:
        _judge(e, "check", path)
        if not refusals:
            raise Finding("check refuses what runs") from e
    else:
        if files:
            raise Finding(f"check does not see {_place(files[0])}") from files[0]


def _judge(error: UserError | BackendError, stage: str, path: Path) -> None:
    """A refusal must be a sentence that names the file."""
    text = str(error)
    if isinstance(error, BackendError) and not _is_nan(error):
        raise error
    if isinstance(error, ModelFileError) and str(_folder(path)) not in text:
        raise Finding("the error does not name the file") from error
    # The user asked for nothing that could be wrong, but for tokens that the model may not have.
    if (
        isinstance(error, OptionError)
        and stage not in ("convert", "vocabulary")
        and "the text has" not in text
    ):
        raise Finding("the user's options are blamed") from error
    if not text.isprintable():
        raise Finding("the error is not printable") from error
    if len(text) > LONGEST:
        raise Finding("the error is longer than a sentence") from error


def _bytes_in(folder: Path) -> int:
    """Bytes of a folder's files, without holes in them."""
    return sum(min(f.st_size, 512 * f.st_blocks) for f in map(os.lstat, folder.iterdir()))


def _is_nan(error: HetrunError) -> bool:
    return isinstance(error, BackendError) and "the logits hold" in str(error)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _kind(error: BaseException) -> str:
    return str(error) if isinstance(error, Finding) else type(error).__name__


def _place(error: BaseException) -> str:
    """Where an error, or what it is about, was raised: the innermost line of ours."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    ours = [f for f in frames if "site-packages" not in f.filename and "/lib/python" not in f.filename]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"


def _memory(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _reset_peak() -> int:
    """Bytes that the process has now, from which on the most that it has is counted."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return _memory("VmRSS")


# --- the stages


def opened(source: ModelSource | None, path: Path) -> ModelSource:
    """The header of each file."""
    return open_model(path)


def look(source: ModelSource, path: Path) -> None:
    """What `hetrun inspect` shows, as text and as JSON."""
    found = list(entries(source))
    json.dumps(inspect.to_json(source, found, tensors=True, full=True))
    for line in inspect.to_text(source, found, tensors=True):
        line.encode()


def graph(source: ModelSource, path: Path) -> None:
    """The forward step, of those that hetrun has."""
    if is_known(source):
        build_graph(source)


def planned(source: ModelSource, path: Path) -> None:
    """What `hetrun plan` shows, with each backend alone and with what hetrun chooses."""
    alone = [(name,) for name in BACKENDS] if is_known(source) else []
    for names in (*alone, None):
        predict_plans(source, Options(Wishes(threads=1), names))


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
    wanted = ChatTemplate.of_model(source)
    # Most mutations leave it as their seed has it, and need no process of their own.
    worker = _workers.pop(wanted, None) or TemplateWorker(wanted)
    _workers[wanted] = worker
    if len(_workers) > MOST_WORKERS:
        _workers.pop(next(iter(_workers))).close()
    worker.render(MESSAGES, bos_token="<s>", eos_token="</s>")


_workers: dict[ChatTemplate, TemplateWorker] = {}


def weights(source: ModelSource, path: Path) -> None:
    """What `hetrun check` reads."""
    if bad := first_bad_value(source):
        raise bad


def converted(source: ModelSource, path: Path) -> None:
    """What `hetrun convert` would write."""
    recipe = by_option("q8_0")
    plan(source, recipe)
    describe(source, recipe)


def repacked(source: ModelSource, path: Path) -> None:
    """What `hetrun repack` would write before the tensors."""
    if isinstance(source, GGUFModel):
        header(metadata(source.file), layout(source).tensors)


def step(source: ModelSource, path: Path) -> None:
    """Load the weights and take two steps on the reference backend, in this thread."""
    if not is_known(source):
        return
    model = models.open_planned(source, Options(Wishes(threads=1), ("reference",)))
    try:
        seq, last = model.alloc(), np.array([2, 40, 77]) % model.n_vocab
        for _ in range(2):
            logits = model.step(Step((Chunk(seq, last, np.array([len(last) - 1])),)))[-1]
            if not np.isfinite(logits).all():
                return  # which tensor is to blame, `answer` must say
            last = np.array([logits.argmax()])
    finally:
        model.close()


def answer(source: ModelSource, path: Path) -> None:
    """Load the model as users do, and answer tokens and messages."""
    if is_known(source):
        generate(source, LLM(path, backends=["llamacpp"], threads=1))


def whole(source: ModelSource, path: Path) -> None:
    """The same by libllama, which runs what hetrun has no file for; it takes a second."""
    if not is_known(source):
        generate(source, LLM(path, threads=1))


def generate(source: ModelSource, llm: LLM) -> None:
    """Two tokens behind some others, and two behind messages."""
    with llm:
        two = SamplingParams(max_tokens=2, temperature=0)
        llm.generate([[t % llm.info.n_vocab for t in (2, 40, 77)]], two)
        if source.vocabulary:
            llm.chat(MESSAGES, SamplingParams(max_tokens=2, seed=1))


STAGES: Mapping[str, Callable[[ModelSource, Path], None]] = {
    "inspect": look,
    "graph": graph,
    "plan": planned,
    "vocabulary": vocabulary,
    "template": template,
    "convert": converted,
    "repack": repacked,
    "weights": weights,
    "step": step,
    "answer": answer,
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

    for good in sys.argv[1:]:  # so that libraries are not counted as a case's memory
        if (outcome := attempt(Path(good), lambda stage: None, check=True)).end != "loaded":
            sys.exit(f"{good} should load: {outcome}")
    say(stage="ready")
    for line in sys.stdin:
        asked = json.loads(line)
        outcome = attempt(Path(asked["path"]), lambda stage: say(stage=stage), asked["check"])
        say(**asdict(outcome))


if __name__ == "__main__":
    main()

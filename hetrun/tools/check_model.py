"""Whether a model can be opened: everything that loading would find wrong with it, without loading it.

Native libraries read a stranger's vocabulary in a process of its own here, which may crash, and has limits.
"""

from __future__ import annotations

import hashlib
import json
import resource
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from hetrun.errors import BackendUnavailable
from hetrun.executor.library.plan import MOST_CONTEXT, backend_for, needs
from hetrun.loader.architectures import build_graph, is_known
from hetrun.loader.hub.checksums import expected
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.loader.tensor_list import entries
from hetrun.loader.weight_check import WeightFinding, look_at_weights
from hetrun.planner.static import LARGEST_UBATCH
from hetrun.system import subprocesses
from hetrun.system.file_identity import Stamp, unchanged
from hetrun.text.chat import ChatTemplate
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.tokenizer import Tokenizer, open_vocabulary

READER = "the library that reads vocabularies"
READER_S = 30.0  # that it has for one
READER_BYTES = 4 << 30  # of address space: the largest in use take some hundred megabytes
HELLO = "Hello, how are you? \u4f60\u597d \U0001f642"
PIECE = 1 << 20  # bytes that are hashed in one go

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class CheckedTokens:
    """What a child says of one; no tokens: there is none."""

    tokens: int = 0
    bos: str = ""
    eos: str = ""


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model that was found good, and what it is."""

    architecture: str
    parameters: int
    type: str  # that most of its bytes are of
    tensors: int
    vocabulary: int  # tokens; 0: it has none
    template: bool  # whether it has one of its own
    files: Mapping[str, Stamp]  # those with its weights
    unchecked: tuple[str, ...]  # what could not be looked at here
    remarks: tuple[str, ...] = ()  # what is odd about its weights, and may be meant


def check_model(path: Path, weights: bool = False, progress: Progress | None = None) -> CheckedModel:
    """Look at everything, at each weight only if asked to; a UserError says what is wrong."""
    source = open_model(path)
    unchecked = [*_check_settings(source)]
    vocabulary = CheckedTokens()
    with TemplateWorker(ChatTemplate.of_model(source)) as worker:
        if source.chat_templates:
            worker.warm()  # it starts while the vocabulary is read
        try:
            vocabulary = _check_vocabulary(source)
        except BackendUnavailable as e:
            unchecked.append(f"its vocabulary ({e})")
        if source.chat_templates:
            _check_template(worker, vocabulary)
    seen = look_at_weights(source, progress) if weights else WeightFinding()
    if seen.error:
        raise seen.error
    found = list(entries(source))
    types: Counter[str] = Counter()
    for entry in found:
        types[entry.type] += entry.nbytes
    return CheckedModel(
        architecture=source.architecture,
        parameters=sum(entry.weights for entry in found),
        type=max(types, key=lambda kind: types[kind], default="no type"),
        tensors=len(found),
        vocabulary=vocabulary.tokens,
        template=bool(source.chat_templates),
        files=source.stamps,
        unchecked=tuple(unchecked),
        remarks=seen.remarks,
    )


def _check_settings(source: ModelSource) -> tuple[str, ...]:
    """Everything that is decided from settings and the tensors' shapes; what could not be judged here."""
    _ = source.name, source.temperature  # of a wrong type they would be refused later
    if is_known(source):
        build_graph(source)
        source.require_int("context_length", 1, MOST_CONTEXT)
        return ()
    needs(source, "f16", LARGEST_UBATCH)
    source.require_int("context_length", 1, MOST_CONTEXT)
    backend = backend_for(source, None)
    assert backend is not None
    assert backend.whole is not None
    backend.whole.look(source.stamps)
    return (f"the shapes of its tensors, which only {backend.name} knows",)


def _check_vocabulary(source: ModelSource) -> CheckedTokens:
    if not source.vocabulary:
        return CheckedTokens()
    with unchanged(source.stamps):
        said = subprocesses.ask(
            "from hetrun.tools.check_model import main; main()", source.path, READER_S, READER
        )
    return CheckedTokens(**json.loads(said))


def main() -> NoReturn:
    """The child that reads a vocabulary."""
    resource.setrlimit(resource.RLIMIT_AS, (READER_BYTES, READER_BYTES))
    subprocesses.answer(_read_vocabulary)


def _read_vocabulary(path: str) -> str:
    vocabulary = open_vocabulary(open_model(Path(path)))
    if vocabulary is None:
        raise BackendUnavailable("no reader for it is registered; reinstall hetrun")
    tokenizer = Tokenizer(vocabulary)
    tokenizer.decode(tokenizer.encode(HELLO))
    return json.dumps(asdict(CheckedTokens(tokenizer.n_tokens, tokenizer.bos_text, tokenizer.eos_text)))


def _check_template(worker: TemplateWorker, vocabulary: CheckedTokens) -> None:
    """Have a short conversation written."""
    messages = [{"role": "user", "content": HELLO}]
    worker.render(messages, bos_token=vocabulary.bos, eos_token=vocabulary.eos)


def digests(files: Mapping[str, Stamp], progress: Progress | None = None) -> dict[str, str]:
    """The sha256 of files that were checked; an error if one is known, and is another."""
    total, done, out = sum(stamp.size for stamp in files.values()) or 1, 0, {}
    with unchanged(files):
        for path in files:
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
                    done += len(piece)
                    if progress:
                        progress(min(1.0, done / total))
            out[path] = digest.hexdigest()
            if known := expected(path):
                known.compare(path, out[path])
    return out

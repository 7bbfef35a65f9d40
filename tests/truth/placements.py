"""The columns of the table: where and how a model runs, and what is asked of it there.

Each is a function of a row that gives its comparisons. It proves that what it is about took place (weights
were read, drafts were taken back, a prompt was found), or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from hetrun.api.local_model import LocalModel
from hetrun.backend import registry
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.kernels import has_compiler
from tests.support.closeness import CLOSE, KL, limit
from tests.support.part_backends import rounding
from tests.support.rig import rig_of
from tests.truth.kernel_levels import OFF, column, forced, levels
from tests.truth.memory import mapped, shared_plan, streamed
from tests.truth.speculation import Guesses, answers, by_block, by_lookup, by_model
from tests.truth.subjects import GREEDY, LENGTHS, Subject
from tests.truth.verdicts import BITS, Bar, Cell, Check, NotApplicable, Said, compare

Checks = Iterator[Check]
TRANSFORMERS = "transformers"
ALONE = "the same file, in memory and alone"
# Of activations, or of keys and values, in 8 bits: by divergence alone, as test_rounding and test_promises do
# it. A tiny random model amplifies what a trained one does not.
ROUNDED = Bar("close", 0.02, gap=inf)
HALVES = Bar("close", 1e-4)  # of keys and values in F16: test_promises
EXACT = 1e-6  # of weights in Q8_0 where activations have 16 bits: test_rounding
# The share of a mixture's tokens that may get other experts than in float32, as some do in transformers' own
# answers in BF16 (docs/adr/0074-truth.md).
FLIPS = 0.05
SHARES = (30, 50, 80)  # % of the weights that stay in memory
CHUNKS = (1, 7)  # tokens of a pass, where prompts are cut


@dataclass(frozen=True)
class Placement:
    """A column: its name, what it is in a line, and what it does with a row."""

    name: str
    what: str
    run: Callable[[Subject], Checks]
    group: str

    def cell(self, subject: Subject) -> Cell:
        """A row's cell. Whatever is raised is a fault of it."""
        start = perf_counter()
        try:
            found = Cell(self.name, tuple(self.run(subject)))
        except NotApplicable as e:
            found = Cell(self.name, note=str(e))
        except Exception as e:  # the other cells are worth having
            found = Cell(self.name, note=f"{type(e).__name__}: {e}"[:300], failed=True)
        return replace(found, seconds=perf_counter() - start)


def tokens_bar(subject: Subject) -> Bar:
    """Of float32, whatever computes it."""
    most = limit(subject.tiny)
    return Bar("tokens", 2 * most if str(subject.row) in LOOKED_UP else most)


def with_flips(bar: Bar, subject: Subject, share: float = FLIPS) -> Bar:
    """For mixtures: where two experts are liked about alike, the last bit of a token chooses between them."""
    mixture = any(op.kind == "moe" for op in build_graph(open_model(subject.folder)).ops)
    return replace(bar, flips=share) if mixture else bar


# ggml looks GELU up in a table of halves, here for experts as well: 0.012 with these weights.
LOOKED_UP = ("gemma4_text-mixture",)


# --- backends and types


def on_reference(subject: Subject) -> Checks:
    with LocalModel(subject.folder, **subject.options("reference")) as llm:
        found = subject.ask(llm)
    yield compare("F32", TRANSFORMERS, Bar("tokens", 1e-3), expected=subject.truth, found=found)


def in_memory(subject: Subject) -> Checks:
    with LocalModel(subject.folder, **subject.options()) as llm:
        found = subject.ask(llm)
    yield compare("F32", TRANSFORMERS, tokens_bar(subject), expected=subject.truth, found=found)


def quantised(subject: Subject) -> Checks:
    with LocalModel(subject.file, **subject.options() | {"precision": "fast"}) as llm:
        found = subject.ask(llm)
    yield compare("Q8_0", TRANSFORMERS, with_flips(ROUNDED, subject), expected=subject.truth, found=found)


def exact(subject: Subject) -> Checks:
    """Where own products multiply by all weights: ggml's round to 8 bits whatever is asked."""
    with LocalModel(subject.file, **subject.options() | {"precision": "exact"}) as llm:
        own = llm.call(lambda loaded: loaded.model.alike) > 1
        found = subject.ask(llm)
    bar = with_flips(Bar("close", EXACT) if own else ROUNDED, subject)
    yield compare("Q8_0", TRANSFORMERS, bar, expected=subject.truth, found=found)


def on_rounding(subject: Subject, backend: str) -> Checks:
    in_8_bits = registry.backends()[backend].create().arithmetic == "int8"
    if in_8_bits:
        bar = with_flips(Bar("close", KL["int8"], gap=inf), subject, 2 * FLIPS)
    else:
        bar = with_flips(Bar("close", KL["bf16"], gap=max(CLOSE, subject.moved_by_bf16)), subject)
    with LocalModel(subject.folder, **subject.options(backend)) as llm:
        found = subject.ask(llm)
    yield compare("F32", TRANSFORMERS, bar, expected=subject.truth, found=found)


def with_keys(subject: Subject, kv_type: str, bar: Bar) -> Checks:
    """Keys and values of another type."""
    with LocalModel(subject.folder, **subject.options() | {"kv_type": kv_type}) as llm:
        found = subject.ask(llm)
    bar = with_flips(bar, subject)
    yield compare("F32", TRANSFORMERS, bar, expected=subject.truth, found=found)


def shared_out(subject: Subject) -> Checks:
    with (
        shared_plan(subject.folder) as plan,
        LocalModel(subject.folder, **subject.options("llamacpp", "reference"), plan=plan) as llm,
    ):
        found = subject.ask(llm)
        ran = {key.backend for key, _ in llm.stats}
    assert ran == {"llamacpp", "reference"}, f"only {ran} ran"
    yield compare("F32", TRANSFORMERS, tokens_bar(subject), expected=subject.truth, found=found)


# --- memory


def from_disk(subject: Subject, share: int) -> Checks:
    options = subject.options() | {"kv_type": "f16"}
    with streamed(subject.file, share / 100, **options, deterministic=True) as llm:
        found = subject.ask(llm, 2)
    yield compare("Q8_0", ALONE, BITS, expected=subject.resident, found=found)


def from_maps(subject: Subject) -> Checks:
    """Products of mapped weights are ggml's."""
    with mapped(subject.folder, **subject.options()) as llm:
        found = subject.ask(llm)
    yield compare("F32", TRANSFORMERS, tokens_bar(subject), expected=subject.truth, found=found)
    if subject.in_gguf:
        with mapped(subject.file, **subject.options()) as llm:
            found = subject.ask(llm)
        yield compare("Q8_0", TRANSFORMERS, with_flips(ROUNDED, subject), expected=subject.truth, found=found)


# --- sequences, passes and the prefix cache


def both_ways(subject: Subject, ask: Callable[[LocalModel], Said], **options: Any) -> Checks:  # noqa: ANN401
    """In float32 as it runs by default, and in Q8_0 deterministically: the same tokens."""
    with LocalModel(subject.folder, **subject.options() | options) as llm:
        found = ask(llm)
    first = replace(found, answers=found.answers[:1])  # what transformers was asked
    yield compare("F32", TRANSFORMERS, tokens_bar(subject), expected=subject.truth, found=first)
    if subject.in_gguf:
        exactly = subject.options() | {"kv_type": "f16", "deterministic": True} | options
        with suppress(NotApplicable):
            with LocalModel(subject.file, **exactly) as llm:
                found = ask(llm)
            yield compare("Q8_0", ALONE, BITS, expected=subject.resident, found=found)


def together(subject: Subject) -> Checks:
    """All prompts at once, twice: the second time their beginnings are cached."""

    def ask(llm: LocalModel) -> Said:
        found = llm.generate(subject.prompts, GREEDY)
        return Said(tuple(tuple(c.tokens) for c in found))

    yield from both_ways(subject, ask)


def in_chunks(subject: Subject) -> Checks:
    for tokens in CHUNKS:
        yield from both_ways(subject, partial(subject.ask, prompts=2), ubatch=tokens)


def from_cache(subject: Subject) -> Checks:
    """A prompt whose beginning was computed for another one."""

    def ask(llm: LocalModel) -> Said:
        prompt, other, *_ = subject.prompts
        llm.generate([[*prompt, *other]], GREEDY)
        (found,) = llm.generate([prompt], GREEDY)
        (again,) = llm.generate([prompt], GREEDY)
        assert again.usage.cached_tokens > 0, "the prompt was not found in the cache"
        assert found.tokens == again.tokens, "another answer from the cache than without"
        return Said((tuple(again.tokens),))

    yield from both_ways(subject, ask)


# --- instructions


def at_level(subject: Subject, level: str) -> Checks:
    """Own kernels with fewer instructions, or none of them. Products have the same bits; attention adds up in
    another order."""
    names = ("llamacpp", "reference") if level == "off" else ("llamacpp",)
    with forced(level):
        with LocalModel(subject.folder, **subject.options(*names)) as llm:
            found = subject.ask(llm)
        yield compare("F32", TRANSFORMERS, tokens_bar(subject), expected=subject.truth, found=found)
        if subject.in_gguf:
            with LocalModel(subject.file, **subject.options(*names)) as llm:
                found = subject.ask(llm)
            yield compare(
                "Q8_0", TRANSFORMERS, with_flips(ROUNDED, subject), expected=subject.truth, found=found
            )


# --- speculation


def guesses(subject: Subject) -> Guesses:
    """What knows the answers to the first prompts, or nearly."""
    known = subject.resident.answers[1:] if subject.in_gguf else ()
    return Guesses(subject.prompts, [*subject.truth.answers, *known])


def with_lookup(subject: Subject) -> Checks:
    with by_lookup(guesses(subject)):
        yield from both_ways(subject, partial(answers, prompts=subject.prompts[:2]), spec="lookup")


def with_draft_model(subject: Subject) -> Checks:
    draft = subject.file if subject.in_gguf else subject.folder
    with by_model(guesses(subject)):
        yield from both_ways(subject, partial(answers, prompts=subject.prompts[:2]), spec=f"draft:{draft}")


def with_block(subject: Subject) -> Checks:
    """The same model with such a block, beside itself without guesses."""
    from tests.models.mtp_blocks import FAMILIES, published

    family = next((n for n, f in FAMILIES.items() if f.row.model_type == subject.tiny.model_type), None)
    if family is None:
        raise NotApplicable("there is no tiny model with such a block (tests/models/mtp_blocks.py)")
    options, prompts = subject.options(), subject.prompts[:2]
    with LocalModel(published(family).folder, **options) as llm:
        plain = Said(tuple(tuple(llm.generate([list(p)], GREEDY)[0].tokens) for p in prompts))
    with (
        by_block(Guesses(prompts, plain.answers)),
        LocalModel(published(family).folder, **options | {"spec": "mtp"}) as llm,
    ):
        found = answers(llm, prompts)
    yield compare("F32", "itself without guesses", tokens_bar(subject), expected=plain, found=found)


# --- a GPU that is not there


def on_emulated_gpu(subject: Subject) -> Checks:
    """CUDA's kernels on a CPU; what they do not take is the reference's."""
    if not has_compiler():
        raise NotApplicable("the emulator needs g++")
    graph, text = build_graph(open_model(subject.folder)), subject.text[:EMULATED]
    devices = {"cuda": emulated(name="cuda"), "reference": registry.backends()["reference"].create()}
    others = {op.scope: "reference" for op in graph.ops if not devices["cuda"].supports(op)}
    made = rig_of(graph, devices, {"": "cuda", **others})
    try:
        seq = made.kv.alloc()
        rows = [made.logits(seq, text[:EMULATED_PROMPT])]
        rows += [made.logits(seq, [token]) for token in text[EMULATED_PROMPT:]]
    finally:
        made.close()
    assert subject.truth.logits is not None
    expected = Said((), subject.truth.logits[: len(text)])
    yield compare(
        "F32", TRANSFORMERS, tokens_bar(subject), expected=expected, found=Said((), np.concatenate(rows))
    )


EMULATED, EMULATED_PROMPT = 24, 20  # tokens of the text: an emulated GPU takes its time


# --- the table's columns


def columns() -> list[Placement]:
    """All placements that can be tried on this machine."""
    found = [
        Placement("reference", "numpy, in float32", on_reference, BACKENDS),
        Placement("resident", "ggml and own kernels, in memory, in float32", in_memory, BACKENDS),
        *(
            Placement(name, f"the backend {name}", partial(on_rounding, backend=name), BACKENDS)
            for name in rounding()
        ),
        Placement("cuda", "CUDA's kernels, emulated on a CPU", on_emulated_gpu, BACKENDS),
        Placement("shared", "heads, rows and experts by halves on ggml and numpy", shared_out, BACKENDS),
        Placement("q8_0", "weights in Q8_0", quantised, TYPES),
        Placement("q8_0-exact", "the same with --precision exact", exact, TYPES),
        Placement("kv-f16", "keys and values in F16", partial(with_keys, kv_type="f16", bar=HALVES), TYPES),
        Placement("kv-q8_0", "keys and values in Q8_0",
                  partial(with_keys, kv_type="q8_0", bar=ROUNDED), TYPES),
    ]  # fmt: skip
    found += [
        Placement(f"disk-{share}", f"{share} % of the weights, or of the experts, in memory",
                  partial(from_disk, share=share), MEMORY)
        for share in SHARES
    ]  # fmt: skip
    found += [
        Placement("mapped", "weights are pages of their file", from_maps, MEMORY),
        Placement("together", f"{len(LENGTHS)} sequences at once", together, STEPS),
        Placement("chunks", "prompts in passes of 1 and of 7 tokens", in_chunks, STEPS),
        Placement("cached", "a prompt from the prefix cache", from_cache, STEPS),
        Placement("lookup", "guesses from the text, a quarter of them wrong", with_lookup, STEPS),
        Placement("draft", "guesses of a draft model, a quarter of them wrong", with_draft_model, STEPS),
        Placement("mtp", "guesses of a block inside, a quarter of them wrong", with_block, STEPS),
    ]
    return found + [
        Placement(column(level), words_of(level), partial(at_level, level=level), KERNELS)
        for level in levels()
    ]  # fmt: skip


BACKENDS, TYPES, MEMORY, STEPS, KERNELS = "backends", "types", "memory", "steps", "instructions"


def words_of(level: str) -> str:
    """A level of own kernels in words."""
    return "without own kernels" if level == OFF else f"own kernels by {level}"

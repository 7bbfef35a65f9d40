"""What a library is asked for that runs a model as a whole: which one, for how many tokens, at what memory.

It is for architectures that hetrun has no file for, and for who asks for it by name. What runs where, the
memory and the numbers are the library's own then: the plan has one segment, and says what is not promised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hetrun.backend import Available, Descriptor, Segment, registry
from hetrun.backend.library_model import LibraryBackend, WholeSetup
from hetrun.errors import BudgetError, ModelFileError, OptionError
from hetrun.executor.executor import SMALL
from hetrun.executor.loading.memory_estimates import besides, in_parts
from hetrun.graph.quant import by_name
from hetrun.loader.architectures import builds, is_known
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.source import ModelSource
from hetrun.memory.breakdown import complete
from hetrun.planner.options import Options, this_machine
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet
from hetrun.planner.static import LARGEST_UBATCH
from hetrun.system.file_identity import Stamp
from hetrun.system.memory_info import free_memory
from hetrun.system.units import counted, format_bytes, format_minimum

EVERYTHING = "everything"
SEQUENCES = (4, 2, 1)  # side by side; their memory is taken when the model is loaded, so they are few
CONTEXT = 8192  # the longest where no more was asked for, for the same reason
LEAST_CONTEXT = 1024  # below this, fewer sequences are better than shorter ones
KV_SHARE = 0.5  # of the memory that is free
MOST_LAYERS, MOST_WIDTH = 1 << 14, 1 << 24
MOST_CONTEXT = 1 << 31

VISION = "clip"  # as GGUF names what sees, in a file beside the model's


def backend_for(source: ModelSource, names: tuple[str, ...] | None) -> Descriptor | None:
    """The backend that runs the model as a whole; None where hetrun plans it."""
    if source.architecture == VISION:
        what = (
            "it is a model's vision tower (mmproj): name the model itself, which finds it in its folder, "
            "or by --mmproj"
        )
        raise ModelFileError(source.path, what)
    able = {name: d for name, d in registry.backends().items() if d.whole}
    asked = [name for name in names or () if name in able]
    if asked:
        registry.choose(list(names or ()))
        return able[asked[0]]
    if builds(source):
        return None
    unknown = f"hetrun has no architecture {source.architecture[:40]!r} of its own"
    if names:
        alone = " or ".join(f"--backend {name}" for name in able)
        raise ModelFileError(
            source.path, f"{unknown}, so {' and '.join(names)} cannot run it; only {alone} can"
        )
    reasons = [unknown]
    for name, descriptor in able.items():
        probe = descriptor.probe()
        if isinstance(probe, Available):
            return descriptor
        reasons.append(f"{name}, which might run it as a whole, cannot work here: {probe.reason}")
    raise ModelFileError(source.path, "; ".join(reasons))


# --- what it takes


@dataclass(frozen=True, slots=True)
class LibraryMemory:
    """Bytes that a model takes, estimated from what its file says."""

    weights: int
    per_token: int  # keys and values
    per_sequence: int  # the state of those that keep one instead
    per_run: int  # work buffers
    besides: Mapping[str, int] = field(default_factory=dict)  # what hetrun itself takes, by name

    @property
    def fixed(self) -> int:
        """All but keys, values and states."""
        return self.weights + self.per_run + sum(self.besides.values())

    def reserved(self, context: int, sequences: int) -> int:
        """Keys, values and states of a number of sequences, and one more state for a moment's copy."""
        return sequences * context * self.per_token + (sequences + 1) * self.per_sequence

    def fitting(self, room: int, sequences: int) -> int:
        """Tokens that each of a number of sequences can have in some bytes."""
        left = (room - self.reserved(0, sequences)) // sequences
        return left // self.per_token if self.per_token else MOST_CONTEXT * (left >= 0)


def needs(source: ModelSource, kv_type: str, ubatch: int) -> LibraryMemory:
    """An estimate; a model may keep other things than these, and take more or less."""
    layers = source.require_int("block_count", 1, MOST_LAYERS)
    embd = source.require_int("embedding_length", 1, MOST_WIDTH)
    heads = _of_layers(source, "attention.head_count", layers)
    kv_heads = _of_layers(source, "attention.head_count_kv", layers) or heads
    head_dim = int(embd // max(1.0, *heads)) if heads else 0
    width = sum(source.get_int(f"attention.{part}_length", head_dim, 0, 1 << 20) for part in ("key", "value"))
    bytes_per_number = by_name(kv_type.upper()).row_bytes(32) / 32
    inner, state, groups = (
        source.get_int(f"ssm.{part}", 0, 0, MOST_WIDTH)
        for part in ("inner_size", "state_size", "group_count")
    )
    convolved = max(0, source.get_int("ssm.conv_kernel", 0, 0, 1 << 16) - 1) * (inner + 2 * groups * state)
    rwkv_head = source.get_int("wkv.head_size", 0, 0, 1 << 16)
    kept = inner * state + convolved + (embd * (rwkv_head + 2) if rwkv_head else 0)
    vocabulary = source.find("token_embd.weight")
    n_vocab = vocabulary.shape[0] if vocabulary else 0
    ffn = max(_of_layers(source, "feed_forward_length", layers), default=0.0)
    return LibraryMemory(
        weights=source.nbytes,
        per_token=int(sum(kv_heads) * width * bytes_per_number),
        per_sequence=4 * layers * kept,
        per_run=int(4 * (2 * _most_wanted(ubatch) * n_vocab + ubatch * (6 * embd + 3 * ffn))),
    )


def _of_layers(source: ModelSource, key: str, layers: int) -> tuple[float, ...]:
    found = source.get_numbers(key, layers) or ()
    if any(not 0 <= n <= MOST_WIDTH for n in found):
        raise ModelFileError(
            source.path,
            f"{source.architecture[:40]}.{key} must be 0 to {MOST_WIDTH}: convert the model again",
        )
    return found


def _most_wanted(ubatch: int) -> int:
    return max(SMALL, ubatch // 4)


def held_besides(source: ModelSource, options: Options) -> dict[str, int]:
    """What hetrun itself takes, by name: a limit is for all of it together. Nothing where there is none."""
    if options.ram is None:
        return {}
    return dict(options.besides or in_parts(besides(source.vocabulary_entries), options.front))


def choose_setup(source: ModelSource, options: Options, need: LibraryMemory, ubatch: int) -> WholeSetup:
    """How many sequences of how many tokens; all of their memory is taken when the model is loaded."""
    trained = source.require_int("context_length", 1, MOST_CONTEXT)
    fixed, free = need.fixed, free_memory()
    if options.ram is None and fixed > free.nbytes:  # they are no mapped file that could be read again
        raise BudgetError(
            f"this model needs {format_bytes(fixed)} for its weights, "
            f"but {format_bytes(free.nbytes)} are free of {free.of}"
        )
    room = int(KV_SHARE * (free.nbytes - fixed)) if options.ram is None else options.ram - fixed
    wish = options.ctx or min(trained, CONTEXT)
    least = options.ctx or min(wish, LEAST_CONTEXT)
    for sequences in SEQUENCES:
        fitting = need.fitting(room, sequences)
        if fitting >= least:
            context = min(wish, fitting)
            threads = options.wishes.threads or this_machine().cores
            quant = by_name(options.kv_type.upper())
            return WholeSetup(context, sequences, threads, ubatch, _most_wanted(ubatch), quant)
    needed = need.reserved(least, 1)
    granted, needed = (
        (f"half of what is free beside the weights, {format_bytes(room)},", needed)
        if options.ram is None
        else (f"--ram {format_bytes(options.ram)}", fixed + needed)
    )
    raise BudgetError(
        f"{granted} is too little: one sequence of {least} tokens of this model needs "
        f"{format_minimum(needed)}, judging by its file"
    )


# --- the plan


@dataclass(frozen=True, slots=True)
class LibraryPlan:
    """Everything that is decided before the library opens the file."""

    files: Mapping[str, Stamp]  # the parts of its file
    whole: LibraryBackend
    setup: WholeSetup
    need: LibraryMemory
    plans: PlanSet


def prepare(source: ModelSource, backend: Descriptor, options: Options) -> LibraryPlan:
    """Refuse what cannot be had from a library that does everything itself, and choose the rest."""
    assert backend.whole is not None
    if not isinstance(source, GGUFModel):
        known = is_known(source)
        how = "make one with `hetrun convert`" if known else "get one of this model"
        raise ModelFileError(source.path, f"{backend.name} reads GGUF files only; {how}")
    if options.wishes.deterministic:
        raise OptionError(
            f"--deterministic is not available here: {backend.name} runs the whole model in its own way"
        )
    if options.wishes.plan:
        raise OptionError(
            f"--plan is not available here: {backend.name} runs the whole model, not parts of it"
        )
    if options.streaming not in ("balanced", "off"):
        raise OptionError(
            f"--streaming {options.streaming} is not available here: {backend.name} reads the whole "
            "model itself"
        )
    ubatch = options.wishes.ubatch or LARGEST_UBATCH
    need = replace(needs(source, options.kv_type, ubatch), besides=held_besides(source, options))
    setup = choose_setup(source, options, need, ubatch)
    return LibraryPlan(
        source.file.stamps,
        backend.whole,
        setup,
        need,
        _plans(source, backend, options, setup, need),
    )


def _plans(
    source: ModelSource, backend: Descriptor, options: Options, setup: WholeSetup, need: LibraryMemory
) -> PlanSet:
    """One segment that holds everything, the same for every bucket."""
    assert backend.whole is not None
    unknown = f"hetrun has no architecture {source.architecture[:40]!r}"
    why = "asked for by name" if options.backends else unknown
    stages = ((Segment(EVERYTHING, backend.name, (), (), (), why),),)
    placed = (Placement("", backend.name, why),)
    reserved = f"{counted(setup.sequences, 'sequence')} of {counted(setup.context, 'token')}"
    return PlanSet(
        {bucket: Plan(bucket, setup.threads, placed, stages) for bucket in BUCKETS},
        setup.ubatch,
        "as asked for" if options.wishes.ubatch else "larger passes are no faster",
        complete(
            {
                **need.besides,
                "weights, estimated": need.weights,
                "KV, estimated": need.reserved(setup.context, setup.sequences),
                "work, estimated": need.per_run,
            },
            options.ram,
        ),
        (
            f"memory for keys and values as it is needed: that of {reserved} is taken at the start; "
            "further requests wait",
            *backend.whole.promises_off,
        ),
    )

"""The backend: it compiles segments into ggml graphs and runs each with one native call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from time import perf_counter

from hetrun.backend import Backend, Buffers, PassShape, ReadInto, Runner, Segment, WeightUse
from hetrun.backend.op_profile import ActivityTimes
from hetrun.backend.weight_streaming import ExpertSupply, Supply
from hetrun.backends.llamacpp import amx_check, decode_attention, fusion, ggml_api
from hetrun.backends.llamacpp.kernels import kernels
from hetrun.backends.llamacpp.kernels.delta_net import delta_nets
from hetrun.backends.llamacpp.kernels.expert_sort import sorter
from hetrun.backends.llamacpp.kernels.matmul import products
from hetrun.backends.llamacpp.lowering import KINDS
from hetrun.backends.llamacpp.mapping_policy import MappedWeights
from hetrun.backends.llamacpp.mixture import row_products
from hetrun.backends.llamacpp.mixture.cached_experts import CachedExperts
from hetrun.backends.llamacpp.profiler import GraphWatch
from hetrun.backends.llamacpp.runner import GgmlRunner
from hetrun.backends.llamacpp.streamed_weights import PartialWeights
from hetrun.backends.llamacpp.weight_memory import GgmlBuffer, WeightMemory
from hetrun.errors import BackendError, Cancelled
from hetrun.graph import Op, Weight
from hetrun.graph.ops import Moe, Stateful
from hetrun.memory.kv.cache import KvCache
from hetrun.system.thread_affinity import Team

PRODUCTS = ("linear", "head", "moe")
ANY = 1 << 20  # rows, of passes that are never so long
# The error of a product, in parts of its size. ggml rounds what is multiplied to the weight's type, or to 8
# bits; our own products round to 8 bits, or to 16, or for weights of floats not at all.
ROUNDING = {"F32": 0.0, "F16": 2e-4, "BF16": 1.7e-3}
EIGHT_BITS, SIXTEEN_BITS = 6e-3, 2.4e-5


class LlamacppBackend(Backend):
    """ggml on the CPU."""

    name = "llamacpp"
    sees_whole = True
    leaves_to_slots = True

    def __init__(self) -> None:
        self.lib = ggml_api.library()
        self.kernels = kernels()
        self.delta_nets = delta_nets()
        self.products = products()
        self.sorter = sorter()
        self.slots = 0  # the most threads that there may be: graphs have room for as many
        self._backend = self.lib.ggml_backend_cpu_init()
        if not self._backend:
            raise BackendError("ggml could not start its CPU backend")
        # ggml asks after each node whether to stop. libc's strlen of this string is the answer (0 or 1):
        # a C function, so that no thread of ggml ever enters the interpreter.
        self._stop = ctypes.create_string_buffer(2)
        self._halted = False  # no weight comes from disk until a restart
        self._ask(ggml_api.libc_address("strlen"))
        self._watch: GraphWatch | None = None
        self._has_bf16 = "avx512_bf16" in ggml_api.cpu_features(self.lib)
        self._memory = WeightMemory(self.lib, self.products, self._leaves_to_ggml, self._as_floats)
        self._mapped = MappedWeights(self.lib, self._memory.resident_bytes)
        self._tiles = amx_check.keeper()
        self._team = Team(self.lib.cpu)
        self._graph_bytes: dict[int, int] = {}
        self.set_threads(os.cpu_count() or 1)

    def _ask(self, function: int) -> None:
        """Have ggml call this C function after each node."""
        self.lib.ggml_backend_cpu_set_abort_callback(self._backend, function, ctypes.addressof(self._stop))

    def supports(self, op: Op) -> bool:
        if isinstance(op.attrs, Stateful) and not (self.delta_nets and self.delta_nets.takes(op.attrs)):
            return False
        if isinstance(op.attrs, Moe) and op.attrs.slots and not op.attrs.rest:
            return False
        return op.kind in KINDS and all(self._reads(use) for use in fusion.uses(op))

    def _reads(self, use: WeightUse) -> bool:
        """Vectors of any type are made floats; of the others ggml takes products and rows, or none."""
        number = use.weight.quant.ggml_id
        if use.use == "vector":
            return True
        return number < ggml_api.TYPES and bool(self.lib.ggml_get_type_traits_cpu(number).contents.vec_dot)

    def _leaves_to_ggml(self, weight: Weight) -> bool:
        """Instructions for bf16, for which activations are rounded, multiply by them 1.4 times as fast."""
        return weight.quant.name == "BF16" and self._has_bf16 and not self.exact

    def _as_floats(self, use: WeightUse) -> bool:
        """Vectors, and matrices of heads for which ggml would round more than is wanted."""
        rounded = ROUNDING.get(use.weight.quant.name, EIGHT_BITS) > SIXTEEN_BITS
        return use.use == "vector" or (use.use == "heads" and self.exact and rounded)

    def rounding(self, op: Op) -> float:
        """Products round what is multiplied."""
        if op.kind not in (*PRODUCTS, "per_head"):
            return 0.0
        return max((self._rounds(use) for use in fusion.uses(op) if use.use != "vector"), default=0.0)

    def _rounds(self, use: WeightUse) -> float:
        found = ROUNDING.get(use.weight.quant.name, EIGHT_BITS)
        if self._as_floats(use):
            return 0.0
        if not self.packs(use):
            return found
        if found < EIGHT_BITS:
            return 0.0
        return SIXTEEN_BITS if self.exact else EIGHT_BITS

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        return fusion.wants(ops)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return self._memory.resident_bytes(wanted)

    def upload(self, wanted: WeightUse, read: ReadInto) -> GgmlBuffer:
        if files := self._mapped.hold(wanted):
            return files.hold(wanted)
        return self._memory.upload(wanted, read)

    def partial(self) -> PartialWeights | None:
        return self._memory.partial

    def experts(self) -> CachedExperts | None:
        return self._memory.experts

    def mapping(self) -> MappedWeights | None:
        return self._mapped

    def packs(self, use: WeightUse) -> bool:
        """Whether our own products multiply by this weight."""
        return not self._mapped.hold(use) and bool(self._memory.packed_by(use))

    def alike(self, ops: Sequence[Op]) -> int:
        """Our own kernels compute each row by itself; of ggml's products only routers and heads do, in short
        passes."""
        products = [
            use for op in ops if op.kind in PRODUCTS for use in fusion.uses(op) if use.use != "vector"
        ]
        if self.kernels is None or not all(self.packs(use) for use in products):
            return 1
        most = ANY if self.kernels.is_wide else decode_attention.MOST_ROWS
        return min(most, row_products.MOST_ROWS) if row_products.multiplies(ops) else most

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return GgmlRunner(self, segment, shape, buffers, kv)

    def set_threads(self, threads: int) -> None:
        self.lib.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self.threads = threads
        self.slots = max(self.slots, threads)

    def watch(self, spent: ActivityTimes | None) -> None:
        """In watched runs it is Python that ggml asks: on the engine's thread, and never otherwise."""
        super().watch(spent)
        self._watch = GraphWatch(self.lib, lambda: self._stop[0] != b"\x00", spent) if spent else None
        self._ask(self._watch.address if self._watch else ggml_api.libc_address("strlen"))

    def cancel(self) -> None:
        self._stop[0] = b"\x01"
        if supply := self._supply or self._expert_supply:
            self._halted = True
            supply.stop()

    def rearm(self) -> None:
        if self._halted and (supply := self._supply or self._expert_supply):
            self._restart(supply)  # the cancel came when there was no pass to end
        self._stop[0] = b"\x00"

    def _restart(self, supply: Supply | ExpertSupply) -> None:
        """Once after a stop: from then on pieces are read ahead, and a second one would wait for them."""
        self._halted = False
        supply.restart()

    @property
    def _supply(self) -> Supply | None:
        return self._memory.partial.supply if self._memory.partial else None

    @property
    def _expert_supply(self) -> ExpertSupply | None:
        return self._memory.experts.supply if self._memory.experts else None

    def compute_with_experts(self, graph: int, rows: int) -> None:
        """Run a graph whose mixtures get their experts when they have chosen them; `rows` of the pass."""
        supply = self._expert_supply
        assert supply
        supply.begin(rows)
        try:
            self.compute(graph)
            supply.end()
        except BaseException:
            self._restart(supply)
            raise

    def compute_from_disk(self, graph: int, wanted: bool, head: bool) -> None:
        """Run a graph to which weights come from disk meanwhile: those for wanted rows, and of the head."""
        partial, supply = self._memory.partial, self._supply
        assert partial
        assert supply
        supply.begin(wanted, head)
        try:
            self.compute(graph)
            supply.end()
        except BaseException:
            partial.forget()
            self._restart(supply)
            raise

    @property
    def overhead_bytes(self) -> int:
        return sum(self._graph_bytes.values())

    def book(self, runner: GgmlRunner, nbytes: int) -> None:
        """Count the memory of a compiled graph."""
        self._graph_bytes[id(runner)] = nbytes

    def unbook(self, runner: GgmlRunner) -> None:
        """The graph is gone."""
        self._graph_bytes.pop(id(runner), None)

    def compute(self, graph: int) -> None:
        """Run a graph to its end, or to a cancel."""
        start = perf_counter()
        if self._tiles and self._memory.tiled:
            self._tiles.restore(self.threads)
        self._mapped.arm()
        try:
            with self._team.seated(self.threads):
                status = self._run(graph)
        finally:
            self._mapped.check()
        self.native_seconds += perf_counter() - start
        if status == ggml_api.ABORTED:
            raise Cancelled("the computation was stopped")
        if status != ggml_api.SUCCESS:
            raise BackendError(f"ggml ended a graph with status {status}: out of memory for its work buffer")

    def _run(self, graph: int) -> int:
        def run() -> int:
            status: int = self.lib.ggml_backend_graph_compute(self._backend, graph)
            return status

        return self._watch.run(graph, run) if self._watch else run()

    def close(self) -> None:
        self._team.rise()
        self._memory.close()
        self._mapped.close()
        if self._backend:
            self.lib.ggml_backend_free(self._backend)
            self._backend = None

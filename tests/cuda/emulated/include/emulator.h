// Runs CUDA sources on a CPU: the threads of a block are fibers that take turns on one thread, and meet where
// the source says they do. What a GPU would leave undefined - a thread that misses a meeting, a write beside
// the shared memory that was asked for, arguments of other kinds - is an error here.

#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct uint3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// As large as an H100 gives to a block, between two guards. Kernels know where it begins, and no size of it.
#define EMULATED_SHARED (227 << 10)
#define EMULATED_GUARD 4096
extern "C" __attribute__((visibility("hidden"))) unsigned char shared_memory[];
extern "C" __attribute__((visibility("hidden"))) unsigned char emulated_room[];
__attribute__((used, aligned(128)))
unsigned char emulated_room[EMULATED_GUARD + EMULATED_SHARED + EMULATED_GUARD];
asm(".globl shared_memory\n.hidden shared_memory\n.set shared_memory, emulated_room + 4096");
static_assert(EMULATED_GUARD == 4096, "the line above says so, too");

namespace emulated {

constexpr int LANES = 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr size_t STACK = 128 << 10;
constexpr unsigned short BESIDE = 0xffa5;  // what guards hold: no number, in any kind of float

enum Wait { NOTHING, BLOCK, LANE, ENDED };

struct Fiber {
#if defined(__x86_64__)
    void *sp;
#else
    ucontext_t context;
#endif
    unsigned char *stack;
    uint3 thread;
    Wait wait;
    int meeting;    // what it meets for: the function of a warp, or the line of a __syncthreads()
    // What it shows the others there, and the time before: lanes that have not looked yet still see that.
    uint64_t slots[2];
    int turn;
};

struct Failure { char text[512]; bool failed; };

static Fiber *self;
static std::vector<Fiber> fibers;
static Failure failure;
static uint3 block_index, block_size, grid_size;
static std::function<void()> body;

inline void fail(const char *format, ...) {
    if (failure.failed) return;
    failure.failed = true;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure.text, sizeof failure.text, format, arguments);
    va_end(arguments);
}

#if defined(__x86_64__)
static void *main_sp;
extern "C" void emulated_switch(void **save, void *sp) __attribute__((visibility("hidden")));
asm(R"(
    .text
    .hidden emulated_switch
    .globl emulated_switch
emulated_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
__attribute__((always_inline)) inline void leave() { emulated_switch(&self->sp, main_sp); }
__attribute__((always_inline)) inline void enter(Fiber &f) { self = &f; emulated_switch(&main_sp, f.sp); }
#else
static ucontext_t main_context;
inline void leave() { swapcontext(&self->context, &main_context); }
inline void enter(Fiber &f) { self = &f; swapcontext(&main_context, &f.context); }
#endif

static void run_fiber() {
    body();
    self->wait = ENDED;
    leave();
    abort();
}

inline void begin(Fiber &f) {
    f.wait = NOTHING;
    f.turn = 0;
#if defined(__x86_64__)
    void **top = (void **)(f.stack + STACK);
    *--top = nullptr;
    *--top = (void *)run_fiber;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.sp = top;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, run_fiber, 0);
#endif
}

inline void meet_block(int line) {
    self->wait = BLOCK;
    self->meeting = line;
    leave();
}

__attribute__((always_inline)) inline void meet_warp(int what, unsigned lanes = ALL) {
    if (lanes != ALL) fail("a meeting of %d lanes: all 32 take part here", __builtin_popcount(lanes));
    self->wait = LANE;
    self->meeting = what;
    leave();
}

// Lets the threads go on that have met. False when none can.
inline bool release() {
    bool moved = false;
    Fiber *fibers = emulated::fibers.data();
    int n = (int)emulated::fibers.size(), at_block = 0, ended = 0;
    for (int first = 0; first < n; first += LANES) {
        int last = first + LANES < n ? first + LANES : n, here = 0, gone = 0;
        for (int i = first; i < last; i++) {
            here += fibers[i].wait == LANE;
            gone += fibers[i].wait == ENDED;
            at_block += fibers[i].wait == BLOCK;
            ended += fibers[i].wait == ENDED;
        }
        if (here && here + gone == last - first && gone) {
            fail("%d of %d lanes of a warp ended before a meeting of the warp", gone, last - first);
            return false;
        }
        if (here && last - first < LANES) {
            fail("a warp of %d threads met: blocks are of whole warps", last - first);
            return false;
        }
        if (here && here == last - first) {
            for (int i = first; i < last; i++) {
                if (fibers[i].meeting != fibers[first].meeting) {
                    fail("lanes of a warp met for different things");
                    return false;
                }
            }
            for (int i = first; i < last; i++) fibers[i].wait = NOTHING;
            moved = true;
        }
    }
    if (at_block && at_block + ended == n) {
        if (ended) {
            fail("%d of %d threads ended before a __syncthreads()", ended, n);
            return false;
        }
        int line = fibers[0].meeting;
        for (int i = 0; i < n; i++) {
            if (fibers[i].meeting != line) {
                fail("threads met at the __syncthreads() of line %d and of line %d", line, fibers[i].meeting);
                return false;
            }
        }
        for (int i = 0; i < n; i++) fibers[i].wait = NOTHING;
        moved = true;
    }
    if (!moved && ended < n) fail("threads of a block wait for each other for ever");
    return moved;
}

inline unsigned next_random(unsigned &state) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

inline const unsigned char *intact() {
    static unsigned char made[EMULATED_GUARD];
    if (!made[0])
        for (int i = 0; i < EMULATED_GUARD; i += 2) memcpy(made + i, &BESIDE, 2);
    return made;
}

inline void guard(unsigned char *beside) { memcpy(beside, intact(), EMULATED_GUARD); }

// The first byte of a guard that is not what it was; -1 when all are.
inline int broken(const unsigned char *beside) {
    if (!memcmp(beside, intact(), EMULATED_GUARD)) return -1;
    for (int i = 0; i < EMULATED_GUARD; i += 2)
        if (memcmp(beside + i, &BESIDE, 2)) return i;
    return -1;
}

inline void look_beside(unsigned shared) {
    int before = broken(emulated_room), behind = broken(shared_memory + shared);
    if (before >= 0) fail("written %d bytes before the shared memory", EMULATED_GUARD - before);
    if (behind >= 0) fail("written %d bytes behind the %u bytes of shared memory", behind, shared);
}

inline void run_block(unsigned shared, unsigned &random) {
    memset(shared_memory, 0xff, shared);  // NaN for floats of any size
    guard(emulated_room);
    guard(shared_memory + shared);
    for (Fiber &f : fibers) begin(f);
    int n = (int)fibers.size();
    do {
        // No thread may count on which runs first, or that one with a lower number ran before.
        unsigned start = next_random(random) % n, backwards = next_random(random) & 1;
        Fiber *first = fibers.data();
        for (int i = 0, at = start; i < n; i++) {
            if (first[at].wait == NOTHING) enter(first[at]);
            at = backwards ? (at ? at - 1 : n - 1) : (at + 1 < n ? at + 1 : 0);
        }
    } while (!failure.failed && release());
    look_beside(shared);
}

inline int run(std::function<void()> kernel, const unsigned *grid, unsigned threads, unsigned shared,
               unsigned seed, char *error, int room) {
    failure.failed = false;
    body = kernel;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {threads, 1, 1};
    if (shared > EMULATED_SHARED) fail("%u bytes of shared memory are more than there are", shared);
    if (!threads || threads > 1024) fail("a block cannot have %u threads", threads);
    if (failure.failed) {
        snprintf(error, room, "%s", failure.text);
        return 1;
    }
    while (fibers.size() > threads) {
        free(fibers.back().stack);
        fibers.pop_back();
    }
    while (fibers.size() < threads) {
        Fiber f{};
        f.stack = (unsigned char *)aligned_alloc(64, STACK);
        f.thread = {(unsigned)fibers.size(), 0, 0};
        fibers.push_back(f);
    }
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    unsigned random = seed;
    uint64_t at = next_random(random) % blocks, step = 1 + next_random(random) % blocks;
    while (std::gcd(step, blocks) != 1) step++;  // so it comes to every block
    for (uint64_t i = 0; i < blocks && !failure.failed; i++, at = (at + step) % blocks) {
        block_index = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]),
                       (unsigned)(at / grid[0] / grid[1])};
        run_block(shared, random);
    }
    if (failure.failed) snprintf(error, room, "%s", failure.text);
    return failure.failed;
}

// A kernel's parameters as "p8 i4 f4 ": what kind of thing each is, and how large. A GPU takes as many bytes
// as a parameter has from wherever the caller's argument lies, and checks nothing.
template <typename T> std::string kind() {
    char number = std::is_floating_point_v<T> ? 'f' : 'i';
    char letter = std::is_pointer_v<T> ? 'p' : std::is_class_v<T> ? 's' : number;
    return letter + std::to_string(sizeof(T)) + " ";
}

template <typename... A>
bool takes(void (*)(A...), const char *given, char *error, int room) {
    std::string wanted = (std::string() + ... + kind<A>());
    if (wanted == given) return true;
    snprintf(error, room, "takes arguments of %sand was given %s", wanted.c_str(), given);
    return false;
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<A> *)arguments[I]...);
}

template <typename... A> std::function<void()> bound(void (*kernel)(A...), void **arguments) {
    return [=] { call(kernel, arguments, std::index_sequence_for<A...>{}); };
}

__attribute__((always_inline)) inline int lane() { return self->thread.x % LANES; }
__attribute__((always_inline)) inline Fiber &mate(int lane) { return fibers.data()[self->thread.x / LANES * LANES + lane]; }

template <typename T> T exchange(unsigned lanes, T value, int from, int what) {
    static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
    int turn = self->turn ^= 1;
    memcpy(&self->slots[turn], &value, sizeof(T));
    meet_warp(what, lanes);
    T found;
    memcpy(&found, &mate(from & (LANES - 1)).slots[turn], sizeof(T));
    return found;
}

// What g++ tells where it has found an address that is not aligned (-fsanitize=alignment in kernels.py).
struct Found { const char *file; unsigned line, column; };

}  // namespace emulated

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void *where, void *) {
    const emulated::Found *f = (const emulated::Found *)where;
    const char *slash = strrchr(f->file, '/');
    const char *file = slash ? slash + 1 : f->file;
    emulated::fail("%s:%u: an address that is not aligned as its type must be", file, f->line);
    emulated::leave();  // for good: a fiber of a block that failed is not entered again
}

#define threadIdx (emulated::self->thread)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

inline void __syncthreads(int line = __builtin_LINE()) { emulated::meet_block(line); }
inline void __syncwarp(unsigned lanes = emulated::ALL) { emulated::meet_warp(1, lanes); }
template <typename T> T __shfl_xor_sync(unsigned lanes, T x, int step) {
    return emulated::exchange(lanes, x, emulated::lane() ^ step, 2);
}
template <typename T> T __shfl_sync(unsigned lanes, T x, int from) {
    return emulated::exchange(lanes, x, from, 3);
}
template <typename T> T __shfl_down_sync(unsigned lanes, T x, int step) {
    int from = emulated::lane() + step;
    return emulated::exchange(lanes, x, from < emulated::LANES ? from : emulated::lane(), 4);
}
template <typename T> T __shfl_up_sync(unsigned lanes, T x, int step) {
    int from = emulated::lane() - step;
    return emulated::exchange(lanes, x, from >= 0 ? from : emulated::lane(), 5);
}
inline unsigned __ballot_sync(unsigned lanes, int predicate) {
    int turn = emulated::self->turn ^= 1;
    emulated::self->slots[turn] = predicate != 0;
    emulated::meet_warp(6, lanes);
    unsigned votes = 0;
    for (int i = 0; i < emulated::LANES; i++) votes |= (unsigned)emulated::mate(i).slots[turn] << i;
    return votes;
}

template <typename T> T __ldg(const T *p) { return *p; }
template <typename T> T __ldcg(const T *p) { return *p; }
inline void __threadfence() {}
inline unsigned atomicInc(unsigned *p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }
inline int atomicAdd(int *p, int n) { int old = *p; *p += n; return old; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
inline unsigned __float_as_uint(float x) { unsigned n; memcpy(&n, &x, 4); return n; }
inline int __float_as_int(float x) { int n; memcpy(&n, &x, 4); return n; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned places) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned made = 0;
    for (int i = 0; i < 4; i++) made |= (unsigned)(both >> 8 * (places >> 4 * i & 7) & 0xff) << 8 * i;
    return made;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

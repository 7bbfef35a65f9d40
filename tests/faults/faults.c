/* Calls of the C library that fail when a test says so; loaded before it (LD_PRELOAD).

   One kind of call is armed at a time, and only while an operation runs: the calls of that kind are counted, and
   the Nth fails, alone or with all that follow. Threads that are exempt (a test's own client) are neither counted
   nor failed. Memory is counted only where one of some libraries asks for it; Python's own is not. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind {
    NONE, OPEN, READ, PREAD, MMAP, MALLOC, WRITE, PWRITE, FSYNC, RENAME, THREAD, SEND,
    NEW, LIST, TRUNCATE, UNLINK, MKDIR, LOCK, ACCEPT, RECEIVE
};

#define MOST_RANGES 256
struct range {
    uintptr_t begin, end;
};
static struct range watched[MOST_RANGES], interpreter[MOST_RANGES];
static int ranges, of_interpreter;

/* Processes that have FAULTS_SHARED (a file) in their environment share one of these. */
struct state {
    atomic_int armed;            /* an enum kind */
    atomic_long calls;           /* of that kind since then */
    long nth;                    /* 0: none fails */
    int lasting, error_number;
    atomic_int failed, generation; /* how often it was armed */
    char site[256];              /* who made the call that failed first */
    char names[256];             /* libraries whose memory is counted */
};
static struct state own, *now = &own;
static int report = -1, is_left_alone;
static atomic_int watched_for; /* the generation that `watched` was made for */
static __thread int exempt;

/* --- for the test */

static void take(struct dl_phdr_info *object, struct range *into, int *count)
{
    for (int i = 0; i < object->dlpi_phnum && *count < MOST_RANGES; i++) {
        const ElfW(Phdr) *part = object->dlpi_phdr + i;
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X))
            continue;
        into[*count].begin = object->dlpi_addr + part->p_vaddr;
        into[(*count)++].end = object->dlpi_addr + part->p_vaddr + part->p_memsz;
    }
}

static int watch(struct dl_phdr_info *object, size_t size, void *names)
{
    int wanted = 0;
    for (const char *name = names; *name; name += strlen(name) + 1)
        wanted |= strstr(object->dlpi_name, name) != NULL;
    if (wanted)
        take(object, watched, &ranges);
    if (!*object->dlpi_name || strstr(object->dlpi_name, "libpython"))
        take(object, interpreter, &of_interpreter);
    return 0;
}

static int lies_in(void *at, const struct range *where, int count)
{
    for (int i = 0; i < count; i++)
        if ((uintptr_t)at - where[i].begin < where[i].end - where[i].begin)
            return 1;
    return 0;
}

/* Memory is counted where it is asked for by a library whose path has one of these names: each ends with a NUL,
   and all after them are NULs. */
void faults_watch(const char *names) { memcpy(now->names, names, sizeof(now->names)); }

/* Where the code of those libraries lies in this process, which may have loaded more of them since. */
static void look_around(void)
{
    int wanted = atomic_load(&now->generation);
    if (atomic_exchange(&watched_for, wanted) == wanted)
        return;
    ranges = of_interpreter = 0;
    dl_iterate_phdr(watch, now->names);
}

void faults_arm(int kind, long which, int fails_from_there_on, int error)
{
    now->nth = which, now->lasting = fails_from_there_on, now->error_number = error;
    now->site[0] = 0;
    atomic_store(&now->failed, 0);
    atomic_store(&now->calls, 0);
    atomic_fetch_add(&now->generation, 1);
    look_around();
    atomic_store(&now->armed, kind);
}

/* The calls since it was armed. */
long faults_disarm(void)
{
    atomic_store(&now->armed, NONE);
    return atomic_load(&now->calls);
}

/* Whether no calls of this process are counted, only those of others. */
void faults_leave(int yes) { is_left_alone = yes; }

/* A call that is about to fail writes a line of JSON, with where it comes from, to this descriptor. */
void faults_report(int fd) { report = fd; }

/* Whether this thread is left alone. */
void faults_exempt(int yes) { exempt = yes; }

/* Where the first call came from that failed: the library and its function, as far as they have names. */
int faults_site(char *out, size_t size)
{
    snprintf(out, size, "%s", now->site);
    return now->site[0] != 0;
}

/* --- which calls fail */

/* Said before it fails, in case that the process ends of it. */
static void tell(void *from)
{
    Dl_info found = {0};
    char line[300];
    const char *path = dladdr(from, &found) && found.dli_fname ? found.dli_fname : "?", *base = strrchr(path, '/');
    snprintf(now->site, sizeof(now->site), "%s %s", base ? base + 1 : path, found.dli_sname ? found.dli_sname : "");
    if (report >= 0)
        syscall(SYS_write, report, line,
                (size_t)snprintf(line, sizeof(line), "{\"at\": \"%s\"}\n", now->site));
}

static int is_armed(enum kind kind)
{
    return atomic_load_explicit(&now->armed, memory_order_relaxed) == (int)kind && !exempt && !is_left_alone;
}

static int fails(enum kind kind, void *from)
{
    if (!is_armed(kind))
        return 0;
    long number = atomic_fetch_add(&now->calls, 1) + 1, nth = now->nth;
    if (!nth || (now->lasting ? number < nth : number != nth))
        return 0;
    if (!atomic_exchange(&now->failed, 1))
        tell(from);
    errno = now->error_number;
    return 1;
}

static int is_of_watched(void *from)
{
    look_around();
    return lies_in(from, watched, ranges);
}

static int out_of_memory(void *from)
{
    return is_armed(MALLOC) && is_of_watched(from) && fails(MALLOC, from);
}

/* The interpreter's own frames and arenas are not counted: a thread that has none for its first frame ends
   without a word, and the thread that began it waits for ever, in any program. */
static int no_pages(int flags, int fd, void *from)
{
    if (!is_armed(MMAP))
        return 0;
    look_around();
    int own = fd < 0 && flags == (MAP_PRIVATE | MAP_ANONYMOUS) && lies_in(from, interpreter, of_interpreter);
    return !own && fails(MMAP, from);
}

#define FAILS(kind) fails(kind, __builtin_return_address(0))
#define NO_MEMORY out_of_memory(__builtin_return_address(0))
#define MODE(flags, mode)                                 \
    mode_t mode = 0;                                      \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list more;                                     \
        va_start(more, flags);                            \
        mode = va_arg(more, mode_t);                      \
        va_end(more);                                     \
    }

/* --- files */

#define OPEN_AS(name)                                                                              \
    int name(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        MODE(flags, mode)                                                                          \
        return FAILS(OPEN) ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode); \
    }
OPEN_AS(open)
OPEN_AS(open64)

#define OPENAT_AS(name)                                                                     \
    int name(int folder, const char *path, int flags, ...)                                  \
    {                                                                                       \
        MODE(flags, mode)                                                                   \
        return FAILS(OPEN) ? -1 : (int)syscall(SYS_openat, folder, path, flags, mode); \
    }
OPENAT_AS(openat)
OPENAT_AS(openat64)

static FILE *(*next_fopen)(const char *, const char *);
static size_t (*next_fread)(void *, size_t, size_t, FILE *);
static DIR *(*next_opendir)(const char *), *(*next_fdopendir)(int);
static struct dirent64 *(*next_readdir)(DIR *);

#define FOPEN_AS(name) \
    FILE *name(const char *path, const char *mode) { return FAILS(OPEN) ? NULL : next_fopen(path, mode); }
FOPEN_AS(fopen)
FOPEN_AS(fopen64)

size_t fread(void *to, size_t size, size_t count, FILE *file)
{
    return FAILS(READ) ? 0 : next_fread(to, size, count, file);
}

DIR *opendir(const char *path) { return FAILS(LIST) ? NULL : next_opendir(path); }
DIR *fdopendir(int fd) { return FAILS(LIST) ? NULL : next_fdopendir(fd); }
struct dirent64 *readdir64(DIR *folder) { return FAILS(LIST) ? NULL : next_readdir(folder); }

ssize_t read(int fd, void *to, size_t size) { return FAILS(READ) ? -1 : syscall(SYS_read, fd, to, size); }

#define PREAD_AS(name)                                                       \
    ssize_t name(int fd, void *to, size_t size, off_t at)                    \
    {                                                                        \
        return FAILS(PREAD) ? -1 : syscall(SYS_pread64, fd, to, size, at); \
    }
PREAD_AS(pread)
PREAD_AS(pread64)

#define PREADV_AS(name)                                                            \
    ssize_t name(int fd, const struct iovec *to, int count, off_t at)              \
    {                                                                              \
        return FAILS(PREAD) ? -1 : syscall(SYS_preadv, fd, to, count, at, 0L); \
    }
PREADV_AS(preadv)
PREADV_AS(preadv64)

#define PREADV2_AS(name)                                                                   \
    ssize_t name(int fd, const struct iovec *to, int count, off_t at, int flags)           \
    {                                                                                      \
        return FAILS(PREAD) ? -1 : syscall(SYS_preadv2, fd, to, count, at, 0L, flags); \
    }
PREADV2_AS(preadv2)
PREADV2_AS(preadv64v2)

ssize_t write(int fd, const void *from, size_t size)
{
    return FAILS(WRITE) ? -1 : syscall(SYS_write, fd, from, size);
}

ssize_t writev(int fd, const struct iovec *from, int count)
{
    return FAILS(WRITE) ? -1 : syscall(SYS_writev, fd, from, count);
}

#define PWRITE_AS(name)                                                         \
    ssize_t name(int fd, const void *from, size_t size, off_t at)               \
    {                                                                           \
        return FAILS(PWRITE) ? -1 : syscall(SYS_pwrite64, fd, from, size, at); \
    }
PWRITE_AS(pwrite)
PWRITE_AS(pwrite64)

int fsync(int fd) { return FAILS(FSYNC) ? -1 : (int)syscall(SYS_fsync, fd); }
int fdatasync(int fd) { return FAILS(FSYNC) ? -1 : (int)syscall(SYS_fdatasync, fd); }

int rename(const char *from, const char *to)
{
    return FAILS(RENAME) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat(int folder, const char *from, int other, const char *to)
{
    return FAILS(RENAME) ? -1 : (int)syscall(SYS_renameat2, folder, from, other, to, 0);
}

int ftruncate(int fd, off_t size) { return FAILS(TRUNCATE) ? -1 : (int)syscall(SYS_ftruncate, fd, size); }
int ftruncate64(int fd, off_t size) { return FAILS(TRUNCATE) ? -1 : (int)syscall(SYS_ftruncate, fd, size); }

int fallocate(int fd, int mode, off_t at, off_t size)
{
    return FAILS(TRUNCATE) ? -1 : (int)syscall(SYS_fallocate, fd, mode, at, size);
}

int fallocate64(int fd, int mode, off_t at, off_t size)
{
    return FAILS(TRUNCATE) ? -1 : (int)syscall(SYS_fallocate, fd, mode, at, size);
}

int posix_fallocate64(int fd, off_t at, off_t size)
{
    return FAILS(TRUNCATE) ? now->error_number : syscall(SYS_fallocate, fd, 0, at, size) ? errno : 0;
}

int unlink(const char *path) { return FAILS(UNLINK) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0); }

int unlinkat(int folder, const char *path, int flags)
{
    return FAILS(UNLINK) ? -1 : (int)syscall(SYS_unlinkat, folder, path, flags);
}

int mkdir(const char *path, mode_t mode)
{
    return FAILS(MKDIR) ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

/* Letting go of a lock does not fail. */
int flock(int fd, int how)
{
    return how != LOCK_UN && FAILS(LOCK) ? -1 : (int)syscall(SYS_flock, fd, how);
}

/* --- memory */

#define MMAP_AS(name)                                                                             \
    void *name(void *where, size_t size, int protection, int flags, int fd, off_t at)             \
    {                                                                                             \
        if (no_pages(flags, fd, __builtin_return_address(0)))                                     \
            return MAP_FAILED;                                                                    \
        return (void *)syscall(SYS_mmap, where, size, protection, flags, fd, at); \
    }
MMAP_AS(mmap)
MMAP_AS(mmap64)

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

void *malloc(size_t size) { return NO_MEMORY ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return NO_MEMORY ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return NO_MEMORY ? NULL : __libc_realloc(old, size); }
void *aligned_alloc(size_t unit, size_t size) { return NO_MEMORY ? NULL : __libc_memalign(unit, size); }
void *memalign(size_t unit, size_t size) { return NO_MEMORY ? NULL : __libc_memalign(unit, size); }

int posix_memalign(void **out, size_t unit, size_t size)
{
    if (NO_MEMORY)
        return ENOMEM;
    void *found = __libc_memalign(unit, size);
    if (!found)
        return ENOMEM;
    *out = found;
    return 0;
}

/* `new` of C++ throws what std::bad_alloc is. Its libraries are loaded later, and may not be visible to all. */
static int of_cxx(struct dl_phdr_info *object, size_t size, void *found)
{
    void *library;
    if (strstr(object->dlpi_name, "libstdc++") && (library = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD)))
        *(void **)found = dlsym(library, "_ZSt17__throw_bad_allocv");
    return *(void **)found != NULL;
}

static void *new_or_throw(size_t unit, size_t size, void *from)
{
    static void (*throw)(void);
    void *got = NULL;
    if (!is_armed(NEW) || !is_of_watched(from) || !fails(NEW, from))
        got = unit ? __libc_memalign(unit, size ? size : 1) : __libc_malloc(size ? size : 1);
    if (got)
        return got;
    if (!throw)
        dl_iterate_phdr(of_cxx, &throw);
    if (throw)
        throw();
    abort();
}

void *_Znwm(size_t size) { return new_or_throw(0, size, __builtin_return_address(0)); }
void *_Znam(size_t size) { return new_or_throw(0, size, __builtin_return_address(0)); }
void *_ZnwmSt11align_val_t(size_t size, size_t unit)
{
    return new_or_throw(unit, size, __builtin_return_address(0));
}

/* --- threads and connections */

static int (*next_create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*work)(void *), void *with)
{
    return FAILS(THREAD) ? now->error_number : next_create(thread, how, work, with);
}

/* The other end is gone: nothing comes over that connection any more, either. */
static ssize_t hang_up(int fd)
{
    shutdown(fd, SHUT_RDWR);
    errno = now->error_number;
    return -1;
}

/* One byte wakes an event loop up, over a pair of sockets that are its own: such a call fails only where the
   loop is awake anyway. */
ssize_t send(int fd, const void *from, size_t size, int flags)
{
    if (size > 1 && FAILS(SEND))
        return hang_up(fd);
    return syscall(SYS_sendto, fd, from, size, flags, NULL, 0);
}

ssize_t sendto(int fd, const void *from, size_t size, int flags, const struct sockaddr *to, socklen_t length)
{
    return FAILS(SEND) ? hang_up(fd) : syscall(SYS_sendto, fd, from, size, flags, to, length);
}

ssize_t sendmsg(int fd, const struct msghdr *what, int flags)
{
    return FAILS(SEND) ? hang_up(fd) : syscall(SYS_sendmsg, fd, what, flags);
}

static int (*next_accept)(int, struct sockaddr *, socklen_t *, int);

int accept4(int fd, struct sockaddr *from, socklen_t *length, int flags)
{
    return FAILS(ACCEPT) ? -1 : next_accept(fd, from, length, flags);
}

/* The two ends of an event loop's own pair have no names; what comes over it cannot fail. */
static int is_of_a_pair(int fd)
{
    struct sockaddr_storage name;
    socklen_t here = sizeof(name), there = sizeof(name);
    return getsockname(fd, (struct sockaddr *)&name, &here) || getpeername(fd, (struct sockaddr *)&name, &there) ||
           (here <= sizeof(sa_family_t) && there <= sizeof(sa_family_t));
}

ssize_t recv(int fd, void *to, size_t size, int flags)
{
    if (!is_of_a_pair(fd) && FAILS(RECEIVE))
        return hang_up(fd);
    return syscall(SYS_recvfrom, fd, to, size, flags, NULL, NULL);
}

__attribute__((constructor)) static void find(void)
{
    const char *path = getenv("FAULTS_SHARED");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *shared = mmap(NULL, sizeof(own), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        now = shared == MAP_FAILED ? &own : shared;
        close(fd);
    }
    next_accept = (__typeof__(next_accept))dlsym(RTLD_NEXT, "accept4");
    next_fread = (__typeof__(next_fread))dlsym(RTLD_NEXT, "fread");
    next_opendir = (__typeof__(next_opendir))dlsym(RTLD_NEXT, "opendir");
    next_fdopendir = (__typeof__(next_fdopendir))dlsym(RTLD_NEXT, "fdopendir");
    next_readdir = (__typeof__(next_readdir))dlsym(RTLD_NEXT, "readdir64");
    next_create = (__typeof__(next_create))dlsym(RTLD_NEXT, "pthread_create");
    next_fopen = (__typeof__(next_fopen))dlsym(RTLD_NEXT, "fopen");
}

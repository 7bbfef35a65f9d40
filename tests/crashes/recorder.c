/* Writes down what a process does to the files below a folder, call by call; loaded before the C library
   (LD_PRELOAD). One call may be the last: the process is killed before it, or in the middle of what it writes.

   Each call is made and written down under one lock, so the order of the log is that in which they happened.
   A record is a `struct record`, two names, and the bytes that were written. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { MARK, CREATE, WRITE, TRUNCATE, PUNCH, SYNC, RENAME, LINK, SYMLINK, UNLINK, MKDIR, RMDIR, MAPPED, SYNC_ALL };

struct record {
    uint32_t kind, name_bytes, other_bytes, unused;
    uint64_t inode, at, size, data_bytes;
};

static char folder[PATH_MAX];
static size_t folder_length;
static int log_fd = -1;
static pid_t armed; /* the process that is recorded: its children are not */
static long calls, last;
static int in_the_middle;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- the log */

static void put(const void *from, size_t size)
{
    for (const char *at = from; size;) {
        ssize_t n = syscall(SYS_write, log_fd, at, size);
        if (n <= 0)
            abort();
        at += n, size -= (size_t)n;
    }
}

static void note(enum kind kind, uint64_t inode, const char *name, const char *other)
{
    struct record r = {kind, (uint32_t)strlen(name), (uint32_t)strlen(other), 0, inode, 0, 0, 0};
    put(&r, sizeof(r));
    put(name, r.name_bytes);
    put(other, r.other_bytes);
}

static void note_bytes(enum kind kind, uint64_t inode, uint64_t at, uint64_t size)
{
    struct record r = {kind, 0, 0, 0, inode, at, size, 0};
    put(&r, sizeof(r));
}

/* What lies there now, which is what was written. */
static void note_write(int fd, uint64_t inode, uint64_t at, uint64_t size)
{
    char path[64];
    struct record r = {WRITE, 0, 0, 0, inode, at, size, size};
    void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int in = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (bytes == MAP_FAILED || in < 0 || pread(in, bytes, size, (off_t)at) != (ssize_t)size)
        abort();
    syscall(SYS_close, in);
    put(&r, sizeof(r));
    put(bytes, size);
    munmap(bytes, size);
}

/* --- for the test */

/* Record what happens below `where`, without a slash at its end, to a descriptor. The process dies before the
   call of number `nth`, or (`middle`) when it has written half of it; 0: never. */
void recorder_begin(const char *where, int to, long nth, int middle)
{
    snprintf(folder, sizeof(folder), "%s", where);
    folder_length = strlen(folder);
    calls = 0, last = nth, in_the_middle = middle;
    log_fd = to;
    armed = getpid();
}

long recorder_end(void)
{
    armed = 0;
    return calls;
}

/* What a user was told, at this point among the calls. */
void recorder_mark(const char *text)
{
    pthread_mutex_lock(&lock);
    if (armed == getpid())
        note(MARK, 0, text, "");
    pthread_mutex_unlock(&lock);
}

/* --- which calls are recorded */

static int below(const char *path)
{
    return !strncmp(path, folder, folder_length) && (!path[folder_length] || path[folder_length] == '/');
}

/* The path of a name, with the links of its folder followed; 0: it is not below the folder. */
static int locate(int at, const char *name, char *out)
{
    char whole[PATH_MAX], base[PATH_MAX], link[64];
    if (armed != getpid() || !name)
        return 0;
    if (*name == '/')
        snprintf(base, sizeof(base), "%s", name);
    else {
        snprintf(link, sizeof(link), at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, whole, sizeof(whole) - 1);
        if (n < 0)
            return 0;
        whole[n] = 0;
        if (snprintf(base, sizeof(base), "%s/%s", whole, name) >= (int)sizeof(base))
            return 0;
    }
    size_t n = strlen(base);
    while (n > 1 && base[n - 1] == '/')
        base[--n] = 0;
    char *slash = strrchr(base, '/');
    *slash = 0;
    if (!realpath(*base ? base : "/", whole))
        return 0;
    return snprintf(out, PATH_MAX, "%s/%s", whole, slash + 1) < PATH_MAX && below(out);
}

/* The inode that a descriptor is open for, if that is below the folder. */
static uint64_t inode_of(int fd)
{
    char link[64], path[PATH_MAX];
    struct stat found;
    if (armed != getpid())
        return 0;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof(path) - 1);
    if (n <= 0)
        return 0;
    path[n] = 0;
    return below(path) && !fstat(fd, &found) ? found.st_ino : 0;
}

static uint64_t inode_at(const char *path)
{
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); }

/* A call that changes something is about to be made; whether it is the one in whose middle the process dies. */
static int count(int can_be_halved)
{
    if (++calls != last)
        return 0;
    if (!in_the_middle || !can_be_halved)
        die();
    return 1;
}

/* A call of a name: `CALL` makes it, `NOTE` writes it down. */
#define NAMED(at, name, CALL, NOTE)              \
    char path[PATH_MAX];                         \
    if (!locate(at, name, path))                 \
        return (int)(CALL);                      \
    pthread_mutex_lock(&lock);                   \
    count(0);                                    \
    uint64_t inode = inode_at(path);             \
    int got = (int)(CALL), error = errno;        \
    if (got >= 0) {                              \
        NOTE;                                    \
    }                                            \
    (void)inode;                                 \
    pthread_mutex_unlock(&lock);                 \
    errno = error;                               \
    return got

/* --- opening */

static int opened(int at, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !locate(at, name, path))
        return (int)syscall(SYS_openat, at, name, flags, mode);
    struct stat before;
    pthread_mutex_lock(&lock);
    int is_new = stat(path, &before) != 0;
    if (is_new || (flags & O_TRUNC && before.st_size))
        count(0);
    int fd = (int)syscall(SYS_openat, at, name, flags, mode), error = errno;
    if (fd >= 0 && is_new)
        note(CREATE, inode_of(fd), path, "");
    else if (fd >= 0 && flags & O_TRUNC && before.st_size)
        note_bytes(TRUNCATE, inode_of(fd), 0, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

#define MODE(flags)                                       \
    mode_t mode = 0;                                      \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list more;                                     \
        va_start(more, flags);                            \
        mode = va_arg(more, mode_t);                      \
        va_end(more);                                     \
    }
#define OPEN_AS(as)                            \
    int as(const char *name, int flags, ...)   \
    {                                          \
        MODE(flags)                            \
        return opened(AT_FDCWD, name, flags, mode); \
    }
OPEN_AS(open)
OPEN_AS(open64)
#define OPENAT_AS(as)                                  \
    int as(int at, const char *name, int flags, ...)   \
    {                                                  \
        MODE(flags)                                    \
        return opened(at, name, flags, mode);          \
    }
OPENAT_AS(openat)
OPENAT_AS(openat64)
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* --- writing */

static off_t place(int fd)
{
    struct stat found;
    if (fcntl(fd, F_GETFL) & O_APPEND)
        return fstat(fd, &found) ? 0 : found.st_size;
    return lseek(fd, 0, SEEK_CUR);
}

/* Where a write begins: `at`, or where the file stands. */
static ssize_t written(int fd, const struct iovec *from, int parts, off_t at)
{
    uint64_t inode = inode_of(fd);
    if (!inode)
        return at < 0 ? syscall(SYS_writev, fd, from, parts) : syscall(SYS_pwritev, fd, from, parts, at, 0L);
    pthread_mutex_lock(&lock);
    int halve = count(1);
    off_t begin = at < 0 ? place(fd) : at;
    if (halve) {
        size_t size = from[0].iov_len / 2;
        at < 0 ? syscall(SYS_write, fd, from[0].iov_base, size)
               : syscall(SYS_pwrite64, fd, from[0].iov_base, size, at);
        die();
    }
    ssize_t got = at < 0 ? syscall(SYS_writev, fd, from, parts) : syscall(SYS_pwritev, fd, from, parts, at, 0L);
    int error = errno;
    if (got > 0)
        note_write(fd, inode, (uint64_t)begin, (uint64_t)got);
    pthread_mutex_unlock(&lock);
    errno = error;
    return got;
}

ssize_t write(int fd, const void *from, size_t size)
{
    struct iovec one = {(void *)from, size};
    return armed ? written(fd, &one, 1, -1) : syscall(SYS_write, fd, from, size);
}

ssize_t writev(int fd, const struct iovec *from, int parts) { return written(fd, from, parts, -1); }

#define PWRITE_AS(as)                                              \
    ssize_t as(int fd, const void *from, size_t size, off_t at)    \
    {                                                              \
        struct iovec one = {(void *)from, size};                   \
        return written(fd, &one, 1, at);                           \
    }
PWRITE_AS(pwrite)
PWRITE_AS(pwrite64)

#define PWRITEV_AS(as)                                                                                   \
    ssize_t as(int fd, const struct iovec *from, int parts, off_t at) { return written(fd, from, parts, at); }
PWRITEV_AS(pwritev)
PWRITEV_AS(pwritev64)

/* Bytes of another file: how many came shows by where the file stands. */
static ssize_t copied(int to, int from, off_t *out, off_t *in, size_t size)
{
    uint64_t inode = inode_of(to);
    if (!inode)
        return syscall(SYS_copy_file_range, from, in, to, out, size, 0);
    pthread_mutex_lock(&lock);
    count(0);
    off_t begin = out ? *out : place(to);
    ssize_t got = syscall(SYS_copy_file_range, from, in, to, out, size, 0);
    int error = errno;
    if (got > 0)
        note_write(to, inode, (uint64_t)begin, (uint64_t)got);
    pthread_mutex_unlock(&lock);
    errno = error;
    return got;
}

ssize_t copy_file_range(int from, off64_t *in, int to, off64_t *out, size_t size, unsigned flags)
{
    (void)flags;
    return copied(to, from, out, in, size);
}

#define SENDFILE_AS(as)                                                                     \
    ssize_t as(int to, int from, off_t *in, size_t size)                                    \
    {                                                                                       \
        return inode_of(to) ? copied(to, from, NULL, in, size) : syscall(SYS_sendfile, to, from, in, size); \
    }
SENDFILE_AS(sendfile)
SENDFILE_AS(sendfile64)

/* A call of a descriptor that changes something. */
#define OF_FILE(fd, CALL, NOTE)          \
    uint64_t inode = inode_of(fd);       \
    if (!inode)                          \
        return (int)(CALL);              \
    pthread_mutex_lock(&lock);           \
    count(0);                            \
    int got = (int)(CALL), error = errno; \
    if (!got) {                          \
        NOTE;                            \
    }                                    \
    pthread_mutex_unlock(&lock);         \
    errno = error;                       \
    return got

#define FTRUNCATE_AS(as) \
    int as(int fd, off_t size) { OF_FILE(fd, syscall(SYS_ftruncate, fd, size), note_bytes(TRUNCATE, inode, 0, (uint64_t)size)); }
FTRUNCATE_AS(ftruncate)
FTRUNCATE_AS(ftruncate64)

#define TRUNCATE_AS(as)                                              \
    int as(const char *name, off_t size)                             \
    {                                                                \
        int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CLOEXEC); \
        if (fd < 0)                                                  \
            return -1;                                               \
        int got = ftruncate(fd, size), error = errno;                \
        syscall(SYS_close, fd);                                      \
        errno = error;                                               \
        return got;                                                  \
    }
TRUNCATE_AS(truncate)
TRUNCATE_AS(truncate64)

#define FALLOCATE_AS(as)                                                            \
    int as(int fd, int mode, off_t at, off_t size)                                  \
    {                                                                               \
        OF_FILE(fd, syscall(SYS_fallocate, fd, mode, at, size),                     \
                if (mode & FALLOC_FL_PUNCH_HOLE) note_bytes(PUNCH, inode, (uint64_t)at, (uint64_t)size)); \
    }
FALLOCATE_AS(fallocate)
FALLOCATE_AS(fallocate64)

/* Written down only: what is on the disk is a matter of the model, which need not wait for a real one. */
int fsync(int fd) { OF_FILE(fd, inode ? 0 : syscall(SYS_fsync, fd), note(SYNC, inode, "", "")); }
int fdatasync(int fd) { OF_FILE(fd, inode ? 0 : syscall(SYS_fdatasync, fd), note(SYNC, inode, "", "")); }
int syncfs(int fd) { OF_FILE(fd, inode ? 0 : syscall(SYS_syncfs, fd), note(SYNC_ALL, inode, "", "")); }

/* What is written by way of a mapping is not seen: such a file may hold anything until it is synced. */
#define MMAP_AS(as)                                                                        \
    void *as(void *where, size_t size, int protection, int flags, int fd, off_t at)        \
    {                                                                                      \
        uint64_t inode = fd >= 0 && flags & MAP_SHARED && protection & PROT_WRITE ? inode_of(fd) : 0; \
        if (inode) {                                                                       \
            pthread_mutex_lock(&lock);                                                     \
            note(MAPPED, inode, "", "");                                                   \
            pthread_mutex_unlock(&lock);                                                   \
        }                                                                                  \
        return (void *)syscall(SYS_mmap, where, size, protection, flags, fd, at);          \
    }
MMAP_AS(mmap)
MMAP_AS(mmap64)

/* --- names */

static int renamed(int at, const char *name, int to, const char *other, unsigned flags)
{
    char second[PATH_MAX];
    if (!locate(to, other, second))
        *second = 0;
    NAMED(at, name, syscall(SYS_renameat2, at, name, to, other, flags), note(RENAME, inode, path, second));
}

int rename(const char *name, const char *other) { return renamed(AT_FDCWD, name, AT_FDCWD, other, 0); }
int renameat(int at, const char *name, int to, const char *other) { return renamed(at, name, to, other, 0); }
int renameat2(int at, const char *name, int to, const char *other, unsigned flags)
{
    return renamed(at, name, to, other, flags);
}

int linkat(int from, const char *old, int at, const char *name, int flags)
{
    NAMED(at, name, syscall(SYS_linkat, from, old, at, name, flags), note(LINK, inode_at(path), path, ""));
}
int link(const char *old, const char *name) { return linkat(AT_FDCWD, old, AT_FDCWD, name, 0); }

int symlinkat(const char *target, int at, const char *name)
{
    NAMED(at, name, syscall(SYS_symlinkat, target, at, name), note(SYMLINK, inode_at(path), path, target));
}
int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }

int unlinkat(int at, const char *name, int flags)
{
    NAMED(at, name, syscall(SYS_unlinkat, at, name, flags),
          note(flags & AT_REMOVEDIR ? RMDIR : UNLINK, inode, path, ""));
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int at, const char *name, mode_t mode)
{
    NAMED(at, name, syscall(SYS_mkdirat, at, name, mode), note(MKDIR, inode_at(path), path, ""));
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

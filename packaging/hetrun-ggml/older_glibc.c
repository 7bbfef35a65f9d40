// What this machine's glibc has and 2.28 has not, of what the libraries use: stat and its like were macros before
// 2.33, getcpu came with 2.29, and GCC's C++ library asks for the other two. Hidden: each library has its own.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HIDDEN __attribute__((visibility("hidden")))

// On x86-64 sizes have 64 bits under either name.
HIDDEN int fstatat(int folder, const char *restrict path, struct stat *restrict found, int flags) {
    return (int)syscall(SYS_newfstatat, folder, path, found, flags);
}

HIDDEN int stat(const char *restrict path, struct stat *restrict found) {
    return fstatat(AT_FDCWD, path, found, 0);
}

HIDDEN int stat64(const char *restrict path, struct stat64 *restrict found) {
    return stat(path, (struct stat *)found);
}

HIDDEN int lstat(const char *restrict path, struct stat *restrict found) {
    return fstatat(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW);
}

HIDDEN int lstat64(const char *restrict path, struct stat64 *restrict found) {
    return lstat(path, (struct stat *)found);
}

HIDDEN int fstat(int file, struct stat *found) { return (int)syscall(SYS_fstat, file, found); }

HIDDEN int fstat64(int file, struct stat64 *found) { return fstat(file, (struct stat *)found); }

HIDDEN int getcpu(unsigned *cpu, unsigned *node) { return (int)syscall(SYS_getcpu, cpu, node, 0); }

// Whether there is one thread only, so that counting references needs no lock: never taken for granted.
HIDDEN char __libc_single_threaded = 0;

HIDDEN uint32_t arc4random(void) {
    uint32_t number;
    while (syscall(SYS_getrandom, &number, sizeof number, 0) != sizeof number) {
    }
    return number;
}

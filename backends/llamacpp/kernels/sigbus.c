/* A mapped file that is cut while a thread computes with it: reading what is gone ends a process with SIGBUS.
   For memory that was registered here, and no other, zeros take the place of what the file does not give any
   more, and that is noted: the code that computed with them has to throw the result away.

   Every other SIGBUS goes to the handler that had the signal before. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define VERSION 1

enum { MOST = 4096 }; /* mappings at a time; a split model has one for each file */

struct region {
    uintptr_t start, end; /* both 0: free. Read by the handler while others register */
    uintptr_t fault;      /* the first address that had to become zeros; 0: none */
};

static struct region regions[MOST];
static struct sigaction before; /* who had the signal */
static int ours;                /* whether we have it, as far as we know */
static uintptr_t page_bytes = 4096;
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

int64_t hetrun_sigbus_version(void) { return VERSION; }

static struct region *region_of(uintptr_t address) {
    for (int i = 0; i < MOST; i++) {
        uintptr_t start = __atomic_load_n(&regions[i].start, __ATOMIC_ACQUIRE);
        if (start && address >= start && address < __atomic_load_n(&regions[i].end, __ATOMIC_ACQUIRE))
            return &regions[i];
    }
    return NULL;
}

/* Give the signal back as it was. The instruction that failed is tried again, and fails there; a signal that
   was sent on purpose is sent again. A handler that gives it back to us, as faulthandler's does when it was
   installed later, gets the default action: the process ends. */
static void pass_on(int signal, const siginfo_t *info) {
    struct sigaction default_action = {.sa_handler = SIG_DFL};
    sigaction(SIGBUS, __atomic_exchange_n(&ours, 0, __ATOMIC_ACQ_REL) ? &before : &default_action, NULL);
    if (info->si_code <= 0)
        raise(signal);
}

/* Only what may be called in a signal handler: loads and stores, and system calls. */
static void on_sigbus(int signal, siginfo_t *info, void *context) {
    (void)context;
    uintptr_t address = (uintptr_t)info->si_addr, none = 0;
    int missing = info->si_code == BUS_ADRERR;
#ifdef BUS_MCEERR_AR
    missing = missing || info->si_code == BUS_MCEERR_AR; /* broken memory held it */
#endif
    struct region *region = missing ? region_of(address) : NULL;
    if (region) {
        int saved = errno;
        /* Behind the end of a file there is nothing more of it: one call, not one for each page. */
        uintptr_t end = __atomic_load_n(&region->end, __ATOMIC_ACQUIRE);
        uintptr_t page = address & ~(__atomic_load_n(&page_bytes, __ATOMIC_RELAXED) - 1);
        __atomic_compare_exchange_n(&region->fault, &none, address, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        if (mmap((void *)page, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
            MAP_FAILED) {
            errno = saved;
            return;
        }
    }
    pass_on(signal, info);
}

/* Take the signal, unless it is ours already; cheap enough for every pass. 0, or -1 if the system refuses. */
int64_t hetrun_sigbus_arm(void) {
    struct sigaction mine = {.sa_flags = SA_SIGINFO | SA_ONSTACK}, now;
    mine.sa_sigaction = on_sigbus;
    sigemptyset(&mine.sa_mask);
    __atomic_store_n(&page_bytes, (uintptr_t)sysconf(_SC_PAGESIZE), __ATOMIC_RELAXED);
    int64_t result = 0;
    pthread_mutex_lock(&changing);
    if (sigaction(SIGBUS, NULL, &now)) {
        result = -1;
    } else if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_sigbus) {
        before = now; /* while this is copied the signal is not ours, so no handler reads it */
        result = sigaction(SIGBUS, &mine, NULL) ? -1 : 0;
    }
    if (!result)
        __atomic_store_n(&ours, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&changing);
    return result;
}

/* Guard `bytes` bytes of whole pages from `address`; the number of the region; -1: there are too many. */
int64_t hetrun_sigbus_register(uintptr_t address, int64_t bytes) {
    int64_t found = -1;
    pthread_mutex_lock(&changing);
    for (int i = 0; i < MOST && found < 0; i++)
        if (!regions[i].start) {
            regions[i].fault = 0;
            __atomic_store_n(&regions[i].end, address + (uintptr_t)bytes, __ATOMIC_RELEASE);
            __atomic_store_n(&regions[i].start, address, __ATOMIC_RELEASE);
            found = i;
        }
    pthread_mutex_unlock(&changing);
    return found;
}

/* Before the memory is given back: what is mapped there next is not ours. */
void hetrun_sigbus_unregister(int64_t number) {
    pthread_mutex_lock(&changing);
    __atomic_store_n(&regions[number].start, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&regions[number].end, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&changing);
}

/* The first address of a region that had to become zeros since this was asked last; 0: none. */
uintptr_t hetrun_sigbus_fault(int64_t number) {
    return __atomic_exchange_n(&regions[number].fault, 0, __ATOMIC_ACQ_REL);
}

/* Show a file in a region anew, behind zeros or not. 0, or -1. */
int64_t hetrun_sigbus_mend(int64_t number, int fd) {
    uintptr_t start = regions[number].start, end = regions[number].end;
    void *got = mmap((void *)start, end - start, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0);
    return got == MAP_FAILED ? -1 : 0;
}

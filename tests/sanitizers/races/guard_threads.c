/* sigbus.c: threads read a mapped file that is cut meanwhile, while others take regions and give them back. */

#include "threads.h"

#include <fcntl.h>
#include <sys/mman.h>

int64_t hetrun_sigbus_arm(void);
int64_t hetrun_sigbus_register(uintptr_t address, int64_t bytes);
void hetrun_sigbus_unregister(int64_t number);
uintptr_t hetrun_sigbus_fault(int64_t number);
int64_t hetrun_sigbus_mend(int64_t number, int fd);

enum { PAGES = 8 };

struct cut {
    const volatile uint8_t *mapped;
    int64_t page;
    int fd;
};

/* What a page holds is changed by the kernel while others read it: that is what the guard is for, and no race of
   the library's own. */
__attribute__((no_sanitize("thread"))) static uint8_t byte_of(const struct cut *c, int number)
{
    return c->mapped[number * c->page];
}

static void read_or_cut(void *tensor, int ith, int nth, void *data)
{
    const struct cut *c = data;
    (void)tensor, (void)nth;
    if (ith == 0) {
        CHECK(!ftruncate(c->fd, 3 * c->page), "it could not be cut");
    } else if (ith == 1) {
        for (int i = 0; i < 20; i++) {
            static uint8_t other[2][4096];
            int64_t number = hetrun_sigbus_register((uintptr_t)other, sizeof(other));
            CHECK(number >= 0, "no region");
            hetrun_sigbus_unregister(number);
            CHECK(!hetrun_sigbus_arm(), "no signal");
        }
    }
    for (int i = 0; i < PAGES; i++) {
        uint8_t found = byte_of(c, i);
        CHECK(found == 7 || (i >= 3 && found == 0), "other bytes than the file's and zeros");
    }
}

static void one(uint64_t *state, const char *folder)
{
    char path[4096], content[4096];
    int64_t page = sysconf(_SC_PAGESIZE);
    (void)state;
    memset(content, 7, sizeof(content));
    snprintf(path, sizeof(path), "%s/cut", folder);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0, "no file");
    for (int64_t at = 0; at < PAGES * page; at += sizeof(content))
        CHECK(write(fd, content, sizeof(content)) == sizeof(content), "no file");
    uint8_t *mapped = mmap(NULL, (size_t)(PAGES * page), PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(mapped != MAP_FAILED, "no mapping");
    CHECK(!hetrun_sigbus_arm(), "no signal");
    int64_t number = hetrun_sigbus_register((uintptr_t)mapped, PAGES * page);
    struct cut cut = {mapped, page, fd};
    struct task tasks[] = {{read_or_cut, &cut}};
    run_graph(tasks, 1, 2 + (int)below(state, 3));
    (void)hetrun_sigbus_fault(number);
    CHECK(!ftruncate(fd, PAGES * page) && !hetrun_sigbus_mend(number, fd), "it was not mended");
    CHECK(byte_of(&cut, 0) == 7 && byte_of(&cut, PAGES - 1) == 0, "other bytes than the file's");
    hetrun_sigbus_unregister(number);
    munmap(mapped, (size_t)(PAGES * page));
    close(fd);
}

int main(int argc, char **argv) { return rounds(argc, argv, one); }

/* pages.c: visits of nodes that all threads run, over a mapped file, within a limit. */

#include "threads.h"
#include "pages.h"

#include <fcntl.h>
#include <sys/mman.h>

void hetrun_pages_visit(void *node, int ith, int nth, void *data);
void hetrun_pages_bring(void *node, int ith, int nth, void *data);
void hetrun_pages_trim(struct pool *p);

enum { UNITS = 9, RANGES = 2, NODES = 6, USED = 3, ROWS = 4 };

static uint8_t *mapped;
static int64_t page, bytes;
static int fd;

static void open_file(uint64_t *state, const char *folder)
{
    char path[4096];
    page = sysconf(_SC_PAGESIZE), bytes = UNITS * RANGES * 3 * page;
    snprintf(path, sizeof(path), "%s/pages", folder);
    fd = open(path, O_RDWR | O_CREAT, 0600);
    uint8_t *content = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) content[i] = (uint8_t)(i / page + below(state, 1));
    CHECK(fd >= 0 && write(fd, content, (size_t)bytes) == bytes, "no file");
    free(content);
    mapped = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(mapped != MAP_FAILED, "no mapping");
}

/* What products do with what was brought. */
static void multiply(void *tensor, int ith, int nth, void *data)
{
    const struct visit *v = data;
    (void)tensor;
    for (int64_t i = ith; i < v->pool->n_coming; i += nth) {
        const struct unit *u = &v->pool->units[v->pool->coming[i]];
        for (int64_t r = u->range; r < u->range + u->ranges; r++) {
            const struct range *a = &v->pool->ranges[r];
            CHECK(*(const uint8_t *)a->address == (uint8_t)(a->offset / page), "other bytes than the file's");
        }
    }
}

static void one(uint64_t *state, const char *folder)
{
    static struct unit units[UNITS];
    static struct range ranges[UNITS * RANGES];
    int64_t *coming = lines(UNITS * 8), *going = lines(UNITS * 8);
    int32_t ids[NODES][ROWS * USED];
    struct visit visits[NODES];
    struct bring brings[2 * NODES];
    struct task tasks[4 * NODES];
    int count = 0;
    if (!mapped) open_file(state, folder);
    for (int i = 0; i < UNITS * RANGES; i++)
        ranges[i] = (struct range){(uintptr_t)mapped + (uintptr_t)(3 * i * page), 3 * page - 7, fd, 3 * i * page};
    for (int i = 0; i < UNITS; i++)
        units[i] = (struct unit){RANGES * i, RANGES, RANGES * 3 * page, !below(state, 3), -1, -1, OUT, 0};
    struct pool pool = {.units = units, .ranges = ranges, .page = page, .first = -1, .last = -1, .coming = coming,
                        .going = going, .room = 6 * page * (1 + below(state, UNITS))};
    for (int i = 0; i < NODES; i++) {
        for (int k = 0; k < ROWS * USED; k++) ids[i][k] = (int32_t)below(state, UNITS + 2) - 1;
        int all = !below(state, 2);
        visits[i] = (struct visit){&pool, all ? NULL : ids[i], ROWS, USED, USED, all ? below(state, UNITS) : 0, UNITS, -1};
        if (all && below(state, 2)) visits[i].next = below(state, UNITS);
        brings[2 * i] = (struct bring){&visits[i], 0, 1};
        brings[2 * i + 1] = (struct bring){&visits[i], 1, RANGES};
        tasks[count++] = (struct task){hetrun_pages_visit, &visits[i]};
        tasks[count++] = (struct task){hetrun_pages_bring, &brings[2 * i]};
        tasks[count++] = (struct task){hetrun_pages_bring, &brings[2 * i + 1]};
        tasks[count++] = (struct task){multiply, &visits[i]};
    }
    for (int pass = 0; pass < 3; pass++) {
        run_graph(tasks, count, 1 + (int)below(state, MOST_THREADS));
        pool.room = 6 * page * (1 + below(state, UNITS));
        hetrun_pages_trim(&pool);
        CHECK(pool.resident <= pool.room, "more is in memory than may be");
    }
    free(coming), free(going);
}

int main(int argc, char **argv) { return rounds(argc, argv, one); }

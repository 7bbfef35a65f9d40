/* How C code gets the experts of mixtures that are not all in memory. An expert is a record: the matrices of its
   gate, up and down beside each other. Those that were multiplied by lately lie packed in slots, others come from
   disk as they are stored, and are packed into the slot that they get before they are multiplied by. */

#ifndef HETRUN_EXPERT_SUPPLY_H
#define HETRUN_EXPERT_SUPPLY_H

#include <stdint.h>

enum { MATRICES = 3 }; /* of a record: gate, up, down */

/* An expert that is there. */
struct expert {
    int64_t number;
    uint8_t *slot;                    /* where its packed matrices lie, or will lie */
    const uint8_t *stored[MATRICES]; /* as they came from disk; NULL: they are packed already */
};

/* All functions but `doze` are called by one thread of those that compute. */
struct expert_supply {
    void *cache;
    /* What rows of a pass have chosen in a mixture, and by how many rows each; reading begins. */
    void (*want)(void *cache, int64_t mixture, const int32_t *experts, const int32_t *rows, int64_t count);
    /* What the next mixture may choose: it is read when there is nothing else to read. */
    void (*hint)(void *cache, int64_t mixture, const int32_t *experts, int64_t count);
    /* Some of the wanted experts, `most` or fewer: those that have arrived, or else some of those in slots.
       Asking again means that those given before are not used any more. Waits until there is one. 0: all were
       given, -1: the others will not come. */
    int64_t (*next)(void *cache, struct expert *out, int64_t most);
    /* Those that were given last are packed now. */
    void (*packed)(void *cache);
    /* Waits until `turn` is not `before` any more, and who changes it calls `wake` if there are dozers. */
    void (*doze)(void *cache, const int32_t *turn, int32_t before, int32_t *dozers);
    void (*wake)(void *cache);
};

#endif

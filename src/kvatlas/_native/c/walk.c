#include "index.h"

enum { AHEAD = 12 };

void kva_walk_begin(kva_walk *walk, kva_index *index, uint32_t plane, const uint64_t *asked, size_t words, int doubted,
                    kva_hit *hits)
{
    walk->index = index;
    walk->plane = index->planes[plane];
    walk->shadow = doubted ? index->shadows[plane] : NULL;
    walk->hits = hits;
    walk->hit_count = 0;
    walk->blocks = 0;
    walk->set = walk->shadow_set = KVA_NO_SET;
    walk->words = index->worker_words;
    for (uint32_t i = 0; i < walk->words; i++)
        walk->alive[i] = i < words ? asked[i] : 0;
}

static void write_down(kva_walk *walk, uint32_t word, uint64_t bits)
{
    while (bits) {
        walk->hits[walk->hit_count++] = (kva_hit){word * 64 + (uint32_t)__builtin_ctzll(bits), walk->blocks};
        bits &= bits - 1;
    }
}

/* Keep those who are in one of two sets. 0 when nobody is left. */
static int keep(kva_walk *walk, uint32_t number, uint32_t shadow_number)
{
    const kva_set *set = &walk->index->sets.sets[number], *shadow = &walk->index->sets.sets[shadow_number];
    uint64_t left = 0;
    for (uint32_t i = 0; i < walk->words; i++) {
        uint64_t gone = walk->alive[i] & ~(kva_set_word(set, i) | kva_set_word(shadow, i));
        if (gone && walk->blocks)
            write_down(walk, i, gone);
        walk->alive[i] &= ~gone;
        left |= walk->alive[i];
    }
    walk->set = number;
    walk->shadow_set = shadow_number;
    return left != 0;
}

/* One block. 0 when nobody holds the chain up to it. */
static inline int step(kva_walk *walk, uint64_t key, uint32_t stamp)
{
    kva_slot *slot = kva_flat_slot(walk->plane, key);
    kva_slot *shadow = walk->shadow ? kva_flat_slot(walk->shadow, key) : NULL;
    uint32_t set = slot ? slot->set : KVA_EMPTY_SET, shadow_set = shadow ? shadow->set : KVA_EMPTY_SET;
    if ((set != walk->set || shadow_set != walk->shadow_set) && !keep(walk, set, shadow_set))
        return 0;
    if (slot && slot->stamp != stamp)
        slot->stamp = stamp;
    walk->blocks++;
    return 1;
}

int kva_walk_on(kva_walk *walk, const uint64_t *keys, size_t count)
{
    uint32_t stamp = kva_index_stamp(walk->index);
    for (size_t i = 0; i < count && i < AHEAD; i++)
        kva_flat_prefetch(walk->plane, keys[i]);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            kva_flat_prefetch(walk->plane, keys[i + AHEAD]);
        if (!step(walk, keys[i], stamp))
            return 0;
    }
    return 1;
}

void kva_walk_end(kva_walk *walk)
{
    walk->index->ticks += walk->blocks;
    if (!walk->blocks)
        return;
    for (uint32_t i = 0; i < walk->words; i++)
        write_down(walk, i, walk->alive[i]);
}

static size_t width_of(kva_token_kind kind)
{
    return kind == KVA_I32 || kind == KVA_U32 ? 4 : 8;
}

kva_status kva_walk_tokens(kva_walk *walk, const kva_tokens *tokens, size_t block_size, uint64_t parent, size_t limit)
{
    enum { FIRST_BLOCKS = 8, MOST_BLOCKS = 64 };
    uint64_t keys[MOST_BLOCKS];
    size_t blocks = tokens->count / block_size, width = width_of(tokens->kind);
    if (blocks > limit)
        blocks = limit;
    for (size_t first = 0, step = FIRST_BLOCKS; first < blocks; first += step, step = MOST_BLOCKS) {
        size_t count = blocks - first < step ? blocks - first : step;
        kva_tokens part = {(const char *)tokens->data + first * block_size * width, count * block_size, tokens->kind};
        kva_status status = kva_block_keys(&walk->index->key, &part, block_size, parent, NULL, keys);
        if (status != KVA_OK)
            return status;
        if (!kva_walk_on(walk, keys, count))
            return KVA_OK;
        parent = keys[count - 1];
    }
    return KVA_OK;
}

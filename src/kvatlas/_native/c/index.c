#include "index.h"

#include <stdlib.h>
#include <string.h>

kva_index *kva_index_new(uint64_t seed, size_t max_bytes)
{
    kva_index *index = calloc(1, sizeof *index);
    if (!index)
        return NULL;
    index->budget.cap = max_bytes;
    index->budget.used = sizeof *index;
    kva_xxh3_prepare(&index->key, seed);
    if (kva_sets_init(&index->sets, &index->budget, kva_mix(seed)) && kva_index_add_plane(index) == 0)
        return index;
    kva_index_free(index);
    return NULL;
}

static void free_column(kva_index *index, kva_column *column)
{
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        kva_handles_free(&column->tables[i]);
    kva_handles_free(&column->reported);
    kva_uses_free(&column->uses, &index->budget);
    index->columns[column->worker] = NULL;
    kva_give_back(&index->budget, column);
}

void kva_index_free(kva_index *index)
{
    if (!index)
        return;
    for (size_t i = 0; i < KVA_MAX_WORKERS; i++)
        if (index->columns[i])
            free_column(index, index->columns[i]);
    for (uint32_t i = 0; i < index->plane_count; i++) {
        kva_flat_free(index->planes[i]);
        kva_give_back(&index->budget, index->planes[i]);
        if (index->shadows[i])
            kva_flat_free(index->shadows[i]);
        kva_give_back(&index->budget, index->shadows[i]);
    }
    kva_sets_free(&index->sets);
    kva_budget_free(&index->budget);
    free(index);
}

uint32_t kva_index_add_plane(kva_index *index)
{
    if (index->plane_count == KVA_MAX_PLANES)
        return KVA_MAX_PLANES;
    kva_flat *plane = kva_take(&index->budget, sizeof *plane);
    if (!plane)
        return KVA_MAX_PLANES;
    plane->sets = &index->sets;
    index->planes[index->plane_count] = plane;
    return index->plane_count++;
}

kva_flat *kva_index_shadow(kva_index *index, uint32_t plane)
{
    if (!index->shadows[plane]) {
        kva_flat *shadow = kva_take(&index->budget, sizeof *shadow);
        if (shadow)
            shadow->sets = &index->sets;
        index->shadows[plane] = shadow;
    }
    return index->shadows[plane];
}

kva_column *kva_index_add_worker(kva_index *index, uint64_t root_key, int counting)
{
    uint32_t worker = 0;
    while (worker < KVA_MAX_WORKERS && index->columns[worker])
        worker++;
    kva_column *column = worker == KVA_MAX_WORKERS ? NULL : kva_take(&index->budget, sizeof *column);
    if (!column)
        return NULL;
    column->worker = worker;
    column->root_key = root_key;
    column->counting = counting;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        column->tables[i].budget = &index->budget;
    column->reported.budget = &index->budget;
    index->columns[worker] = column;
    if (index->worker_words < worker / 64 + 1)
        index->worker_words = worker / 64 + 1;
    return column;
}

void kva_index_drop_worker(kva_index *index, kva_column *column)
{
    kva_column_forget_all(index, column);
    free_column(index, column);
}

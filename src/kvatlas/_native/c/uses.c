#include "uses.h"

#include "mix.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_CELLS = 64 };

static uint32_t home_of(const kva_uses *uses, uint32_t print)
{
    return kva_place(print, uses->capacity);
}

static uint32_t after(const kva_uses *uses, uint32_t at)
{
    return at + 1 == uses->capacity ? 0 : at + 1;
}

/* The cell of a block, or the empty one where it would go. */
static kva_use *its_cell(const kva_uses *uses, uint32_t print)
{
    uint32_t at = home_of(uses, print);
    while (uses->cells[at].print && uses->cells[at].print != print)
        at = after(uses, at);
    return &uses->cells[at];
}

uint32_t *kva_uses_find(const kva_uses *uses, uint32_t print)
{
    if (!uses->count)
        return NULL;
    kva_use *cell = its_cell(uses, print);
    return cell->print ? &cell->time : NULL;
}

static int grow(kva_uses *uses, kva_budget *budget)
{
    uint32_t capacity = uses->capacity ? uses->capacity * 2 : FIRST_CELLS;
    kva_uses larger = {kva_take(budget, sizeof(kva_use) * capacity), capacity, uses->count};
    if (!larger.cells)
        return 0;
    for (uint32_t i = 0; i < uses->capacity; i++)
        if (uses->cells[i].print)
            *its_cell(&larger, uses->cells[i].print) = uses->cells[i];
    kva_give_back(budget, uses->cells);
    *uses = larger;
    return 1;
}

static int older_first(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a < b) - (a > b);
}

/* Forget the older half; of equal age those of larger prints. Without memory to sort them, all. */
static void halve(kva_uses *uses, uint32_t now)
{
    uint64_t *order = malloc(sizeof *order * uses->count);
    uint32_t found = 0, count = uses->count;
    for (uint32_t i = 0; order && i < uses->capacity; i++)
        if (uses->cells[i].print)
            order[found++] = (uint64_t)(now - uses->cells[i].time) << 32 | uses->cells[i].print;
    memset(uses->cells, 0, sizeof *uses->cells * uses->capacity);
    uses->count = 0;
    if (!order)
        return;
    qsort(order, count, sizeof *order, older_first);
    for (uint32_t i = count / 2; i < count; i++) {
        uint32_t print = (uint32_t)order[i];
        *its_cell(uses, print) = (kva_use){print, now - (uint32_t)(order[i] >> 32)};
        uses->count++;
    }
    free(order);
}

int kva_uses_put(kva_uses *uses, kva_budget *budget, uint32_t print, uint32_t time, uint32_t now, size_t most)
{
    uint32_t *known = kva_uses_find(uses, print);
    if (known) {
        *known = time;
        return 1;
    }
    if (uses->count && uses->count >= most)
        halve(uses, now);
    if (uses->count >= uses->capacity / 4 * 3 && !grow(uses, budget))
        return 0;
    *its_cell(uses, print) = (kva_use){print, time};
    uses->count++;
    return 1;
}

/* Later cells of the cluster move back, as in flat.c. */
void kva_uses_drop(kva_uses *uses, uint32_t print)
{
    if (!kva_uses_find(uses, print))
        return;
    uint32_t hole = (uint32_t)(its_cell(uses, print) - uses->cells), capacity = uses->capacity;
    for (uint32_t at = after(uses, hole); uses->cells[at].print; at = after(uses, at)) {
        uint32_t home = home_of(uses, uses->cells[at].print);
        uint32_t from_home = at >= home ? at - home : at + capacity - home;
        uint32_t from_hole = at >= hole ? at - hole : at + capacity - hole;
        if (from_home >= from_hole) {
            uses->cells[hole] = uses->cells[at];
            hole = at;
        }
    }
    uses->cells[hole].print = 0;
    uses->count--;
}

void kva_uses_free(kva_uses *uses, kva_budget *budget)
{
    kva_give_back(budget, uses->cells);
    memset(uses, 0, sizeof *uses);
}

/* A worker's column as bytes, and back.

   All integers are little-endian:

       u64 stored, removed, unknown removals, unpaired, refused, forgotten, root key
       u32 entries, copies elsewhere, reported claims, flags (1: reported claims are in doubt; 2: copies are counted)
       u32 blocks with a time of use; u32 0
       u32[32] removals by age in stamps; u32[240] removals by age on the worker's own clock
       u64 handle of each entry; u64 block key of each; one byte of each; one byte of each, the code of its age
       {u32 entry, u32 copies, u32 plane, u32 claim} for copies outside plane 0 or too many for the byte
       u64 block key of each reported claim; u64 `stored` when it was reported; one byte, its claim
       {u32 print, u32 age} of the blocks with a time of use

   An entry's byte is its mark in the table without KVA_OTHERS and KVA_WAITED, whose bits say instead what is claimed of
   a block in doubt: in the plane itself, in its shadow, or not at all. A block that is not in doubt is claimed. So the
   planes need not be written. Blocks that runs wait for, and hold no copy, are left out. */
#include "bytes.h"
#include "index.h"

enum { HEAD_WORDS = 7, SIZES = HEAD_WORDS * 8, AGES = SIZES + 24, USE_AGES = AGES + 4 * KVA_AGE_BINS };
enum { HEAD_BYTES = USE_AGES + 4 * KVA_USE_BINS, ENTRY_BYTES = 18, OTHER_BYTES = 16, USE_BYTES = 8, AHEAD = 16 };
enum { IN_PLANE = 1, IN_SHADOW = 2, CLAIMED = 3, CLAIM_SHIFT = 4 };
enum { UNSURE = 1, COUNTING = 2 };
enum { MARK_KEPT = KVA_USED | KVA_KEYED | KVA_DOUBT | KVA_COPIES };

/* Where the parts of a dump lie. */
typedef struct {
    uint32_t entries, others, reported, flags, uses;
    size_t keys, marks, ages, other, reported_keys, stored, claims, use, total;
} layout;

static layout lay_out(uint32_t entries, uint32_t others, uint32_t reported, uint32_t flags, uint32_t uses)
{
    layout at = {entries, others, reported, flags, uses, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    at.keys = HEAD_BYTES + 8 * (size_t)entries;
    at.marks = at.keys + 8 * (size_t)entries;
    at.ages = at.marks + entries;
    at.other = at.ages + entries;
    at.reported_keys = at.other + OTHER_BYTES * (size_t)others;
    at.stored = at.reported_keys + 8 * (size_t)reported;
    at.claims = at.stored + 8 * (size_t)reported;
    at.use = at.claims + reported;
    at.total = at.use + USE_BYTES * (size_t)uses;
    return at;
}

static layout layout_of(const kva_column *column)
{
    uint32_t entries = 0, others = 0;
    for (uint32_t i = 0; i < KVA_TABLES; i++) {
        const kva_handles *table = &column->tables[i];
        others += table->other_count;
        for (uint32_t place = 0; place < table->capacity; place++)
            entries += kva_is_resident(table->marks[place]) ? 1 : 0;
    }
    uint32_t flags = (column->unsure ? UNSURE : 0) | (column->counting ? COUNTING : 0);
    return lay_out(entries, others, column->reported.count, flags, column->uses.count);
}

size_t kva_dump_size(const kva_column *column)
{
    return layout_of(column).total;
}

static int has(kva_index *index, kva_flat *flat, uint64_t key, uint32_t worker)
{
    kva_slot *slot = flat ? kva_flat_slot(flat, key) : NULL;
    return slot && kva_set_has(&index->sets, slot->set, worker);
}

static uint32_t claim_of(kva_index *index, uint32_t worker, uint32_t plane, uint64_t key)
{
    return (has(index, index->planes[plane], key, worker) ? IN_PLANE : 0u) |
           (has(index, index->shadows[plane], key, worker) ? IN_SHADOW : 0u);
}

/* Copies of one entry that its byte does not hold. Returns how many were written. */
static uint32_t write_others(kva_index *index, const kva_column *column, const kva_handles *table, uint32_t place,
                             uint32_t number, uint8_t *out)
{
    uint8_t mark = table->marks[place];
    uint32_t written = 0;
    for (uint32_t plane = 0; plane < KVA_MAX_PLANES; plane = kva_next_plane(table, plane + 1)) {
        if (plane ? !(mark & KVA_OTHERS) : (mark & KVA_COPIES) != KVA_MANY)
            continue;
        uint32_t copies = kva_copies_get(table, place, plane);
        if (!copies)
            continue;
        uint8_t *at = out + OTHER_BYTES * (size_t)written++;
        int asked = plane && mark & KVA_KEYED && mark & KVA_DOUBT;
        kva_store32le(at, number);
        kva_store32le(at + 4, copies);
        kva_store32le(at + 8, plane);
        kva_store32le(at + 12, asked ? claim_of(index, column->worker, plane, table->entries[place].key) : 0);
    }
    return written;
}

static uint8_t mark_of(kva_index *index, const kva_column *column, const kva_handles *table, uint32_t place)
{
    uint32_t mark = table->marks[place] & (uint32_t)MARK_KEPT;
    if (mark & KVA_KEYED && mark & KVA_DOUBT && mark & KVA_COPIES)
        mark |= claim_of(index, column->worker, 0, table->entries[place].key) << CLAIM_SHIFT;
    return (uint8_t)mark;
}

/* The code of an entry's age in stamps; 0 where no plane tells. */
static uint8_t age_of(kva_index *index, const kva_handles *table, uint32_t place)
{
    const kva_slot *slot = kva_stamped_slot(index, table, place);
    return slot ? (uint8_t)kva_age_code(kva_index_stamp(index) - slot->stamp) : 0;
}

/* Ask for what says how old a block is and, in doubt, how it is claimed. */
static void prefetch_claim(kva_index *index, const kva_handles *table, uint32_t place)
{
    if (place >= table->capacity || !(table->marks[place] & KVA_KEYED))
        return;
    kva_flat_prefetch(index->planes[0], table->entries[place].key);
    if (table->marks[place] & KVA_DOUBT && index->shadows[0])
        kva_flat_prefetch(index->shadows[0], table->entries[place].key);
}

static void dump_entries(kva_index *index, const kva_column *column, const layout *at, uint8_t *out)
{
    uint32_t number = 0;
    uint8_t *others = out + at->other;
    for (uint32_t i = 0; i < KVA_TABLES; i++) {
        const kva_handles *table = &column->tables[i];
        for (uint32_t place = 0; place < table->capacity; place++) {
            uint8_t mark = table->marks[place];
            prefetch_claim(index, table, place + AHEAD);
            if (!kva_is_resident(mark))
                continue;
            kva_store64le(out + HEAD_BYTES + 8 * (size_t)number, table->entries[place].handle);
            kva_store64le(out + at->keys + 8 * (size_t)number, mark & KVA_KEYED ? table->entries[place].key : 0);
            out[at->marks + number] = mark_of(index, column, table, place);
            out[at->ages + number] = age_of(index, table, place);
            if (mark & KVA_OTHERS || (mark & KVA_COPIES) == KVA_MANY)
                others += OTHER_BYTES * (size_t)write_others(index, column, table, place, number, others);
            number++;
        }
    }
}

static void dump_uses(const kva_column *column, const layout *at, uint8_t *out)
{
    for (uint32_t i = 0; i < KVA_AGE_BINS; i++)
        kva_store32le(out + AGES + 4 * i, column->removal_ages[i]);
    for (uint32_t i = 0; i < KVA_USE_BINS; i++)
        kva_store32le(out + USE_AGES + 4 * i, column->use_ages[i]);
    uint8_t *next = out + at->use;
    for (uint32_t i = 0; i < column->uses.capacity; i++) {
        if (!column->uses.cells[i].print)
            continue;
        kva_store32le(next, column->uses.cells[i].print);
        kva_store32le(next + 4, kva_use_clock(column) - column->uses.cells[i].time);
        next += USE_BYTES;
    }
}

void kva_dump(kva_index *index, const kva_column *column, uint8_t *out)
{
    layout at = layout_of(column);
    const kva_counts *c = &column->counts;
    uint64_t head[HEAD_WORDS] = {c->stored,  c->removed,   c->unknown_removals, c->unpaired,
                                 c->refused, c->forgotten, column->root_key};
    kva_store_words64le(out, head, HEAD_WORDS);
    kva_store32le(out + SIZES, at.entries);
    kva_store32le(out + SIZES + 4, at.others);
    kva_store32le(out + SIZES + 8, at.reported);
    kva_store32le(out + SIZES + 12, at.flags);
    kva_store32le(out + SIZES + 16, at.uses);
    kva_store32le(out + SIZES + 20, 0);
    dump_entries(index, column, &at, out);
    dump_uses(column, &at, out);
    uint32_t number = 0;
    for (uint32_t place = 0; place < column->reported.capacity; place++) {
        if (!column->reported.marks[place])
            continue;
        uint64_t key = column->reported.entries[place].handle;
        kva_store64le(out + at.reported_keys + 8 * (size_t)number, key);
        kva_store64le(out + at.stored + 8 * (size_t)number, column->reported.entries[place].key);
        out[at.claims + number++] = (uint8_t)claim_of(index, column->worker, 0, key);
    }
}

/* Reading */

typedef struct {
    const uint8_t *data;
    layout at;
} dump;

static uint64_t handle_at(const dump *d, uint32_t number)
{
    return kva_load64le(d->data + HEAD_BYTES + 8 * (size_t)number);
}

static uint64_t key_at(const dump *d, uint32_t number)
{
    return kva_load64le(d->data + d->at.keys + 8 * (size_t)number);
}

static uint8_t mark_at(const dump *d, uint32_t number)
{
    return d->data[d->at.marks + number];
}

typedef struct {
    uint32_t number, copies, plane, claim;
} other;

static other other_at(const dump *d, uint32_t number)
{
    const uint8_t *at = d->data + d->at.other + OTHER_BYTES * (size_t)number;
    return (other){kva_load32le(at), kva_load32le(at + 4), kva_load32le(at + 8), kva_load32le(at + 12)};
}

/* Whether an entry's byte, beside what others there are of it, can be. */
static int is_mark(uint8_t mark, int has_others, int has_many)
{
    uint32_t copies = mark & KVA_COPIES;
    if (!(mark & KVA_USED) || (!copies && !has_others) || (copies == KVA_MANY) != has_many)
        return 0;
    return !(mark >> CLAIM_SHIFT & CLAIMED) || (mark & KVA_KEYED && mark & KVA_DOUBT && copies);
}

/* Entries and copies elsewhere, which rise by (entry, plane). */
static kva_dump_fault check_entries(const dump *d, const uint32_t *planes, uint32_t plane_count)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < d->at.entries; i++) {
        uint8_t mark = mark_at(d, i);
        int has_others = 0, has_many = 0;
        uint32_t least = 0;
        for (; next < d->at.others && other_at(d, next).number == i; next++) {
            other o = other_at(d, next);
            if (o.plane >= plane_count || (o.plane == 0) != (planes[o.plane] == 0))
                return KVA_DUMP_PLANE;
            if (o.plane < least || !o.copies || o.claim > CLAIMED || (!o.plane && o.copies < KVA_MANY))
                return KVA_DUMP_ENTRY;
            if (o.claim && (!o.plane || !(mark & KVA_KEYED) || !(mark & KVA_DOUBT)))
                return KVA_DUMP_ENTRY;
            least = o.plane + 1;
            has_others |= o.plane != 0;
            has_many |= o.plane == 0;
        }
        if (!is_mark(mark, has_others, has_many))
            return KVA_DUMP_ENTRY;
    }
    return next == d->at.others ? KVA_DUMP_OK : KVA_DUMP_ENTRY;
}

static kva_dump_fault open_dump(dump *d, const kva_column *column, const uint8_t *data, size_t length)
{
    if (length < HEAD_BYTES)
        return KVA_DUMP_LENGTH;
    const uint8_t *sizes = data + SIZES;
    if (kva_load32le(sizes) > length / ENTRY_BYTES || kva_load32le(sizes + 4) > length / OTHER_BYTES ||
        kva_load32le(sizes + 8) > length / (ENTRY_BYTES - 1) || kva_load32le(sizes + 16) > length / USE_BYTES)
        return KVA_DUMP_LENGTH;
    d->data = data;
    d->at = lay_out(kva_load32le(sizes), kva_load32le(sizes + 4), kva_load32le(sizes + 8), kva_load32le(sizes + 12),
                    kva_load32le(sizes + 16));
    if (d->at.total != length || kva_load32le(sizes + 20))
        return KVA_DUMP_LENGTH;
    if (kva_load64le(data + 8 * (HEAD_WORDS - 1)) != column->root_key)
        return KVA_DUMP_ROOT_KEY;
    if (d->at.flags != ((column->counting ? COUNTING : 0u) | (d->at.flags & UNSURE)))
        return KVA_DUMP_COUNTING;
    for (uint32_t i = 0; i < d->at.reported; i++)
        if (data[d->at.claims + i] > CLAIMED)
            return KVA_DUMP_ENTRY;
    for (uint32_t i = 0; i < d->at.entries; i++)
        if (data[d->at.ages + i] >= KVA_USE_BINS)
            return KVA_DUMP_ENTRY;
    for (uint32_t i = 0; i < d->at.uses; i++)
        if (!kva_load32le(data + d->at.use + USE_BYTES * (size_t)i))
            return KVA_DUMP_ENTRY;
    return KVA_DUMP_OK;
}

/* A table gets its size at once: entries come in the order of their places, and would crowd a smaller one's start. */
static int reserve_tables(kva_column *column, const dump *d)
{
    uint32_t counts[KVA_TABLES] = {0};
    for (uint32_t i = 0; i < d->at.entries; i++)
        counts[kva_table_of(handle_at(d, i))]++;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        if (counts[i] && !kva_handles_reserve(&column->tables[i], counts[i]))
            return 0;
    return !d->at.reported || kva_handles_reserve(&column->reported, d->at.reported);
}

/* Every entry's handle, key and copies. KVA_DUMP_TWICE when a handle comes again. */
static kva_dump_fault load_tables(kva_column *column, const dump *d, const uint32_t *planes)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < d->at.entries; i++) {
        uint64_t handle = handle_at(d, i);
        kva_handles *table = &column->tables[kva_table_of(handle)];
        uint32_t before = table->count, place = kva_handles_put(table, handle);
        if (place == KVA_NOT_FOUND)
            return KVA_DUMP_MEMORY;
        if (table->count == before)
            return KVA_DUMP_TWICE;
        uint8_t mark = mark_at(d, i);
        table->marks[place] = (uint8_t)(mark & (KVA_USED | KVA_KEYED | KVA_DOUBT));
        table->entries[place].key = mark & KVA_KEYED ? key_at(d, i) : 0;
        uint32_t copies = mark & KVA_COPIES;
        if (copies && copies != KVA_MANY && !kva_copies_set(table, place, 0, copies))
            return KVA_DUMP_MEMORY;
        column->counts.resident += copies != 0;
        for (; next < d->at.others && other_at(d, next).number == i; next++) {
            other o = other_at(d, next);
            if (!kva_copies_set(table, place, planes[o.plane], o.copies))
                return KVA_DUMP_MEMORY;
            column->counts.resident += o.plane != 0;
        }
        column->counts.unkeyed += !(mark & KVA_KEYED);
        column->counts.doubted += (mark & KVA_DOUBT) != 0;
    }
    for (uint32_t i = 0; i < d->at.reported; i++) {
        uint32_t before = column->reported.count;
        uint32_t place = kva_handles_put(&column->reported, kva_load64le(d->data + d->at.reported_keys + 8 * (size_t)i));
        if (place == KVA_NOT_FOUND)
            return KVA_DUMP_MEMORY;
        if (column->reported.count == before)
            return KVA_DUMP_TWICE;
        column->reported.entries[place].key = kva_load64le(d->data + d->at.stored + 8 * (size_t)i);
    }
    return KVA_DUMP_OK;
}

static kva_dump_fault load_uses(kva_index *index, kva_column *column, const dump *d)
{
    uint32_t now = (uint32_t)(kva_load64le(d->data) + column->used); /* the clock once `stored` is loaded */
    for (uint32_t i = 0; i < d->at.uses; i++) {
        const uint8_t *at = d->data + d->at.use + USE_BYTES * (size_t)i;
        uint32_t print = kva_load32le(at);
        if (kva_uses_find(&column->uses, print))
            return KVA_DUMP_TWICE;
        if (!kva_uses_put(&column->uses, &index->budget, print, now - kva_load32le(at + 4), now, d->at.uses))
            return KVA_DUMP_MEMORY;
    }
    for (uint32_t i = 0; i < KVA_AGE_BINS; i++)
        column->removal_ages[i] = kva_load32le(d->data + AGES + 4 * i);
    for (uint32_t i = 0; i < KVA_USE_BINS; i++)
        column->use_ages[i] = kva_load32le(d->data + USE_AGES + 4 * i);
    return KVA_DUMP_OK;
}

/* What is claimed, since so many stamps; a claim there is no memory for is counted as any other. */
static void claim(kva_index *index, kva_column *column, uint32_t plane, uint64_t key, uint32_t claims, uint32_t age)
{
    for (int shadow = 0; shadow < 2; shadow++) {
        if (!(claims >> shadow & 1))
            continue;
        kva_flat *flat = shadow ? kva_index_shadow(index, plane) : index->planes[plane];
        if (!flat || !kva_flat_add(flat, key, column->worker, kva_index_stamp(index) - age))
            column->counts.refused++;
    }
}

static void load_claims(kva_index *index, kva_column *column, const dump *d, const uint32_t *planes)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < d->at.entries; i++) {
        if (i + AHEAD < d->at.entries)
            kva_flat_prefetch(index->planes[0], key_at(d, i + AHEAD));
        uint8_t mark = mark_at(d, i);
        int keyed = mark & KVA_KEYED, in_doubt = mark & KVA_DOUBT;
        if (keyed && mark & KVA_COPIES)
            claim(index, column, 0, key_at(d, i), in_doubt ? mark >> CLAIM_SHIFT & CLAIMED : IN_PLANE,
                  kva_age_of_code(d->data[d->at.ages + i]));
        for (; next < d->at.others && other_at(d, next).number == i; next++) {
            other o = other_at(d, next);
            if (keyed && o.plane)
                claim(index, column, planes[o.plane], key_at(d, i), in_doubt ? o.claim : IN_PLANE, 0);
        }
    }
    for (uint32_t i = 0; i < d->at.reported; i++)
        claim(index, column, 0, kva_load64le(d->data + d->at.reported_keys + 8 * (size_t)i), d->data[d->at.claims + i],
              0);
}

static void undo(kva_index *index, kva_column *column)
{
    kva_uses_free(&column->uses, &index->budget);
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        kva_handles_free(&column->tables[i]);
    kva_handles_free(&column->reported);
    column->counts.resident = column->counts.unkeyed = column->counts.doubted = 0;
}

kva_dump_fault kva_load(kva_index *index, kva_column *column, const uint8_t *data, size_t length,
                        const uint32_t *planes, uint32_t plane_count)
{
    dump d;
    for (uint32_t i = 0; i < KVA_TABLES; i++)
        if (column->tables[i].count)
            return KVA_DUMP_NOT_EMPTY;
    if (column->reported.count)
        return KVA_DUMP_NOT_EMPTY;
    kva_dump_fault fault = open_dump(&d, column, data, length);
    if (fault == KVA_DUMP_OK)
        fault = check_entries(&d, planes, plane_count);
    if (fault != KVA_DUMP_OK)
        return fault;
    fault = reserve_tables(column, &d) ? load_tables(column, &d, planes) : KVA_DUMP_MEMORY;
    if (fault != KVA_DUMP_OK || (fault = load_uses(index, column, &d)) != KVA_DUMP_OK) {
        undo(index, column);
        return fault;
    }
    column->counts.stored = kva_load64le(data);
    column->counts.removed = kva_load64le(data + 8);
    column->counts.unknown_removals = kva_load64le(data + 16);
    column->counts.unpaired = kva_load64le(data + 24);
    column->counts.refused = kva_load64le(data + 32);
    column->counts.forgotten = kva_load64le(data + 40);
    column->unsure = d.at.flags & UNSURE;
    load_claims(index, column, &d, planes);
    return KVA_DUMP_OK;
}

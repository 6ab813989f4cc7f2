# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The fleet index's C core for Python. What each method means is told in `_pure_index`.

Nothing is decided here. Arguments are checked by the functions the Python twin uses, so that both accept and refuse the
same things. One writer: every call runs on the thread that owns the index, and none lets another run meanwhile.
"""

from array import array

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy, memset

from kvatlas._native.arguments import (
    MAX_PLANES,
    MAX_WORKERS,
    count_blocks,
    dump_refused,
    index_full,
    no_such_plane,
    no_such_worker,
    require_distinct_planes,
    require_pairs,
    require_u64,
)

include "tokens.pxi"


cdef extern from "xxh3.h":
    ctypedef struct kva_xxh3_key:
        pass

    uint64_t kva_xxh3_64(const kva_xxh3_key *key, const uint8_t *data, size_t length)


cdef extern from "index.h":
    enum:
        KVA_MAX_PLANES
        KVA_TABLES
        KVA_AGE_BINS
        KVA_USE_BINS

    ctypedef struct kva_budget:
        size_t used
        size_t cap
        size_t refused
        size_t live

    ctypedef struct kva_flat:
        size_t count

    ctypedef struct kva_handles:
        uint32_t count

    ctypedef struct kva_counts:
        uint64_t stored, removed, unknown_removals, unpaired, refused, forgotten
        int64_t resident, unkeyed, doubted

    ctypedef struct kva_use:
        uint32_t print, time

    ctypedef struct kva_uses:
        kva_use *cells
        uint32_t capacity, count

    ctypedef struct kva_column:
        uint32_t worker
        uint64_t root_key
        kva_handles *tables
        kva_handles reported
        kva_counts counts
        uint32_t *removal_ages
        kva_uses uses
        uint64_t used
        uint32_t *use_ages

    ctypedef struct kva_index:
        kva_budget budget
        kva_flat **planes
        kva_flat **shadows
        kva_column **columns
        uint32_t plane_count, worker_words
        uint64_t ticks
        kva_xxh3_key key

    ctypedef struct kva_hit:
        uint32_t worker, blocks

    ctypedef struct kva_walk:
        size_t hit_count

    bint kva_charge(kva_budget *budget, Py_ssize_t bytes)
    kva_index *kva_index_new(uint64_t seed, size_t max_bytes)
    void kva_index_free(kva_index *index)
    uint32_t kva_index_add_plane(kva_index *index)
    kva_column *kva_index_add_worker(kva_index *index, uint64_t root_key, bint counting)
    void kva_index_drop_worker(kva_index *index, kva_column *column)
    void kva_column_add_copies(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles,
                               size_t count)
    size_t kva_column_join(kva_index *index, kva_column *column, const uint64_t *handles, const uint64_t *keys,
                           size_t count, uint32_t *woken)
    void kva_column_remove(kva_index *index, kva_column *column, uint32_t plane, const uint64_t *handles, size_t count)
    bint kva_column_key(const kva_column *column, uint64_t handle, uint64_t *key)
    bint kva_column_wait(kva_column *column, uint64_t handle)
    void kva_column_stop_waiting(kva_column *column, uint64_t handle)
    void kva_column_forget(kva_index *index, kva_column *column, const uint8_t *planes)
    void kva_column_forget_all(kva_index *index, kva_column *column)
    size_t kva_column_forget_oldest(kva_index *index, kva_column *column, size_t count)
    bint kva_column_age(kva_index *index, const kva_column *column, uint64_t handle, uint32_t *age)
    size_t kva_column_sample_ages(kva_index *index, const kva_column *column, uint32_t *ages, size_t room)
    size_t kva_column_touch(kva_index *index, kva_column *column, const uint64_t *keys, size_t count, size_t fresh)
    bint kva_column_use_age(const kva_column *column, uint64_t key, uint32_t *age)
    uint32_t kva_use_clock(const kva_column *column)
    void kva_column_doubt(kva_index *index, kva_column *column)
    size_t kva_column_settle(kva_index *index, kva_column *column)
    void kva_column_confirm(kva_index *index, kva_column *column, const uint64_t *keys, size_t count, bint certain,
                            size_t *ended, size_t *adopted)
    size_t kva_column_refute(kva_index *index, kva_column *column, const uint64_t *keys, size_t count)
    size_t kva_column_expire_reported(kva_index *index, kva_column *column, uint64_t stored)
    int kva_column_holds(kva_index *index, uint32_t worker, uint32_t plane, uint64_t key)
    ctypedef enum kva_dump_fault:
        KVA_DUMP_OK
        KVA_DUMP_MEMORY

    size_t kva_dump_size(const kva_column *column)
    void kva_dump(kva_index *index, const kva_column *column, uint8_t *out)
    kva_dump_fault kva_load(kva_index *index, kva_column *column, const uint8_t *data, size_t length,
                            const uint32_t *planes, uint32_t plane_count)
    void kva_walk_begin(kva_walk *walk, kva_index *index, uint32_t plane, const uint64_t *asked, size_t words,
                        bint doubted, kva_hit *hits)
    bint kva_walk_on(kva_walk *walk, const uint64_t *keys, size_t count)
    kva_status kva_walk_tokens(kva_walk *walk, const kva_tokens *tokens, size_t block_size, uint64_t parent,
                               size_t limit)
    void kva_walk_end(kva_walk *walk)


cdef extern from "apply.h":
    enum:
        KVA_MAX_NAME

    ctypedef enum kva_applied:
        KVA_ALL_APPLIED
        KVA_NEEDS_HELP
        KVA_SOMEBODY_WOKE

    ctypedef struct kva_event:
        size_t start, end

    ctypedef struct kva_batch:
        bint has_rank
        int64_t rank
        size_t event_count, index

    ctypedef struct kva_woken:
        uint64_t handle, key

    ctypedef struct kva_applier:
        kva_event event
        kva_woken *woken
        size_t woken_count
        uint64_t applied

    bint kva_batch_open(kva_batch *batch, const uint8_t *payload, size_t length, size_t max_events, unsigned max_depth)
    kva_applied kva_apply(kva_index *index, kva_column *column, kva_batch *batch, kva_applier *applier)
    bint kva_learn(kva_column *column, const char *medium, Py_ssize_t medium_length, bint has_group, uint64_t group,
                   const char *kind, Py_ssize_t kind_length, bint has_window, uint64_t window,
                   uint64_t block_size, uint32_t plane)
    void kva_unlearn(kva_column *column)
    void kva_applier_free(kva_applier *applier)


# As kvatlas.events.DEFAULT_LIMITS, which this floor does not know; a test holds one to the other.
cdef enum:
    MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
    MAX_EVENTS = 500_000
    MAX_DEPTH = 32


cdef class _Words:
    """Handle numbers or block keys as 64-bit words; keeps their memory alive."""

    cdef const uint64_t *data
    cdef Py_ssize_t count
    cdef Py_buffer view
    cdef bint viewed

    def __cinit__(self, values):
        self.viewed = False
        if not PyObject_CheckBuffer(values):
            values = array("Q", values)
        PyObject_GetBuffer(values, &self.view, PyBUF_ND | PyBUF_FORMAT)
        self.viewed = True
        cdef kva_token_kind kind
        if not _kind_of(&self.view, &kind) or self.view.itemsize != 8:
            raise TypeError(f"expected 64-bit words, got a buffer of format {(<bytes>self.view.format)!r}")
        self.data = <const uint64_t *>self.view.buf
        self.count = self.view.len // 8

    def __dealloc__(self):
        if self.viewed:
            PyBuffer_Release(&self.view)


cdef class Batch:
    """One batch of events, read as far as its shape; see `IndexCore.open_batch`."""

    cdef kva_batch c
    cdef bytes payload

    @property
    def rank(self):
        """Its data-parallel rank; None when it names none."""
        return self.c.rank if self.c.has_rank else None

    @property
    def event_count(self):
        """Events in it, of any kind."""
        return self.c.event_count

    @property
    def position(self):
        """Number of the event that `apply` reads next."""
        return self.c.index


cdef class IndexCore:
    cdef kva_index *c
    cdef kva_hit *hits
    cdef kva_applier applier
    cdef list names
    cdef readonly size_t max_bytes

    def __cinit__(self, seed, size_t max_bytes=0):
        require_u64("the seed", seed)
        memset(&self.applier, 0, sizeof(kva_applier))
        self.max_bytes = max_bytes
        self.names = [None] * MAX_WORKERS
        self.c = kva_index_new(seed, max_bytes)
        self.hits = <kva_hit *>calloc(MAX_WORKERS, sizeof(kva_hit))
        if self.c == NULL or self.hits == NULL:
            raise MemoryError("not enough memory for an empty index: is max_bytes too small?")

    def __dealloc__(self):
        kva_applier_free(&self.applier)
        kva_index_free(self.c)
        free(self.hits)

    cdef kva_column *column(self, Py_ssize_t worker) except NULL:
        if not 0 <= worker < MAX_WORKERS or self.c.columns[worker] == NULL:
            raise no_such_worker(worker)
        return self.c.columns[worker]

    cdef uint32_t plane(self, Py_ssize_t plane) except? 0xFFFFFFFF:
        if not 0 <= plane < <Py_ssize_t>self.c.plane_count:
            raise no_such_plane(plane, self.c.plane_count)
        return <uint32_t>plane

    def add_plane(self):
        if self.c.plane_count == KVA_MAX_PLANES:
            raise index_full("planes", MAX_PLANES)
        plane = kva_index_add_plane(self.c)
        if plane == KVA_MAX_PLANES:
            raise MemoryError
        return plane

    def add_worker(self, str name, root_key, /, *, bint counting):
        require_u64("a root key", root_key)
        cdef kva_column *column = kva_index_add_worker(self.c, root_key, counting)
        if column == NULL:
            if None not in self.names:
                raise index_full("workers", MAX_WORKERS)
            raise MemoryError
        self.names[column.worker] = name
        return column.worker

    def drop_worker(self, Py_ssize_t worker, /):
        cdef kva_column *column = self.column(worker)
        kva_unlearn(column)
        kva_index_drop_worker(self.c, column)
        self.names[worker] = None

    def handle_numbers(self, handles, /):
        cdef uint64_t number
        numbers = array("Q", bytes(8 * len(handles)))
        cdef _Words words = _Words(numbers)
        cdef uint64_t *out = <uint64_t *>words.data
        cdef Py_ssize_t i = 0
        for handle in handles:
            if type(handle) is bytes:
                number = kva_xxh3_64(&self.c.key, <const uint8_t *>PyBytes_AsString(handle),
                                     <size_t>PyBytes_Size(handle))
            else:
                number = <uint64_t>(handle & 0xFFFFFFFFFFFFFFFF)
            out[i] = number
            i += 1
        return numbers

    def add_copies(self, Py_ssize_t worker, Py_ssize_t plane, numbers, /):
        cdef kva_column *column = self.column(worker)
        cdef _Words words = _Words(numbers)
        kva_column_add_copies(self.c, column, self.plane(plane), words.data, words.count)

    def join(self, Py_ssize_t worker, numbers, block_keys, /):
        cdef kva_column *column = self.column(worker)
        cdef _Words words = _Words(numbers)
        cdef _Words keys = _Words(block_keys)
        require_pairs(words.count, keys.count)
        cdef uint32_t *woken = <uint32_t *>malloc(sizeof(uint32_t) * (words.count + 1))
        if woken == NULL:
            raise MemoryError
        cdef size_t count = kva_column_join(self.c, column, words.data, keys.data, words.count, woken)
        positions = [woken[i] for i in range(count)]
        free(woken)
        return positions

    def remove_copies(self, Py_ssize_t worker, Py_ssize_t plane, numbers, /):
        cdef kva_column *column = self.column(worker)
        cdef _Words words = _Words(numbers)
        kva_column_remove(self.c, column, self.plane(plane), words.data, words.count)

    def key_of(self, Py_ssize_t worker, uint64_t number, /):
        cdef uint64_t key
        return key if kva_column_key(self.column(worker), number, &key) else None

    def wait(self, Py_ssize_t worker, uint64_t number, /):
        if not kva_column_wait(self.column(worker), number):
            self.column(worker).counts.refused += 1

    def stop_waiting(self, Py_ssize_t worker, uint64_t number, /):
        kva_column_stop_waiting(self.column(worker), number)

    def forget(self, Py_ssize_t worker, planes, /):
        cdef uint8_t row[256]
        memset(row, 0, sizeof(row))
        for plane in planes:
            row[self.plane(plane)] = 1
        kva_column_forget(self.c, self.column(worker), row)

    def forget_all(self, Py_ssize_t worker, /):
        kva_column_forget_all(self.c, self.column(worker))

    def forget_oldest(self, Py_ssize_t worker, size_t count, /):
        return kva_column_forget_oldest(self.c, self.column(worker), count)

    def counts(self, Py_ssize_t worker, /):
        cdef kva_counts *c = &self.column(worker).counts
        return (c.stored, c.removed, c.unknown_removals, c.unpaired, c.refused, c.forgotten, c.resident, c.unkeyed,
                c.doubted)

    def shortfall(self, Py_ssize_t worker, /):
        cdef kva_counts *c = &self.column(worker).counts
        return (c.refused + c.forgotten, c.unkeyed)

    @property
    def ticks(self):
        return self.c.ticks

    def removal_ages(self, Py_ssize_t worker, /):
        cdef kva_column *column = self.column(worker)
        return tuple([column.removal_ages[i] for i in range(KVA_AGE_BINS)])

    def ages(self, Py_ssize_t worker, numbers, /):
        cdef kva_column *column = self.column(worker)
        cdef _Words words = _Words(numbers)
        cdef uint32_t age
        return [age if kva_column_age(self.c, column, words.data[i], &age) else None for i in range(words.count)]

    def resident_ages(self, Py_ssize_t worker, size_t sample, /):
        cdef kva_column *column = self.column(worker)
        cdef uint32_t *ages = <uint32_t *>malloc(sizeof(uint32_t) * (sample + 1))
        if ages == NULL:
            raise MemoryError
        cdef size_t count = kva_column_sample_ages(self.c, column, ages, sample)
        result = [ages[i] for i in range(count)]
        free(ages)
        return result

    def touch(self, Py_ssize_t worker, block_keys, Py_ssize_t fresh, /):
        cdef kva_column *column = self.column(worker)
        cdef _Words keys = _Words(block_keys)
        return kva_column_touch(self.c, column, keys.data, <size_t>keys.count, <size_t>fresh if fresh > 0 else 0)

    def chain_uses(self, Py_ssize_t worker, block_keys, Py_ssize_t blocks, /):
        cdef kva_column *column = self.column(worker)
        cdef _Words keys = _Words(block_keys)
        cdef uint32_t age
        cdef Py_ssize_t i
        cdef list uses = []
        for i in range(min(blocks, keys.count) if column.uses.count else 0):
            if kva_column_use_age(column, keys.data[i], &age):
                uses.append((i, age))
        return uses

    def use_counts(self, Py_ssize_t worker, /):
        cdef kva_column *column = self.column(worker)
        return (column.counts.stored + column.used, column.uses.count)

    def use_removals(self, Py_ssize_t worker, /):
        cdef kva_column *column = self.column(worker)
        return {code: column.use_ages[code] for code in range(KVA_USE_BINS) if column.use_ages[code]}

    def use_ages(self, Py_ssize_t worker, Py_ssize_t sample, /):
        cdef kva_column *column = self.column(worker)
        cdef uint32_t now = kva_use_clock(column)
        cdef Py_ssize_t stride = (column.uses.capacity + sample - 1) // sample if sample > 0 else 0
        if stride == 0:
            return []
        return [
            <uint32_t>(now - column.uses.cells[at].time)
            for at in range(0, column.uses.capacity, stride)
            if column.uses.cells[at].print
        ]

    def entries(self, Py_ssize_t worker, /):
        cdef kva_column *column = self.column(worker)
        cdef size_t total = 0
        for i in range(KVA_TABLES):
            total += column.tables[i].count
        return total

    @property
    def blocks(self):
        cdef size_t total = 0
        for i in range(self.c.plane_count):
            total += self.c.planes[i].count
            if self.c.shadows[i] != NULL:
                total += self.c.shadows[i].count
        return total

    @property
    def used_bytes(self):
        return self.c.budget.used

    @property
    def live_bytes(self):
        return self.c.budget.live

    @property
    def refusals(self):
        return self.c.budget.refused

    def charge(self, Py_ssize_t count, /):
        return bool(kva_charge(&self.c.budget, count))

    cdef dict found(self, kva_walk *walk):
        cdef dict result = {}
        cdef size_t i
        for i in range(walk.hit_count):
            name = self.names[self.hits[i].worker]
            if name is not None:
                result[name] = self.hits[i].blocks
        return result

    cdef int begin(self, kva_walk *walk, Py_ssize_t plane, bytes asked, bint doubted) except -1:
        cdef uint64_t words[64]
        cdef Py_ssize_t length = PyBytes_Size(asked)
        if length > <Py_ssize_t>sizeof(words):
            length = sizeof(words)
        memset(words, 0, sizeof(words))
        memcpy(words, PyBytes_AsString(asked), <size_t>length)
        kva_walk_begin(walk, self.c, self.plane(plane), words, 64, doubted, self.hits)
        return 0

    def find(self, Py_ssize_t plane, block_keys, bytes asked not None, /, *, bint doubted=False):
        cdef kva_walk walk
        cdef _Words keys = _Words(block_keys)
        self.begin(&walk, plane, asked, doubted)
        kva_walk_on(&walk, keys.data, <size_t>keys.count)
        kva_walk_end(&walk)
        return self.found(&walk)

    def find_tokens(self, Py_ssize_t plane, token_ids, block_size, root_key, Py_ssize_t limit_blocks,
                    bytes asked not None, /, *, bint doubted=False):
        cdef kva_walk walk
        self.plane(plane)
        cdef _Tokens tokens = _Tokens(token_ids)
        count_blocks(<Py_ssize_t>tokens.c.count, block_size)
        require_u64("a root key", root_key)
        self.begin(&walk, plane, asked, doubted)
        cdef kva_status status = kva_walk_tokens(&walk, &tokens.c, block_size, root_key,
                                                 <size_t>limit_blocks if limit_blocks > 0 else 0)
        if status == KVA_NO_MEMORY:
            raise MemoryError
        if status == KVA_BAD_TOKEN:
            raise bad_token_ids(token_ids, "a value is negative or too large")
        kva_walk_end(&walk)
        return self.found(&walk)

    def held(self, Py_ssize_t plane, Py_ssize_t worker, block_keys, /):
        cdef uint32_t number = self.plane(plane)
        self.column(worker)
        cdef _Words keys = _Words(block_keys)
        cdef bytes row = PyBytes_FromStringAndSize(NULL, keys.count)
        cdef char *out = PyBytes_AsString(row)
        for i in range(keys.count):
            out[i] = <char>kva_column_holds(self.c, <uint32_t>worker, number, keys.data[i])
        return row

    # -- doubts --

    def doubt(self, Py_ssize_t worker, /):
        kva_column_doubt(self.c, self.column(worker))

    def settle(self, Py_ssize_t worker, /):
        return kva_column_settle(self.c, self.column(worker))

    def confirm(self, Py_ssize_t worker, block_keys, /, *, bint certain):
        cdef kva_column *column = self.column(worker)
        cdef _Words keys = _Words(block_keys)
        cdef size_t ended, adopted
        kva_column_confirm(self.c, column, keys.data, <size_t>keys.count, certain, &ended, &adopted)
        return (ended, adopted)

    def refute(self, Py_ssize_t worker, block_keys, /):
        cdef _Words keys = _Words(block_keys)
        return kva_column_refute(self.c, self.column(worker), keys.data, <size_t>keys.count)

    def expire_reported(self, Py_ssize_t worker, uint64_t stored, /):
        return kva_column_expire_reported(self.c, self.column(worker), stored)

    def reported(self, Py_ssize_t worker, /):
        return self.column(worker).reported.count

    # -- as bytes --

    def dump(self, Py_ssize_t worker, /):
        cdef kva_column *column = self.column(worker)
        cdef bytes data = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>kva_dump_size(column))
        kva_dump(self.c, column, <uint8_t *>PyBytes_AsString(data))
        return data

    def load(self, Py_ssize_t worker, bytes data not None, planes, /):
        cdef kva_column *column = self.column(worker)
        cdef uint32_t numbers[KVA_MAX_PLANES]
        cdef uint32_t count = 0
        require_distinct_planes(planes)
        for plane in planes:
            numbers[count] = self.plane(plane)
            count += 1
        cdef kva_dump_fault fault = kva_load(self.c, column, <const uint8_t *>PyBytes_AsString(data),
                                             <size_t>PyBytes_Size(data), numbers, count)
        if fault == KVA_DUMP_MEMORY:
            raise MemoryError
        if fault != KVA_DUMP_OK:
            raise dump_refused(<int>fault)

    # -- straight from bytes --

    def open_batch(self, payload, size_t max_events, unsigned max_depth, /):
        """Return a batch that `apply` can read, or None when it is of another form, or none at all: Python decodes it."""
        if type(payload) is not bytes:
            return None
        cdef Batch batch = Batch.__new__(Batch)
        if not kva_batch_open(&batch.c, <const uint8_t *>PyBytes_AsString(payload), <size_t>PyBytes_Size(payload),
                              max_events, max_depth):
            return None
        batch.payload = payload
        return batch

    def ingest(self, Py_ssize_t worker, payload, rank, /):
        """Open a batch and apply it, all in one.

        Args:
            rank: apply it if it is of this data-parallel rank or names none; None: only if it names none; -1: always.

        Returns:
            How many events were applied, when it was all of them; None when `open_batch` gives none; else the batch and
            what `apply` returned, or the batch alone when it is of another rank and nothing was applied.
        """
        cdef kva_batch opened
        if type(payload) is not bytes or PyBytes_Size(payload) > MAX_PAYLOAD_BYTES:
            return None
        cdef kva_column *column = self.column(worker)
        if not kva_batch_open(&opened, <const uint8_t *>PyBytes_AsString(payload), <size_t>PyBytes_Size(payload),
                              MAX_EVENTS, MAX_DEPTH):
            return None
        cdef kva_applied outcome = KVA_ALL_APPLIED
        cdef bint foreign = opened.has_rank and (rank is None or (rank != -1 and opened.rank != <int64_t>rank))
        if not foreign:
            outcome = kva_apply(self.c, column, &opened, &self.applier)
            if outcome == KVA_ALL_APPLIED:
                return opened.event_count
        cdef Batch batch = Batch.__new__(Batch)
        batch.c = opened
        batch.payload = payload
        return batch if foreign else (batch, self.stopped(outcome, batch))

    def ingest_run(self, Py_ssize_t worker, list payloads not None, Py_ssize_t start, rank, /):
        """Open and apply batches from the one at `start`, as long as `ingest` would apply all events of each.

        Returns:
            The position of the first that is not wholly applied, or the number of payloads; the events of those before
            it; and what `apply` returned for it with its batch, None when nothing of it was applied.
        """
        cdef kva_batch opened
        cdef kva_applied outcome
        cdef kva_column *column = self.column(worker)
        cdef Py_ssize_t at, count = len(payloads)
        cdef uint64_t events = 0
        cdef bint any_rank = rank is not None and rank == -1
        cdef bint no_rank = rank is None
        cdef int64_t only_rank = 0 if no_rank else rank
        cdef Batch batch
        for at in range(start, count):
            payload = payloads[at]
            if type(payload) is not bytes or PyBytes_Size(payload) > MAX_PAYLOAD_BYTES:
                return at, events, None
            if not kva_batch_open(&opened, <const uint8_t *>PyBytes_AsString(payload), <size_t>PyBytes_Size(payload),
                                  MAX_EVENTS, MAX_DEPTH):
                return at, events, None
            if opened.has_rank and not any_rank and (no_rank or opened.rank != only_rank):
                return at, events, None
            outcome = kva_apply(self.c, column, &opened, &self.applier)
            if outcome != KVA_ALL_APPLIED:
                batch = Batch.__new__(Batch)
                batch.c = opened
                batch.payload = payload
                return at, events, (batch, self.stopped(outcome, batch))
            events += opened.event_count
        return count, events, None

    cdef object stopped(self, kva_applied outcome, Batch batch):
        if outcome == KVA_ALL_APPLIED:
            return None
        if outcome == KVA_NEEDS_HELP:
            return batch.payload[self.applier.event.start : self.applier.event.end]
        return [(self.applier.woken[i].handle, self.applier.woken[i].key) for i in range(self.applier.woken_count)]

    def apply(self, Py_ssize_t worker, Batch batch not None, /):
        """Apply a batch's events, from where it stands, as far as they are of a learnt profile.

        Returns:
            None when all are applied; the bytes of an event to be decoded and applied by Python before going on; or a
            list of (number, block key) of blocks that were waited for and now have keys, to be joined before going on.
        """
        return self.stopped(kva_apply(self.c, self.column(worker), &batch.c, &self.applier), batch)

    def learn(self, Py_ssize_t worker, medium, group, kind, window, uint64_t block_size, Py_ssize_t plane, /):
        cdef kva_column *column = self.column(worker)
        cdef bytes medium_text = b"" if medium is None else medium.encode("utf-8", "surrogatepass")
        cdef bytes kind_text = b"" if kind is None else kind.encode("utf-8", "surrogatepass")
        kva_learn(column,
                  NULL if medium is None else <const char *>PyBytes_AsString(medium_text), PyBytes_Size(medium_text),
                  group is not None, 0 if group is None else group,
                  NULL if kind is None else <const char *>PyBytes_AsString(kind_text), PyBytes_Size(kind_text),
                  window is not None, 0 if window is None else window, block_size, self.plane(plane))

    def unlearn(self, Py_ssize_t worker, /):
        kva_unlearn(self.column(worker))

#include "id_runs.h"

#include "bytes.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define KVA_HAVE_SHUFFLES
#include <tmmintrin.h>
#endif

/* Bytes of an id by its first byte, 0 for what is no integer. Signed forms hold ids too when they are not negative. */
static const uint8_t id_bytes[256] = {
#define ONES 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1
    ONES, ONES, ONES, ONES, ONES, ONES, ONES, ONES,
#undef ONES
    [0xcc] = 2, 3, 5, 9, 2, 3, 5, 9,
};

uint64_t kva_ids_skip_portable(const uint8_t **from, const uint8_t *end, uint64_t count)
{
    const uint8_t *at = *from;
    uint64_t done = 0;
    for (; done < count && at < end; done++) {
        uint8_t head = *at;
        size_t width = id_bytes[head];
        if (width == 0 || width > (size_t)(end - at) || (head > 0xce && at[1] > 0x7f))
            break;
        at += width;
    }
    *from = at;
    return done;
}

static inline const uint8_t *read_id(const uint8_t *at, uint64_t *word)
{
    switch (*at) {
    case 0xcc: case 0xd0: *word = at[1]; return at + 2;
    case 0xcd: case 0xd1: *word = (uint64_t)at[1] << 8 | at[2]; return at + 3;
    case 0xce: case 0xd2: *word = kva_load32be(at + 1); return at + 5;
    case 0xcf: case 0xd3: *word = kva_load64be(at + 1); return at + 9;
    default: *word = *at; return at + 1;
    }
}

void kva_ids_read_portable(const uint8_t *at, size_t count, uint64_t *words)
{
    for (size_t i = 0; i < count; i++)
        at = read_id(at, words + i);
}

#ifdef KVA_HAVE_SHUFFLES

/* Both functions look at 16 bytes as if an id began at each of them. XORed with 0xcc, the heads of ids of 1, 2 and 4
   bytes become the codes 0, 1, 2, small integers 0x80..0xff, all else 3..0x7f: so `code > 2`, signed, is what is left to the
   portable functions (ids of 8 bytes, signed forms, what is no id). */
#define EACH(byte) _mm_set1_epi8((char)(byte))
#define PLACES _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

/* Bytes behind the head, by code. A shuffle gives 0 where bit 7 of the index is set: codes above 15 are brought there. */
__attribute__((target("ssse3"))) static inline __m128i bytes_behind(__m128i codes)
{
    const __m128i behind = _mm_setr_epi8(1, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm_shuffle_epi8(behind, _mm_adds_epu8(codes, EACH(0x70)));
}

/* From each place in 16 bytes: where the next id begins, then by doubling where the 2nd, 4th, 8th, 16th does, until the
   place lies outside, and how many ids are passed on the way. All that does not depend on where the first id begins, so
   the windows overlap in the processor; only two shuffles tie one to the next. */
__attribute__((target("ssse3"))) static uint64_t skip_windows(const uint8_t **from, const uint8_t *end, uint64_t count,
                                                                kva_ids_half *half)
{
    enum { WINDOW = 16, LONGEST_OUTSIDE = 4, NO_ID = 0x40, WORTH_HALVING = 64 };
    const uint8_t *at = *from;
    uint64_t left = count, until = half && count >= WORTH_HALVING ? count / 2 : 0;
    __m128i entry = _mm_setzero_si128(); /* where in the window its first id begins; all bytes are the same */
    while (end - at >= WINDOW + LONGEST_OUTSIDE) {
        __m128i codes = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(const void *)at), EACH(0xcc));
        /* Places are kept with 0x70 added: those outside have bit 7 set, and a shuffle by them gives 0. */
        __m128i next = _mm_add_epi8(_mm_add_epi8(PLACES, EACH(0x71)), bytes_behind(codes));
        __m128i passed = _mm_or_si128(_mm_and_si128(_mm_cmpgt_epi8(codes, EACH(2)), EACH(NO_ID)), EACH(1));
        for (int doubling = 0; doubling < 4; doubling++) {
            passed = _mm_adds_epu8(passed, _mm_shuffle_epi8(passed, next));
            next = _mm_max_epu8(next, _mm_shuffle_epi8(next, next));
        }
        unsigned ids = (unsigned)_mm_cvtsi128_si32(_mm_shuffle_epi8(passed, entry)) & 0xff;
        if (ids >= NO_ID || ids > left)
            break;
        left -= ids;
        at += WINDOW;
        entry = _mm_shuffle_epi8(_mm_and_si128(next, EACH(0x0f)), entry);
        if (until && left <= until) {
            *half = (kva_ids_half){at + (_mm_cvtsi128_si32(entry) & 0x0f), count - left};
            until = 0;
        }
    }
    *from = at + (_mm_cvtsi128_si32(entry) & 0x0f);
    return count - left;
}

enum { LONGEST_FOUR = 20 };

/* Read four ids, all of whose heads lie in 16 bytes; the fourth may end outside and is read by itself. Returns how many
   bytes they are, 0 when one of them is left to the portable function. */
__attribute__((target("ssse3"))) static inline size_t read_four(const uint8_t *at, uint64_t *words)
{
    static const uint32_t value_bits[6] = {0, 0xff, 0xff, 0xffff, 0, 0xffffffff}; /* by the bytes of an id */
    const __m128i spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m128i backward = _mm_set1_epi32((int)0xfcfdfeffu); /* -1, -2, -3, -4 */
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)at);
    __m128i codes = _mm_xor_si128(bytes, EACH(0xcc));
    __m128i behind = bytes_behind(codes);
    /* From each place, where the id after the one there begins; then two, three and four further on. */
    __m128i second = _mm_add_epi8(_mm_add_epi8(PLACES, EACH(1)), behind);
    __m128i third = _mm_shuffle_epi8(second, second);
    __m128i fourth = _mm_shuffle_epi8(second, third);
    __m128i fifth = _mm_shuffle_epi8(third, third);
    size_t step = (size_t)_mm_cvtsi128_si32(fifth) & 0xff;
    __m128i starts = _mm_unpacklo_epi16(_mm_unpacklo_epi8(PLACES, second), _mm_unpacklo_epi8(third, fourth));
    __m128i ends = _mm_unpacklo_epi16(_mm_unpacklo_epi8(second, third), _mm_unpacklo_epi8(fourth, fifth));
    if (_mm_movemask_epi8(_mm_cmpgt_epi8(_mm_shuffle_epi8(codes, starts), EACH(2))) & 0xf)
        return 0;
    __m128i value_bytes = _mm_max_epu8(_mm_shuffle_epi8(behind, starts), EACH(1)); /* a small one is its own head */
    __m128i first_byte = _mm_shuffle_epi8(_mm_sub_epi8(ends, value_bytes), spread);
    __m128i from_last = _mm_add_epi8(_mm_shuffle_epi8(ends, spread), backward);
    __m128i outside = _mm_cmpgt_epi8(first_byte, from_last);
    __m128i values = _mm_shuffle_epi8(bytes, _mm_or_si128(from_last, outside));
    _mm_storeu_si128((__m128i *)(void *)words, _mm_unpacklo_epi32(values, _mm_setzero_si128()));
    _mm_storeu_si128((__m128i *)(void *)(words + 2), _mm_unpackhi_epi32(values, _mm_setzero_si128()));
    size_t fourth_start = ((size_t)_mm_cvtsi128_si32(starts) >> 24) & 0xff;
    words[3] = kva_load32be(at + step - 4) & value_bits[step - fourth_start];
    return step;
}

typedef struct {
    const uint8_t *at;
    size_t left;
    uint64_t *words;
} part;

__attribute__((target("ssse3"))) static inline int part_goes_on(part *p, const uint8_t *end)
{
    if (p->left < 4 || end - p->at < LONGEST_FOUR)
        return 0;
    size_t step = read_four(p->at, p->words);
    p->at += step;
    p->words += step ? 4 : 0;
    p->left -= step ? 4 : 0;
    return step != 0;
}

/* A step has to wait for the one before, but two parts do not wait for each other. */
__attribute__((target("ssse3"))) static void read_parts(part *one, part *other, const uint8_t *end)
{
    part a = *one, b = *other; /* copies, that they stay in registers */
    while (part_goes_on(&a, end) & part_goes_on(&b, end))
        ;
    while (part_goes_on(&a, end))
        ;
    while (part_goes_on(&b, end))
        ;
    *one = a, *other = b;
}

#endif

uint64_t kva_ids_skip(const uint8_t **at, const uint8_t *end, uint64_t count, kva_ids_half *half)
{
    uint64_t done = 0;
    if (half)
        *half = (kva_ids_half){NULL, 0};
#ifdef KVA_HAVE_SHUFFLES
    if (count >= 4 && __builtin_cpu_supports("ssse3"))
        done = skip_windows(at, end, count, half);
#endif
    return done + kva_ids_skip_portable(at, end, count - done);
}

void kva_ids_read(const uint8_t *at, const uint8_t *end, size_t count, kva_ids_half half, uint64_t *words)
{
#ifdef KVA_HAVE_SHUFFLES
    if (count >= 4 && __builtin_cpu_supports("ssse3")) {
        size_t before = half.at ? (size_t)half.before : count;
        part one = {at, before, words}, other = {half.at ? half.at : end, count - before, words + before};
        read_parts(&one, &other, end);
        kva_ids_read_portable(one.at, one.left, one.words);
        kva_ids_read_portable(other.at, other.left, other.words);
        return;
    }
#endif
    (void)end, (void)half;
    kva_ids_read_portable(at, count, words);
}

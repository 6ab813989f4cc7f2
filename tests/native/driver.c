/* Runs every kernel over shapes that reach each branch, in exactly sized allocations, so that the sanitizers see a byte
   read or written outside. Results are held against known digests, and the two SHA-256 against each other; that they
   are right for every input is the Python tests' business. Exit status 0: all well. */
#include "apply_checks.h"
#include "batch_checks.h"
#include "bytes.h"
#include "cbor.h"
#include "chain.h"
#include "dump_checks.h"
#include "fnv1a.h"
#include "index_checks.h"
#include "xxh3.h"
#include "xxh64.h"
#include "zmtp_checks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;

static void expect(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "FAILED: %s\n", what);
        failures++;
    }
}

static void *allocate(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory)
        abort();
    return memory;
}

/* A fixed sequence: the driver does the same in every run. */
static uint64_t next_random(void)
{
    static uint64_t state = 1;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void sha256_of(kva_sha256 sha256, const void *data, size_t length, uint8_t digest[32])
{
    uint8_t *message = allocate(length + KVA_SHA256_PADDING_MAX);
    memcpy(message, data, length);
    sha256(message, kva_sha256_pad(message, length), digest);
    free(message);
}

static void expect_hex(const uint8_t *bytes, size_t length, const char *hex, const char *what)
{
    char text[65];
    for (size_t i = 0; i < length; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    expect(strcmp(text, hex) == 0, what);
}

static void check_sha256(void)
{
    const char *name;
    kva_sha256 best = kva_sha256_best(&name);
    printf("sha256: %s beside portable\n", name);
    uint8_t one[32], other[32], data[300];
    sha256_of(kva_sha256_portable, "abc", 3, one);
    expect_hex(one, 32, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "SHA-256 of abc");
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)next_random();
    for (size_t length = 0; length <= sizeof data; length++) {
        sha256_of(kva_sha256_portable, data, length, one);
        sha256_of(best, data, length, other);
        expect(memcmp(one, other, 32) == 0, "both SHA-256 agree");
    }
}

static void check_xxh3(void)
{
    kva_xxh3_key key;
    kva_xxh3_prepare(&key, 0);
    uint8_t digest[16];
    kva_xxh3_128(&key, (const uint8_t *)"", 0, digest);
    expect_hex(digest, 16, "99aa06d3014798d86001c324468d497f", "XXH3-128 of nothing");
    expect(kva_xxh3_64(&key, (const uint8_t *)"", 0) == 0x2d06800538d394c2u, "XXH3-64 of nothing");
    expect(kva_xxh64((const uint8_t *)"", 0, 0) == 0xef46db3751d8e999u, "XXH64 of nothing");
    for (size_t length = 0; length < 2200; length += length < 300 ? 1 : 61) {
        uint8_t *data = allocate(length);
        for (size_t i = 0; i < length; i++)
            data[i] = (uint8_t)next_random();
        kva_xxh3_prepare(&key, next_random());
        uint64_t hash = kva_xxh3_64(&key, data, length);
        if (length > 0) {
            data[length / 2] ^= 1;
            expect(kva_xxh3_64(&key, data, length) != hash, "XXH3-64 sees every byte");
            uint8_t one[16], other[16];
            kva_xxh3_128(&key, data, length, one);
            data[length - 1] ^= 1;
            kva_xxh3_128(&key, data, length, other);
            expect(memcmp(one, other, 16) != 0, "XXH3-128 sees every byte");
            hash = kva_xxh64(data, length, length);
            data[length / 3] ^= 1;
            expect(kva_xxh64(data, length, length) != hash, "XXH64 sees every byte");
        }
        free(data);
    }
}

static void check_cbor(void)
{
    static const uint64_t values[] = {0,      23,     24,         255,        256,           65535,
                                      65536,  UINT32_MAX, (uint64_t)UINT32_MAX + 1, INT64_MAX, UINT64_MAX};
    static const char *const heads[] = {"00",         "17",         "1818",       "18ff",
                                        "190100",     "19ffff",     "1a00010000", "1affffffff",
                                        "1b0000000100000000", "1b7fffffffffffffff", "1bffffffffffffffff"};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        uint8_t *out = allocate(KVA_CBOR_HEAD_MAX);
        size_t length = (size_t)(kva_cbor_head(out, KVA_CBOR_UINT, values[i]) - out);
        expect_hex(out, length, heads[i], "CBOR integer");
        free(out);
    }
}

static void fill(kva_tokens *tokens, uint64_t limit)
{
    for (size_t i = 0; i < tokens->count; i++) {
        uint64_t id = next_random() % limit;
        switch (tokens->kind) {
        case KVA_I32: ((int32_t *)tokens->data)[i] = (int32_t)id; break;
        case KVA_U32: ((uint32_t *)tokens->data)[i] = (uint32_t)id; break;
        case KVA_I64: ((int64_t *)tokens->data)[i] = (int64_t)id; break;
        case KVA_U64: ((uint64_t *)tokens->data)[i] = id; break;
        }
    }
}

static void check_chains_of(kva_token_kind kind, size_t count, size_t block_size, uint64_t limit, int with_extras)
{
    size_t width = kind == KVA_I32 || kind == KVA_U32 ? 4 : 8;
    void *ids = allocate(count * width);
    kva_tokens tokens = {ids, count, kind};
    fill(&tokens, limit);
    expect(kva_tokens_valid(&tokens), "ids in range are valid");

    size_t blocks = count / block_size, pages = kva_bigram_pages(count, block_size);
    uint8_t extra_bytes[40], parent[32];
    memset(extra_bytes, 0x5a, sizeof extra_bytes);
    memset(parent, 0xa5, sizeof parent);
    kva_extra *extras = NULL;
    if (with_extras) {
        extras = allocate(blocks * sizeof *extras);
        for (size_t i = 0; i < blocks; i++)
            extras[i] = i % 3 == 0 ? (kva_extra){NULL, 0} : (kva_extra){extra_bytes, i * 7 % (sizeof extra_bytes + 1)};
    }
    const char *name;
    kva_sha256 best = kva_sha256_best(&name);
    uint8_t *digests = allocate(blocks * 32), *others = allocate(blocks * 32), *pairs = allocate(pages * 32);
    uint64_t *keys = allocate(blocks * 8);
    expect(kva_chain_sha256_cbor(best, &tokens, block_size, parent, 32, extras, digests) == KVA_OK, "cbor chain");
    expect(kva_chain_sha256_cbor(kva_sha256_portable, &tokens, block_size, parent, 32, extras, others) == KVA_OK,
           "portable cbor chain");
    expect(memcmp(digests, others, blocks * 32) == 0, "both cbor chains agree");
    expect(kva_chain_sha256_cbor(best, &tokens, block_size, NULL, 0, extras, digests) == KVA_OK, "no parent");
    expect(kva_chain_sha256_pages(best, &tokens, block_size, 0, parent, 32, digests) == KVA_OK, "page chain");
    expect(kva_chain_sha256_pages(best, &tokens, block_size, 1, NULL, 0, pairs) == KVA_OK, "bigram chain");
    expect(kva_chain_xxh3(&tokens, block_size, 1, 2, extras, keys) == KVA_OK, "xxh3 chain");
    kva_xxh3_key key;
    kva_xxh3_prepare(&key, 2);
    uint64_t *same = allocate(blocks * 8);
    expect(kva_block_keys(&key, &tokens, block_size, 1, extras, same) == KVA_OK, "block keys");
    expect(memcmp(keys, same, blocks * 8) == 0, "a key prepared by the caller gives the same");
    expect(kva_chain_xxh3_128_cbor(&tokens, block_size, parent, 32, extras, digests) == KVA_OK, "xxh3-128 chain");
    expect(kva_chain_xxh3_128_cbor(&tokens, block_size, NULL, 0, extras, digests) == KVA_OK, "no parent");
    kva_chain_xxh3_pairs(&key, keys, blocks, NULL, same);
    expect(blocks == 0 || same[0] == keys[0], "without a parent the first hash stays");
    kva_chain_xxh3_pairs(&key, keys, blocks, &(uint64_t){5}, same);
    kva_status status = limit >> 32 ? KVA_BAD_TOKEN : KVA_OK; /* the large ids at hand do not fit 32 bits */
    expect(kva_chain_fnv1a_cbor(&tokens, block_size, UINT64_MAX, extras, keys) == status, "fnv chain");
    expect(kva_chain_xxh64(&tokens, block_size, UINT64_MAX, extras, keys) == status, "xxh64 chain");
    for (size_t overlap = 0; overlap < 2; overlap++)
        expect(kva_xxh3_blocks(&key, &tokens, block_size, overlap, extras, keys) == status, "xxh3 blocks");
    free(same);
    free(ids), free(extras), free(digests), free(others), free(pairs), free(keys);
}

static void check_chains(void)
{
    static const size_t counts[] = {0, 1, 2, 15, 16, 17, 64, 333};
    static const size_t block_sizes[] = {1, 2, 3, 15, 16, 17, 28, 29, 64, 334};
    static const uint64_t limits[] = {24, 256, 70000, INT32_MAX};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (size_t b = 0; b < sizeof block_sizes / sizeof *block_sizes; b++)
            for (size_t l = 0; l < sizeof limits / sizeof *limits; l++)
                for (int kind = KVA_I32; kind <= KVA_U64; kind++)
                    check_chains_of((kva_token_kind)kind, counts[c], block_sizes[b], limits[l], (c + b) % 2 == 1);
    check_chains_of(KVA_I64, 100, 7, INT64_MAX, 0);
    check_chains_of(KVA_U64, 100, 7, INT64_MAX, 1);
}

static void check_refusals(void)
{
    int32_t negative[4] = {1, 2, -1, 4};
    uint64_t large[2] = {1, UINT64_C(1) << 63};
    kva_tokens bad[] = {{negative, 4, KVA_I32}, {large, 2, KVA_U64}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint8_t digests[64];
        uint64_t keys[2];
        expect(!kva_tokens_valid(&bad[i]), "ids out of range are seen");
        expect(kva_chain_sha256_cbor(kva_sha256_portable, &bad[i], 2, NULL, 0, NULL, digests) == KVA_BAD_TOKEN, "cbor");
        expect(kva_chain_sha256_pages(kva_sha256_portable, &bad[i], 2, 0, NULL, 0, digests) == KVA_BAD_TOKEN, "pages");
        expect(kva_chain_xxh3(&bad[i], 2, 0, 0, NULL, keys) == KVA_BAD_TOKEN, "xxh3");
        expect(kva_chain_fnv1a_cbor(&bad[i], 2, 0, NULL, keys) == KVA_BAD_TOKEN, "fnv");
        expect(kva_chain_xxh3_128_cbor(&bad[i], 2, NULL, 0, NULL, digests) == KVA_BAD_TOKEN, "xxh3-128");
        expect(kva_chain_xxh64(&bad[i], 2, 0, NULL, keys) == KVA_BAD_TOKEN, "xxh64");
        kva_xxh3_key key;
        kva_xxh3_prepare(&key, 0);
        expect(kva_xxh3_blocks(&key, &bad[i], 2, 0, NULL, keys) == KVA_BAD_TOKEN, "blocks");
    }
    expect(kva_fnv1a_64((const uint8_t *)"42", 2, KVA_FNV1A_BASIS) == 0x07ee7e07b4b19223u, "FNV-1a-64 of 42");
}

int main(void)
{
    check_sha256();
    check_xxh3();
    check_cbor();
    check_chains();
    check_refusals();
    check_batches(expect);
    check_index(expect);
    check_apply(expect);
    check_dumps(expect);
    check_zmtp(expect);
    if (failures)
        fprintf(stderr, "%d checks failed\n", failures);
    else
        puts("all kernels well");
    return failures != 0;
}

#include "sha256.h"

#include "bytes.h"

#include <string.h>

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define KVA_HAVE_SHA_NI 1
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && \
    (defined(__linux__) || defined(__ARM_FEATURE_SHA2))
#define KVA_HAVE_ARM_SHA2 1
#include <arm_neon.h>
#ifndef __ARM_FEATURE_SHA2
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#ifdef __clang__
#define KVA_ARM_SHA2_TARGET "sha2"
#else
#define KVA_ARM_SHA2_TARGET "+crypto" /* what its header asks for; the AES part is not used */
#endif
#endif

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static const uint32_t initial_state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static inline uint32_t rotate_right(uint32_t v, unsigned by)
{
    return v >> by | v << (32 - by);
}

void kva_sha256_portable(const uint8_t *data, size_t blocks, uint8_t digest[KVA_SHA256_BYTES])
{
    uint32_t state[8];
    memcpy(state, initial_state, sizeof state);
    for (; blocks > 0; blocks--, data += KVA_SHA256_BLOCK) {
        uint32_t w[64];
        for (int t = 0; t < 16; t++)
            w[t] = kva_load32be(data + 4 * t);
        for (int t = 16; t < 64; t++) {
            uint32_t s0 = rotate_right(w[t - 15], 7) ^ rotate_right(w[t - 15], 18) ^ w[t - 15] >> 3;
            uint32_t s1 = rotate_right(w[t - 2], 17) ^ rotate_right(w[t - 2], 19) ^ w[t - 2] >> 10;
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 64; t++) {
            uint32_t sum1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
            uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + round_constants[t] + w[t];
            uint32_t sum0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
            uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
    for (int i = 0; i < 8; i++)
        kva_store32be(digest + 4 * i, state[i]);
}

#ifdef KVA_HAVE_SHA_NI

static inline __m128i load128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* The instructions want the state as two registers, ABEF and CDGH (highest word first), and do four rounds from one
   register of message words with the round constants added. */
__attribute__((target("sha,sse4.1,ssse3"))) static void sha_ni(const uint8_t *data, size_t blocks,
                                                               uint8_t digest[KVA_SHA256_BYTES])
{
    const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i cdab = _mm_shuffle_epi32(load128(initial_state), 0xb1);
    __m128i efgh = _mm_shuffle_epi32(load128(initial_state + 4), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

    for (; blocks > 0; blocks--, data += KVA_SHA256_BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4]; /* the last 16 words of the schedule, oldest first */
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(load128(data + 16 * i), to_big_endian);
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++) {
            __m128i sum = _mm_add_epi32(w[0], load128(round_constants + 4 * group));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            /* Words 16 further on: msg1 adds the s0 part, the alignr is w[t-7], msg2 adds the s1 part. */
            __m128i next = w[0];
            if (group < 12) {
                next = _mm_add_epi32(_mm_sha256msg1_epu32(w[0], w[1]), _mm_alignr_epi8(w[3], w[2], 4));
                next = _mm_sha256msg2_epu32(next, w[3]);
            }
            w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = next;
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }

    __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    __m128i dcba = _mm_blend_epi16(feba, dchg, 0xf0);
    __m128i hgfe = _mm_alignr_epi8(dchg, feba, 8);
    _mm_storeu_si128((__m128i *)(void *)digest, _mm_shuffle_epi8(dcba, to_big_endian));
    _mm_storeu_si128((__m128i *)(void *)(digest + 16), _mm_shuffle_epi8(hgfe, to_big_endian));
}

static int processor_has_sha_ni(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 9) || !(c & 1u << 19)) /* SSSE3, SSE4.1 */
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
}

#endif

#ifdef KVA_HAVE_ARM_SHA2

/* As above, but the state is ABCD and EFGH, lowest word first, and an instruction does its half of four rounds. */
__attribute__((target(KVA_ARM_SHA2_TARGET))) static void arm_sha2(const uint8_t *data, size_t blocks,
                                                                  uint8_t digest[KVA_SHA256_BYTES])
{
    uint32x4_t abcd = vld1q_u32(initial_state), efgh = vld1q_u32(initial_state + 4);
    for (; blocks > 0; blocks--, data += KVA_SHA256_BLOCK) {
        const uint32x4_t abcd_before = abcd, efgh_before = efgh;
        uint32x4_t w[4]; /* the last 16 words of the schedule, oldest first */
        for (int i = 0; i < 4; i++)
            w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++) {
            const uint32x4_t sum = vaddq_u32(w[0], vld1q_u32(round_constants + 4 * group)), abcd_old = abcd;
            abcd = vsha256hq_u32(abcd, efgh, sum);
            efgh = vsha256h2q_u32(efgh, abcd_old, sum);
            const uint32x4_t next = group < 12 ? vsha256su1q_u32(vsha256su0q_u32(w[0], w[1]), w[2], w[3]) : w[0];
            w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = next;
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u8(digest, vrev32q_u8(vreinterpretq_u8_u32(abcd)));
    vst1q_u8(digest + 16, vrev32q_u8(vreinterpretq_u8_u32(efgh)));
}

static int processor_has_arm_sha2(void)
{
#ifdef __ARM_FEATURE_SHA2 /* the compiler was told, as for Apple's processors, all of which have it */
    return 1;
#else
    return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0;
#endif
}

#endif

kva_sha256 kva_sha256_best(const char **name)
{
#ifdef KVA_HAVE_SHA_NI
    if (processor_has_sha_ni()) {
        *name = "sha-ni";
        return sha_ni;
    }
#elif defined(KVA_HAVE_ARM_SHA2)
    if (processor_has_arm_sha2()) {
        *name = "armv8";
        return arm_sha2;
    }
#endif
    *name = "portable";
    return kva_sha256_portable;
}

size_t kva_sha256_pad(uint8_t *message, size_t length)
{
    /* A one bit, zeros, and the length in bits in the last 8 bytes of a block. */
    size_t blocks = (length + 8) / KVA_SHA256_BLOCK + 1;
    size_t end = blocks * KVA_SHA256_BLOCK;
    memset(message + length, 0, end - length);
    message[length] = 0x80;
    kva_store64be(message + end - 8, (uint64_t)length * 8);
    return blocks;
}

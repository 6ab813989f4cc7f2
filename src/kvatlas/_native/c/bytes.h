/* Integers as bytes of a fixed order, at any alignment, on any machine. Compilers turn each of these into one move. */
#ifndef KVA_BYTES_H
#define KVA_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t kva_load32le(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t kva_load64le(const uint8_t *p)
{
    return (uint64_t)kva_load32le(p) | (uint64_t)kva_load32le(p + 4) << 32;
}

static inline uint32_t kva_load32be(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

static inline uint64_t kva_load64be(const uint8_t *p)
{
    return (uint64_t)kva_load32be(p) << 32 | kva_load32be(p + 4);
}

static inline void kva_store32le(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
    p[3] = (uint8_t)(v >> 24);
}

static inline void kva_store64le(uint8_t *p, uint64_t v)
{
    kva_store32le(p, (uint32_t)v);
    kva_store32le(p + 4, (uint32_t)(v >> 32));
}

static inline void kva_store32be(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)(v >> 24);
    p[1] = (uint8_t)(v >> 16);
    p[2] = (uint8_t)(v >> 8);
    p[3] = (uint8_t)v;
}

static inline void kva_store64be(uint8_t *p, uint64_t v)
{
    kva_store32be(p, (uint32_t)(v >> 32));
    kva_store32be(p + 4, (uint32_t)v);
}

static inline void kva_store_words64le(uint8_t *p, const uint64_t *words, size_t count)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(p, words, count * sizeof *words);
#else
    for (size_t i = 0; i < count; i++)
        kva_store64le(p + 8 * i, words[i]);
#endif
}

static inline uint32_t kva_swap32(uint32_t v)
{
    return v >> 24 | (v >> 8 & 0xff00u) | (v << 8 & 0xff0000u) | v << 24;
}

static inline uint64_t kva_swap64(uint64_t v)
{
    return (uint64_t)kva_swap32((uint32_t)v) << 32 | kva_swap32((uint32_t)(v >> 32));
}

#endif

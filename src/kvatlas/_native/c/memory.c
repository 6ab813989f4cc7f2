#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "memory.h"

#include <stdint.h>
#include <stdlib.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define KVA_HAVE_MMAP 1
#endif

enum { FROM_SYSTEM = 64 * 1024, PAGE = 4096, HEAP_HEADER = 16 };

static int is_from_system(size_t bytes)
{
#ifdef KVA_HAVE_MMAP
    return bytes >= FROM_SYSTEM;
#else
    (void)bytes;
    return 0;
#endif
}

static size_t cost_of(size_t bytes)
{
    if (is_from_system(bytes))
        return (bytes + PAGE - 1) / PAGE * PAGE;
    return (bytes + 15) / 16 * 16 + HEAP_HEADER;
}

void *kva_take(kva_budget *budget, size_t bytes)
{
    size_t cost = cost_of(bytes);
    if (bytes > SIZE_MAX / 2)
        return NULL;
    if (budget->cap && (cost > budget->cap || budget->used > budget->cap - cost)) {
        budget->refused++;
        return NULL;
    }
    void *memory;
#ifdef KVA_HAVE_MMAP
    if (is_from_system(bytes)) {
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return NULL;
    } else
#endif
    {
        memory = calloc(1, bytes ? bytes : 1);
        if (!memory)
            return NULL;
    }
    budget->used += cost;
    return memory;
}

void kva_give_back(kva_budget *budget, void *memory, size_t bytes)
{
    if (!memory)
        return;
    budget->used -= cost_of(bytes);
#ifdef KVA_HAVE_MMAP
    if (is_from_system(bytes)) {
        munmap(memory, bytes);
        return;
    }
#endif
    free(memory);
}

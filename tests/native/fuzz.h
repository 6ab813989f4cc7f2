/* What the fuzz runs share: rounds until the time is over, and a failure that says how to see it again. */
#ifndef FUZZ_H
#define FUZZ_H

#include "batch_checks.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t seed, rounds;
static clock_t fuzz_end;

static void require(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "FAILED in round %llu of seed %llu: %s\n", (unsigned long long)rounds, (unsigned long long)seed, what);
    exit(1);
}

/* Arguments: how many seconds, and the seed. */
static void begin_rounds(maker *m, int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 10;
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    m->state = seed * 2 + 1;
    fuzz_end = clock() + (clock_t)(seconds * CLOCKS_PER_SEC);
}

/* Whether to go on with round `rounds`. The clock is asked now and then. */
static int is_time_left(void)
{
    return rounds % 64 || clock() < fuzz_end;
}

#endif

/* Checksums of records, and copying what they hold. */
#include "core.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

uint64_t core_checksum(const uint8_t *data, size_t size, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, size, seed);
}

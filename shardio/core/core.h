/* What the files of the core know of each other. */
#ifndef SHARDIO_CORE_H
#define SHARDIO_CORE_H

#include <stddef.h>
#include <stdint.h>

/* records.c: the checksum of a record, as docs/format.md has it. */
uint64_t core_checksum(const uint8_t *data, size_t size, uint64_t seed);

#endif

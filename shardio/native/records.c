/* Records of record shards: their checksums, their heads, and copying what they hold.
 *
 * docs/format.md has the bytes. What is not as it should be is left to Python, which finds the words.
 */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* The system's header, compiled in: calls of libxxhash take 1.3 times as long (1 KB: 71 ns for 55),
 * and the library could be gone when the core runs. From 0.8.0 on XXH3 is what it is today; where
 * there is no such header, Python reads the records. */
#if __has_include(<xxhash.h>)
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

#define FRAME 16           /* checksum 8 | length 4 | length of the head 4 */
#define MAX_HEAD (1 << 20) /* as in sample.py */
#define BLOCK (32 << 10)   /* bytes that are read before they are copied, at least */
#define AT_ONCE 32         /* and records, at most */
#define LARGE CORE_LARGE   /* bytes of a record from which on its blobs are read where they go */
#define LINE 64            /* offsets that are packed as the distance from one line */

#if defined(XXH_VERSION_NUMBER) && XXH_VERSION_NUMBER >= 800
const bool core_checks = true;

uint64_t core_checksum(const uint8_t *data, size_t size, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, size, seed);
}

/* The checksum of two pieces of one record. */
static uint64_t checksum_of_two(const uint8_t *first, size_t size, const uint8_t *second,
                                size_t more, uint64_t seed)
{
    XXH3_state_t state;
    memset(&state, 0, sizeof state); /* XXH3_INITSTATE, which 0.8.0 has not */
    XXH3_64bits_reset_withSeed(&state, seed);
    XXH3_64bits_update(&state, first, size);
    XXH3_64bits_update(&state, second, more);
    return XXH3_64bits_digest(&state);
}
#else
const bool core_checks = false;

uint64_t core_checksum(const uint8_t *data, size_t size, uint64_t seed)
{
    (void)data, (void)size;
    return seed;
}

static uint64_t checksum_of_two(const uint8_t *first, size_t size, const uint8_t *second,
                                size_t more, uint64_t seed)
{
    (void)first, (void)size, (void)second, (void)more;
    return seed;
}
#endif

void core_copy(uint8_t *to, const uint8_t *from, size_t size)
{
#ifdef __SSE2__
    /* Past the caches, which have no room for it: what is written need not be read first. 2.5 ms
     * for 38 MB, where memcpy takes 4. */
    if (size >= 16 << 20 && (uintptr_t)to % 16 == 0) {
        for (; size >= 64; to += 64, from += 64, size -= 64)
            for (int i = 0; i < 4; i++)
                _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
        _mm_sfence();
    }
#endif
    memcpy(to, from, size);
}

static uint64_t big(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | at[i];
    return value;
}

static uint64_t little(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i--;)
        value = value << 8 | at[i];
    return value;
}

int64_t core_verify(const uint8_t *record, size_t size, uint64_t seed)
{
    if (!core_checks || size < FRAME)
        return -1;
    uint64_t length = little(record + 8, 4), head = little(record + 12, 4);
    if (length != size - FRAME || head > length || head > MAX_HEAD ||
        core_checksum(record + 8, size - 8, seed) != little(record, 8))
        return -1;
    return (int64_t)head;
}

int core_copy_verified(const uint8_t *record, size_t size, uint64_t seed, uint8_t *out)
{
    memcpy(out, record, size); /* first: what is hashed is in the CPU's cache then, and is ours */
    if (core_verify(out, size, seed) < 0)
        return 0;
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(seed >> 8 * i);
    return 1;
}

/* How many of the `size` bytes at byte `at` of the file could be read. */
static size_t read_some(int file, uint8_t *to, size_t size, int64_t at)
{
    size_t done = 0;
    while (done < size) {
        ssize_t got = pread(file, to + done, size - done, (off_t)(at + (int64_t)done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    return done;
}

int core_record(const core_shard *shard, int64_t record, int64_t at, uint8_t *out, size_t size)
{
    size_t done = 0;
    for (ssize_t got; done < size; done += (size_t)got)
        if ((got = pread(shard->file, out + done, size - done, (off_t)(at + (int64_t)done))) <= 0)
            return 0; /* after a signal, too: Python, which reads it then, runs the handlers */
    return core_verify(out, size, shard->seed + (uint64_t)record) >= 0;
}

int core_take_places(core_shard *shard, const void *data, size_t size)
{
    uint64_t head[4]; /* numbers, step, bytes of a high part, numbers of a record */
    if (size < sizeof head || (uintptr_t)data % sizeof *head)
        return 0;
    memcpy(head, data, sizeof head);
    uint64_t lines = head[0] / LINE + (head[0] % LINE > 0), high = head[2], each = head[3];
    if (!lines || (high && high != 1 && high != 8) || (each != 1 && each != 2) ||
        lines > (size - sizeof head) / (8 + LINE * (2 + high)))
        return 0;
    shard->offsets = (const int64_t *)data + 4, shard->step = head[1];
    shard->low = (const uint8_t *)(shard->offsets + lines);
    shard->high = shard->low + 2 * LINE * lines, shard->high_bytes = (unsigned)high;
    shard->gaps = each == 2, shard->records = (int64_t)(head[0] / each) - 1;
    return 1;
}

/* One of the offsets, which may be anything: so by unsigned arithmetic. */
static int64_t offset(const core_shard *shard, int64_t at)
{
    if (!shard->low)
        return shard->offsets[at];
    uint16_t low;
    uint64_t high = 0;
    memcpy(&low, shard->low + 2 * at, sizeof low);
    if (shard->high_bytes == 1)
        high = shard->high[at];
    else if (shard->high_bytes)
        memcpy(&high, shard->high + 8 * at, sizeof high);
    uint64_t line = (uint64_t)shard->offsets[at / LINE] + shard->step * (uint64_t)(at % LINE);
    return (int64_t)(line + low + (high << 16));
}

int core_locate(const core_shard *shard, int64_t record, int64_t *at, size_t *size)
{
    if (record < 0 || record >= shard->records)
        return 0;
    int64_t first = shard->gaps ? 2 * record : record;
    int64_t start = offset(shard, first), stop = offset(shard, first + 1);
    if (start < 0 || stop < start || stop - start > FRAME + (int64_t)UINT32_MAX)
        return 0;
    *at = start, *size = (size_t)(stop - start);
    return 1;
}

int64_t core_read(const core_shard *shard, const int64_t *records, int64_t count, uint8_t *out,
                  size_t room, core_range *blobs)
{
    size_t used = 0, filled = 0, size, more; /* bytes of records that are right, and that were read */
    int64_t at, next, done = 0;
    for (; done < count; done++) {
        int64_t number = records[done];
        if (!core_locate(shard, number, &at, &size) || size > room - used)
            break;
        if (used == filled) { /* it, and those that lie behind it and are wanted next */
            size_t run = size;
            for (int64_t i = done + 1; i < count && core_locate(shard, records[i], &next, &more) &&
                                       next == at + (int64_t)run && more <= room - used - run; i++)
                run += more;
            filled += read_some(shard->file, out + used, run, at);
        }
        if (size > filled - used)
            break;
        int64_t head = core_verify(out + used, size, shard->seed + (uint64_t)number);
        if (head < 0)
            break;
        blobs[done].start = used + FRAME + (size_t)head;
        blobs[done].size = size - FRAME - (size_t)head;
        used += size;
    }
    return done;
}

int64_t core_gather(const core_shard *shard, const int64_t *records, int64_t count,
                    const uint8_t *begin, size_t begins, uint8_t *out, size_t row,
                    const int64_t *rows, int64_t all)
{
    /* By way of a small place, which stays in the CPU's cache. Blocks that hold whole windows would
     * save 0.4 us for 3 KB, and take 20 MB of memory. */
    size_t room = BLOCK, most = FRAME + MAX_HEAD + begins + row, size;
    int64_t at, done = 0, got = 1;
    for (int64_t i = 0; i < count; i++)
        if (core_locate(shard, records[i], &at, &size) && size > room)
            room = size;
    if (room > most)
        room = most;
    core_range blobs[AT_ONCE];
    uint8_t *block = malloc(room);
    while (block && got && done < count) {
        got = count - done < AT_ONCE ? count - done : AT_ONCE;
        got = core_read(shard, records + done, got, block, room, blobs);
        for (int64_t i = 0; i < got; i++, done++) {
            const uint8_t *blob = block + blobs[i].start;
            int64_t to = rows[done];
            if (to < 0 || to >= all || blobs[i].size != begins + row || memcmp(blob, begin, begins)) {
                free(block);
                return done;
            }
            memcpy(out + (size_t)to * row, blob + begins, row);
        }
    }
    free(block);
    return done;
}

/* One value of a head, and how many bytes it takes: 0 when it is none of those that are known. */
static size_t value(const uint8_t *at, size_t left, core_value *out)
{
    uint8_t tag = left ? at[0] : 0xc1; /* which msgpack never uses */
    size_t size = 0, lengths = 0;      /* bytes of a number; of the length of a text */
    out->kind = CORE_INT;
    if (tag <= 0x7f || tag >= 0xe0) {
        out->number = (uint64_t)(int64_t)(int8_t)tag, out->is_signed = 1;
        return 1;
    }
    if (tag >= 0xcc && tag <= 0xd3) {
        size = (size_t)1 << ((tag - 0xcc) & 3);
        if (left < 1 + size)
            return 0;
        out->number = big(at + 1, (int)size), out->is_signed = tag >= 0xd0;
        if (out->is_signed && size < 8 && out->number >> (8 * size - 1))
            out->number |= ~(uint64_t)0 << 8 * size;
        return 1 + size;
    }
    switch (tag) {
    case 0xc0: out->kind = CORE_NONE; return 1;
    case 0xc2:
    case 0xc3: out->kind = CORE_BOOL, out->number = tag & 1; return 1;
    case 0xcb:
        if (left < 9)
            return 0;
        out->kind = CORE_FLOAT, out->number = big(at + 1, 8);
        return 9;
    case 0xc4: case 0xc5: case 0xc6: out->kind = CORE_BYTES, lengths = (size_t)1 << (tag - 0xc4); break;
    case 0xd9: case 0xda: case 0xdb: out->kind = CORE_STR, lengths = (size_t)1 << (tag - 0xd9); break;
    default:
        if (tag < 0xa0 || tag > 0xbf)
            return 0;
        out->kind = CORE_STR, size = tag & 31;
    }
    if (left < 1 + lengths)
        return 0;
    if (lengths)
        size = big(at + 1, (int)lengths);
    if (size > left - 1 - lengths)
        return 0;
    out->text = at + 1 + lengths, out->number = size;
    return 1 + lengths + size;
}

/* The values of a head, one a field, of a blob its bytes; 0 when they are not plainly what `kinds`
 * say, and nothing else. */
static int head_values(const uint8_t *at, size_t head, const char *kinds, size_t fields,
                       core_value *values)
{
    const uint8_t *end = at + head;
    if (head < 1)
        return 0;
    bool wide = at[0] == 0xdc; /* read once: another thread may write there */
    if (wide ? head < 3 || big(at + 1, 2) != fields : fields > 15 || at[0] != (0x90 | fields))
        return 0;
    at += wide ? 3 : 1;
    for (size_t i = 0; i < fields; i++) {
        core_value *found = values + i;
        size_t taken = value(at, (size_t)(end - at), found);
        char kind = kinds[i] == CORE_BLOB ? CORE_INT : kinds[i] == CORE_KEY ? CORE_BYTES : kinds[i];
        if (!taken || (found->kind != kind && (found->kind != CORE_NONE || i == 0)))
            return 0;
        at += taken;
    }
    return at == end;
}

int core_values(const uint8_t *record, size_t size, const char *kinds, size_t fields,
                core_value *values)
{
    if (size < FRAME)
        return 0;
    size_t head = little(record + 12, 4);
    if (head > size - FRAME || !head_values(record + FRAME, head, kinds, fields, values))
        return 0;
    const uint8_t *blobs = record + FRAME + head, *end = record + size;
    for (size_t i = 0; i < fields; i++) {
        if (kinds[i] != CORE_BLOB || values[i].kind == CORE_NONE)
            continue;
        if (values[i].number > (uint64_t)(end - blobs))
            return 0;
        values[i].kind = CORE_BYTES, values[i].text = blobs;
        blobs += values[i].number;
    }
    return blobs == end;
}

/* A row that is wanted: of which shard, and where it lies there; 0: it is none that there is. */
static int find(const core_rows *rows, int64_t row, const core_shard **shard, int64_t *record,
                int64_t *at, size_t *size)
{
    const core_shard_slot *source = NULL;
    size_t low = 0, high = rows->count;
    while (!source && low < high) {
        size_t middle = low + (high - low) / 2;
        int64_t number = rows->sources[middle].number, wanted = rows->shards[row];
        if (number == wanted)
            source = rows->sources + middle;
        else if (number < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    if (!source)
        return 0;
    *shard = &source->shard;
    *record = (int64_t)((uint64_t)rows->numbers[row] - (uint64_t)source->first);
    return core_locate(*shard, *record, at, size);
}

int core_max_bytes(const core_rows *rows, size_t *room)
{
    const core_shard *shard;
    int64_t record, at;
    size_t size;
    *room = 0;
    for (int64_t row = 0; row < rows->rows; row++) {
        if (!find(rows, row, &shard, &record, &at, &size) || size < FRAME ||
            size > SIZE_MAX / 2 - *room)
            return 0;
        *room += size - FRAME;
    }
    return 1;
}

/* The values of a row to its columns, and which of the bytes behind its head are the image; 0: they
 * are not as the head says, or there is a None. */
static int place_row(const core_rows *rows, const core_value *values, int64_t row, size_t rest,
                     core_range *blob)
{
    size_t at = 0;
    for (size_t i = 0; i < rows->fields; i++) {
        const core_value *one = values + i;
        if (rows->kinds[i] == CORE_BLOB && one->kind != CORE_NONE) {
            if (one->number > rest - at)
                return 0;
            if (i == rows->blob)
                blob->start = at, blob->size = (size_t)one->number;
            at += (size_t)one->number;
        }
        if (i != rows->blob && !rows->columns[i])
            continue;
        if (one->kind == CORE_NONE || (one->kind == CORE_INT && !one->is_signed && one->number >> 63))
            return 0;
        if (!rows->columns[i])
            continue;
        if (one->kind == CORE_BOOL)
            ((uint8_t *)rows->columns[i])[row] = (uint8_t)one->number;
        else
            memcpy((uint8_t *)rows->columns[i] + 8 * row, &one->number, 8);
    }
    return at == rest;
}

/* Keep the key of a row; 0: no memory. */
static int keep_key(core_keys *keys, const core_value *key, int64_t row)
{
    size_t size = (size_t)key->number;
    if (size > keys->room - keys->used) {
        size_t room = 2 * (keys->used + size) + 4096;
        uint8_t *text = realloc(keys->text, room);
        if (!text)
            return 0;
        keys->text = text, keys->room = room;
    }
    memcpy(keys->text + keys->used, key->text, size);
    keys->used += size, keys->ends[row] = keys->used;
    return 1;
}

/* A large record: head to `block`, of BLOCK bytes, and what follows it to `out`, which has room for
 * it; 0: it is not right. */
static int read_large(const core_shard *shard, int64_t record, int64_t at, size_t size,
                      uint8_t *block, uint8_t *out)
{
    size_t first = 256; /* frame and head of nearly all */
    if (!core_checks || read_some(shard->file, block, first, at) < first)
        return 0;
    uint64_t length = little(block + 8, 4), head = little(block + 12, 4);
    if (length != size - FRAME || head > length || head > BLOCK - FRAME)
        return 0;
    if (FRAME + head > first && read_some(shard->file, block + first, FRAME + head - first,
                                          at + (int64_t)first) < FRAME + head - first)
        return 0;
    size_t rest = size - FRAME - head;
    return read_some(shard->file, out, rest, at + FRAME + (int64_t)head) == rest &&
           checksum_of_two(block + 8, FRAME - 8 + head, out, rest, shard->seed + (uint64_t)record) ==
               little(block, 8);
}

/* Read a small record, and those that lie behind it and are the next rows, to `block`: its bytes. */
static size_t read_run(const core_rows *rows, int64_t row, const core_shard *shard, int64_t at,
                       size_t size, uint8_t *block)
{
    const core_shard *other;
    int64_t record, next;
    size_t run = size, more;
    while (++row < rows->rows && find(rows, row, &other, &record, &next, &more) && other == shard &&
           next == at + (int64_t)run && more < LARGE && more <= BLOCK - run)
        run += more;
    return read_some(shard->file, block, run, at);
}

int64_t core_join(const core_rows *rows, uint8_t *out, size_t room, int64_t *offsets,
                  core_keys *keys)
{
    const core_shard *shard;
    int64_t record, at, done = 0;
    size_t size, used = 0, filled = 0, begin = 0; /* of out; of block, and where the next one is */
    uint8_t *block = malloc(BLOCK);
    core_value *values = malloc(rows->fields * sizeof *values);
    offsets[0] = 0;
    for (; block && values && done < rows->rows; done++) {
        if (!find(rows, done, &shard, &record, &at, &size) || size < FRAME ||
            size - FRAME > room - used)
            break;
        const core_text *held = rows->held ? rows->held + done : NULL;
        const uint8_t *data = held ? held->text : block;
        uint64_t seed = shard->seed + (uint64_t)record;
        bool large = !held && size >= LARGE;
        if (held) {
            if (held->size != size || little(data, 8) != seed)
                break;
        } else if (large) {
            begin = filled = 0;
            if (!read_large(shard, record, at, size, block, out + used))
                break;
        } else {
            if (begin == filled)
                begin = 0, filled = read_run(rows, done, shard, at, size, block);
            data = block + begin;
            if (size > filled - begin || core_verify(data, size, seed) < 0)
                break;
            begin += size;
        }
        size_t head = little(data + 12, 4), rest = size - FRAME - head;
        core_range blob = {0, 0};
        if (head > size - FRAME || !head_values(data + FRAME, head, rows->kinds, rows->fields, values) ||
            !place_row(rows, values, done, rest, &blob) || (keys && !keep_key(keys, values, done)))
            break;
        const uint8_t *from = large ? out + used : data + FRAME + head;
        memmove(out + used, from + blob.start, blob.size);
        used += blob.size, offsets[done + 1] = (int64_t)used;
    }
    free(block), free(values);
    return done;
}

/* libFuzzer's harness for the C core: everything in core.h that is given bytes of strangers.
 *
 * The first byte of an input names what it goes to, then come arguments, then the bytes; numbers are
 * little-endian, and 0 where the input has ended. tests/native/test_fuzz_seeds.py reads the same bytes.
 *
 *     p  data                                            core_jpeg_parse
 *     w  interval 2 | data                               core_rewrite
 *     c  filter 1 | scale 1 | layout 1 | width 1 | height 1 | box 4 x 2 | data       core_crop
 *     m  width 1 | height 1 | count 1 | count x (size 2 | data)      core_decode_many
 *     r  count 1 | mode 1 | begins 1 | row 1 | count x size 2 | asks 1 | asks x number 1
 *        | (mode & 2: which 1 | offset 8) | the file     core_gather, core_read, core_locate
 *     j  fields 1 | fields x kind 1 | blob 1 | mode 1 | count 1 | count x (size 2 | pad 2 | data)
 *        | asks 1 | asks x (shard 1 | number 1) | (mode & 2: which 1 | offset 8)
 *        | (mode & 8: cut 4) | (mode & 16: room 4)       core_join, core_max_bytes, core_copy_verified
 *     v  fields 1 | fields x kind 1 | mode 1 | record    core_verify, core_values
 *     o  numbers 2 | step 8 | high 1 | each 1 | record 8 | data       core_take_places, core_locate
 *     k  shift 1 | size 2 | large 1 | data               core_copy
 *
 * More than sanitizers see is checked: what the core takes must have the pixels that libjpeg finds
 * by itself, and what it refuses must leave the result as it was.
 */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core.h"

#include <jpeglib.h>

#if !__has_include(<xxhash.h>)
#error "without libxxhash-dev the core takes no record, and fuzzing them shows nothing"
#endif

#define MAX_PIXELS (1 << 18)
#define CHECK(right) ((right) ? (void)0 : (fprintf(stderr, "wrong: %s\n", #right), abort()))

struct input {
    const uint8_t *at;
    size_t left;
};

static uint64_t number(struct input *in, size_t bytes)
{
    uint64_t found = 0;
    size_t some = bytes < in->left ? bytes : in->left;
    for (size_t i = 0; i < some; i++)
        found |= (uint64_t)in->at[i] << 8 * i;
    in->at += some, in->left -= some;
    return found;
}

/* A copy of just this size, so that not a byte behind it can be read unseen. */
static uint8_t *apart(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    CHECK(copy);
    memcpy(copy, data, size);
    return copy;
}

static volatile uint64_t seen;

static void touch(const uint8_t *data, size_t size)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < size; i++)
        sum += data[i];
    seen = sum;
}

/* The oracle: libjpeg as it is --------------------------------------------------------------------- */

struct handler {
    struct jpeg_error_mgr handlers;
    jmp_buf back;
};

static void fail(j_common_ptr common)
{
    longjmp(((struct handler *)common->err)->back, 1);
}

static void complain(j_common_ptr common, int level)
{
    if (level < 0)
        fail(common);
}

struct picture {
    struct jpeg_decompress_struct in;
    struct handler handler;
    unsigned width, height;
    uint8_t *pixels; /* NULL: an error, or a warning */
};

/* `whole`: also what follows the last line. */
static void decode(struct picture *p, const uint8_t *data, size_t size, int scale, bool whole)
{
    memset(p, 0, sizeof *p);
    p->in.err = jpeg_std_error(&p->handler.handlers);
    p->handler.handlers.error_exit = fail;
    p->handler.handlers.emit_message = complain;
    if (setjmp(p->handler.back)) {
        jpeg_destroy_decompress(&p->in);
        free(p->pixels);
        p->pixels = NULL;
        return;
    }
    jpeg_create_decompress(&p->in);
    jpeg_mem_src(&p->in, data, (unsigned long)size);
    jpeg_read_header(&p->in, TRUE);
    p->in.out_color_space = JCS_RGB;
    p->in.scale_num = 1, p->in.scale_denom = (unsigned)scale;
    jpeg_start_decompress(&p->in);
    p->width = p->in.output_width, p->height = p->in.output_height;
    p->pixels = malloc((size_t)p->width * p->height * 3);
    CHECK(p->pixels);
    while (p->in.output_scanline < p->height) {
        JSAMPROW row = p->pixels + (size_t)p->in.output_scanline * p->width * 3;
        jpeg_read_scanlines(&p->in, &row, 1);
    }
    if (whole)
        jpeg_finish_decompress(&p->in);
    jpeg_destroy_decompress(&p->in);
}

/* The coefficients must be equal: clipping may hide from pixels that some are not. */
static void compare(const uint8_t *const data[2], const size_t sizes[2])
{
    struct jpeg_decompress_struct in[2];
    struct handler handler;
    jvirt_barray_ptr *blocks[2];
    memset(in, 0, sizeof in);
    CHECK(!setjmp(handler.back));
    for (int i = 0; i < 2; i++) {
        in[i].err = jpeg_std_error(&handler.handlers);
        handler.handlers.error_exit = fail;
        jpeg_create_decompress(in + i);
        jpeg_mem_src(in + i, data[i], (unsigned long)sizes[i]);
        jpeg_read_header(in + i, TRUE);
        blocks[i] = jpeg_read_coefficients(in + i);
    }
    for (int c = 0; c < in->num_components; c++) {
        const jpeg_component_info *part = in->comp_info + c;
        for (JDIMENSION y = 0; y < part->height_in_blocks; y++) {
            JBLOCKARRAY rows[2];
            for (int i = 0; i < 2; i++)
                rows[i] = in[i].mem->access_virt_barray((j_common_ptr)(in + i), blocks[i][c], y, 1,
                                                        FALSE);
            CHECK(!memcmp(rows[0][0], rows[1][0], part->width_in_blocks * sizeof(JBLOCK)));
        }
    }
    jpeg_destroy_decompress(in), jpeg_destroy_decompress(in + 1);
}

/* The entry points ------------------------------------------------------------------------------- */

static void parse(struct input in)
{
    uint8_t *data = apart(in.at, in.left);
    core_jpeg jpeg;
    if (core_jpeg_parse(data, in.left, &jpeg)) {
        CHECK(jpeg.width && jpeg.height && jpeg.scan <= in.left && jpeg.sof_at + 9 < jpeg.scan);
        CHECK(jpeg.orientation <= 8 && data[jpeg.sof_at + 1] == jpeg.sof);
    }
    free(data);
}

static bool crop(const uint8_t *data, size_t size, const float box[4], int width, int height,
                 uint8_t *out)
{
    core_crop_spec part = {.filter = CORE_BILINEAR, .scale = 1, .max_pixels = MAX_PIXELS,
                      .width = width, .height = height, .out = out, .down = width * 3, .right = 3};
    memcpy(part.box, box, sizeof part.box);
    return core_crop(data, size, &part);
}

static void rewrite(struct input in)
{
    unsigned interval = (unsigned)number(&in, 2);
    uint8_t *data = apart(in.at, in.left), *made, *again;
    size_t size, again_size;
    char words[CORE_WORDS];
    const char *reason =
        core_rewrite(data, in.left, interval, MAX_PIXELS, &made, &size, words);
    CHECK(!reason == !!made);
    if (made) {
        touch(made, size);
        CHECK(!core_rewrite(made, size, interval, MAX_PIXELS, &again, &again_size, words));
        CHECK(size == again_size && !memcmp(made, again, size));
        free(again);
        struct picture old, new;
        decode(&old, data, in.left, 1, true);
        decode(&new, made, size, 1, true);
        CHECK(old.pixels && new.pixels && old.width == new.width && old.height == new.height);
        size_t bytes = (size_t)old.width * old.height * 3;
        CHECK(!memcmp(old.pixels, new.pixels, bytes));
        compare((const uint8_t *const[]){data, made}, (const size_t[]){in.left, size});
        /* Tiles, all of them and then one corner. */
        const float all[4] = {0, 0, (float)old.width, (float)old.height};
        CHECK(crop(made, size, all, (int)old.width, (int)old.height, new.pixels));
        CHECK(!memcmp(old.pixels, new.pixels, bytes));
        uint8_t one[3], *last = old.pixels + bytes - 3;
        const float corner[4] = {all[2] - 1, all[3] - 1, all[2], all[3]};
        CHECK(crop(made, size, corner, 1, 1, one) && !memcmp(one, last, 3));
        free(old.pixels), free(new.pixels), free(made);
    } else
        touch((const uint8_t *)reason, strlen(reason));
    free(data);
}

static int extent(float begin, float end)
{
    return end - begin >= 1 && end - begin < 4096 ? (int)(end - begin) : 1;
}

static void crops(struct input in)
{
    core_crop_spec part = {.filter = (char)(number(&in, 1) % 5), .scale = 1 << number(&in, 1) % 4,
                      .max_pixels = MAX_PIXELS};
    unsigned layout = (unsigned)number(&in, 1);
    part.width = (int)number(&in, 1), part.height = (int)number(&in, 1);
    bool plain = !part.width; /* the box is of whole pixels, and as large as the result */
    for (int i = 0; i < 4; i++) {
        unsigned value = (unsigned)number(&in, 2);
        part.box[i] = plain ? (float)(value / 16) : (float)value / 16;
        if (value == 0xFFFF)
            part.box[i] = (layout & 64 ? 1 : -1) * (layout & 128 ? NAN : INFINITY);
    }
    if (plain)
        part.width = extent(part.box[0], part.box[2]), part.height = extent(part.box[1], part.box[3]);
    part.height += !part.height;
    if ((uint64_t)part.width * (uint64_t)part.height > MAX_PIXELS)
        return;
    /* Pixels of 3 or 4 bytes, along rows or columns, from the front or from behind. */
    ptrdiff_t pixel = layout & 1 ? 4 : 3;
    ptrdiff_t along = pixel * (layout & 2 ? part.height : part.width);
    part.right = layout & 2 ? along : pixel, part.down = layout & 2 ? pixel : along;
    size_t bytes = (size_t)(pixel * part.width * part.height - (pixel - 3));
    uint8_t *out = malloc(bytes), *data = apart(in.at, in.left);
    CHECK(out);
    memset(out, 7, bytes);
    part.out = out;
    if (layout & 4) {
        part.out += (part.width - 1) * part.right;
        part.right = -part.right;
    }
    if (layout & 8) {
        part.out += (part.height - 1) * part.down;
        part.down = -part.down;
    }
    bool done = core_crop(data, in.left, &part);
    for (size_t i = 0; i < bytes; i++)
        CHECK((done && (pixel == 3 || i % 4 != 3)) || out[i] == 7);
    struct picture p = {.pixels = NULL};
    if (done && plain)
        decode(&p, data, in.left, part.scale, false);
    if (done && plain) {
        /* Damage beside the tiles that were read is not seen. Of the whole, all is. */
        bool whole = !part.box[0] && !part.box[1] && (unsigned)part.width == p.width &&
                     (unsigned)part.height == p.height;
        CHECK(p.pixels || !whole);
    }
    for (int y = 0; p.pixels && y < part.height; y++)
        for (int x = 0; x < part.width; x++)
            CHECK(!memcmp(part.out + y * part.down + x * part.right,
                          p.pixels + (((size_t)part.box[1] + (size_t)y) * p.width +
                                      (size_t)part.box[0] + (size_t)x) * 3, 3));
    free(p.pixels), free(out), free(data);
}

static void many(struct input in)
{
    unsigned width = 1 + (unsigned)number(&in, 1), height = 1 + (unsigned)number(&in, 1);
    size_t count = 1 + number(&in, 1) % 8, sizes[8], bytes = (size_t)width * height * 3;
    uint8_t *data[8], *out = malloc(count * bytes);
    CHECK(out);
    memset(out, 7, count * bytes);
    for (size_t i = 0; i < count; i++) {
        sizes[i] = number(&in, 2);
        sizes[i] = sizes[i] < in.left && i + 1 < count ? sizes[i] : in.left;
        data[i] = apart(in.at, sizes[i]);
        in.at += sizes[i], in.left -= sizes[i];
    }
    size_t done = core_decode_many((const uint8_t *const *)data, sizes, count, width, height, out);
    CHECK(done <= count);
    for (size_t i = 0; i < done; i++) {
        struct picture p;
        decode(&p, data[i], sizes[i], 1, true);
        CHECK(p.pixels && p.width == width && p.height == height);
        CHECK(!memcmp(p.pixels, out + i * bytes, bytes));
        free(p.pixels);
    }
    for (size_t i = (done + 1) * bytes; i < count * bytes; i++)
        CHECK(out[i] == 7); /* only the one that was wrong may be half written */
    for (size_t i = 0; i < count; i++)
        free(data[i]);
    free(out);
}

static void put(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

/* Gives a record the frame of its size; its head is no longer than it, unless `lying`. */
static void seal(uint8_t *record, size_t size, uint64_t seed, bool lying)
{
    if (size < 16)
        return;
    put(record + 8, size - 16, 4);
    struct input field = {record + 12, 4};
    uint64_t head = number(&field, 4);
    if (!lying)
        put(record + 12, head % (size - 15), 4);
    put(record, core_checksum(record + 8, size - 8, seed), 8);
}

static void records(struct input in)
{
    static const uint64_t seed = 7ull << 32;
    int64_t count = 1 + (int64_t)(number(&in, 1) % 16), offsets[17] = {0}, wanted[32];
    unsigned mode = (unsigned)number(&in, 1);
    size_t begins = number(&in, 1) % 32, row = 1 + number(&in, 1);
    for (int64_t i = 0; i < count; i++)
        offsets[i + 1] = offsets[i] + (int64_t)(number(&in, 2) % 2048);
    int64_t asks = (int64_t)(number(&in, 1) % 32);
    for (int64_t i = 0; i < asks; i++)
        wanted[i] = (int8_t)number(&in, 1); /* some below 0, some too large */
    uint8_t *file = apart(in.at, in.left), *begin = calloc(1, begins + 1);
    int64_t size = (int64_t)in.left;
    if (mode & 2) {
        size_t which = number(&in, 1) % 17;
        offsets[which] = (int64_t)number(&in, 8);
        memmove(file, in.at, in.left);
        size = (int64_t)in.left;
    }
    for (int64_t i = 0; i < count; i++)
        if (mode & 1 && 0 <= offsets[i] && offsets[i] <= offsets[i + 1] && offsets[i + 1] <= size)
            seal(file + offsets[i], (size_t)(offsets[i + 1] - offsets[i]), seed + (uint64_t)i,
                 mode & 4);
    static int memory = -1;
    if (memory < 0)
        memory = memfd_create("records", 0);
    CHECK(!ftruncate(memory, 0) && pwrite(memory, file, (size_t)size, 0) == size);
    core_shard shard = {memory, offsets, count, seed};
    int64_t *places = malloc(((size_t)count + 1) * sizeof *places); /* exact, for the sanitizer */
    CHECK(places && begin);
    memcpy(places, offsets, ((size_t)count + 1) * sizeof *places);
    shard.offsets = places;

    /* As module.c asks for room; a record of gigabytes would take that of the fuzzer. */
    size_t room = 0, one;
    int64_t at;
    for (int64_t i = 0; i < asks && core_locate(&shard, wanted[i], &at, &one); i++)
        room += one;
    room = room < 1 << 20 ? room : 1 << 20;
    uint8_t *read = malloc(room + 1), *out = calloc((size_t)asks + 1, row);
    core_range *ranges = malloc(((size_t)asks + 1) * sizeof *ranges);
    CHECK(read && out && ranges);
    int64_t got = core_read(&shard, wanted, asks, read, room, ranges);
    if (got > 0 && begins <= ranges[0].size) /* what its blob begins with, else zeros */
        memcpy(begin, read + ranges[0].start, begins);
    if (got > 0 && mode & 8 && ranges[0].size > begins && ranges[0].size - begins <= 256) {
        free(out);
        row = ranges[0].size - begins;
        out = calloc((size_t)asks + 1, row);
        CHECK(out);
    }
    int64_t rows[32];
    for (int64_t i = 0; i < asks; i++)
        rows[i] = mode & 16 ? asks - 1 - i : i;
    int64_t gathered = core_gather(&shard, wanted, asks, begin, begins, out, row, rows, asks);
    CHECK(0 <= got && got <= asks && 0 <= gathered && gathered <= asks);
    CHECK(gathered <= got || room == 1 << 20);
    for (int64_t i = 0; i < got; i++) {
        CHECK(ranges[i].start <= room && ranges[i].size <= room - ranges[i].start);
        touch(read + ranges[i].start, ranges[i].size);
        if (i < gathered) {
            CHECK(ranges[i].size == begins + row);
            CHECK(!memcmp(read + ranges[i].start + begins, out + (size_t)rows[i] * row, row));
        }
    }
    for (int64_t i = gathered; i <= asks; i++) /* to the rows of the others nothing was written */
        for (size_t k = 0; k < row; k++)
            CHECK(!out[(size_t)(i < asks ? rows[i] : asks) * row + k]);
    free(file), free(begin), free(places), free(read), free(out), free(ranges);
}

/* Packed offsets of any numbers: what is refused, and what is read of the rest, is in bounds. */
static void places(struct input in)
{
    uint64_t head[4] = {number(&in, 2), number(&in, 8), number(&in, 1), number(&in, 1)};
    int64_t record = (int64_t)number(&in, 8), at;
    size_t size = sizeof head + in.left, bytes;
    uint8_t *data = malloc(size); /* exact, for the sanitizer */
    CHECK(data);
    memcpy(data, head, sizeof head);
    memcpy(data + sizeof head, in.at, in.left);
    core_shard shard = {0};
    if (core_take_places(&shard, data, size)) {
        int64_t some[] = {record, 0, shard.records - 1, shard.records / 2};
        for (int i = 0; i < 4; i++)
            if (core_locate(&shard, some[i], &at, &bytes))
                CHECK(0 <= some[i] && some[i] < shard.records && at >= 0);
        CHECK(!core_locate(&shard, shard.records, &at, &bytes));
    }
    free(data);
}

/* What join made of a row is what the record's bytes say by themselves. */
static void check_row(const core_rows *rows, int64_t row, const uint8_t *record, size_t size,
                      uint64_t seed, const uint8_t *blob, size_t blob_size)
{
    core_value *found = malloc(rows->fields * sizeof *found);
    CHECK(found && core_verify(record, size, seed) >= 0);
    CHECK(core_values(record, size, rows->kinds, rows->fields, found));
    CHECK(found[rows->blob].kind == CORE_BYTES && found[rows->blob].number == blob_size);
    CHECK(!memcmp(found[rows->blob].text, blob, blob_size));
    for (size_t i = 0; i < rows->fields; i++) {
        const uint8_t *column = rows->columns[i];
        if (!column)
            continue;
        CHECK(found[i].kind == rows->kinds[i]);
        if (found[i].kind == CORE_BOOL)
            CHECK(column[row] == found[i].number);
        else
            CHECK(!memcmp(column + 8 * row, &found[i].number, 8));
    }
    free(found);
}

/* Held, the same records make the same of their rows: of the first `done`, and perhaps of more. */
static void join_held(core_rows rows, const uint8_t *file, int64_t size, int64_t done,
                      const uint8_t *out, const int64_t *ends)
{
    core_text held[16];
    int64_t ready = 0, at;
    size_t bytes, room;
    for (; ready < rows.rows && (uint64_t)rows.shards[ready] < rows.count; ready++) {
        const core_shard_slot *source = rows.sources + rows.shards[ready];
        int64_t record = rows.numbers[ready] - source->first;
        if (!core_locate(&source->shard, record, &at, &bytes) || at > size ||
            bytes > (size_t)(size - at))
            break;
        uint8_t *copy = malloc(bytes ? bytes : 1); /* exact, for the sanitizer */
        CHECK(copy);
        held[ready] = (core_text){copy, bytes};
        if (!core_copy_verified(file + at, bytes, source->shard.seed + (uint64_t)record, copy)) {
            free(copy);
            break;
        }
    }
    CHECK(ready >= done);
    rows.rows = ready, rows.held = held;
    if (core_max_bytes(&rows, &room)) {
        uint8_t *again = malloc(room ? room : 1);
        int64_t *bounds = malloc(((size_t)ready + 1) * sizeof *bounds);
        CHECK(again && bounds);
        int64_t joined = core_join(&rows, again, room, bounds, NULL);
        CHECK(done <= joined && joined <= ready && !memcmp(ends, bounds, (size_t)(done + 1) * 8));
        CHECK(!memcmp(out, again, (size_t)ends[done]));
        int64_t last = ready - 1;
        if (last > 0 && (rows.numbers[0] != rows.numbers[last] || rows.shards[0] != rows.shards[last])) {
            core_text first = held[0]; /* another row's is not taken for it */
            held[0] = held[last];
            CHECK(core_join(&rows, again, room, bounds, NULL) == 0);
            held[0] = first;
        }
        free(again), free(bounds);
    }
    for (int64_t i = 0; i < ready; i++)
        free((void *)held[i].text);
}

static void join(struct input in)
{
    static const uint64_t seeds[2] = {7ull << 32, 9ull << 32};
    core_rows rows = {.fields = 1 + number(&in, 1) % 6};
    char *kinds = malloc(rows.fields);
    void **columns = calloc(rows.fields, sizeof *columns);
    CHECK(kinds && columns);
    for (size_t i = 0; i < rows.fields; i++)
        kinds[i] = "kifbsB"[number(&in, 1) % 6];
    kinds[0] = CORE_BYTES;
    rows.kinds = kinds, rows.columns = columns, rows.blob = number(&in, 1) % rows.fields;
    kinds[rows.blob] = CORE_BLOB; /* as module.c asks it */
    unsigned mode = (unsigned)number(&in, 1);
    int64_t count = (int64_t)(number(&in, 1) % 9), offsets[10] = {0}, shards[16], numbers[16];
    uint8_t *file = malloc(9 * (2 << 16));
    CHECK(file);
    for (int64_t i = 0; i < count; i++) {
        size_t size = number(&in, 2) % 600, pad = number(&in, 2), some = size < in.left ? size : in.left;
        uint8_t *record = file + offsets[i];
        memset(record, 0x55, size + pad);
        memcpy(record, in.at, some);
        in.at += some, in.left -= some;
        offsets[i + 1] = offsets[i] + (int64_t)(size + pad);
        if (mode & 1) /* the second half is another shard */
            seal(record, size + pad, seeds[i >= count / 2] + (uint64_t)i, mode & 4);
    }
    rows.rows = (int64_t)(number(&in, 1) % 16);
    for (int64_t i = 0; i < rows.rows; i++)
        shards[i] = (int8_t)number(&in, 1) % 4, numbers[i] = (int8_t)number(&in, 1);
    int64_t size = offsets[count], half = count / 2, *places[2];
    if (mode & 2) {
        size_t which = number(&in, 1) % 10;
        offsets[which] = (int64_t)number(&in, 8);
    }
    if (mode & 8)
        size = (int64_t)number(&in, 4) % (size + 1);
    static int memory = -1;
    if (memory < 0)
        memory = memfd_create("rows", 0);
    CHECK(!ftruncate(memory, 0) && pwrite(memory, file, (size_t)size, 0) == size);
    core_shard_slot sources[2];
    for (int i = 0; i < 2; i++) { /* exact, for the sanitizer */
        int64_t first = i ? half : 0, last = i ? count : half;
        places[i] = malloc(((size_t)(last - first) + 1) * sizeof **places);
        CHECK(places[i]);
        memcpy(places[i], offsets + first, ((size_t)(last - first) + 1) * sizeof **places);
        sources[i] = (core_shard_slot){i, first, {memory, places[i], last - first,
                                              seeds[i] + (uint64_t)first}};
    }
    rows.sources = sources, rows.count = 2;
    rows.shards = (int64_t *)(void *)apart((uint8_t *)shards, 8 * (size_t)rows.rows);
    rows.numbers = (int64_t *)(void *)apart((uint8_t *)numbers, 8 * (size_t)rows.rows);
    size_t all = (size_t)rows.rows, room;
    for (size_t i = 0; i < rows.fields; i++)
        if ((kinds[i] == CORE_INT || kinds[i] == CORE_FLOAT || kinds[i] == CORE_BOOL) && mode & 32)
            columns[i] = calloc(all + 1, kinds[i] == CORE_BOOL ? 1 : 8);
    core_keys keys = {.ends = malloc((all + 1) * sizeof *keys.ends)};
    int64_t *ends = malloc((all + 1) * sizeof *ends);
    CHECK(keys.ends && ends);
    if (core_max_bytes(&rows, &room)) {
        room = room < 2 << 20 ? room : 2 << 20;
        if (mode & 16)
            room = number(&in, 4) % (room + 1);
        uint8_t *out = malloc(room ? room : 1);
        CHECK(out);
        bool keyed = kinds[0] == CORE_BYTES && mode & 64;
        int64_t done = core_join(&rows, out, room, ends, keyed ? &keys : NULL);
        CHECK(0 <= done && done <= rows.rows && !ends[0]);
        for (int64_t i = 0; i < done; i++) {
            CHECK(ends[i] <= ends[i + 1] && ends[i + 1] <= (int64_t)room);
            const core_shard_slot *source = sources + shards[i];
            int64_t at = source->shard.offsets[numbers[i] - source->first];
            size_t bytes = (size_t)(source->shard.offsets[numbers[i] - source->first + 1] - at);
            CHECK(at >= 0 && at + (int64_t)bytes <= size);
            check_row(&rows, i, file + at, bytes, seeds[shards[i]] + (uint64_t)numbers[i],
                      out + ends[i], (size_t)(ends[i + 1] - ends[i]));
        }
        if (keyed && done)
            touch(keys.text, keys.ends[done - 1]);
        join_held(rows, file, size, done, out, ends);
        free(out);
    }
    for (size_t i = 0; i < rows.fields; i++)
        free(columns[i]);
    free((void *)rows.shards), free((void *)rows.numbers), free(places[0]), free(places[1]);
    free(keys.text), free(keys.ends), free(ends), free(file), free(kinds), free(columns);
}

static void values(struct input in)
{
    size_t fields = 1 + number(&in, 1) % 20;
    char *kinds = malloc(fields);
    core_value *found = malloc(fields * sizeof *found);
    CHECK(kinds && found);
    for (size_t i = 0; i < fields; i++)
        kinds[i] = "kifbsB"[number(&in, 1) % 6];
    kinds[0] = CORE_BYTES;
    unsigned mode = (unsigned)number(&in, 1);
    uint8_t *record = apart(in.at, in.left);
    if (mode & 1)
        seal(record, in.left, 5, mode & 4);
    int64_t head = core_verify(record, in.left, 5);
    CHECK(head < 0 || (in.left >= 16 && (size_t)head <= in.left - 16));
    /* Also of what is not right: another thread may have written to it since. */
    if (core_values(record, in.left, kinds, fields, found))
        for (size_t i = 0; i < fields; i++)
            if (found[i].kind == CORE_BYTES || found[i].kind == CORE_STR)
                touch(found[i].text, found[i].number);
    free(kinds), free(found), free(record);
}

static void copy(struct input in)
{
    size_t shift = number(&in, 1) % 64, size = number(&in, 2) % 4096;
    if (number(&in, 1) == 1)
        size += 16 << 20; /* where it goes past the caches; seldom, since it takes long */
    uint8_t *from = malloc(size + 1), *to = malloc(size + shift + 1);
    CHECK(from && to);
    for (size_t i = 0; i < size; i += 4096)
        memcpy(from + i, in.at, in.left < size - i ? in.left % 4096 : size - i);
    memset(from + size, 1, 1), memset(to, 7, shift), memset(to + shift + size, 7, 1);
    core_copy(to + shift, from, size);
    CHECK(!memcmp(to + shift, from, size) && to[shift + size] == 7 && (!shift || to[shift - 1] == 7));
    free(from), free(to);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    switch (number(&in, 1)) {
    case 'p': parse(in); return 0;
    case 'w': rewrite(in); return 0;
    case 'c': crops(in); return 0;
    case 'm': many(in); return 0;
    case 'r': records(in); return 0;
    case 'j': join(in); return 0;
    case 'v': values(in); return 0;
    case 'k': copy(in); return 0;
    case 'o': places(in); return 0;
    default: return -1; /* nothing to keep */
    }
}

/* Mutation: half of the time libFuzzer's own, else one that knows what a JPEG is made of. --------- */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

static size_t drawn(unsigned *state, size_t below)
{
    *state = *state * 1103515245u + 12345u;
    return below ? (*state >> 8) % below : 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned int state)
{
    uint8_t *start = memmem(data, size, "\xFF\xD8\xFF", 3), *end = data + size;
    if (!start || drawn(&state, 2))
        return LLVMFuzzerMutate(data, size, most);
    /* Its segments, up to the scan. */
    uint8_t *segments[64], *at = start + 2;
    size_t count = 0;
    while (count < 64 && end - at >= 4 && at[0] == 0xFF) {
        segments[count++] = at;
        size_t length = 2 + ((size_t)at[2] << 8 | at[3]);
        if (length > (size_t)(end - at))
            break;
        at += length;
        if (segments[count - 1][1] == 0xDA)
            break;
    }
    if (!count || at >= end)
        return LLVMFuzzerMutate(data, size, most);
    uint8_t *segment = segments[drawn(&state, count)], *spot = at + drawn(&state, (size_t)(end - at));
    size_t length = 2 + ((size_t)segment[2] << 8 | segment[3]);
    if (length > (size_t)(end - segment))
        length = 4;
    switch (drawn(&state, 8)) {
    case 0: /* a byte of a segment, its length among them */
        segment[2 + drawn(&state, length - 2)] = (uint8_t)drawn(&state, 256);
        return size;
    case 1: /* bits of the scan, which stay no marker */
        for (size_t i = drawn(&state, 4) + 1; i-- && spot < end; spot++)
            if (spot[0] != 0xFF && spot[-1] != 0xFF)
                spot[0] = (uint8_t)drawn(&state, 255);
        return size;
    case 2: /* size, restart interval */
        for (size_t i = 0; i < count; i++)
            if (segments[i][1] == 0xDD && segments[i] + 6 <= end && drawn(&state, 2))
                put(segments[i] + 4, drawn(&state, 16) << 8, 2);
            else if (segments[i][1] >= 0xC0 && segments[i][1] <= 0xC2 && segments[i] + 10 <= end)
                segments[i][6 + 2 * drawn(&state, 2)] = (uint8_t)drawn(&state, 256);
        return size;
    case 3: /* a restart marker more */
        if (size + 2 > most)
            return size;
        memmove(spot + 2, spot, (size_t)(end - spot));
        spot[0] = 0xFF, spot[1] = (uint8_t)(0xD0 + drawn(&state, 10));
        return size + 2;
    case 4: /* all restart markers in order */
        for (unsigned n = 0; at + 1 < end; at++)
            if (at[0] == 0xFF && at[1] >= 0xD0 && at[1] <= 0xD7)
                at[1] = (uint8_t)(0xD0 | (n++ & 7));
        return size;
    case 5: /* a segment twice */
        if (size + length > most)
            return size;
        memmove(segment + length, segment, (size_t)(end - segment));
        return size + length;
    case 6: /* or not at all */
        memmove(segment, segment + length, (size_t)(end - segment) - length);
        return size - length;
    default: /* some of the scan is missing, or comes twice */
        length = 1 + drawn(&state, (size_t)(end - spot) < 40 ? (size_t)(end - spot) : 40);
        if (drawn(&state, 2) && length < (size_t)(end - spot)) {
            memmove(spot, spot + length, (size_t)(end - spot) - length);
            return size - length;
        }
        if (size + length > most)
            return size;
        memmove(spot + length, spot, (size_t)(end - spot));
        return size + length;
    }
}

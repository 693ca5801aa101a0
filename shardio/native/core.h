/* What the files of the core know of each other. */
#ifndef SHARDIO_CORE_H
#define SHARDIO_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* records.c: the checksum of a record, as docs/format.md has it. Not `core_checks`, where xxHash's header
 * was not there: then no record is right. */
extern const bool core_checks;
uint64_t core_checksum(const uint8_t *data, size_t size, uint64_t seed);

/* guard.c: the name and the release of the libjpeg whose headers the core was built with. */
extern const char core_libjpeg[];

/* records.c: memory of a batch to other memory that nobody is to read soon. */
void core_copy(uint8_t *to, const uint8_t *from, size_t size);

#define CORE_LARGE (16 << 10) /* bytes of a record whose head is read first */

/* An open shard: where its records lie, and what their checksums are seeded with. */
typedef struct {
    int file;
    const int64_t *offsets; /* records + 1 of them; not to be believed */
    int64_t records;
    uint64_t seed; /* of record 0 */
    /* Where they are packed, as formats/places.py has it; else NULL, and zeros. Offsets are then those
     * of the lines. */
    const uint8_t *low, *high;
    uint64_t step;
    unsigned high_bytes; /* of a number: 0, 1 or 8 */
    bool gaps;           /* a record has two numbers, and not the first one of the next */
} core_shard;

/* Take the offsets of a shard from bytes, aligned as an int64; 0: they are not as that says. */
int core_take_places(core_shard *shard, const void *data, size_t size);

typedef struct {
    size_t start, size;
} core_range;

/* What a value of a head is; as letters, since Python names the kinds of fields by them. */
enum { CORE_BYTES = 'k', CORE_INT = 'i', CORE_FLOAT = 'f', CORE_BOOL = 'b', CORE_STR = 's' };
enum { CORE_KEY = 't' }; /* of kinds: CORE_BYTES that become a str, each byte that is no UTF-8 a surrogate */
enum { CORE_NONE = 'n', CORE_BLOB = 'B' };

typedef struct {
    char kind;
    char is_signed;      /* of an int */
    uint64_t number;     /* an int, a float's bits, a bool; the bytes of a text */
    const uint8_t *text; /* bytes, or UTF-8 */
} core_value;

/* The bytes of a record's head; -1 when the record is not whole: frame or checksum are wrong. */
int64_t core_verify(const uint8_t *record, size_t size, uint64_t seed);

/* Read a record of `size` bytes at byte `at`; 0 when it is not there, or not whole. */
int core_record(const core_shard *shard, int64_t record, int64_t at, uint8_t *out, size_t size);

/* Where a record lies and its bytes; 0 when the offsets cannot be right. */
int core_locate(const core_shard *shard, int64_t record, int64_t *at, size_t *size);

/* Of each record, what follows `begin` in its one blob, `row` bytes, to its row of the `all` of
 * `out`; how many were right before one was not. */
int64_t core_gather(const core_shard *shard, const int64_t *records, int64_t count,
                    const uint8_t *begin, size_t begins, uint8_t *out, size_t row,
                    const int64_t *rows, int64_t all);

/* Records, whole, one after the other to `out`, and where in it what follows each head lies; how
 * many were right before one was not. */
int64_t core_read(const core_shard *shard, const int64_t *records, int64_t count, uint8_t *out,
                  size_t room, core_range *blobs);

/* Copy the record of `size` bytes; 0 when it is not whole. In place of its checksum, the copy has the
 * seed of it: which record it is. */
int core_copy_verified(const uint8_t *record, size_t size, uint64_t seed, uint8_t *out);

/* The values of a record, one a field; 0 when they are not plainly what `kinds` say. */
int core_values(const uint8_t *record, size_t size, const char *kinds, size_t fields,
                core_value *values);

/* What a batch of encoded images is read from: rows of several shards. */
typedef struct {
    int64_t number, first; /* of the shard; of its first record */
    core_shard shard;
} core_shard_slot;

typedef struct {
    const uint8_t *text;
    size_t size;
} core_text;

typedef struct {
    const core_shard_slot *sources; /* by number, ascending */
    size_t count;
    const int64_t *shards, *numbers; /* of each row its shard, and the number of its record */
    int64_t rows;
    const char *kinds;    /* of the fields of a record */
    size_t fields, blob;  /* how many, and which one is the image */
    const core_text *held; /* of each row its record, by core_copy_verified; NULL: they are in files */
    void *const *columns; /* of each where its values go, 8 bytes a row, of a bool 1; NULL: nowhere */
} core_rows;

/* The keys of rows: text up to ends[row]. */
typedef struct {
    uint8_t *text; /* to free() */
    size_t used, room;
    size_t *ends;
} core_keys;

/* The bytes that the images of these rows take at the most; 0: a row is of no shard that is there. */
int core_max_bytes(const core_rows *rows, size_t *room);

/* The images of rows to `out`, one behind the other, and where each begins to `offsets`, which has
 * one more than there are rows: the end. keys: NULL: nobody wants them. How many were right before
 * one was not. */
int64_t core_join(const core_rows *rows, uint8_t *out, size_t room, int64_t *offsets,
                  core_keys *keys);

/* headers.c: what the header of a JPEG says, up to its first scan. */
typedef struct {
    int sof;                         /* the marker of its frame: 0xC0 ... */
    unsigned precision, components, width, height;
    unsigned mcu_width, mcu_height;  /* pixels */
    unsigned interval;               /* restart interval in MCUs, or 0 */
    unsigned tables, wanted;         /* bits: tables defined, tables used by frame and scan */
    bool whole;                      /* one sequential scan holds all components */
    bool several, app1;              /* MPF: more images follow; APP1: EXIF or XMP */
    unsigned orientation;            /* of EXIF, 1 to 8; 0: ask another */
    size_t sof_at, scan;             /* where the frame's marker is, where the scan's data begin */
} core_jpeg;

bool core_jpeg_parse(const uint8_t *data, size_t size, core_jpeg *jpeg);

/* Each block of 64 pixels takes a bit at least, so a header cannot ask for memory by itself. */
bool core_jpeg_lies(const core_jpeg *jpeg, size_t size);

/* Where the picture's data end: at EOI. SIZE_MAX when there is none, so that it was cut short. */
size_t core_jpeg_end(const uint8_t *data, size_t size, size_t at);

/* rewrite.c: NULL and a result to free(), or why there is none: a literal, or `words`. */
#define CORE_WORDS 256
const char *core_rewrite(const uint8_t *data, size_t size, unsigned interval, uint64_t max_pixels,
                         uint8_t **result, size_t *result_size, char words[CORE_WORDS]);

/* crop.c: a part of an image, resized: `width` x `height` RGB pixels to `out`, of any strides. */
typedef struct {
    float box[4]; /* left, top, right, bottom, in pixels as stored; as floats, as Pillow has them */
    char filter;
    int scale;    /* 1, or 2, 4, 8: decoded so many times smaller */
    uint64_t max_pixels;
    int width, height;
    uint8_t *out;
    ptrdiff_t down, right; /* bytes from a row, a pixel to the next */
} core_crop_spec;

/* False when it is not a whole, flawless JPEG of 8 bits, grey or of three colours: `out` is as it
 * was then. */
bool core_crop(const uint8_t *data, size_t size, const core_crop_spec *part);

/* The same of many, and in `done` of each whether it is made; false: no memory, and none is. */
bool core_crop_many(const uint8_t *const *data, const size_t *sizes, size_t count,
                    const core_crop_spec *parts, uint8_t *done);

/* JPEGs of just width x height to `out`, one after the other; how many before one was not. */
size_t core_decode_many(const uint8_t *const *data, const size_t *sizes, size_t count,
                        unsigned width, unsigned height, uint8_t *out);

/* resize.c: how one axis is resized. Pixel i of the new `size` is the sum of count[i] pixels, the
 * first at first[i], by its `taps` weights, over 2**bits. */
enum { CORE_BOX, CORE_BILINEAR, CORE_HAMMING, CORE_BICUBIC, CORE_LANCZOS };

typedef struct {
    int size, taps, bits;
    int *first, *count;
    int16_t *weights;
    int16_t *fine; /* the same of 22 bits in two parts: of each four the high ones, then the low */
} core_filter;

/* The pixels begin ... end of `size`, as `result` ones; false: no memory. */
bool core_filter_make(core_filter *plan, int size, float begin, float end, int result, char filter);
void core_filter_free(core_filter *plan);

/* Four rows of RGBX pixels, the first of them pixel `shift`, resized along the row: to RGB. Reads
 * up to `taps` pixels beyond their end, writes one byte. */
void core_across(const core_filter *plan, int shift, const uint8_t *const row[4],
                 uint8_t *const out[4]);

/* New row i of rows that begin with the first that it needs. Both have room for 31 bytes more. */
void core_down(const core_filter *plan, int i, const uint8_t *rows, size_t stride, uint8_t *out,
               size_t bytes);

#endif

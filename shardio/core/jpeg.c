/* JPEGs by libjpeg: headers, the lossless rewrite, crops, and many small ones at once.
 *
 * Every function takes plain bytes and gives a status; none keeps anything. A warning of libjpeg
 * counts as an error here: what is not flawless is left to Python, which says what is wrong.
 * Sources: ITU-T T.81 (JPEG), JFIF 1.02, EXIF 2.3, libjpeg.txt of libjpeg-turbo.
 */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

#include <jerror.h>
#include <jpeglib.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* The first in which parts of rows are decoded as wholes are, and with RGBX. Tested with 2.1.5. */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed"
#endif

/* Headers -------------------------------------------------------------------------------------- */

static unsigned get16(const uint8_t *at)
{
    return (unsigned)at[0] << 8 | at[1];
}

/* The orientation that an EXIF segment tells: 1 to 8; ABSENT; 0: PIL shall take it apart. */
enum { ABSENT = 9 };

static unsigned orientation(const uint8_t *body, size_t size)
{
    if (size < 14 || memcmp(body, "Exif\0", 6))
        return 0;
    const uint8_t *tiff = body + 6;
    size -= 6;
    bool little = !memcmp(tiff, "II*", 4);
    if (!little && memcmp(tiff, "MM\0*", 4))
        return 0;
#define GET16(at) (little ? (unsigned)tiff[(at) + 1] << 8 | tiff[at] : get16(tiff + (at)))
    size_t at = little ? (size_t)GET16(6) << 16 | GET16(4) : (size_t)GET16(4) << 16 | GET16(6);
    if (at < 8 || at > size - 2)
        return 0;
    unsigned entries = GET16(at), found = ABSENT;
    at += 2;
    static const uint8_t units[17] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};
    if (entries > (size - at) / 12)
        return 0;
    for (; entries--; at += 12) {
        if (GET16(at) != 0x0112) {
            /* PIL reads no further than a value that lies outside. */
            uint64_t count = little ? (uint64_t)GET16(at + 6) << 16 | GET16(at + 4)
                                    : (uint64_t)GET16(at + 4) << 16 | GET16(at + 6);
            uint64_t lies = little ? (uint64_t)GET16(at + 10) << 16 | GET16(at + 8)
                                   : (uint64_t)GET16(at + 8) << 16 | GET16(at + 10);
            unsigned unit = GET16(at + 2) < sizeof units ? units[GET16(at + 2)] : 0;
            if (found == ABSENT && count * unit > 4 && lies + count * unit > size)
                return 0;
            continue;
        }
        /* One SHORT, from 1 to 8, and just once. */
        bool plain = found == ABSENT && GET16(at + 2) == 3 &&
                     GET16(at + (little ? 4 : 6)) == 1 && !GET16(at + (little ? 6 : 4));
        found = plain ? GET16(at + 8) : 0;
        if (found < 1 || found > 8)
            return 0;
    }
#undef GET16
    return found;
}

/* SOF: FFC0 to FFCF without DHT, JPG and DAC. */
static bool frame(core_jpeg *jpeg, int marker, const uint8_t *body, size_t size)
{
    if (jpeg->sof || size < 6 || size != 6 + 3 * (size_t)body[5])
        return false;
    *jpeg = (core_jpeg){
        .sof = marker,
        .precision = body[0],
        .height = get16(body + 1),
        .width = get16(body + 3),
        .components = body[5],
        .interval = jpeg->interval,
        .tables = jpeg->tables,
        .several = jpeg->several,
        .app1 = jpeg->app1,
        .orientation = jpeg->orientation,
    };
    unsigned across = 1, down = 1;
    for (int i = 0; i < body[5]; i++) {
        unsigned sampling = body[7 + 3 * i];
        if (sampling >> 4 < 1 || sampling >> 4 > 4 || (sampling & 15) < 1 || (sampling & 15) > 4)
            return false;
        if (sampling >> 4 > across)
            across = sampling >> 4;
        if ((sampling & 15) > down)
            down = sampling & 15;
        if (body[8 + 3 * i] > 3)
            return false;
        jpeg->wanted |= 1u << body[8 + 3 * i];
    }
    if (body[5] == 1)
        across = down = 1; /* alone, a component is not interleaved, whatever its sampling */
    jpeg->mcu_width = 8 * across;
    jpeg->mcu_height = 8 * down;
    return jpeg->width && jpeg->height;
}

/* Which tables a DQT (bits 0 to 3) or DHT (4 to 7: DC, 8 to 11: AC) defines. */
static unsigned tables(int marker, const uint8_t *body, size_t size)
{
    unsigned found = 0;
    for (size_t at = 0; at < size;) {
        unsigned which = body[at] & 3, high = body[at] >> 4 != 0; /* as libjpeg takes it */
        size_t length = 65 + 64 * (size_t)high;
        if (marker == 0xC4) {
            if (size - at < 17)
                return found;
            length = 17;
            for (int i = 1; i <= 16; i++)
                length += body[at + (size_t)i];
            which += 4 + 4 * high;
        }
        if (size - at < length)
            return found;
        found |= 1u << which;
        at += length;
    }
    return found;
}

bool core_jpeg_parse(const uint8_t *data, size_t size, core_jpeg *jpeg)
{
    *jpeg = (core_jpeg){.orientation = 1};
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8)
        return false;
    for (size_t at = 2; size - at >= 4;) {
        if (data[at] != 0xFF)
            return false;
        int marker = data[at + 1];
        if (marker == 0xFF) { /* a fill byte */
            at++;
            continue;
        }
        if (marker < 0xC0 || (marker >= 0xD0 && marker <= 0xD9))
            return false; /* no marker that may stand here */
        size_t length = get16(data + at + 2);
        if (length < 2 || length > size - at - 2)
            return false;
        const uint8_t *body = data + at + 4;
        size_t rest = length - 2;
        if (marker == 0xDA) {
            if (!jpeg->sof || rest < 1 || rest != 4 + 2 * (size_t)body[0])
                return false;
            jpeg->whole = body[0] == jpeg->components && (jpeg->sof == 0xC0 || jpeg->sof == 0xC1);
            for (int i = 0; i < body[0]; i++)
                jpeg->wanted |= 16u << (body[2 + 2 * i] >> 4 & 3) | 256u << (body[2 + 2 * i] & 3);
            jpeg->scan = at + 2 + length;
            jpeg->orientation = jpeg->orientation == ABSENT ? 1 : jpeg->orientation;
            return true;
        }
        if (marker == 0xDB || marker == 0xC4)
            jpeg->tables |= tables(marker, body, rest);
        else if (marker == 0xDD && rest == 2)
            jpeg->interval = get16(body);
        else if (marker == 0xE1) {
            if (!jpeg->app1)
                jpeg->orientation = orientation(body, rest);
            else if (jpeg->orientation == ABSENT || (rest && body[0] == 'E'))
                jpeg->orientation = 0; /* XMP, or EXIF in several segments */
            jpeg->app1 = true;
        }
        else if (marker == 0xE2 && rest >= 4 && !memcmp(body, "MPF", 4))
            jpeg->several = true;
        else if (marker <= 0xCF && marker != 0xC8 && marker != 0xCC) {
            if (!frame(jpeg, marker, body, rest))
                return false;
            jpeg->sof_at = at;
        }
        at += 2 + length;
    }
    return false;
}

/* Errors: libjpeg calls one of these two, and both go back to `guarded`. ----------------------- */

struct failure {
    struct jpeg_error_mgr handlers; /* first: libjpeg knows this address alone */
    jmp_buf back;
    char words[JMSG_LENGTH_MAX];
};

static void fail(j_common_ptr common)
{
    struct failure *failure = (struct failure *)common->err;
    failure->handlers.format_message(common, failure->words);
    longjmp(failure->back, 1);
}

static void complain(j_common_ptr common, int level)
{
    if (level < 0) /* a warning: damaged data; above are traces */
        fail(common);
}

static void silent(j_common_ptr common)
{
    (void)common;
}

static struct jpeg_error_mgr *handlers(struct failure *failure)
{
    jpeg_std_error(&failure->handlers);
    failure->handlers.error_exit = fail;
    failure->handlers.emit_message = complain;
    failure->handlers.output_message = silent;
    failure->words[0] = 0;
    return &failure->handlers;
}

/* Runs `work(job)`; false when libjpeg failed in it. All that work changes lies in *job, nothing in
 * locals of the function that set the jump, so nothing is lost or stale after it. */
static bool guarded(struct failure *failure, void (*work)(void *), void *job)
{
    if (setjmp(failure->back))
        return false;
    work(job);
    return true;
}

/* Entropy coding ------------------------------------------------------------------------------- */

/* libjpeg-turbo takes its fast way through the Huffman codes only where there are no restart
 * markers, so not in tiles. So this takes its place, for one sequential scan of all components; all else
 * (headers, tables, the inverse DCT, colours) stays with libjpeg. It reaches for a structure of
 * libjpeg's inside: where jpegint.h is not installed, libjpeg decodes as ever. */
#if __has_include(<jpegint.h>)
#define OWN_ENTROPY 1
#include <jpegint.h>
#endif

#ifdef OWN_ENTROPY

#define ALWAYS_INLINE __attribute__((always_inline)) static inline
#define LOOK 10 /* bits of a code that are looked up at once */

/* What begins with these bits: a code of `length` bits, or a code and the value behind it, where
 * all fit into LOOK bits and so `value` is not 0. length 0: a longer code. */
struct look {
    int16_t value;
    uint8_t length, symbol;
};

struct codes {
    struct look looks[1 << LOOK];
    uint32_t limits[18]; /* the first 16 bits that are too large for a code of so many */
    int offsets[17];     /* from a code to its symbol */
    const uint8_t *symbols;
};

struct reader {
    uint64_t bits;  /* the next bit is the highest */
    int count, pad; /* how many there are; how many of them lie beyond the data */
    const uint8_t *at, *end;
};

struct entropy {
    struct reader reader;
    unsigned left, number; /* MCUs until the next restart marker, and its number */
    unsigned previous[3];  /* DC values */
    struct codes dc[2], ac[2];
    struct codes *dcs[D_MAX_BLOCKS_IN_MCU], *acs[D_MAX_BLOCKS_IN_MCU];
};

static const uint8_t natural[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

/* A value of `size` bits: those that begin with 0 are negative. */
static inline int extended(unsigned bits, unsigned size)
{
    return (int)bits - (bits >> (size - 1) ? 0 : (1 << size) - 1);
}

static void make_codes(struct codes *codes, const JHUFF_TBL *table)
{
    memset(codes->looks, 0, sizeof codes->looks);
    codes->symbols = table->huffval;
    unsigned code = 0, next = 0; /* libjpeg has checked that the codes fit into their bits */
    for (unsigned length = 1; length <= 16; length++, code <<= 1) {
        codes->offsets[length] = (int)next - (int)code;
        for (int i = 0; i < table->bits[length]; i++, code++) {
            uint8_t symbol = table->huffval[next++ & 255];
            unsigned size = symbol & 15, rest = LOOK - length;
            for (unsigned k = 0; length <= LOOK && k < 1u << rest; k++) {
                struct look look = {.length = (uint8_t)length, .symbol = symbol};
                if (size && size <= rest) {
                    look.value = (int16_t)extended(k >> (rest - size), size);
                    look.length += size;
                }
                codes->looks[((code << rest) + k) & ((1 << LOOK) - 1)] = look;
            }
        }
        codes->limits[length] = code << (16 - length);
    }
}

/* One byte after the other; beyond the data they are 0. */
static struct reader refilled(struct reader r)
{
    while (r.count <= 56) {
        uint64_t byte = 0;
        if (r.end - r.at < 2 || (r.at[0] == 0xFF && r.at[1]))
            r.pad += 8; /* a marker: no more of this segment */
        else {
            byte = r.at[0];
            r.at += byte == 0xFF ? 2 : 1;
        }
        r.bits |= byte << (56 - r.count);
        r.count += 8;
    }
    return r;
}

/* At least 32 bits. */
ALWAYS_INLINE void refill(struct reader *r)
{
    if (r->end - r->at >= 8) {
        uint64_t word;
        memcpy(&word, r->at, 8);
        if (!((~word - 0x0101010101010101u) & word & 0x8080808080808080u)) { /* no byte is FF */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
            word = __builtin_bswap64(word);
#endif
            r->bits |= word >> r->count;
            r->at += (63 - r->count) >> 3;
            r->count |= 56;
            return;
        }
    }
    *r = refilled(*r);
}

ALWAYS_INLINE unsigned take(struct reader *r, unsigned count)
{
    unsigned bits = (unsigned)(r->bits >> (64 - count));
    r->bits <<= count;
    r->count -= (int)count;
    return bits;
}

/* The next symbol, and its value where it has one: at most 32 bits. -1: no such code. */
ALWAYS_INLINE int next_symbol(struct reader *r, const struct codes *codes, int *value)
{
    if (r->count < 32)
        refill(r);
    struct look look = codes->looks[r->bits >> (64 - LOOK)];
    unsigned symbol = look.symbol;
    *value = look.value;
    if (look.length) {
        take(r, look.length);
        if (look.value)
            return (int)symbol;
    } else {
        unsigned code = (unsigned)(r->bits >> 48), length = LOOK + 1;
        while (length <= 16 && code >= codes->limits[length])
            length++;
        if (length > 16)
            return -1;
        symbol = codes->symbols[((int)(code >> (16 - length)) + codes->offsets[length]) & 255];
        take(r, length);
    }
    if (symbol & 15)
        *value = extended(take(r, symbol & 15), symbol & 15);
    return (int)symbol;
}

static bool restart(struct entropy *e)
{
    struct reader *r = &e->reader;
    if (r->count - r->pad >= 8 || r->end - r->at < 2 || r->at[0] != 0xFF ||
        r->at[1] != (0xD0 | e->number))
        return false;
    e->number = (e->number + 1) & 7;
    *r = (struct reader){.at = r->at + 2, .end = r->end};
    memset(e->previous, 0, sizeof e->previous);
    return true;
}

static boolean decode_mcu(j_decompress_ptr in, JBLOCKROW *blocks)
{
    struct entropy *e = in->client_data;
    if (in->restart_interval && !e->left--) {
        if (!restart(e))
            WARNMS(in, JWRN_HIT_MARKER);
        e->left = in->restart_interval - 1;
    }
    struct reader r = e->reader; /* a copy may lie in registers */
    JBLOCK skipped;
    for (int i = 0; i < in->blocks_in_MCU; i++) {
        const struct codes *codes = e->acs[i];
        int value = 0, k = 0, symbol = next_symbol(&r, e->dcs[i], &value);
        unsigned *previous = e->previous + in->MCU_membership[i];
        JCOEF *block = blocks ? blocks[i][0] : skipped;
        *previous += (unsigned)value;
        block[0] = (JCOEF)*previous;
        while (symbol >= 0 && k < 63) {
            symbol = next_symbol(&r, codes, &value);
            k += (symbol >> 4) + 1;
            if (!(symbol & 15)) {
                if (symbol == 0xF0)
                    continue;
                break; /* end of block */
            }
            if (k > 63)
                break;
            block[natural[k]] = (JCOEF)value;
        }
        if (symbol < 0 || (k > 63 && (symbol & 15)))
            WARNMS(in, JWRN_HUFF_BAD_CODE);
    }
    if (r.count < r.pad) /* bits that are not there were taken */
        WARNMS(in, JWRN_HIT_MARKER);
    e->reader = r;
    in->src->next_input_byte = r.at;
    in->src->bytes_in_buffer = (size_t)(r.end - r.at);
    return TRUE;
}

/* To be called between the start of the scan and its first MCU. */
static void take_over(struct jpeg_decompress_struct *in, struct entropy *e)
{
    if (jpeg_has_multiple_scans(in) || in->arith_code)
        return; /* of one scan it has all components, and libjpeg takes no other */
    bool made[4] = {false};
    for (int i = 0; i < in->blocks_in_MCU; i++) {
        jpeg_component_info *part = in->cur_comp_info[in->MCU_membership[i]];
        int dc = part->dc_tbl_no, ac = part->ac_tbl_no;
        if (dc < 0 || dc > 1 || ac < 0 || ac > 1 || !in->dc_huff_tbl_ptrs[dc] ||
            !in->ac_huff_tbl_ptrs[ac])
            return;
        if (!made[dc])
            make_codes(e->dc + dc, in->dc_huff_tbl_ptrs[dc]);
        if (!made[2 + ac])
            make_codes(e->ac + ac, in->ac_huff_tbl_ptrs[ac]);
        made[dc] = made[2 + ac] = true;
        e->dcs[i] = e->dc + dc;
        e->acs[i] = e->ac + ac;
    }
    e->reader.at = in->src->next_input_byte;
    e->reader.end = e->reader.at + in->src->bytes_in_buffer;
    e->left = in->restart_interval;
    in->client_data = e;
    in->entropy->decode_mcu = decode_mcu;
}

/* After the last MCU: whole bytes that it took up, but did not need. libjpeg warns of such bytes
 * where it did not happen to read them ahead. */
static void end_scan(struct jpeg_decompress_struct *in, const struct entropy *e)
{
    int bytes = (e->reader.count - e->reader.pad) / 8;
    if (bytes > 0)
        WARNMS2(in, JWRN_EXTRANEOUS_DATA, bytes, JPEG_EOI);
}

#else

struct entropy {
    char unused;
};

static void take_over(struct jpeg_decompress_struct *in, struct entropy *e)
{
    (void)in, (void)e;
}

static void end_scan(struct jpeg_decompress_struct *in, const struct entropy *e)
{
    (void)in, (void)e;
}

#endif

/* Called by libjpeg now and then, first before the first MCU.
 *
 * A progressive file has some ten scans, and each is a pass over all coefficients: a small one with
 * thousands would take hours. */
#define MAX_SCANS 200

struct monitor {
    struct jpeg_progress_mgr progress;
    struct entropy entropy;
    bool begun;
};

static void watch(j_common_ptr common)
{
    struct failure *failure = (struct failure *)common->err;
    struct monitor *monitor = (struct monitor *)common->progress;
    j_decompress_ptr in = (j_decompress_ptr)common;
    if (in->input_scan_number > MAX_SCANS) {
        snprintf(failure->words, sizeof failure->words, "more than %d scans", MAX_SCANS);
        longjmp(failure->back, 1);
    }
    if (!monitor->begun)
        take_over(in, &monitor->entropy);
    monitor->begun = true;
}

/* The lossless rewrite ------------------------------------------------------------------------- */

struct rewriting {
    struct failure failure;
    struct jpeg_decompress_struct in, again;
    struct jpeg_compress_struct out;
    struct monitor monitors[2];
    const uint8_t *data;
    size_t size;
    unsigned interval;
    unsigned char *room, *result; /* libjpeg writes to room, or where it is too small elsewhere */
    unsigned long result_size;
    const char *reason;
};

/* Whether a progressive file has not sent each coefficient to its last bit: decoders smooth these,
 * by what lies around, so a part of it would not look as in the whole. */
static bool unfinished(const struct jpeg_decompress_struct *in)
{
    for (int i = 0; in->coef_bits && i < 64 * in->num_components; i++)
        if (in->coef_bits[i / 64][i % 64])
            return true;
    return false;
}

static bool is(jpeg_saved_marker_ptr marker, int code, const char *name)
{
    return marker->marker == code && marker->data_length >= 5 && !memcmp(marker->data, name, 5);
}

static void open_all(struct monitor *monitor, struct jpeg_decompress_struct *in,
                     const uint8_t *data, size_t size)
{
    jpeg_create_decompress(in);
    monitor->progress.progress_monitor = watch;
    in->progress = &monitor->progress;
    jpeg_mem_src(in, data, (unsigned long)size);
    jpeg_save_markers(in, JPEG_COM, 0xFFFF);
    for (int i = 0; i < 16; i++)
        jpeg_save_markers(in, JPEG_APP0 + i, 0xFFFF);
    jpeg_read_header(in, TRUE);
    if (in->num_components > 3)
        ERREXIT(in, JERR_BAD_LENGTH); /* the bytes were changed since they were parsed */
}

/* The next marker that libjpeg does not write anew by itself (as JFIF's, or Adobe's for RGB). */
static jpeg_saved_marker_ptr kept(struct rewriting *job, jpeg_saved_marker_ptr marker)
{
    while (marker && ((job->out.write_JFIF_header && is(marker, JPEG_APP0, "JFIF")) ||
                      (job->out.write_Adobe_marker && is(marker, JPEG_APP0 + 14, "Adobe"))))
        marker = marker->next;
    return marker;
}

static bool same_markers(struct rewriting *job)
{
    jpeg_saved_marker_ptr a = kept(job, job->in.marker_list);
    jpeg_saved_marker_ptr b = kept(job, job->again.marker_list);
    for (; a && b; a = kept(job, a->next), b = kept(job, b->next))
        if (a->marker != b->marker || a->data_length != b->data_length ||
            memcmp(a->data, b->data, a->data_length))
            return false;
    /* The header of JFIF may hold a thumbnail, which libjpeg does not write. */
    for (jpeg_saved_marker_ptr m = job->in.marker_list; m; m = m->next)
        if (is(m, JPEG_APP0, "JFIF") && (m->data_length != 14 || m->data[12] || m->data[13]))
            return false;
    return !a && !b && (!job->in.saw_JFIF_marker ||
        (job->in.density_unit == job->again.density_unit &&
         job->in.X_density == job->again.X_density && job->in.Y_density == job->again.Y_density));
}

static bool same_pixels(struct rewriting *job, jvirt_barray_ptr *first, jvirt_barray_ptr *second)
{
    struct jpeg_decompress_struct *a = &job->in, *b = &job->again;
    if (a->image_width != b->image_width || a->image_height != b->image_height ||
        a->num_components != b->num_components || a->jpeg_color_space != b->jpeg_color_space)
        return false;
    for (int i = 0; i < a->num_components; i++) {
        jpeg_component_info *p = a->comp_info + i, *q = b->comp_info + i;
        if (p->component_id != q->component_id || p->h_samp_factor != q->h_samp_factor ||
            p->v_samp_factor != q->v_samp_factor || !p->quant_table || !q->quant_table ||
            memcmp(p->quant_table->quantval, q->quant_table->quantval,
                   sizeof q->quant_table->quantval))
            return false;
        for (JDIMENSION row = 0; row < p->height_in_blocks; row++) {
            JBLOCKARRAY x = a->mem->access_virt_barray((j_common_ptr)a, first[i], row, 1, FALSE);
            JBLOCKARRAY y = b->mem->access_virt_barray((j_common_ptr)b, second[i], row, 1, FALSE);
            if (memcmp(x[0], y[0], p->width_in_blocks * sizeof(JBLOCK)))
                return false;
        }
    }
    return true;
}

/* How often each Huffman symbol comes: what `optimize_coding` counts, but libjpeg looks at all 64
 * coefficients one by one, a third of the time of the whole rewrite. */
struct symbols {
    long dc[NUM_HUFF_TBLS][257], ac[NUM_HUFF_TBLS][257];
};

/* libjpeg's own, though its header does not tell; since 1991, in every version. */
EXTERN(void) jpeg_gen_optimal_table(j_compress_ptr, JHUFF_TBL *, long freq[]);

/* Where coefficient i stands in the zigzag. */
static const uint8_t zigzag[64] = {
    0,  1,  5,  6,  14, 15, 27, 28, 2,  4,  7,  13, 16, 26, 29, 42, 3,  8,  12, 17, 25, 30,
    41, 43, 9,  11, 18, 24, 31, 40, 44, 53, 10, 19, 23, 32, 39, 45, 52, 54, 20, 22, 33, 38,
    46, 51, 55, 60, 21, 34, 37, 47, 50, 56, 59, 61, 35, 36, 48, 49, 57, 58, 62, 63};

/* Bits of a number's magnitude. */
static unsigned magnitude(int value)
{
    return value ? 32u - (unsigned)__builtin_clz((unsigned)abs(value)) : 0;
}

static bool count_block(const JCOEF *block, int previous, long *dc, long *ac)
{
    uint64_t present = 0, ordered = 0; /* bit i: coefficient i is not 0 */
#ifdef __SSE2__
    for (int i = 0; i < 64; i += 16) {
        __m128i low = _mm_loadu_si128((const void *)(block + i));
        __m128i high = _mm_loadu_si128((const void *)(block + i + 8)), zero = _mm_setzero_si128();
        low = _mm_packs_epi16(_mm_cmpeq_epi16(low, zero), _mm_cmpeq_epi16(high, zero));
        present |= (uint64_t)(uint16_t)~_mm_movemask_epi8(low) << i;
    }
#else
    for (int i = 0; i < 64; i++)
        present |= (uint64_t)(block[i] != 0) << i;
#endif
    uint8_t bits[64], worst = 0;
    for (present &= ~1ull; present; present &= present - 1) {
        int i = __builtin_ctzll(present);
        bits[zigzag[i]] = (uint8_t)magnitude(block[i]);
        worst |= bits[zigzag[i]];
        ordered |= 1ull << zigzag[i];
    }
    unsigned difference = magnitude(block[0] - previous);
    if (difference > 11 || worst > 15)
        return false;
    dc[difference]++;
    int last = 0;
    for (; ordered; ordered &= ordered - 1) {
        int at = __builtin_ctzll(ordered), run = at - last - 1;
        for (; run > 15; run -= 16)
            ac[0xF0]++; /* sixteen zeros */
        if (bits[at] > 10)
            return false;
        ac[run << 4 | bits[at]]++;
        last = at;
    }
    ac[0] += last < 63; /* end of block */
    return true;
}

/* Gives the file to be written the best tables: the symbols of each MCU as libjpeg will write them,
 * also of blocks beyond the rim, which repeat the DC value before them and have nothing else. */
static void make_tables(struct rewriting *job, jvirt_barray_ptr *blocks)
{
    struct jpeg_decompress_struct *in = &job->in;
    struct symbols *symbols = in->mem->alloc_small((j_common_ptr)in, JPOOL_IMAGE, sizeof *symbols);
    memset(symbols, 0, sizeof *symbols);
    bool alone = in->num_components == 1;
    int previous[3] = {0}, across[3], down[3];
    for (int i = 0; i < in->num_components; i++) {
        across[i] = alone ? 1 : in->comp_info[i].h_samp_factor;
        down[i] = alone ? 1 : in->comp_info[i].v_samp_factor;
    }
    JDIMENSION wide = 8 * (alone ? 1 : (JDIMENSION)in->max_h_samp_factor);
    JDIMENSION high = 8 * (alone ? 1 : (JDIMENSION)in->max_v_samp_factor);
    JDIMENSION columns = (in->image_width + wide - 1) / wide;
    JDIMENSION rows = (in->image_height + high - 1) / high;
    if (alone) {
        columns = in->comp_info->width_in_blocks;
        rows = in->comp_info->height_in_blocks;
    }
    unsigned left = job->interval; /* until the next restart */
    for (JDIMENSION row = 0; row < rows; row++) {
        JBLOCKARRAY lines[3];
        for (int i = 0; i < in->num_components; i++) {
            JDIMENSION first = row * (JDIMENSION)down[i];
            JDIMENSION count = in->comp_info[i].height_in_blocks - first;
            count = count < (JDIMENSION)down[i] ? count : (JDIMENSION)down[i];
            lines[i] =
                in->mem->access_virt_barray((j_common_ptr)in, blocks[i], first, count, FALSE);
        }
        for (JDIMENSION column = 0; column < columns; column++) {
            if (job->interval && !left--) {
                memset(previous, 0, sizeof previous);
                left = job->interval - 1;
            }
            for (int i = 0; i < in->num_components; i++) {
                jpeg_component_info *part = in->comp_info + i;
                long *dc = symbols->dc[job->out.comp_info[i].dc_tbl_no];
                long *ac = symbols->ac[job->out.comp_info[i].ac_tbl_no];
                for (int k = 0; k < across[i] * down[i]; k++) {
                    JDIMENSION x = column * (JDIMENSION)across[i] + (JDIMENSION)(k % across[i]);
                    JDIMENSION y = (JDIMENSION)(k / across[i]);
                    if (x >= part->width_in_blocks ||
                        row * (JDIMENSION)down[i] + y >= part->height_in_blocks) {
                        dc[0]++;
                        ac[0]++;
                        continue;
                    }
                    const JCOEF *block = lines[i][y][x];
                    if (!count_block(block, previous[i], dc, ac))
                        ERREXIT(in, JERR_BAD_DCT_COEF);
                    previous[i] = block[0];
                }
            }
        }
    }
    for (int i = 0; i < in->num_components; i++) {
        int dc = job->out.comp_info[i].dc_tbl_no, ac = job->out.comp_info[i].ac_tbl_no;
        if (i && dc == job->out.comp_info[i - 1].dc_tbl_no)
            continue; /* made already */
        jpeg_gen_optimal_table(&job->out, job->out.dc_huff_tbl_ptrs[dc], symbols->dc[dc]);
        jpeg_gen_optimal_table(&job->out, job->out.ac_huff_tbl_ptrs[ac], symbols->ac[ac]);
    }
}

static void rewrite(void *rewriting)
{
    struct rewriting *job = rewriting;
    open_all(job->monitors, &job->in, job->data, job->size);
    jvirt_barray_ptr *first = jpeg_read_coefficients(&job->in);
    end_scan(&job->in, &job->monitors[0].entropy);
    if (unfinished(&job->in)) {
        job->reason = "progressive and unfinished";
        return;
    }
    jpeg_create_compress(&job->out);
    jpeg_mem_dest(&job->out, &job->result, &job->result_size);
    jpeg_copy_critical_parameters(&job->in, &job->out);
    job->out.optimize_coding = FALSE;
    job->out.restart_interval = job->interval;
    make_tables(job, first);
    jpeg_write_coefficients(&job->out, first);
    for (jpeg_saved_marker_ptr m = kept(job, job->in.marker_list); m; m = kept(job, m->next))
        jpeg_write_marker(&job->out, m->marker, m->data, m->data_length);
    jpeg_finish_compress(&job->out);

    open_all(job->monitors + 1, &job->again, job->result, job->result_size);
    jvirt_barray_ptr *second = jpeg_read_coefficients(&job->again);
    if (!same_markers(job))
        job->reason = "its metadata would not be kept";
    else if (!same_pixels(job, first, second))
        job->reason = "its coefficients would not be kept";
}

/* Each block of 64 pixels takes a bit at least, so a header cannot ask for memory by itself. */
static bool lies(const core_jpeg *jpeg, size_t size)
{
    return (uint64_t)jpeg->width * jpeg->height / 512 > size;
}

const char *core_rewrite(const uint8_t *data, size_t size, unsigned interval, uint64_t max_pixels,
                         uint8_t **result, size_t *result_size, char words[CORE_WORDS])
{
    core_jpeg jpeg;
    *result = NULL;
    if (!core_jpeg_parse(data, size, &jpeg))
        return "no JPEG, or its header is damaged";
    if (jpeg.precision != 8)
        return "not of 8 bits";
    if (jpeg.sof > 0xC8)
        return "arithmetic";
    if (jpeg.sof > 0xC2)
        return "lossless or hierarchical";
    if (jpeg.components == 4)
        return "CMYK";
    if (jpeg.components != 1 && jpeg.components != 3)
        return "neither grey nor of three colours";
    if (jpeg.several)
        return "several images in one file";
    if ((uint64_t)jpeg.width * jpeg.height > max_pixels)
        return "over max_pixels";
    if (lies(&jpeg, size))
        return "damaged: fewer bytes than pixels need";

    struct rewriting *job = calloc(1, sizeof *job);
    if (!job)
        return "no memory";
    job->data = data;
    job->size = size;
    job->interval = interval;
    /* libjpeg tells its own buffer only when it is done, and frees it when it grows: after an error
     * in between nobody could free it twice, so the first is ours. */
    job->result_size = (unsigned long)(size + size / 4 + 4096);
    job->room = job->result = malloc(job->result_size);
    if (!job->room) {
        free(job);
        return "no memory";
    }
    job->in.err = job->again.err = job->out.err = handlers(&job->failure);
    const char *reason;
    if (guarded(&job->failure, rewrite, job)) {
        reason = job->reason;
    } else if (job->failure.handlers.msg_code == JERR_OUT_OF_MEMORY) {
        reason = "no memory";
    } else {
        snprintf(words, CORE_WORDS, "damaged: %s", job->failure.words);
        reason = words;
    }
    jpeg_destroy((j_common_ptr)&job->in); /* does nothing to what was never made */
    jpeg_destroy((j_common_ptr)&job->again);
    jpeg_destroy((j_common_ptr)&job->out);
    if (job->result != job->room && reason)
        free(job->result);
    if (job->result != job->room || reason)
        free(job->room);
    if (!reason) {
        *result = job->result;
        *result_size = job->result_size;
    }
    free(job);
    return reason;
}

/* Decoding ------------------------------------------------------------------------------------- */

/* libjpeg's fast way through entropy coding needs so many bytes ahead: 512 for each of 10 blocks. */
#define AHEAD 5120

/* Upsampling looks at one sample of chroma more on each side; those are up to 4 pixels wide. */
#define MARGIN 4

struct span {
    unsigned begin, end;
};

/* The rows or columns that a plan needs, with the margin, of a picture of `limit` pixels. */
static struct span needed(const core_plan *plan, int scale, unsigned limit)
{
    unsigned begin = (unsigned)plan->first[0] * (unsigned)scale, margin = MARGIN * (unsigned)scale;
    unsigned end = (unsigned)(plan->first[plan->size - 1] + plan->count[plan->size - 1]);
    end = end * (unsigned)scale + margin;
    return (struct span){begin > margin ? begin - margin : 0, end < limit ? end : limit};
}

/* Where the picture's data end: at EOI. SIZE_MAX when there is none, so that it was cut short. */
static size_t end_of(const uint8_t *data, size_t size, size_t at)
{
    if (size >= at + 2 && data[size - 2] == 0xFF && data[size - 1] == 0xD9)
        return size - 2;
    while (at + 2 <= size) {
        const uint8_t *found = memchr(data + at, 0xFF, size - 1 - at);
        if (!found)
            break;
        at = (size_t)(found - data);
        if (data[at + 1] == 0xD9)
            return at;
        at += data[at + 1] == 0xFF ? 1 : 2;
    }
    return SIZE_MAX;
}

/* A JPEG of the tiles under (x, y): the header with another size, then the tiles with their restart
 * markers numbered anew. x and y become what it shows. NULL when these are not tiles: as many as
 * the header says, with the right marker behind each (see shardio/jpeg.py). */
static uint8_t *cut(const uint8_t *data, size_t size, const core_jpeg *jpeg, struct span *x,
                    struct span *y, size_t *cut_size)
{
    unsigned wide = (jpeg->width + jpeg->mcu_width - 1) / jpeg->mcu_width;
    unsigned rows = (jpeg->height + jpeg->mcu_height - 1) / jpeg->mcu_height;
    if (!jpeg->whole || jpeg->interval < 2 || wide % jpeg->interval)
        return NULL;
    size_t columns = wide / jpeg->interval, count = columns * rows, found = 0;
    if (count < 2 || count > size / 2) /* each has a marker of two bytes */
        return NULL;
    size_t *starts = malloc((count + 1) * sizeof *starts); /* of the data behind each marker */
    uint8_t *made = NULL;
    if (!starts)
        return NULL;
    starts[0] = jpeg->scan;
    for (size_t at = jpeg->scan; found < count && at + 2 <= size;) {
        const uint8_t *mark = memchr(data + at, 0xFF, size - 1 - at);
        if (!mark)
            break;
        at = (size_t)(mark - data) + 2;
        if (!mark[1])
            continue;
        if (mark[1] != (found + 1 < count ? 0xD0 | (found & 7) : 0xD9))
            break;
        starts[++found] = at;
    }
    if (found == count) {
        unsigned across = jpeg->interval * jpeg->mcu_width, down = jpeg->mcu_height;
        size_t left = x->begin / across, right = (x->end + across - 1) / across;
        size_t top = y->begin / down, bottom = (y->end + down - 1) / down;
        size_t room = jpeg->scan + AHEAD;
        for (size_t row = top; row < bottom; row++)
            room += starts[row * columns + right] - starts[row * columns + left];
        made = malloc(room);
        if (made) {
            *x = (struct span){(unsigned)left * across, (unsigned)right * across};
            *y = (struct span){(unsigned)top * down, (unsigned)bottom * down};
            x->end = x->end < jpeg->width ? x->end : jpeg->width;
            y->end = y->end < jpeg->height ? y->end : jpeg->height;
            memcpy(made, data, jpeg->scan);
            uint8_t *frame = made + jpeg->sof_at;
            frame[5] = (uint8_t)((y->end - y->begin) >> 8);
            frame[6] = (uint8_t)(y->end - y->begin);
            frame[7] = (uint8_t)((x->end - x->begin) >> 8);
            frame[8] = (uint8_t)(x->end - x->begin);
            size_t at = jpeg->scan, number = 0;
            for (size_t row = top; row < bottom; row++) {
                const size_t *start = starts + row * columns;
                memcpy(made + at, data + start[left], start[right] - start[left]);
                for (size_t i = left; i < right; i++) {
                    at += start[i + 1] - start[i];
                    made[at - 1] = 0xD0 | (number++ & 7);
                }
            }
            made[at - 1] = 0xD9;
            memset(made + at, 0, room - at);
            *cut_size = room;
        }
    }
    free(starts);
    return made;
}

struct cropping {
    struct failure failure;
    struct jpeg_decompress_struct in;
    const core_part *part;
    core_plan across, down;
    struct span x, y; /* what the JPEG shows of the whole */
    struct monitor monitor;
    const uint8_t *data;
    size_t size;
    uint8_t *made;  /* the cut JPEG */
    uint8_t *lines; /* four rows as decoded */
    uint8_t *rows;  /* all rows that are needed, resized along the row */
    size_t stride;
};

static void crop(void *cropping)
{
    struct cropping *job = cropping;
    struct jpeg_decompress_struct *in = &job->in;
    const int scale = job->part->scale;
    jpeg_create_decompress(in);
    job->monitor.progress.progress_monitor = watch;
    in->progress = &job->monitor.progress;
    jpeg_mem_src(in, job->data, (unsigned long)job->size);
    jpeg_read_header(in, TRUE);
    if (in->image_width != job->x.end - job->x.begin ||
        in->image_height != job->y.end - job->y.begin)
        ERREXIT(in, JERR_IMAGE_TOO_BIG); /* the bytes were changed since they were parsed */
    in->out_color_space = JCS_EXT_RGBX;
    in->scale_num = 1;
    in->scale_denom = (unsigned)scale; /* as PIL's draft() has it */
    jpeg_start_decompress(in);
    watch((j_common_ptr)in);
    if (unfinished(in))
        ERREXIT(in, JERR_NOT_COMPILED);

    int top = job->down.first[0] - (int)job->y.begin / scale;
    int high = job->down.first[job->down.size - 1] + job->down.count[job->down.size - 1] -
               job->down.first[0];
    int shift = (int)job->x.begin / scale;
    /* Not the columns that nothing needs. libjpeg upsamples at the rim of these as at the rim of
     * the picture, hence the margin. Of a scaled picture it finds wrong pixels for 4x2 sampling. */
    struct span x = needed(&job->across, 1, in->output_width + (unsigned)shift);
    x.begin = x.begin > (unsigned)shift ? x.begin - (unsigned)shift : 0;
    JDIMENSION from = x.begin, columns = x.end - (unsigned)shift - x.begin;
    if (scale == 1 && columns + 32 <= in->output_width) {
        jpeg_crop_scanline(in, &from, &columns);
        shift += (int)from;
    }
    /* Never at a multiple of 16: to such lines libjpeg-turbo writes past the cache, which makes
     * reading them again several times slower. */
    size_t line = (((size_t)in->output_width + (size_t)job->across.taps) * 4 + 31) / 32 * 32;
    job->stride = ((size_t)job->across.size * 3 + 63) / 32 * 32;
    job->lines = calloc(1, 4 * line + 4);
    job->rows = malloc(job->stride * (size_t)(high + 3));
    if (!job->lines || !job->rows)
        ERREXIT1(in, JERR_OUT_OF_MEMORY, 0);
    uint8_t *four[4], *out[4];
    for (int i = 0; i < 4; i++)
        four[i] = job->lines + 4 + (size_t)i * line;
    if (top > 32)
        jpeg_skip_scanlines(in, (JDIMENSION)top - 16);
    while ((int)in->output_scanline < top)
        jpeg_read_scanlines(in, four, 1);
    for (int row = 0; row < high; row += 4) {
        for (int i = 0; i < 4; i++) {
            out[i] = job->rows + (size_t)(row + i) * job->stride;
            if (row + i < high)
                jpeg_read_scanlines(in, four + i, 1);
        }
        core_across(&job->across, shift, (const uint8_t *const *)four, out);
    }
}

static void paint(struct cropping *job, uint8_t *line)
{
    const core_part *part = job->part;
    size_t bytes = (size_t)part->width * 3;
    for (int i = 0; i < part->height; i++) {
        uint8_t *out = part->out + i * part->down;
        size_t first = (size_t)(job->down.first[i] - job->down.first[0]);
        core_down(&job->down, i, job->rows + first * job->stride, job->stride, line, bytes);
        if (part->right == 3) {
            memcpy(out, line, bytes);
            continue;
        }
        for (const uint8_t *at = line; at < line + bytes; at += 3, out += part->right)
            memcpy(out, at, 3);
    }
}

bool core_crop(const uint8_t *data, size_t size, const core_part *part)
{
    core_jpeg jpeg;
    if (!core_jpeg_parse(data, size, &jpeg) || jpeg.precision != 8 || jpeg.sof > 0xC2 ||
        (jpeg.components != 1 && jpeg.components != 3) ||
        (uint64_t)jpeg.width * jpeg.height > part->max_pixels || lies(&jpeg, size) ||
        end_of(data, size, jpeg.scan) == SIZE_MAX)
        return false;
    const float *box = part->box;
    const int scale = part->scale;
    int width = ((int)jpeg.width + scale - 1) / scale;
    int height = ((int)jpeg.height + scale - 1) / scale;
    if (!(0 <= box[0] && box[0] < box[2] && box[2] <= (float)width && 0 <= box[1] &&
          box[1] < box[3] && box[3] <= (float)height))
        return false; /* also when one is not a number */

    struct cropping *job = calloc(1, sizeof *job);
    bool done = false;
    if (!job)
        return false;
    job->part = part;
    if (core_plan_make(&job->across, width, box[0], box[2], part->width, part->filter) &&
        core_plan_make(&job->down, height, box[1], box[3], part->height, part->filter)) {
        job->x = needed(&job->across, scale, jpeg.width);
        job->y = needed(&job->down, scale, jpeg.height);
        job->made = cut(data, size, &jpeg, &job->x, &job->y, &job->size);
        job->data = job->made ? job->made : data;
        if (!job->made) {
            job->size = size;
            job->x = (struct span){0, jpeg.width};
            job->y = (struct span){0, jpeg.height};
        }
        job->in.err = handlers(&job->failure);
        done = guarded(&job->failure, crop, job);
        jpeg_destroy((j_common_ptr)&job->in);
    }
    uint8_t *line = done ? malloc(job->stride) : NULL;
    done = line != NULL;
    if (done)
        paint(job, line);
    free(line);
    free(job->rows);
    free(job->lines);
    free(job->made);
    core_plan_free(&job->across);
    core_plan_free(&job->down);
    free(job);
    return done;
}

/* Many small ones ------------------------------------------------------------------------------ */

struct many {
    struct failure failure;
    struct jpeg_decompress_struct in;
    struct monitor monitor;
    const uint8_t *const *data;
    const size_t *sizes;
    size_t count, done;
    unsigned width, height;
    uint8_t *out, **lines;
};

static void decode_many(void *many)
{
    struct many *job = many;
    struct jpeg_decompress_struct *in = &job->in;
    bool fresh = false;
    for (; job->done < job->count; job->done++) {
        const uint8_t *data = job->data[job->done];
        size_t size = job->sizes[job->done];
        core_jpeg jpeg;
        if (!core_jpeg_parse(data, size, &jpeg) || jpeg.precision != 8 || jpeg.sof > 0xC2 ||
            jpeg.width != job->width || jpeg.height != job->height ||
            (jpeg.components != 1 && jpeg.components != 3) || jpeg.orientation != 1 ||
            end_of(data, size, jpeg.scan) == SIZE_MAX)
            return;
        /* libjpeg keeps tables from image to image; one that lacks some must not find them. */
        bool own = jpeg.whole && !(jpeg.wanted & ~jpeg.tables);
        if (!own || !fresh) {
            jpeg_destroy((j_common_ptr)in);
            jpeg_create_decompress(in);
            in->progress = &job->monitor.progress;
        }
        fresh = own;
        jpeg_mem_src(in, data, (unsigned long)size);
        jpeg_read_header(in, TRUE);
        in->out_color_space = JCS_RGB;
        jpeg_start_decompress(in);
        if (in->output_width != job->width || in->output_height != job->height)
            return; /* the bytes were changed since they were parsed */
        if (unfinished(in))
            return; /* other releases of libjpeg, such as PIL's, smooth in another way */
        uint8_t *out = job->out + (size_t)job->width * 3 * job->height * job->done;
        for (unsigned i = 0; i < job->height; i++)
            job->lines[i] = out + (size_t)job->width * 3 * i;
        while (in->output_scanline < in->output_height)
            jpeg_read_scanlines(in, job->lines + in->output_scanline,
                                in->output_height - in->output_scanline);
        jpeg_finish_decompress(in);
    }
}

size_t core_decode_many(const uint8_t *const *data, const size_t *sizes, size_t count,
                        unsigned width, unsigned height, uint8_t *out)
{
    struct many *job = calloc(1, sizeof *job);
    size_t done = 0;
    if (!job)
        return 0;
    *job = (struct many){.data = data, .sizes = sizes, .count = count, .width = width,
                         .height = height, .out = out};
    job->lines = malloc(height * sizeof *job->lines);
    if (job->lines) {
        job->in.err = handlers(&job->failure);
        job->monitor.progress.progress_monitor = watch;
        job->monitor.begun = true; /* libjpeg's own: making tables for each would take as long */
        guarded(&job->failure, decode_many, job);
        done = job->done;
        jpeg_destroy((j_common_ptr)&job->in);
    }
    free(job->lines);
    free(job);
    return done;
}

/* The lossless rewrite: the same coefficients, with restart markers and the best Huffman tables.
 *
 * The coefficients become tokens (jpeg.h): straight from the Huffman codes where one scan has them
 * all, else (progressive files) from what libjpeg decoded. They are counted and written; then the
 * result is read from its first byte, and must give the same tokens. libjpeg could do all of it, in
 * twice the time: it looks at each of the 64 coefficients of a block, again and again.
 */
#include "jpeg.h"

struct writer {
    uint64_t bits; /* to be written: the first `count` */
    int count;
    uint8_t *at;
};

struct rewriting {
    struct failure failure;
    struct jpeg_decompress_struct in, again;
    struct jpeg_progress_mgr progress;
    struct entropy entropy;
    const uint8_t *data;
    size_t size, header; /* bytes before the scan */
    unsigned interval;
    const char *reason;

    struct mcu mcu; /* and where its blocks lie in it */
    JDIMENSION x[D_MAX_BLOCKS_IN_MCU], y[D_MAX_BLOCKS_IN_MCU], across[3], down[3];
    JDIMENSION row, column; /* of the MCU at hand */
    unsigned real;          /* see core_scan_next */
    int before[3];
    bool restarted; /* a tile begins with it */

    token *tokens;
    size_t room, used, seen;
    bool differs;
    jvirt_barray_ptr *blocks;
    JBLOCKARRAY lines[3];

    int classes;                           /* components with tables of their own: luma, chroma */
    struct symbols symbols[2], *counts[3]; /* of the classes; which each component has */
    JHUFF_TBL tables[4];                   /* DC and AC of luma, of chroma */
    uint32_t codes[4][256];                /* code, room for the value; 5 bits: bits of both */
    uint8_t sizes[4096];                   /* core_magnitude(i - 2048) */

    struct writer writer;
    uint8_t written[D_MAX_BLOCKS_IN_MCU * BLOCK_TOKENS * 4]; /* by it, for one MCU, without FF 00 */
    unsigned restarts;
    uint8_t *result, *at, *end;
};

/* Which tables a component has: as libjpeg does it, those of luma if there is no chroma. */
static int class_of(const struct rewriting *job, int part)
{
    return part && job->in.jpeg_color_space == JCS_YCbCr;
}

/* The table of quantisation of a component: what it was when its first scan began. */
static const UINT16 *quant(struct jpeg_decompress_struct *in, const jpeg_component_info *part)
{
    int number = part->quant_tbl_no;
    if (number < 0 || number >= NUM_QUANT_TBLS || !in->quant_tbl_ptrs[number])
        ERREXIT1(in, JERR_NO_QUANT_TABLE, number);
    return part->quant_table ? part->quant_table->quantval : in->quant_tbl_ptrs[number]->quantval;
}

static void lay_out(struct rewriting *job)
{
    const struct jpeg_decompress_struct *in = &job->in;
    for (int i = 0; i < in->num_components; i++) {
        bool alone = in->num_components == 1;
        JDIMENSION across = alone ? 1 : (JDIMENSION)in->comp_info[i].h_samp_factor;
        JDIMENSION down = alone ? 1 : (JDIMENSION)in->comp_info[i].v_samp_factor;
        if ((JDIMENSION)job->mcu.blocks + across * down > D_MAX_BLOCKS_IN_MCU)
            ERREXIT(in, JERR_BAD_MCU_SIZE);
        for (JDIMENSION k = 0; k < across * down; k++) {
            int block = job->mcu.blocks++;
            job->mcu.part[block] = i;
            job->x[block] = k % across, job->y[block] = k / across;
        }
        job->across[i] = across, job->down[i] = down;
        job->counts[i] = job->symbols + class_of(job, i);
        job->classes = 1 + class_of(job, i);
    }
    for (int i = 0; i < 4096; i++)
        job->sizes[i] = (uint8_t)core_magnitude(i - 2048);
}

/* Goes through the MCUs, in the order of a scan of all components. */
static void each_mcu(struct rewriting *job, void (*step)(struct rewriting *job))
{
    const struct jpeg_decompress_struct *in = &job->in;
    bool alone = in->num_components == 1;
    JDIMENSION wide = 8 * (alone ? 1 : (JDIMENSION)in->max_h_samp_factor);
    JDIMENSION high = 8 * (alone ? 1 : (JDIMENSION)in->max_v_samp_factor);
    JDIMENSION columns = (in->image_width + wide - 1) / wide;
    JDIMENSION rows = (in->image_height + high - 1) / high;
    unsigned left = 0; /* until the next restart marker */
    job->seen = 0;
    for (job->row = 0; job->row < rows; job->row++) {
        for (job->column = 0; job->column < columns; job->column++) {
            job->restarted = !left--;
            if (job->restarted) {
                left = (job->interval ? job->interval : columns * rows) - 1;
                memset(job->before, 0, sizeof job->before);
            }
            job->real = 0;
            for (int i = 0; i < job->mcu.blocks; i++) {
                int part = job->mcu.part[i];
                const jpeg_component_info *info = in->comp_info + part;
                if (job->column * job->across[part] + job->x[i] < info->width_in_blocks &&
                    job->row * job->down[part] + job->y[i] < info->height_in_blocks)
                    job->real |= 1u << i;
            }
            step(job);
        }
    }
}

static void *resized(struct rewriting *job, void *memory, size_t size)
{
    void *found = realloc(memory, size);
    if (!found)
        ERREXIT1(&job->in, JERR_OUT_OF_MEMORY, 0);
    return found;
}

/* Reading -------------------------------------------------------------------------------------- */

static token *room_for_mcu(struct rewriting *job)
{
    const size_t most = D_MAX_BLOCKS_IN_MCU * BLOCK_TOKENS;
    if (job->room - job->used < most) {
        size_t room = job->room + job->room / 2 + 2 * job->size + most;
        job->tokens = resized(job, job->tokens, room * sizeof *job->tokens);
        job->room = room;
    }
    return job->tokens + job->used;
}

static void read_codes(struct rewriting *job)
{
    const token *end = core_scan_next(&job->in, &job->entropy, &job->mcu, job->real, job->before,
                                      job->counts, room_for_mcu(job));
    job->used = (size_t)(end - job->tokens);
}

static token *tokens_of(struct rewriting *job, const JCOEF *block, int before,
                        struct symbols *counts, token *to)
{
    int difference = block[0] - before, last = 0;
    if (abs(difference) > 2047)
        ERREXIT(&job->in, JERR_BAD_DCT_COEF);
    counts->dc[core_magnitude(difference)]++;
    *to++ = (token)(difference * 16);
    for (int k = 1; k < 64; k++) {
        int value = block[core_natural[k]];
        if (!value)
            continue;
        if (abs(value) > 1023)
            ERREXIT(&job->in, JERR_BAD_DCT_COEF);
        for (; k - last > 16; last += 16) {
            counts->ac[0xF0]++;
            *to++ = ZEROS;
        }
        counts->ac[(k - last - 1) << 4 | core_magnitude(value)]++;
        *to++ = (token)(value * 16 | (k - last - 1));
        last = k;
    }
    if (last < 63) {
        counts->ac[END]++;
        *to++ = END;
    }
    return to;
}

static void read_blocks(struct rewriting *job)
{
    struct jpeg_decompress_struct *in = &job->in;
    for (int i = 0; i < in->num_components && !job->column; i++) {
        JDIMENSION first = job->row * job->down[i];
        JDIMENSION count = in->comp_info[i].height_in_blocks - first;
        count = count < job->down[i] ? count : job->down[i];
        job->lines[i] = in->mem->access_virt_barray((j_common_ptr)in, job->blocks[i], first,
                                                    count, FALSE);
    }
    static const JBLOCK empty;
    token *to = room_for_mcu(job);
    for (int i = 0; i < job->mcu.blocks; i++) {
        int part = job->mcu.part[i];
        JDIMENSION x = job->column * job->across[part] + job->x[i];
        const JCOEF *block = job->real >> i & 1 ? job->lines[part][job->y[i]][x] : empty;
        to = tokens_of(job, block, block == empty ? 0 : job->before[part], job->counts[part], to);
        if (block != empty)
            job->before[part] = block[0];
    }
    job->used = (size_t)(to - job->tokens);
}

static void open_image(struct jpeg_decompress_struct *in, const uint8_t *data, size_t size)
{
    jpeg_create_decompress(in);
    jpeg_mem_src(in, data, (unsigned long)size);
    jpeg_read_header(in, TRUE);
    if (in->num_components > 3)
        ERREXIT(in, JERR_BAD_LENGTH); /* the bytes were changed since they were parsed */
}

/* Whether the scan that follows has all coefficients, in the order in which they are written. */
static bool plain(struct jpeg_decompress_struct *in, struct entropy *e)
{
    if (!core_scan_begin(in, e))
        return false;
    for (int i = 0; i < in->comps_in_scan; i++)
        if (in->cur_comp_info[i] != in->comp_info + i)
            return false;
    return true;
}

/* Whether the picture ends with the scan. */
static bool ended(struct jpeg_decompress_struct *in, const struct entropy *e)
{
    const struct reader *r = &e->reader;
    core_scan_end(in, e);
    return r->end - r->at >= 2 && r->at[0] == 0xFF && r->at[1] == JPEG_EOI;
}

static void read_all(struct rewriting *job)
{
    struct jpeg_decompress_struct *in = &job->in;
    open_image(in, job->data, job->size);
    lay_out(job);
    if (plain(in, &job->entropy)) {
        each_mcu(job, read_codes);
        if (ended(in, &job->entropy))
            return;
        job->used = 0; /* libjpeg shall say what that is */
        memset(job->symbols, 0, sizeof job->symbols);
    }
    job->progress.progress_monitor = core_watch;
    in->progress = &job->progress;
    core_take_over(in, &job->entropy);
    job->blocks = jpeg_read_coefficients(in);
    core_scan_end(in, &job->entropy);
    if (core_unfinished(in))
        job->reason = "progressive and unfinished";
    else
        each_mcu(job, read_blocks);
}

/* Writing -------------------------------------------------------------------------------------- */

/* libjpeg's own, though its header does not tell; since 1991, in every version. Of what it is given
 * first it only needs the way to report errors. */
EXTERN(void) jpeg_gen_optimal_table(j_compress_ptr, JHUFF_TBL *, long freq[]);

static void make_tables(struct rewriting *job)
{
    for (int i = 0; i < 2 * job->classes; i++) {
        struct symbols *counts = job->symbols + i / 2;
        JHUFF_TBL *made = job->tables + i;
        jpeg_gen_optimal_table((j_compress_ptr)&job->in, made, i & 1 ? counts->ac : counts->dc);
        unsigned code = 0, next = 0;
        for (int length = 1; length <= 16; length++, code <<= 1)
            for (int k = 0; k < made->bits[length]; k++, code++) {
                int symbol = made->huffval[next++], size = symbol & 15;
                job->codes[i][symbol] = code << size << 5 | (unsigned)(length + size);
            }
    }
}

static void add(struct rewriting *job, int byte)
{
    *job->at++ = (uint8_t)byte;
}

static void add16(struct rewriting *job, unsigned number)
{
    add(job, (int)(number >> 8)), add(job, (int)number);
}

static void add_marker(struct rewriting *job, int marker, unsigned length)
{
    add(job, 0xFF), add(job, marker);
    add16(job, 2 + length);
}

static void add_bytes(struct rewriting *job, const uint8_t *data, size_t size)
{
    memcpy(job->at, data, size);
    job->at += size;
}

/* Adds a component's table of quantisation, once; whether it is one of 16 bits. */
static bool add_quant(struct rewriting *job, const jpeg_component_info *part, bool *sent)
{
    const UINT16 *values = quant(&job->in, part);
    bool large = false;
    for (int k = 0; k < 64; k++)
        large |= values[k] > 255;
    if (sent[part->quant_tbl_no])
        return large;
    sent[part->quant_tbl_no] = true;
    add_marker(job, 0xDB, large ? 129 : 65);
    add(job, large << 4 | part->quant_tbl_no);
    for (int k = 0; k < 64; k++) {
        unsigned value = values[core_natural[k]];
        large ? add16(job, value) : add(job, (int)value);
    }
    return large;
}

static void add_header(struct rewriting *job)
{
    struct jpeg_decompress_struct *in = &job->in;
    bool fine = false, sent[NUM_QUANT_TBLS] = {false};
    const uint8_t *data = job->data;
    add(job, 0xFF), add(job, 0xD8);
    for (size_t at = 2, length; at + 4 <= job->header; at += length) {
        int marker = data[at + 1];
        length = marker == 0xFF ? 1 : 2 + ((size_t)data[at + 2] << 8 | data[at + 3]);
        if (length > job->header - at)
            break; /* the bytes were changed since they were parsed */
        if (marker == JPEG_COM || marker >> 4 == 0xE) /* APPn: as they were */
            add_bytes(job, data + at, length);
    }
    for (int i = 0; i < in->num_components; i++)
        fine |= add_quant(job, in->comp_info + i, sent);
    add_marker(job, fine ? 0xC1 : 0xC0, 6 + 3 * (unsigned)in->num_components);
    add(job, 8), add16(job, in->image_height), add16(job, in->image_width);
    add(job, in->num_components);
    for (int i = 0; i < in->num_components; i++) {
        const jpeg_component_info *part = in->comp_info + i;
        add(job, part->component_id);
        add(job, part->h_samp_factor << 4 | part->v_samp_factor);
        add(job, part->quant_tbl_no);
    }
    for (int i = 0; i < 2 * job->classes; i++) {
        const JHUFF_TBL *made = job->tables + i;
        unsigned symbols = 0;
        for (int k = 1; k <= 16; k++)
            symbols += made->bits[k];
        add_marker(job, 0xC4, 17 + symbols);
        add(job, (i & 1) << 4 | i >> 1);
        add_bytes(job, made->bits + 1, 16);
        add_bytes(job, made->huffval, symbols);
    }
    if (job->interval)
        add_marker(job, 0xDD, 2), add16(job, job->interval);
    add_marker(job, 0xDA, 4 + 2 * (unsigned)in->num_components);
    add(job, in->num_components);
    for (int i = 0; i < in->num_components; i++)
        add(job, in->comp_info[i].component_id), add(job, 0x11 * class_of(job, i));
    add(job, 0), add(job, 63), add(job, 0);
}

/* 1 to 57 bits. No branch, for the reason of next_symbol. */
ALWAYS_INLINE void put(struct writer *w, uint64_t bits, int count)
{
    w->count += count;
    w->bits |= bits << (64 - w->count);
    uint64_t word = w->bits;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(w->at, &word, 8);
    w->at += w->count >> 3;
    w->bits <<= w->count & ~7;
    w->count &= 7;
}

ALWAYS_INLINE void put_token(struct writer *w, const uint8_t *sizes, const uint32_t *codes, token t)
{
    int value = t >> 4;
    unsigned size = sizes[value];
    uint32_t code = codes[(t & 15) << 4 | (int)size];
    /* Negative values are coded as those before them. */
    put(w, code >> 5 | ((unsigned)(value + (value >> 15)) & ((1u << size) - 1)), code & 31);
}

/* The tokens of an MCU; where those of the next begin. */
static const token *put_mcu(const struct rewriting *job, const token *at, struct writer *writer)
{
    struct writer w = *writer; /* a copy may lie in registers */
    const uint8_t *sizes = job->sizes + 2048;
    for (int i = 0; i < job->mcu.blocks; i++) {
        const uint32_t(*codes)[256] = job->codes + 2 * class_of(job, job->mcu.part[i]);
        put_token(&w, sizes, codes[0], *at++);
        for (int k = 0; k < 63; k += (at[-1] & 15) + 1) {
            put_token(&w, sizes, codes[1], *at++);
            if (at[-1] == END)
                break;
        }
    }
    *writer = w;
    return at;
}

/* Coded data: 0 behind each byte FF. */
static void add_coded(struct rewriting *job, const uint8_t *data, const uint8_t *end)
{
    const uint8_t *found;
    while ((found = memchr(data, 0xFF, (size_t)(end - data)))) {
        add_bytes(job, data, (size_t)(found + 1 - data));
        add(job, 0);
        data = found + 1;
    }
    add_bytes(job, data, (size_t)(end - data));
}

/* The bits that are left, filled up to a byte by ones. */
static void add_rest(struct rewriting *job)
{
    uint8_t byte = (uint8_t)(job->writer.bits >> 56 | 0xFF >> job->writer.count);
    add_coded(job, &byte, &byte + (job->writer.count > 0));
    job->writer = (struct writer){0};
}

static void write_next(struct rewriting *job)
{
    if ((size_t)(job->end - job->at) < 2 * sizeof job->written) {
        size_t used = (size_t)(job->at - job->result);
        size_t room = used + used / 2 + 2 * sizeof job->written;
        job->result = resized(job, job->result, room);
        job->at = job->result + used, job->end = job->result + room;
    }
    if (job->restarted && job->seen) {
        add_rest(job);
        add(job, 0xFF), add(job, JPEG_RST0 | (job->restarts++ & 7));
    }
    job->writer.at = job->written;
    job->seen = (size_t)(put_mcu(job, job->tokens + job->seen, &job->writer) - job->tokens);
    add_coded(job, job->written, job->writer.at);
}

static void write_all(struct rewriting *job)
{
    size_t room = job->header + job->size + job->size / 4 + 8192; /* tables have 1,600 bytes */
    job->result = job->at = resized(job, NULL, room);
    job->end = job->result + room;
    make_tables(job);
    add_header(job);
    each_mcu(job, write_next);
    add_rest(job);
    add(job, 0xFF), add(job, JPEG_EOI);
}

/* The proof ------------------------------------------------------------------------------------ */

static void compare_next(struct rewriting *job)
{
    token found[D_MAX_BLOCKS_IN_MCU * BLOCK_TOKENS];
    size_t count = (size_t)(core_scan_next(&job->again, &job->entropy, &job->mcu, job->real,
                                           job->before, job->counts, found) - found);
    job->differs |= count > job->used - job->seen ||
                    memcmp(found, job->tokens + job->seen, count * sizeof *found);
    job->seen += job->differs ? 0 : count;
}

static bool same_header(struct jpeg_decompress_struct *a, struct jpeg_decompress_struct *b)
{
    if (a->image_width != b->image_width || a->image_height != b->image_height ||
        a->num_components != b->num_components || a->jpeg_color_space != b->jpeg_color_space)
        return false;
    for (int i = 0; i < a->num_components; i++) {
        const jpeg_component_info *p = a->comp_info + i, *q = b->comp_info + i;
        if (p->component_id != q->component_id || p->h_samp_factor != q->h_samp_factor ||
            p->v_samp_factor != q->v_samp_factor ||
            memcmp(quant(a, p), quant(b, q), 64 * sizeof(UINT16)))
            return false;
    }
    return true;
}

static bool proven(struct rewriting *job)
{
    struct jpeg_decompress_struct *again = &job->again;
    open_image(again, job->result, (size_t)(job->at - job->result));
    if (!same_header(&job->in, again) || !plain(again, &job->entropy))
        return false;
    each_mcu(job, compare_next);
    return !job->differs && job->seen == job->used && ended(again, &job->entropy);
}

static void rewrite(void *rewriting)
{
    struct rewriting *job = rewriting;
    read_all(job);
    if (job->reason)
        return;
    write_all(job);
    if (!proven(job))
        job->reason = "its coefficients would not be kept";
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
    if (core_jpeg_lies(&jpeg, size))
        return "damaged: fewer bytes than pixels need";

    struct rewriting *job = calloc(1, sizeof *job);
    if (!job)
        return "no memory";
    job->data = data;
    job->size = size;
    job->header = jpeg.scan;
    job->interval = interval;
    job->in.err = job->again.err = core_handlers(&job->failure);
    const char *reason;
    if (core_guarded(&job->failure, rewrite, job)) {
        reason = job->reason;
    } else if (job->failure.handlers.msg_code == JERR_OUT_OF_MEMORY) {
        reason = "no memory";
    } else {
        snprintf(words, CORE_WORDS, "damaged: %s", job->failure.words);
        reason = words;
    }
    jpeg_destroy((j_common_ptr)&job->in); /* does nothing to what was never made */
    jpeg_destroy((j_common_ptr)&job->again);
    free(job->tokens);
    if (reason) {
        free(job->result);
    } else {
        *result = job->result;
        *result_size = (size_t)(job->at - job->result);
    }
    free(job);
    return reason;
}

/* A part of a JPEG, decoded and resized; and many small JPEGs at once. */
#include "jpeg.h"

/* libjpeg's fast way through Huffman codes needs so many bytes ahead: 512 for each of 10 blocks. */
#define AHEAD 5120

/* Upsampling looks at one sample of chroma more on each side; those are up to 4 pixels wide. */
#define MARGIN 4

/* Whether it is a whole JPEG of a kind that is decoded here. */
static bool known(const uint8_t *data, size_t size, core_jpeg *jpeg)
{
    return core_jpeg_parse(data, size, jpeg) && jpeg->precision == 8 && jpeg->sof <= 0xC2 &&
           (jpeg->components == 1 || jpeg->components == 3) &&
           core_jpeg_end(data, size, jpeg->scan) != SIZE_MAX;
}

struct span {
    unsigned begin, end;
};

/* The rows or columns that a plan needs, with the margin, of a picture of `limit` pixels. */
static struct span needed(const core_filter *plan, int scale, unsigned limit)
{
    unsigned begin = (unsigned)plan->first[0] * (unsigned)scale, margin = MARGIN * (unsigned)scale;
    unsigned end = (unsigned)(plan->first[plan->size - 1] + plan->count[plan->size - 1]);
    end = end * (unsigned)scale + margin;
    return (struct span){begin > margin ? begin - margin : 0, end < limit ? end : limit};
}

/* Where in the data each tile starts, and what follows the last one. NULL when these are not `count`
 * tiles, with the right marker behind each (see shardio/images/jpeg_tiles.py). */
static size_t *tile_starts(const uint8_t *data, size_t size, size_t at, size_t count)
{
    size_t *starts = count < 2 || count > size / 2 /* each has a marker of two bytes */
                         ? NULL : malloc((count + 1) * sizeof *starts);
    size_t found = 0;
    if (starts)
        starts[0] = at;
    while (starts && found < count && at + 2 <= size) {
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
    if (found == count)
        return starts;
    free(starts);
    return NULL;
}

/* A JPEG of the tiles under (x, y): the header with another size, then the tiles with their restart
 * markers numbered anew. x and y become what it shows. NULL when there are no tiles. */
static uint8_t *cut(const uint8_t *data, size_t size, const core_jpeg *jpeg, struct span *x,
                    struct span *y, size_t *cut_size)
{
    unsigned wide = (jpeg->width + jpeg->mcu_width - 1) / jpeg->mcu_width;
    unsigned rows = (jpeg->height + jpeg->mcu_height - 1) / jpeg->mcu_height;
    if (!jpeg->whole || jpeg->interval < 2 || wide % jpeg->interval)
        return NULL;
    size_t columns = wide / jpeg->interval;
    size_t *starts = tile_starts(data, size, jpeg->scan, columns * rows);
    if (!starts)
        return NULL;
    unsigned across = jpeg->interval * jpeg->mcu_width, down = jpeg->mcu_height;
    size_t left = x->begin / across, right = (x->end + across - 1) / across;
    size_t top = y->begin / down, bottom = (y->end + down - 1) / down;
    size_t room = jpeg->scan + AHEAD, at = jpeg->scan, number = 0;
    for (size_t row = top; row < bottom; row++)
        room += starts[row * columns + right] - starts[row * columns + left];
    uint8_t *made = malloc(room);
    if (made) {
        *x = (struct span){(unsigned)left * across, (unsigned)right * across};
        *y = (struct span){(unsigned)top * down, (unsigned)bottom * down};
        x->end = x->end < jpeg->width ? x->end : jpeg->width;
        y->end = y->end < jpeg->height ? y->end : jpeg->height;
        memcpy(made, data, at);
        uint8_t *frame = made + jpeg->sof_at;
        frame[5] = (uint8_t)((y->end - y->begin) >> 8);
        frame[6] = (uint8_t)(y->end - y->begin);
        frame[7] = (uint8_t)((x->end - x->begin) >> 8);
        frame[8] = (uint8_t)(x->end - x->begin);
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
    free(starts);
    return made;
}

struct cropping {
    struct failure failure;
    struct jpeg_decompress_struct in;
    const core_crop_spec *part;
    core_filter across, down;
    struct span x, y; /* what the JPEG shows of the whole */
    struct jpeg_progress_mgr progress;
    struct entropy entropy;
    const uint8_t *data;
    size_t size;
    uint8_t *made;  /* the cut JPEG */
    uint8_t *lines; /* four rows as decoded */
    uint8_t *rows;  /* all rows that are needed, resized along the row */
    size_t stride;
    bool own;   /* whether the JPEG brings all tables that it asks for */
    bool fresh; /* whether `in` is made, and has read nothing but such JPEGs */
};

static void crop(void *cropping)
{
    struct cropping *job = cropping;
    struct jpeg_decompress_struct *in = &job->in;
    const int scale = job->part->scale;
    /* libjpeg keeps tables from image to image; one that lacks some must not find them. */
    if (!job->own || !job->fresh) {
        jpeg_destroy((j_common_ptr)in);
        jpeg_create_decompress(in);
        in->progress = &job->progress;
        core_take_over(in, &job->entropy);
    }
    job->fresh = false;
    jpeg_mem_src(in, job->data, (unsigned long)job->size);
    jpeg_read_header(in, TRUE);
    if (in->image_width != job->x.end - job->x.begin ||
        in->image_height != job->y.end - job->y.begin)
        ERREXIT(in, JERR_IMAGE_TOO_BIG); /* the bytes were changed since they were parsed */
    in->out_color_space = JCS_EXT_RGBX;
    in->scale_num = 1;
    in->scale_denom = (unsigned)scale; /* as PIL's draft() has it */
    jpeg_start_decompress(in);
    if (core_unfinished(in))
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
    const core_crop_spec *part = job->part;
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

static bool crop_one(struct cropping *job, const uint8_t *data, size_t size,
                     const core_crop_spec *part)
{
    core_jpeg jpeg;
    if (!known(data, size, &jpeg) || (uint64_t)jpeg.width * jpeg.height > part->max_pixels ||
        core_jpeg_lies(&jpeg, size))
        return false;
    const float *box = part->box;
    const int scale = part->scale;
    int width = ((int)jpeg.width + scale - 1) / scale;
    int height = ((int)jpeg.height + scale - 1) / scale;
    if (!(0 <= box[0] && box[0] < box[2] && box[2] <= (float)width && 0 <= box[1] &&
          box[1] < box[3] && box[3] <= (float)height))
        return false; /* also when one is not a number */

    bool done = false;
    job->part = part;
    job->own = jpeg.whole && !(jpeg.wanted & ~jpeg.tables);
    if (core_filter_make(&job->across, width, box[0], box[2], part->width, part->filter) &&
        core_filter_make(&job->down, height, box[1], box[3], part->height, part->filter)) {
        job->x = needed(&job->across, scale, jpeg.width);
        job->y = needed(&job->down, scale, jpeg.height);
        job->made = cut(data, size, &jpeg, &job->x, &job->y, &job->size);
        job->data = job->made ? job->made : data;
        if (!job->made) {
            job->size = size;
            job->x = (struct span){0, jpeg.width};
            job->y = (struct span){0, jpeg.height};
        }
        done = core_guarded(&job->failure, crop, job);
        if (done)
            jpeg_abort_decompress(&job->in); /* what is below the crop is not read */
        job->fresh = done && job->own;
    }
    uint8_t *line = done ? malloc(job->stride) : NULL;
    done = line != NULL;
    if (done)
        paint(job, line);
    free(line);
    free(job->rows);
    free(job->lines);
    free(job->made);
    job->rows = job->lines = job->made = NULL;
    core_filter_free(&job->across);
    core_filter_free(&job->down);
    return done;
}

bool core_crop_many(const uint8_t *const *data, const size_t *sizes, size_t count,
                    const core_crop_spec *parts, uint8_t *done)
{
    struct cropping *job = calloc(1, sizeof *job);
    if (!job)
        return false;
    job->in.err = core_handlers(&job->failure);
    job->progress.progress_monitor = core_watch;
    for (size_t i = 0; i < count; i++)
        done[i] = crop_one(job, data[i], sizes[i], parts + i);
    jpeg_destroy((j_common_ptr)&job->in);
    free(job);
    return true;
}

bool core_crop(const uint8_t *data, size_t size, const core_crop_spec *part)
{
    uint8_t done = 0;
    return core_crop_many(&data, &size, 1, part, &done) && done;
}

/* Many small ones ------------------------------------------------------------------------------ */

struct many {
    struct failure failure;
    struct jpeg_decompress_struct in;
    struct jpeg_progress_mgr progress;
    struct entropy entropy;
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
        if (!known(data, size, &jpeg) || jpeg.orientation != 1 || jpeg.width != job->width ||
            jpeg.height != job->height)
            return;
        /* libjpeg keeps tables from image to image; one that lacks some must not find them. */
        bool own = jpeg.whole && !(jpeg.wanted & ~jpeg.tables);
        if (!own || !fresh) {
            jpeg_destroy((j_common_ptr)in);
            jpeg_create_decompress(in);
            in->progress = &job->progress;
            core_take_over(in, &job->entropy);
        }
        fresh = own;
        jpeg_mem_src(in, data, (unsigned long)size);
        jpeg_read_header(in, TRUE);
        in->out_color_space = JCS_RGB;
        jpeg_start_decompress(in);
        if (in->output_width != job->width || in->output_height != job->height)
            return; /* the bytes were changed since they were parsed */
        if (core_unfinished(in))
            return; /* other releases of libjpeg, such as PIL's, smooth in another way */
        uint8_t *out = job->out + (size_t)job->width * 3 * job->height * job->done;
        for (unsigned i = 0; i < job->height; i++)
            job->lines[i] = out + (size_t)job->width * 3 * i;
        while (in->output_scanline < in->output_height)
            jpeg_read_scanlines(in, job->lines + in->output_scanline,
                                in->output_height - in->output_scanline);
        core_scan_end(in, &job->entropy);
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
        job->in.err = core_handlers(&job->failure);
        job->progress.progress_monitor = core_watch;
        core_guarded(&job->failure, decode_many, job);
        done = job->done;
        jpeg_destroy((j_common_ptr)&job->in);
    }
    free(job->lines);
    free(job);
    return done;
}

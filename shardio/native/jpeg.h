/* What the files of the core that call libjpeg know of each other.
 *
 * Every function takes plain bytes and gives a status; none keeps anything. A warning of libjpeg
 * counts as an error here: what is not flawless is left to Python, which says what is wrong.
 * Sources: ITU-T T.81 (JPEG), libjpeg.txt of libjpeg-turbo.
 */
#ifndef SHARDIO_JPEG_H
#define SHARDIO_JPEG_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

#include <jerror.h>
#include <jpeglib.h>

/* The first in which parts of rows are decoded as wholes are, and with RGBX. Tested with 2.1.5. */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed"
#endif

#define ALWAYS_INLINE __attribute__((always_inline)) static inline

/* entropy.c: Huffman codes of a sequential scan of all components. */

extern const uint8_t core_natural[64]; /* where the coefficients lie, in zigzag order */

#define LOOK 9 /* bits of a code that are looked up at once */

/* What begins with these bits. length 0: a longer code. */
struct look {
    uint8_t symbol, length, total, unused; /* total: with the value behind the code */
};

struct codes {
    struct look looks[1 << LOOK];
    uint32_t limits[18]; /* the first 16 bits that are too large for a code of so many */
    int offsets[17];     /* from a code to its symbol */
    JHUFF_TBL table;     /* that they were made of */
};

struct reader {
    uint64_t bits;  /* the next bit is the highest */
    int count, pad; /* how many there are; how many of them lie beyond the data */
    const uint8_t *at, *end;
};

struct entropy {
    struct reader reader;
    unsigned left, number;                /* MCUs until the next restart marker, and its number */
    unsigned previous[MAX_COMPS_IN_SCAN]; /* DC values */
    struct codes dc[2], ac[2];
    const struct codes *dcs[MAX_COMPS_IN_SCAN], *acs[MAX_COMPS_IN_SCAN];
    void (*start_input_pass)(j_decompress_ptr), (*start_pass)(j_decompress_ptr); /* libjpeg's */
};

/* False when it is not such a scan. libjpeg has just read its header. *e was zeros before the first
 * one; tables that do not change are not made anew. */
bool core_scan_begin(struct jpeg_decompress_struct *in, struct entropy *e);

/* After the last MCU: bytes too many before the end are damage. */
void core_scan_end(struct jpeg_decompress_struct *in, const struct entropy *e);

/* libjpeg shall decode such scans by this. In time before it reads coefficients or lines. */
void core_take_over(struct jpeg_decompress_struct *in, struct entropy *e);

/* The coefficients of a block as tokens, nearly as they are coded: the DC value less the one before
 * it, times 16; then each other that is not 0, in zigzag order, times 16, plus the zeros before it,
 * where ZEROS are 16 of them; then END, if zeros follow. */
typedef int16_t token;
enum { END = 0, ZEROS = 15, BLOCK_TOKENS = 66 /* at most, also while it is read */ };

/* The blocks of an MCU: the component of each. */
struct mcu {
    int blocks;
    int part[D_MAX_BLOCKS_IN_MCU];
};

/* How often each symbol comes in tokens. The last number is libjpeg's own. */
struct symbols {
    long dc[257], ac[257];
};

/* Bits of a number's magnitude. */
static inline int core_magnitude(int value)
{
    return value ? 32 - __builtin_clz((unsigned)abs(value)) : 0;
}

/* The next MCU to `to`; the end of its tokens. Bit i of `real`: block i is of the picture; those
 * beyond its rim, which are coded but not shown, become empty ones.
 * before: the DC value before, of each component; symbols: where to count them. */
token *core_scan_next(struct jpeg_decompress_struct *in, struct entropy *e, const struct mcu *mcu,
                      unsigned real, int *before, struct symbols *const *symbols, token *to);

/* guard.c: libjpeg's errors, and limits. */

struct failure {
    struct jpeg_error_mgr handlers; /* first: libjpeg knows this address alone */
    jmp_buf back;
    char words[JMSG_LENGTH_MAX];
};

struct jpeg_error_mgr *core_handlers(struct failure *failure);

/* Runs `work(job)`; false when libjpeg failed in it. All that work changes lies in *job, nothing in
 * locals of the function that set the jump, so nothing is lost or stale after it. */
bool core_guarded(struct failure *failure, void (*work)(void *), void *job);

/* A progress monitor: too many scans are an error. */
void core_watch(j_common_ptr common);

/* Whether a progressive file has not sent each coefficient to its last bit: decoders smooth these,
 * by what lies around, so a part of it would not look as in the whole. */
bool core_unfinished(const struct jpeg_decompress_struct *in);

#endif

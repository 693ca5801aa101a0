/* Huffman codes of sequential scans, read: for libjpeg, or as tokens.
 *
 * libjpeg-turbo takes its fast way through them only where there are no restart markers, so not in
 * tiles. All else (headers, tables, the inverse DCT, colours) stays with libjpeg.
 */
#include "jpeg.h"

const uint8_t core_natural[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

/* False when it is no table for 8 bits: codes that their bits do not hold, or values too large. */
static bool make_codes(struct codes *codes, const JHUFF_TBL *table, bool is_dc)
{
    if (!memcmp(codes->table.bits, table->bits, sizeof table->bits) &&
        !memcmp(codes->table.huffval, table->huffval, sizeof table->huffval))
        return true;
    memset(codes->looks, 0, sizeof codes->looks);
    codes->table = *table;
    unsigned code = 0, next = 0;
    for (unsigned length = 1; length <= 16; length++, code <<= 1) {
        codes->offsets[length] = (int)next - (int)code;
        for (int i = 0; i < table->bits[length]; i++, code++) {
            uint8_t symbol = table->huffval[next++ & 255];
            unsigned rest = LOOK - length;
            if (is_dc ? symbol > 11 : (symbol & 15) > 10)
                goto none; /* libjpeg takes some more, so these are left to it */
            for (unsigned k = 0; length <= LOOK && k < 1u << rest; k++)
                codes->looks[((code << rest) + k) & ((1 << LOOK) - 1)] =
                    (struct look){symbol, (uint8_t)length, (uint8_t)(length + (symbol & 15)), 0};
        }
        if (code >= 1u << length) /* none is all ones */
            goto none;
        codes->limits[length] = code << (16 - length);
    }
    return true;
none:
    memset(codes, 0, sizeof *codes);
    return false;
}

/* One byte after the other; beyond the data they are 0. */
static struct reader refilled(struct reader r)
{
    while (r.count < 56) {
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

/* Enough for two symbols and their values, of 26 bits each at most, or a DC value, of 27. */
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
    if (r->count < 52)
        *r = refilled(*r);
}

/* Of a code of more than LOOK bits; all 0 when there is no such code. */
static struct look look_further(const struct codes *codes, unsigned bits)
{
    unsigned length = LOOK + 1;
    while (length <= 16 && bits >= codes->limits[length])
        length++;
    if (length > 16)
        return (struct look){0};
    uint8_t symbol =
        codes->table.huffval[((int)(bits >> (16 - length)) + codes->offsets[length]) & 255];
    return (struct look){symbol, (uint8_t)length, (uint8_t)(length + (symbol & 15)), 0};
}

/* The next symbol, and its value or 0. -1: no such code. Hardly a branch depends on the bits: one
 * that the processor guesses wrongly takes as long as two symbols. */
ALWAYS_INLINE int next_symbol(struct reader *r, const struct codes *codes, int *value)
{
    struct look look = codes->looks[r->bits >> (64 - LOOK)];
    if (__builtin_expect(!look.length, 0)) {
        look = look_further(codes, (unsigned)(r->bits >> 48));
        if (!look.length)
            return -1;
    }
    /* A value of so many bits: those that begin with 0 are negative. */
    unsigned size = look.symbol & 15;
    uint64_t rest = r->bits << look.length;
    int lowest = (int)((1u << size) - 1);
    *value = (int)((rest >> 1) >> (63 - size)) - (lowest & ~(int)((int64_t)rest >> 63));
    r->bits <<= look.total;
    r->count -= look.total;
    return look.symbol;
}

static bool restart(struct entropy *e)
{
    struct reader *r = &e->reader;
    while (r->end - r->at > 2 && r->at[0] == 0xFF && r->at[1] == 0xFF)
        r->at++; /* fill bytes, as before any marker */
    if (r->count - r->pad >= 8 || r->end - r->at < 2 || r->at[0] != 0xFF ||
        r->at[1] != (0xD0 | e->number))
        return false;
    e->number = (e->number + 1) & 7;
    *r = (struct reader){.at = r->at + 2, .end = r->end};
    memset(e->previous, 0, sizeof e->previous);
    return true;
}

/* All of a block behind its DC value: to `block`, which is zeros, or as tokens, whose symbols are
 * counted. What is not wanted is NULL. */
ALWAYS_INLINE bool next_block(struct reader *r, const struct codes *codes, JCOEF *block,
                              token **tokens, long *counts)
{
    token *to = tokens ? *tokens : NULL;
    int value, symbol = 0, k = 0;
    while (k < 63) {
        refill(r);
        for (int i = 0; i < 2 && k < 63; i++) {
            symbol = next_symbol(r, codes, &value);
            k += (symbol >> 4) + 1;
            if (symbol & 15) {
                if (symbol < 0 || k > 63)
                    return false;
                if (tokens)
                    *to++ = (token)(value * 16 | symbol >> 4);
                else
                    block[core_natural[k]] = (JCOEF)value;
            } else if (symbol != 0xF0) {
                k = 64; /* end of block */
                symbol = END;
            } else if (tokens)
                *to++ = ZEROS;
            if (tokens)
                counts[symbol]++;
        }
    }
    if (tokens && !(symbol & 15)) {
        for (; to[-1] == ZEROS; to--) /* some write them before the end */
            counts[0xF0]--;
        counts[END] += symbol != END;
        *to++ = END;
    }
    if (tokens)
        *tokens = to;
    return true;
}

bool core_scan_begin(struct jpeg_decompress_struct *in, struct entropy *e)
{
    if (in->progressive_mode || in->arith_code || in->comps_in_scan != in->num_components ||
        in->Ss || in->Se != 63 || in->Ah || in->Al)
        return false;
    for (int i = 0; i < in->comps_in_scan; i++) {
        jpeg_component_info *part = in->cur_comp_info[i];
        int dc = part->dc_tbl_no, ac = part->ac_tbl_no;
        if (dc < 0 || dc > 1 || ac < 0 || ac > 1 || !in->dc_huff_tbl_ptrs[dc] ||
            !in->ac_huff_tbl_ptrs[ac] || !make_codes(e->dc + dc, in->dc_huff_tbl_ptrs[dc], true) ||
            !make_codes(e->ac + ac, in->ac_huff_tbl_ptrs[ac], false))
            return false;
        e->dcs[i] = e->dc + dc;
        e->acs[i] = e->ac + ac;
    }
    memset(e->previous, 0, sizeof e->previous);
    e->reader = (struct reader){.at = in->src->next_input_byte};
    e->reader.end = e->reader.at + in->src->bytes_in_buffer;
    e->left = in->restart_interval;
    e->number = 0;
    return true;
}

/* The blocks of an MCU, each of a component: to `blocks`, or, if `tokens`, as core_scan_next. */
ALWAYS_INLINE token *next_mcu(struct jpeg_decompress_struct *in, struct entropy *e, bool tokens,
                              int count, const int *parts, JBLOCKROW *blocks, unsigned real,
                              int *before, struct symbols *const *symbols, token *to)
{
    if (in->restart_interval && !e->left--) {
        if (!restart(e))
            WARNMS(in, JWRN_HIT_MARKER);
        e->left = in->restart_interval - 1;
    }
    struct reader r = e->reader; /* a copy may lie in registers */
    JBLOCK skipped;
    bool whole = true;
    for (int i = 0; i < count; i++) {
        int part = parts[i], value = 0;
        refill(&r);
        whole &= next_symbol(&r, e->dcs[part], &value) >= 0;
        e->previous[part] += (unsigned)value;
        value = (JCOEF)e->previous[part];
        if (tokens && real >> i & 1) {
            int difference = value - before[part];
            before[part] = value;
            if (abs(difference) > 2047)
                ERREXIT(in, JERR_BAD_DCT_COEF);
            symbols[part]->dc[core_magnitude(difference)]++;
            *to++ = (token)(difference * 16);
            whole &= next_block(&r, e->acs[part], NULL, &to, symbols[part]->ac);
            continue;
        }
        JCOEF *block = blocks ? blocks[i][0] : skipped;
        block[0] = (JCOEF)value;
        whole &= next_block(&r, e->acs[part], block, NULL, NULL);
        if (tokens) {
            symbols[part]->dc[0]++, symbols[part]->ac[END]++;
            *to++ = 0, *to++ = END;
        }
    }
    if (!whole)
        WARNMS(in, JWRN_HUFF_BAD_CODE);
    if (r.count < r.pad) /* bits that are not there were taken */
        WARNMS(in, JWRN_HIT_MARKER);
    e->reader = r;
    return to;
}

token *core_scan_next(struct jpeg_decompress_struct *in, struct entropy *e, const struct mcu *mcu,
                      unsigned real, int *before, struct symbols *const *symbols, token *to)
{
    return next_mcu(in, e, true, mcu->blocks, mcu->part, NULL, real, before, symbols, to);
}

void core_scan_end(struct jpeg_decompress_struct *in, const struct entropy *e)
{
    int bytes = (e->reader.count - e->reader.pad) / 8;
    if (bytes > 0) /* libjpeg warns where it did not happen to read them ahead */
        WARNMS2(in, JWRN_EXTRANEOUS_DATA, bytes, JPEG_EOI);
}

/* This reaches for libjpeg's inside: where jpegint.h is not installed, libjpeg decodes as ever. */
#if __has_include(<jpegint.h>)
#include <jpegint.h>

static boolean decode_mcu(j_decompress_ptr in, JBLOCKROW *blocks)
{
    struct entropy *e = in->client_data;
    next_mcu(in, e, false, in->blocks_in_MCU, in->MCU_membership, blocks, 0, NULL, NULL, NULL);
    in->src->next_input_byte = e->reader.at;
    in->src->bytes_in_buffer = (size_t)(e->reader.end - e->reader.at);
    return TRUE;
}

static void start_pass(j_decompress_ptr in)
{
    struct entropy *e = in->client_data;
    in->entropy->insufficient_data = FALSE;
    /* Not of several scans: libjpeg would not take the next one, of other components, back. */
    if (!in->inputctl->has_multiple_scans && core_scan_begin(in, e)) {
        in->entropy->decode_mcu = decode_mcu;
        return;
    }
    e->reader = (struct reader){0};
    e->start_pass(in); /* or it says what is wrong */
}

static void start_input_pass(j_decompress_ptr in)
{
    struct entropy *e = in->client_data;
    if (in->entropy->start_pass != start_pass) {
        e->start_pass = in->entropy->start_pass;
        in->entropy->start_pass = start_pass;
    }
    e->start_input_pass(in);
}

void core_take_over(struct jpeg_decompress_struct *in, struct entropy *e)
{
    in->client_data = e;
    e->start_input_pass = in->inputctl->start_input_pass;
    in->inputctl->start_input_pass = start_input_pass;
}

#else

void core_take_over(struct jpeg_decompress_struct *in, struct entropy *e)
{
    (void)in, (void)e;
}

#endif

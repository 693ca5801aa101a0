/* Antialiased resize of RGB pixels, as Pillow does it: each axis by itself, first along the rows;
 * each pixel the weighted mean of those that the filter, widened by the scale, covers; 8 bits
 * between the two, fixed-point weights. Along the rows these are Pillow's, of 22 bits, and down the
 * columns those of pillow-simd, of 16: so Pillow is at most one level away, where with 16 bits for
 * both, as in pillow-simd, it was up to two. Source: Pillow, src/libImaging/Resample.c.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define WITH_AVX2 1
#include <immintrin.h>
#endif

/* Filters: weight at distance x from the centre, in pixels of the smaller image. --------------- */

#define PI 3.14159265358979323846

static double sinc(double x)
{
    return x == 0.0 ? 1.0 : sin(x * PI) / (x * PI);
}

static double weight(char filter, double x)
{
    double far = fabs(x);
    switch (filter) {
    case CORE_BOX:
        return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case CORE_BILINEAR:
        return far < 1.0 ? 1.0 - far : 0.0;
    case CORE_HAMMING:
        return far < 1.0 ? sinc(far) * (0.54 + 0.46 * cos(far * PI)) : 0.0;
    case CORE_BICUBIC:
        if (far < 1.0)
            return (1.5 * far - 2.5) * far * far + 1.0;
        return far < 2.0 ? (((far - 5.0) * far + 8.0) * far - 4.0) * -0.5 : 0.0;
    default: /* lanczos */
        return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3.0) : 0.0;
    }
}

static double reach(char filter)
{
    switch (filter) {
    case CORE_BOX:
        return 0.5;
    case CORE_BILINEAR:
    case CORE_HAMMING:
        return 1.0;
    case CORE_BICUBIC:
        return 2.0;
    default:
        return 3.0;
    }
}

/* Fine weights have 22 bits, and are the sum of two that fit into 16: high << 12, and low. */
enum { FINE = 22, SPLIT = 12 };

/* Plans: which pixels of one axis make each new one, and how much each counts. ----------------- */

bool core_filter_make(core_filter *plan, int size, float begin, float end, int result, char filter)
{
    *plan = (core_filter){.size = result};
    double scale = (double)(end - begin) / result, wide = scale < 1.0 ? 1.0 : scale;
    double support = reach(filter) * wide;
    plan->first = malloc((size_t)result * 2 * sizeof *plan->first);
    if (!plan->first)
        return false;
    plan->count = plan->first + result;
    for (int i = 0; i < result; i++) {
        double centre = begin + (i + 0.5) * scale;
        int low = (int)(centre - support + 0.5), high = (int)(centre + support + 0.5);
        plan->first[i] = low < 0 ? 0 : low;
        plan->count[i] = (high < size ? high : size) - plan->first[i];
        plan->taps = plan->count[i] > plan->taps ? plan->count[i] : plan->taps;
    }
    plan->taps = (plan->taps + 3) / 4 * 4; /* four are taken at a time */
    size_t taps = (size_t)plan->taps;
    double *weights = malloc(taps * sizeof *weights * (size_t)result);
    double narrow = 1.0 / wide; /* as Pillow: at a box's very edge a division rounds otherwise */
    plan->weights = calloc((size_t)result * taps, sizeof *plan->weights);
    plan->fine = calloc((size_t)result * taps * 2, sizeof *plan->fine);
    double most = 0.0;
    for (int i = 0; weights && i < result; i++) {
        double centre = begin + (i + 0.5) * scale, sum = 0.0;
        double *row = weights + (size_t)i * taps;
        for (int k = 0; k < plan->count[i]; k++)
            sum += row[k] = weight(filter, (k + plan->first[i] - centre + 0.5) * narrow);
        for (int k = 0; k < plan->count[i]; k++) {
            row[k] = sum != 0.0 ? row[k] / sum : row[k];
            most = row[k] > most ? row[k] : most;
        }
    }
    /* Of a box that lies inside, the weights are below 2. */
    if (!weights || !plan->weights || !plan->fine || !(most > 0.0 && most < 2.0)) {
        free(weights);
        core_filter_free(plan);
        return false;
    }
    /* As many bits as let the largest weight fit into 16; 22, so that sums fit into 32. */
    while (plan->bits < 22 && (int)(0.5 + most * (1 << (plan->bits + 1))) < 1 << 15)
        plan->bits++;
    for (int i = 0; i < result; i++)
        for (int k = 0; k < plan->count[i]; k++) {
            size_t at = (size_t)i * taps + (size_t)k;
            double half = weights[at] < 0 ? -0.5 : 0.5;
            plan->weights[at] = (int16_t)(weights[at] * (1 << plan->bits) + half);
            int fine = (int)(weights[at] * (1 << FINE) + half);
            int low = ((fine + (1 << (SPLIT - 1))) & ((1 << SPLIT) - 1)) - (1 << (SPLIT - 1));
            at = (at / 4 * 8) + (size_t)k % 4;
            plan->fine[at] = (int16_t)((fine - low) / (1 << SPLIT));
            plan->fine[at + 4] = (int16_t)low;
        }
    free(weights);
    return true;
}

void core_filter_free(core_filter *plan)
{
    free(plan->first);
    free(plan->weights);
    free(plan->fine);
    *plan = (core_filter){0};
}

/* Rows: four of RGBX at a time -> four of RGB. ------------------------------------------------- */

static uint8_t clip(int value)
{
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void across_plain(const core_filter *plan, int shift, const uint8_t *row, uint8_t *out)
{
    for (int i = 0; i < plan->size; i++, out += 3) {
        const uint8_t *in = row + 4 * (plan->first[i] - shift);
        const int16_t *fine = plan->fine + (size_t)i * (size_t)plan->taps * 2;
        int red = 1 << (FINE - 1), green = red, blue = red;
        for (int k = 0; k < plan->count[i]; k++) {
            int at = k / 4 * 8 + k % 4, weight = fine[at] * (1 << SPLIT) + fine[at + 4];
            red += in[4 * k] * weight;
            green += in[4 * k + 1] * weight;
            blue += in[4 * k + 2] * weight;
        }
        out[0] = clip(red >> FINE);
        out[1] = clip(green >> FINE);
        out[2] = clip(blue >> FINE);
    }
}

static void down_plain(const core_filter *plan, int i, const uint8_t *rows, size_t stride,
                       uint8_t *out, size_t bytes)
{
    const int16_t *weights = plan->weights + (size_t)i * (size_t)plan->taps;
    for (size_t x = 0; x < bytes; x++) {
        int sum = 1 << (plan->bits - 1);
        for (int k = 0; k < plan->count[i]; k++)
            sum += rows[(size_t)k * stride + x] * weights[k];
        out[x] = clip(sum >> plan->bits);
    }
}

#ifdef WITH_AVX2

/* One row in each half of a register; two pixels with two weights by each multiplication. `fours`
 * is a constant where it is called: an end of the loop that cannot be foretold costs more than
 * weights of 0. */
__attribute__((target("avx2"), always_inline)) static inline void
across_avx2(const core_filter *plan, int fours, int shift, const uint8_t *const row[4],
            uint8_t *const out[4])
{
    const __m256i first = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const __m256i second = _mm256_add_epi8(first, _mm256_set1_epi16(8));
    const __m256i half = _mm256_set1_epi32(1 << (FINE - 1)), zero = _mm256_setzero_si256();
    const int16_t *weights = plan->fine;
    /* Copies, since what is written might else be a pointer. */
    const uint8_t *const in[4] = {row[0], row[1], row[2], row[3]};
    uint8_t *to[4] = {out[0], out[1], out[2], out[3]};
    const int *starts = plan->first;
    for (int i = 0, size = plan->size; i < size; i++) {
        ptrdiff_t at = 4 * (ptrdiff_t)(starts[i] - shift);
        __m256i sum[2] = {half, half}, high[2] = {zero, zero};
        for (int k = 0; k < fours; k++, at += 16, weights += 8) {
            int pair[4];
            memcpy(pair, weights, sizeof pair);
            __m256i one = _mm256_set1_epi32(pair[0]), two = _mm256_set1_epi32(pair[1]);
            __m256i low_one = _mm256_set1_epi32(pair[2]), low_two = _mm256_set1_epi32(pair[3]);
            for (int j = 0; j < 2; j++) { /* rows 0 and 1, then rows 2 and 3 */
                __m256i pixels = _mm256_inserti128_si256(
                    _mm256_castsi128_si256(_mm_loadu_si128((const void *)(in[2 * j] + at))),
                    _mm_loadu_si128((const void *)(in[2 * j + 1] + at)), 1);
                __m256i left = _mm256_shuffle_epi8(pixels, first);
                __m256i right = _mm256_shuffle_epi8(pixels, second);
                high[j] = _mm256_add_epi32(high[j], _mm256_madd_epi16(left, one));
                high[j] = _mm256_add_epi32(high[j], _mm256_madd_epi16(right, two));
                sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(left, low_one));
                sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(right, low_two));
            }
        }
        for (int j = 0; j < 2; j++)
            sum[j] = _mm256_srai_epi32(
                _mm256_add_epi32(sum[j], _mm256_slli_epi32(high[j], SPLIT)), FINE);
        __m256i both = _mm256_packs_epi32(sum[0], sum[1]);
        both = _mm256_packus_epi16(both, both); /* rows 0 and 2, rows 1 and 3 */
        long long even = _mm_cvtsi128_si64(_mm256_castsi256_si128(both));
        long long odd = _mm_cvtsi128_si64(_mm256_extracti128_si256(both, 1));
        /* Four bytes for three: the next pixel overwrites the fourth. */
        memcpy(to[0] + 3 * i, &even, 4);
        memcpy(to[1] + 3 * i, &odd, 4);
        even >>= 32;
        odd >>= 32;
        memcpy(to[2] + 3 * i, &even, 4);
        memcpy(to[3] + 3 * i, &odd, 4);
    }
}

__attribute__((target("avx2"))) static void
across_fast(const core_filter *plan, int shift, const uint8_t *const row[4], uint8_t *const out[4])
{
    if (plan->taps == 4)
        across_avx2(plan, 1, shift, row, out);
    else if (plan->taps == 8)
        across_avx2(plan, 2, shift, row, out);
    else
        across_avx2(plan, plan->taps / 4, shift, row, out);
}

__attribute__((target("avx2"))) static void down_avx2(const core_filter *plan, int i,
                                                      const uint8_t *rows, size_t stride,
                                                      uint8_t *out, size_t bytes)
{
    const int16_t *weights = plan->weights + (size_t)i * (size_t)plan->taps;
    const __m256i half = _mm256_set1_epi32(1 << (plan->bits - 1)), zero = _mm256_setzero_si256();
    const __m128i bits = _mm_cvtsi32_si128(plan->bits);
    for (size_t x = 0; x < bytes; x += 32) {
        __m256i sum[4] = {half, half, half, half};
        for (int k = 0; k < plan->count[i]; k += 2) {
            const uint8_t *at = rows + (size_t)k * stride + x;
            int pair; /* the weight of a row beyond the last is 0 */
            memcpy(&pair, weights + k, sizeof pair);
            __m256i two = _mm256_set1_epi32(pair);
            __m256i a = _mm256_loadu_si256((const void *)at), b = a;
            if (k + 1 < plan->count[i])
                b = _mm256_loadu_si256((const void *)(at + stride));
            __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
            __m256i part[4] = {
                _mm256_unpacklo_epi8(low, zero), _mm256_unpackhi_epi8(low, zero),
                _mm256_unpacklo_epi8(high, zero), _mm256_unpackhi_epi8(high, zero)};
            for (int j = 0; j < 4; j++)
                sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(part[j], two));
        }
        for (int j = 0; j < 4; j++)
            sum[j] = _mm256_sra_epi32(sum[j], bits);
        _mm256_storeu_si256((void *)(out + x),
                            _mm256_packus_epi16(_mm256_packs_epi32(sum[0], sum[1]),
                                                _mm256_packs_epi32(sum[2], sum[3])));
    }
}

#endif

void core_across(const core_filter *plan, int shift, const uint8_t *const row[4],
                 uint8_t *const out[4])
{
#ifdef WITH_AVX2
    if (__builtin_cpu_supports("avx2")) {
        across_fast(plan, shift, row, out);
        return;
    }
#endif
    for (int j = 0; j < 4; j++)
        across_plain(plan, shift, row[j], out[j]);
}

void core_down(const core_filter *plan, int i, const uint8_t *rows, size_t stride, uint8_t *out,
               size_t bytes)
{
#ifdef WITH_AVX2
    if (__builtin_cpu_supports("avx2")) {
        down_avx2(plan, i, rows, stride, out, bytes);
        return;
    }
#endif
    down_plain(plan, i, rows, stride, out, bytes);
}

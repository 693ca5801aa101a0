/* The header of a JPEG, and where its data end: by which it is decided whether libjpeg is asked.
 *
 * Another thread may write to the bytes meanwhile. So a count or a length is read once, and what was
 * checked is what is used. Sources: ITU-T T.81 (JPEG), JFIF 1.02, EXIF 2.3.
 */
#include <string.h>

#include "core.h"

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
#define GET32(at) ((uint64_t)GET16((at) + 2 * little) << 16 | GET16((at) + 2 * !little))
    uint64_t at = GET32(4);
    if (at < 8 || at > size - 2)
        return 0;
    unsigned entries = GET16(at), found = ABSENT;
    at += 2;
    static const uint8_t units[17] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};
    if (entries > (size - at) / 12)
        return 0;
    for (; entries--; at += 12) {
        unsigned kind = GET16(at + 2);
        if (GET16(at) != 0x0112) {
            /* PIL reads no further than a value that lies outside. */
            uint64_t count = GET32(at + 4), lies = GET32(at + 8);
            unsigned unit = kind < sizeof units ? units[kind] : 0;
            if (found == ABSENT && count * unit > 4 && lies + count * unit > size)
                return 0;
            continue;
        }
        /* One SHORT, from 1 to 8, and just once. */
        bool plain = found == ABSENT && kind == 3 && GET32(at + 4) == 1;
        found = plain ? GET16(at + 8) : 0;
        if (found < 1 || found > 8)
            return 0;
    }
#undef GET16
#undef GET32
    return found;
}

/* SOF: FFC0 to FFCF without DHT, JPG and DAC. */
static bool frame(core_jpeg *jpeg, int marker, const uint8_t *body, size_t size)
{
    unsigned count = size < 6 ? 0 : body[5];
    if (jpeg->sof || size != 6 + 3 * (size_t)count)
        return false;
    *jpeg = (core_jpeg){
        .sof = marker,
        .precision = body[0],
        .height = get16(body + 1),
        .width = get16(body + 3),
        .components = count,
        .interval = jpeg->interval,
        .tables = jpeg->tables,
        .several = jpeg->several,
        .app1 = jpeg->app1,
        .orientation = jpeg->orientation,
    };
    unsigned across = 1, down = 1;
    for (unsigned i = 0; i < count; i++) {
        unsigned sampling = body[7 + 3 * i], table = body[8 + 3 * i];
        if (sampling >> 4 < 1 || sampling >> 4 > 4 || (sampling & 15) < 1 || (sampling & 15) > 4)
            return false;
        if (sampling >> 4 > across)
            across = sampling >> 4;
        if ((sampling & 15) > down)
            down = sampling & 15;
        if (table > 3)
            return false;
        jpeg->wanted |= 1u << table;
    }
    if (count == 1)
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
            unsigned count = rest ? body[0] : 0;
            if (!jpeg->sof || rest != 4 + 2 * (size_t)count)
                return false;
            jpeg->whole = count == jpeg->components && (jpeg->sof == 0xC0 || jpeg->sof == 0xC1);
            for (unsigned i = 0; i < count; i++)
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

bool core_jpeg_lies(const core_jpeg *jpeg, size_t size)
{
    return (uint64_t)jpeg->width * jpeg->height / 512 > size;
}

size_t core_jpeg_end(const uint8_t *data, size_t size, size_t at)
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


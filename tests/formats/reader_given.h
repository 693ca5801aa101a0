/* What docs/format.md takes for granted, for reader.c: SHA-256, XXH3, msgpack and JSON, each by its
 * public specification. A reader in another language has libraries for them. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef unsigned long long u64;
enum { DAMAGED = 1, USAGE = 2, UNKNOWN = 3, HEAD = 1 << 20, DEPTH = 32 };
static const char *reading = "reader"; /* the file that messages name */

static void fail(int status, const char *what, ...) {
    va_list rest;
    va_start(rest, what);
    fflush(stdout);
    fprintf(stderr, "%s: ", reading);
    vfprintf(stderr, what, rest);
    fputc('\n', stderr);
    exit(status);
}
static void check(int holds, const char *what) {
    if (!holds) fail(DAMAGED, "damaged: %s", what);
}

/* Memory: blocks in a list, given back down to a mark. */
typedef struct Block { struct Block *next; u64 pad; } Block;
static Block *blocks;
static void *mem(u64 size) {
    Block *block = size < SIZE_MAX - sizeof *block ? calloc(1, sizeof *block + size) : NULL;
    if (!block) fail(UNKNOWN, "no memory for %llu bytes", (unsigned long long)size);
    block->next = blocks;
    return (blocks = block) + 1;
}
static void release(Block *mark) {
    for (Block *block; (block = blocks) != mark; free(block)) blocks = block->next;
}

static u64 le(const u8 *at, int width) {
    u64 value = 0;
    while (width--) value = value << 8 | at[width];
    return value;
}
static u32 r32(const u8 *at) { return (u32)le(at, 4); }
static u64 r64(const u8 *at) { return le(at, 8); }

/* SHA-256 (FIPS 180-4). */
static void sha_block(u32 *h, const u8 *at) {
    static const u32 K[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
#define ROR(x, n) ((x) >> (n) | (x) << (32 - (n)))
    u32 w[64], v[8];
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) {
        if (i < 16)
            w[i] = (u32)at[4 * i] << 24 | at[4 * i + 1] << 16 | at[4 * i + 2] << 8 | at[4 * i + 3];
        else
            w[i] = w[i - 16] + (ROR(w[i - 15], 7) ^ ROR(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
                   (ROR(w[i - 2], 17) ^ ROR(w[i - 2], 19) ^ w[i - 2] >> 10);
        u32 a = v[0], e = v[4];
        u32 t1 = v[7] + (ROR(e, 6) ^ ROR(e, 11) ^ ROR(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
        u32 t2 = (ROR(a, 2) ^ ROR(a, 13) ^ ROR(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1, v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}
static const char *sha256(const u8 *data, u64 size) { /* as 64 hex digits, until the next call */
    static char text[65];
    u32 h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    u8 last[128] = {0};
    u64 rest = size % 64, end = rest < 56 ? 64 : 128;
    for (u64 i = 0; i + 64 <= size; i += 64) sha_block(h, data + i);
    if (rest) memcpy(last, data + size - rest, rest);
    last[rest] = 0x80;
    for (u64 i = 0; i < 8; i++) last[end - 1 - i] = (u8)(size * 8 >> 8 * i);
    for (u64 i = 0; i < end; i += 64) sha_block(h, last + i);
    for (int i = 0; i < 8; i++) sprintf(text + 8 * i, "%08x", (unsigned)h[i]);
    return text;
}

/* XXH3, 64 bits, the default secret. */
#define P1 0x9E3779B185EBCA87u
#define P2 0xC2B2AE3D27D4EB4Fu
#define P3 0x165667B19E3779F9u
#define P4 0x85EBCA77C2B2AE63u
#define P5 0x27D4EB2F165667C5u
static const u8 SECRET[] =
    "\xb8\xfe\x6c\x39\x23\xa4\x4b\xbe\x7c\x01\x81\x2c\xf7\x21\xad\x1c\xde\xd4\x6d\xe9\x83\x90\x97\xdb"
    "\x72\x40\xa4\xa4\xb7\xb3\x67\x1f\xcb\x79\xe6\x4e\xcc\xc0\xe5\x78\x82\x5a\xd0\x7d\xcc\xff\x72\x21"
    "\xb8\x08\x46\x74\xf7\x43\x24\x8e\xe0\x35\x90\xe6\x81\x3a\x26\x4c\x3c\x28\x52\xbb\x91\xc3\x00\xcb"
    "\x88\xd0\x65\x8b\x1b\x53\x2e\xa3\x71\x64\x48\x97\xa2\x0d\xf9\x4e\x38\x19\xef\x46\xa9\xde\xac\xd8"
    "\xa8\xfa\x76\x3f\xe3\x9c\x34\x3f\xf9\xdc\xbb\xc7\xc7\x0b\x4f\x1d\x8a\x51\xe0\x4b\xcd\xb4\x59\x31"
    "\xc8\x9f\x7e\xc9\xd9\x78\x73\x64\xea\xc5\xac\x83\x34\xd3\xeb\xc3\xc5\x81\xa0\xff\xfa\x13\x63\xeb"
    "\x17\x0d\xdd\x51\xb7\xf0\xda\x49\xd3\x16\x55\x26\x29\xd4\x68\x9e\x2b\x16\xbe\x58\x7d\x47\xa1\xfc"
    "\x8f\xf8\xb8\xd1\x7a\xd0\x31\xce\x45\xcb\x3a\x8f\x95\x16\x04\x28\xaf\xd7\xfb\xca\xbb\x4b\x40\x7e";
static u64 fold(u64 a, u64 b) { /* the product of 128 bits: its two halves, xored */
    u64 al = a & 0xffffffff, ah = a >> 32, bl = b & 0xffffffff, bh = b >> 32;
    u64 low = al * bl, mid = ah * bl + (low >> 32), cross = al * bh + (mid & 0xffffffff);
    return (ah * bh + (mid >> 32) + (cross >> 32)) ^ (cross << 32 | (low & 0xffffffff));
}
static u64 shake(u64 h, int a, u64 by, int b) { return h ^= h >> a, h *= by, h ^ h >> b; }
static u64 avalanche(u64 h) { return shake(h, 37, 0x165667919E3779F9u, 32); }
static u64 avalanche64(u64 h) { return h ^= h >> 33, h *= P2, shake(h, 29, P3, 32); }
static u64 swap64(u64 v) {
    u64 swapped = 0;
    for (int i = 0; i < 8; i++) swapped = swapped << 8 | (v >> 8 * i & 255);
    return swapped;
}
static u64 mix(const u8 *at, const u8 *s, u64 seed) {
    return fold(r64(at) ^ (r64(s) + seed), r64(at + 8) ^ (r64(s + 8) - seed));
}
static void stripe(u64 *acc, const u8 *at, const u8 *s) {
    for (int i = 0; i < 8; i++) {
        u64 v = r64(at + 8 * i), k = v ^ r64(s + 8 * i);
        acc[i ^ 1] += v, acc[i] += (k & 0xffffffff) * (k >> 32);
    }
}
static u64 xxh3(const u8 *at, u64 n, u64 seed) {
    const u8 *s = SECRET;
    if (n == 0) return avalanche64(seed ^ r64(s + 56) ^ r64(s + 64));
    if (n <= 3) {
        u64 all = (u64)at[0] << 16 | (u64)at[n / 2] << 24 | at[n - 1] | n << 8;
        return avalanche64(all ^ ((u64)(r32(s) ^ r32(s + 4)) + seed));
    }
    if (n <= 8) {
        /* the seed's low half, its bytes turned round, goes into its high half */
        u64 flip = (r64(s + 8) ^ r64(s + 16)) - (seed ^ swap64(seed & 0xffffffff));
        u64 h = (r32(at + n - 4) + ((u64)r32(at) << 32)) ^ flip;
        h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
        h *= 0x9FB21C651E98DF25u, h ^= (h >> 35) + n, h *= 0x9FB21C651E98DF25u;
        return h ^ h >> 28;
    }
    if (n <= 16) {
        u64 low = r64(at) ^ ((r64(s + 24) ^ r64(s + 32)) + seed);
        u64 high = r64(at + n - 8) ^ ((r64(s + 40) ^ r64(s + 48)) - seed);
        return avalanche(n + swap64(low) + high + fold(low, high));
    }
    if (n <= 240) {
        u64 h = n * P1;
        if (n <= 128) {
            for (u64 i = 0; i <= (n - 1) / 32; i++)
                h += mix(at + 16 * i, s + 32 * i, seed) + mix(at + n - 16 * (i + 1), s + 32 * i + 16, seed);
            return avalanche(h);
        }
        for (u64 i = 0; i < n / 16; i++) {
            h += mix(at + 16 * i, i < 8 ? s + 16 * i : s + 16 * (i - 8) + 3, seed);
            if (i == 7) h = avalanche(h);
        }
        return avalanche(h + mix(at + n - 16, s + 136 - 17, seed));
    }
    u8 own[192];
    for (int i = 0; i < 192; i++) {
        u64 word = r64(s + i / 8 * 8);
        own[i] = (u8)((i / 8 % 2 ? word - seed : word + seed) >> i % 8 * 8);
    }
    u64 acc[8] = {0xC2B2AE3D, P1, P2, P3, P4, 0x85EBCA77, P5, 0x9E3779B1}, h = n * P1;
    for (u64 i = 0; i < (n - 1) / 64; i++) {
        stripe(acc, at + 64 * i, own + i % 16 * 8);
        for (int k = 0; k < 8 && i % 16 == 15; k++)
            acc[k] = (acc[k] ^ acc[k] >> 47 ^ r64(own + 128 + 8 * k)) * 0x9E3779B1u;
    }
    stripe(acc, at + n - 64, own + 128 - 7);
    for (int i = 0; i < 4; i++)
        h += fold(acc[2 * i] ^ r64(own + 11 + 16 * i), acc[2 * i + 1] ^ r64(own + 19 + 16 * i));
    return avalanche(h);
}

/* Bytes that are read from the front; text is such bytes, too. */
typedef struct { const u8 *at, *end; } Span;
static u64 size_of(Span of) { return (u64)(of.end - of.at); }
static const u8 *take(Span *from, u64 n) {
    check(n <= size_of(*from), "it ends too early");
    return (from->at += n) - n;
}
static Span part(Span *from, u64 n) {
    const u8 *at = take(from, n);
    return (Span){at, at + n};
}
static int is(Span text, const char *wanted) {
    u64 n = strlen(wanted);
    return size_of(text) == n && !memcmp(text.at, wanted, n);
}
static int same(Span a, Span b) {
    return size_of(a) == size_of(b) && !memcmp(a.at, b.at, size_of(a));
}
/* msgpack. Kinds: n nil, b bool, i int, - negative int, f float, s str, y bin, x extension, [ and {. */
typedef struct { char kind; u64 n; int code; Span data; } Item;
static u64 be(Span *from, int width) {
    u64 value = 0;
    for (const u8 *at = take(from, (u64)width); width--; at++) value = value << 8 | *at;
    return value;
}
static u64 widened(u32 bits) { /* a float's bits: those of the same double */
    float narrow;
    double wide;
    u64 got;
    memcpy(&narrow, &bits, 4), wide = narrow, memcpy(&got, &wide, 8);
    return got;
}
static int is_utf8(Span text) { /* no surrogates, nothing longer than needed, up to U+10FFFF */
    while (text.at < text.end) {
        u32 c = *text.at++;
        int more = c < 0x80 ? 0 : c < 0xc2 ? -1 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : c < 0xf5 ? 3 : -1;
        if (more < 0 || (u64)more > size_of(text)) return 0;
        c &= more ? 63u >> more : 127;
        for (int k = more; k--; c = c << 6 | (*text.at++ & 63))
            if (*text.at >> 6 != 2) return 0;
        if ((more == 2 && (c < 0x800 || c >> 11 == 0x1b)) || (more == 3 && (c < 0x10000 || c >> 16 > 16)))
            return 0;
    }
    return 1;
}
static Item item(Span *from) {
    int t = *take(from, 1);
    Item got = {0};
    if (t < 0x80 || t >= 0xe0) got.kind = t < 0x80 ? 'i' : '-', got.n = (u64)(int64_t)(int8_t)t;
    else if (t < 0xc0) got.kind = t < 0x90 ? '{' : t < 0xa0 ? '[' : 's', got.n = (u64)t & (t < 0xa0 ? 15 : 31);
    else if (t == 0xc0) got.kind = 'n';
    else if (t == 0xc2 || t == 0xc3) got.kind = 'b', got.n = t & 1;
    else if (t >= 0xc4 && t <= 0xc9) got.kind = t < 0xc7 ? 'y' : 'x', got.n = be(from, 1 << (t - 0xc4) % 3);
    else if (t == 0xca) got.kind = 'f', got.n = widened((u32)be(from, 4));
    else if (t == 0xcb) got.kind = 'f', got.n = be(from, 8);
    else if (t >= 0xcc && t <= 0xcf) got.kind = 'i', got.n = be(from, 1 << (t - 0xcc));
    else if (t >= 0xd0 && t <= 0xd3) {
        int width = 8 << (t - 0xd0);
        got.n = be(from, width / 8), got.kind = got.n >> (width - 1) ? '-' : 'i';
        if (got.kind == '-' && width < 64) got.n |= ~(u64)0 << width;
    } else if (t >= 0xd4 && t <= 0xd8) got.kind = 'x', got.n = 1u << (t - 0xd4);
    else if (t >= 0xd9 && t < 0xdc) got.kind = 's', got.n = be(from, 1 << (t - 0xd9));
    else if (t >= 0xdc) got.kind = t < 0xde ? '[' : '{', got.n = be(from, 2 << t % 2);
    else check(0, "a msgpack byte that means nothing");
    if (got.kind == 'x') got.code = (int8_t)*take(from, 1);
    if (strchr("syx", got.kind)) got.data = part(from, got.n);
    check(got.kind != 's' || is_utf8(got.data), "a text that is no UTF-8");
    return got;
}
static Item want(Span *from, char kind) {
    Item got = item(from);
    check(got.kind == kind, "a value of another kind than it has to be");
    return got;
}
static u64 list(Span *from, u64 most) {
    u64 n = want(from, '[').n;
    check(n <= most, "a list that is longer than it may be");
    return n;
}

/* JSON. Kinds: s str, i int, [ and {, n null, and the first letter of all else. */
typedef struct Json { char kind; u64 n; Span name, text; struct Json *child, *next; } Json;
static int blank(Span *from) {
    while (from->at < from->end && strchr(" \n", *from->at)) from->at++;
    return from->at < from->end ? *from->at : 0;
}
static u32 unit(Span *from) { /* behind \u */
    char digits[5] = "";
    u32 got = 0xfffe;
    memcpy(digits, take(from, 4), 4);
    check(sscanf(digits, "%4x", &got) == 1, "no JSON");
    return got;
}
static Span string(Span *from) { /* with a NUL behind it */
    static const char plain[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    check(*take(from, 1) == '"', "no JSON");
    u64 n = 0;
    for (; n < size_of(*from) && from->at[n] != '"'; n++) n += from->at[n] == '\\';
    check(n < size_of(*from), "no JSON");
    Span raw = part(from, n);
    u8 *text = mem(n + 1), *end = text;
    while (raw.at < raw.end) {
        u32 c = *take(&raw, 1);
        check(c >= 32 && c < 127, "a byte that is no ASCII in a JSON text");
        if (c != '\\') {
            *end++ = (u8)c;
            continue;
        }
        const char *at = (c = *take(&raw, 1)) == 'u' ? NULL : strchr(plain, (int)c);
        check(c == 'u' || (at && *at), "no JSON");
        c = at ? (u32)meant[at - plain] : unit(&raw);
        if (c >> 10 == 0x36) { /* the first of a pair */
            check(take(&raw, 1)[0] == '\\' && take(&raw, 1)[0] == 'u', "half of a pair");
            u32 low = unit(&raw);
            check(low >> 10 == 0x37, "half of a pair");
            c = 0x10000 + ((c & 1023) << 10 | (low & 1023));
        }
        if (c < 128 || (c >= 0xdc80 && c < 0xdd00)) { /* U+DC80 + (byte - 0x80): a byte of a name */
            *end++ = (u8)c;
            continue;
        }
        check(c >> 10 != 0x37, "half of a pair");
        int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        *end++ = (u8)(0xff00 >> (more + 1) | c >> 6 * more);
        while (more--) *end++ = (u8)(0x80 | (c >> 6 * more & 63));
    }
    take(from, 1);
    return (Span){text, end};
}
static Json *json(Span *from, int depth) {
    Json *got = mem(sizeof *got), **last = &got->child;
    int c = blank(from), first = 1;
    check(c && depth < 64, "no JSON");
    if (c == '"') got->kind = 's', got->text = string(from);
    else if (c == '[' || c == '{') {
        got->kind = (char)*take(from, 1);
        for (; blank(from) != c + 2; first = 0, last = &(*last)->next, got->n++) {
            Span name = {0};
            check(first || *take(from, 1) == ',', "no JSON");
            blank(from);
            if (c == '{') name = string(from), check(blank(from) == ':' && take(from, 1), "no JSON");
            *last = json(from, depth + 1), (*last)->name = name;
        }
        from->at++;
    } else {
        got->kind = c >= '0' && c <= '9' ? 'i' : (char)c;
        for (; (c = blank(from)) && !strchr(",]}", c); from->at++) {
            check(c > 32 && c < 127, "no JSON");
            int whole = got->kind == 'i' && c >= '0' && c <= '9' && got->n < UINT64_MAX / 10 - 9;
            if (whole) got->n = got->n * 10 + (u64)c - '0';
            else if (got->kind == 'i') got->kind = 'd';
        }
    }
    return got;
}
/* A member by its name, or a value by its place in a list; of these kinds. ? before: it may be missing. */
static Json *get(Json *of, const char *name, int place, const char *kinds) {
    check(of->kind == (name ? '{' : '['), "it has something else than a list or an object");
    Json *at = of->child;
    while (at && (name ? !is(at->name, name) : place-- > 0)) at = at->next;
    if (!at && *kinds == '?') return NULL;
    check(at && strchr(kinds, at->kind), "a member of the JSON is missing, or not of its kind");
    return at;
}

/* Reads a packed dataset, as docs/format.md says: the page's test. It has no code of shardio, and
 * needs only C99; reader_given.h has what the page takes for granted (SHA-256, XXH3, msgpack, JSON).
 *
 *     cc -std=c99 -O2 -o reader reader.c && ./reader DIRECTORY [VERSION]
 *
 * prints a line for each record that is not hidden, its parts behind tabs:
 *
 *     record NUMBER NAME=VALUE NAME=VALUE ...        and for each split, before its records: split NAME
 *
 * Text is escaped as in a URL; of a blob there is its length, and its SHA-256. VERSION is the id or
 * the tag of an older version. All is checked before it is printed. Status 1: the dataset is damaged;
 * 3: it is of a newer version or of another format than this reader knows. */
#include "reader_given.h"

enum { MAX_FIELDS = 1000, MAX_DESCRIPTION = 1 << 19, MAX_HEAD = 1 << 20, MAX_DEPTH = 32 };
enum { MAX_MANIFEST = 1 << 30 };
typedef struct { Span name; char kind; } Field;
typedef struct { Span head, blobs; } Value; /* what begins with it: its bytes, those of its blob */
typedef struct { char name[64]; u64 count, bytes; Span sha256, checksum; } File;

static Span load(const char *dir, const char *name, u64 most) {
    char *path = mem(strlen(dir) + strlen(name) + 2);
    sprintf(path, "%s/%s", dir, name);
    FILE *file = fopen(reading = path, "rb");
    check(file && !fseek(file, 0, SEEK_END), "it is not there, or cannot be read");
    long size = ftell(file);
    check(size >= 0 && (u64)size <= most, "it is too large");
    u8 *data = mem((u64)size);
    rewind(file);
    check(fread(data, 1, (size_t)size, file) == (size_t)size, "it cannot be read");
    fclose(file);
    return (Span){data, data + size};
}

/* Values. A first walk checks them and prints nothing. */
static int loud;
static void say(const char *what, ...) {
    va_list rest;
    va_start(rest, what);
    if (loud) vprintf(what, rest);
    va_end(rest);
}
static void quote(Span text) {
    for (; loud && text.at < text.end; text.at++) {
        int c = *text.at, letter = (c | 32) >= 'a' && (c | 32) <= 'z';
        int plain = letter || (c >= '0' && c <= '9') || (c && strchr("_.-~/", c));
        say(plain ? "%c" : "%%%02X", c);
    }
}
static void say_blob(Span data) {
    if (loud) say(":%llu:%.16s", (long long)size_of(data), sha256(data.at, size_of(data)));
}
static char kind_of(Span text) { /* a letter for each kind of field */
    static const char *kinds = "k key I image y bytes a array i int f float b bool s str j json ";
    char word[16] = "";
    check(size_of(text) < 12, "a kind of field");
    sprintf(word, " %.*s ", (int)size_of(text), (const char *)text.at);
    const char *at = strstr(kinds, word);
    if (!at || strlen(word) < 5) fail(UNKNOWN, "fields of a kind that this reader does not know");
    return at[-1];
}
static u64 array_size(Span *from, u64 parts) { /* of dtype and shape, the first two of `parts` */
    static const char *plain = " |b1 |i1 |u1 <i2 <i4 <i8 <u2 <u4 <u8 <f2 <f4 <f8 <c8 <c16 ";
    char text[40] = " ";
    check(list(from, parts) == parts, "an array without dtype and shape");
    Span dtype = want(from, 's').data;
    u64 n = size_of(dtype), size = 0, k = 3, dimensions = list(from, 32);
    check(n > 2 && n < 32 && !memchr(dtype.at, 0, n) && !memchr(dtype.at, ' ', n), "a dtype");
    memcpy(text + 1, dtype.at, n), text[n + 1] = ' ';
    for (; text[k] >= '0' && text[k] <= '9' && k < 12; k++) size = size * 10 + (u64)text[k] - '0';
    int texts = !strncmp(text, " |S", 3) || !strncmp(text, " <U", 3);
    int times = !strncmp(text, " <M8", 4) || !strncmp(text, " <m8", 4);
    check(strstr(plain, text) || (texts && k == n + 1 && text[3] != '0') ||
          (times && (n == 3 || (text[4] == '[' && text[n] == ']'))), "a dtype");
    quote(dtype);
    for (size *= text[2] == 'U' ? 4 : 1; dimensions--;) {
        u64 length = want(from, 'i').n;
        check(!length || size <= UINT64_MAX / length, "an array that is too large");
        say(",%llu", length), size *= length;
    }
    return size;
}
static void walk(Span *head, Span *blobs, char kind, int depth) { /* over one value */
    static const char *const fits[] = {"ky", "Ii", "yi", "a[", "ii-", "ff", "bb", "ss", "jbi-fsyx[{"};
    Span again = *head, data;
    Item got = item(head);
    const char *const *may = fits;
    if (got.kind == 'n' && kind != 'k') { say("null"); return; }
    while (**may != kind) may++;
    check(strchr(*may + 1, got.kind) && depth <= MAX_DEPTH, "a value is not of its field's kind");
    if (kind == 'k') {
        check(got.n >= 1 && got.n <= 65535, "a key is empty or too long");
        quote(got.data);
    } else if (kind == 'I' || kind == 'y') {
        say_blob(part(blobs, got.n));
    } else if (kind == 'a') {
        *head = again, got.n = array_size(head, 2), say_blob(part(blobs, got.n));
    } else if (got.kind == 'x') {
        check(got.code == 1, "an extension type other than 1"), say("array ");
        got.n = array_size(head = &got.data, 3), data = want(head, 'y').data;
        check(size_of(data) == got.n && !size_of(*head), "an array of another size");
        say_blob(data);
    } else if (got.kind == '[' || got.kind == '{') {
        say("%c", got.kind);
        for (u64 k = 0; k < got.n; k++) {
            if (got.kind == '{') say("'"), quote(want(head, 's').data), say("':");
            walk(head, blobs, 'j', depth + 1), say(",");
        }
        say("%c", got.kind + 2);
    } else if (got.kind == 's' || got.kind == 'y') {
        say(got.kind == 's' ? "'" : "b'"), quote(got.data), say("'");
    } else if (got.kind == 'f') {
        say("f%016llx", got.n);
    } else if (got.kind == 'b') {
        say(got.n ? "true" : "false");
    } else {
        say(got.kind == '-' ? "%lld" : "%llu", got.n);
    }
}

/* Shards. */
static void check_column(Span *about, Span *rest, u64 n, Field *fields, u64 width, Value *values) {
    check(list(about, 3) == 3, "its columns");
    Span name = want(about, 's').data, dtype = want(about, 's').data;
    u64 field = 0, i;
    while (field < width && !same(fields[field].name, name)) field++;
    check(field < width && strchr("ifb", fields[field].kind), "a column of no field");
    char word[8] = "";
    check(size_of(dtype) == 3 && !memchr(dtype.at, ' ', 3), "a column");
    sprintf(word, " %.3s ", (const char *)dtype.at);
    check(strstr(" |b1 |i1 |u1 <i2 <u2 <i4 <u4 <i8 <u8 <f4 <f8 ", word) && word[4], "a column");
    int bytes = dtype.at[2] - '0', type = dtype.at[1];
    const u8 *cells = take(rest, n * (u64)bytes), *is_there = NULL;
    if (want(about, 'b').n) is_there = take(rest, n);
    for (i = 0; i < n; i++) {
        Span own = values[i * width + field].head;
        Item got = {is_there ? 'n' : (char)type, 0, 0, {0}}; /* of a record that was erased */
        u64 cell = le(cells + i * (u64)bytes, bytes);
        if (type == 'f' && bytes == 4) cell = widened((u32)cell);
        if (type == 'i' && bytes < 8 && cell >> (8 * bytes - 1)) cell |= ~(u64)0 << 8 * bytes;
        if (own.at) got = item(&own);
        check(cell == got.n && (got.kind == 'n') == (is_there && !is_there[i]), "a column's value");
        check(got.kind == 'n' || (got.kind == '-') == (type == 'i' && cell >> 63), "its sign");
    }
}
/* Checks a shard, and returns its values: `width` for each record, for an erased one zeros. */
static Value *shard(const char *dir, File *of, u64 number, const u8 *id, Field *fields, u64 width) {
    Span all = load(dir, of->name, INT64_MAX);
    const u8 *d = all.at, *t = all.end - 60;
    u64 size = size_of(all), k, i;
    check(size == of->bytes && is(of->sha256, sha256(d, size)), "not the file of the manifest");
    check(size >= 104 && !memcmp(d, "\x89SHD\r\n\x1a\n", 8), "it has no header");
    if (le(d + 8, 2) > 1 || d[10] != 1) fail(UNKNOWN, "it is of a newer version");
    u64 begin = 44 + (u64)r32(d + 32), index = r64(t), n = r32(t + 16);
    check(begin <= 44 + MAX_DESCRIPTION && begin <= size - 60, "the size of its header");
    check(r64(d + begin - 8) == xxh3(d, begin - 8, 0) && !d[11], "the checksum of its header");
    check(r32(d + 12) == number && !memcmp(d + 16, id, 16), "it belongs in another place");
    check(index >= begin && index <= size - 60 && r64(t + 8) == size - 60 - index, "its trailer");
    check(n == of->count && !memcmp(t + 20, d + 12, 4) && !memcmp(t + 24, d + 8, 4) &&
          !memcmp(t + 28, id, 16) && !memcmp(t + 52, "\x89" "DHS\r\n\x1a\n", 8), "its trailer");
    check(r64(t + 44) == xxh3(d + index, size - 16 - index, 0), "the checksum of its index");
    check(size_of(of->checksum) == 16 && strtoull((const char *)of->checksum.at, NULL, 16) == r64(t + 44),
          "the checksum of its index is not that of the manifest");
    Span head = {d + 36, d + begin - 8}, rest = {d + index, t}, body = {d + begin, d + index};
    check(list(&head, MAX_FIELDS) == width, "its fields are others");
    for (k = 0; k < width; k++) {
        check(list(&head, 2) == 2 && same(want(&head, 's').data, fields[k].name), "its fields");
        check(kind_of(want(&head, 's').data) == fields[k].kind, "its fields are others");
    }
    u64 described = r32(take(&rest, 4)), seed = xxh3(d + 12, 20, 0) >> 32 << 32;
    check(!size_of(head) && described <= MAX_DESCRIPTION, "the length of a description");
    Span about = part(&rest, described);
    const u8 *lengths = take(&rest, 4 * n), *hashes = take(&rest, 4 * n);
    check(16 * n <= size_of(body), "more records than there is room for");
    Value *values = mem(n * width * sizeof *values), *row = values;
    for (i = 0; i < n; i++, row += width) {
        const u8 *at = take(&body, 16);
        u64 length = r32(at + 8);
        Span blobs = part(&body, length), key;
        check(r64(at) == xxh3(at + 8, 8 + length, seed + i), "the checksum of a record");
        check(r32(lengths + 4 * i) == length, "the length of a record");
        check(length || (d[8] == 1 && !r32(at + 12) && !r32(hashes + 4 * i)), "an empty record");
        if (!length) continue; /* erased */
        check(r32(at + 12) <= MAX_HEAD, "the length of a head");
        head = part(&blobs, r32(at + 12));
        check(list(&head, MAX_FIELDS) == width, "a record has other fields");
        for (k = 0; k < width; k++) {
            row[k] = (Value){head, blobs};
            walk(&head, &blobs, fields[k].kind, 0);
        }
        check(!size_of(head) && !size_of(blobs), "a record has bytes that belong to nothing");
        key = row->head, key = item(&key).data;
        check((u32)xxh3(key.at, size_of(key), 0) == r32(hashes + 4 * i), "the hash of a key");
    }
    for (k = list(&about, width); k--;) check_column(&about, &rest, n, fields, width, values);
    check(!size_of(body) && !size_of(rest) && !size_of(about), "bytes that belong to nothing");
    return values;
}

/* The manifest, and what it names. */
static Json *sealed(const char *dir, const char *name, const char *format) {
    Span all = load(dir, name, MAX_MANIFEST);
    const u8 *end = all.end - 79; /* "sha256": "..." LF } LF */
    check(size_of(all) > 80 && !memcmp(end - 1, "\n\"sha256\": \"", 12), "it was cut short");
    check(!memcmp(all.end - 4, "\"\n}\n", 4), "it was cut short");
    check(!memcmp(sha256(all.at, (u64)(end - all.at)), end + 11, 64), "its own SHA-256");
    Json *got = json(&all, 0);
    check(!blank(&all) && is(get(got, "format", 0, "s")->text, format), "it is something else");
    if (get(got, "version", 0, "i")->n > 1) {
        const u8 *library = get(got, "library", 0, "s")->text.at;
        fail(UNKNOWN, "it is of a newer version; shardio %.40s reads it", (const char *)library);
    }
    return got;
}
/* Returns the hex digits, at least 16, at a place of a list; -1: of the text itself. */
static const char *digits(Json *of, int place, Span *into) {
    *into = place < 0 ? of->text : get(of, NULL, place, "s")->text;
    const char *text = (const char *)into->at;
    check(size_of(*into) >= 16 && strspn(text, "0123456789abcdef") == size_of(*into), "a sum");
    return text;
}
static Json *overlays(Json *m) {
    Json *all = get(m, "overlays", 0, "?n[");
    return all && all->kind == '[' ? all->child : NULL;
}
/* Reads a file's name, count, bytes, SHA-256 and index checksum, from place `at` of a list on; where
 * records were erased since, those of the file that took its place. */
static File file_of(Json *of, int at, const char *prefix, u64 number, Json *erased) {
    check(of->n == (u64)at + 5, "a list of another length");
    File got = {"", get(of, NULL, at + 1, "i")->n, get(of, NULL, at + 2, "i")->n, {0}, {0}};
    const char *sha256 = digits(of, at + 3, &got.sha256);
    digits(of, at + 4, &got.checksum);
    sprintf(got.name, "%s%05llu-%.8s.shard", prefix, (long long)number, sha256);
    check(is(get(of, NULL, at, "s")->text, got.name), "a name of a file");
    for (u64 rounds = erased ? erased->n : 0; rounds--;)
        for (Json *e = erased->child; e; e = e->next) {
            if (!is(get(e, NULL, 0, "s")->text, got.name)) continue;
            check(e->n == 5, "a list of another length");
            got.bytes = get(e, NULL, 1, "i")->n;
            if (*prefix) got.count -= get(e, NULL, 4, "i")->n; /* values that are gone */
            sha256 = digits(e, 2, &got.sha256), digits(e, 3, &got.checksum);
            sprintf(got.name, "%s%05llu-%.8s.shard", prefix, (long long)number, sha256);
        }
    return got;
}
/* Reads the numbers of the hidden records: `count` of 8 bytes each. */
static const u8 *hidden(const char *dir, Json *m, const u8 *id, u64 records, u64 *count) {
    Json *excluded = get(m, "excluded", 0, "?n[");
    char name[40];
    Span sum;
    *count = 0;
    if (!excluded || excluded->kind == 'n') return NULL;
    sprintf(name, "excluded-%.8s.bin", digits(excluded, 2, &sum));
    check(excluded->n == 3 && is(get(excluded, NULL, 0, "s")->text, name), "the name of its excluded records");
    Span all = load(dir, name, 32 + 8 * records);
    check(is(sum, sha256(all.at, size_of(all))), "not the file of the manifest");
    check(size_of(all) > 32 && !memcmp(all.at, "\x89SHX\r\n\x1a\n", 8), "it has no header");
    *count = r64(all.at + 24);
    check(!memcmp(all.at + 8, id, 16) && size_of(all) == 32 + 8 * *count, "its dataset or count");
    check(*count == get(excluded, NULL, 1, "i")->n, "its count");
    for (u64 i = 0, next = 0; i < *count; i++, next = r64(all.at + 24 + 8 * i) + 1)
        check(r64(all.at + 32 + 8 * i) >= next && r64(all.at + 32 + 8 * i) < records, "its order");
    return all.at + 32;
}
static u64 fields_of(Json *m, Field **into, u64 *stored) { /* what shards store, then what was added */
    Field *fields = *into = mem((get(m, "fields", 0, "[")->n + MAX_FIELDS) * sizeof *fields);
    u64 wide = 0, k;
    for (Json *f = get(m, "fields", 0, "[")->child; f; f = f->next, wide++) {
        fields[wide] = (Field){get(f, NULL, 0, "s")->text, kind_of(get(f, NULL, 1, "s")->text)};
        check((fields[wide].kind == 'k') == !wide && f->n == 2, "its fields");
    }
    check(wide && wide <= MAX_FIELDS && is(fields->name, "__key__"), "its fields");
    *stored = wide;
    for (Json *o = overlays(m); o; o = o->next) {
        Field field = {get(o, NULL, 0, "s")->text, kind_of(get(o, NULL, 1, "s")->text)};
        for (k = 0; k < wide && !same(fields[k].name, field.name);) k++;
        check(field.kind != 'k' && field.kind != 'I' && wide < MAX_FIELDS, "an annotated field");
        check(k == wide || fields[k].kind == field.kind, "an annotated field of another kind");
        fields[o->n = k] = field, wide += k == wide;
    }
    return wide;
}
/* Puts the annotated values of a shard of `n` records into rows of `wide`. */
static void lay_over(const char *dir, Json *m, u64 number, const u8 *id, Json *erased, u64 n,
                     Field *fields, u64 wide, Value **over) {
    static const char *const names[] = {"__key__", "__row__"};
    Field three[] = {{{(const u8 *)names[0], (const u8 *)names[0] + 7}, 'k'},
                     {{(const u8 *)names[1], (const u8 *)names[1] + 7}, 'i'}, {{0}, 0}};
    char decimal[24];
    for (Json *o = overlays(m); o; o = o->next)
        for (Json *f = get(o, NULL, 2, "[")->child; f; f = f->next) {
            if (get(f, NULL, 0, "i")->n != number) continue;
            File file = file_of(f, 1, "overlay-", number, erased);
            if (!file.bytes) continue; /* all its records were erased */
            three[2] = fields[o->n];
            Value *row = shard(dir, &file, number, id, three, 3);
            for (u64 i = 0, next = 0; i < file.count; i++, row += 3) {
                Span key = row[0].head, at = row[1].head;
                check(key.at != NULL, "an erased value");
                u64 record = item(&at).n;
                sprintf(decimal, "%llu", (long long)record);
                check(record >= next && record < n && is(item(&key).data, decimal), "its rows");
                over[record * wide + o->n] = row + 2, next = record + 1;
            }
        }
}
/* Prints a version: the newest, or one by its id or tag. */
static void dataset(const char *dir, const char *version) {
    Json *newest = sealed(dir, "manifest.json", "shardio"), *m = newest, *e, *erased = NULL;
    char name[40];
    u8 id[16];
    Span text;
    if (version) {
        if (strlen(version) != 16 || strspn(version, "0123456789abcdef") != 16) {
            e = get(sealed(dir, "tags.json", "shardio-tags"), "tags", 0, "{");
            version = digits(get(e, version, 0, "s"), -1, &text);
        }
        if (memcmp(get(newest, "sha256", 0, "s")->text.at, version, 16)) {
            sprintf(name, "manifest-%.16s.json", version);
            m = sealed(dir, name, "shardio");
        }
        check(!memcmp(get(m, "sha256", 0, "s")->text.at, version, 16), "not what its name says");
        erased = get(newest, "erased", 0, "?[");
    }
    static const char *const grown[] = {"excluded", "sources", "overlays", "commit", "erased"};
    for (int k = 0; k < 5 && !get(m, "version", 0, "i")->n; k++)
        check(!get(m, grown[k], 0, "?n[{sitf-d"), "members that version 0 has not");
    if (!is(get(m, "shard_format", 0, "s")->text, "record"))
        fail(UNKNOWN, "its shards are of another format");
    const char *hex = digits(get(m, "dataset_id", 0, "s"), -1, &text);
    for (unsigned k = 0, byte; k < 16; k++) id[k] = sscanf(hex + 2 * k, "%2x", &byte) == 1 ? (u8)byte : 0;
    Field *fields;
    u64 stored, wide = fields_of(m, &fields, &stored), records = get(m, "records", 0, "i")->n, left;
    const u8 *gone = hidden(dir, m, id, records, &left);
    u64 base = 0, number = 0, bytes = 0;
    for (e = get(m, "shards", 0, "[")->child; e; e = e->next, number++) {
        Block *mark = blocks;
        bytes += get(e, NULL, 2, "i")->n;
        File file = file_of(e, 0, "", number, erased);
        Value *own = shard(dir, &file, number, id, fields, stored);
        Value **over = mem(file.count * wide * sizeof *over);
        lay_over(dir, m, number, id, erased, file.count, fields, wide, over);
        reading = dir, loud = 1;
        for (u64 i = 0; i < file.count; i++, base++, own += stored, over += wide) {
            if (left && r64(gone) == base) {
                gone += 8, left--;
                continue;
            }
            check(own->head.at != NULL, "a record that was erased, but is not hidden");
            say("record\t%llu", (long long)base);
            for (u64 k = 0; k < wide; k++) {
                Value got = {{0}, {0}};
                if (k < stored) got = own[k];
                if (over[k]) got = *over[k];
                say("\t"), quote(fields[k].name), say("=");
                if (got.head.at) walk(&got.head, &got.blobs, fields[k].kind, 0);
                else say("null");
            }
            say("\n");
        }
        loud = 0, release(mark);
    }
    reading = dir;
    check(base == records && !left && bytes == get(m, "bytes", 0, "i")->n, "its sums are others");
}
int main(int count, char **words) {
    if (count < 2 || count > 3) return fputs("usage: reader DIRECTORY [VERSION]\n", stderr), USAGE;
    const char *dir = words[1], *version = count > 2 ? words[2] : NULL;
    char *path = mem(strlen(dir) + 16);
    sprintf(path, "%s/shardio.json", dir);
    FILE *splits = fopen(path, "rb");
    if (!splits) return dataset(dir, version), 0;
    fclose(splits);
    Json *all = get(sealed(dir, "shardio.json", "shardio-splits"), "splits", 0, "[");
    for (Json *s = all->child; s; s = s->next) {
        u64 n = size_of(s->text);
        check(s->kind == 's' && n && !memchr(s->text.at, '/', n) && !memchr(s->text.at, 0, n) &&
              !is(s->text, ".") && !is(s->text, ".."), "the name of a split");
        path = mem(strlen(dir) + n + 2);
        sprintf(path, "%s/%s", dir, (const char *)s->text.at);
        loud = 1, say("split\t"), quote(s->text), say("\n"), loud = 0;
        dataset(path, version);
    }
    return 0;
}

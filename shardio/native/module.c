/* shardio.native._core: what Python asks of the core. Arguments are taken apart and checked here; the
 * work is done in the other files, without the GIL and without a Python object in sight.
 *
 * Nothing here is global and changes, so any number of threads and interpreters may use it at once.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "core.h"

/* O& converter: an array of int64, one after the other. */
static int int64_array(PyObject *given, void *out)
{
    Py_buffer *array = out;
    if (given && PyObject_GetBuffer(given, array, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return 0;
    if (given && array->itemsize == 8 && array->ndim == 1 && array->format &&
        (!strcmp(array->format, "l") || !strcmp(array->format, "q")))
        return Py_CLEANUP_SUPPORTED;
    PyBuffer_Release(array);
    if (given)
        PyErr_SetString(PyExc_TypeError, "expected an array of int64");
    return !given; /* none is given when an argument after this one is wrong */
}

/* O& converter: where the records of a shard lie. */
struct places {
    Py_buffer array;
    core_shard shard;
};

static int places_of(PyObject *given, void *out)
{
    struct places *places = out;
    places->shard = (core_shard){0};
    if (!given || !PyBytes_Check(given)) {
        int taken = int64_array(given, &places->array);
        if (given && taken)
            places->shard.offsets = places->array.buf, places->shard.records = places->array.len / 8 - 1;
        return taken;
    }
    if (PyObject_GetBuffer(given, &places->array, PyBUF_SIMPLE) < 0)
        return 0;
    if (core_take_places(&places->shard, places->array.buf, (size_t)places->array.len))
        return Py_CLEANUP_SUPPORTED;
    PyBuffer_Release(&places->array);
    PyErr_SetString(PyExc_ValueError, "these bytes do not say where records lie");
    return 0;
}

PyDoc_STRVAR(gather_doc,
             "gather(file: int, places: int64 array | bytes, seed: int, records: int64 array,\n"
             "       begin: bytes-like, out: writable, contiguous, rows: int64 array, /) -> int\n\n"
             "Write what follows `begin` in the one blob of each record to its row of `out`. How many\n"
             "records, from the first on, were right and had such a blob.");

static PyObject *gather(PyObject *Py_UNUSED(self), PyObject *args)
{
    int file;
    struct places places;
    Py_buffer records, begin, out = {0}, rows;
    unsigned long long seed;
    PyObject *object;
    if (!PyArg_ParseTuple(args, "iO&KO&y*OO&:gather", &file, places_of, &places, &seed, int64_array, &records, &begin, &object, int64_array, &rows))
        return NULL;
    int64_t count = records.len / 8, done = -1;
    places.shard.file = file, places.shard.seed = seed;
    if (!PyObject_GetBuffer(object, &out, PyBUF_ND | PyBUF_WRITABLE)) {
        int64_t all = out.ndim ? out.shape[0] : 0;
        done = 0;
        if (all && out.len && rows.len == records.len) {
            Py_BEGIN_ALLOW_THREADS
            done = core_gather(&places.shard, records.buf, count, begin.buf, (size_t)begin.len, out.buf,
                               (size_t)(out.len / all), rows.buf, all);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&places.array), PyBuffer_Release(&records), PyBuffer_Release(&rows);
    PyBuffer_Release(&begin), PyBuffer_Release(&out);
    return done < 0 ? NULL : PyLong_FromLongLong(done);
}

PyDoc_STRVAR(blobs_doc,
             "blobs(file: int, places: int64 array | bytes, seed: int, records: int64 array, /) -> list\n\n"
             "What follows the head of each record, as bytes; it ends before the first record that\n"
             "is not right.");

static PyObject *blobs(PyObject *Py_UNUSED(self), PyObject *args)
{
    int file;
    struct places places;
    Py_buffer records;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "iO&KO&:blobs", &file, places_of, &places, &seed, int64_array,
                          &records))
        return NULL;
    const core_shard *shard = &places.shard;
    places.shard.file = file, places.shard.seed = seed;
    int64_t count = records.len / 8, at, done = 0;
    const int64_t *numbers = records.buf;
    size_t room = 0, size;
    for (int64_t i = 0; i < count && core_locate(shard, numbers[i], &at, &size); i++)
        room = size > SIZE_MAX / 2 - room ? SIZE_MAX / 2 : room + size;
    uint8_t *data = malloc(room + 1);
    core_range *ranges = malloc(((size_t)count + 1) * sizeof *ranges);
    PyObject *found = NULL;
    if (data && ranges) {
        Py_BEGIN_ALLOW_THREADS
        done = core_read(shard, numbers, count, data, room, ranges);
        Py_END_ALLOW_THREADS
        found = PyList_New(done);
    } else
        PyErr_NoMemory();
    for (int64_t i = 0; found && i < done; i++) {
        const char *start = (const char *)data + ranges[i].start;
        PyObject *blob = PyBytes_FromStringAndSize(start, (Py_ssize_t)ranges[i].size);
        if (blob)
            PyList_SET_ITEM(found, i, blob);
        else
            Py_CLEAR(found);
    }
    free(data), free(ranges);
    PyBuffer_Release(&places.array), PyBuffer_Release(&records);
    return found;
}

PyDoc_STRVAR(split_doc,
             "split(block: bytes-like, begins: int64 array, ends: int64 array, seed: int, /) -> list\n\n"
             "Records, each as bytes of its own; None in place of one that is not right.\n"
             "begins, ends: where they lie in the block. seed: of the first one's checksum. In place\n"
             "of its checksum, each has the seed of it.");

static PyObject *split(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer block, begins, ends;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y*O&O&K:split", &block, int64_array, &begins, int64_array, &ends,
                          &seed))
        return NULL;
    int64_t count = ends.len / 8;
    const int64_t *from = begins.buf, *to = ends.buf;
    PyObject **copies = PyMem_New(PyObject *, count + 1); /* in no list yet: nobody else has them */
    core_text *records = PyMem_New(core_text, count + 1);
    int64_t made = 0;
    bool right = records && copies && begins.len == ends.len;
    if (!records || !copies)
        PyErr_NoMemory();
    else if (!right)
        PyErr_SetString(PyExc_ValueError, "split: not as many begins as ends");
    for (; right && made < count; made++) {
        int64_t begin = from[made], end = to[made]; /* read once: another thread may write there */
        copies[made] = NULL;
        if (begin < 0 || end < begin || end > block.len)
            PyErr_SetString(PyExc_ValueError, "split: a record is not in the block");
        else
            copies[made] = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(end - begin));
        right = copies[made] != NULL;
        if (right)
            records[made] = (core_text){(uint8_t *)block.buf + begin, (size_t)(end - begin)};
    }
    if (right) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t i = 0; i < count; i++) {
            uint8_t *copy = (uint8_t *)PyBytes_AS_STRING(copies[i]);
            if (!records[i].size ||
                !core_copy_verified(records[i].text, records[i].size, seed + (uint64_t)i, copy))
                records[i].text = NULL;
        }
        Py_END_ALLOW_THREADS
    }
    PyObject *found = right ? PyList_New(count) : NULL;
    for (int64_t i = 0; i < made; i++) {
        bool is_whole = found && records[i].text;
        if (found)
            PyList_SET_ITEM(found, i, Py_NewRef(is_whole ? copies[i] : Py_None));
        Py_XDECREF(copies[i]);
    }
    PyMem_Free(records), PyMem_Free(copies);
    PyBuffer_Release(&block), PyBuffer_Release(&begins), PyBuffer_Release(&ends);
    return found;
}

PyDoc_STRVAR(join_doc,
             "join(shards: list of (number: int, first: int, file: int, places: int64 array | bytes,\n"
             "     seed: int), which: int64 array, numbers: int64 array, kinds: bytes, blob: int,\n"
             "     columns: tuple of writable arrays or None, offsets: writable int64 array,\n"
             "     keys: list | None, empty: callable, held: list of bytes | None, /) -> int\n\n"
             "The blobs of one field of records, one behind the other, to what empty(bytes) gives;\n"
             "where each begins, and the end, to `offsets`; other values to the column of their\n"
             "field, 8 bytes each, of a bool 1; keys as str to `keys`. shards: by number, each with\n"
             "the number of its first record. held: the records, as `split` gave them; their\n"
             "files are not read. How many were right, and without None, from the first.");

/* A writable, contiguous array of so many values of `size` bytes. */
static int column_of(PyObject *given, Py_buffer *array, Py_ssize_t size, int64_t count)
{
    if (PyObject_GetBuffer(given, array, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return 0;
    if (array->itemsize == size && array->len / size == count)
        return 1;
    PyErr_SetString(PyExc_ValueError, "join: a column is not of one value for each row");
    PyBuffer_Release(array);
    return 0;
}

/* Take the shards of a list apart: how many; -1: an exception, and those before it are taken. */
static Py_ssize_t sources_of(PyObject *list, core_shard_slot *sources, struct places *held, Py_ssize_t *taken)
{
    for (Py_ssize_t count = PyList_GET_SIZE(list); *taken < count; ++*taken) {
        core_shard_slot *one = sources + *taken;
        int file;
        long long number, first;
        unsigned long long seed;
        PyObject *item = PyList_GET_ITEM(list, *taken);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "join: a shard is not a tuple");
            return -1;
        }
        if (!PyArg_ParseTuple(item, "LLiO&K:join", &number, &first, &file, places_of,
                              held + *taken, &seed))
            return -1;
        one->number = number, one->first = first, one->shard = held[*taken].shard;
        one->shard.file = file, one->shard.seed = seed;
    }
    return *taken;
}

/* The bytes of each record; 0: one is None. */
static int texts_of(PyObject *records, core_text *texts)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); i++) {
        PyObject *one = PyTuple_GET_ITEM(records, i);
        if (!PyBytes_Check(one))
            return 0;
        texts[i].text = (uint8_t *)PyBytes_AS_STRING(one), texts[i].size = (size_t)PyBytes_GET_SIZE(one);
    }
    return 1;
}

static PyObject *join(PyObject *Py_UNUSED(self), PyObject *args)
{
    core_rows rows = {0};
    Py_buffer which, numbers, places, out = {0};
    PyObject *given, *columns, *bounds, *keys, *empty, *waited, *memory = NULL, *found = NULL;
    Py_ssize_t fields, blob, taken = 0, filled = 0;
    if (!PyArg_ParseTuple(args, "O!O&O&y#nO!OOOO:join", &PyList_Type, &given, int64_array, &which,
                          int64_array, &numbers, &rows.kinds, &fields, &blob, &PyTuple_Type,
                          &columns, &bounds, &keys, &empty, &waited))
        return NULL;
    PyObject *list = PyList_GetSlice(given, 0, PyList_GET_SIZE(given)); /* no other thread has it */
    PyObject *records = waited == Py_None ? NULL : PySequence_Tuple(waited); /* nor this */
    core_text *ready = PyMem_New(core_text, which.len / 8 + 1);
    Py_ssize_t count = list ? PyList_GET_SIZE(list) : 0;
    core_shard_slot *sources = PyMem_New(core_shard_slot, count + 1);
    struct places *held = PyMem_New(struct places, count + 1);
    Py_buffer *arrays = PyMem_New(Py_buffer, fields + 1);
    void **into = PyMem_New(void *, fields + 1);
    core_keys texts = {0};
    size_t room;
    rows.sources = sources, rows.count = (size_t)count, rows.columns = into;
    rows.shards = which.buf, rows.numbers = numbers.buf, rows.rows = which.len / 8;
    rows.fields = (size_t)fields, rows.blob = (size_t)blob, rows.held = records ? ready : NULL;
    if (!list || (!records && waited != Py_None) || !column_of(bounds, &places, 8, rows.rows + 1))
        goto free;
    if (!sources || !held || !arrays || !into || !ready ||
        !(texts.ends = PyMem_New(size_t, rows.rows + 1))) {
        PyErr_NoMemory();
        goto end;
    }
    if (numbers.len != which.len || (records && PyTuple_GET_SIZE(records) != rows.rows) ||
        PyTuple_GET_SIZE(columns) != fields || blob < 0 ||
        blob >= fields || rows.kinds[blob] != CORE_BLOB ||
        (keys != Py_None && (!PyList_Check(keys) || rows.kinds[0] != CORE_BYTES))) {
        PyErr_SetString(PyExc_ValueError, "join: rows, fields or keys do not fit");
        goto end;
    }
    for (; filled < fields; filled++) {
        PyObject *one = PyTuple_GET_ITEM(columns, filled);
        char kind = rows.kinds[filled];
        arrays[filled] = (Py_buffer){0};
        bool plain = kind == CORE_INT || kind == CORE_FLOAT || kind == CORE_BOOL;
        if (one != Py_None && !plain) {
            PyErr_SetString(PyExc_ValueError, "join: a column is of no field of numbers");
            goto end;
        }
        if (one != Py_None && !column_of(one, arrays + filled, kind == CORE_BOOL ? 1 : 8, rows.rows))
            goto end;
        into[filled] = arrays[filled].buf;
    }
    if (sources_of(list, sources, held, &taken) < 0)
        goto end;
    if ((records && !texts_of(records, ready)) || !core_max_bytes(&rows, &room)) {
        found = PyLong_FromLong(0);
        goto end;
    }
    memory = PyObject_CallFunction(empty, "n", (Py_ssize_t)room);
    if (!memory || PyObject_GetBuffer(memory, &out, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0)
        goto end;
    int64_t done;
    room = room < (size_t)out.len ? room : (size_t)out.len;
    Py_BEGIN_ALLOW_THREADS
    done = core_join(&rows, out.buf, room, places.buf, keys == Py_None ? NULL : &texts);
    Py_END_ALLOW_THREADS
    found = PyLong_FromLongLong(done);
    for (int64_t i = 0; found && keys != Py_None && i < done; i++) {
        size_t begin = i ? texts.ends[i - 1] : 0;
        PyObject *key = PyUnicode_DecodeUTF8((const char *)texts.text + begin,
                                             (Py_ssize_t)(texts.ends[i] - begin), "surrogateescape");
        if (!key || PyList_Append(keys, key) < 0)
            Py_CLEAR(found);
        Py_XDECREF(key);
    }
end:
    PyBuffer_Release(&places);
free:
    while (taken--)
        PyBuffer_Release(&held[taken].array);
    while (filled--)
        PyBuffer_Release(arrays + filled);
    PyBuffer_Release(&which), PyBuffer_Release(&numbers), PyBuffer_Release(&out);
    PyMem_Free(sources), PyMem_Free(held), PyMem_Free(arrays), PyMem_Free(into);
    PyMem_Free(texts.ends), free(texts.text), PyMem_Free(ready);
    Py_XDECREF(list), Py_XDECREF(memory), Py_XDECREF(records);
    return found;
}

/* The object of a value; NULL: an exception. */
static PyObject *object(const core_value *value)
{
    double number;
    switch (value->kind) {
    case CORE_BYTES: return PyBytes_FromStringAndSize((const char *)value->text, (Py_ssize_t)value->number);
    case CORE_STR: return PyUnicode_DecodeUTF8((const char *)value->text, (Py_ssize_t)value->number, NULL);
    case CORE_BOOL: return PyBool_FromLong((long)value->number);
    case CORE_INT:
        return value->is_signed ? PyLong_FromLongLong((int64_t)value->number)
                                : PyLong_FromUnsignedLongLong(value->number);
    case CORE_FLOAT:
        memcpy(&number, &value->number, 8);
        return PyFloat_FromDouble(number);
    default: return Py_NewRef(Py_None);
    }
}

static PyObject *key_text(const core_value *value)
{
    return PyUnicode_DecodeUTF8((const char *)value->text, (Py_ssize_t)value->number,
                                "surrogateescape");
}

/* The dict of a record's values; None: a text is not UTF-8, for which Python has the words. */
static PyObject *sample_of(const core_value *values, PyObject *names, const char *kinds)
{
    PyObject *sample = PyDict_New();
    for (Py_ssize_t f = 0; sample && f < PyTuple_GET_SIZE(names); f++) {
        bool text = kinds[f] == CORE_KEY && values[f].kind == CORE_BYTES;
        PyObject *one = text ? key_text(values + f) : object(values + f);
        if (!one || PyDict_SetItem(sample, PyTuple_GET_ITEM(names, f), one) < 0)
            Py_CLEAR(sample);
        Py_XDECREF(one);
    }
    if (sample || !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        return sample;
    PyErr_Clear();
    return Py_NewRef(Py_None);
}

/* Room for the values of so many fields; NULL: an exception. */
static core_value *values_of(Py_ssize_t fields, PyObject *names)
{
    core_value *values = NULL;
    if (!fields || fields != PyTuple_GET_SIZE(names))
        PyErr_SetString(PyExc_ValueError, "expected as many kinds as names, and at least one");
    else if (!(values = malloc((size_t)fields * sizeof *values)))
        PyErr_NoMemory();
    return values;
}

PyDoc_STRVAR(sample_doc,
             "sample(file: int, places: int64 array | bytes, seed: int, record: int, names: tuple,\n"
             "       kinds: bytes, /) -> dict | None\n\n"
             "The sample of a record. None: it cannot be read, is not right, or is for Python to read,\n"
             "as large ones are.");

static PyObject *sample(PyObject *Py_UNUSED(self), PyObject *args)
{
    int file, right = 0;
    long long record;
    struct places places;
    Py_ssize_t fields;
    unsigned long long seed;
    PyObject *names, *found = NULL;
    const char *kinds;
    if (!PyArg_ParseTuple(args, "iO&KLO!y#:sample", &file, places_of, &places, &seed, &record,
                          &PyTuple_Type, &names, &kinds, &fields))
        return NULL;
    places.shard.file = file, places.shard.seed = seed;
    int64_t at;
    size_t size;
    uint8_t *data = NULL;
    core_value *values = values_of(fields, names);
    if (!values)
        goto done;
    if (core_locate(&places.shard, record, &at, &size) && size < CORE_LARGE)
        data = malloc(size + 1);
    if (data) {
        Py_BEGIN_ALLOW_THREADS
        right = core_record(&places.shard, record, at, data, size) &&
                core_values(data, size, kinds, (size_t)fields, values);
        Py_END_ALLOW_THREADS
    }
    found = right ? sample_of(values, names, kinds) : Py_NewRef(Py_None);
done:
    free(data), free(values);
    PyBuffer_Release(&places.array);
    return found;
}

PyDoc_STRVAR(samples_doc,
             "samples(block: bytes-like, ends: int64 array, seed: int, names: tuple, kinds: bytes, /)\n"
             "    -> list of dicts\n\n"
             "The samples of adjacent records in a block; it ends before the first record that is not\n"
             "right, or is for Python to decode. seed: with the number of the first record added.");

static PyObject *samples(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer block, ends;
    unsigned long long seed;
    PyObject *names, *found = NULL;
    const char *kinds;
    Py_ssize_t fields;
    if (!PyArg_ParseTuple(args, "y*O&KO!y#:samples", &block, int64_array, &ends, &seed,
                          &PyTuple_Type, &names, &kinds, &fields))
        return NULL;
    int64_t count = ends.len / 8, begin = 0, whole = 0;
    const int64_t *bounds = ends.buf;
    const uint8_t *data = block.buf;
    core_value *values = values_of(fields, names);
    if (!values)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t stop; whole < count; whole++, begin = stop) {
        stop = bounds[whole];
        if (stop < begin || stop > block.len ||
            core_verify(data + begin, (size_t)(stop - begin), seed + (uint64_t)whole) < 0)
            break;
    }
    Py_END_ALLOW_THREADS
    found = PyList_New(0);
    begin = 0;
    for (int64_t i = 0, stop; found && i < whole; i++, begin = stop) {
        stop = bounds[i];
        if (stop < begin || stop > block.len || /* anew: another thread may have written there */
            !core_values(data + begin, (size_t)(stop - begin), kinds, (size_t)fields, values))
            break;
        PyObject *sample = sample_of(values, names, kinds);
        if (sample == Py_None) {
            Py_DECREF(sample);
            break;
        }
        if (!sample || PyList_Append(found, sample) < 0)
            Py_CLEAR(found);
        Py_XDECREF(sample);
    }
done:
    free(values);
    PyBuffer_Release(&block), PyBuffer_Release(&ends);
    return found;
}

PyDoc_STRVAR(rewrite_doc,
             "rewrite(data: bytes-like, interval: int, max_pixels: int = 2**28, /) -> bytes | str\n\n"
             "The same JPEG, baseline, with a restart marker each `interval` MCUs and the best\n"
             "Huffman tables; coefficients compared. APPn and COM before the first scan are kept.\n"
             "A str says why there is none.");

static PyObject *rewrite(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer data;
    unsigned int interval;
    unsigned long long max_pixels = 1ull << 28;
    if (!PyArg_ParseTuple(args, "y*I|K:rewrite", &data, &interval, &max_pixels))
        return NULL;
    if (interval > 0xFFFF) { /* what DRI can say */
        PyBuffer_Release(&data);
        PyErr_SetString(PyExc_ValueError, "rewrite: interval is over 65535");
        return NULL;
    }
    uint8_t *result;
    size_t size;
    char words[CORE_WORDS];
    const char *reason;
    Py_BEGIN_ALLOW_THREADS
    reason = core_rewrite(data.buf, (size_t)data.len, interval, max_pixels, &result, &size, words);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    if (reason && !strcmp(reason, "no memory"))
        return PyErr_NoMemory(); /* says nothing of the file */
    if (reason)
        return PyUnicode_FromString(reason);
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)result, (Py_ssize_t)size);
    free(result);
    return bytes;
}

PyDoc_STRVAR(copy_doc,
             "copy(to, data, /) -> None\n\nThe bytes of `data` to the beginning of `to`, which is "
             "writable and no shorter.");

static PyObject *copy(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer to, data;
    if (!PyArg_ParseTuple(args, "w*y*:copy", &to, &data))
        return NULL;
    int fits = data.len <= to.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        core_copy(to.buf, data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&data);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "copy: `to` is shorter than the data");
    Py_RETURN_NONE;
}

PyDoc_STRVAR(header_doc,
             "header(data: bytes-like, /) -> (width, height, orientation) | None\n\n"
             "Of a JPEG, as stored; orientation is EXIF's, or 0 where PIL should be asked.");

static PyObject *header(PyObject *Py_UNUSED(self), PyObject *object)
{
    Py_buffer data;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    core_jpeg jpeg; /* a microsecond: not worth to release the GIL */
    bool found = core_jpeg_parse(data.buf, (size_t)data.len, &jpeg);
    PyBuffer_Release(&data);
    if (!found)
        Py_RETURN_NONE;
    return Py_BuildValue("III", jpeg.width, jpeg.height, jpeg.orientation);
}

PyDoc_STRVAR(crop_doc,
             "crop(data: bytes-like, box: 4 floats, out: (H, W, 3) uint8, interpolation: str,\n"
             "     scale: int, max_pixels: int, /) -> bool\n\n"
             "A part of a JPEG, resized to out, which may have any strides but in the last axis.\n"
             "scale: 1, or 2, 4, 8 to decode it so many times smaller, where the box then lies.\n"
             "False, and out as it was, when it is not a flawless JPEG that libjpeg makes RGB.");

static int filter_named(PyObject *object, void *filter)
{
    static const struct {
        const char *name;
        char filter;
    } filters[] = {{"bilinear", CORE_BILINEAR}, {"bicubic", CORE_BICUBIC}, {"box", CORE_BOX},
                   {"lanczos", CORE_LANCZOS},   {"hamming", CORE_HAMMING}};
    for (size_t i = 0; PyUnicode_Check(object) && i < sizeof filters / sizeof *filters; i++)
        if (!PyUnicode_CompareWithASCIIString(object, filters[i].name)) {
            *(char *)filter = filters[i].filter;
            return 1;
        }
    PyErr_Format(PyExc_ValueError, "crop: no interpolation %R", object);
    return 0;
}

static PyObject *crop(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer data, out;
    core_crop_spec part = {0};
    PyObject *object;
    unsigned long long max_pixels;
    if (!PyArg_ParseTuple(args, "y*(ffff)OO&iK:crop", &data, &part.box[0], &part.box[1],
                          &part.box[2], &part.box[3], &object, filter_named, &part.filter,
                          &part.scale, &max_pixels))
        return NULL;
    part.max_pixels = max_pixels;
    if (PyObject_GetBuffer(object, &out, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&data);
        return NULL;
    }
    bool fits = out.ndim == 3 && out.itemsize == 1 && out.shape[2] == 3 && out.strides[2] == 1;
    for (int i = 0; fits && i < 2; i++)
        fits = out.shape[i] >= 1 && out.shape[i] <= 1 << 15;
    bool done = false;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "crop: out is not (H, W, 3) uint8 with pixels as wholes");
    else if (part.scale != 1 && part.scale != 2 && part.scale != 4 && part.scale != 8)
        PyErr_SetString(PyExc_ValueError, "crop: scale is none of 1, 2, 4, 8");
    else {
        part.out = out.buf;
        part.height = (int)out.shape[0];
        part.width = (int)out.shape[1];
        part.down = out.strides[0];
        part.right = out.strides[1];
        Py_BEGIN_ALLOW_THREADS
        done = core_crop(data.buf, (size_t)data.len, &part);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&data);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

/* The bytes of a sequence of bytes-like objects. */
struct held {
    PyObject *blobs; /* a tuple of ours: no other thread can change it */
    Py_ssize_t count;
    Py_buffer *buffers;
    const uint8_t **data;
    size_t *sizes;
};

static void let_go(struct held *held)
{
    while (held->count)
        PyBuffer_Release(held->buffers + --held->count);
    PyMem_Free(held->buffers);
    PyMem_Free(held->data);
    PyMem_Free(held->sizes);
    Py_CLEAR(held->blobs);
}

static bool hold(struct held *held, PyObject *sequence)
{
    *held = (struct held){.blobs = PySequence_Tuple(sequence)};
    if (!held->blobs)
        return false;
    Py_ssize_t count = PyTuple_GET_SIZE(held->blobs);
    held->buffers = PyMem_New(Py_buffer, count + 1);
    held->data = PyMem_New(const uint8_t *, count + 1);
    held->sizes = PyMem_New(size_t, count + 1);
    if (!held->buffers || !held->data || !held->sizes) {
        PyErr_NoMemory();
        let_go(held);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++, held->count++) {
        PyObject *blob = PyTuple_GET_ITEM(held->blobs, i);
        if (PyObject_GetBuffer(blob, held->buffers + i, PyBUF_SIMPLE) < 0) {
            let_go(held);
            return false;
        }
        held->data[i] = held->buffers[i].buf;
        held->sizes[i] = (size_t)held->buffers[i].len;
    }
    return true;
}

/* Whether `out` is contiguous (N, H, W, 3) uint8 with so many rows at least. */
static bool takes(const Py_buffer *out, Py_ssize_t count, Py_ssize_t side)
{
    return out->ndim == 4 && out->itemsize == 1 && out->shape[3] == 3 && out->shape[0] >= count &&
           out->shape[1] >= 1 && out->shape[1] <= side && out->shape[2] >= 1 &&
           out->shape[2] <= side;
}

PyDoc_STRVAR(decode_many_doc,
             "decode_many(blobs: sequence of bytes-like, out: (N, H, W, 3) uint8, /) -> int\n\n"
             "JPEGs of just W x H to the first rows of out; how many before one was not flawless.");

static PyObject *decode_many(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *sequence, *object;
    struct held held;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "OO:decode_many", &sequence, &object) || !hold(&held, sequence))
        return NULL;
    if (PyObject_GetBuffer(object, &out, PyBUF_ND | PyBUF_WRITABLE) < 0) {
        let_go(&held);
        return NULL;
    }
    size_t done = 0;
    bool fits = takes(&out, held.count, 65535);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        done = core_decode_many(held.data, held.sizes, (size_t)held.count, (unsigned)out.shape[2],
                                (unsigned)out.shape[1], out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    let_go(&held);
    if (!fits)
        return PyErr_Format(PyExc_ValueError,
                            "decode_many: out is not (N, H, W, 3) uint8 for all");
    return PyLong_FromSize_t(done);
}

PyDoc_STRVAR(headers_doc,
             "headers(blobs: sequence of bytes-like, /) -> bytes\n\n"
             "Of each what header() gives, as three uint32; zeros where that is None.");

static PyObject *headers(PyObject *Py_UNUSED(self), PyObject *sequence)
{
    struct held held;
    if (!hold(&held, sequence))
        return NULL;
    PyObject *found = PyBytes_FromStringAndSize(NULL, held.count * 12);
    if (found) {
        uint32_t *at = (uint32_t *)(void *)PyBytes_AS_STRING(found);
        for (Py_ssize_t i = 0; i < held.count; i++, at += 3) {
            core_jpeg jpeg;
            bool known = core_jpeg_parse(held.data[i], held.sizes[i], &jpeg);
            at[0] = known ? jpeg.width : 0;
            at[1] = known ? jpeg.height : 0;
            at[2] = known ? jpeg.orientation : 0;
        }
    }
    let_go(&held);
    return found;
}

PyDoc_STRVAR(crop_many_doc,
             "crop_many(blobs: sequence of bytes-like, boxes: (N, 4) float32, flips: (N,) bool,\n"
             "          out: (N, H, W, 3) uint8, interpolation: str, max_pixels: int, /) -> bytes\n\n"
             "What crop() makes of each with a scale of 1, to the rows of out, mirrored where it is\n"
             "asked for. Of each a byte: 1 where it is made; the row is as it was where it is not.");

static PyObject *crop_many(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *sequence, *object, *made = NULL;
    struct held held;
    Py_buffer boxes, flips, out;
    char filter;
    unsigned long long max_pixels;
    if (!PyArg_ParseTuple(args, "Oy*y*OO&K:crop_many", &sequence, &boxes, &flips, &object,
                          filter_named, &filter, &max_pixels))
        return NULL;
    if (!hold(&held, sequence))
        goto boxes;
    if (PyObject_GetBuffer(object, &out, PyBUF_ND | PyBUF_WRITABLE) < 0)
        goto held;
    Py_ssize_t count = held.count;
    if (!takes(&out, count, 1 << 15) || flips.len != count ||
        boxes.len != count * 4 * (Py_ssize_t)sizeof(float)) {
        PyErr_SetString(PyExc_ValueError, "crop_many: boxes, flips or out do not fit the blobs");
        goto out;
    }
    core_crop_spec *parts = PyMem_New(core_crop_spec, count + 1);
    made = parts ? PyBytes_FromStringAndSize(NULL, count) : PyErr_NoMemory();
    if (made) {
        size_t line = (size_t)out.shape[2] * 3, row = line * (size_t)out.shape[1];
        for (Py_ssize_t i = 0; i < count; i++) {
            bool flip = ((const char *)flips.buf)[i] != 0;
            core_crop_spec part = {.scale = 1, .filter = filter, .max_pixels = max_pixels,
                              .height = (int)out.shape[1], .width = (int)out.shape[2],
                              .down = (ptrdiff_t)line, .right = flip ? -3 : 3};
            part.out = (uint8_t *)out.buf + row * (size_t)i + (flip ? line - 3 : 0);
            memcpy(part.box, (const char *)boxes.buf + (size_t)i * sizeof part.box,
                   sizeof part.box);
            parts[i] = part;
        }
        uint8_t *done = (uint8_t *)PyBytes_AS_STRING(made);
        bool enough;
        Py_BEGIN_ALLOW_THREADS
        enough = core_crop_many(held.data, held.sizes, (size_t)count, parts, done);
        Py_END_ALLOW_THREADS
        if (!enough) {
            PyErr_NoMemory();
            Py_CLEAR(made);
        }
    }
    PyMem_Free(parts);
out:
    PyBuffer_Release(&out);
held:
    let_go(&held);
boxes:
    PyBuffer_Release(&boxes);
    PyBuffer_Release(&flips);
    return made;
}

static PyMethodDef methods[] = {
    {"header", header, METH_O, header_doc},
    {"crop", crop, METH_VARARGS, crop_doc},
    {"headers", headers, METH_O, headers_doc},
    {"crop_many", crop_many, METH_VARARGS, crop_many_doc},
    {"decode_many", decode_many, METH_VARARGS, decode_many_doc},
    {"copy", copy, METH_VARARGS, copy_doc},
    {"rewrite", rewrite, METH_VARARGS, rewrite_doc},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef of_records[] = { /* only where the core checks them */
    {"gather", gather, METH_VARARGS, gather_doc},
    {"blobs", blobs, METH_VARARGS, blobs_doc},
    {"join", join, METH_VARARGS, join_doc},
    {"split", split, METH_VARARGS, split_doc},
    {"sample", sample, METH_VARARGS, sample_doc},
    {"samples", samples, METH_VARARGS, samples_doc},
    {NULL, NULL, 0, NULL},
};

/* shardio.native takes no core of another number: one more where a function is new or changes. */
static int prepare(PyObject *module)
{
    if (core_checks && PyModule_AddFunctions(module, of_records) < 0)
        return -1;
    if (PyModule_AddStringConstant(module, "libjpeg", core_libjpeg) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "interface", 7);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, prepare},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shardio.native._core",
    .m_doc = "The compiled core of shardio; see shardio/native/__init__.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}

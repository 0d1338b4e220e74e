/* `copy(target, source)` of large memory past the processor's cache.
 *
 * An ordinary copy of what the cache cannot hold fetches each line of the target before it writes it: three
 * bytes move for each that is copied, two with stores that go past the cache. The C library does so from some
 * ten megabytes on, and most tensors are smaller than that.
 *
 * Only CPython's API. Where the processor has no such stores it is `memcpy`. Other threads run meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>

enum { LINE = 64, PAGE = 4096, PAGES = 8, BEHIND = 8 };

static void line(char *target, const char *source) {
    __m128i a = _mm_loadu_si128((const __m128i *)source);
    __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
    _mm_stream_si128((__m128i *)target, a);
    _mm_stream_si128((__m128i *)(target + 16), b);
    _mm_stream_si128((__m128i *)(target + 32), c);
    _mm_stream_si128((__m128i *)(target + 48), d);
}

/* A line of each of a few pages in turn: the processor fetches ahead within a page, so in each of them at once. */
static void pages(char *target, const char *source) {
    for (size_t at = 0; at < PAGE; at += LINE) {
        for (size_t page = 0; page < PAGES * PAGE; page += PAGE) {
            line(target + page + at, source + page + at);
        }
    }
}

#if defined(__GNUC__) && defined(__x86_64__)
/* The same with a line in one store, a tenth faster. Chosen where it runs: the build knows no such processor. */
__attribute__((target("avx512f"))) static void wide_pages(char *target, const char *source) {
    for (size_t at = 0; at < PAGE; at += LINE) {
        for (size_t page = 0; page < PAGES * PAGE; page += PAGE) {
            _mm512_stream_si512((void *)(target + page + at), _mm512_loadu_si512(source + page + at));
        }
    }
}

static int is_wide(void) { return __builtin_cpu_supports("avx512f"); }
#else
static void wide_pages(char *target, const char *source) { pages(target, source); }

static int is_wide(void) { return 0; }
#endif

/* The same, one page after another. */
static void each_page(char *target, const char *source) {
    for (size_t at = 0; at < PAGES * PAGE; at += LINE) {
        line(target + at, source + at);
    }
}

/* Whether a line that is read lies in its page where one of the last that were written lies in another. A
 * processor may tell them apart by these bits alone, and have the one wait for the other: with pages in turn
 * that took five times as long on one of AMD's.
 */
static int meets(const char *target, const char *source) {
    size_t ahead = (size_t)((uintptr_t)source - (uintptr_t)target) & (PAGE - 1);
    return ahead < LINE || ahead > PAGE - BEHIND * LINE;
}

static void stream(char *target, const char *source, size_t size) {
    void (*in_turn)(char *, const char *) = is_wide() ? wide_pages : pages;
    void (*copied)(char *, const char *) = meets(target, source) ? each_page : in_turn;
    size_t head = (size_t)(-(uintptr_t)target) & (LINE - 1);
    head = head < size ? head : size;
    memcpy(target, source, head);
    target += head, source += head, size -= head;
    size_t step = PAGES * PAGE;
    for (; size >= step; target += step, source += step, size -= step) {
        copied(target, source);
    }
    for (; size >= LINE; target += LINE, source += LINE, size -= LINE) {
        line(target, source);
    }
    _mm_sfence(); /* such stores are seen by others only in some order, until here */
    memcpy(target, source, size);
}
#else
static void stream(char *target, const char *source, size_t size) { memcpy(target, source, size); }
#endif

static PyObject *copy(PyObject *module, PyObject *args) {
    Py_buffer target, source;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*:copy", &target, &source)) {
        return NULL;
    }
    int fits = target.len == source.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        stream(target.buf, source.buf, (size_t)target.len);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fit into %zd", source.len, target.len);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    if (!fits) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
        "copy(target, source, /)\n--\n\nCopy memory to memory of the same size that it does not meet."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "stream_copy",
    .m_doc = "Copies past the processor's cache.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_stream_copy(void) { return PyModule_Create(&definition); }

/* `watch(memory)` and `unwatch()`: looking at a mapping of a file that another program may cut short.
 *
 * A page that is no longer in the file is a signal (SIGBUS), which ends the process. For the memory that a
 * thread watches, the handler puts pages of zeros in the place of those from there on, and the thread goes on;
 * `unwatch` says so. The signal comes to the thread that looked, so what it watches is that thread's own. Of
 * other memory, the handler that was there before is called.
 *
 * Only CPython's API. `watch` and `unwatch` hold the GIL, which is what guards `watchers`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static _Thread_local volatile uintptr_t low, high; /* what is watched; not at all: both 0 */
static _Thread_local volatile sig_atomic_t torn;

static struct sigaction before;
static int watchers;
static uintptr_t page;

static void on_signal(int number, siginfo_t *what, void *context) {
    uintptr_t at = (uintptr_t)what->si_addr & ~(page - 1);
    (void)context;
    if (at + page > low && at < high) {
        uintptr_t end = (high + page - 1) & ~(page - 1);
        int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS;
        if (mmap((void *)at, end - at, PROT_READ, flags, -1, 0) != MAP_FAILED) {
            torn = 1;
            return;
        }
    }
    sigaction(number, &before, NULL); /* and the same comes again, to whom it concerns */
}

static PyObject *watch(PyObject *module, PyObject *memory) {
    Py_buffer view;
    struct sigaction ours = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    (void)module;
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE)) {
        return NULL;
    }
    torn = 0, low = (uintptr_t)view.buf, high = low + (uintptr_t)view.len;
    PyBuffer_Release(&view);
    if (!watchers++) {
        sigaction(SIGBUS, &ours, &before);
    }
    Py_RETURN_NONE;
}

static PyObject *unwatch(PyObject *module, PyObject *args) {
    (void)module, (void)args;
    low = high = 0;
    if (!--watchers) {
        sigaction(SIGBUS, &before, NULL);
    }
    return PyBool_FromLong(torn);
}

static PyMethodDef methods[] = {
    {"watch", watch, METH_O,
        "watch(memory, /)\n--\n\nFrom here on what this thread finds cut off of `memory` is zeros to it."},
    {"unwatch", unwatch, METH_NOARGS, "unwatch()\n--\n\nNo longer; whether something was cut off."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "cut_short",
    .m_doc = "Mappings of files that are cut short.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_cut_short(void) {
    page = (uintptr_t)sysconf(_SC_PAGESIZE);
    return PyModule_Create(&definition);
}

/* The two doors of a known call, in C: `DTensor.__torch_function__` and `DTensor.__torch_dispatch__`; and what
 * stands before the first of them inside `spmd`, whose mode torch asks instead.
 *
 * Nothing is decided here. A door looks whether Python has left a recipe for exactly this call (`short.Short`,
 * found by the key that `call._collect` makes), asks what may be otherwise at each call, and does what Python
 * does then: unwrap, call, wrap. Whatever it does not know it hands to the Python function that it stands
 * before, with the very arguments; that function answers, and leaves a recipe where there is one.
 *
 * Only CPython's API: torch is what its Python objects are. The interpreter's lock is held throughout, and
 * other threads run inside of what is called, so every object that is used after a call is owned.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

#if PY_VERSION_HEX < 0x030D0000
#define PyObject_GetOptionalAttr _PyObject_LookupAttr
#endif

/* Raised, here and in `doors.py`, with every change of what doors are given or do: one that was built before
 * must not stand before functions of today. */
enum { VERSION = 16 };

/* What a door holds, by name: keyword arguments of its class. The first of each kind is the Python function. */
enum { PYTHON, OF_DISPATCH = 1, OF_BOUNDARY = 1, OF_BLOCK = 1, MOST_HELD = 32 };
enum {
    RECIPES = OF_DISPATCH, /* key -> Short */
    RECIPE,                /* the class Short */
    COPIES,                /* a dict: views that had to copy and are alive */
    MODES,                 /* how many modes see each op */
    INFERENCE,             /* is inference mode on? */
    SCALARS,               /* classes whose values are told apart by class and value */
    ORDINARY,              /* the class of DTensors */
    LOCALIZED,             /* the class of parameters that compute as their local tensor */
    NEW,                   /* makes a DTensor: (class, local, spec, requires_grad=) */
    WRAP,                  /* wrap.wrap */
    LOCAL,                 /* the slot of the local tensor */
    SPEC,                  /* the slot of the spec */
    MADE_BY,               /* the keyword arguments of NEW */
    LISTS,                 /* key -> ShortList, of calls on lists of tensors */
    LIST_OPS,              /* the ops that have such recipes */
    TENSOR,                /* torch.Tensor */
    HELPERS,               /* do plain tensors that an op meets count as replicated? */
    RAISE_VERSIONS,        /* tells autograd that tensors were written */
    WATCHING,              /* who remembers how often storages were written: with nobody, they do not count */
    HELD_OUTSIDE,          /* does a program hold local tensors? Its graphs may have saved some */
    FUNCTION_MODES,        /* how many modes see each function of torch */
    OPS_OF_ANY_NUMBER,     /* ops whose numbers are told apart by their class */
    ON_FORMS,              /* keys of calls that read finished forms, if such are kept, and nothing else */
    WITH_FORMS,            /* gives what such a call is given then */
    END_OF_DISPATCH
};
enum {
    COMPILER = OF_BOUNDARY, /* the names of torch.compiler: does torch trace? */
    HARMLESS,               /* classes that are known to be no foreign tensors */
    READING,                /* functions that read to the host */
    OWN,                    /* functions that are done in a way of our own */
    STATE,                  /* counts, per thread, in how many functions of torch it is */
    BELOW,                  /* calls a function without asking the classes of its arguments */
    PLAIN,                  /* torch.Tensor */
    MADE,                   /* judges a plain result */
    OF_ONE_MESH,            /* classes of tensors that must be on one mesh, their base first; or none */
    SPEC_OF,                /* the slot of their specs */
    OF_LISTS,               /* functions that take lists of tensors, and plain ones of one element beside them */
    LOOKUPS,                /* functions that may write what they read, as a keyword argument says */
    LOOKS,                  /* functions that look at what a tensor says of itself, and run no op */
    OURS,                   /* the classes of DTensors */
    BELOW_IT,               /* the door of dispatch */
    FUNCTIONS,              /* function -> may it be whole? */
    MEET,                   /* says so of a function that is not there */
    WHOLE,                  /* key -> Short of a whole function, or False */
    WHOLE_LISTS,            /* the same of functions of lists: ShortList */
    FIRST,                  /* runs a call of which nothing is known, and learns */
    QUIET,                  /* functions that say 0 where nothing stands around calls */
    FORWARD,                /* the names of torch.autograd.forward_ad */
    GRADIENTS,              /* are gradients recorded? */
    OF_ANY_NUMBER,          /* functions whose numbers are told apart by their class */
    MIXING,                 /* functions that see the local tensors of localized parameters beside plain ones */
    LOCALIZE,               /* the local tensor of a localized parameter, differentiably */
    NODES,                  /* functions that may be one node of a graph of gradients */
    NODE_CALLS,             /* key -> what runs such a call, or False */
    PACKING,                /* who packs what graphs save */
    INNER,                  /* `whole_inside`, made here */
    END_OF_BOUNDARY
};
_Static_assert(
    (int)END_OF_DISPATCH <= (int)MOST_HELD && (int)END_OF_BOUNDARY <= (int)MOST_HELD, "a door holds less than it is given");

enum {
    OF_NAMES = OF_BLOCK, /* the names of torch.compiler */
    OF_MODES,            /* how many modes see each function of torch */
    OF_ARGUMENTS,        /* classes of arguments that a block leaves as they are */
    OF_TENSORS,          /* the class of DTensors */
    ENTRANCE,            /* their door: `boundary` */
    END_OF_BLOCK
};
static const char *const held_by_block[] = {"compiler", "function_modes", "simple", "ours", "boundary", NULL};
static const char *const held_by_dispatch[] = {"recipes", "recipe", "copies", "modes", "inference", "scalars",
    "ordinary", "localized", "new", "wrap", "local", "spec", "made_by", "lists", "list_ops", "tensor", "helpers",
    "raise_versions", "watching", "held_outside", "function_modes", "ops_of_any_number", "on_forms", "with_forms", NULL};
static const char *const held_by_boundary[] = {
    "compiler", "harmless", "reading", "own", "state", "below", "plain", "made",
    "of_one_mesh", "spec_of", "of_lists", "lookups", "looks", "ours", "below_it", "functions", "meet",
    "whole", "whole_lists", "first", "quiet", "forward", "gradients", "of_any_number", "mixing", "localize",
    "nodes", "node_calls", "packing", NULL};

/* The fields of a recipe, in the order of `short.Short`. */
enum { CALL, RESULTS, SEVERAL, WRITTEN, OVERRIDES, PLACED, BEGINS, BINDING, HOLDS, FIELDS };
/* Those of a recipe of lists, in the order of `short.ShortList`; the first two are as above. */
enum { WRITES = RESULTS + 1, NO_VIEWS, VERSIONS, DENSE, FIELDS_OF_LISTS };

static PyObject *str_token, *str_use, *str_storage_offset, *str_untyped_storage, *str_writes, *str_base;
static PyObject *str_functions, *str_out, *str_offset, *str_op, *str_compiles, *str_mesh, *no_arguments;
static PyObject *str_shape, *str_dtype, *str_numel, *str_is_contiguous, *str_pending;
static PyObject *str_requires_grad, *str_is_inference, *str_level;
/* What `whole_inside` gives where it has no result: the call goes the way through torch, or is learned there. */
static PyObject *goes_on, *is_new;

/* ------------------------------------------------------------------------------------------------ doors */

/* A classmethod, so that whoever looks at the class without calling it (torch._dynamo) finds the Python
 * function; but looked up as an attribute it is itself, and called it is C. */
typedef struct {
    vectorcallfunc call;
    const char *const *names;
    Py_ssize_t local_at, spec_at;
    PyObject *held[MOST_HELD];
} Door;

static Door *door_of(PyObject *self) {
    return (Door *)((char *)self + PyClassMethod_Type.tp_basicsize);
}

static PyObject *get_itself(PyObject *self, PyObject *object, PyObject *type) {
    (void)object;
    (void)type;
    return Py_NewRef(self);
}

static int door_traverse(PyObject *self, visitproc visit, void *arg) {
    Door *door = door_of(self);
    for (int i = 0; i < MOST_HELD; i++) {
        Py_VISIT(door->held[i]);
    }
    Py_VISIT(Py_TYPE(self));
    return PyClassMethod_Type.tp_traverse(self, visit, arg);
}

static int door_clear(PyObject *self) {
    Door *door = door_of(self);
    for (int i = 0; i < MOST_HELD; i++) {
        Py_CLEAR(door->held[i]);
    }
    return PyClassMethod_Type.tp_clear(self);
}

static void door_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Door *door = door_of(self);
    for (int i = 0; i < MOST_HELD; i++) {
        Py_CLEAR(door->held[i]);
    }
    PyClassMethod_Type.tp_dealloc(self);
    Py_DECREF(type);
}

/* Where in an object the slot lies that a member descriptor describes; -1: an error is set. */
static Py_ssize_t place_of(PyObject *slot) {
    if (!Py_IS_TYPE(slot, &PyMemberDescr_Type)) {
        PyErr_SetString(PyExc_TypeError, "not the descriptor of a slot");
        return -1;
    }
    return ((PyMemberDescrObject *)slot)->d_member->offset;
}

static int door_init(PyObject *self, PyObject *args, PyObject *kwargs, const char *const *names) {
    Door *door = door_of(self);
    if (PyClassMethod_Type.tp_init(self, args, NULL) < 0) {
        return -1;
    }
    Py_XSETREF(door->held[PYTHON], Py_NewRef(PyTuple_GET_ITEM(args, 0)));
    for (int i = 0; names[i] != NULL; i++) {
        PyObject *value = kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, names[i]);
        if (value == NULL) {
            PyErr_Format(PyExc_TypeError, "a door needs %s", names[i]);
            return -1;
        }
        Py_XSETREF(door->held[1 + i], Py_NewRef(value));
    }
    return 0;
}

/* The Python function behind the door, given what the door was given. */
static PyObject *python(Door *door, PyObject *cls, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    PyObject *given[8] = {NULL, cls};
    Py_ssize_t all = n + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    if (all > 6) {
        PyErr_SetString(PyExc_TypeError, "too many arguments");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < all; i++) {
        given[2 + i] = args[i];
    }
    return PyObject_Vectorcall(
        door->held[PYTHON], given + 1, (size_t)(n + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

/* --------------------------------------------------------------------------------------------- dispatch */

enum { FEW_PARTS = 160, FEW_OPERANDS = 64 };
enum Found { FAILED = -1, UNKNOWN = 0, FOUND = 1 };

/* Objects that are owned: a few in place, more of them elsewhere (an optimizer has thousands). */
typedef struct {
    Py_ssize_t size, room;
    PyObject **at;
} Many;

/* One call: the parts of its key, its operands, and their local tensors. on_lists: it is keyed as a call on
 * lists is (`list_arguments.Taken`), its numbers by themselves. of_any: numbers by themselves too, but for True and
 * False (`any_number`). plain: a plain tensor is among its arguments. */
typedef struct {
    Many part, operand, local, number;
    int on_lists, of_any, plain;
    PyObject *few_parts[FEW_PARTS];
    PyObject *few_numbers[FEW_OPERANDS];
    PyObject *few_operands[FEW_OPERANDS];
    PyObject *few_locals[FEW_OPERANDS];
} Call;

static void begin(Call *call) {
    call->part = (Many){0, FEW_PARTS, call->few_parts};
    call->operand = (Many){0, FEW_OPERANDS, call->few_operands};
    call->local = (Many){0, FEW_OPERANDS, call->few_locals};
    call->number = (Many){0, FEW_OPERANDS, call->few_numbers};
    call->on_lists = call->of_any = call->plain = 0;
}

/* Append, and take the reference. FAILED: an error is set. */
static enum Found add_to(Many *many, PyObject **few, PyObject *object) {
    if (object == NULL) {
        return FAILED;
    }
    if (many->size == many->room) {
        size_t bytes = (size_t)many->room * 2 * sizeof(PyObject *);
        PyObject **made = many->at == few ? PyMem_Malloc(bytes) : PyMem_Realloc(many->at, bytes);
        if (made == NULL) {
            Py_DECREF(object);
            PyErr_NoMemory();
            return FAILED;
        }
        if (many->at == few) {
            memcpy(made, few, (size_t)many->size * sizeof(PyObject *));
        }
        many->at = made;
        many->room *= 2;
    }
    many->at[many->size++] = object;
    return FOUND;
}

static void let_go_of(Many *many, PyObject **few) {
    for (Py_ssize_t i = 0; i < many->size; i++) {
        Py_DECREF(many->at[i]);
    }
    if (many->at != few) {
        PyMem_Free(many->at);
    }
}

static void let_go(Call *call) {
    let_go_of(&call->part, call->few_parts);
    let_go_of(&call->operand, call->few_operands);
    let_go_of(&call->local, call->few_locals);
    let_go_of(&call->number, call->few_numbers);
}

/* Append to the key; takes the reference. */
static enum Found append(Call *call, PyObject *part) {
    return add_to(&call->part, call->few_parts, part);
}

/* A DTensor: its token is a part of the key, its local tensor is what the local call gets. */
static enum Found collect_operand(Door *door, Call *call, PyObject *value, PyObject **given) {
    PyObject *local = *(PyObject **)((char *)value + door->local_at);
    PyObject *spec = *(PyObject **)((char *)value + door->spec_at);
    if (local == NULL || spec == NULL) {
        return UNKNOWN;
    }
    Py_INCREF(local);
    if (add_to(&call->operand, call->few_operands, Py_NewRef(value)) != FOUND ||
        add_to(&call->local, call->few_locals, Py_NewRef(local)) != FOUND) {
        Py_DECREF(local);
        return FAILED;
    }
    *given = local;
    Py_INCREF(spec);
    PyObject *token = PyObject_GetAttr(spec, str_token);
    Py_DECREF(spec);
    return append(call, token);
}

static enum Found collect(Door *door, Call *call, PyObject *value, PyObject **given);

/* A list: its length, then its elements. The local call gets a list of its own if a DTensor is in it. */
static enum Found collect_items(Door *door, Call *call, PyObject *value, PyObject **given) {
    Py_ssize_t before = call->operand.size, size = PySequence_Fast_GET_SIZE(value);
    enum Found found = append(call, PyLong_FromSsize_t(size));
    PyObject *made = found == FOUND ? PyList_New(size) : NULL;
    for (Py_ssize_t i = 0; made != NULL && i < size; i++) {
        PyObject *local = NULL;
        if (i >= PySequence_Fast_GET_SIZE(value)) { /* another thread took something out */
            found = UNKNOWN;
        } else {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            found = collect(door, call, item, &local);
            Py_DECREF(item);
        }
        if (found != FOUND) {
            Py_XDECREF(local);
            Py_CLEAR(made);
        } else {
            PyList_SET_ITEM(made, i, local);
        }
    }
    if (made == NULL) {
        return found == FOUND ? FAILED : found;
    }
    if (call->operand.size == before) {
        Py_SETREF(made, Py_NewRef(value));
    }
    *given = made;
    return FOUND;
}

/* The same; a list that holds itself has no end. */
static enum Found collect_list(Door *door, Call *call, PyObject *value, PyObject **given) {
    if (Py_EnterRecursiveCall(" in the arguments of a call")) {
        return FAILED;
    }
    enum Found found = collect_items(door, call, value, given);
    Py_LeaveRecursiveCall();
    return found;
}

/* A plain tensor among lists: what it is like. */
static enum Found collect_plain(Call *call, PyObject *value, PyObject **given) {
    enum Found found = append(call, PyObject_GetAttr(value, str_shape));
    found = found == FOUND ? append(call, PyObject_GetAttr(value, str_dtype)) : found;
    call->plain = 1;
    *given = Py_NewRef(value);
    return found;
}

static int is_number(PyTypeObject *type) {
    return type == &PyFloat_Type || type == &PyLong_Type || type == &PyBool_Type || type == &PyComplex_Type;
}

/* Does the key tell values of this class by their class alone? */
static int is_by_class(Call *call, PyTypeObject *type) {
    return (call->on_lists || (call->of_any && type != &PyBool_Type)) && is_number(type);
}

/* Append what identifies a value, as `call._collect` does; `given`, a new reference: what stands for it in the
 * local call. UNKNOWN: a value that only Python knows how to take. */
static enum Found collect(Door *door, Call *call, PyObject *value, PyObject **given) {
    PyTypeObject *type = Py_TYPE(value);
    if ((PyObject *)type == door->held[ORDINARY] || (PyObject *)type == door->held[LOCALIZED]) {
        return collect_operand(door, call, value, given);
    }
    if (value == Py_None) {
        *given = Py_NewRef(value);
        enum Found found = append(call, Py_NewRef((PyObject *)type));
        return found == FOUND && call->on_lists ? append(call, Py_NewRef(value)) : found;
    }
    if (PyList_Check(value) || PyTuple_Check(value)) {
        return collect_list(door, call, value, given);
    }
    if (call->on_lists && (PyObject *)type == door->held[TENSOR]) {
        return collect_plain(call, value, given);
    }
    if (is_by_class(call, type)) {
        *given = Py_NewRef(value);
        enum Found found = append(call, Py_NewRef((PyObject *)type));
        return found == FOUND ? add_to(&call->number, call->few_numbers, Py_NewRef(value)) : found;
    }
    int scalar = PySet_Contains(door->held[SCALARS], (PyObject *)type);
    if (scalar <= 0) {
        return scalar < 0 ? FAILED : UNKNOWN;
    }
    *given = Py_NewRef(value);
    enum Found found = append(call, Py_NewRef((PyObject *)type));
    return found == FOUND ? append(call, Py_NewRef(value)) : found;
}

/* The positional arguments of the local call; NULL with `found` set where there is none. */
static PyObject *collect_args(Door *door, Call *call, PyObject *args, enum Found *found) {
    Py_ssize_t n = PyTuple_GET_SIZE(args);
    PyObject *made = PyTuple_New(n);
    *found = made == NULL ? FAILED : FOUND;
    for (Py_ssize_t i = 0; *found == FOUND && i < n; i++) {
        PyObject *given = NULL;
        *found = collect(door, call, PyTuple_GET_ITEM(args, i), &given);
        PyTuple_SET_ITEM(made, i, given);
    }
    if (*found != FOUND) {
        Py_CLEAR(made);
    }
    return made;
}

static PyObject *collect_kwargs(Door *door, Call *call, PyObject *kwargs, enum Found *found) {
    PyObject *made = PyDict_New(), *name, *value;
    Py_ssize_t place = 0;
    *found = made == NULL ? FAILED : FOUND;
    while (*found == FOUND && PyDict_Next(kwargs, &place, &name, &value)) {
        PyObject *given = NULL;
        *found = append(call, Py_NewRef(name));
        if (*found == FOUND) {
            *found = collect(door, call, value, &given);
        }
        if (*found == FOUND && PyDict_SetItem(made, name, given) < 0) {
            *found = FAILED;
        }
        Py_XDECREF(given);
    }
    if (*found != FOUND) {
        Py_CLEAR(made);
    }
    return made;
}

/* These objects in a tuple, which owns them from now on. */
static PyObject *tuple_of(Many *many) {
    PyObject *made = PyTuple_New(many->size);
    for (Py_ssize_t i = 0; made != NULL && i < many->size; i++) {
        PyTuple_SET_ITEM(made, i, many->at[i]);
    }
    many->size = made == NULL ? many->size : 0;
    return made;
}

/* What the recipe of a call on lists is where it holds for these numbers only. */
static PyObject *recipe_of_numbers(PyObject *table, Call *call, PyObject *key) {
    PyObject *numbers = tuple_of(&call->number);
    PyObject *all = numbers == NULL ? NULL : PySequence_Concat(key, numbers);
    PyObject *recipe = all == NULL ? NULL : PyDict_GetItemWithError(table, all);
    Py_XINCREF(recipe);
    Py_XDECREF(numbers);
    Py_XDECREF(all);
    return recipe;
}

/* The recipe of the call with this key in a table, a new reference; NULL with an error, or without: there is
 * none. */
static PyObject *recipe_of(PyObject *table, Call *call, PyObject *key) {
    PyObject *recipe = key == NULL ? NULL : PyDict_GetItemWithError(table, key);
    Py_XINCREF(recipe);
    if (recipe == Py_None) {
        Py_SETREF(recipe, recipe_of_numbers(table, call, key));
    }
    return recipe;
}

/* Does a function without arguments say 0 or False? -1: error. */
static int is_off(PyObject *asked) {
    PyObject *answer = PyObject_CallNoArgs(asked);
    int on = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return on < 0 ? -1 : !on;
}

static Py_ssize_t storage_offset(PyObject *x) {
    PyObject *offset = PyObject_CallMethodNoArgs(x, str_storage_offset);
    Py_ssize_t found = offset == NULL ? -1 : PyLong_AsSsize_t(offset);
    Py_XDECREF(offset);
    return found;
}

/* `wrap.wrap`: made here where the local tensor begins where the logical one does. */
static PyObject *wrapped(Door *door, PyObject *local, PyObject *spec, Py_ssize_t begin) {
    Py_ssize_t found = storage_offset(local);
    if (found == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (found != begin) {
        PyObject *names = PyTuple_Pack(1, str_offset), *offset = PyLong_FromSsize_t(begin), *made = NULL;
        if (names != NULL && offset != NULL) {
            PyObject *given[] = {NULL, local, spec, offset};
            made = PyObject_Vectorcall(
                door->held[WRAP], given + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
        }
        Py_XDECREF(names);
        Py_XDECREF(offset);
        return made;
    }
    PyObject *use = PyObject_GetAttr(spec, str_use);
    if (use == NULL) {
        return NULL;
    }
    PyObject *given = PyTuple_Pack(3, door->held[use == Py_None ? ORDINARY : LOCALIZED], local, spec);
    Py_DECREF(use);
    PyObject *made = given == NULL ? NULL : PyObject_Call(door->held[NEW], given, door->held[MADE_BY]);
    Py_XDECREF(given);
    return made;
}

/* Where result number `i` begins in memory on one device. */
static Py_ssize_t begin_of(PyObject *recipe, Py_ssize_t i, Py_ssize_t base) {
    PyObject *begins = PyTuple_GET_ITEM(recipe, BEGINS);
    return begins == Py_None ? base : PyLong_AsSsize_t(PyTuple_GET_ITEM(begins, i));
}

static PyObject *wrapped_one(Door *door, PyObject *recipe, Py_ssize_t i, PyObject *local, Py_ssize_t begin) {
    PyObject *spec = PyTuple_GET_ITEM(PyTuple_GET_ITEM(recipe, RESULTS), i);
    if (spec == Py_None || local == Py_None) {
        return Py_NewRef(local);
    }
    return wrapped(door, local, spec, begin);
}

/* The results of a call, in a list or tuple as it gave them. on_lists: each begins at 0. */
static PyObject *wrapped_several(Door *door, PyObject *recipe, PyObject *out, Py_ssize_t base, int on_lists) {
    int is_list = PyList_CheckExact(out);
    Py_ssize_t n = PyTuple_GET_SIZE(PyTuple_GET_ITEM(recipe, RESULTS));
    if ((!is_list && !PyTuple_CheckExact(out)) || PySequence_Fast_GET_SIZE(out) != n) {
        PyErr_SetString(PyExc_SystemError, "a known call gave other results than before");
        return NULL;
    }
    PyObject *made = is_list ? PyList_New(n) : PyTuple_New(n);
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) {
        Py_ssize_t begin = on_lists ? 0 : begin_of(recipe, i, base);
        PyObject *one = wrapped_one(door, recipe, i, PySequence_Fast_GET_ITEM(out, i), begin);
        if (one == NULL) {
            Py_CLEAR(made);
        } else if (is_list) {
            PyList_SET_ITEM(made, i, one);
        } else {
            PyTuple_SET_ITEM(made, i, one);
        }
    }
    return made;
}

/* The results of the local call as DTensors. */
static PyObject *wrapped_all(Door *door, PyObject *recipe, PyObject *out, Py_ssize_t base) {
    if (PyTuple_GET_ITEM(recipe, SEVERAL) == Py_True) {
        return wrapped_several(door, recipe, out, base, 0);
    }
    return wrapped_one(door, recipe, 0, out, begin_of(recipe, 0, base));
}

/* Put in the arguments that the local call has otherwise: ((place, value), ...). */
static int override(PyObject *recipe, PyObject *args) {
    PyObject *overrides = PyTuple_GET_ITEM(recipe, OVERRIDES);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(overrides); i++) {
        PyObject *pair = PyTuple_GET_ITEM(overrides, i);
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0));
        if (place < 0 || place >= PyTuple_GET_SIZE(args)) {
            PyErr_SetString(PyExc_SystemError, "a known call has fewer arguments than before");
            return -1;
        }
        PyObject *before = PyTuple_GET_ITEM(args, place);
        PyTuple_SET_ITEM(args, place, Py_NewRef(PyTuple_GET_ITEM(pair, 1)));
        Py_DECREF(before);
    }
    return 0;
}

/* What a tensor is a view of; itself if it is none. */
static PyObject *memory_of(PyObject *x) {
    PyObject *base = PyObject_GetAttr(x, str_base);
    if (base == Py_None) {
        Py_SETREF(base, Py_NewRef(x));
    }
    return base;
}

/* Does somebody remember how often a storage was written? */
static int is_watched(Door *door) {
    return PySet_GET_SIZE(door->held[WATCHING]) != 0;
}

/* Is nothing that the call reads a part of what it writes, on one device or in local memory? Where it is, one
 * device may refuse, or the local call needs copies: Python asks (`written_memory`). -1: error.
 * storage: that of what is written, where anybody asks for it, else NULL. */
static int lie_apart(Door *door, Call *call, Py_ssize_t written, PyObject **storage) {
    Py_ssize_t operands = call->operand.size;
    *storage = NULL;
    if (operands == 1 && !is_watched(door)) {
        return 1;
    }
    *storage = PyObject_CallMethodNoArgs(call->local.at[written], str_untyped_storage);
    PyObject *memory = *storage != NULL && operands > 1 ? memory_of(call->operand.at[written]) : NULL;
    int apart = *storage == NULL || (operands > 1 && memory == NULL) ? -1 : 1;
    for (Py_ssize_t i = 0; apart > 0 && i < operands; i++) {
        if (i == written) {
            continue;
        }
        PyObject *other = memory_of(call->operand.at[i]);
        PyObject *local = other == NULL ? NULL : PyObject_CallMethodNoArgs(call->local.at[i], str_untyped_storage);
        apart = local == NULL ? -1 : other != memory && local != *storage;
        Py_XDECREF(other);
        Py_XDECREF(local);
    }
    Py_XDECREF(memory);
    return apart;
}

/* `finished_forms.count_writes`, of a tensor without copied views; an error that is set stays. */
static int count_write(Door *door, PyObject *storage) {
    if (!is_watched(door)) {
        return 0;
    }
    PyObject *type, *value, *trace, *writes = NULL;
    PyErr_Fetch(&type, &value, &trace);
    int done = PyObject_GetOptionalAttr(storage, str_writes, &writes);
    if (done > 0) {
        Py_ssize_t before = PyLong_AsSsize_t(writes);
        PyObject *after = PyLong_FromSsize_t(before + 1);
        done = after == NULL ? -1 : PyObject_SetAttr(storage, str_writes, after);
        Py_XDECREF(after);
    }
    Py_XDECREF(writes);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
    }
    return done < 0 ? -1 : 0;
}

/* The local call: by the op's own binding to Python, unless modes would see a function that nobody called. */
static PyObject *call_locally(Door *door, PyObject *recipe, PyObject *args, PyObject *kwargs) {
    PyObject *callee = PyTuple_GET_ITEM(recipe, BINDING);
    int off = callee == Py_None ? 0 : is_off(door->held[FUNCTION_MODES]);
    if (off < 0) {
        return NULL;
    }
    return PyObject_Call(off ? callee : PyTuple_GET_ITEM(recipe, CALL), args, kwargs);
}

/* Does a question of this name, put to a tensor, have the answer yes? -1: error. */
static int says(PyObject *x, PyObject *question) {
    PyObject *answer = PyObject_CallMethodNoArgs(x, question);
    int yes = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return yes;
}

/* Tell autograd that tensors are written: below it nobody does. It passes over those of inference mode. */
static int raise_versions(Door *door, PyObject *told) {
    PyObject *raised = PyObject_CallOneArg(door->held[RAISE_VERSIONS], told);
    Py_XDECREF(raised);
    return raised != NULL ? 0 : -1;
}

/* `kept_form._local_memories`: the local tensor of what is written, and that of its base, if it may be a view. */
static int add_local_memories(Door *door, PyObject *told, PyObject *operand, PyObject *local, int may_be_view) {
    int done = PyList_Append(told, local);
    if (done < 0 || !may_be_view) {
        return done;
    }
    PyObject *base = memory_of(operand), *type = base == NULL ? NULL : (PyObject *)Py_TYPE(base);
    done = base == NULL ? -1 : 0;
    if (done == 0 && base != operand && (type == door->held[ORDINARY] || type == door->held[LOCALIZED])) {
        PyObject *memory = *(PyObject **)((char *)base + door->local_at);
        done = memory == NULL ? 0 : PyList_Append(told, memory);
    }
    Py_XDECREF(base);
    return done;
}

static int is_held_outside(Door *door) {
    return PySet_GET_SIZE(door->held[HELD_OUTSIDE]) != 0;
}

static int count_locally(Door *door, PyObject *operand, PyObject *local) {
    if (!is_held_outside(door)) {
        return 0;
    }
    PyObject *told = PyList_New(0);
    int done = told == NULL ? -1 : add_local_memories(door, told, operand, local, 1);
    done = done == 0 ? raise_versions(door, told) : done;
    Py_XDECREF(told);
    return done;
}

/* The call that writes an operand, and gives it. FOUND: `result` is set. */
static enum Found run_writing(
    Door *door, Call *call, PyObject *recipe, PyObject *args, PyObject *kwargs, PyObject **result) {
    Py_ssize_t written = PyLong_AsSsize_t(PyTuple_GET_ITEM(recipe, WRITTEN));
    PyObject *storage;
    int apart = lie_apart(door, call, written, &storage);
    if (apart <= 0) {
        Py_XDECREF(storage);
        return apart < 0 ? FAILED : UNKNOWN;
    }
    PyObject *out = call_locally(door, recipe, args, kwargs);
    int counted = count_write(door, storage);
    Py_XDECREF(storage);
    if (out != NULL && counted == 0) {
        counted = count_locally(door, call->operand.at[written], call->local.at[written]);
    }
    if (out == NULL || counted < 0) {
        Py_XDECREF(out);
        return FAILED;
    }
    Py_DECREF(out);
    *result = Py_NewRef(call->operand.at[written]);
    return FOUND;
}

/* Where the results begin on one device; UNKNOWN: Python must say. */
static enum Found begin_of_operand(Door *door, Call *call, PyObject *recipe, Py_ssize_t *base) {
    int off = is_off(door->held[INFERENCE]);
    if (off > 0) { /* what views a tensor of inference mode is one */
        int lasting = says(call->operand.at[0], str_is_inference);
        off = lasting < 0 ? -1 : !lasting;
    }
    if (off <= 0) {
        return off < 0 ? FAILED : UNKNOWN;
    }
    *base = storage_offset(call->operand.at[0]);
    if (*base == -1 && PyErr_Occurred()) {
        return FAILED;
    }
    /* stated beginnings are those of views of what begins at 0 */
    return *base == 0 || PyTuple_GET_ITEM(recipe, BEGINS) == Py_None ? FOUND : UNKNOWN;
}

/* The call as its recipe says. FOUND: `result` is set; UNKNOWN: this one is for Python after all. */
static enum Found run(Door *door, Call *call, PyObject *recipe, PyObject *args, PyObject *kwargs, PyObject **result) {
    int off = is_off(door->held[MODES]);
    if (off > 0 && PyTuple_GET_ITEM(recipe, HOLDS) != Py_None) {
        off = 1 - is_off(PyTuple_GET_ITEM(recipe, HOLDS));
        off = off > 1 ? -1 : off;
    }
    if (off <= 0) {
        return off < 0 ? FAILED : UNKNOWN;
    }
    if (override(recipe, args) < 0) {
        return FAILED;
    }
    if (PyTuple_GET_ITEM(recipe, WRITTEN) != Py_None) {
        return run_writing(door, call, recipe, args, kwargs, result);
    }
    Py_ssize_t base = 0;
    int placed = PyTuple_GET_ITEM(recipe, PLACED) == Py_True;
    enum Found found = placed ? begin_of_operand(door, call, recipe, &base) : FOUND;
    if (found != FOUND) {
        return found;
    }
    PyObject *out = call_locally(door, recipe, args, kwargs);
    if (out == NULL) { /* of a view whose local strides do not merge Python makes a copy */
        if (placed && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear();
            return UNKNOWN;
        }
        return FAILED;
    }
    *result = wrapped_all(door, recipe, out, base);
    Py_DECREF(out);
    return *result == NULL ? FAILED : FOUND;
}

/* Is it no view of another tensor? -1: error. */
static int is_no_view(PyObject *x) {
    PyObject *base = PyObject_GetAttr(x, str_base);
    int none = base == NULL ? -1 : base == Py_None;
    Py_XDECREF(base);
    return none;
}

/* ---- calls on lists: one decision for the lists, one call on the lists of local tensors */

/* Is what the recipe asks of each operand so? */
static enum Found as_asked(Call *call, PyObject *recipe) {
    int yes = 1;
    if (PyTuple_GET_ITEM(recipe, DENSE) == Py_True) {
        for (Py_ssize_t i = 0; yes > 0 && i < call->local.size; i++) {
            yes = says(call->local.at[i], str_is_contiguous);
        }
    }
    if (PyTuple_GET_ITEM(recipe, NO_VIEWS) == Py_True) {
        for (Py_ssize_t i = 0; yes > 0 && i < call->operand.size; i++) {
            yes = is_no_view(call->operand.at[i]);
        }
    }
    return yes < 0 ? FAILED : yes ? FOUND : UNKNOWN;
}

/* Operands from `first` up to `end` were written: their storages count it, and autograd is told. */
static int count_writes(Door *door, Call *call, PyObject *recipe, Py_ssize_t first, Py_ssize_t end, int ran) {
    PyObject *told = PyList_New(0);
    int done = told == NULL ? -1 : 0, may_be_views = PyTuple_GET_ITEM(recipe, NO_VIEWS) != Py_True;
    for (Py_ssize_t i = first; done == 0 && i < end && i < call->operand.size; i++) {
        if (is_watched(door)) {
            PyObject *storage = PyObject_CallMethodNoArgs(call->local.at[i], str_untyped_storage);
            done = storage == NULL ? -1 : count_write(door, storage);
            Py_XDECREF(storage);
        }
        if (done == 0 && ran && PyTuple_GET_ITEM(recipe, VERSIONS) == Py_True) {
            done = PyList_Append(told, call->operand.at[i]);
            if (done == 0 && is_held_outside(door)) {
                done = add_local_memories(door, told, call->operand.at[i], call->local.at[i], may_be_views);
            }
        }
    }
    if (done == 0 && PyList_GET_SIZE(told)) {
        done = raise_versions(door, told);
    }
    Py_XDECREF(told);
    return done;
}

static int count_all_writes(Door *door, Call *call, PyObject *recipe, int ran) {
    PyObject *writes = PyTuple_GET_ITEM(recipe, WRITES);
    int done = 0;
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_GET_SIZE(writes); i++) {
        PyObject *pair = PyTuple_GET_ITEM(writes, i);
        Py_ssize_t first = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0));
        done = count_writes(door, call, recipe, first, PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1)), ran);
    }
    return done;
}

/* New DTensors, in a list or a tuple as the call gave them; what it gave where the op gives nothing. */
static PyObject *wrapped_list(Door *door, PyObject *recipe, PyObject *out) {
    return PyTuple_GET_ITEM(recipe, RESULTS) == Py_None ? Py_NewRef(out) : wrapped_several(door, recipe, out, 0, 1);
}

static enum Found run_on_lists(
    Door *door, Call *call, PyObject *recipe, PyObject *args, PyObject *kwargs, PyObject **result) {
    int off = is_off(door->held[MODES]);
    if (off > 0 && PyTuple_GET_ITEM(recipe, VERSIONS) == Py_True) {
        off = is_off(door->held[INFERENCE]); /* elsewhere nothing that has no version can be written */
    }
    if (off <= 0) {
        return off < 0 ? FAILED : UNKNOWN;
    }
    enum Found found = as_asked(call, recipe);
    if (found != FOUND) {
        return found;
    }
    PyObject *out = PyObject_Call(PyTuple_GET_ITEM(recipe, CALL), args, kwargs);
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    if (out == NULL) { /* what it wrote before it failed counts */
        PyErr_Fetch(&type, &value, &trace);
    }
    int counted = count_all_writes(door, call, recipe, out != NULL);
    if (out == NULL) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
        return FAILED;
    }
    *result = counted < 0 ? NULL : wrapped_list(door, recipe, out);
    Py_DECREF(out);
    return *result == NULL ? FAILED : FOUND;
}

/* Is the op one of those whose calls have recipes as calls on lists? */
static int is_on_lists(PyObject *ops, PyObject *op, PyObject *args) {
    if (!PyTuple_GET_SIZE(args)) {
        return 0;
    }
    PyObject *first = PyTuple_GET_ITEM(args, 0);
    return PyList_Check(first) || PyTuple_Check(first) ? PySet_Contains(ops, op) : 0;
}

static enum Found run_known(Door *door, PyObject *func, PyObject *args, PyObject *kwargs, PyObject **result);

/* A call on pending values that may have been finished: on what `with_forms` gives in their place. UNKNOWN:
 * nothing was. */
static enum Found run_on_forms(
    Door *door, Call *call, PyObject *func, PyObject *args, PyObject *kwargs, PyObject **result) {
    int off = is_off(door->held[MODES]);
    if (off <= 0) {
        return off < 0 ? FAILED : UNKNOWN;
    }
    PyObject *named = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs), *operands = tuple_of(&call->operand);
    PyObject *given = named == NULL || operands == NULL
        ? NULL
        : PyObject_CallFunctionObjArgs(door->held[WITH_FORMS], func, args, named, operands, NULL);
    Py_XDECREF(named);
    Py_XDECREF(operands);
    if (given == NULL || given == Py_None) {
        Py_XDECREF(given);
        return given == NULL ? FAILED : UNKNOWN;
    }
    if (!PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) != 2 ||
        !PyTuple_CheckExact(PyTuple_GET_ITEM(given, 0)) || !PyDict_CheckExact(PyTuple_GET_ITEM(given, 1))) {
        PyErr_SetString(PyExc_SystemError, "a call on finished forms is given no arguments");
        Py_DECREF(given);
        return FAILED;
    }
    PyObject *all[] = {func, no_arguments, PyTuple_GET_ITEM(given, 0), PyTuple_GET_ITEM(given, 1)};
    enum Found found = run_known(door, func, all[2], all[3], result);
    if (found == UNKNOWN) {
        *result = python(door, door->held[ORDINARY], all, 4, NULL);
        found = *result == NULL ? FAILED : FOUND;
    }
    Py_DECREF(given);
    return found;
}

static enum Found run_known(Door *door, PyObject *func, PyObject *args, PyObject *kwargs, PyObject **result) {
    Call call;
    PyObject *op, *local_args, *local_kwargs = NULL, *recipe = NULL, *key = NULL;
    int on_forms = 0;
    int is_op = PyObject_GetOptionalAttr(func, str_op, &op);
    if (is_op <= 0) {
        return is_op < 0 ? FAILED : UNKNOWN;
    }
    enum Found found;
    begin(&call);
    append(&call, op);
    call.on_lists = is_on_lists(door->held[LIST_OPS], op, args);
    call.of_any = call.on_lists ? 0 : PySet_Contains(door->held[OPS_OF_ANY_NUMBER], op);
    if (call.on_lists < 0 || call.of_any < 0) {
        let_go(&call);
        return FAILED;
    }
    local_args = collect_args(door, &call, args, &found);
    if (found == FOUND && kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        local_kwargs = collect_kwargs(door, &call, kwargs, &found);
    }
    if (found == FOUND && call.plain) {
        found = append(&call, PyObject_CallNoArgs(door->held[HELPERS]));
    }
    if (found == FOUND) {
        key = tuple_of(&call.part);
        recipe = recipe_of(door->held[call.on_lists ? LISTS : RECIPES], &call, key);
        found = recipe != NULL ? FOUND : PyErr_Occurred() ? FAILED : UNKNOWN;
        on_forms = found == UNKNOWN && !call.on_lists ? PySet_Contains(door->held[ON_FORMS], key) : 0;
    }
    if (on_forms) {
        found = on_forms < 0 ? FAILED : run_on_forms(door, &call, func, args, kwargs, result);
    } else if (found == FOUND) {
        found = call.on_lists ? run_on_lists(door, &call, recipe, local_args, local_kwargs, result)
                              : run(door, &call, recipe, local_args, local_kwargs, result);
    }
    Py_XDECREF(key);
    Py_XDECREF(recipe);
    Py_XDECREF(local_args);
    Py_XDECREF(local_kwargs);
    let_go(&call);
    return found;
}

/* (func, types, args=(), kwargs={}) */
static PyObject *dispatch(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
    Door *door = door_of(self);
    Py_ssize_t n = PyVectorcall_NARGS(flags);
    PyObject *given = n > 2 ? args[2] : no_arguments;
    PyObject *named = n > 3 && args[3] != Py_None ? args[3] : NULL;
    if (names == NULL && n >= 2 && n <= 4 && PyTuple_CheckExact(given) &&
        (named == NULL || PyDict_CheckExact(named)) && PyDict_GET_SIZE(door->held[COPIES]) == 0) {
        PyObject *result = NULL;
        enum Found found = run_known(door, args[0], given, named, &result);
        if (found != UNKNOWN) {
            return found == FOUND ? result : NULL;
        }
    }
    return python(door, door->held[ORDINARY], args, n, names);
}

/* --------------------------------------------------------------------------------------------- boundary */

/* Is an object in a tuple, itself? Classes of tensors are equal to torch's by `==`, which is a call of Python. */
static int is_one_of(PyObject *several, PyObject *object) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(several); i++) {
        if (PyTuple_GET_ITEM(several, i) == object) {
            return 1;
        }
    }
    return 0;
}

/* Is a value on the mesh of those before it, as far as the door asks? The first one says which: `mesh` is only
 * compared, and whoever holds the value holds it. -1: error. */
static int is_on_mesh(Door *door, PyObject *value, PyObject **mesh) {
    PyObject *classes = door->held[OF_ONE_MESH], *type = (PyObject *)Py_TYPE(value);
    if (!is_one_of(classes, type)) { /* a subclass, such as of parts that are under way, is for Python */
        return !PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)PyTuple_GET_ITEM(classes, 0));
    }
    PyObject *spec = *(PyObject **)((char *)value + door->spec_at);
    PyObject *own = spec == NULL ? NULL : PyObject_GetAttr(spec, str_mesh);
    if (own == NULL) {
        return spec == NULL ? 0 : -1;
    }
    int same = *mesh == NULL || *mesh == own;
    *mesh = own;
    Py_DECREF(own);
    return same;
}

/* Is it a plain tensor of one element, which a function of lists takes as it is? -1: error. */
static int is_one_element(Door *door, PyObject *value) {
    if ((PyObject *)Py_TYPE(value) != door->held[PLAIN]) {
        return 0;
    }
    PyObject *elements = PyObject_CallMethodNoArgs(value, str_numel);
    long one = elements == NULL ? -1 : PyLong_AsLong(elements) == 1;
    Py_XDECREF(elements);
    return (int)one;
}

/* Is a value, or every value of a list, of a class that is known to be harmless? -1: error. */
static int is_harmless(Door *door, PyObject *value, PyObject **mesh, int of_lists) {
    if (!PyTuple_Check(value) && !PyList_Check(value)) {
        if (value == Py_None || is_number(Py_TYPE(value))) {
            return 1;
        }
        int harmless = PySet_Contains(door->held[HARMLESS], (PyObject *)Py_TYPE(value));
        if (harmless == 0 && of_lists) {
            return is_one_element(door, value);
        }
        return harmless <= 0 || door->spec_at == 0 ? harmless : is_on_mesh(door, value, mesh);
    }
    if (Py_EnterRecursiveCall(" in the arguments of a call")) {
        return -1;
    }
    int all = 1;
    for (Py_ssize_t i = 0; all > 0 && i < PySequence_Fast_GET_SIZE(value); i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
        all = is_harmless(door, item, mesh, of_lists);
        Py_DECREF(item);
    }
    Py_LeaveRecursiveCall();
    return all;
}

static int all_harmless(Door *door, PyObject *func, PyObject *args, PyObject *kwargs) {
    PyObject *value, *mesh = NULL;
    Py_ssize_t place = 0;
    int of_lists = PySet_Contains(door->held[OF_LISTS], func);
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) { /* a look-up with `max_norm` writes */
        int looks_up = PySet_Contains(door->held[LOOKUPS], func);
        if (looks_up != 0) {
            return looks_up < 0 ? -1 : 0;
        }
    }
    int all = of_lists < 0 ? -1 : is_harmless(door, args, &mesh, of_lists);
    while (all > 0 && kwargs != NULL && PyDict_Next(kwargs, &place, NULL, &value)) {
        all = is_harmless(door, value, &mesh, of_lists);
    }
    return all;
}

/* Does torch trace? -1: error. */
static int traces(Door *door) {
    PyObject *flag = PyDict_GetItemWithError(door->held[COMPILER], str_compiles);
    return flag == Py_False ? 0 : flag == NULL && PyErr_Occurred() ? -1 : 1;
}

/* Does the function look at one DTensor alone, and run no op? An optimizer reads five such things of each
 * parameter. -1: error. */
static int looks(Door *door, PyObject *func, PyObject *args, PyObject *kwargs) {
    if (kwargs != NULL || PyTuple_GET_SIZE(args) != 1) {
        return 0;
    }
    int yes = is_one_of(door->held[OURS], (PyObject *)Py_TYPE(PyTuple_GET_ITEM(args, 0)));
    if (yes > 0) {
        yes = PySet_Contains(door->held[LOOKS], func);
    }
    int traced = yes > 0 ? traces(door) : 0;
    return traced < 0 ? -1 : traced ? 0 : yes;
}

/* May the function run as it is? 0: Python judges the call. -1: error. */
static int goes_through(Door *door, PyObject *func, PyObject *args, PyObject *kwargs) {
    int yes = traces(door);
    yes = yes < 0 ? -1 : !yes;
    if (yes > 0) {
        yes = all_harmless(door, func, args, kwargs);
    }
    if (yes > 0 && kwargs != NULL) {
        int has_out = PyDict_Contains(kwargs, str_out);
        yes = has_out < 0 ? -1 : !has_out;
    }
    if (yes > 0) {
        int reads = PySet_Contains(door->held[READING], func);
        yes = reads < 0 ? -1 : !reads;
    }
    if (yes > 0) {
        int own = PyDict_Contains(door->held[OWN], func);
        yes = own < 0 ? -1 : !own;
    }
    return yes;
}

/* Run it below the classes of its arguments. */
static PyObject *call_below(Door *door, PyObject *func, PyObject *types, PyObject *args, PyObject *kwargs) {
    PyObject *given[] = {NULL, func, types, args, kwargs};
    size_t n = kwargs == NULL ? 3 : 4;
    return PyObject_Vectorcall(door->held[BELOW], given + 1, n | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* The same, one function of torch deeper. */
static PyObject *run_below(Door *door, PyObject *func, PyObject *types, PyObject *args, PyObject *kwargs) {
    PyObject *state = door->held[STATE], *depth = PyObject_GetAttr(state, str_functions);
    PyObject *deeper = depth == NULL ? NULL : PyLong_FromSsize_t(PyLong_AsSsize_t(depth) + 1);
    PyObject *out = NULL;
    if (deeper != NULL && PyObject_SetAttr(state, str_functions, deeper) == 0) {
        out = call_below(door, func, types, args, kwargs);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (PyObject_SetAttr(state, str_functions, depth) < 0) {
            Py_CLEAR(out);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(trace);
        } else {
            PyErr_Restore(type, value, trace);
        }
    }
    Py_XDECREF(deeper);
    Py_XDECREF(depth);
    return out;
}

/* ------------------------------------------------------------------------------------- whole functions */

/* A function of torch that was seen to be, on local tensors, what its ops are on these: it runs on them at
 * once, above torch's dispatcher, where nothing that stands between the two would do something. */

/* Does nothing stand around calls that must see ops on DTensors: modes, transforms, casts, traces, profiles,
 * inference, derivatives forward? -1: error. */
static int is_quiet(Door *door) {
    PyObject *asked = door->held[QUIET];
    int quiet = 1;
    for (Py_ssize_t i = 0; quiet > 0 && i < PyTuple_GET_SIZE(asked); i++) {
        quiet = is_off(PyTuple_GET_ITEM(asked, i));
    }
    if (quiet > 0) {
        PyObject *level = PyDict_GetItemWithError(door->held[FORWARD], str_level);
        long none = level == NULL ? 0 : PyLong_AsLong(level);
        quiet = PyErr_Occurred() ? -1 : none == -1;
    }
    return quiet;
}

/* Are these tensors, plain ones, without gradients? Of torch's function the class alone is asked where
 * gradients are not recorded. -1: error. */
static int are_constant(Many *many, int records) {
    int constant = 1;
    for (Py_ssize_t i = 0; records && constant > 0 && i < many->size; i++) {
        PyObject *requires = PyObject_GetAttr(many->at[i], str_requires_grad);
        constant = requires == NULL ? -1 : requires == Py_False;
        Py_XDECREF(requires);
    }
    return constant;
}

static int are_plain(Door *below, Many *many) {
    for (Py_ssize_t i = 0; i < many->size; i++) {
        if ((PyObject *)Py_TYPE(many->at[i]) != below->held[TENSOR]) {
            return 0;
        }
    }
    return 1;
}

static enum Found write_whole(
    Door *below, Call *call, PyObject *recipe, PyObject *args, PyObject *kwargs, PyObject **result) {
    Py_ssize_t written = PyLong_AsSsize_t(PyTuple_GET_ITEM(recipe, WRITTEN));
    PyObject *operand = call->operand.at[written], *local = call->local.at[written];
    int lasting = says(local, str_is_inference); /* torch refuses to write such; below autograd it is written */
    if (lasting == 0) {
        lasting = says(operand, str_is_inference);
    }
    if (lasting != 0) {
        return lasting < 0 ? FAILED : UNKNOWN;
    }
    PyObject *storage;
    int apart = lie_apart(below, call, written, &storage);
    enum Found found = apart < 0 ? FAILED : apart ? FOUND : UNKNOWN;
    PyObject *out = found == FOUND ? PyObject_Call(PyTuple_GET_ITEM(recipe, CALL), args, kwargs) : NULL;
    if (found == FOUND && (count_write(below, storage) < 0 || out == NULL)) {
        found = FAILED;
    }
    PyObject *told = found == FOUND ? PyTuple_Pack(1, operand) : NULL;
    if (found == FOUND && (told == NULL || raise_versions(below, told) < 0)) {
        found = FAILED;
    }
    if (found == FOUND && count_locally(below, operand, local) < 0) { /* a local view counts by itself */
        found = FAILED;
    }
    Py_XDECREF(told);
    if (found == FOUND) {
        *result = Py_NewRef(operand);
    }
    Py_XDECREF(out);
    Py_XDECREF(storage);
    return found;
}

/* Is it memory of its own? `reshape`, `contiguous` and their like give an operand, or a view of one, where its
 * local strides allow that, also where on one device they copy. -1: error. */
static int is_fresh(Call *call, PyObject *out) {
    PyObject *memory = memory_of(out);
    int fresh = memory == NULL ? -1 : 1;
    for (Py_ssize_t i = 0; fresh > 0 && i < call->local.size; i++) {
        PyObject *other = memory_of(call->local.at[i]);
        fresh = other == NULL ? -1 : other != memory;
        Py_XDECREF(other);
    }
    Py_XDECREF(memory);
    return fresh;
}

/* UNKNOWN: also where the local call fails, since the error is to be that of the op on logical tensors. */
static enum Found run_whole(
    Door *below, Call *call, PyObject *recipe, PyObject *args, PyObject *kwargs, PyObject **result) {
    if (PyTuple_GET_ITEM(recipe, WRITTEN) != Py_None) {
        return write_whole(below, call, recipe, args, kwargs, result);
    }
    PyObject *out = PyObject_Call(PyTuple_GET_ITEM(recipe, CALL), args, kwargs);
    if (out == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return FAILED;
        }
        PyErr_Clear();
        return UNKNOWN;
    }
    int fresh = (PyObject *)Py_TYPE(out) == below->held[TENSOR] ? is_fresh(call, out) : 0;
    if (fresh > 0) {
        *result = wrapped_one(below, recipe, 0, out, 0);
    }
    Py_DECREF(out);
    return fresh == 0 ? UNKNOWN : fresh < 0 || *result == NULL ? FAILED : FOUND;
}

/* Are the operands such that a call on their local tensors is the call: plain ones, of which the graph of
 * gradients knows nothing? */
static enum Found are_locals_plain(Door *below, Call *call, int records) {
    int constant = are_constant(&call->local, records);
    return constant < 0 ? FAILED : constant && are_plain(below, &call->local) ? FOUND : UNKNOWN;
}

/* A call that records a gradient, as one node of its graph. UNKNOWN with `missing`: nothing is known of it. */
static enum Found find_node(
    Door *door, Call *call, PyObject *given, PyObject *named, int *missing, PyObject **result) {
    enum Found found = are_locals_plain(door_of(door->held[BELOW_IT]), call, 1);
    int quiet = found == FOUND ? is_quiet(door) : 1;
    quiet = found == FOUND && quiet > 0 ? is_off(door->held[PACKING]) : quiet;
    if (found != FOUND || quiet <= 0) {
        return quiet < 0 ? FAILED : found == FOUND ? UNKNOWN : found;
    }
    PyObject *key = tuple_of(&call->part);
    PyObject *runs = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(door->held[NODE_CALLS], key));
    Py_XDECREF(key);
    if (runs == NULL || runs == Py_False) {
        *missing = runs == NULL;
        Py_XDECREF(runs);
        return PyErr_Occurred() ? FAILED : UNKNOWN;
    }
    *result = PyObject_Call(runs, given, named == Py_None ? NULL : named);
    Py_DECREF(runs);
    if (*result == Py_NotImplemented) { /* it asks for more than layouts */
        Py_CLEAR(*result);
        return UNKNOWN;
    }
    return *result == NULL ? FAILED : FOUND;
}

/* UNKNOWN with `missing`: nothing is known of this call. */
static enum Found find_whole(Door *door, Call *call, PyObject *given, PyObject *args, PyObject *kwargs,
    int records, Py_ssize_t asked, int *missing, PyObject **result) {
    Door *below = door_of(door->held[BELOW_IT]);
    int constant = asked == call->operand.size ? 1 : are_constant(&call->operand, records);
    if (constant > 0) {
        constant = are_constant(&call->local, records);
    }
    if (constant <= 0 || (records && call->plain) || !are_plain(below, &call->local)) {
        return constant < 0 ? FAILED : UNKNOWN;
    }
    int quiet = is_quiet(door);
    if (quiet <= 0) {
        return quiet < 0 ? FAILED : UNKNOWN;
    }
    PyObject *key = tuple_of(&call->part);
    PyObject *recipe = recipe_of(door->held[call->on_lists ? WHOLE_LISTS : WHOLE], call, key);
    Py_XDECREF(key);
    if (recipe == NULL || recipe == Py_False) {
        *missing = recipe == NULL;
        Py_XDECREF(recipe);
        return PyErr_Occurred() ? FAILED : UNKNOWN;
    }
    enum Found found = call->on_lists ? run_on_lists(below, call, recipe, args, kwargs, result)
                                      : run_whole(below, call, recipe, args, kwargs, result);
    if (found == FOUND && call->on_lists && *result == PyTuple_GET_ITEM(args, 0)) {
        Py_SETREF(*result, Py_NewRef(PyTuple_GET_ITEM(given, 0))); /* what it wrote is given back as a list */
    }
    Py_DECREF(recipe);
    return found;
}

/* Does one of these want a gradient? A cheap question before all of them are collected, of the DTensors that
 * stand among them (`asked`), if gradients are recorded (`records`). -1: error. */
static int wants_gradient(Door *door, Door *below, PyObject *args, int *records, Py_ssize_t *asked) {
    int wants = 0;
    *records = !is_off(door->held[GRADIENTS]);
    if (!*records) {
        return 0;
    }
    for (Py_ssize_t i = 0; wants == 0 && i < PyTuple_GET_SIZE(args); i++) {
        PyObject *value = PyTuple_GET_ITEM(args, i), *type = (PyObject *)Py_TYPE(value);
        if (type == below->held[ORDINARY] || type == below->held[LOCALIZED]) {
            PyObject *requires = PyObject_GetAttr(value, str_requires_grad);
            wants = requires == NULL ? -1 : requires == Py_True;
            *asked += 1;
            Py_XDECREF(requires);
        }
    }
    return wants;
}

/* (func, args, kwargs or None), below the classes of the arguments: the result, `goes_on`, or `is_new`. */
static PyObject *whole_inside(PyObject *self, PyObject *const *given, Py_ssize_t n) {
    Door *door = door_of(self), *below = door_of(door->held[BELOW_IT]);
    PyObject *func = given[0], *args = given[1], *kwargs = given[2];
    PyObject *local_args, *local_kwargs = NULL, *result = NULL;
    int missing = 0, records = 0;
    Py_ssize_t asked = 0;
    enum Found found;
    Call call;
    (void)n;
    int wants = wants_gradient(door, below, args, &records, &asked);
    if (wants > 0) {
        int as_node = PyDict_Contains(door->held[NODES], func);
        wants = as_node < 0 ? -1 : as_node ? 2 : 1;
    }
    if (wants == 1 || wants < 0) {
        return wants < 0 ? NULL : Py_NewRef(goes_on);
    }
    begin(&call);
    append(&call, Py_NewRef(func));
    call.on_lists = is_on_lists(door->held[OF_LISTS], func, args);
    call.of_any = call.on_lists ? 0 : PySet_Contains(door->held[OF_ANY_NUMBER], func);
    local_args = call.on_lists < 0 || call.of_any < 0 ? NULL : collect_args(below, &call, args, &found);
    found = local_args == NULL && PyErr_Occurred() ? FAILED : local_args == NULL ? UNKNOWN : found;
    if (found == FOUND && kwargs != Py_None && PyDict_GET_SIZE(kwargs)) {
        local_kwargs = collect_kwargs(below, &call, kwargs, &found);
    }
    if (found == FOUND && wants) {
        found = find_node(door, &call, args, kwargs, &missing, &result);
    } else if (found == FOUND && call.operand.size) {
        found = find_whole(door, &call, args, local_args, local_kwargs, records, asked, &missing, &result);
    } else if (found == FOUND) {
        found = UNKNOWN;
    }
    Py_XDECREF(local_args);
    Py_XDECREF(local_kwargs);
    let_go(&call);
    return found == FAILED ? NULL : found == FOUND ? result : Py_NewRef(missing ? is_new : goes_on);
}

static PyMethodDef whole_method = {
    "whole_inside", (PyCFunction)(void (*)(void))whole_inside, METH_FASTCALL, NULL};

/* May a call of this function be whole? Not one that makes views (`views` is set). -1: error. */
static int may_be_whole(Door *door, PyObject *func, int *views) {
    Door *below = door_of(door->held[BELOW_IT]);
    if (PyDict_GET_SIZE(below->held[COPIES])) {
        return 0;
    }
    PyObject *may = Py_XNewRef(PyDict_GetItemWithError(door->held[FUNCTIONS], func));
    if (may == NULL && !PyErr_Occurred()) {
        may = PyObject_CallOneArg(door->held[MEET], func);
    }
    *views = may == Py_None;
    int traced = may == NULL ? -1 : may != Py_True ? 1 : traces(door);
    Py_XDECREF(may);
    return traced < 0 ? -1 : !traced;
}

/* Run the call as a whole. UNKNOWN: it goes the way through torch; `views`: and only makes views on it. */
static enum Found call_whole(
    Door *door, PyObject *func, PyObject *types, PyObject *args, PyObject *kwargs, int *views, PyObject **result) {
    int may = may_be_whole(door, func, views);
    if (may <= 0) {
        return may < 0 ? FAILED : UNKNOWN;
    }
    PyObject *all = PyTuple_Pack(3, func, args, kwargs == NULL ? Py_None : kwargs);
    PyObject *out = all == NULL ? NULL : call_below(door, door->held[INNER], types, all, NULL);
    Py_XDECREF(all);
    if (out == is_new) {
        PyObject *given[] = {NULL, door->held[PYTHON], func, types, args, kwargs == NULL ? Py_None : kwargs};
        Py_SETREF(out, PyObject_Vectorcall(door->held[FIRST], given + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL));
    } else if (out == goes_on) {
        Py_DECREF(out);
        return UNKNOWN;
    }
    *result = out;
    return out == NULL ? FAILED : FOUND;
}

/* --------------------------------------------------------------------------------- localized parameters */

/* What is among the arguments: finished localized parameters, plain tensors, and what Python must judge. */
typedef struct {
    int localized, plain, other;
} Mixed;

static int is_no_tensor(PyObject *value) {
    return value == Py_None || PyUnicode_CheckExact(value) || is_number(Py_TYPE(value));
}

/* Numbers and their like in a list or a tuple: the sizes of a norm. */
static int are_no_tensors(PyObject *value) {
    if (is_no_tensor(value) || (!PyList_CheckExact(value) && !PyTuple_CheckExact(value))) {
        return is_no_tensor(value);
    }
    int all = 1;
    for (Py_ssize_t i = 0; all && i < PySequence_Fast_GET_SIZE(value); i++) {
        all = is_no_tensor(PySequence_Fast_GET_ITEM(value, i));
    }
    return all;
}

static enum Found look_at(Door *door, PyObject *value, Mixed *mixed) {
    PyTypeObject *type = Py_TYPE(value);
    if ((PyObject *)type == door->held[PLAIN]) {
        mixed->plain = 1;
        return FOUND;
    }
    if (are_no_tensors(value)) {
        return FOUND;
    }
    Door *below = door_of(door->held[BELOW_IT]);
    PyObject *spec = NULL;
    if ((PyObject *)type == below->held[LOCALIZED]) {
        spec = Py_XNewRef(*(PyObject **)((char *)value + door->spec_at));
    }
    if (spec == NULL) {
        mixed->other = 1;
        return FOUND;
    }
    PyObject *pending = PyObject_GetAttr(spec, str_pending);
    Py_DECREF(spec);
    mixed->localized += pending == Py_False;
    mixed->other += pending != Py_False;
    Py_XDECREF(pending);
    return pending == NULL ? FAILED : FOUND;
}

/* What the function sees of a value: a new reference. */
static PyObject *seen_of(Door *door, PyObject *value) {
    Door *below = door_of(door->held[BELOW_IT]);
    int localized = (PyObject *)Py_TYPE(value) == below->held[LOCALIZED];
    return localized ? PyObject_CallOneArg(door->held[LOCALIZE], value) : Py_NewRef(value);
}

static PyObject *seen_args(Door *door, PyObject *args) {
    Py_ssize_t n = PyTuple_GET_SIZE(args);
    PyObject *made = PyTuple_New(n);
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) {
        PyObject *seen = seen_of(door, PyTuple_GET_ITEM(args, i));
        if (seen == NULL) {
            Py_CLEAR(made);
        } else {
            PyTuple_SET_ITEM(made, i, seen);
        }
    }
    return made;
}

static PyObject *seen_kwargs(Door *door, PyObject *kwargs) {
    PyObject *made = PyDict_Copy(kwargs), *name, *value;
    Py_ssize_t place = 0;
    while (made != NULL && PyDict_Next(kwargs, &place, &name, &value)) {
        PyObject *seen = seen_of(door, value);
        if (seen == NULL || PyDict_SetItem(made, name, seen) < 0) {
            Py_CLEAR(made);
        }
        Py_XDECREF(seen);
    }
    return made;
}

/* A call that mixes localized parameters with plain tensors sees their local tensors: what `call_localized`
 * does for such a function, where no argument is a list, another DTensor or a pending value. */
static enum Found call_mixing(Door *door, PyObject *func, PyObject *args, PyObject *kwargs, PyObject **result) {
    int mixes = door->spec_at ? PySet_Contains(door->held[MIXING], func) : 0;
    Mixed mixed = {0, 0, 0};
    enum Found found = mixes < 0 ? FAILED : mixes ? FOUND : UNKNOWN;
    for (Py_ssize_t i = 0; found == FOUND && !mixed.other && i < PyTuple_GET_SIZE(args); i++) {
        found = look_at(door, PyTuple_GET_ITEM(args, i), &mixed);
    }
    PyObject *value;
    Py_ssize_t place = 0;
    while (found == FOUND && !mixed.other && kwargs != NULL && PyDict_Next(kwargs, &place, NULL, &value)) {
        found = look_at(door, value, &mixed);
    }
    if (found != FOUND || mixed.other || !mixed.localized || !mixed.plain) {
        return found == FAILED ? FAILED : UNKNOWN;
    }
    PyObject *seen = seen_args(door, args);
    PyObject *named = seen == NULL || kwargs == NULL ? NULL : seen_kwargs(door, kwargs);
    *result = seen == NULL || (kwargs != NULL && named == NULL) ? NULL : PyObject_Call(func, seen, named);
    Py_XDECREF(seen);
    Py_XDECREF(named);
    return *result == NULL ? FAILED : FOUND;
}

/* (func, types, args=(), kwargs=None) */
static PyObject *boundary(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
    Door *door = door_of(self);
    Py_ssize_t n = PyVectorcall_NARGS(flags);
    PyObject *given = n > 2 ? args[2] : no_arguments;
    PyObject *named = n > 3 && args[3] != Py_None ? args[3] : NULL;
    if (names != NULL || n < 2 || n > 4 || !PyTuple_CheckExact(given) ||
        (named != NULL && !PyDict_CheckExact(named))) {
        return python(door, door->held[PLAIN], args, n, names);
    }
    int looking = looks(door, args[0], given, named), views = 0;
    PyObject *result = NULL;
    enum Found found = looking ? UNKNOWN : call_mixing(door, args[0], given, named, &result);
    if (found == UNKNOWN && !looking) {
        found = call_whole(door, args[0], args[1], given, named, &views, &result);
    }
    if (found != UNKNOWN) {
        return found == FOUND ? result : NULL;
    }
    int through = looking ? looking : goes_through(door, args[0], given, named);
    if (through <= 0) {
        return through < 0 ? NULL : python(door, door->held[PLAIN], args, n, names);
    }
    PyObject *out = looking || views ? call_below(door, args[0], args[1], given, named)
                                     : run_below(door, args[0], args[1], given, named);
    if (out == NULL || (PyObject *)Py_TYPE(out) != door->held[PLAIN]) {
        return out;
    }
    PyObject *all[] = {NULL, args[0], given, named == NULL ? Py_None : named, out};
    PyObject *judged = PyObject_Vectorcall(door->held[MADE], all + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(out);
    return judged;
}

/* Has the block nothing to do for an argument? -1: error. */
static int is_simple(Door *door, PyObject *value) {
    PyObject *class = (PyObject *)Py_TYPE(value);
    return class == door->held[OF_TENSORS] ? 1 : PySet_Contains(door->held[OF_ARGUMENTS], class);
}

/* (func, types, args, kwargs): as the function in Python, `spmd.at_once`. */
static PyObject *at_once(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
    Door *door = door_of(self);
    Py_ssize_t n = PyVectorcall_NARGS(flags), place = 0;
    if (names != NULL || n != 4 || !PyTuple_CheckExact(args[1]) || !PyTuple_CheckExact(args[2]) ||
        (args[3] != Py_None && !PyDict_CheckExact(args[3]))) {
        return PyObject_Vectorcall(door->held[PYTHON], args, flags, names);
    }
    PyObject *flag = PyDict_GetItemWithError(door->held[OF_NAMES], str_compiles), *value;
    int yes = flag == NULL && PyErr_Occurred() ? -1 : flag == Py_False;
    yes = yes > 0 ? PyTuple_GET_SIZE(args[1]) == 1 && PyTuple_GET_ITEM(args[1], 0) == door->held[OF_TENSORS] : yes;
    for (Py_ssize_t i = 0; yes > 0 && i < PyTuple_GET_SIZE(args[2]); i++) {
        yes = is_simple(door, PyTuple_GET_ITEM(args[2], i));
    }
    while (yes > 0 && args[3] != Py_None && PyDict_Next(args[3], &place, NULL, &value)) {
        yes = is_simple(door, value);
    }
    if (yes > 0) {
        PyObject *modes = PyObject_CallNoArgs(door->held[OF_MODES]);
        yes = modes == NULL ? -1 : PyObject_Not(modes);
        Py_XDECREF(modes);
    }
    if (yes <= 0) {
        return yes < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    return PyObject_Vectorcall(door->held[ENTRANCE], args, (size_t)n, NULL);
}

/* ---------------------------------------------------------------------------------------------- classes */

static int block_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    if (door_init(self, args, kwargs, held_by_block) < 0) {
        return -1;
    }
    if (!PyAnySet_Check(door_of(self)->held[OF_ARGUMENTS])) {
        PyErr_SetString(PyExc_TypeError, "simple is a set of classes");
        return -1;
    }
    door_of(self)->call = at_once;
    return 0;
}

static int dispatch_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Door *door = door_of(self);
    if (door_init(self, args, kwargs, held_by_dispatch) < 0) {
        return -1;
    }
    Py_XSETREF(door->held[MADE_BY], PyDict_Copy(door->held[MADE_BY]));
    door->local_at = place_of(door->held[LOCAL]);
    door->spec_at = place_of(door->held[SPEC]);
    door->call = dispatch;
    return door->held[MADE_BY] == NULL || door->local_at < 0 || door->spec_at < 0 ? -1 : 0;
}

static int boundary_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Door *door = door_of(self);
    if (door_init(self, args, kwargs, held_by_boundary) < 0) {
        return -1;
    }
    PyObject *classes = door->held[OF_ONE_MESH];
    if (!PyTuple_Check(classes) || (PyTuple_GET_SIZE(classes) && !PyType_Check(PyTuple_GET_ITEM(classes, 0)))) {
        PyErr_SetString(PyExc_TypeError, "of_one_mesh is a tuple of classes, the base of all first");
        return -1;
    }
    if (!PyTuple_Check(door->held[QUIET]) || !PyTuple_Check(door->held[OURS]) || !PyDict_Check(door->held[FORWARD])) {
        PyErr_SetString(PyExc_TypeError, "quiet and ours are tuples of functions and classes, forward a dict of names");
        return -1;
    }
    Py_XSETREF(door->held[INNER], PyCFunction_New(&whole_method, self));
    door->spec_at = PyTuple_GET_SIZE(classes) ? place_of(door->held[SPEC_OF]) : 0;
    door->call = boundary;
    return door->held[INNER] == NULL || door->spec_at < 0 ? -1 : 0;
}

static PyObject *make_class(const char *name, initproc init) {
    Py_ssize_t base = PyClassMethod_Type.tp_basicsize;
    /* torch asks each callee for `__self__`, as a bound method has it: without one an error is made each time */
    PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, base + (Py_ssize_t)offsetof(Door, call), READONLY, NULL},
        {"__self__", T_OBJECT, base + (Py_ssize_t)offsetof(Door, held[PYTHON]), READONLY, NULL},
        {0},
    };
    PyType_Slot slots[] = {
        {Py_tp_init, (void *)init},
        {Py_tp_call, (void *)PyVectorcall_Call},
        {Py_tp_descr_get, (void *)get_itself},
        {Py_tp_traverse, (void *)door_traverse},
        {Py_tp_clear, (void *)door_clear},
        {Py_tp_dealloc, (void *)door_dealloc},
        {Py_tp_members, members},
        {0, NULL},
    };
    PyType_Spec spec = {name, (int)(base + (Py_ssize_t)sizeof(Door)), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    return PyType_FromSpecWithBases(&spec, (PyObject *)&PyClassMethod_Type);
}

static int add(PyObject *module, const char *name, PyObject *made) {
    int added = made == NULL ? -1 : PyModule_AddObjectRef(module, name, made);
    Py_XDECREF(made);
    return added;
}

static int intern_names(void) {
    struct {
        PyObject **at;
        const char *text;
    } names[] = {{&str_token, "token"}, {&str_use, "use"}, {&str_storage_offset, "storage_offset"},
        {&str_untyped_storage, "untyped_storage"}, {&str_writes, "writes"}, {&str_base, "_base"},
        {&str_functions, "functions"}, {&str_out, "out"}, {&str_offset, "offset"}, {&str_op, "_op"},
        {&str_compiles, "_is_compiling_flag"}, {&str_mesh, "mesh"}, {&str_shape, "shape"}, {&str_dtype, "dtype"},
        {&str_numel, "numel"}, {&str_is_contiguous, "is_contiguous"}, {&str_requires_grad, "requires_grad"},
        {&str_is_inference, "is_inference"}, {&str_level, "_current_level"}, {&str_pending, "pending"}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        *names[i].at = PyUnicode_InternFromString(names[i].text);
        if (*names[i].at == NULL) {
            return -1;
        }
    }
    no_arguments = PyTuple_New(0);
    goes_on = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    is_new = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    return no_arguments == NULL || goes_on == NULL || is_new == NULL ? -1 : 0;
}

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "known_call",
    .m_doc = "The doors of a known call, in C.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit_known_call(void) {
    PyObject *module = intern_names() < 0 ? NULL : PyModule_Create(&definition);
    if (module == NULL) {
        return NULL;
    }
    if (add(module, "Dispatch", make_class("shardwright.tensor.extension.known_call.Dispatch", dispatch_init)) < 0 ||
        add(module, "Boundary", make_class("shardwright.tensor.extension.known_call.Boundary", boundary_init)) < 0 ||
        add(module, "Block", make_class("shardwright.tensor.extension.known_call.Block", block_init)) < 0 ||
        PyModule_AddIntConstant(module, "FIELDS", FIELDS) < 0 ||
        PyModule_AddIntConstant(module, "FIELDS_OF_LISTS", FIELDS_OF_LISTS) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}

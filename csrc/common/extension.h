// What Python calls in either extension for CPU tensors, and the threads that all of them share.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

namespace specdec::cpu {

PyObject* build(PyObject*, PyObject*);
PyObject* instruction_sets(PyObject*, PyObject*);
PyObject* use_instruction_set(PyObject*, PyObject* name);
PyObject* use_threads(PyObject*, PyObject* number);

// Has this extension compute in the pool of the process, which is that of the first extension that was loaded. To be
// called once, when an extension is loaded; false if a Python exception is set.
bool share_threads();

}  // namespace specdec::cpu

// The methods above, as members of a list of PyMethodDef.
#define SPECDEC_METHODS                                                                                           \
  {"build", specdec::cpu::build, METH_NOARGS, "key=value pairs, separated by ';'"},                               \
      {"instruction_sets", specdec::cpu::instruction_sets, METH_NOARGS,                                           \
       "those that this machine has, from the plainest to the best"},                                             \
      {"use_instruction_set", specdec::cpu::use_instruction_set, METH_O, "makes the operations use one of them"}, \
      {"use_threads", specdec::cpu::use_threads, METH_O,                                                          \
       "makes this thread's operations use so many threads; 0: as many as torch has"}

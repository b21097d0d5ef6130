#include "extension.h"

#include <torch/csrc/stable/ops.h>

#include <string>

#include "instruction_set.h"
#include "parallel.h"
#include "pool.h"

namespace specdec::cpu {
namespace {

thread_local int64_t chosen_here = 0;  // 0: as many as torch has

// Extensions know nothing of each other, but each has threads that wait, spinning, for the next piece of work, and
// would take cores from those of another one. So they find the first one's in the interpreter's dictionary. Another
// version of what is there has another name.
constexpr const char* kThreads = "specdec.threads.1";
struct Threads {
  void (*run)(int64_t tasks, int64_t grain, int64_t threads, void (*run)(const void*, int64_t, int64_t),
              const void* function) = run_in_pool;
  int64_t* (*chosen)() = [] { return &chosen_here; };  // by the calling thread
};
constexpr Threads own = {};
const Threads* shared = &own;

}  // namespace

bool share_threads() {
  PyObject* known = PyInterpreterState_GetDict(PyInterpreterState_Get());
  if (known == nullptr) return true;
  if (PyObject* first = PyDict_GetItemString(known, kThreads)) {
    shared = static_cast<const Threads*>(PyCapsule_GetPointer(first, kThreads));
    return shared != nullptr;
  }
  PyObject* capsule = PyCapsule_New(const_cast<Threads*>(&own), kThreads, nullptr);
  const bool is_there = capsule != nullptr && PyDict_SetItemString(known, kThreads, capsule) == 0;
  Py_XDECREF(capsule);
  return is_there;
}

void parallel_for_erased(int64_t tasks, int64_t grain, void (*run)(const void* function, int64_t begin, int64_t end),
                         const void* function) {
  shared->run(tasks, grain, num_threads(), run, function);
}

int64_t num_threads() {
  const int64_t chosen = *shared->chosen();
  return chosen > 0 ? chosen : torch::stable::get_num_threads();
}

PyObject* build(PyObject*, PyObject*) {
  const std::string text = std::string("compiler=" __VERSION__ ";abi_target=" SPECDEC_STRING(SPECDEC_ABI_TARGET)) +
                           ";instruction_set=" + name_of(instruction_set());
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}

PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const std::string& each : instruction_sets()) {
    PyObject* name = PyUnicode_FromStringAndSize(each.data(), static_cast<Py_ssize_t>(each.size()));
    const bool appended = names != nullptr && name != nullptr && PyList_Append(names, name) == 0;
    Py_XDECREF(name);
    if (appended) continue;
    Py_XDECREF(names);
    return nullptr;
  }
  return names;
}

PyObject* use_instruction_set(PyObject*, PyObject* name) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  if (text == nullptr) return nullptr;
  if (use_instruction_set(std::string(text, size))) Py_RETURN_NONE;
  return PyErr_Format(PyExc_ValueError, "this machine has no instruction set %R", name);
}

PyObject* use_threads(PyObject*, PyObject* number) {
  const int64_t threads = PyLong_AsLongLong(number);
  if (threads == -1 && PyErr_Occurred() != nullptr) return nullptr;
  *shared->chosen() = threads;
  Py_RETURN_NONE;
}

}  // namespace specdec::cpu

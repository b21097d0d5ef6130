// Suffix automata for Python, which holds them as capsules.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <new>
#include <vector>

#include "suffix_automaton.h"

namespace {

using specdec::Following;
using specdec::StateId;
using specdec::Suffix;
using specdec::SuffixAutomaton;
using specdec::Token;

constexpr const char* kName = "specdec.suffix_automaton";

// Converts an argument for PyArg_ParseTuple.
int automaton_of(PyObject* capsule, void* automaton) {
  *static_cast<void**>(automaton) = PyCapsule_GetPointer(capsule, kName);
  return PyErr_Occurred() == nullptr;
}

// Appends the integers of 32 bits that a list has from `start` on.
bool tokens_from(PyObject* list, Py_ssize_t start, std::vector<Token>* tokens) {
  const Py_ssize_t size = PyList_Size(list);
  if (size < 0) return false;
  try {
    tokens->reserve(std::max(size - start, Py_ssize_t{0}));
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  for (Py_ssize_t i = start; i < size && !PyErr_Occurred(); ++i) {
    const long token = PyLong_AsLong(PyList_GetItem(list, i));
    if (PyErr_Occurred()) break;
    if (token < std::numeric_limits<Token>::min() || token > std::numeric_limits<Token>::max()) {
      PyErr_Format(PyExc_OverflowError, "tokens: got %ld, allowed: integers of 32 bits", token);
      break;
    }
    tokens->push_back(static_cast<Token>(token));  // there is room
  }
  return PyErr_Occurred() == nullptr;
}

// The same of a whole list, for PyArg_ParseTuple.
int tokens_of(PyObject* list, void* tokens) { return tokens_from(list, 0, static_cast<std::vector<Token>*>(tokens)); }

bool check_state(const SuffixAutomaton& automaton, StateId state) {
  const bool fine = state >= 0 && state < automaton.num_states();
  if (!fine) PyErr_Format(PyExc_IndexError, "state: got %d, allowed: 0 to %lld", state, automaton.num_states() - 1);
  return fine;
}

template <class Value, class Make>
PyObject* list_of(const std::vector<Value>& values, Make make) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t i = 0; list != nullptr && i < values.size(); ++i) {
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), make(values[i]));  // which may be nullptr, without memory
  }
  if (list != nullptr && PyErr_Occurred()) Py_DecRef(list);
  return PyErr_Occurred() ? nullptr : list;
}

PyObject* new_automaton(PyObject*, PyObject*) {
  return PyCapsule_New(new SuffixAutomaton, kName, [](PyObject* capsule) {
    delete static_cast<SuffixAutomaton*>(PyCapsule_GetPointer(capsule, kName));
  });
}

PyObject* sizes(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  if (!PyArg_ParseTuple(args, "O&", automaton_of, &automaton)) return nullptr;
  return Py_BuildValue("(LLL)", automaton->num_tokens(), automaton->num_states(), automaton->num_edges());
}

PyObject* extend(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  std::vector<Token> tokens;
  if (!PyArg_ParseTuple(args, "O&O&", automaton_of, &automaton, tokens_of, &tokens)) return nullptr;
  for (const Token token : tokens) automaton->append(token);
  Py_RETURN_NONE;
}

PyObject* longest_earlier(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  if (!PyArg_ParseTuple(args, "O&", automaton_of, &automaton)) return nullptr;
  const auto [state, length] = automaton->longest_earlier();
  return Py_BuildValue("(iii)", state, length, length == 0 ? 0 : automaton->last_end(state));
}

PyObject* suffixes(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  Suffix suffix;
  long long least = 0, longest = 0;
  int most = 0;
  if (!PyArg_ParseTuple(args, "O&iiLLi", automaton_of, &automaton, &suffix.state, &suffix.length, &least, &longest,
                        &most) ||
      !check_state(*automaton, suffix.state)) {
    return nullptr;
  }
  std::vector<Suffix> found;
  for (suffix = automaton->end_of(suffix, longest);
       suffix.length >= least && suffix.length > 0 && static_cast<int>(found.size()) < most;
       suffix = automaton->shorter(suffix)) {
    found.push_back(suffix);
  }
  return list_of(found, [](const Suffix& each) { return Py_BuildValue("(ii)", each.length, each.state); });
}

PyObject* follow(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  Suffix suffix;
  int limit = 0;
  std::vector<Token> tokens;
  if (!PyArg_ParseTuple(args, "O&iiiO&", automaton_of, &automaton, &suffix.state, &suffix.length, &limit, tokens_of,
                        &tokens) ||
      !check_state(*automaton, suffix.state)) {
    return nullptr;
  }
  for (const Token token : tokens) suffix = automaton->followed(suffix, token, limit);
  return Py_BuildValue("(iii)", suffix.state, suffix.length, automaton->first_end(suffix.state));
}

PyObject* following(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  StateId state = 0;
  int limit = 0;
  if (!PyArg_ParseTuple(args, "O&ii", automaton_of, &automaton, &state, &limit) || !check_state(*automaton, state)) {
    return nullptr;
  }
  const std::vector<Following> found = automaton->following(state, limit);
  return list_of(found, [](const Following& f) { return Py_BuildValue("(iii)", f.token, f.state, f.count); });
}

PyObject* list_of_tokens(const std::vector<Token>& tokens) {
  return list_of(tokens, [](Token token) { return PyLong_FromLong(token); });
}

PyObject* copied(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  long long start = 0, count = 0;
  if (!PyArg_ParseTuple(args, "O&LL", automaton_of, &automaton, &start, &count)) return nullptr;
  if (start < 0 || start >= automaton->num_tokens() || count < 0) {
    return PyErr_Format(PyExc_IndexError, "start, count: got %lld, %lld, allowed: 0 to %lld, and >= 0", start, count,
                        automaton->num_tokens() - 1);
  }
  return list_of_tokens(automaton->copied(start, count));
}

// One call in place of three, since weights of a model push Python's own code out of the caches in every step.
PyObject* look(PyObject*, PyObject* args) {
  SuffixAutomaton* automaton = nullptr;
  PyObject* text = nullptr;
  long long least = 0, longest = 0;
  int most = 0;
  double factor = 0;
  if (!PyArg_ParseTuple(args, "O&O!LLdi", automaton_of, &automaton, &PyList_Type, &text, &least, &longest, &factor,
                        &most)) {
    return nullptr;
  }
  std::vector<Token> tokens;
  if (!tokens_from(text, automaton->num_tokens(), &tokens)) return nullptr;
  for (const Token token : tokens) automaton->append(token);
  const auto [state, length] = automaton->end_of(automaton->longest_earlier(), longest);
  if (length == 0 || length < least) return Py_BuildValue("([]i(ii))", 0, 0, 0);
  const double count = std::max(1.0, std::min(factor * length, static_cast<double>(most)));
  const std::vector<Token> copy = automaton->copied(automaton->last_end(state), static_cast<int64_t>(count));
  const auto [all, agreeing] = copy.empty() ? SuffixAutomaton::Votes{0, 0} : automaton->votes(copy[0]);
  PyObject* list = list_of_tokens(copy);
  return list == nullptr ? nullptr : Py_BuildValue("(Ni(ii))", list, length, all, agreeing);
}

// Returns what `call` returns, or nullptr with a Python exception for what it throws.
template <PyObject* (*call)(PyObject*, PyObject*)>
PyObject* guarded(PyObject* self, PyObject* args) {
  try {
    return call(self, args);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_OverflowError, "%s", error.what());
  }
}

PyMethodDef methods[] = {
    {"new_automaton", guarded<new_automaton>, METH_NOARGS, "an automaton of an empty text"},
    {"sizes", guarded<sizes>, METH_VARARGS, "(automaton) -> how many tokens, states, edges"},
    {"extend", guarded<extend>, METH_VARARGS, "(automaton, tokens)"},
    {"longest_earlier", guarded<longest_earlier>, METH_VARARGS, "(automaton) -> state, length, last end"},
    {"suffixes", guarded<suffixes>, METH_VARARGS,
     "(automaton, state, length, least, longest, most) -> [(length, state), ...] from this suffix on"},
    {"follow", guarded<follow>, METH_VARARGS, "(automaton, state, length, limit, tokens) -> state, length, first end"},
    {"following", guarded<following>, METH_VARARGS, "(automaton, state, limit) -> [(token, state, count), ...]"},
    {"copied", guarded<copied>, METH_VARARGS, "(automaton, start, count) -> tokens"},
    {"look", guarded<look>, METH_VARARGS,
     "(automaton, text, least, longest, factor, most) -> tokens to copy, length of their match, votes, after reading "
     "on in text"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }

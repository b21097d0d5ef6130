// The CPU kernels as torch's operations.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string>

#include "arguments.h"
#include "cpu/block.h"
#include "cpu/operations.h"
#include "cpu/parallel.h"

namespace specdec::cpu {
namespace {

void run_draft_step(const DraftStepParams& params, const Tensor&) { draft_step(params); }
void run_speculative_step(const SpeculativeStepParams& params, const Tensor&) { speculative_step(params); }

}  // namespace

void parallel_for_erased(int64_t tasks, int64_t grain, void (*run)(const void* function, int64_t begin, int64_t end),
                         const void* function) {
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) { run(function, begin, end); });
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::draft_step<run_draft_step>));
  m.impl("speculative_step", TORCH_BOX(&specdec::speculative_step<run_speculative_step>));
}

}  // namespace specdec::cpu

namespace {

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

PyObject* build(PyObject*, PyObject*) {
  const std::string text = std::string("compiler=" __VERSION__ ";abi_target=" SPECDEC_STRING(SPECDEC_ABI_TARGET)) +
                           ";instruction_set=" + specdec::cpu::block_kernels().instruction_set;
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}

PyMethodDef methods[] = {{"build", build, METH_NOARGS, "key=value pairs, separated by ';'"},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }

// The CPU kernels of sampling and verification as torch's operations.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define SPECDEC_PACKAGE "specdec_kernels"

#include "arguments.h"
#include "common/extension.h"
#include "cpu/operations.h"
#include "cpu/row_state.h"

namespace specdec::cpu {
namespace {

void run_draft_step(const DraftStepParams& params, const Tensor&) { draft_step(params); }
void run_speculative_step(const SpeculativeStepParams& params, const Tensor&) { speculative_step(params); }
void run_draft_children(const DraftChildrenParams& params, const Tensor&) { draft_children(params); }
void run_verify_tree(const VerifyTreeParams& params, const Tensor&) { verify_tree(params); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::draft_step<run_draft_step>));
  m.impl("speculative_step", TORCH_BOX(&specdec::speculative_step<run_speculative_step>));
  m.impl("draft_children", TORCH_BOX(&specdec::draft_children<run_draft_children>));
  m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree<run_verify_tree>));
  m.impl("place_rows", TORCH_BOX(&place_rows));
  m.impl("advance_rows", TORCH_BOX(&advance_rows));
}

}  // namespace specdec::cpu

namespace {

PyMethodDef methods[] = {SPECDEC_METHODS, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return specdec::cpu::share_threads() ? PyModule_Create(&module) : nullptr; }

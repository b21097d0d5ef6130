"""Invalid arguments of the tree operations are refused, and the operations are as torch wants them."""

from __future__ import annotations

import pytest
import torch
from support import TREE_BACKENDS
from test_validation import B, V, check_refused, longs, table, zeros

from specdec_kernels import SamplingParams, draft_children, verify_tree
from specdec_kernels.backends import operation
from specdec_kernels.ops import TREE_RULES
from specdec_kernels.testing import random_tree_step

N, DRAFT_V = 3, 2
PARENTS = torch.tensor([-1, -1, 0])


def draft(**changes):
    arguments = {"logits": zeros(B, V), "width": 2, "params": SamplingParams(), "seed": longs(B), "position": 0,
                 "offset": 0, "backend": "reference", **changes}  # fmt: skip
    return draft_children(**arguments)


def verify(**changes):
    arguments = {"target_logits": zeros(B, N + 1, V), "node_tokens": longs(B, N), "parents": PARENTS,
                 "draft_logits": zeros(B, N + 1, V), "params": SamplingParams(), "seed": longs(B), "position": 0,
                 "rule": "token", "backend": "reference", **changes}  # fmt: skip
    return verify_tree(**arguments)


DRAFT = [
    ("logits", zeros(V), [f"[{V}]", "[B, V]"]),
    ("width", 0, ["0", "1 to 1024"]),
    ("width", 1025, ["1025"]),
    ("width", True, ["True"]),
    ("width", 2.0, ["2.0", "integer"]),
    ("offset", -1, ["-1", "integer from 0"]),
    ("offset", longs(B + 1), [f"[{B + 1}]", f"[{B}]"]),
    ("drafts", longs(B), [f"[{B}]", f"[{B}, 0]"]),
    ("drafts", longs(B + 1, 2), [f"[{B + 1}, 2]", f"[{B}, 2]"]),
    ("drafts", zeros(B, 2), ["torch.float32", "int64 or int32"]),
    ("d2t", longs(V), ["ascend"]),
    ("table", (), ["tuple", "TokenTable"]),
]
VERIFY = [
    ("target_logits", zeros(B, V), [f"[{B}, {V}]", "[B, N+1, V]"]),
    ("target_logits", zeros(B, 0, V), [f"[{B}, 0, {V}]", "N >= 0"]),
    ("node_tokens", longs(B, N + 1), [f"[{B}, {N + 1}]", f"[{B}, {N}]"]),
    ("node_tokens", zeros(B, N), ["torch.float32", "int64"]),
    ("parents", longs(N + 1), [f"[{N + 1}]", f"[{N}]"]),
    ("parents", longs(B + 1, N), [f"[{B + 1}, {N}]", f"[{B}, {N}]"]),
    ("parents", zeros(N), ["torch.float32", "int64"]),
    ("parents", None, ["NoneType", "tensor"]),
    ("parents", torch.tensor([-1, 1, 0]), ["1 for node 1", "before the child"]),
    ("parents", torch.tensor([[-1, 0, 1], [-1, -2, 0]]), ["-2 for node 1"]),
    ("draft_logits", zeros(B, N, V), [f"[{B}, {N}, {V}]", f"[{B}, {N + 1}, {V}]"]),
    ("draft_logits", None, ["None with rule='token'", "[B, N+1, V]"]),
    ("d2t", torch.arange(V) + 1, [str(V), f"ids below {V}"]),
    ("num_nodes", longs(B, fill=N + 1), [str(N + 1), f"0 to N = {N}"]),
    ("num_nodes", zeros(B), ["torch.float32", "int64"]),
    ("depth", N + 1, [str(N + 1), f"0 to N = {N}"]),
    ("depth", True, ["True"]),
    ("rule", "coupled", ["'coupled'", "'walk'", "'token'", "'block'"]),
    ("backend", "opencl", ["'opencl'", "'auto'"]),
]


@pytest.mark.parametrize("case", DRAFT, ids=lambda case: case[0])
def test_draft_children_refuses(case):
    check_refused(draft, *case, **({"table": table()} if case[0] == "drafts" else {}))


@pytest.mark.parametrize("case", VERIFY, ids=lambda case: case[0])
def test_verify_tree_refuses(case):
    check_refused(verify, *case)


def test_good_arguments_pass():
    """The cases above differ from these valid arguments in one argument only."""
    assert draft().tokens.shape == (B, 2) and verify().tokens.shape == (B, N + 1)
    assert draft(table=table(), offset=longs(B), drafts=longs(B, 2).int()).tokens.shape == (B, 2)
    for more in (
        {"parents": PARENTS.int().expand(B, N)},
        {"draft_logits": zeros(B, N + 1, DRAFT_V), "d2t": torch.tensor([0, V - 1]), "rule": "block"},
        {"draft_logits": None, "rule": "walk", "table": table()},
    ):
        assert verify(**more).path.shape == (B, N + 1)
    assert verify(depth=1).tokens.shape == (B, 2)


def test_what_does_not_go_together():
    with pytest.raises(ValueError, match="^draft_logits: got a value with rule='walk', allowed: None"):
        verify(rule="walk")
    with pytest.raises(ValueError, match="^drafts: got None with a table and an offset beyond 0, allowed: .*depth"):
        draft(table=table(), offset=1)
    with pytest.raises(ValueError, match="^d2t: got a map, allowed: None where draft_logits is"):
        verify(rule="walk", draft_logits=None, d2t=torch.arange(V))
    for backend in ("auto", "cpu"):
        with pytest.raises(ValueError, match="^target_logits: got torch.float64, allowed: .*backend='reference'"):
            verify(target_logits=zeros(B, N + 1, V, dtype=torch.float64), backend=backend)


# ---- As torch sees them ----------------------------------------------------------------------------------------------

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
TREE = (-1, -1, 0, 1, 1)


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("backend", TREE_BACKENDS)
def test_opcheck(backend, rule):
    inputs = random_tree_step(
        TREE, 3, 33, rule=rule, temperature=(0.0, 1.0), table=5, top_p=(0.9, 1.0), presence_penalty=0.5
    )
    done = torch.library.opcheck(operation("verify_tree", backend, "cpu"), inputs.operands(), test_utils=UTILITIES)
    # Some children are missing, and their log_q is -inf, which opcheck would find unequal to itself.
    arguments = (inputs.target_logits[:, 0], inputs.sampling(), inputs.node_tokens[:, :1], None, inputs.seed,
                 inputs.position, inputs.seed, 1, rule != "walk")  # fmt: skip
    done |= torch.library.opcheck(operation("draft_children", backend, "cpu"), arguments, test_utils=UTILITIES)
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", [*TREE_BACKENDS, "auto"])
def test_compile_fullgraph(backend):
    """One graph without breaks or recompilation, with the same results as without compiling."""

    def step(draft_logits, target_logits, seed):
        common = {"params": SamplingParams(0.8), "seed": seed, "position": 3, "backend": backend}
        root = draft_children(draft_logits[:, 0], 2, offset=0, **common)
        below = draft_children(draft_logits[:, 1], 1, offset=1, **common)
        tokens = torch.cat([root.tokens, below.tokens], 1)
        return verify_tree(target_logits, tokens, PARENTS, draft_logits, rule="block", depth=2, **common)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for random_state in range(2):
            generator = torch.Generator().manual_seed(random_state)
            logits = torch.randn(2, B, N + 1, V, generator=generator)
            assert all(map(torch.equal, compiled(*logits, longs(B)), step(*logits, longs(B))))

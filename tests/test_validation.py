"""Bad arguments are refused by a message that names the argument, what was given and what is allowed."""

from __future__ import annotations

import re

import pytest
import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step

B, K, V = 2, 3, 5
NAN, INF = float("nan"), float("inf")


def draft(**changes):
    arguments = {
        "logits": torch.zeros(B, V),
        "params": SamplingParams(),
        "seed": torch.zeros(B, dtype=torch.int64),
        "position": torch.zeros(B, dtype=torch.int64),
        "offset": 0,
        "backend": "reference",
        **changes,
    }
    return draft_step(**arguments)


def verify(**changes):
    arguments = {
        "target_logits": torch.zeros(B, K + 1, V),
        "draft_tokens": torch.zeros(B, K, dtype=torch.int64),
        "draft_logits": torch.zeros(B, K, V),
        "params": SamplingParams(),
        "seed": torch.zeros(B, dtype=torch.int64),
        "position": torch.zeros(B, dtype=torch.int64),
        "num_drafts": torch.full((B,), K),
        "draft_stats": (torch.full((B, K), -INF), torch.full((B, K), 1.6)),
        "backend": "reference",
        **changes,
    }
    return speculative_step(**arguments)


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def longs(*shape, fill=0, device="cpu"):
    return torch.full(shape, fill, dtype=torch.int64, device=device)


def stats(cutoff=-INF, shape=(B, K), dtype=torch.float32, device="cpu"):
    return torch.full(shape, cutoff, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


# (argument, bad value, what the message must contain besides "argument: got")
BOTH = [
    ("seed", 2**63, ["9223372036854775808", "integer from"]),
    ("seed", -(2**63) - 1, ["-9223372036854775809"]),
    ("seed", 1.5, ["1.5", "integer"]),
    ("seed", True, ["True", "integer"]),
    ("seed", None, ["None", "integer"]),
    ("seed", longs(B + 1), [f"[{B + 1}]", f"[{B}]"]),
    ("seed", longs(B, 1), [f"[{B}, 1]", f"[{B}]"]),
    ("seed", zeros(B), ["torch.float32", "int64"]),
    ("seed", longs(B, device="meta"), ["meta", "cpu"]),
    ("position", -1, ["-1", "integer from 0"]),
    ("position", 2.0, ["2.0", "integer"]),
    ("position", longs(B + 1), [f"[{B + 1}]", f"[{B}]"]),
    ("position", zeros(B, dtype=torch.int16), ["torch.int16", "int64"]),
    ("position", longs(B, device="meta"), ["meta", "cpu"]),
    ("params", 0.7, ["float", "SamplingParams"]),
    ("params", None, ["NoneType", "SamplingParams"]),
    ("params.temperature", SamplingParams(temperature=torch.ones(B + 1)), [f"[{B + 1}]", f"[{B}]"]),
    ("rule", "typical", ["'typical'", "'token'"]),
    ("backend", "opencl", ["'opencl'", "'auto'", "'reference'", "'cpu'", "'triton'"]),
]
DRAFT = [
    ("logits", [[0.0]], ["list", "tensor"]),
    ("logits", None, ["NoneType", "tensor"]),
    ("logits", zeros(V), [f"[{V}]", "[B, V]"]),
    ("logits", zeros(B, 1, V), [f"[{B}, 1, {V}]", "[B, V]"]),
    ("logits", zeros(B, 0), [f"[{B}, 0]", "V >= 1"]),
    ("logits", longs(B, V), ["torch.int64", "float32"]),
    ("offset", -1, ["-1", "0 to K - 1"]),
    ("offset", 2**31, ["2147483648"]),
    ("offset", 0.0, ["0.0", "integer"]),
    ("offset", False, ["False", "integer"]),
]
VERIFY = [
    ("target_logits", None, ["NoneType", "tensor"]),
    ("target_logits", zeros(B, V), [f"[{B}, {V}]", "[B, K+1, V]"]),
    ("target_logits", zeros(B, 0, V), [f"[{B}, 0, {V}]", "K >= 0"]),
    ("target_logits", zeros(B, K + 1, 0), ["V >= 1"]),
    ("target_logits", zeros(B, K + 1, V, dtype=torch.int32), ["torch.int32", "bfloat16"]),
    ("draft_tokens", None, ["NoneType", "tensor"]),
    ("draft_tokens", longs(B, K + 1), [f"[{B}, {K + 1}]", f"[{B}, {K}]"]),
    ("draft_tokens", longs(B + 1, K), [f"[{B + 1}, {K}]", f"[{B}, {K}]"]),
    ("draft_tokens", zeros(B, K), ["torch.float32", "int64 or int32"]),
    ("draft_tokens", longs(B, K, device="meta"), ["meta", "cpu"]),
    ("draft_logits", [], ["list", "tensor"]),
    ("draft_logits", zeros(B, K + 1, V), [f"[{B}, {K + 1}, {V}]", f"[{B}, {K}, {V}]"]),
    ("draft_logits", zeros(B, K, V + 1), [f"[{B}, {K}, {V + 1}]", f"[{B}, {K}, {V}]"]),
    ("draft_logits", zeros(B, K, V, dtype=torch.int8), ["torch.int8", "float16"]),
    ("draft_logits", zeros(B, K, V, device="meta"), ["meta", "cpu"]),
    ("num_drafts", longs(B + 1), [f"[{B + 1}]", f"[{B}]"]),
    ("num_drafts", zeros(B), ["torch.float32", "int64"]),
    ("num_drafts", longs(B, device="meta"), ["meta", "cpu"]),
    ("num_drafts", longs(B, fill=-1), ["-1", f"0 to K = {K}"]),
    ("num_drafts", torch.tensor([0, K + 1]), [str(K + 1), f"0 to K = {K}"]),
    ("num_drafts", 2, ["int", "tensor"]),
    ("draft_stats cutoff", stats(shape=(B, K + 1)), [f"[{B}, {K + 1}]", f"[{B}, {K}]"]),
    ("draft_stats cutoff", stats(dtype=torch.float64), ["torch.float64", "float32"]),
    ("draft_stats cutoff", stats(device="meta"), ["meta", "cpu"]),
    ("draft_stats lse", (stats()[0], longs(B, K)), ["torch.int64", "float32"]),
    ("draft_stats lse", (stats()[0], None), ["NoneType", "tensor"]),
    ("draft_stats", stats(cutoff=0.5), ["cutoff", "-inf"]),
]


def name(case) -> str:
    return case[0].replace(" ", "_") if isinstance(case, tuple) else ""


def check_refused(function, argument: str, value, parts: list[str]) -> None:
    keyword = argument.split(" ")[0].split(".")[0]
    with pytest.raises(ValueError, match=rf"^{re.escape(argument)}: got .+, allowed: .+") as error:
        function(**{keyword: value})
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("case", BOTH + DRAFT, ids=name)
def test_draft_step_refuses(case):
    check_refused(draft, *case)


@pytest.mark.parametrize("case", BOTH + VERIFY, ids=name)
def test_speculative_step_refuses(case):
    check_refused(verify, *case)


def test_good_arguments_pass():
    """The cases above differ from these in one argument only."""
    assert draft().tokens.shape == (B,)
    assert verify().tokens.shape == (B, K + 1)
    assert verify(draft_logits=None, draft_stats=None, num_drafts=None).tokens.shape == (B, K + 1)


def test_float64_is_for_the_reference():
    assert draft(logits=zeros(B, V, dtype=torch.float64)).lse.dtype == torch.float64
    for backend in ("auto", "cpu", "triton"):
        with pytest.raises(ValueError, match="^logits: got torch.float64, allowed: .*backend='reference'"):
            draft(logits=zeros(B, V, dtype=torch.float64), backend=backend)
        with pytest.raises(ValueError, match="^target_logits: got torch.float64, allowed: "):
            verify(target_logits=zeros(B, K + 1, V, dtype=torch.float64), backend=backend)


def test_statistics_without_draft_logits():
    with pytest.raises(ValueError, match="^draft_stats: got .+, allowed: None where draft_logits is None"):
        verify(draft_logits=None)


@pytest.mark.parametrize("number", [2, (zeros(B, K),), 1.0])
def test_statistics_are_a_pair(number):
    with pytest.raises(ValueError, match="^draft_stats"):
        verify(draft_stats=number)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("value", [-1.0, -1e-30, 1e-4, NAN, INF, -INF, 1e39])
def test_temperature_values(value, as_tensor):
    given = torch.tensor([1.0, value]) if as_tensor else value
    with pytest.raises(ValueError, match=r"^temperature: got .+, allowed: 0 \(greedy\), or finite and >= 0.001"):
        SamplingParams(temperature=given)


@pytest.mark.parametrize("value", ["0.5", None, torch.ones(2, 2), torch.tensor([True]), [0.5]])
def test_temperature_types(value):
    with pytest.raises(ValueError, match="^temperature: got .+, allowed: "):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(
    "value", [0, 1, 0.0, 0.001, 2.5, torch.tensor(0.5), torch.tensor([0.0, 1.0]), torch.tensor([1, 2])]
)
def test_temperatures_allowed(value):
    assert draft(params=SamplingParams(temperature=value)).tokens.shape == (B,)


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 50), ("top_k", -1), ("top_p", 0.9), ("top_p", 0.0), ("min_p", 0.1), ("top_k", torch.tensor([0, 0]))],
)
def test_filters_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got .+ no filters, allowed: None or "):
        SamplingParams(**{name: value})


def test_neutral_filters_are_allowed():
    SamplingParams(top_k=0, top_p=1.0, min_p=0.0)
    SamplingParams(top_k=None, top_p=None, min_p=None)


def test_explicit_backend_never_falls_back():
    meta = {"seed": 0, "position": 0}
    with pytest.raises(RuntimeError, match="^backend 'cpu' cannot run here: .*meta"):
        draft(logits=zeros(B, V, device="meta"), **meta, backend="cpu")

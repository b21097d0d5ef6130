"""Invalid arguments are refused by a message that names the argument, what was given and what is allowed."""

from __future__ import annotations

import re

import pytest
import torch

from specdec_kernels import SamplingParams, TokenTable, draft_step, speculative_step

B, K, V = 2, 3, 5
N, E, DRAFT_V = 4, 2, 3
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


def words(*shape, dtype=torch.int32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def ascending(*shape, step=1, device="cpu"):
    return (step * torch.arange(shape[-1], device=device)).expand(shape)


def table(**changes) -> TokenTable:
    entries = TokenTable(
        ascending(B, N),
        zeros(B, N),
        zeros(B, N, dtype=torch.bool),
        zeros(B, N, dtype=torch.int32),
        longs(B, E),
        longs(B),
    )
    return entries._replace(**changes)


# (argument, invalid value, what the message must contain besides "argument: got"). The part of the argument before a
# dot or a space is the keyword.
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
    *(
        (f"params.{name}", SamplingParams(**{name: torch.full((B + 1,), value)}), [f"[{B + 1}]", f"[{B}]"])
        for name, value in (("top_k", 1), ("top_p", 0.5), ("min_p", 0.5))
    ),
    ("rule", "typical", ["'typical'", "'token'", "'block'", "'coupled'"]),
    ("rule", 0, ["0", "'token'"]),
    ("rule", None, ["None", "'token'"]),
    ("table", tuple(table()), ["tuple", "TokenTable"]),
    ("table.ids", table(ids=None), ["None", "[B, N]"]),
    ("table.ids", table(ids=longs(B)), [f"[{B}]", "[B, N]"]),
    ("table.ids", table(ids=ascending(B + 1, N)), [f"[{B + 1}, {N}]", f"[{B}, {N}]"]),
    ("table.ids", table(ids=zeros(B, N)), ["torch.float32", "int64"]),
    ("table.ids", table(ids=ascending(B, N, device="meta")), ["meta", "cpu"]),
    ("table.ids", table(ids=longs(B, N)), ["ascend"]),
    ("table.ids", table(ids=ascending(B, N, step=-1)), ["negative"]),
    ("table.ids", table(ids=torch.tensor([[0, 1, 2, 3], [0, 2**62, 1, 2**62]])), ["ascend"]),
    ("table.bias", table(bias=zeros(B, N + 1)), [f"[{B}, {N + 1}]", f"[{B}, {N}]"]),
    ("table.bias", table(bias=zeros(B, N, dtype=torch.float64)), ["torch.float64", "float32"]),
    ("table.bias", table(bias=None), ["NoneType", "tensor"]),
    ("table.in_prompt", table(in_prompt=longs(B, N)), ["torch.int64", "bool"]),
    ("table.in_prompt", table(in_prompt=zeros(B, dtype=torch.bool)), [f"[{B}]", f"[{B}, {N}]"]),
    ("table.count", table(count=longs(B, N)), ["torch.int64", "int32"]),
    ("table.count", table(count=zeros(B, N, dtype=torch.int32, device="meta")), ["meta", "cpu"]),
    ("table.ends / table.first_end", table(ends=None), ["one of them", "both or neither"]),
    ("table.ends / table.first_end", table(first_end=None), ["one of them", "both or neither"]),
    ("table.ends", table(ends=longs(E)), [f"[{E}]", "[B, E]"]),
    ("table.ends", table(ends=longs(B + 1, E)), [f"[{B + 1}, {E}]", f"[{B}, {E}]"]),
    ("table.ends", table(ends=2), ["2", "[B, E]"]),
    ("table.ends", table(ends=zeros(B, E)), ["torch.float32", "int64"]),
    ("table.first_end", table(first_end=longs(B + 1)), [f"[{B + 1}]", f"[{B}]"]),
    ("table.first_end", table(first_end=zeros(B)), ["torch.float32", "int64"]),
    ("table.first_end", table(first_end=-1), ["-1", "integer from 0"]),
    ("backend", "opencl", ["'opencl'", "'auto'", "'reference'", "'cpu'", "'triton'", "'cuda'"]),
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
    ("d2t", [0, 1], ["list", "tensor"]),
    ("d2t", ascending(V + 1), [f"[{V + 1}]", f"[{V}]"]),
    ("d2t", ascending(V).int(), ["torch.int32", "int64"]),
    ("d2t", ascending(V, device="meta"), ["meta", "cpu"]),
    ("d2t", longs(V), ["ascend"]),
    ("d2t", ascending(V) - 1, ["negative"]),
    ("allowed", [[1]], ["list", "tensor"]),
    ("allowed", words(B, 2), [f"[{B}, 2]", f"[{B}, 1]"]),
    ("allowed", words(B, K + 1, 1), [f"[{B}, {K + 1}, 1]", f"[{B}, 1]"]),
    ("allowed", words(B, 1, dtype=torch.int64), ["torch.int64", "int32"]),
    ("allowed", words(B, 1, device="meta"), ["meta", "cpu"]),
]
# Of ``draft_step`` with a table and offset=2.
DRAFTS = [
    (None, ["None", "offset=2", "[B, 2]"]),
    (longs(B, 1), [f"[{B}, 1]", f"[{B}, 2]"]),
    (longs(B + 1, 2), [f"[{B + 1}, 2]", f"[{B}, 2]"]),
    (zeros(B, 2), ["torch.float32", "int64 or int32"]),
    (longs(B, 2, device="meta"), ["meta", "cpu"]),
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
    ("allowed", [[1]], ["list", "tensor"]),
    ("allowed", words(B, 1), [f"[{B}, 1]", f"[{B}, {K + 1}, 1]"]),
    ("allowed", words(B, K, 1), [f"[{B}, {K}, 1]", f"[{B}, {K + 1}, 1]"]),
    ("allowed", words(B, K + 1, 1, dtype=torch.bool), ["torch.bool", "int32"]),
    ("allowed", words(B, K + 1, 1, device="meta"), ["meta", "cpu"]),
    ("masked_drafts", 1, ["1", "0 without allowed"]),
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
]
# Of ``speculative_step`` with draft_logits [B, K, DRAFT_V].
REDUCED = [
    ([0, 1], ["list", "tensor"]),
    (ascending(V), [f"[{V}]", f"[{DRAFT_V}]"]),
    (ascending(DRAFT_V).int(), ["torch.int32", "int64"]),
    (ascending(DRAFT_V, device="meta"), ["meta", "cpu"]),
    (longs(DRAFT_V), ["ascend"]),
    (ascending(DRAFT_V) - 1, ["negative"]),
    (ascending(DRAFT_V) + V - 2, [str(V), f"ids below {V}", "target"]),
]


def name(case) -> str:
    return case[0].replace(" ", "_") if isinstance(case, tuple) else ""


def check_refused(function, argument: str, value, parts: list[str], **others) -> None:
    keyword = argument.split(" ")[0].split(".")[0]
    with pytest.raises(ValueError, match=rf"(?s)^{re.escape(argument)}: got .+, allowed: .+") as error:
        function(**{keyword: value}, **others)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("case", BOTH + DRAFT, ids=name)
def test_draft_step_refuses(case):
    check_refused(draft, *case)


@pytest.mark.parametrize("case", BOTH + VERIFY, ids=name)
def test_speculative_step_refuses(case):
    check_refused(verify, *case)


@pytest.mark.parametrize("case", DRAFTS)
def test_drafts_are_refused(case):
    check_refused(draft, "drafts", *case, table=table(), offset=2)


@pytest.mark.parametrize("case", REDUCED)
def test_reduced_vocabulary_is_refused(case):
    check_refused(verify, "d2t", *case, draft_logits=zeros(B, K, DRAFT_V))


@pytest.mark.parametrize("number", [-1, K + 1, 1.0, True, None])
def test_masked_drafts_are_counted(number):
    check_refused(verify, "masked_drafts", number, [repr(number), f"0 to K = {K}"], allowed=words(B, K + 1, 1))


def test_masked_drafts_have_logits():
    none = {"draft_logits": None, "draft_stats": None}
    check_refused(verify, "masked_drafts", 1, ["draft_logits"], allowed=words(B, K + 1, 1), **none)


def test_words_reach_all_ids_of_a_map():
    d2t = ascending(V, step=9)  # up to 36
    for given in (words(B, 1), words(B), [[0, 0]]):
        check_refused(draft, "allowed", given, [], d2t=d2t)
    assert draft(d2t=d2t, allowed=words(B, 2) - 1).tokens.shape == (B,)


def test_good_arguments_pass():
    """The cases above differ from these valid arguments in one argument only."""
    assert draft().tokens.shape == (B,)
    assert draft(table=table(), offset=2, drafts=longs(B, 2)).tokens.shape == (B,)
    assert draft(table=table(), offset=2, drafts=longs(B, 2).int()).tokens.shape == (B,)
    assert draft(d2t=ascending(V, step=9)).tokens.shape == (B,)
    none = {"draft_logits": None, "draft_stats": None}
    for more in (
        {},
        {"table": table()},
        {"table": table(ends=None, first_end=None)},
        {"num_drafts": None, **none},
        {"draft_stats": list(stats()), "rule": "block"},
        {"draft_logits": zeros(B, K, DRAFT_V), "d2t": ascending(DRAFT_V) + V - DRAFT_V},
        {"allowed": words(B, K + 1, 1), "masked_drafts": K},
        {"rule": "coupled", **none},
    ):
        assert verify(**more).tokens.shape == (B, K + 1)


def test_padding_of_tables_may_repeat():
    padded = torch.tensor([[0, 3, 2**62, 2**62], [2**62] * 4])
    assert verify(table=table(ids=padded)).tokens.shape == (B, K + 1)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_need_a_table(name):
    for function in (draft, verify):
        with pytest.raises(ValueError, match="^table: got None with penalties in params, allowed: a TokenTable"):
            function(params=SamplingParams(**{name: 0.5}))
        function(params=SamplingParams(**{name: 1.0 if name == "repetition_penalty" else 0.0}))
        function(params=SamplingParams(**{name: 0.5}), table=table())


@pytest.mark.parametrize("name", ["draft_logits", "draft_stats"])
def test_coupled_takes_no_q(name):
    none = {"draft_logits": None, "draft_stats": None}
    value = {"draft_logits": zeros(B, K, V), "draft_stats": stats()}[name]
    with pytest.raises(ValueError, match=f"^{name}: got .*'coupled', allowed: None"):
        verify(rule="coupled", **{**none, name: value})


def test_a_map_needs_draft_logits():
    with pytest.raises(ValueError, match="^d2t: got .+, allowed: None where draft_logits is"):
        verify(draft_logits=None, draft_stats=None, d2t=ascending(V))


def test_float64_is_for_the_reference():
    assert draft(logits=zeros(B, V, dtype=torch.float64)).lse.dtype == torch.float64
    for backend in ("auto", "cpu", "triton"):
        with pytest.raises(ValueError, match="^logits: got torch.float64, allowed: .*backend='reference'"):
            draft(logits=zeros(B, V, dtype=torch.float64), backend=backend)
        with pytest.raises(ValueError, match="^target_logits: got torch.float64, allowed: "):
            verify(target_logits=zeros(B, K + 1, V, dtype=torch.float64), backend=backend)


def test_statistics_without_draft_logits():
    with pytest.raises(ValueError, match="^draft_stats: got .+, allowed: None where draft_logits is"):
        verify(draft_logits=None)


@pytest.mark.parametrize("number", [2, (zeros(B, K),), 1.0])
def test_statistics_are_a_pair(number):
    with pytest.raises(ValueError, match="^draft_stats"):
        verify(draft_stats=number)


def test_explicit_backend_never_falls_back():
    meta = {"seed": 0, "position": 0}
    with pytest.raises(RuntimeError, match="^backend 'cpu' cannot run here: .*meta"):
        draft(logits=zeros(B, V, device="meta"), **meta, backend="cpu")

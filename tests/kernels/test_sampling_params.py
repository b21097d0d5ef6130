"""Invalid sampling parameters are refused at construction, with a message that names the parameter, its value and what
is allowed. Both operations accept valid ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels import SamplingParams, SamplingTensors, TokenTable, draft_step, speculative_step, validation
from specdec_kernels.testing.inputs import random_step

FILTERS, PENALTIES = SamplingParams.FILTERS, SamplingParams.PENALTIES
NAN, INF = float("nan"), float("inf")
REFUSED = {
    "top_k": (-1, 1.5, True, "50", 2**24 + 1, NAN),
    "top_p": (-0.1, 1.0001, NAN, INF, "0.9", True),
    "min_p": (-1e-9, 1.5, NAN, -INF, [0.1]),
    "repetition_penalty": (0.0, -1.0, NAN, INF, 1001.0, 1e-4),
    "presence_penalty": (-1001.0, NAN, INF, "1"),
    "frequency_penalty": (1001.0, NAN, -INF, False),
}
ALLOWED = {
    "top_k": (0, 1, 50, 2**24, torch.tensor([0, 7]), torch.tensor([3, 4], dtype=torch.int32)),
    "top_p": (0, 1, 0.0, 0.5, 1.0, torch.tensor([0.0, 1.0])),
    "min_p": (0, 1, 0.0, 0.5, 1.0, torch.tensor(0.5)),
    "repetition_penalty": (0.001, 1, 1.3, 1000, torch.tensor([1.0, 2.0], dtype=torch.float64)),
    "presence_penalty": (0, -1000.0, 2, 1000, torch.tensor([1, -2])),
    "frequency_penalty": (0, -1000.0, 0.5, 1000, torch.tensor([0.5, 0.0], dtype=torch.bfloat16)),
}
TENSORS = (torch.ones(2, 2), torch.tensor([True]))


def use(params: SamplingParams) -> None:
    """Calls both operations with these parameters and an empty table."""
    empty = torch.zeros(2, 0)
    table = TokenTable(empty.long(), empty, empty.bool(), empty.int())
    options = {"params": params, "seed": 0, "position": 0, "table": table, "backend": "reference"}
    assert draft_step(torch.zeros(2, 5), offset=0, **options).tokens.min() >= 0
    out = speculative_step(torch.zeros(2, 2, 5), torch.zeros(2, 1, dtype=torch.int64), None, **options)
    assert out.num_emitted.min() >= 1


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("value", [-1.0, -1e-30, 1e-45, 1e-4, NAN, INF, -INF, 1.1e30, 3e38, 1e39])
def test_temperature_values(value, as_tensor):
    given = torch.tensor([1.0, value]) if as_tensor else value
    with pytest.raises(ValueError, match=r"^temperature: got .+, allowed: 0 \(greedy\), or 0.001 to 1e\+30"):
        SamplingParams(temperature=given)


@pytest.mark.parametrize("value", ["0.5", None, torch.ones(2, 2), torch.tensor([True]), [0.5]])
def test_temperature_types(value):
    with pytest.raises(ValueError, match="^temperature: got .+, allowed: "):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(
    "value", [0, 1, 0.0, 0.001, 2.5, torch.tensor(0.5), torch.tensor([0.0, 1.0]), torch.tensor([1, 2])]
)
def test_temperatures_allowed(value):
    use(SamplingParams(temperature=value))


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in REFUSED.items() for v in (*values, *TENSORS)])
def test_sampling_parameters_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got .+, allowed: "):
        SamplingParams(**{name: value})
    if isinstance(value, float):  # the same value in a tensor, at any place of the batch
        with pytest.raises(ValueError, match=rf"^{name}: got .+, allowed: "):
            SamplingParams(**{name: torch.tensor([1.0, value])})


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in ALLOWED.items() for v in (*values, None)])
def test_sampling_parameters_allowed(name, value):
    use(SamplingParams(**{name: value}))


def test_a_top_k_of_fractions_is_refused():
    with pytest.raises(ValueError, match="^top_k: got a torch.float32 tensor .*integers"):
        SamplingParams(top_k=torch.tensor([1.0, 2.0]))


def test_tensors_are_the_parameters_of_their_columns():
    """Of each name its own column, in both operations; what is off stays off."""
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {"temperature", *FILTERS, *PENALTIES}
    columns = {
        "temperature": torch.tensor([0.7, 0.0, 1.3]),
        "top_k": torch.tensor([4, 0, 30]),
        "top_p": torch.tensor([1.0, 0.5, 0.7]),
        "min_p": torch.tensor([0.1, 0.0, 0.02]),
        "repetition_penalty": torch.tensor([1.3, 1.0, 0.8]),
        "presence_penalty": torch.tensor([0.5, 0.0, -1.0]),
        "frequency_penalty": torch.tensor([0.0, 0.3, 2.0]),
    }
    parts = [torch.stack([columns[n].float() for n in names], 1) for names in (FILTERS, PENALTIES)]
    inputs = random_step(3, 2, 40, stats=True, table=9)
    common = {"seed": inputs.seed, "position": inputs.position}
    for used in ((), FILTERS, PENALTIES, FILTERS + PENALTIES):
        kept = [part if {*names} & {*used} else None for names, part in zip((FILTERS, PENALTIES), parts, strict=True)]
        params = SamplingParams(**{name: columns[name] for name in ("temperature", *used)})
        tensors = SamplingTensors(columns["temperature"], *kept, *inputs.table)
        results = [
            draft_step(inputs.draft_logits[:, 0], p, offset=0, table=table, **common)
            + speculative_step(
                inputs.target_logits, inputs.draft_tokens, None, params=p, table=table, **common, log_probs=True
            )
            for p, table in ((params, inputs.table), (tensors, None))
        ]
        for wanted, got in zip(*results, strict=True):
            assert torch.equal(wanted.nan_to_num(), got.nan_to_num())


@pytest.mark.parametrize("part", ["temperature", "filters", "penalties"])
@pytest.mark.parametrize(("batch", "dtype"), [(3, torch.float32), (1, torch.float32), (2, torch.float64)])
def test_tensors_of_another_form_are_refused(part, batch, dtype):
    wrong = torch.ones((batch,) if part == "temperature" else (batch, 3), dtype=dtype)
    tensors = SamplingTensors(torch.ones(2))._replace(**{part: wrong})
    with pytest.raises(ValueError, match=rf"^params.{part}: got .+, allowed: "):
        draft_step(torch.zeros(2, 5), tensors, seed=0, position=0, offset=0)


def test_tensors_hold_the_table():
    table = random_step(2, 1, 5, table=3).table
    with pytest.raises(ValueError, match="^table: got a TokenTable beside SamplingTensors, allowed: None"):
        draft_step(torch.zeros(2, 5), SamplingTensors(torch.ones(2)), seed=0, position=0, offset=0, table=table)


class Operations(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_numbers_become_tensors_once():
    """Of every batch and of all that differ; what is made inside of ``inference_mode`` serves outside of it, too."""
    logits, options = torch.randn(3, 11), {"seed": 5, "position": 0, "offset": 0}
    with torch.inference_mode():
        wanted = draft_step(logits, SamplingParams(top_k=3, min_p=0.011), **options)
    with Operations() as later:
        got = draft_step(logits, SamplingParams(top_k=3, min_p=0.011), **options)
    assert "aten.stack.default" not in later.names and all(map(torch.equal, got, wanted))
    for params, batch in ((SamplingParams(top_k=2, min_p=0.011), 3), (SamplingParams(top_k=3, min_p=0.011), 2)):
        with Operations() as first:
            got = draft_step(logits[:batch], params, **options)
        assert "aten.stack.default" in first.names
        assert got.cutoff.tolist() == logits[:batch].topk(params.top_k).values[:, -1].tolist()
    assert not validation._kept_columns(("top_k",), (3,), 3, logits.device, 0).is_inference()


def test_no_tensor_is_kept_of_a_graph_or_a_tracer(monkeypatch):
    """What is made while a CUDA graph is captured lives as long as it, and a fake tensor has no numbers."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert validation._stream_of_constants(torch.device("cuda", 0)) is None
    assert validation._stream_of_constants(torch.device("meta")) is None
    validation._kept_columns.cache_clear()
    with FakeTensorMode():
        draft_step(torch.zeros(2, 7), SamplingParams(top_k=3), seed=0, position=0, offset=0)
    assert validation._kept_columns.cache_info().currsize == 0
    assert draft_step(torch.zeros(2, 7), SamplingParams(top_k=3), seed=0, position=0, offset=0).tokens.min() >= 0

"""Linear layers on a CPU: the product, in one order of additions whatever the number of rows and the dtype of the
weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from specdec_layers import linear, linears
from specdec_layers.ops import handle


def layer(inputs: int, outputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("inputs", [1, 3, 8, 16, 31, 64, 100, 259])
def test_it_is_the_product(instruction_set, inputs):
    for outputs in (1, 2, 5, 13, 64):
        weight, bias = layer(inputs, outputs)
        x = torch.randn(1, 25, inputs, generator=torch.Generator().manual_seed(1))
        for rows in range(1, 26):
            exact = x[:, :rows].double() @ weight.double().T
            bound = 2e-7 * inputs**0.5 * (x[:, :rows].double().abs() @ weight.double().T.abs()) + 1e-12
            assert ((linear(x[:, :rows], weight, None) - exact).abs() <= bound).all()
            bound += 1e-6 * (exact.abs() + bias.abs())
            assert ((linear(x[:, :rows], weight, bias) - exact - bias).abs() <= bound).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(224, 101), (576, 36), (37, 64), (5, 3), (2500, 21)])
def test_a_row_does_not_depend_on_the_others(instruction_set, inputs, outputs):
    """Nor on the place of an output among the others, nor on the number of threads."""
    weight, bias = layer(inputs, outputs)
    x = torch.randn(2, 10, inputs, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([linear(row[None, None], weight, bias) for row in x.flatten(0, 1)], 1).view(2, 10, outputs)
    many = linear(x[:, :9].repeat(1, 7, 1), weight, bias)
    assert torch.equal(many, alone[:, :9].repeat(1, 7, 1))  # more than a block
    for rows in range(1, 11):
        assert torch.equal(linear(x[:, :rows], weight, bias), alone[:, :rows])
        assert torch.equal(linear(x[:1, -rows:], weight, bias), alone[:1, -rows:])
    for first in range(1, 4):
        assert torch.equal(linear(x, weight[first:], bias[first:]), alone[..., first:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        wide, many = layer(inputs, 3000)
        two = linear(x, wide, many)
        torch.set_num_threads(1)
        assert torch.equal(two, linear(x, wide, many))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("inputs", "outputs"), [(224, 101), (37, 5), (2500, 9)])
def test_weights_of_bfloat16(instruction_set, inputs, outputs):
    """They are numbers of float32, too, so nothing changes, whichever way they are read."""
    weight, bias = layer(inputs, outputs)
    weight = weight.bfloat16()
    x = torch.randn(1, 60, inputs, generator=torch.Generator().manual_seed(4))
    for rows in (*range(1, 14), 49, 60):
        assert torch.equal(linear(x[:, :rows], weight, bias), linear(x[:, :rows], weight.float(), bias))


def test_layers_together(instruction_set):
    """The bits of each by itself."""
    sizes, x = (5, 1, 300, 64), torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(5))
    layers = [layer(96, outputs, seed=i) for i, outputs in enumerate(sizes)]
    weights = [w.bfloat16() if i == 2 else w for i, (w, _) in enumerate(layers)]
    biases = [None if i == 1 else b for i, (_, b) in enumerate(layers)]
    found = linears(x, weights, biases)
    assert all(torch.equal(y, linear(x, w, b)) for y, w, b in zip(found, weights, biases, strict=True))
    assert linears(x, [], []) == []
    with pytest.raises(RuntimeError, match="there are other biases than weights"):
        linears(x, weights, biases[:2])


def test_a_fault_stays_in_its_row(instruction_set):
    weight, _ = layer(64, 9)
    x = torch.ones(1, 4, 64)
    x[0, 1, 63], x[0, 2, 0] = float("nan"), float("inf")
    y = linear(x, weight.abs(), None)
    assert y[0, 1].isnan().all() and (y[0, 2] == float("inf")).all() and y[0, [0, 3]].isfinite().all()


def test_tensors_of_any_strides():
    weight, bias = layer(33, 12)
    x = torch.randn(3, 4, 33)
    expected = linear(x, weight, bias)
    assert torch.equal(linear(x.transpose(0, 1).contiguous().transpose(0, 1), weight, bias), expected)
    assert torch.equal(linear(x, weight.T.contiguous().T, bias.repeat_interleave(2)[::2]), expected)


def test_nothing_to_compute():
    weight, bias = layer(4, 3)
    assert linear(torch.ones(0, 2, 4), weight, bias).shape == (0, 2, 3)
    assert linear(torch.ones(1, 2, 4), weight[:0], None).shape == (1, 2, 0)
    assert torch.equal(linear(torch.ones(1, 2, 0), weight[:, :0], bias), bias.expand(1, 2, 3))


@pytest.mark.parametrize(
    ("x", "weight", "bias", "name"),
    [
        (torch.ones(2, 4), torch.ones(3, 4), None, "x"),
        (torch.ones(1, 2, 4).double(), torch.ones(3, 4), None, "x"),
        (torch.ones(1, 2, 4), torch.ones(3, 5), None, "weight"),
        (torch.ones(1, 2, 4), torch.ones(3, 4).double(), None, "weight"),
        (torch.ones(1, 2, 4).bfloat16(), torch.ones(3, 4).bfloat16(), None, "x"),
        (torch.ones(1, 2, 4), torch.ones(3, 4), torch.ones(4), "bias"),
    ],
)
def test_wrong_tensors_are_refused(x, weight, bias, name):
    with pytest.raises(RuntimeError, match=f"specdec_layers: {name} has a wrong shape"):
        linear(x, weight, bias)


@pytest.mark.parametrize("rows", [3, 4])
def test_its_fake_has_its_shape(rows):
    weight, bias = layer(6, 5)
    arguments = (torch.randn(2, rows, 6), [weight, weight[:3]], [bias, None], [0, 0])
    torch.library.opcheck(handle("linear"), arguments, test_utils=("test_schema", "test_faketensor"))


def test_one_graph_for_all_numbers_of_rows():
    weight, bias = layer(100, 50)
    graphs = []
    compiled = torch.compile(
        lambda x: linear(x, weight, bias),
        fullgraph=True,
        dynamic=True,
        backend=lambda graph, _: graphs.append(graph) or graph,
    )
    with torch.inference_mode():
        for rows in (3, 4, 5, 30):
            x = torch.randn(2, rows, 100)
            assert torch.equal(compiled(x), linear(x, weight, bias))
    assert len(graphs) == 1


def test_it_loads_what_it_needs():
    code = "import torch, specdec_layers as s; print(s.linear(torch.ones(1, 1, 2), torch.ones(3, 2)).tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[[[2.0, 2.0, 2.0]]]"


def test_it_is_for_cpus():
    with pytest.raises(RuntimeError, match="it runs on CPU tensors, not meta"):
        linear(torch.ones(1, 1, 2, device="meta"), torch.ones(3, 2, device="meta"))

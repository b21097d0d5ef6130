"""bench_products.py: what it reports, and that a run ends when its time is up."""

from __future__ import annotations

import json

import bench_products
from support.benches import run_main


def test_what_it_reports(tmp_path):
    done = run_main(bench_products, "--quick", "--seconds", "0.001", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content["skipped"] == [] and len(content["rows"]) == 5 * len(bench_products.ROWS)
    shapes = bench_products.products_of(*bench_products.TINY["tiny"])
    for row in content["rows"]:
        assert (row["outputs"], row["inputs"]) == shapes[row["product"]] and row["weights"] > 1
        assert row["error"] < 1e-4 and row["unavailable"] == {}
        assert row["ratios"].keys() >= {"ours/pytorch", "ours/floor", "pytorch/floor"}


def test_it_ends_when_its_time_is_up(tmp_path):
    done = run_main(bench_products, "--quick", "--limit", "0", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content["rows"] == [] and len(content["skipped"]) == 5 * len(bench_products.ROWS)


def test_it_has_the_ten_products_of_both_models():
    """Llama's parameters but for embeddings and norms."""
    for sizes, layers, parameters in zip(bench_products.MODELS.values(), (32, 16), (7.50e9, 1.235e9), strict=True):
        found = {name: outputs * inputs for name, (outputs, inputs) in bench_products.products_of(*sizes).items()}
        assert len(found) == 5
        head = found.pop("head")
        assert abs(layers * sum(found.values()) + head - parameters) < 0.01 * parameters

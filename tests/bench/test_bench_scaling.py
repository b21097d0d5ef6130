"""bench_scaling.py: that its fits find the exponents of curves that are known, and what it reports."""

from __future__ import annotations

import json
import math

import bench_scaling
import pytest
from figures import Results
from figures_scaling import roofline, scaling
from scaling_fit import fit
from support.benches import run_main

NOISE = (1.01, 0.99, 1.005, 0.995, 1.01, 0.99)
X = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_a_power_is_found(exponent):
    found = fit(X, [3e-3 * x**exponent * noise for x, noise in zip(X, NOISE, strict=True)])
    low, high = found["interval"]
    assert low < exponent < high and high - low < 0.05 and found["floor"] == 0
    assert found["factor"] == pytest.approx(3e-3, rel=0.03) and found["error"] < 0.012


def test_a_floor_is_found_where_it_is_plain():
    found = fit(X, [(5.0 + 0.8 * x) * noise for x, noise in zip(X, NOISE, strict=True)])
    assert found["floor"] == pytest.approx(5.0, rel=0.2)
    assert found["interval"][0] < 1.0 < found["interval"][1]


def test_few_points_have_no_interval():
    assert fit((1, 2), (1.0, 2.0))["interval"] is None and fit((1, 2), (1.0, 2.0))["exponent"] == pytest.approx(1)


def test_its_settings_differ_in_one_thing():
    for curve, values in bench_scaling.CURVES.items():
        shapes = bench_scaling.settings_of(curve)
        assert [getattr(shape, curve) for shape in shapes] == [*values]
        assert len({tuple(getattr(s, n) for n in "BKV" if n != curve) for s in shapes}) == 1


@pytest.mark.nightly
def test_quick_run(tmp_path):
    path = tmp_path / "scaling.json"
    result = run_main(bench_scaling, "--quick", "--json", path)
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert written["complete"] and [row["part"] for row in written["rows"]] == [
        *["operations"] * 3, *["context"] * 2, *["size"] * 2, *["roofline"] * 2,
    ]  # fmt: skip
    for row in written["rows"][:-2]:
        assert len(row["points"]) == 3 and math.isfinite(row["fit"]["exponent"])
    for row in written["rows"][-2:]:
        assert 0 < row["alpha"] <= 1 and all(math.isfinite(e) for e in row["error"].values())
    path.write_text(json.dumps(written | {"quick": False}))
    assert "`speculative_step`" in scaling(Results(tmp_path)) and "speed-up" in roofline(Results(tmp_path))

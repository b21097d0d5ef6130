"""The chi-square law that power is computed with, against scipy's."""

from __future__ import annotations

import pytest

from specdec_kernels.testing import chi_square, detectable_bias
from specdec_kernels.testing.chi_square import chi_square_tail


@pytest.mark.parametrize(
    "statistic, degrees, noncentrality",
    [(3, 2, 0), (200, 20, 0), (7000, 6560, 0), (150, 31, 70), (7000, 6560, 300), (50, 1, 30), (400, 10, 500)],
)
def test_tails(statistic, degrees, noncentrality):
    stats = pytest.importorskip("scipy.stats")
    law = stats.ncx2(degrees, noncentrality) if noncentrality else stats.chi2(degrees)
    assert chi_square_tail(statistic, degrees, noncentrality) == pytest.approx(law.sf(statistic), rel=1e-6)


def test_detectable_bias_has_its_power():
    stats = pytest.importorskip("scipy.stats")
    for error in (0.0, 40.0):
        found = detectable_bias(2000, 31, 1e-6, noncentrality=error)
        law = stats.ncx2(31, error) if error else stats.chi2(31)
        assert stats.ncx2.sf(law.isf(1e-6), 31, 2000 * found**2) == pytest.approx(0.999, abs=1e-4)


def test_a_law_known_up_to_rounding():
    """What the law's own error explains is not held against the counts; a bias beyond it is."""
    law = {i: 0.1 for i in range(10)}
    for off, passes in ((0.02, True), (0.05, False)):
        counts = {i: round(100_000 * 0.1 * (1 + (off if i % 2 else -off))) for i in range(10)}
        assert chi_square(counts, law, 1e-4).p_value < 1e-4
        assert (chi_square(counts, law, 1e-4, tolerance=0.02).p_value > 1e-4) == passes

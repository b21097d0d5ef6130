"""The report's pictures have the numbers of the results: read back from the figures, not from the tables."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
import matplotlib
import numpy as np
from specdec.evaluation.report import read_results
from specdec.evaluation.report.acceptance import acceptance
from specdec.evaluation.report.heat_map import heat_maps
from specdec.evaluation.report.lengths import lengths
from specdec.evaluation.report.look import Look
from specdec.evaluation.report.speeds import speeds
from specdec.evaluation.report.step_time import step_times
from specdec.evaluation.theory import expected_speedup
from support.bench_results import METHODS, SPEED, SPREAD, cell, grid, results

WIDE, NARROW = Look(), Look(narrow=True)


def drawn(section, at: int = 0, look: Look = WIDE):
    """The first axes of a section's picture, as it was drawn; nothing global is left changed."""
    before = dict(matplotlib.rcParams)
    with look.style():
        figure = section.plots[at].draw(look)
        figure.draw_without_rendering()
    assert dict(matplotlib.rcParams) == before
    return figure.axes[0]


def of(cells, **changed):
    return read_results(results(cells, **changed))


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


@pytest.mark.parametrize("look", [WIDE, NARROW], ids=["wide", "narrow"])
def test_bars_are_the_fastest_of_each_method_in_order_with_quartiles(look):
    cells = grid(temperatures=(0.0,))
    axes = drawn(speeds(of(cells)), look=look)
    best = {}
    for c in cells:
        speed = c["tokens_per_second"]["median"]
        best[c["method"]] = max(best.get(c["method"], 0.0), speed)
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx(sorted(best.values(), reverse=True))
    assert [patch.get_y() + patch.get_height() / 2 for patch in axes.patches] == pytest.approx(range(len(best)))
    bars = [c.lines[2][0].get_segments()[0] for c in axes.containers if hasattr(c, "has_xerr")]
    assert [[x for x, _ in ends] for ends in bars] == [
        pytest.approx([w * (1 - SPREAD), w * (1 + SPREAD)]) for w in widths
    ]
    names = words(axes) if look.narrow else [label.get_text() for label in axes.get_yticklabels()]
    names = [name for name in names if not name[0].isdigit()]
    assert names == [
        "draft model, K adapts",
        "prompt lookup, K adapts",
        "plain decoding by specdec",
        "transformers generate",
    ]


def test_both_baselines_are_lines_and_hatched():
    axes = drawn(speeds(of(grid())))
    lines = [c for c in axes.collections if c.get_label() == "_baseline"]
    assert {segment[0][0] for line in lines for segment in line.get_segments()} == {SPEED, 0.8 * SPEED}
    assert [bool(patch.get_hatch()) for patch in axes.patches] == [False, False, True, True]
    assert len({patch.get_hatch() for patch in axes.patches[2:]}) == 2


def test_the_fastest_and_what_is_within_noise_of_it_are_named():
    cells = [cell("transformers", None), cell("plain", None), cell("model", 4), cell("lookup", 4)]
    about = {"temperature": 0.0, "batch": 1, "top_k": None, "top_p": None, "min_p": None, "words": "close"}
    close = {**about, "winner": None, "within_noise": [cells[2]["id"], cells[3]["id"]]}
    axes = drawn(speeds(of(cells, verdicts=[close])))
    assert [text.endswith("within noise") for text in words(axes)] == [True, True, False, False]
    axes = drawn(speeds(of(cells)))
    assert words(axes)[0].endswith("×) fastest") and words(axes)[2] == "100"


def test_each_setting_has_a_picture_of_its_own():
    section = speeds(of(grid(temperatures=(0.0, 0.5), batches=(1, 8))))
    assert [plot.name for plot in section.plots] == ["speed-t0-b1", "speed-t0-b8", "speed-t0.5-b1", "speed-t0.5-b8"]
    assert section.plots[3].title == "Tokens a second: temperature 0.5, 8 sequences at a time"


@pytest.mark.parametrize("method", METHODS)
def test_speed_up_against_k_with_its_prediction(method):
    axes = drawn(lengths(of(grid())), at=1)  # at temperature 1
    alpha, c = METHODS[method][0] - 0.1, METHODS[method][1]
    name = {"model": "draft model", "lookup": "prompt lookup"}[method]
    measured = next(e for e in axes.containers if e.get_label() == name)
    assert list(measured.lines[0].get_xdata()) == [1, 2, 4]
    expected = [0.95 * expected_speedup(alpha, c, k) for k in (1, 2, 4)]
    assert list(measured.lines[0].get_ydata()) == pytest.approx(expected)
    low, high = zip(*(sorted(y for _, y in ends) for ends in measured.lines[2][0].get_segments()), strict=True)
    assert low == pytest.approx([y * (1 - SPREAD) for y in expected])
    assert high == pytest.approx([y * (1 + SPREAD) for y in expected])
    curves = {line.get_color(): line for line in axes.lines if line.get_label() == "_predicted"}
    curve = curves[measured.lines[0].get_color()]
    assert list(curve.get_xdata()) == [0, 1, 2, 3, 4] and curve.get_linestyle() == "--"
    assert list(curve.get_ydata()) == pytest.approx([expected_speedup(alpha, c, k) for k in range(5)])


def test_a_k_that_adapts_stands_at_the_end_of_its_axis():
    axes = drawn(lengths(of(grid())))
    ticks = dict(zip(axes.get_xticks(), [t.get_text() for t in axes.get_xticklabels()], strict=True))
    adaptive = [e.lines[0] for e in axes.containers if e.get_label() == "_adapts"]
    assert ticks[5] == "adapts" and [list(line.get_xdata()) for line in adaptive] == [[5], [5]]


def test_series_differ_by_marker_as_well_as_by_colour():
    axes = drawn(lengths(of(grid())))
    series = [e.lines[0] for e in axes.containers if e.get_label() in ("draft model", "prompt lookup")]
    assert len({line.get_marker() for line in series}) == len({line.get_color() for line in series}) == 2


def test_without_a_prediction_there_is_no_curve():
    cells = [c | {"predicted": None} for c in grid(temperatures=(0.0,))]
    section = lengths(of(cells))
    axes = drawn(section)
    assert not [line for line in axes.lines if line.get_label() == "_predicted"] and len(axes.containers) == 4
    assert section.left_out[0].startswith("No predicted curve (greedy")
    assert lengths(of(grid())).left_out == ()


def test_the_best_k_is_said_beside_the_predicted_one():
    says = lengths(of(grid(temperatures=(0.0,), lengths=(1, 4, 10)))).plots[0].says
    assert says.startswith(
        "draft model: K = 4 is the fastest that was measured, K = 6 the predicted one (alpha 0.80, c 0.10)"
    )


def test_a_map_has_a_number_for_each_k_and_temperature():
    section = heat_maps(of(grid(temperatures=(0.0, 0.5, 1.0))))
    axes = drawn(section)
    alpha, c = METHODS["model"]
    expected = [[0.95 * expected_speedup(alpha - 0.1 * t, c, k) for k in (1, 2, 4, 5)] for t in (0.0, 0.5, 1.0)]
    assert np.asarray(axes.images[0].get_array()) == pytest.approx(np.array(expected))
    assert words(axes) == [f"{value:.2f}" for row in expected for value in row]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "4", "adapts"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "0.5", "1"]
    assert [plot.name for plot in section.plots] == ["map-1-model-token-b1", "map-2-lookup-token-b1"]
    bold = [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]
    assert bold == [f"{max(row):.2f}" for row in expected] and len(axes.patches) == 3


def test_a_map_has_gaps_where_nothing_was_measured():
    cells = [cell("model", k, t) for t in (0.0, 1.0) for k in (1, 2)]
    axes = drawn(heat_maps(of(cells[:3])))
    assert words(axes)[3] == "–" and np.isnan(np.ma.filled(axes.images[0].get_array(), np.nan)[1, 1])


def test_greedy_text_stands_in_the_maps_of_all_filters():
    cells = [cell("model", k, t) for t in (0.0, 1.0) for k in (1, 2)]
    for c in cells[2:]:
        c |= {"top_p": 0.9, "id": c["id"] + " top-p=0.9"}
    section = heat_maps(of(cells))
    assert [plot.name for plot in section.plots] == ["map-1-model-token-b1-top-p0.9"]
    assert [t.get_text() for t in drawn(section).get_yticklabels()] == ["0", "1"]


def test_acceptance_is_that_of_the_largest_k_beside_powers_of_alpha():
    axes = drawn(acceptance(of(grid())))
    lines = {line.get_label(): line for line in axes.lines}
    model = lines["draft model, K = 4"]
    assert list(model.get_xdata()) == [1, 2, 3, 4]
    assert list(model.get_ydata()) == pytest.approx([100 * 0.8**i for i in (1, 2, 3, 4)])
    uneven = grid(temperatures=(0.0,))
    for c in uneven:
        if c["method"] == "model":
            c["accepted_by_position"] = [0.9, 0.5, 0.4, 0.35][: len(c["accepted_by_position"])]
    axes = drawn(acceptance(of(uneven)))
    assert list(axes.lines[0].get_ydata()) == pytest.approx([90, 50, 40, 35])
    assert list(axes.lines[1].get_ydata()) == pytest.approx([100 * 0.8**i for i in (1, 2, 3, 4)])
    assert axes.lines[1].get_linestyle() == "--" and axes.lines[1].get_color() == axes.lines[0].get_color()


def test_the_parts_of_a_step_add_up_to_its_time():
    cells = grid(temperatures=(0.0,), lengths=(4,))
    axes = drawn(step_times(of(cells)))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["plain decoding by specdec", "prompt lookup, K = 4", "draft model, K = 4"]  # by their time
    model = next(c for c in cells if c["method"] == "model")
    step = 1e3 * model["time_per_output_token"]["median"] * model["tau"]
    bars = dict(zip([c.get_label() for c in axes.containers], axes.containers, strict=True))
    assert list(bars) == ["draft", "target", "kernels", "loop"]
    found = [bar.patches[2].get_width() for bar in bars.values()]
    assert found == pytest.approx([step * model["shares"][part] for part in bars])
    last = bars["loop"].patches[2]
    assert last.get_x() + last.get_width() == pytest.approx(step)
    hatches = [bar.patches[0].get_hatch() for bar in bars.values()]
    assert len(set(hatches)) == 4


@pytest.mark.parametrize("make, why", [
    (speeds, "No tokens a second (greedy, one sequence at a time): no cell has a speed."),
    (lengths, "no method has a speed-up over plain decoding for two K."),
    (heat_maps, "no method was measured with two of both."),
    (acceptance, "no method counted it."),
    (step_times, "no method measured the parts of its steps."),
])  # fmt: skip
def test_what_the_results_do_not_have_is_left_out_with_a_sentence(make, why):
    empty = cell("model", 4) | dict.fromkeys(("tokens_per_second", "accepted_by_position", "shares"))
    section = make(of([empty]))
    assert section.plots == () and len(section.left_out) == 1 and section.left_out[0].endswith(why)

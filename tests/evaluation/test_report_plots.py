"""The report's pictures have the numbers of the results: read back from the figures, not from the tables."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from specdec.evaluation.report import read_results
from specdec.evaluation.report.kinds import kinds
from specdec.evaluation.report.lengths import lengths
from specdec.evaluation.report.speeds import speeds
from specdec.evaluation.theory import expected_speedup
from support.bench_results import METHODS, SPEED, SPREAD, TWO_KINDS, cell, grid, played, results


def drawn(section, at: int = 0):
    """The axes of a section's picture."""
    figure = Figure()
    section.plots[at].draw(figure)
    return figure.axes[0]


def of(cells, **changed):
    return read_results(results(cells, **changed))


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_bars_are_the_fastest_of_each_method_in_order_with_quartiles():
    cells = grid(temperatures=(0.0,))
    axes = drawn(speeds(of(cells)))
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
    assert [label.get_text() for label in axes.get_yticklabels()] == [
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


@pytest.mark.parametrize("make, why", [
    (speeds, "No tokens a second (greedy, one sequence at a time): no cell has a speed."),
    (lengths, "no method has a speed-up over plain decoding for two K."),
])  # fmt: skip
def test_what_the_results_do_not_have_is_left_out_with_a_sentence(make, why):
    empty = cell("model", 4) | {"tokens_per_second": None}
    section = make(of([empty]))
    assert section.plots == () and len(section.left_out) == 1 and section.left_out[0].endswith(why)


def test_each_kind_is_compared_with_transformers_round_by_round():
    cells = [
        played(cell("transformers", None), (1.0, 1.0), (4.0, 1.0), (1.0, 1.0)),
        played(cell("plain", None), (1.0, 1.25), (4.0, 1.25), (1.0, 1.25)),
        played(cell("model", 4), (0.5, 2.0), (1.0, 2.0), (0.5, 2.0)),
    ]
    section = kinds(of(cells, prompts=TWO_KINDS))
    assert section.left_out == () and [plot.name for plot in section.plots] == ["kinds-t0-b1"]
    plot = section.plots[0]
    assert plot.table.head[1:] == ("draft model, K = 4", "plain decoding by specdec")
    code, story = ("code", "2.00 (2.00 to 3.00)", "1.00 (1.00 to 1.00)"), ("story", "0.500 (0.500 to 0.500)")
    assert plot.table.rows[0] == code and plot.table.rows[1][:2] == story
    assert ": code 2.00, draft model; story 0.800, plain decoding by specdec." in plot.says
    axes = drawn(section)
    draft = next(e for e in axes.containers if e.get_label() == "draft model, K = 4")
    assert list(draft.lines[0].get_xdata()) == [2.0, 0.5]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["code", "story"]


def test_batches_and_prompts_of_one_kind_have_no_speeds_by_kind():
    one = [played(cell(name, None), (1.0, 1.0)) for name in ("transformers", "plain")]
    batch = [c | {"rounds": [{**c["rounds"][0], "by_prompt": [[["a", "b"], 1.0, 20]]}]} for c in one]
    alike = [{**prompt, "category": "code"} for prompt in TWO_KINDS]
    for cells, prompts in ((batch, TWO_KINDS), (one, alike), (grid(temperatures=(0.0,)), TWO_KINDS)):
        section = kinds(of(cells, prompts=prompts))
        assert section.plots == () and section.left_out[0].startswith("No speeds by kind of prompt (greedy")

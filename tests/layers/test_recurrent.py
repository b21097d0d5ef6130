"""The operations of recurrent layers: what a token gives follows from the tokens before it that were not rolled back,
to the last bit, however they were fed."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from specdec_layers import DeltaState, Feed, SsdState, backends, conv_window, delta_step, recurrent_api, ssd_step
from specdec_layers.backends import native
from specdec_layers.ops import handle
from support.recurrences import Convolution, Delta, Layer, Ssd, T, numbers

assert native.missing() is None
EXTENSION = importlib.import_module("specdec_layers._C")
SETS: list[str] = EXTENSION.instruction_sets()
LAYERS = {
    "convolution": lambda **s: Convolution(3, **s),
    "convolution of two": lambda **s: Convolution(3, channels=5, taps=2, bias=False, silu=False, **s),
    "delta rule": lambda **s: Delta(3, **s),
    "delta rule, raw keys": lambda **s: Delta(3, heads=2, dk=8, dv=32, normalize=False, **s),
    "delta rule by channel": lambda **s: Delta(3, dv=130, key_heads=4, by_channel=True, **s),
    "mamba-2": lambda **s: Ssd(3, **s),
    "mamba-1": lambda **s: Ssd(3, heads=40, size=1, groups=1, states=16, by_number=True, skip=False, **s),
}
KINDS = pytest.mark.parametrize("kind", LAYERS)
INTERPRETED = ("triton", "float32")
NATIVE = tuple(("cpu", name) for name in SETS)
BACKENDS = (
    *NATIVE,
    ("reference", "float64"),
    ("reference", "float32"),
    pytest.param(INTERPRETED, marks=pytest.mark.nightly),
)


@pytest.fixture(params=BACKENDS, ids="-".join)
def made(request) -> Iterator[dict]:
    """What a layer is made with."""
    backend, kind = request.param
    if backend == "cpu":
        EXTENSION.use_instruction_set(kind)
    yield {"backend": backend, "dtype": torch.float64 if kind == "float64" else torch.float32}
    EXTENSION.use_instruction_set(SETS[-1])


def assert_close(layer: Layer, got: torch.Tensor, text: list[int]) -> None:
    expected = layer.expected(text)
    bound = 1e-12 if layer.dtype == torch.float64 else 2e-5
    assert (got.double() - expected).abs().max() <= bound * max(1.0, expected.abs().max().item()), len(text)


class Rows:
    """The texts of a layer's rows, and steps over them with drafts of which some are wrong. A step first feeds the last
    ``fed_first`` tokens that are known."""

    def __init__(self, layer: Layer, seed: int, fed_first: int):
        self.layer, self.chance = layer, random.Random(seed)
        self.texts: dict[int, list[int]] = {row: [] for row in range(layer.rows)}
        self.fresh, self.fed_first = 1000, fed_first

    def token(self) -> int:
        self.fresh += 1
        return self.fresh

    def prefill(self, counts: dict[int, int], columns: int) -> None:
        """Adds so many tokens to these texts, and reads them in chunks of columns, but for the last ones, which the
        next step feeds."""
        stored = {row: max(len(self.texts[row]) - self.fed_first, 0) for row in counts}
        for row, count in counts.items():
            self.texts[row] += [self.token() for _ in range(count)]
        while True:
            part = {row: self.texts[row][stored[row] : -self.fed_first][:columns] for row in counts}
            if not any(part.values()):
                return
            out = self.layer.feed(
                {row: dict(enumerate(own)) for row, own in part.items()}, stored, stored, columns, True
            )
            for row, own in part.items():
                for i in range(len(own)):
                    stored[row] += 1
                    assert_close(self.layer, out[row, i], self.texts[row][: stored[row]])

    def step(self, most: int, one_by_one: bool = False) -> None:
        """Feeds the last tokens and up to ``most`` drafts, in one forward, or the drafts one by one; then some of the
        drafts are accepted. Some rows are not in the step."""
        first = self.fed_first
        drafts, accepted, known = {}, {}, {}
        for row, text in self.texts.items():
            if text and self.chance.random() < 0.8:
                known[row] = min(first, len(text))
                drafts[row] = [self.token() for _ in range(self.chance.randint(0, most))]
                accepted[row] = self.chance.randint(0, len(drafts[row]))
        fed = {row: self.texts[row][len(self.texts[row]) - n :] + drafts[row] for row, n in known.items()}
        lengths = {row: len(text) - 1 for row, text in self.texts.items()}
        # A single known token stands in the last of the columns for known ones, as the loop has it.
        at = {row: first - n for row, n in known.items()}
        for begin in [0, *range(first, first + most)] if one_by_one else [0]:
            columns = 1 if begin else first if one_by_one else first + most
            own = {
                row: {c: tokens[begin + c - at[row]] for c in range(columns) if 0 <= begin + c - at[row] < len(tokens)}
                for row, tokens in fed.items()
            }
            starts = {
                row: len(self.texts[row]) - known[row] + begin - at[row] + min(cs) for row, cs in own.items() if cs
            }
            commits = {row: min(start, lengths[row]) for row, start in starts.items()}
            out = self.layer.feed(own, starts, commits, columns)
            for row, columns_of in own.items():
                for c in columns_of:
                    end = begin + c - at[row] + 1
                    before = self.texts[row][: len(self.texts[row]) - known[row]]
                    assert_close(self.layer, out[row, c], before + fed[row][:end])
            unused = [(r, c) for r in range(self.layer.rows) for c in range(columns) if c not in own.get(r, {})]
            assert all((out[r, c] == 0).all() for r, c in unused)
        for row, count in accepted.items():
            self.texts[row] += [*drafts[row][:count], self.token()]


@KINDS
@pytest.mark.parametrize("pattern", ["target", "draft", "one column"])
def test_ragged_steps(made, kind, pattern):
    """As a target, which is fed its last known token with the drafts; as a draft model, which is fed two, and its own
    drafts one by one; with rows that begin in the middle, and prompts in chunks between."""
    check_ragged_steps(LAYERS[kind](**made), pattern)


@pytest.mark.parametrize("kind", ["convolution of two", "delta rule, raw keys", "mamba-2", "mamba-1"])
def test_ragged_steps_interpreted(kind):
    check_ragged_steps(LAYERS[kind](backend="triton"), "draft")


def check_ragged_steps(layer: Layer, pattern: str) -> None:
    rows = Rows(layer, 1, 2 if pattern == "draft" else 1)
    rows.prefill({0: 7, 1: 1}, columns=3)
    step = {
        "target": lambda: rows.step(T - 1),
        "draft": lambda: rows.step(T - 2, one_by_one=True),
        "one column": lambda: rows.step(0),
    }[pattern]
    for _ in range(4):
        step()
    rows.texts[2] = [rows.token()]  # a prompt of one token: nothing is read before its first step
    rows.prefill({0: 12, 1: 2}, columns=20)  # of texts that have steps behind them
    for _ in range(5):
        step()
    rows.texts[0] = []  # another text begins in a used row
    rows.prefill({0: 5}, columns=2)
    for _ in range(3):
        step()


class Trees:
    """Steps over trees of a layer's rows, one path of which is accepted. A root is the text's last token."""

    NODES = 9

    def __init__(self, layer: Layer, seed: int):
        self.layer, self.chance = layer, random.Random(seed)
        self.texts = {row: [100 * row + i for i in range(length)] for row, length in enumerate((1, 4, 12))}
        self.fresh = 1000
        prompts = {row: dict(enumerate(text[:-1])) for row, text in self.texts.items()}
        layer.feed(prompts, {}, {}, 11, keep=True)

    def step(self, likely: float) -> None:
        """``likely``: how often a node follows the one before it. Some nodes do not count, nor do those below them."""
        q, rows = self.NODES + 1, range(self.layer.rows)
        parents = torch.zeros(self.layer.rows, q, dtype=torch.int64)
        fed: dict[int, dict[int, int]] = {}
        paths: dict[tuple[int, int], list[int]] = {}  # the columns from the root down
        for row in rows:
            fed[row] = {0: self.texts[row][-1]} if self.chance.random() < 0.8 else {}
            parents[row, 0], paths[row, 0] = -1, [0]
            for c in range(1, q):
                parent = c - 1 if self.chance.random() < likely else self.chance.randrange(c)
                parents[row, c], paths[row, c] = parent, [*paths[row, parent], c]
                if parent in fed[row] and self.chance.random() < 0.9:
                    self.fresh += 1
                    fed[row][c] = self.fresh
        starts = {row: len(text) - 1 for row, text in self.texts.items()}
        out = self.layer.feed(fed, starts, starts, q, parents=parents)
        for row in rows:
            for c in range(q):
                if c in fed[row]:
                    path = [fed[row][i] for i in paths[row, c]]
                    assert_close(self.layer, out[row, c], self.texts[row][:-1] + path)
                else:
                    assert (out[row, c] == 0).all()
            if fed[row]:
                self.accept(row, starts[row], paths[row, self.chance.choice([*fed[row]])], fed[row])

    def accept(self, row: int, start: int, path: list[int], fed: dict[int, int]) -> None:
        for window in self.layer.windows():
            own, places = window[row].clone(), window.shape[1]
            for depth, column in enumerate(path):
                window[row, (start + depth) % places] = own[(start + column) % places]
        self.fresh += 1
        self.texts[row] += [*[fed[column] for column in path[1:]], self.fresh]


@KINDS
def test_trees(made, kind):
    """Each node gives what it would as the last token of a chain; then its path stays, and the next tree follows."""
    trees = Trees(LAYERS[kind](window=Trees.NODES + 1, **made), 3)
    for likely in (0.5, 0.9, 0.1, 0.5, 0.0, 0.5):
        trees.step(likely)


@pytest.mark.parametrize("kind", ["convolution of two", "convolution", "delta rule, raw keys", "mamba-2"])
def test_trees_interpreted(kind):
    trees = Trees(LAYERS[kind](window=Trees.NODES + 1, backend="triton"), 3)
    for likely in (0.5, 0.9):
        trees.step(likely)


@KINDS
@pytest.mark.parametrize("made", NATIVE, ids="-".join, indirect=True)
def test_bits_of_a_tree_are_those_of_its_paths(made, kind):
    parents = [-1, 0, 0, 1, 1, 2, 5, 3, 6]
    layer = LAYERS[kind](window=9, **made)
    layer.feed({0: {0: 1, 1: 2}}, {}, {}, 2)
    tree = layer.feed({0: {c: 10 + c for c in range(9)}}, {0: 2}, {0: 2}, 9, parents=torch.tensor([parents] * 3))
    for column in range(9):
        path = [column]
        while (above := parents[path[0]]) >= 0:
            path = [above, *path]
        chain = LAYERS[kind](window=9, **made)
        chain.feed({0: {0: 1, 1: 2}}, {}, {}, 2)
        out = chain.feed({0: {i: 10 + c for i, c in enumerate(path)}}, {0: 2}, {0: 2}, 9)
        assert torch.equal(out[0, len(path) - 1], tree[0, column])


@KINDS
@pytest.mark.parametrize("made", NATIVE, ids="-".join, indirect=True)
def test_bits_do_not_depend_on_how_tokens_are_fed(made, kind):
    """One by one, in a prompt, as drafts that are accepted, and after drafts that are not; with another row beside, and
    with other threads."""
    text = list(range(11))

    def prompt(layer):
        return layer.feed({0: dict(enumerate(text))}, {}, {}, 11, keep=True)[0]

    def by_ones(layer):
        out = [layer.feed({0: {0: t}}, {0: t}, {0: t}, 1)[0] for t in text]
        return torch.cat(out)

    def as_drafts(layer):
        out, known = [], 0
        for accepted in (2, 0, 4, 1, 0, 3):  # of four
            right = text[known : known + accepted + 1]
            fed = [*right, *[99] * (T - len(right))]
            out.append(layer.feed({0: dict(enumerate(fed))}, {0: known}, {0: known}, T)[0, : len(right)])
            known += len(right)
        return torch.cat(out)[: len(text)]

    def beside(layer):
        layer.feed({1: {0: 50}}, {}, {}, 1)
        fed = {0: dict(enumerate(text)), 1: {0: 51, 3: 52}, 2: {5: 53}}
        return layer.feed(fed, {1: 1}, {1: 1}, 11, keep=True)[0]

    expected = prompt(LAYERS[kind](**made))
    for way in (by_ones, as_drafts, beside):
        assert torch.equal(way(LAYERS[kind](**made)), expected), way.__name__
    torch.set_num_threads(2)  # on fibers, all other launches have another number of warps
    assert torch.equal(prompt(LAYERS[kind](**made)), expected)


@KINDS
def test_rows_that_are_fed_nothing_stay_as_they_are(made, kind):
    """As captured graphs, warm-ups and padding need it: to the last bit."""
    layer = LAYERS[kind](**made)
    layer.feed({0: {0: 1, 1: 2}, 1: {0: 3}}, {}, {}, 3)
    before = copy.deepcopy(layer.held)
    layer.feed({}, {0: 9, 1: 1}, {0: 9, 1: 1}, 4)
    layer.feed({}, {0: 2}, {0: 2}, 4, keep=True)
    for old, new in zip(flat(before), flat(layer.held), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())
    layer.feed({1: {2: 5}}, {1: 1}, {1: 1}, 4, rows=range(1, 2))
    for old, new in zip(flat(before), flat(layer.held), strict=True):
        assert torch.equal(old[::2].nan_to_num(), new[::2].nan_to_num())
        assert old.dtype == torch.int64 or not torch.equal(old[1].nan_to_num(), new[1].nan_to_num())


def flat(held: list) -> list[torch.Tensor]:
    return [t for each in held for t in ([each] if isinstance(each, torch.Tensor) else each)]


@KINDS
def test_a_fault_stays_in_its_row_and_ends_with_its_text(made, kind):
    layer = LAYERS[kind](**made)
    inputs, feed = layer.arguments({row: {0: 1} for row in range(3)}, {}, {}, 1)
    for x in inputs:
        x[1] = float("nan")
    assert layer.run(inputs, feed)[1].isnan().all()
    out = layer.feed({row: {0: 2} for row in range(3)}, dict.fromkeys(range(3), 1), dict.fromkeys(range(3), 1), 1)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
    out = layer.feed({1: {0: 2, 1: 3}}, {}, {}, 2)
    assert_close(layer, out[1, 1], [2, 3])


@KINDS
def test_many_steps_lose_nothing(kind):
    """The state is still what a prompt of the whole text gives, to the last bit, after a thousand steps."""
    layer, other, chance = LAYERS[kind](), LAYERS[kind](), random.Random(0)
    text = [chance.randrange(9) for _ in range(2200)]
    known = 0
    while known < 2000:
        accepted = chance.randrange(T)
        fed = [*text[known : known + accepted + 1], *[77] * (T - 1 - accepted)]
        layer.feed({0: dict(enumerate(fed))}, {0: known}, {0: known}, T)
        known += accepted + 1
    last = layer.feed({0: {0: text[known]}}, {0: known}, {0: known}, 1)[0, 0]
    whole = other.feed({0: dict(enumerate(text[: known + 1]))}, {}, {}, known + 1, keep=True)[0, -1]
    assert torch.equal(last, whole) and last.isfinite().all()


@KINDS
def test_their_schemas_say_what_they_write(kind):
    layer = LAYERS[kind]()
    layer.feed({0: {0: 1, 1: 2}}, {}, {}, 3)
    inputs = [torch.randn(3, 4, *x.shape) for x in layer.inputs(0)]
    start, valid = torch.tensor([2, 0, 0]), torch.ones(3, 4, dtype=torch.bool)
    stem, arguments = {
        Convolution: lambda: ("conv_window", (*layer.held, *inputs, *weights(layer), True, start, valid, None, 0)),
        Delta: lambda: ("delta_step", (*layer.held[0], *inputs, start, start, valid, None, 0, False, True)),
        Ssd: lambda: ("ssd_step", (*layer.held[0], *inputs, *constants(layer), start, start, valid, None, 0, False)),
    }[type(layer)]()
    for variant in ("", "_reference"):
        if variant:
            importlib.import_module("specdec_layers.backends.reference_recurrent")
        torch.library.opcheck(handle(stem + variant), arguments, test_utils=("test_schema", "test_faketensor"))


def weights(layer: Convolution) -> tuple:
    return tuple(None if w is None else w.float() for w in layer.weights())


def constants(layer: Ssd) -> tuple:
    return tuple(None if c is None else c.float() for c in layer.constants())


def test_nothing_to_compute():
    none = Feed(
        torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.bool)
    )
    window = torch.zeros(2, 8, 6)
    assert conv_window(window, torch.zeros(0, 2, 6), torch.ones(6, 4), None, none).shape == (0, 2, 6)
    columnless = Feed(
        torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.bool)
    )
    assert conv_window(window, torch.zeros(2, 0, 6), torch.ones(6, 4), None, columnless).shape == (2, 0, 6)


FEED = Feed(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"x": torch.zeros(2, 3, 5)}, r"x: got torch.float32 of shape \[2, 3, 5\] on cpu, allowed: .* \[2, 3, 6\]"),
        ({"x": torch.zeros(2, 3, 6).double()}, "x: got torch.float64"),
        ({"weight": torch.ones(6)}, "weight: got"),
        ({"weight": torch.ones(6, 9)}, "window: got 8 places, allowed: >= 9"),
        ({"bias": torch.ones(5)}, "bias: got"),
        ({"feed": FEED._replace(start=torch.zeros(2))}, "start: got torch.float32"),
        ({"feed": FEED._replace(valid=torch.ones(2, 4, dtype=torch.bool))}, "valid: got"),
        ({"feed": FEED._replace(first_row=2)}, "first_row: got 2 for 2 rows, allowed: 0 to 1"),
        ({"feed": FEED._replace(parents=torch.zeros(2, 3, dtype=torch.int64))}, "parents: got 0 in column 0, allowed"),
        ({"feed": FEED._replace(parents=torch.full((2, 3), -2))}, "parents: got -2 in column 0, allowed: -1, or"),
        ({"feed": FEED._replace(parents=torch.full((2, 3), -1.0))}, "parents: got torch.float32"),
        ({"feed": FEED._replace(parents=torch.full((2, 3), -1), keep=True)}, "keep: got True with parents, allowed"),
    ],
)
def test_wrong_arguments_of_a_convolution_are_refused(changed, told):
    given = {"window": torch.zeros(3, 8, 6), "x": torch.zeros(2, 3, 6), "weight": torch.ones(6, 4), "bias": None}
    with pytest.raises(ValueError, match=told):
        conv_window(**{**given, "feed": FEED, **changed})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_wrong_inputs_of_the_delta_rule_are_refused(name):
    given = {n: torch.zeros(2, 3, 4, 8) for n in "qkv"} | {n: torch.zeros(2, 3, 4) for n in ("g", "beta")}
    state = DeltaState.empty(3, T, *list(given.values())[1:])
    delta_step(state, **given, feed=FEED)
    with pytest.raises(ValueError, match=f"{name}: got"):
        delta_step(state, **{**given, name: given[name][:, :, :3]}, feed=FEED)


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "A", "D"])
def test_wrong_inputs_of_a_state_space_are_refused(name):
    given = {"x": numbers((2, 3, 4, 8), 0), "dt": numbers((2, 3, 4), 1), "B": numbers((2, 3, 2, 5), 2)}
    given |= {"C": given["B"], "A": torch.ones(4), "D": torch.ones(4)}
    given = {n: x.float() for n, x in given.items()}
    state = SsdState.empty(3, T, given["x"], given["dt"], given["B"])
    ssd_step(state, **given, feed=FEED)
    with pytest.raises(ValueError, match=f"{name}: got"):
        ssd_step(state, **{**given, name: given[name][..., :1]}, feed=FEED)


def test_tensors_of_any_strides():
    layer = Delta(2)
    inputs = [torch.randn(2, 3, *x.shape) for x in layer.inputs(0)]
    twice = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    expected = layer.run(inputs, FEED)
    assert torch.equal(Delta(2).run(twice, FEED), expected)
    held = DeltaState.empty(4, T, *inputs[1:])
    with pytest.raises(RuntimeError, match="specdec_layers: state is not contiguous"):
        delta_step(held._replace(state=held.state.transpose(2, 3).contiguous().transpose(2, 3)), *inputs, FEED)


def test_what_cannot_run_says_why():
    with pytest.raises(RuntimeError, match="'cuda' has no delta_step, only linear, norm_linear, add_linear"):
        backends.operation("delta_step", "cuda", "cpu")
    with pytest.raises(ValueError, match="backend: got 'fast', allowed: 'auto', 'reference'"):
        Delta(2, backend="fast").feed({0: {0: 1}}, {}, {}, 1)


@pytest.mark.parametrize(
    ("kind", "dtype", "chosen"),
    [
        ("cpu", torch.float32, "cpu"),
        ("cpu", torch.bfloat16, "reference"),
        ("cuda", torch.bfloat16, "triton"),
        ("cuda", torch.float64, "reference"),
    ],
)
def test_what_is_chosen(kind, dtype, chosen):
    """Where other backends lack a dtype, the reference has it."""
    x = SimpleNamespace(dtype=dtype, device=SimpleNamespace(type=kind))
    assert recurrent_api._backend("auto", x) == chosen
    assert recurrent_api._backend("cuda", x) == "cuda"

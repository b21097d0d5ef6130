"""Reads what nvdisasm prints of a kernel: its instructions, where in the source each comes from, and its loops."""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PLACE = re.compile(r'//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"(?:`\(|BRANCH_TARGETS |,)(\.L_\w+)")
_KERNEL = re.compile(r"^\.text\.(\w+):")
_FUNCTION = re.compile(r"^\s*(?:SPECDEC_KERNEL\((\w+),|(?:template <.*> )?SPECDEC_(?:DEVICE|HD)\b[^;]*?(\w+)\()")
_NEVER_GO_ON = ("EXIT", "RET")


@dataclass(frozen=True)
class Place:
    """A line of the source, in the body of a function."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return _lines(self.file)[self.line - 1].strip()

    @property
    def function(self) -> str:
        """The function that the line is in; "" if it is in none of ours."""
        return next((name for name, first, last in _functions(self.file) if first <= self.line <= last), "")


@dataclass(frozen=True)
class Instruction:
    predicate: str  # "@P0", or "" for always
    opcode: str  # with what modifies it, such as IMAD.WIDE
    operands: str
    places: tuple[Place, ...]  # its line, then the lines of the calls that it was inlined by

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    def within(self, function: str) -> bool:
        """Whether the function, or what it calls, has become this instruction."""
        return any(place.function == function for place in self.places)


@dataclass
class Block:
    """Instructions that run one after the other."""

    labels: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)  # numbers of the blocks that may follow


@functools.cache
def _lines(file: str) -> list[str]:
    path = Path(file)
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@functools.cache
def _functions(file: str) -> list[tuple[str, int, int]]:
    """(name, first line, last line) of every function of ours in a file, as clang-format leaves them."""
    found, lines = [], _lines(file)
    for i, line in enumerate(lines):
        if "SPECDEC_" not in line or line.lstrip().startswith(("#", "//")):
            continue
        head = " ".join(lines[i : i + 3])
        match = _FUNCTION.match(head)
        if match is None:
            continue
        indent, name = len(line) - len(line.lstrip()), match[1] or match[2]
        end = next((k for k in range(i, len(lines)) if lines[k].startswith(" " * indent + "}")), i)
        if lines[i].rstrip().endswith("}"):  # all in one line
            end = i
        found.append((name, i + 1, end + 1))
    return sorted(found, key=lambda f: f[2] - f[1])  # inner ones first


def kernels(listing: str) -> dict[str, list[Block]]:
    """The blocks of every kernel that ``nvdisasm -c -gi`` lists, by the mangled name."""
    found: dict[str, list[Block]] = {}
    lines = listing.splitlines()
    starts = [i for i, line in enumerate(lines) if _KERNEL.match(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        match = _KERNEL.match(lines[start])
        assert match is not None
        found[match[1]] = _blocks(lines[start + 1 : end])
    return found


def _blocks(lines: Iterable[str]) -> list[Block]:
    blocks, places, fresh = [Block()], [], True
    for line in lines:
        if (place := _PLACE.search(line)) is not None:  # the innermost call comes first
            places = [*([] if fresh else places), Place(place[1], int(place[2]))]
            fresh = False
            continue
        if (label := _LABEL.match(line)) is not None:
            if blocks[-1].instructions:
                blocks.append(Block())
            blocks[-1].labels.append(label[1])
            continue
        if (code := _INSTRUCTION.search(line)) is None:
            continue
        fresh = True
        instruction = Instruction(code[1] or "", code[2], code[3], tuple(places))
        blocks[-1].instructions.append(instruction)
        if instruction.name in ("BRA", "BRX", "JMP", *_NEVER_GO_ON):
            blocks.append(Block())
    blocks = [b for b in blocks if b.instructions]
    at = {label: i for i, block in enumerate(blocks) for label in block.labels}
    for i, block in enumerate(blocks):
        last = block.instructions[-1]
        # BRA.DIV goes where diverged lanes meet again. BRX has a table of targets.
        if last.name in ("BRA", "BRX") and not last.opcode.startswith("BRA.DIV"):
            block.next += [at[label] for label in _TARGET.findall(last.operands) if label in at]
        goes_on = last.name not in ("BRA", "JMP", "BRX", *_NEVER_GO_ON) or conditional(last)
        if goes_on and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def conditional(branch: Instruction) -> bool:
    """Whether a branch may not be taken. A condition can also be an operand: ``BRA.DIV UR4, `(.L_x_1)``, ``BRA P0``."""
    return bool(branch.predicate) or (branch.name == "BRA" and not branch.operands.lstrip().startswith("`"))


@dataclass(frozen=True)
class Loop:
    head: int  # number of the block in which a turn begins
    body: frozenset[int]


def loops(blocks: list[Block]) -> list[Loop]:
    """The natural loops, the smallest first."""
    dominators = _dominators(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    reached = [*_reached(blocks)]
    for i in reached:
        for follower in blocks[i].next:
            before[follower].append(i)
    found: dict[int, set[int]] = {}
    for i in reached:
        for head in blocks[i].next:
            if head not in dominators[i]:
                continue
            body, todo = found.setdefault(head, {head}), [i]
            while todo:
                if (one := todo.pop()) not in body:
                    body.add(one)
                    todo += before[one]
    return sorted((Loop(head, frozenset(body)) for head, body in found.items()), key=lambda loop: len(loop.body))


def shortest_turn(blocks: list[Block], loop: Loop, through: Sequence[Callable[[Block], bool]]) -> list[Instruction]:
    """The instructions of the shortest turn of a loop that runs through a block of each of these kinds; [] if there is
    none. Debug information does not say as much: where a function was inlined several times, it names one place."""
    return _shortest(blocks, loop.head, loop.body, lambda block: loop.head in block.next, through)


def shortest_run(
    blocks: list[Block], through: Sequence[Callable[[Block], bool]], avoided: Callable[[Block], bool]
) -> list[Instruction]:
    """The same from a kernel's beginning to its end, and not through avoided blocks; [] if there is none."""
    body = {i for i, block in enumerate(blocks) if not avoided(block)}
    return _shortest(blocks, 0, body, lambda block: block.instructions[-1].name == "EXIT", through)


def _shortest(
    blocks: list[Block],
    head: int,
    body: Container[int],
    is_end: Callable[[Block], bool],
    through: Sequence[Callable[[Block], bool]],
) -> list[Instruction]:
    every = (1 << len(through)) - 1

    def with_kinds(number: int, kinds: int) -> tuple[int, int]:
        return number, kinds | sum(1 << i for i, kind in enumerate(through) if kind(blocks[number]))

    begin = with_kinds(head, 0)
    todo, came_from, done = [(len(blocks[head].instructions), begin, begin)], {}, set()
    while todo:
        length, place, before = heapq.heappop(todo)
        if place in done:
            continue
        done.add(place)
        came_from[place] = before
        if place[1] == every and is_end(blocks[place[0]]):
            path = [place]
            while path[-1] != begin:
                path.append(came_from[path[-1]])
            return [i for number, _ in reversed(path) for i in blocks[number].instructions]
        for follower in blocks[place[0]].next:
            if follower in body and follower != head:
                reached = with_kinds(follower, place[1])
                heapq.heappush(todo, (length + len(blocks[follower].instructions), reached, place))
    return []


def _dominators(blocks: list[Block]) -> list[set[int]]:
    reachable = set(_reached(blocks))
    every = set(reachable)
    found = [{i} if i == 0 else set(every) for i in range(len(blocks))]
    before: list[list[int]] = [[] for _ in blocks]
    for i in reachable:
        for follower in blocks[i].next:
            before[follower].append(i)
    changed = True
    while changed:
        changed = False
        for i in sorted(reachable - {0}):
            new = {i} | set.intersection(*(found[b] for b in before[i]))
            if new != found[i]:
                found[i], changed = new, True
    return found


def _reached(blocks: list[Block]) -> Iterator[int]:
    seen, todo = {0}, [0]
    while todo:
        yield (i := todo.pop())
        for follower in blocks[i].next:
            if follower not in seen:
                seen.add(follower)
                todo.append(follower)

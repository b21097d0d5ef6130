"""Counts the code of a checkout: files, lines without docstrings, comments and blanks, classes, long signatures.

python tools/count_code.py            # this checkout
python tools/count_code.py FOLDER     # another one, such as a git worktree of an earlier commit
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
# Of drafters/: the protocol, its guard, predictions, and at earlier commits the choice of K.
_OF_DRAFTERS = ("protocol", "guard", "predicted", "draft_length", "adaptive_lengths", "acceptance", "step_times")


def code_lines(text: str, tree: ast.Module) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            if ast.get_docstring(node, clean=False) is not None:
                docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def counted(name: str, files: Iterable[Path]) -> None:
    count = lines = code = classes = long = 0
    for file in files:
        text = file.read_text()
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        count, lines, code = count + 1, lines + len(text.splitlines()), code + code_lines(text, tree)
        classes += sum(isinstance(node, ast.ClassDef) for node in nodes)
        long += sum(parameters(function) > 8 for function in functions)
    print(f"{name:28}{count:7}{lines:8}{code:8}{classes:9}{long:12}")


def main(root: Path) -> None:
    package = root / "python" / "specdec"
    core = [*(package / "loop").glob("*.py"), package / "decoder.py", *(package / "serving").glob("*.py")]
    core += [file for name in _OF_DRAFTERS if (file := package / "drafters" / f"{name}.py").exists()]
    print(f"{'':28}{'files':>7}{'lines':>8}{'code':>8}{'classes':>9}{'> 8 params':>12}")
    counted("loop, decoder, serving, K", core)
    counted("python/specdec", package.rglob("*.py"))
    for folder in ("specdec_kernels", "python/specdec_layers", "bench", "tests/mutations", "tests"):
        counted(folder, (root / folder).rglob("*.py"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]))

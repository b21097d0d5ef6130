"""Every command line of the README and, nightly, of docs/ runs: those of a block one after the other, in a folder with
what pages name, on tiny models, and shortened by further options of theirs. What is named within a sentence has the
options."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from specdec.cli import app, serve_command
from support import ROOT
from support.gguf_files import write_gguf
from support.short_training import shorten
from transformers import LlamaConfig, LlamaForCausalLM
from typer.main import get_command
from typer.testing import CliRunner

PAGES = [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))]
OTHERS = ["CONTRIBUTING.md", "SECURITY.md", "bench/README.md", "python/specdec/embedded/README.md"]
# Options that come last, so that they are the ones that count.
SHORTER = {
    "generate": "--max-new-tokens 4 --device cpu",
    "chat": "--max-new-tokens 4 --device cpu",
    "serve": "--port 0 --device cpu",
    "advise": "--seconds 0.01 --max-new-tokens 2 --num-drafts 1 --batch-size 2 --device cpu",
    "compare": "--max-new-tokens 2 --repeats 1 --num-drafts 2 --device cpu",
    "bench": "--max-new-tokens 2 --repeats 1 --warm-up 0 --num-drafts 2 --category code --per-category 1 --no-report "
    "--device cpu",
    "verify": "--check greedy --rule coupled --num-drafts 2 --batch-size 2 --max-new-tokens 2 --device cpu",
    "distill": "--minutes 0.01 --steps 1 --warm-up 0 --batch-size 1 --length 40 --judged 1 --device cpu",
    "train-heads": "--minutes 0.01 --steps 1 --warm-up 0 --batch-size 1 --length 40 --judged 1 --device cpu",
}
STARTED = re.compile(r"(?:^|&& )(?:\S*/)?specdec (.*)")  # also after an environment was made
NAMED = re.compile(r"`(?:python -m )?specdec\s+([a-z][a-z-]*)([^`]*)`|^ {4}specdec ([a-z-]+)(.*)$", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")


def named_in(page: str) -> list[tuple[str, str]]:
    """The commands within its sentences or in indented lines, and what follows each."""
    return [(m[1] or m[3], m[2] or m[4] or "") for m in NAMED.finditer(text_of(page))]


def blocks_of(page: str) -> list[list[list[str]]]:
    """The arguments of the command lines of each block of code."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    lines = [code.splitlines() for kind, code in blocks if kind in ("", "bash")]
    return [[shlex.split(m[1], comments=True) for line in block if (m := STARTED.search(line))] for block in lines]


BLOCKS = {f"{page}, block {i}": block for page in PAGES for i, block in enumerate(blocks_of(page)) if block}


def call(arguments: list[str]) -> None:
    name, *_ = arguments
    result = CliRunner().invoke(app, [*arguments, *SHORTER.get(name, "").split()], input="Hello\n")
    drafts_nothing = name == "train-heads" and "Is it this target's head?" in result.output  # true after one step
    assert result.exit_code == drafts_nothing, (shlex.join(arguments), result.output, result.exception)


@pytest.fixture(scope="module")
def named(pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, a head, prompts, texts and keys, by the names that pages give them."""
    folder = tmp_path_factory.mktemp("named")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 4096}
    for name, layers in (("TARGET", 9), ("DRAFT", 1)):
        torch.manual_seed(layers + 1)
        config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096, eos_token_id=0, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        pair[2].save_pretrained(folder / name)
    for name in ("prompts.jsonl", "mine.jsonl", "FILE"):
        (folder / name).write_text('{"prompt": "x = "}\n"def f("\n')
    (folder / "question.jsonl").write_text('{"question_id": 1, "category": "code", "turns": ["x = ", "y"]}\n')
    texts = ({"text": f"x{i} = {i}\n" * 40} for i in range(64))
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    write_gguf(folder / "model.gguf")
    (folder / "keys.txt").write_text("a-key-of-the-page\n")
    (folder / "examples").symlink_to(ROOT / "examples")
    files = [str(folder / name) for name in ("TARGET", "texts.jsonl", "HEAD_DIR")]
    call(["train-heads", files[0], "--kind", "medusa", "--data", files[1], "--output", files[2]])
    return folder


def written(arguments: list[str]) -> str:
    return arguments[arguments.index("--output") + 1] if "--output" in arguments else "specdec-bench"


def start(service, bound, as_json: bool) -> None:
    """As ``served.run``, but nobody is served."""

    async def first_lane() -> None:
        await service.lanes.get()
        await service.lanes.close()

    asyncio.run(first_lane())


@pytest.mark.parametrize(
    "where", [where if "README" in where else pytest.param(where, marks=pytest.mark.nightly) for where in BLOCKS]
)
def test_command_lines_run(where, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_command, "run", start)
    shorten(monkeypatch, texts=48, new=64)  # a head is checked by as many
    for each in named.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "out").mkdir()
    for line in BLOCKS[where]:
        before = ["", *line]
        of_dir = ["DRAFT" if option == "--draft" else "TARGET" for option in before]
        arguments = [of_dir[i] if argument == "DIR" else argument for i, argument in enumerate(line)]
        for old in tmp_path.glob(f"{written(arguments)}*"):  # by another line with this name for its result
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        call(arguments)


def test_lines_are_found():
    """And one that would not run fails."""
    assert sum(map(len, BLOCKS.values())) > 45
    assert {name for page in PAGES for name, _ in named_in(page)} > {"serve", "chat", "compare"}
    with pytest.raises(AssertionError, match="--alpha: got 2"):
        call(["simulate", "--alpha", "2", "--c", "0.05"])


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_commands_have_the_options_that_a_page_names(page):
    commands = get_command(app).commands
    for name, rest in named_in(page):
        assert name in commands, name
        options = {option for param in commands[name].params for option in (*param.opts, *param.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z0-9-]*", rest)) <= options | {"--help"}, (name, rest)

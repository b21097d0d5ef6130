"""Draws docs/generate.svg, the picture in the README: what the embedded pair writes, each token in the colour of what
produced it.

    python tools/make_picture.py
"""

from __future__ import annotations

import argparse
import io
import re
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from specdec import SpeculativeDecoder, load_embedded_pair
from specdec.cli.show import COLOURS, ratios
from specdec.detokenize import IncrementalText

from specdec_kernels import SamplingParams

# rich's own colours are too pale to tell apart in small letters. The order is that of a terminal's first eight colours.
BLACK, RED, GREEN, YELLOW = (22, 27, 34), (255, 123, 114), (126, 231, 135), (210, 153, 34)
BLUE, MAGENTA, CYAN, WHITE = (88, 166, 255), (188, 140, 255), (57, 197, 207), (201, 209, 217)
THEME = TerminalTheme(BLACK, WHITE, [BLACK, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN, WHITE])


def coloured(prompt: str, new_tokens: int, params: SamplingParams, seed: int) -> Text:
    """The prompt, its continuation by K = 4 drafts a step, and the legend with how many tokens have each colour."""
    target, draft, tokenizer = load_embedded_pair()
    ids = tokenizer(prompt).input_ids
    result = SpeculativeDecoder(target, draft, num_drafts=4).generate([ids], None, new_tokens, params, seed)

    text, pieces = Text(), IncrementalText(tokenizer, ids)
    text.append(prompt, style="dim")
    for token, producer in zip(result.tokens[0], result.produced_by[0], strict=True):
        text.append(pieces.push([token]), style=COLOURS[producer])
    text.append(pieces.finish() + "\n\n")
    counts = Counter(result.produced_by[0])
    for name, colour in COLOURS.items():
        text.append(f"{name} {counts[name]}  ", style=f"bold {colour}")
    text.append(f"\n{result.stats.emitted} tokens in {result.stats.steps} steps: {ratios(result.stats)}", style="dim")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    docs = Path(__file__).resolve().parents[1] / "docs"
    parser.add_argument("--out", type=Path, default=docs / "generate.svg")
    parser.add_argument("--prompt", default="def read(self, size=-1):")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    options = {"--temperature": args.temperature, "--top-p": args.top_p}
    defaults = {"--max-new-tokens": (args.max_new_tokens, 128), "--seed": (args.seed, 0)}
    options |= {name: value for name, (value, default) in defaults.items() if value != default}
    shown = " ".join(f"{name} {value}" for name, value in options.items())
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p)

    console = Console(record=True, width=84, file=io.StringIO())
    console.print(Text(f'$ specdec generate "{args.prompt}" {shown} -v', style="bold"))
    console.print(coloured(args.prompt, args.max_new_tokens, params, args.seed))
    picture = console.export_svg(title="specdec", theme=THEME)
    # rich has it load a font from another site, which a picture in a page may not do.
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL).replace("Fira Code, ", "")
    # Not every program that draws SVG keeps the spaces at which a token begins, unless it is told to.
    picture = picture.replace("<svg ", '<svg xml:space="preserve" ', 1)
    args.out.write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

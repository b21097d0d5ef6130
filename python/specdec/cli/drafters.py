"""Drafters by their names on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.protocol import Drafter
    from ..drafters.suffix import SuffixMemories, SuffixMemory

# name -> what it proposes
NAMES = {
    "model": "the draft model's tokens",
    "lookup": "what followed the last few tokens before, in prompt and output",
    "suffix": "the same for matches of any length",
    "early-exit": "the tokens of the target's first --exit-layers layers",
    "universal": "a draft model's text, whatever its tokenizer",
    "tree": "a tree of the draft model's tokens, of --tree nodes",
    "medusa": "the embedded target's Medusa heads",
    "eagle3": "the embedded target's EAGLE-3 head",
    "dflash": "the embedded target's DFlash head",
    "none": "nothing: plain decoding",
}
NEED_DRAFT = ("model", "tree", "universal")
TEXTUAL = ("lookup", "suffix")  # no model proposes their drafts
ALONE = (*TEXTUAL, "early-exit")  # they need no model but the target
EMBEDDED_HEADS = ("medusa", "eagle3", "dflash")
NO_TREES = ("universal", "none")
HEAD = "the folder of a head"
COMBINED = f"{' or '.join(TEXTUAL)} + another one (suffix+model), which drafts where nothing is copied"
CHOICES = f"{', '.join(NAMES)}, {HEAD}, or {COMBINED}"
TREE_NODES = 16  # of --drafter tree
TREE_DRAFTS = 6  # K with a tree: the most nodes of a path


def is_head(name: str) -> bool:
    """Whether ``name`` is no name, but the folder of a head."""
    return name not in ("", *NAMES) and Path(name).expanduser().is_dir()


def parts_of(name: str) -> list[str]:
    """Returns the names of the drafters that a name combines; of one drafter, its own."""
    first, plus, other = name.partition("+")
    return [first, other] if plus and first in TEXTUAL else [name]


def is_drafter(name: str) -> bool:
    """Whether ``name`` is of NAMES, the folder of a head, or combines two of these, of which the first one copies."""
    *_, last = parts = parts_of(name)
    combines = len(parts) == 1 or last not in (*TEXTUAL, "tree", "none")
    return combines and (last in NAMES or is_head(last))


def nodes_of(name: str, tree: int | None) -> int | None:
    """The nodes of the trees that a drafter is to propose, where ``tree`` are asked for; None: it proposes chains."""
    return TREE_NODES if tree is None and name == "tree" else tree


def make_drafter(
    name: str,
    target: PreTrainedModel,
    draft: PreTrainedModel | None = None,
    *,
    exit_layers: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    memory: SuffixMemory | SuffixMemories | None = None,
    confidence: float = 0.0,
    draft_window: int | None = None,
) -> Drafter | None:
    """Makes what ``SpeculativeDecoder`` takes as ``draft``.

    Args:
        name: of NAMES, the folder of a head, or two of these with a + between them (``is_drafter``).
        target: the model that is decoded from.
        draft: for the names of NEED_DRAFT.
        exit_layers: for "early-exit"; None: a quarter of the target's layers, at least one.
        tokenizer: of the target. "universal" needs it and ``draft_tokenizer``, and so does a "model" whose vocabulary
            has another size than the target's, because each of the two pads the tokenizer's vocabulary.
        memory: of earlier outputs, for "suffix"; None: it has none.
        confidence, draft_window: for "model", as in ``SpeculativeDecoder``; ``confidence`` also for a head that says
            how sure it is (``load_head``).

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    from ..checks import refuse

    if len(parts_of(name)) == 2 and is_drafter(name):
        from ..drafters.composite import Composite

        first, other = parts_of(name)
        copier = make_drafter(first, target, memory=memory)
        rest = make_drafter(
            other,
            target,
            draft,
            exit_layers=exit_layers,
            tokenizer=tokenizer,
            draft_tokenizer=draft_tokenizer,
            confidence=confidence,
            draft_window=draft_window,
        )
        assert copier is not None and rest is not None
        return Composite([copier, rest])
    if name in NEED_DRAFT and draft is None:
        refuse("drafter", f"{name!r} without a draft model", ", ".join(n for n in NAMES if n not in NEED_DRAFT))
    if exit_layers is not None and name != "early-exit":
        refuse("exit_layers", f"{exit_layers} with drafter {name!r}", "None, or drafter 'early-exit'")
    match name:
        case "model" | "tree" if draft is not None:
            from ..drafters.model import model_drafter
            from ..models.load.shared_ids import ids_of_pair
            from ..models.supported import cached_model

            sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (target, draft)]
            if (known := ids_of_pair(target, draft, tokenizer)) is None and sizes[0] != sizes[1]:
                given, allowed = f"a vocabulary of {sizes[1]} tokens", f"{sizes[0]}, the target's"
                refuse("draft", given, f"{allowed}; universal (--drafter, of bench --method) takes another tokenizer")
            own = cached_model(target, "target")
            return model_drafter(draft, own, known, confidence, draft_window=draft_window)
        case "lookup":
            from ..drafters.prompt_lookup import PromptLookupDrafter

            return PromptLookupDrafter()
        case "suffix":
            from ..drafters.suffix import SuffixDrafter

            return SuffixDrafter(memory)
        case "early-exit":
            from ..drafters.early_exit import EarlyExitDrafter

            layers = target.config.get_text_config(decoder=True).num_hidden_layers
            return EarlyExitDrafter(target, max(layers // 4, 1) if exit_layers is None else exit_layers)
        case "universal" if draft is not None:
            if tokenizer is None or draft_tokenizer is None:
                refuse("tokenizer", "None with drafter 'universal'", "tokenizer and draft_tokenizer")
            from ..drafters.universal import UniversalDrafter

            return UniversalDrafter(draft, draft_tokenizer, tokenizer)
        case "none":
            return None
        case kind if kind in EMBEDDED_HEADS:
            from ..drafters.heads import load_embedded_head

            return load_embedded_head(kind, target)
        case folder if is_head(folder):
            return _load_head(folder, target, tokenizer, confidence)
    refuse("drafter", repr(name), CHOICES)


def _load_head(
    folder: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, confidence: float
) -> Drafter:
    """Raises what ``load_head`` raises, as an error of ``drafter``."""
    from ..drafters.heads import load_head

    try:
        return load_head(folder, target, tokenizer=tokenizer, confidence=confidence)
    except OSError as error:
        raise OSError(f"drafter: {str(error).removeprefix('path: ')}") from error
    except ValueError as error:
        raise ValueError(f"drafter: {folder!r}: {error}") from error

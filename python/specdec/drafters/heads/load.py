"""Loads a head: tells its format, builds it, and checks that it drafts."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...checks import refuse
from ...models.supported import cached_model
from .checkpoint import Checkpoint
from .drafter import HeadDrafter
from .formats import FORMATS, OTHERS, detect
from .self_check import self_check
from .source import Source


def load_head(
    path: str | os.PathLike,
    target: PreTrainedModel,
    *,
    layer_ids: Sequence[int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    check: bool = True,
    choices: Sequence[Sequence[int]] | None = None,
    confidence: float = 0.0,
) -> HeadDrafter:
    """Loads a head for ``target``: EAGLE-3 (as EAGLE, SpecForge, speculators or DeepSpec write it), P-EAGLE, EAGLE-1 or
    -2, Medusa, DFlash, DFlash2, DSpark, Domino, an assistant of Gemma 4, or the MTP layers in the files of a
    DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, MiMo, Qwen3-Next, Qwen3.5 or Nemotron-H. The format is told by the tensors'
    names. The head computes in the target's dtype and on its device, and shares its embedding and output matrix where
    the file has none of its own.

    After loading, a self-check has the head draft on a short text. If a checkpoint can be read in several ways, the one
    that drafts best is taken. It warns if drafts are rarely accepted.

    Args:
        path: a folder with config.json and *.safetensors. MTP layers are in the target's own, of which nothing else is
            read.
        target: the model that it was trained for.
        layer_ids: which hidden states the head reads, as transformers counts them (0 is the embedding, i the output of
            layer i - 1, and the number of layers the final state, after the norm); None: as config.json says, with a
            warning if it does not.
        tokenizer: the target's, for the text of the self-check; None: the target writes a text itself.
        check: whether to run the self-check.
        choices: for ``SpeculativeDecoder(tree=N)``, the paths of a static tree of at most N nodes, as Medusa's
            ``medusa_choices``: [0, 2] is the third most likely second token, after the most likely first one. Only for
            heads whose drafts do not depend on each other (Medusa, DFlash, P-EAGLE). None: each tree has the N most
            probable paths.
        confidence: from 0 (off) to below 1, for a DSpark head with a confidence head. A sequence's drafts end, in each
            step, before the first that this head finds less likely to be accepted, so that no more are verified.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: names the tensor, with its shape and the one that is allowed, or the entry of config.json, or the
            argument.

    Example:
        >>> from importlib import resources
        >>> from specdec import SpeculativeDecoder, load_embedded_pair, load_head
        >>> target, _, tokenizer = load_embedded_pair()
        >>> head = load_head(resources.files("specdec") / "embedded" / "heads" / "eagle3", target, check=False)
        >>> prompt = tokenizer("import os").input_ids
        >>> SpeculativeDecoder(target, head).generate([prompt], max_new_tokens=16).stats.accepted > 0
        True
    """
    whole = cached_model(target, "target")
    checkpoint = Checkpoint.read(path)
    kind = detect(checkpoint)
    if kind not in FORMATS:
        what = f", {OTHERS[kind]}" if kind in OTHERS else ""
        refuse("path", f"a head in the format {kind!r}{what}", ", ".join(FORMATS))
    source = Source(checkpoint, whole, layer_ids)
    head = FORMATS[kind](source)
    assert source.ids is not None
    if source.ids.missing:
        warnings.warn(
            f"config.json of {str(path)!r} does not say which hidden states the head reads; taken are "
            f"{list(head.states)}, {source.ids.source}. Others with layer_ids.",
            RuntimeWarning,
            2,
        )
    drafter = HeadDrafter(head, choices=choices, confidence=confidence)
    drafter.check(whole, 0, 0)
    if check:
        drafter.report = self_check(head, whole, tokenizer)
        for line in drafter.report.troubles(source.ids):
            warnings.warn(f"{str(path)!r}: {line}", RuntimeWarning, 2)
    return drafter


KINDS = ("medusa", "eagle3", "dflash")
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def load_embedded_head(kind: str, target: PreTrainedModel) -> HeadDrafter:
    """Loads a head that comes with the package (``embedded/README.md`` says how it was made).

    Unlike :func:`load_head` it runs no self-check, which would take longer than loading: ``report`` is None.

    Args:
        kind: "medusa" (three heads: K is at most 3), "eagle3" or "dflash" (blocks of 8: K is at most 7).
        target: that of :func:`~specdec.load_embedded_pair`, of any dtype, on any device.

    Raises:
        ValueError: names the argument, what was given and what is allowed. It cannot tell another target with the same
            sizes: its texts would be right, and its drafts rarely accepted.

    Example:
        >>> from specdec import SpeculativeDecoder, load_embedded_head, load_embedded_pair
        >>> target, _, tokenizer = load_embedded_pair()
        >>> decoder = SpeculativeDecoder(target, load_embedded_head("dflash", target), num_drafts=7)
        >>> decoder.generate([tokenizer("import os").input_ids], max_new_tokens=16).stats.tau > 1
        True
    """
    if kind not in KINDS:
        refuse("kind", repr(kind), ", ".join(map(repr, KINDS)))
    folder = Path(str(resources.files("specdec") / "embedded"))
    own, config = json.loads((folder / "target" / "config.json").read_text()), target.config
    if any(getattr(config, size, None) != own[size] for size in SIZES):
        refuse("target", f"a model of type {config.model_type!r} with other sizes", "that of load_embedded_pair()")
    return load_head(folder / "heads" / kind, target, check=False)

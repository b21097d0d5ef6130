"""The small heads that come with the package, for the target of the embedded pair."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from transformers import PreTrainedModel

from ...checks import refuse
from .drafter import HeadDrafter
from .loading import load_head

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

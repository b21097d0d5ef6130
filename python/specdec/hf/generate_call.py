"""What was passed to transformers' ``generate``, of which it hands only a part to a ``custom_generate`` callable.

Of its arguments ``streamer``, ``assistant_model``, ``tokenizer``, ``assistant_tokenizer`` and ``synced_gpus`` are
dropped without a word, and defaults can no longer be told from values that were set. There is one moment at which both
are to be seen: while ``GenerationMixin._extract_generation_mode_kwargs`` sorts the arguments, it asks for the
callable's signature (transformers 5.17 to 5.23; tests/hf/test_speculate_arguments.py fails should that change). So the
callable's ``__signature__`` looks at the local variables of that caller. It reads them and changes nothing.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

from transformers import GenerationMixin

from ..checks import refuse

# argument of generate -> where it belongs
_OURS = {
    "streamer": "specdec.speculate(streamer=...): generate() would give it the prompt and nothing else",
    "assistant_model": "specdec.speculate(draft_model=...)",
    "tokenizer": "specdec.speculate(tokenizer=...)",
    "assistant_tokenizer": "specdec.speculate(draft_tokenizer=...)",
    "synced_gpus": "None or False: every process decodes on its own",
}
_SORTS = GenerationMixin._extract_generation_mode_kwargs.__code__


class GenerateCall(NamedTuple):
    misplaced: dict[str, Any]  # arguments that generate would drop
    given: dict[str, Any]  # fields of GenerationConfig that were set: by keyword, by configuration, or by the model's

    def refuse_misplaced(self) -> None:
        """Raises ValueError naming an argument that belongs elsewhere."""
        for name, value in self.misplaced.items():
            refuse(name, f"{_described(value)} in generate()", _OURS[name])
        if self.given.get("stop_strings") is not None:
            allowed = "specdec.speculate(stop_strings=..., tokenizer=...), as generate() hands us no tokenizer"
            refuse("stop_strings", f"{self.given['stop_strings']!r} in generate()", allowed)
        if self.given.get("token_healing"):
            refuse("token_healing", True, "False: heal the prompt before generate()")
        if self.given.get("past_key_values") is not None:
            given = f"a {type(self.given['past_key_values']).__name__}"
            refuse("past_key_values", given, "None: specdec has its own static cache")


def generate_call() -> GenerateCall | None:
    """The call of ``generate`` that is sorting its arguments now, somewhere below on the stack; None outside of one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _SORTS:
        frame = frame.f_back
    if frame is None:
        return None
    sorting = frame.f_locals
    arguments = sorting.get("generation_mode_kwargs") or {}
    misplaced = {n: v for n, v in arguments.items() if n in _OURS and v is not None and v is not False}
    caller = frame.f_back.f_locals.get("generation_config") if frame.f_back is not None else None
    given: dict[str, Any] = {}
    for config in (sorting["self"].generation_config, caller):
        given |= {name: value for name, value in (vars(config) if config else {}).items() if value is not None}
    given |= {name: value for name, value in sorting["kwargs"].items() if value is not None}
    return GenerateCall(misplaced, given)


def _described(value: object) -> str:
    return repr(value) if isinstance(value, bool) else f"a {type(value).__name__}"

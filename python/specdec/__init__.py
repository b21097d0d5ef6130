"""Speculative decoding for Hugging Face causal language models, exact and fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_kernels import SamplingParams

    from .chat_template import chat_prompt
    from .decoder import SpeculativeDecoder
    from .drafters.composite import Composite
    from .drafters.early_exit import EarlyExitDrafter
    from .drafters.heads import HeadDrafter, load_embedded_head, load_head
    from .drafters.prompt_lookup import PromptLookupDrafter
    from .drafters.suffix import SuffixDrafter, SuffixMemories, SuffixMemory
    from .drafters.universal import UniversalDrafter
    from .hf.speculate import Speculator, speculate
    from .loop.draft_length import AdaptiveDrafts
    from .loop.request import Request
    from .loop.sequence import Output, SequenceState
    from .models.cache.kv_cache import StaticKVCache
    from .models.load.loading import load_embedded_pair, load_model, load_pair
    from .result import FinishReason, GenerationResult, Producer, TokenLogProb
    from .sampling.grammar import Grammar, GrammarCompiler
    from .sampling.grammar_source import GrammarSource
    from .serving.engine import Engine, EngineStopped
    from .serving.scheduler import QueueFull, Scheduler
    from .stats import Stats
    from .stopping import StopStrings
    from .training.rollout import Rollout, RolloutBatch

__all__ = [
    "AdaptiveDrafts",
    "Composite",
    "EarlyExitDrafter",
    "Engine",
    "EngineStopped",
    "FinishReason",
    "GenerationResult",
    "Grammar",
    "GrammarCompiler",
    "GrammarSource",
    "HeadDrafter",
    "Output",
    "Producer",
    "PromptLookupDrafter",
    "QueueFull",
    "Request",
    "Rollout",
    "RolloutBatch",
    "SamplingParams",
    "Scheduler",
    "SequenceState",
    "SpeculativeDecoder",
    "Speculator",
    "StaticKVCache",
    "Stats",
    "StopStrings",
    "SuffixDrafter",
    "SuffixMemories",
    "SuffixMemory",
    "TokenLogProb",
    "UniversalDrafter",
    "chat_prompt",
    "load_embedded_head",
    "load_embedded_pair",
    "load_head",
    "load_model",
    "load_pair",
    "speculate",
]
_HOMES = {
    "chat_template": ("chat_prompt",),
    "loop.draft_length": ("AdaptiveDrafts",),
    "models.cache.kv_cache": ("StaticKVCache",),
    "hf.speculate": ("Speculator", "speculate"),
    "decoder": ("SpeculativeDecoder",),
    "drafters.composite": ("Composite",),
    "drafters.early_exit": ("EarlyExitDrafter",),
    "drafters.heads": ("HeadDrafter", "load_embedded_head", "load_head"),
    "drafters.prompt_lookup": ("PromptLookupDrafter",),
    "drafters.suffix": ("SuffixDrafter", "SuffixMemories", "SuffixMemory"),
    "drafters.universal": ("UniversalDrafter",),
    "serving.engine": ("Engine", "EngineStopped"),
    "models.load.loading": ("load_embedded_pair", "load_model", "load_pair"),
    "sampling.grammar": ("Grammar", "GrammarCompiler"),
    "sampling.grammar_source": ("GrammarSource",),
    "sampling.params": ("SamplingParams",),
    "loop.request": ("Request",),
    "loop.sequence": ("Output", "SequenceState"),
    "result": ("FinishReason", "GenerationResult", "Producer", "TokenLogProb"),
    "serving.scheduler": ("QueueFull", "Scheduler"),
    "stats": ("Stats",),
    "stopping": ("StopStrings",),
    "training.rollout": ("Rollout", "RolloutBatch"),
}


def __getattr__(name: str):
    """Names are imported when first used: importing transformers takes seconds, ``specdec --help`` should not."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

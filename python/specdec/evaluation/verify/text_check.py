"""Texts that have to be equal: greedy ones, and those of rule ``coupled`` for their seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel

from specdec_kernels import SamplingParams

from ...decoder import SpeculativeDecoder
from ...result import GenerationResult
from ...stats import Stats
from ..contenders import CompareSettings, Prompt, TransformersMethod
from ..near_ties import Difference, Judge, Noise
from .verify_settings import Cell, VerifySettings


@dataclass(frozen=True)
class TextResult:
    """How the texts of one cell compare with those of transformers."""

    cell: Cell
    texts: int
    tokens: int  # how many were compared: those of every text up to its first difference
    differing: int  # texts that differ from those of transformers
    unlike_plain: int  # texts that differ from those of the same loop without drafts
    differences: list[Difference]  # the first one of each text, and the bugs after it
    stats: Stats
    error: str | None  # why the drafter was dropped, or which logits had no distribution

    @property
    def bugs(self) -> list[Difference]:
        return [d for d in self.differences if d.verdict == "bug"]

    def to_dict(self) -> dict:
        s = self.stats
        return {
            **dataclasses.asdict(self.cell),
            **{name: getattr(self, name) for name in ("texts", "tokens", "differing", "unlike_plain")},
            **{"near_ties": len(self.differences) - len(self.bugs), "bugs": len(self.bugs)},
            **{"drafted": s.drafted, "accepted": s.accepted, "alpha": s.alpha, "tau": s.tau},
            "differences": [dataclasses.asdict(d) for d in self.differences],
            "error": self.error,
        }


class TextCheck:
    """Compares with transformers' ``generate``, which decodes one prompt at a time, token by token. Run cells in the
    order of :func:`~specdec.evaluation.verify.verify_settings.cells`, those without a drafter first.

    A text of rule ``coupled`` has the largest logits / T + noise at each position, the Gumbel form of its race. So
    transformers decodes these texts greedily as well, with a processor that adds the noise of docs/numerics.md.

    Args:
        target: the model of all texts.
        prompts: lists of token ids.
        settings: ``max_new_tokens``, ``temperature``, and ``seed`` of the first prompt (the next has the next).
    """

    def __init__(self, target: PreTrainedModel, prompts: Sequence[Prompt], settings: VerifySettings):
        self._target, self._prompts, self._settings = target, prompts, settings
        self._plain = TransformersMethod(target, None, CompareSettings(settings.max_new_tokens))
        self._judges = {"greedy": Judge(target), "coupled": Judge(target, temperature=settings.temperature)}
        vocabulary = target.config.get_text_config(decoder=True).vocab_size
        self._noise = [RaceNoise(settings.seed + i, vocabulary) for i in range(len(prompts))]
        self._expected: dict[str, list[list[int]]] = {}
        self._own: dict[str, list[list[int]]] = {}
        self._judged: dict[tuple, list[Difference]] = {}

    def run(self, cell: Cell, decoder: SpeculativeDecoder) -> TextResult:
        s, prompts = self._settings, self._prompts
        expected = self._expected_texts(cell.check)
        temperature = 0.0 if cell.check == "greedy" else s.temperature
        texts, stats, error = [], [], None
        for start in range(0, len(prompts), cell.batch_size):
            batch = prompts[start : start + cell.batch_size]
            seeds = [s.seed + i for i in range(start, start + len(batch))]
            params = SamplingParams(temperature)
            result = decoder.generate(batch, None, s.max_new_tokens, params, seeds, rule=cell.rule)
            texts += result.tokens
            stats.append(result.stats)
            error = error or trouble(result)
        own = self._own.setdefault(cell.check, texts)  # the first cell of a check has no drafter
        unlike_plain = sum(a != b for a, b in zip(own, texts, strict=True))
        differences, tokens, differing = [], 0, 0
        for i, (plain, text) in enumerate(zip(expected, texts, strict=True)):
            found = self._judge(cell, i, plain, text)
            differences += found
            differing += bool(found)
            tokens += found[0].position + 1 if found else len(text)
        whole = Stats.total(stats, max(len(part.drafted_by_position) for part in stats))
        return TextResult(cell, len(texts), tokens, differing, unlike_plain, differences, whole, error)

    def _expected_texts(self, check: str) -> list[list[int]]:
        if check not in self._expected:
            noise = self._noise if check == "coupled" else [None] * len(self._prompts)
            processors = [() if n is None else (Perturbed(n, self._settings.temperature),) for n in noise]
            runs = zip(self._prompts, processors, strict=True)
            self._expected[check] = [self._plain.run([prompt], 0, added).texts[0] for prompt, added in runs]
        return self._expected[check]

    def _judge(self, cell: Cell, i: int, plain: list[int], text: list[int]) -> list[Difference]:
        key = (cell.check, i, *text)
        if key not in self._judged:
            judge, noise = self._judges[cell.check], self._noise[i] if cell.check == "coupled" else None
            names = ("transformers", cell.name)
            first = judge.explain(self._prompts[i], plain, text, names, i, noise)
            found = [] if first is None else [first]
            if first is not None and first.verdict == "near-tie":
                rest = judge.rest(self._prompts[i], text, first.position + 1, cell.name, i, noise)
                found += [d for d in rest if d.verdict == "bug"]
            self._judged[key] = found
        return self._judged[key]


def trouble(result: GenerationResult) -> str | None:
    """What went wrong besides the text: a drafter that failed, or logits without a distribution. None: nothing."""
    if result.drafter_error is not None:
        return result.drafter_error
    return next((f"sequence {b}: {status.name}" for b, status in enumerate(result.status) if status), None)


class Perturbed(LogitsProcessor):
    """Adds noise to logits / temperature, so that greedy decoding of the sums is sampling."""

    def __init__(self, noise: Noise, temperature: float):
        self._noise, self._temperature = noise, temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.double() / self._temperature + self._noise(input_ids.shape[1]).to(scores.device)


# ---- The noise of rule ``coupled``, computed from docs/numerics.md ("Randomness") alone. It shares no code with the
# kernels, so that a mistake in their noise cannot hide here as well.

_RACE = 5  # the stream of rule ``coupled``
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        counter: [4, n] uint64, each below 2^32.
        key: 64 bits.

    Returns:
        [4, n] uint64, each below 2^32.
    """
    c0, c1, c2, c3 = counter
    keys = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = product1 >> np.uint64(32) ^ c1 ^ np.uint64(keys[0])
        c2 = product0 >> np.uint64(32) ^ c3 ^ np.uint64(keys[1])
        c1, c3 = product1 & _LOW, product0 & _LOW
        keys = [(k + step) & 0xFFFFFFFF for k, step in zip(keys, _WEYL, strict=True)]
    return np.stack((c0, c1, c2, c3))


class RaceNoise:
    """-log E of rule ``coupled`` for one sequence, as :data:`~specdec.evaluation.near_ties.Noise`.

    Args:
        seed: of the sequence, a signed 64-bit integer.
        vocabulary: V.
    """

    def __init__(self, seed: int, vocabulary: int):
        self._seed, self._vocabulary = seed, vocabulary

    def __call__(self, position: int) -> torch.Tensor:
        """[V] float64, what is added to logits / temperature at an absolute position."""
        counter = np.zeros((4, -(-self._vocabulary // 4)), np.uint64)  # token v uses word v % 4 of counter v // 4
        counter[0] = np.arange(counter.shape[1], dtype=np.uint64)
        counter[1], counter[3] = position & 0xFFFFFFFF, _RACE
        bits = philox(counter, self._seed).T.reshape(-1)[: self._vocabulary]
        u = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
        u = np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64)
        return -torch.log(-torch.log1p(-torch.from_numpy(u)))

"""EleutherAI's lm-evaluation-harness, with texts that specdec decodes: ``python -m specdec.harness`` is its command
line, in which ``--model specdec`` is known. docs/evaluation.md says how to use it.

lm_eval 0.4.13 looks for models in its own registry only, and has no entry points for others: importing this module
registers ours.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..checks import refuse
from ..hf.speculate import Speculator, speculate
from ..models.load.loading import load_draft, load_draft_tokenizer, require_same_vocabulary
from ..stats import Stats
from .drafters import NAMES, NEED_DRAFT, TREE_DRAFTS, make_drafter, nodes_of, parts_of
from .drafting import read_num_drafts
from .user_errors import as_arguments

if importlib.util.find_spec("lm_eval") is None:
    raise ImportError("the evaluation harness needs lm_eval: pip install 'specdec-kernels[harness]'")

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

NAME = "specdec"
# Arguments of HFLM that change what the decoder is given, beside None and False: what it takes.
REFUSED = {
    "parallelize": "False: the decoder drives a model on one device",
    "tp_plan": "None: the decoder drives a model on one device",
    "mixed_precision_dtype": "None: under autocast, keys come narrower than the cache holds them; use dtype=",
    "trust_remote_code": "False: no remote code",
}

_log = logging.getLogger("lm_eval.specdec")  # below lm_eval's own, so that its settings of verbosity count


@register_model(NAME)
class SpecdecLM(HFLM):
    """``hf`` of the harness, which decodes the texts of ``generate_until`` by speculation. Log-likelihoods are HFLM's
    own: they decode nothing.

    Greedy answers are those of ``hf``, sampled ones have its distribution, and what the model's generation
    configuration and a task's ``generation_kwargs`` ask for is done or refused as by :func:`specdec.speculate`.

    Args:
        pretrained: of the target, as for ``hf``: a folder, a name on the Hugging Face hub, or a model.
        draft: the same of a smaller model. ``drafter`` is then "model", unless it says otherwise.
        draft_bits: 8: the weights of a draft that is loaded are rounded to so many bits.
        drafter: who proposes tokens, as on the command line: a name of ``specdec generate --drafter``, or the folder of
            a head. Plain decoding is ``hf``, or ``num_drafts=0``.
        num_drafts: K >= 0, or "auto", which adapts it. None: it adapts where no text depends on it, and is 4 elsewhere.
        tree: N, the nodes of a tree of drafts, >= 1.
        rule: the accept rule: "token", "block" or "coupled".
        exit_layers: layers of the target that draft, with drafter "early-exit".
        confidence: after a token that the draft model finds less likely than this, no more are drafted.
        arguments: those of ``hf``: dtype, device, batch_size, peft, max_length and so on.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        draft: str | PreTrainedModel | None = None,
        draft_bits: int | None = None,
        drafter: str | None = None,
        num_drafts: int | str | None = None,
        tree: int | None = None,
        rule: str | None = None,
        exit_layers: int | None = None,
        confidence: float = 0.0,
        **arguments: Any,
    ):
        for name, allowed in REFUSED.items():
            if arguments.get(name):
                refuse(name, repr(arguments[name]), allowed)
        if arguments.get("backend") == "seq2seq":
            refuse("backend", "'seq2seq'", "causal, or default where the model is one: no encoder-decoder models")
        if drafter is None and draft is None:
            others = ", ".join(name for name in NAMES if name not in (*NEED_DRAFT, "none"))
            refuse("drafter", "none, and no draft", f"draft=DIR, or one of {others} (model hf decodes plainly)")
        drafter = drafter or "model"
        if draft is not None and parts_of(drafter)[-1] not in NEED_DRAFT:
            refuse("draft", f"a model with drafter {drafter!r}", f"none; with {' or '.join(NEED_DRAFT)} one")
        if draft_bits is not None and not isinstance(draft, str):
            given = f"{draft_bits!r} without a draft that is loaded"
            refuse("draft_bits", given, "None; 8 where draft is a folder or name")
        with as_arguments():
            chosen = None if num_drafts is None else read_num_drafts(str(num_drafts))
        super().__init__(pretrained, **arguments)
        if self.backend != "causal":
            refuse("pretrained", "an encoder-decoder model", "a causal language model")
        nodes = nodes_of(drafter, tree)
        if chosen is None and nodes is not None:
            chosen = TREE_DRAFTS
        dtype = arguments.get("dtype") or "auto"
        proposer = make_drafter(drafter, self.model, exit_layers=exit_layers, tokenizer=self.tokenizer,
                                confidence=confidence, **self._draft(draft, drafter, dtype, draft_bits))  # fmt: skip
        if proposer is None:  # plain decoding was asked for
            chosen = 0
        self.speculator: Speculator = speculate(drafter=proposer, num_drafts=chosen, rule=rule, tree=nodes)
        self._decoded: list[Stats] = []  # one for each batch

    def _draft(self, draft: str | PreTrainedModel | None, drafter: str, dtype: str, bits: int | None) -> dict[str, Any]:
        """The draft model, and its tokenizer where the drafter translates between two."""
        if not isinstance(draft, str):
            return {"draft": draft}
        tokenizer = load_draft_tokenizer(draft)
        if tokenizer is not None and parts_of(drafter)[-1] != "universal":
            require_same_vocabulary(self.tokenizer, tokenizer)
        return {"draft": load_draft(draft, dtype, self.device, None, bits), "draft_tokenizer": tokenizer}

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """As HFLM calls it. ``generation_kwargs`` come from its ``normalize_gen_kwargs``: without ``do_sample`` the
        temperature is 0, which transformers would warn of."""
        if not generation_kwargs.get("do_sample"):
            generation_kwargs.pop("temperature", None)
        ends = StopsInOutput(self.tokenizer, stop, context.shape[1])
        output = self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=StoppingCriteriaList([ends]),
            pad_token_id=self.tokenizer.pad_token_id,
            custom_generate=self.speculator,
            **generation_kwargs,
        )
        result = self.speculator.last_result
        assert result is not None
        self._decoded.append(result.stats)
        return output

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        texts = super().generate_until(requests, disable_tqdm)
        told = self.statistics
        _log.info("specdec: " + ", ".join(f"{name} {value:.4g}" for name, value in told.items()))
        return texts

    @property
    def statistics(self) -> dict[str, float]:
        """Of all texts so far: sums, and ratios as in :class:`specdec.Stats`."""
        most = max((len(stats.drafted_by_position) for stats in self._decoded), default=0)
        total = Stats.total(self._decoded, most)
        names = ("emitted", "steps", "drafted", "accepted", "acceptance_rate", "alpha", "tau")
        return {name: getattr(total, name) for name in names}

    def get_model_info(self) -> dict:
        """What the harness writes into the ``config`` of its results."""
        return {**super().get_model_info(), "specdec": self.statistics}


class StopsInOutput(StoppingCriteria):
    """Ends a sequence where one of ``strings`` is in what its last new tokens decode to, as HFLM's own criterion
    judges. That one remembers which row of its batch has ended, and may not be asked about one sequence at a time.

    The prompt does not count, and a text that was cut here is cut again by HFLM, before the first stop string.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt_length: int):
        self._tokenizer, self._strings, self._prompt_length = tokenizer, strings, prompt_length
        # Two more than a string has by itself: a text may spell it by other tokens.
        self._reach = 2 + max((len(tokenizer.encode(s, add_special_tokens=False)) for s in strings), default=0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **_: Any) -> torch.Tensor:
        rows = [tuple(row[-self._reach :]) for row in input_ids[:, self._prompt_length :].tolist()]
        ended = {row: self._ends(row) for row in {*rows}}  # often one sequence is shown as all rows
        return torch.tensor([ended[row] for row in rows], device=input_ids.device)

    def _ends(self, row: tuple[int, ...]) -> bool:
        text = self._tokenizer.decode(row)
        return any(string in text for string in self._strings)


def main() -> None:
    """The command line of lm_eval."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

"""Every known model type: ragged cached forwards and speculative texts against its own full forwards and greedy text.
And the types that are refused, by name."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models import supported
from specdec.models.cache.recurrent_layer import RecurrentLayer
from specdec.models.supported import KNOWN_MODEL_TYPES, cached_model
from support import ROOT
from support.feeding import assert_rows, feed, full_logits
from support.model_types import CASES, HYBRID, model_of
from support.models import POSITIONS, VOCABULARY, WINDOW, generate, prompts, tiny_model
from support.texts import assert_same_greedy
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_all_known_types_are_here():
    assert {model_type for model_type, _ in CASES.values()} == KNOWN_MODEL_TYPES


# Types that share their attention with others here.
RARER = (
    "bamba",
    "glm",
    "glm4",
    "gptj",
    "granitemoe",
    "lfm2_moe",
    "ministral",
    "olmo",
    "phi",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "smollm3",
    "stablelm",
    "starcoder2",
)
RARELY = [pytest.param(case, marks=pytest.mark.nightly) for case in RARER]


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in RARER), *RARELY])
def test_ragged_steps_and_greedy_texts(case):
    """Sequences several windows long, two rollbacks, and a draft of the same type that is wrong now and then."""
    model = model_of(case)
    cached = cached_model(model, "target")
    known = [prompts(1, n, n, seed=n)[0] if n else [] for n in (0, 5, 57)]
    cache = cached.new_cache(3, 80, window=9)
    cached.prefill(cache, known)
    for step, counts in enumerate(((2, 3, 1), (4, 1, 9), (1, 0, 1))):
        new = [prompts(1, n, n, seed=100 * step + n)[0] if n else [] for n in counts]
        # transformers computes scans in chunks, in float32 of other roundings.
        atol = 1e-4 if case in HYBRID else 2e-5
        assert_rows(model, feed(cached, cache, new), known, new, atol)
        known = [old + added[: max(n - 1, 0)] for old, added, n in zip(known, new, counts, strict=True)]
        cache.lengths = torch.tensor([len(k) for k in known])

    ragged, longer = [p[:n] for p, n in zip(known[1:] + [[3]], (99, 99, 1), strict=True)], 16
    result = generate(model, worse(model), ragged, 3, max_new_tokens=longer)
    assert 0 < result.stats.accepted < result.stats.drafted
    for prompt, got in zip(ragged, result.tokens, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, do_sample=False, max_new_tokens=longer, pad_token_id=0, eos_token_id=None)
        assert_same_greedy(model, prompt, got, whole[0, len(prompt) :].tolist())


def worse(model):
    """A copy that is often right."""
    draft = copy.deepcopy(model)
    head = draft.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head += 0.1 * head.std() * torch.randn(head.shape, generator=generator)
    return draft


@pytest.mark.parametrize("case", [c for c, (_, settings) in CASES.items() if "sliding_window" in str(settings)])
def test_windows_say_something(case):
    """Without one the full forward is another, or the test above shows nothing of windows."""
    model = copy.deepcopy(model_of(case))
    sequence = prompts(1, 40, 40)[0]
    narrow = full_logits(model, sequence)
    model.config.get_text_config().sliding_window = POSITIONS
    difference = (full_logits(model, sequence) - narrow).abs().amax(-1)
    assert difference[:WINDOW].max() < 1e-4 < 1e-3 < difference[2 * WINDOW :].min()


@pytest.mark.parametrize("case", ("mpt", "gpt_bigcode", "opt", "gptj"))
def test_texts_reach_the_last_position(case):
    model = model_of(case)
    assert [len(t) for t in generate(model, model, [[1] * 250, [2, 3]], 8, max_new_tokens=6).tokens] == [6, 6]
    with pytest.raises(ValueError, match=f"the target model has {POSITIONS} positions"):
        generate(model, None, [[1] * 250], 0, max_new_tokens=7)


# ---- types that are not known --------------------------------------------------------------------------------


def test_unknown_types_are_checked_with_a_short_window(monkeypatch):
    """A model that does not leave its window to the mask is found out by thirteen tokens."""
    from specdec.models.forward.cached_model import CachedModel

    monkeypatch.setattr(supported, "KNOWN_MODEL_TYPES", frozenset())
    for case in ("mistral", "gemma3", "gpt_oss"):
        model = model_of(case)
        cached_model(model, "target")
        assert model.config.get_text_config().sliding_window == WINDOW  # as before
    model = copy.deepcopy(model_of("mistral"))
    model.config.sliding_window = 4096
    init = CachedModel.__init__

    def blind(self, model):
        init(self, model)
        self.attention._window = None

    monkeypatch.setattr(CachedModel, "__init__", blind)
    with pytest.raises(ValueError, match="target: model type 'mistral' .* differ from a full forward"):
        cached_model(model, "target")
    assert model.config.sliding_window == 4096


def test_classes_from_elsewhere_are_checked():
    class Shifted(type(tiny_model("llama"))):
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, position_ids=None if position_ids is None else position_ids // 2, **kwargs)

    model = Shifted(tiny_model("llama").config).eval()
    with pytest.raises(ValueError, match="draft: model type 'llama' cannot be driven with a static cache"):
        cached_model(model, "draft")


def not_replayed(layer):
    """As if what was accepted were in the state already."""
    if layer.state is not None and not layer.feed.keep:
        layer.state.base.copy_(layer.feed.start)


def forgotten(layer):
    """As where states are rolled back, and convolutions are not (llama.cpp#28123, vllm#44296)."""
    if layer.inputs is not None and not layer.feed.keep:
        layer.inputs.zero_()


@pytest.mark.parametrize("bug", [not_replayed, forgotten])
def test_a_state_that_is_not_rolled_back_is_found(bug, monkeypatch):
    monkeypatch.setattr(supported, "KNOWN_MODEL_TYPES", frozenset())
    model = model_of("qwen3_5_text")
    cached_model(model, "target")
    feed = RecurrentLayer.convolve
    monkeypatch.setattr(RecurrentLayer, "convolve", lambda self, *arguments: bug(self) or feed(self, *arguments))
    with pytest.raises(ValueError, match="target: model type 'qwen3_5_text' .* differ from a full forward"):
        cached_model(model, "target")


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
STATEFUL = {
    "minimax": {},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 8,
    },
    "recurrent_gemma": {},
    "rwkv": {},
    "xlstm": {},
}


@pytest.mark.parametrize("model_type", STATEFUL)
def test_states_that_cannot_be_rewound_are_refused(model_type):
    """Before anything runs: these have no weights."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("a type of later releases of transformers")
    try:
        config = CONFIG_MAPPING[model_type](**{**_SMALL, **STATEFUL[model_type]})
    except Exception:  # a configuration with counts of its own
        config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    for name, make in (("target", lambda: SpeculativeDecoder(model, None, 0)), ("draft", lambda: drafting(model))):
        with pytest.raises(ValueError, match=f"{name}: model type {model_type!r} keeps a state that cannot be rewound"):
            make()


def drafting(model):
    return SpeculativeDecoder(tiny_model("llama"), model)


def test_other_masks_and_heads_are_refused():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        chunked = CONFIG_MAPPING["llama4_text"](layer_types=["chunked_attention", "full_attention"], **sizes)
        chunked = AutoModelForCausalLM.from_config(chunked).eval()
        llama = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).eval()
    with pytest.raises(ValueError, match=r"'llama4_text' has other masks than the loop's \(chunked_attention\)"):
        cached_model(chunked, "target")
    with pytest.raises(ValueError, match="target: got weights on meta"):
        cached_model(llama, "target")
    for headless in (LlamaModel, LlamaForSequenceClassification):
        with pytest.raises(ValueError, match=f"target: got {headless.__name__}, allowed: a causal LM"):
            cached_model(headless(LlamaConfig(vocab_size=20, **sizes)).eval(), "target")
    cacheless = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=20, n_embd=8, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="model type 'openai-gpt' cannot be driven with a static cache"):
        cached_model(cacheless, "target")


def test_the_table_in_the_documentation():
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `") and "config" not in line]
    assert sorted(", ".join(cells).replace(" ", "").split(",")) == sorted(f"`{t}`" for t in KNOWN_MODEL_TYPES)

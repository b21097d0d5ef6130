"""Of models and of drafters that run them: masks, caches, shared layers, and texts between two tokenizers."""

from .mutation import Mutation, mutations

EXIT = "tests/drafters/test_early_exit.py"
UNIVERSAL = "tests/drafters/test_universal.py"
ATTENTION = "tests/models/test_attention.py tests/models/test_attention_models.py tests/models/test_kv_cache.py"
MASKS = "tests/models/test_attention.py"
OF_MODELS = "tests/models/test_attention_models.py"
RAGGED = "tests/models/test_kv_cache.py::test_ragged_cache_equals_full_forwards"
CACHE = "tests/models/test_kv_cache.py tests/models/test_cache_dtype.py tests/serving/test_serving_faults.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/models/linear.py",
        "tests/models/test_linear_layers.py",
        {
            "few-rows-are-one-more": ("most_rows=MOST_ROWS", "most_rows=MOST_ROWS + 1"),
            "few-rows-forget-the-limit": ("most_rows=MOST_ROWS", "most_rows=None"),
            "few-rows-lose-gradients": ("not taken or torch.is_grad_enabled() or", "not taken or"),
            "few-rows-ignore-autocast": (' or torch.is_autocast_enabled("cpu")', ""),
            "few-rows-change-the-users-layer": (
                "fast = copy.copy(layer)",
                "fast = layer",
            ),
            "few-rows-change-the-users-modules": (
                "copied = copy.copy(module)\n                copied._modules",
                "copied = module\n                copied._modules",
            ),
            "few-rows-inside-of-adapters": ('startswith("peft.")', 'startswith("no.")'),
            "few-rows-of-subclasses": ("type(module) is not nn.Linear", "not isinstance(module, nn.Linear)"),
            "few-rows-undo-what-was-replaced": (' or "forward" in vars(module)', ""),
            "few-rows-of-shared-layers-are-two": ("if id(module) not in done:", "if True:"),
        },
    ),
    *mutations(
        "python/specdec/models/compiled.py",
        "tests/models/test_compiled.py",
        {
            "compiled-copy-stays-after-new-modules": (
                "if known is None or len(known.inside) != len(inside) or not all(map(operator.is_, known.inside, inside)):",
                "if known is None:",
            ),
            "compiled-copies-are-each-decoders-own": ("known = copies.get(cache_dtype)", "known = None"),
            "compiled-copy-keeps-its-model": ("made = copy.copy(model) if made is model else made", "pass"),
        },
    ),
    *mutations(
        "python/specdec/models/cached_model.py",
        "tests/models/test_compiled.py",
        {
            "compiled-without-the-layers-of-few-rows": (
                "compiled_copy(self.model, self.cache_dtype, copied)",
                "compiled_copy(self.model, self.cache_dtype, lambda: self.model)",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/attention.py",
        ATTENTION,
        {
            "attention-does-not-see-itself": ("causal = slot <= position", "causal = slot < position"),
            "attention-window-one-too-wide": ("(slot > position - window)", "(slot >= position - window)"),
            "attention-changes-the-users-configuration": ("copy.deepcopy(config, configs)", "config"),
            "attention-leaves-modules-out-of-the-copy": ("copied._modules = children", "pass"),
            "attention-does-not-read-the-newest-block": (
                "last_block = last // BLOCK",
                "last_block = (last - 1).clamp(min=0) // BLOCK",
                MASKS,
            ),
            "attention-reads-a-block-too-many": (
                "numbers, indices = last_block + 1",
                "numbers, indices = last_block + 2",
                MASKS,
            ),
            "attention-window-begins-a-slot-late": ("(low - (window - 1))", "(low - (window - 2))", MASKS),
            "attention-padding-has-no-block": (
                "((positions == 0).any(1) & (first_block > 0)).long()",
                "torch.zeros_like(first_block)",
                MASKS,
            ),
            "attention-window-reaches-back-to-padding": (
                "torch.where(positions > 0, positions, capacity).amin(1)",
                "positions.amin(1)",
                MASKS,
            ),
            "attention-soft-cap-is-a-tanh": ("cap * torch.tanh(score / cap)", "torch.tanh(score / cap)", MASKS),
            "attention-soft-caps-are-lost-in-groups": (
                '_check_plain("grouped", module, dropout, others, "softcap")',
                '_check_plain("grouped", module, dropout, others)',
                f"{MASKS}::test_unusual_attention_is_refused",
            ),
            "attention-groups-have-their-own-scale": (
                "attention_mask, scale=scaling, enable_gqa",
                "attention_mask, scale=None, enable_gqa",
                OF_MODELS,
            ),
            "attention-takes-eager-for-sdpa": ('elif config._attn_implementation != "sdpa":', "elif False:", OF_MODELS),
            "attention-forgets-sinks": ('if any(name.endswith("sinks")', 'if any(name == "sinks"', OF_MODELS),
            "attention-runs-the-forward-that-was-replaced": (
                'if any("forward" in vars(module)',
                'if any("forward" in vars(type(module)) and False',
                OF_MODELS,
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cached_model.py",
        CACHE,
        {
            "model-reads-every-chunk-into-slot-0": (
                "torch.tensor(starts, device=self.device)[:, None] + index",
                "torch.tensor(starts, device=self.device)[:, None] * 0 + index",
            ),
            "model-is-fed-tokens-that-it-lacks": (
                "if self._lacks_tokens:",
                "if False:",
                "tests/models/test_dtypes_and_widths.py",
            ),
            "model-pads-into-slot-0": (
                "torch.where(valid, places, cache.trash)",
                "torch.where(valid, places, 0)",
                RAGGED,
            ),
            "model-does-not-see-earlier-chunks": (
                "stored = max(start + len(f) for",
                "stored = max(len(f) for",
                "tests/models/test_memory.py::test_a_smaller_chunk_stores_the_same_keys",
            ),
            "model-measures-its-slots-without-autocast": (
                "torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None",
                "None",
                "tests/models/test_memory.py::test_measured_once_a_model_and_kind_of_autocast",
            ),
            "model-pays-for-keys-alone": (
                "if pair is not None for slot in pair)",
                "if pair is not None for slot in pair[:1])",
                "tests/models/test_memory.py::test_a_slot_costs_what_is_allocated",
            ),
            "model-drafts-past-where-its-frequencies-change": (
                'if r.get("rope_type") in ("dynamic", "longrope"):',
                "if False:",
                "tests/loop/test_decoder_limits.py::test_positions_past_which_a_draft_would_change_earlier_tokens",
            ),
            "model-has-windows-in-all-layers": (
                '{"full_attention": mask(None),',
                '{"full_attention": mask(self._window),',
                "tests/models/test_model_types.py -k 'ragged and gemma3'",
            ),
            "model-counts-a-fed-token-twice": (
                "self._keys(layout.visible) < layout.positions[:, :1]",
                "self._keys(layout.visible) <= layout.positions[:, :1]",
                RAGGED,
            ),
            "model-keeps-its-old-modules": (
                "        self._take_attention()\n        slots = self.stored_slots()",
                "        slots = self.stored_slots()",
                ATTENTION,
            ),
        },
    ),
    *mutations(
        "python/specdec/models/kv_cache.py",
        CACHE,
        {
            "cache-keeps-the-last-sequence": ("layer.values[row].zero_()", "pass"),
            "cache-keeps-the-last-keys": ("layer.keys[row].zero_()", "pass"),
            "cache-shows-too-few-slots": ("min(-(-length // step) * step,", "min(length // step * step + 1,", RAGGED),
            "cache-writes-every-prompt-into-the-first-rows": (
                "slice(first_row, first_row + size)",
                "slice(0, size)",
                "tests/serving/test_scheduler.py -k beside",
            ),
            "cache-writes-where-the-last-forward-did": ("        self._index.clear()\n", "", RAGGED),
            "cache-rows-overlap": (
                "device=self.device) * self.capacity",
                "device=self.device) * (self.capacity - 1)",
                RAGGED,
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cache_dtype.py",
        CACHE,
        {"cache-dtype-may-be-wider": ("asked.itemsize >= comes.itemsize", "False")},
    ),
    *mutations(
        "python/specdec/drafters/model.py",
        EXIT,
        {
            "exit-writes-the-targets-keys": ("self.first = 1 if self.is_shared else 2", "self.first = 2"),
            "exit-has-a-cache-of-its-own": ("self.cache = shared or self.model", "self.cache = self.model"),
            "exit-catches-up": ("        if self.is_shared:\n            return\n        for rows", "        for rows"),
        },
    ),
    *mutations(
        "python/specdec/drafters/early_exit.py",
        EXIT,
        {
            "exit-one-layer-late": (".items())[:num_layers])", ".items())[: num_layers + 1])"),
            "exit-changes-the-targets-configuration": ("copy.deepcopy(config, configs)", "config"),
            "exit-changes-the-targets-modules": ("    module._modules = dict(module._modules)\n", ""),
        },
    ),
    *mutations(
        "python/specdec/drafters/translation.py",
        UNIVERSAL,
        {
            "translation-repeats-the-seam": ("else tokens[end:]", "else tokens[end - 1 :]"),
            "translation-forgets-the-context": (
                "            return tokens[len(known) :]\n",
                "            return None\n",
            ),
            "translation-forgets-half-characters": ("sequence[self._read :], text)", "[], text)"),
            "translation-never-settles": ("> SETTLE_AT", "> 10**9"),
            "translation-begins-within-characters": ("if not self.decode(c).startswith(INCOMPLETE)", "if True"),
            "translation-without-anchor": ('self.encode("\\n")', "[]"),
            "translation-with-two-beginnings": ("self._first = self._read = len(prefix)", "pass"),
            "translation-reads-half-characters": (
                "if not text.endswith(INCOMPLETE):\n                self._r",
                "if True:\n                self._r",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/universal.py",
        UNIVERSAL,
        {
            "universal-trusts-a-key-that-was-not-stored": ("known[b] + drafted[b][:-1]", "known[b] + drafted[b]"),
            "universal-catches-up-too-little": ("self.stored[b] = known[b][:-1]", "self.stored[b] = known[b][:-2]"),
            "universal-drafts-more-than-allowed": ("list(proposed)[: step.allowed[b]]", "list(proposed)"),
            "universal-outgrows-the-draft": (" <= self.room - count + 1:", ":"),
            "universal-skips-a-position": ("range(end, end + count - 1)", "range(end + 1, end + count)"),
            "universal-reads-padding": ("len(new) - 1]", "0]"),
            "universal-pads-into-slot-0": ("slots.where(slots >= 0, self.cache.trash)", "slots.clamp(min=0)"),
            "universal-drafts-after-its-end": ("token not in self.drafter.ends", "True"),
            "universal-never-compares-again": ("self.translations[b].settled\n        return", "10**9\n        return"),
        },
    ),
]

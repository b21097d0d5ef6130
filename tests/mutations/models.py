"""Of models and of drafters that run them: masks, caches, shared layers, and texts between two tokenizers."""

from .mutation import Mutation, mutations

EXIT = "tests/drafters/test_early_exit.py"
UNIVERSAL = "tests/drafters/test_universal.py"
ATTENTION = "tests/models/test_attention.py tests/models/test_attention_models.py tests/models/test_kv_cache.py"
CACHE = "tests/models/test_kv_cache.py tests/models/test_cache_dtype.py tests/serving/test_serving_faults.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/models/attention.py",
        ATTENTION,
        {
            "attention-does-not-see-itself": ("causal = slot <= position", "causal = slot < position"),
            "attention-window-one-too-wide": ("(slot > position - window)", "(slot >= position - window)"),
            "attention-changes-the-users-configuration": ("copy.deepcopy(config, configs)", "config"),
            "attention-leaves-modules-out-of-the-copy": ("copied._modules = children", "pass"),
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
            "exit-catches-up": ("        if not self.is_shared:\n            self._catch_up", "        self._catch_up"),
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

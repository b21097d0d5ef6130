"""Of heads: how they are wired to their target, which in public goes wrong without an error, and their files."""

from .mutation import Mutation, mutations

FORMATS = "tests/drafters/test_head_formats.py -k 'official or specforge or speculators or two or tied or test_eagle or medusa'"
PARALLEL = "tests/drafters/test_head_formats.py -k P-EAGLE"
DFLASH = "tests/drafters/test_head_formats.py -k dflash"
WIRING = "tests/drafters/test_heads.py"
FILES = "tests/drafters/test_head_files.py"
MTP = "tests/drafters/test_mtp.py"
GEMMA4 = "tests/drafters/test_gemma4_assistant.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/models/features.py",
        FORMATS,
        {
            "features-of-the-layer-after": (
                'own(f"{layers}.{state - 1}").register',
                'own(f"{layers}.{state}").register',
            ),
            "features-in-the-slot-after": ("+ slots).flatten()", "+ slots + 1).flatten()"),
            "features-leave-hooks-in-the-target": (
                "        setattr(module, name, OrderedDict(getattr(module, name)))\n    for name in",
                "        pass\n    for name in",
                WIRING,
            ),
            "features-of-the-first-row": (
                "self._first_slot[first_row : first_row + len(slots)]",
                "self._first_slot[: len(slots)]",
                WIRING,
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/drafter.py",
        WIRING,
        {
            "heads-keep-guessed-features": (
                "self.window = max(generation.most_drafts, self.head.lookahead) + 1",
                "self.window = 1",
                FORMATS,
            ),
            "heads-read-on-from-what-was-seen": (
                "max(starts[row] - self.window, 0)",
                "starts[row]",
                "tests/drafters/test_head_formats.py -k missed",
            ),
            "heads-begin-rows-of-the-targets-cache": (
                "        if self.head.reads_target_cache:\n            return\n",
                "",
                GEMMA4,
            ),
            "heads-forget-prompts": (
                "            self._read(begin, [",
                "            False and self._read(begin, [",
                FORMATS,
            ),
            "heads-are-fed-the-token-before-the-last": (
                "end, step.last_two[:, 1], visible",
                "end, step.last_two[:, 0], visible",
            ),
            "heads-draft-one-place-early": (
                "step.positions[:, 1:count], ",
                "step.positions[:, : count - 1], ",
                FORMATS,
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/interface.py",
        FORMATS,
        {
            "heads-pair-a-feature-with-its-own-token": (
                "torch.cat((slots, more), 1) + 1",
                "torch.cat((slots, more), 1)",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/eagle3.py",
        FORMATS,
        {
            "eagle3-skips-fc": ("        return self.fc(states)", "        return states[..., : self.width]"),
            "eagle3-feeds-back-the-normed-state": ("if self.norm_output else out", "if True else out"),
            "eagle3-never-feeds-back-the-normed-state": ("if self.norm_output else out", "if False else out"),
            "eagle3-feature-before-embedding": (
                "torch.cat((layer.input_layernorm(self.embedded(rows.tokens)), feature), -1)",
                "torch.cat((feature, layer.input_layernorm(self.embedded(rows.tokens))), -1)",
            ),
            "eagle3-another-residual": ("x = feature if self.norm_before_residual else x", "x = feature"),
            "eagle3-without-the-last-norm": ("super().logits(self.norm(hidden))", "super().logits(hidden)"),
            "eagle3-norms-after-fc": (
                "        if self.input_norm is not None:\n            states",
                "        if False:\n            states",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/eagle.py",
        FORMATS,
        {
            "eagle-feature-before-embedding": (
                "(self.embedded(rows.tokens), rows.features)",
                "(rows.features, self.embedded(rows.tokens))",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/medusa.py",
        FORMATS,
        {"medusa-without-residual": ("return x + silu(", "return silu(")},
    ),
    *mutations(
        "python/specdec/drafters/heads/p_eagle.py",
        PARALLEL,
        {
            "p-eagle-masks-without-their-feature": (
                "masked = self.combine(self.mask_hidden)",
                "masked = 0 * self.combine(self.mask_hidden)",
            )
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/dflash.py",
        DFLASH,
        {
            "dflash-reads-the-anchor": ("x if self.from_anchor else x[:, 1:]", "x"),
            "dflash-is-always-causal": ("each_other.tril() if self.causal else each_other", "each_other.tril()"),
            "dspark-forgets-the-draft-before": ("previous = yield self", "yield self"),
            "dflash-block-one-place-late": ("torch.arange(1, block + 1, device", "torch.arange(2, block + 2, device"),
            "dflash-norms-its-context": (
                "layer.self_attn.keys_and_values(rows.features, rotation)))",
                "layer.self_attn.keys_and_values(layer.input_layernorm(rows.features), rotation)))",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/mtp.py",
        MTP,
        {
            "mtp-feature-before-embedding": ("if self.hidden_first else parts", "if not self.hidden_first else parts"),
            "mtp-without-hnorm": ("layer.hnorm(rows.features)", "rows.features"),
            "mtp-without-enorm": ("layer.enorm(self.embedded(rows.tokens))", "self.embedded(rows.tokens)"),
            "mtp-feeds-back-before-the-norm": (
                "return self.normed(0, out) if self.recycle_normed else out",
                "return out",
            ),
            "mtp-never-feeds-back-before-the-norm": (
                "return self.normed(0, out) if self.recycle_normed else out",
                "return self.normed(0, out)",
            ),
            "mtp-without-the-last-norm": ("super().logits(self.normed(0, hidden))", "super().logits(hidden)"),
            "mtp-one-layer-for-all-drafts": ("out = self.feed(i, rows, cache)", "out = self.feed(0, rows, cache)"),
            "mtp-later-layers-miss-prompts": (
                "        self._read_from(0, rows, cache)",
                "        self.feed(0, rows, cache)",
            ),
            "mtp-later-layers-miss-shorter-steps": ("if i + 1 == count:", "if False:"),
            "mtp-reads-prompts-without-the-shift": ("tokens[:, i - first : i - first + count]", "tokens[:, :count]"),
            "mtp-drafts-without-the-shift": ("torch.cat((rows.tokens[:, 1:], token), 1)", "rows.tokens"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/mtp_files.py",
        MTP,
        {
            "mtp-layers-without-experts": ("        own.first_k_dense_replace = 0\n", "        pass\n"),
            "mtp-experts-up-before-gate": ("torch.cat((gate, up), 1)", "torch.cat((up, gate), 1)"),
            "mtp-takes-scaled-weights": ("tensor.itemsize < 2 or name", "name"),
            "mtp-takes-another-targets-layers": ("if number < 0:", "if False:"),
            "mtp-layers-with-embeddings-of-their-own": ("not torch.equal(renamed[new], tensor)", "False"),
            "mtp-of-fewer-layers-than-said": ("if isinstance(said, int) and said != count:", "if False:"),
            "mtp-has-no-doubts": ('{"recycle_normed": False}', '{"recycle_normed": True}'),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/gemma4.py",
        GEMMA4,
        {
            "gemma4-a-place-early": ("place, slots = fed + 1, ", "place, slots = fed, "),
            "gemma4-narrower-window": ("self.window + 1}", "self.window}"),
            "gemma4-feature-before-embedding": (
                "(self.embedded(token), state)",
                "(state, self.embedded(token))",
            ),
            "gemma4-feeds-back-the-own-state": ("state = self.post_projection(x)", "self.post_projection(x)"),
            "gemma4-reads-the-first-layers": (
                "{kind: i for i, kind in enumerate(kinds) if slots[i] is not None}",
                "{kind: i for i, kind in reversed([*enumerate(kinds)]) if slots[i] is not None}",
            ),
            "gemma4-embedding-without-its-scale": (
                "head.target_embedding = lambda tokens: embedding(tokens)",
                "head.target_embedding = lambda tokens: nn.functional.embedding(tokens, embedding.weight)",
            ),
            "gemma4-centroids-in-order": ("return ids.view(count, -1)", "return ids.sort().values.view(count, -1)"),
            "gemma4-other-key-heads": ("if given != slot[0][:2]:", "if False:"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/vocabulary.py",
        FORMATS,
        {
            "d2t-is-added-twice": (
                "ids = d2t.long() + torch.arange(len(d2t))",
                "ids = d2t.long() + d2t.long() + torch.arange(len(d2t))",
            ),
            "d2t-without-its-rows": ("checkpoint.tensors[name] = weight[order]", "pass"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/layer_ids.py",
        FILES,
        {
            "layer-ids-of-specforge-are-states": (
                'entries += [(f"eagle_config.{name}", nested["eagle_config"].get(name), 1)]',
                'entries += [(f"eagle_config.{name}", nested["eagle_config"].get(name), 0)]',
            ),
            "layer-ids-of-speculators-are-layers": (
                'entries += [("eagle_aux_hidden_state_layer_ids", top, 0)]',
                'entries += [("eagle_aux_hidden_state_layer_ids", top, 1)]',
            ),
            "layer-ids-without-a-doubt": ("doubts = (shifted,) if max(shifted) <= num_layers else ()", "doubts = ()"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/self_check.py",
        WIRING,
        {
            "self-check-keeps-the-first-reading": ("best = each if each[0] > CLEARLY * best[0] else best", "pass"),
            "self-check-looks-at-the-first-draft-alone": (
                " or min(self.acceptance) < COLLAPSE * self.acceptance[0]",
                "",
            ),
            "self-check-tells-of-unfounded-doubts": ("(head.certain and best is found[0])", "False", MTP),
            "self-check-is-silent": (
                "        if self.little:\n            said",
                "        if False:\n            said",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/checkpoint.py",
        FILES,
        {
            "heads-round-routers-to-the-targets-dtype": (
                "torch.float32 if name.endswith(in_float32) else dtype",
                "dtype",
                MTP,
            ),
            "heads-read-whole-targets": ("if name.startswith(roots)} if roots else names", "}", MTP),
            "heads-take-other-shapes": ("if given.shape != weight.shape:", "if False:"),
            "heads-ignore-unknown-tensors": ("if unknown := sorted(", "if unknown := sorted(() and "),
        },
    ),
]

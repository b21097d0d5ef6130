"""Of models and their caches: positions, masks, slots, and what is moved."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/models/cache/dropped.py",
        "tests/drafters/test_draft_window.py -k 'first_and_the_last or moved'",
        {
            "positions-forget-what-was-dropped": (
                "places + counts * (places >= self.sinks)",
                "places + 0 * counts * (places >= self.sinks)",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cache/kv_cache.py",
        "tests/models/test_tree_attention.py",
        {
            "features-of-nodes-stay-where-they-were": (
                "self.features.move(old, new)",
                "pass",
                "tests/drafters/test_product_trees.py -k given_paths",
            ),
            "cache-keeps-the-last-sequence": (
                "layer.values[row, :, kept:].zero_()",
                "pass",
                "tests/models/test_kv_cache.py tests/models/test_cache_dtype.py tests/serving/test_serving_faults.py",
            ),
            "cache-copies-rows-without-features": (
                "            stored += [self.features.features[:, :count], self.features.tokens[:, :count]]\n",
                "            pass\n",
                "tests/serving/test_prefix_reuse.py -k heads",
            ),
            "cache-exchanges-one-row-after-the-other": (
                "taken = [states[source].clone() for source in sources]",
                "taken = [states[source] for source in sources]",
                "tests/serving/test_prefix_reuse.py -k lone",
            ),
            "cache-remembers-what-the-last-sequence-committed": (
                "        self._committed.counts[row] = 0\n",
                "",
                "tests/loop/test_recurrent_targets.py -k used_again",
            ),
            "cache-accepts-into-the-root": ("torch.arange(1, path.shape[1] + 1,", "torch.arange(path.shape[1],"),
            "cache-overwrites-accepted-nodes": (
                "flat.index_copy_(0, target, flat.index_select(0, source))",
                "[flat[to].copy_(flat[at]) for to, at in reversed([*zip(target, source)])]",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cache/kv_layer.py",
        "tests/models/test_kv_cache.py::test_ragged_cache_equals_full_forwards",
        {
            "cache-writes-every-prompt-into-the-first-rows": (
                "slice(first_row, first_row + size)",
                "slice(0, size)",
                "tests/serving/test_scheduler.py -k beside",
            ),
            "cache-writes-where-the-last-forward-did": ("        self._index.clear()\n", ""),
            "cache-rows-overlap": ("device=self.device) * self.capacity", "device=self.device) * (self.capacity - 1)"),
        },
    ),
    *mutations(
        "python/specdec/models/forward/recurrent.py",
        "tests/models/test_model_types.py -k 'nemotron_h or jamba'",
        {
            "recurrent-steps-bound-their-time": (
                "dt.clamp(*dt_limit) if self.layer.feed.keep else dt",
                "dt.clamp(*dt_limit)",
                "tests/loop/test_recurrent_targets.py -k bound",
            ),
            "recurrent-forgets-the-bias-of-time": ("dt if delta_bias is None else", "dt if True else"),
            "recurrent-layers-share-a-state": (
                "cache.layers[index])\n        return",
                "cache.recurrent[0])\n        return",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cache/recurrent_layer.py",
        "tests/loop/test_recurrent_targets.py -k 'costs'",
        {
            "cache-commits-what-a-draft-model-feeds-again": (
                "torch.minimum(start, lengths)",
                "start",
                "tests/loop/test_recurrent_targets.py -k drafts_are_rejected",
            ),
            "recurrent-window-is-not-counted": ("part[0, 0].numel() * window", "part[0, 0].numel()"),
        },
    ),
    *mutations(
        "python/specdec/models/forward/attention_choice.py",
        "tests/models/test_attention_models.py",
        {"attention-forgets-sinks": ('any(name.endswith("sinks")', 'any(name == "sinks"')},
    ),
    *mutations(
        "python/specdec/models/exchanged/deferred.py",
        "tests/models/test_fused_attention.py::test_keys_that_change_after_their_rotation",
        {
            "deferred-keys-are-those-before-a-change": (
                "isinstance(rotation, Rotation) and rotation is source_of(new.keys)",
                "isinstance(rotation, Rotation)",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/forward/prefill.py",
        "tests/loop/test_recurrent_targets.py -k ran_out",
        {
            "prefill-takes-a-chunk-twice-into-a-state": ("if self._failed and self._cache.recurrent:", "if False:"),
            "prefill-tells-logits-again": ("known = max(self._told[i] - positions[i], 0)", "known = 0"),
            "prefill-goes-on-behind-a-state": (
                "start if start >= least else 0",
                "start",
                "tests/loop/test_recurrent_targets.py -k behind",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/forward/recorded.py",
        "tests/models/test_recorded.py",
        {
            "recorded-reads-go-unnoticed": ("if reads.found or calls.depend:", "if calls.depend:"),
            "recorded-inputs-are-one": ("inputs = tuple(x.view(x.shape) for x in inputs)", "inputs = tuple(inputs)"),
            "recorded-for-another-cache": ("        if all(isinstance(x, nn.Parameter)", "        if all(True"),
        },
    ),
    *mutations(
        "python/specdec/models/forward/calls.py",
        "tests/models/test_recorded.py",
        {
            "recorded-copies-stay": ("_kind(operation).is_view and all(", "_kind(operation).is_view or all("),
        },
    ),
    *mutations(
        "python/specdec/models/cache/tree.py",
        "tests/models/test_tree_attention.py",
        {
            "tree-misses-distant-ancestors": (
                "range(max(nodes - 1, 0).bit_length())",
                "range(max(nodes - 1, 0).bit_length() - 1)",
            ),
            "tree-has-positions-by-order": ("first + self.depths, 0)", "first + index, 0)"),
            "tree-pads-into-slot-0": ("first + index, trash)", "first + index, 0)"),
        },
    ),
    *mutations(
        "python/specdec/models/forward/attention.py",
        "tests/models/test_attention.py",
        {
            "attention-does-not-see-itself": (
                "causal = slot <= position",
                "causal = slot < position",
                "tests/models/test_attention.py tests/models/test_attention_models.py tests/models/test_kv_cache.py",
            ),
            "attention-padding-has-no-block": (
                "((positions == 0).any(1) & (first_block > 0)).long()",
                "torch.zeros_like(first_block)",
            ),
            "level-reads-up-to-its-root": ("tree.root + tree.depths.shape[1] - q", "tree.root"),
        },
    ),
    *mutations(
        "python/specdec/models/forward/prefill.py",
        "tests/models/test_kv_cache.py::test_ragged_cache_equals_full_forwards",
        {
            "model-pads-into-slot-0": ("torch.where(valid, places, cache.trash)", "torch.where(valid, places, 0)"),
        },
    ),
    *mutations(
        "python/specdec/models/forward/step_attention.py",
        "tests/models/test_kv_cache.py::test_ragged_cache_equals_full_forwards",
        {
            "model-counts-a-fed-token-twice": (
                "self._keys(layout.visible) < layout.positions[:, :1]",
                "self._keys(layout.visible) <= layout.positions[:, :1]",
            ),
            "trees-are-masked-as-chains": (
                "self.mask(positions, visible, tree), tree)",
                "self.mask(positions, visible), tree)",
                "tests/models/test_tree_attention.py",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cache/compaction.py",
        "tests/models/test_tree_attention.py::test_one_launch_moves_all_layers",
        {
            "compaction-moves-the-root": ("(root + 1 + i) % capacity", "(root + i) % capacity"),
            "compaction-moves-some-storages": ("torch.tensor([s.shape[1] for s in", "torch.tensor([1 for s in"),
        },
    ),
    *mutations(
        "python/specdec/models/cache_plan.py",
        "tests/models/test_cache_plan.py",
        {
            "plan-has-no-trash-slot": ("(self.max_length + self.nodes + 1)", "(self.max_length + self.nodes)"),
            "plan-has-no-room-for-nodes": ("step * step - nodes - 1", "step * step - 1"),
        },
    ),
    *mutations(
        "python/specdec/models/exchanged/linear.py",
        "tests/models/test_linear_layers.py",
        {
            "native-linear-changes-the-users-layer": ("fast = copy.copy(layer)", "fast = layer"),
        },
    ),
    *mutations(
        "python/specdec/models/exchanged/product.py",
        "tests/models/test_products.py",
        {
            "products-have-no-gradient": ("has_kernel() and not torch.is_grad_enabled() and", "has_kernel() and"),
            "products-of-weights-that-lie-anywhere": (" and weight.data_ptr() % 16 == 0", ""),
        },
    ),
    *mutations(
        "python/specdec/models/exchanged/stored_weights.py",
        "tests/models/test_stored_weights.py",
        {
            "stored-weights-that-other-code-reads": (
                "*dtypes) and id(module.weight) not in read:",
                "*dtypes):",
            ),
            "stored-weights-do-not-have-to-fit": ("if free is not None and size > free:", "if False:"),
        },
    ),
    *mutations(
        "python/specdec/models/exchanged/stored_weights.py",
        "tests/models/test_packed_weights.py",
        {"packed-weights-that-others-share": ("if any(module not in found for module in modules):", "if False:")},
    ),
    *mutations(
        "python/specdec/models/load/loading.py",
        "tests/models/test_draft_bits.py",
        {"bits-of-the-target-are-the-drafts-anywhere": ("bits=bits if as_target else None", "bits=bits")},
    ),
    *mutations(
        "python/specdec/models/exchanged/product.py",
        "tests/models/test_int8_linear.py -k slices",
        {"slices-of-8-bits-without-the-last": ("biases, strict=False)", "biases[:-1], strict=False)")},
    ),
    *mutations(
        "python/specdec/models/exchanged/packed_weights.py",
        "tests/models/test_packed_weights.py",
        {
            "packed-embeddings-in-another-dtype": (", self.packing).to(self.computes.dtype)", ", self.packing)"),
        },
    ),
    *mutations(
        "python/specdec_layers/packing.py",
        "tests/layers/test_blocks_of_weights.py",
        {"halves-are-rounded-to-even": ("(scaled.abs() + 0.5).floor()", "scaled.abs().round()")},
    ),
    *mutations(
        "python/specdec/models/exchanged/norms.py",
        "tests/models/test_elementwise_modules.py",
        {
            "norms-are-what-looks-like-them": ("torch.allclose(found, own, rtol=1e-5, atol=1e-6)", "True"),
            "norms-round-where-others-do": ("bool(first < late)", "bool(first > late)"),
        },
    ),
    *mutations(
        "python/specdec/models/ranks/sharded.py",
        "tests/models/test_sharded.py",
        {
            "followers-keep-nodes-where-they-are": (
                'with self._leader.all_do("compact", self.lengths, path, cache=self.number):',
                "if True:",
            ),
            "followers-copy-no-rows": (
                'with self._leader.all_do("copy rows", cache=self.number, **copied):',
                "if True:",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/forward/attention.py",
        "tests/models/test_tree_attention.py tests/models/test_attention_models.py",
        {
            "attention-of-a-tree-forgets-the-window": (
                "(root + tree.depths[:, 1:])[:, None] >= lowest",
                "True",
            ),
            "attention-window-is-one-less": ("else 1 - window", "else 2 - window"),
        },
    ),
    *mutations(
        "python/specdec/models/cache/kv_cache.py",
        "tests/loop/test_recurrent_targets.py -k trees",
        {"accepted-nodes-stay-in-windows": ("window[row, new % places] = window[row, old % places]", "pass")},
    ),
    *mutations(
        "python/specdec/models/exchanged/copied_modules.py",
        "tests/models/test_linear_layers.py",
        {"modules-that-are-shared-become-two": ("if id(module) not in done:", "if True:")},
    ),
    *mutations(
        "python/specdec/models/cache/features.py",
        "tests/drafters/test_product_trees.py -k features",
        {
            "features-move-without-their-tokens": (
                "(self.features.flatten(0, 1), self.tokens.view(-1))",
                "(self.features.flatten(0, 1),)",
            ),
            "features-of-the-first-row": (
                "self._first_slot[first_row : first_row + len(slots)]",
                "self._first_slot[: len(slots)]",
                "tests/drafters/test_heads.py",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/exchanged/deferred.py",
        "tests/models/test_decoder_layers.py -k kept",
        {
            "deferred-tensors-stay-what-they-came-from": ("_result=result, _source=None,", "_result=result,"),
        },
    ),
    *mutations(
        "python/specdec/models/forward/prompt_parts.py",
        "tests/serving/test_prefix_reuse.py",
        {
            "parts-of-another-size-are-held": (
                "        self._chunk_changed()\n        return self._held[row]",
                "        return self._held[row]",
                "tests/serving/test_prefix_reuse.py -k larger_parts",
            ),
        },
    ),
]

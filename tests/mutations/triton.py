"""Of the Triton kernels."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "specdec_kernels/backends/triton/core.py",
        "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'",
        {
            "triton-residual-not-subtracted": ("tl.maximum(tl.fma(w, p, -q), 0.0)", "w * p"),
            "triton-tree-residuals-forget-earlier-siblings": (
                "return of_child / (of_child / scale + mass)",
                "return of_child / mass",
                "tests/kernels/test_trees_triton.py::test_many_are_rejected tests/kernels/test_trees_triton.py::test_rules",
            ),
        },
    ),
    *mutations(
        "python/specdec_layers/backends/triton/elementwise.py",
        "tests/layers/test_elementwise.py -k triton",
        {
            "triton-norms-round-after-weights-alone": ("(rounded(y, y_ptr) if ROUND_FIRST else y)", "y"),
            "triton-sums-are-not-rounded-before-their-norm": (
                "x = rounded(floats(x_ptr, at, inside) + delta, y_ptr)",
                "x = floats(x_ptr, at, inside) + delta",
            ),
        },
    ),
    *mutations(
        "python/specdec_layers/backends/triton/attend.py",
        "tests/layers/test_store_and_attend.py::test_small_cases",
        {
            "triton-attention-sees-one-slot-too-many": (
                "(slot[None, :] < ends[:, None])",
                "(slot[None, :] <= ends[:, None])",
            ),
            "triton-attention-windows-begin-late": (
                "(slot[None, :] >= begins[:, None])",
                "(slot[None, :] > begins[:, None])",
            ),
            "triton-attention-turns-all-keys-as-the-first": (
                "angle + token * angle_token, mine",
                "angle + token * 0, mine",
            ),
            "triton-attention-drops-the-last-range": (
                "tl.range(first_range, last_range + 1, loop_unroll_factor=2)",
                "tl.range(first_range, last_range, loop_unroll_factor=2)",
            ),
            "triton-attention-stores-what-another-worker-reads": (
                "owner = tl.where(read, (number - first_range) % tl.num_programs(2), 0)",
                "owner = tl.where(read, 0, 0)",
                "tests/layers/test_store_and_attend.py::test_workers_in_another_order",
            ),
            "triton-attention-leaves-its-counter": (
                "        tl.store(count, 0)\n",
                "",
                "tests/layers/test_store_and_attend.py::test_the_counter_is_zero_again",
            ),
            "triton-attention-ranges-by-length": (
                "first // BLOCK * BLOCK)",
                "first)",
                "tests/layers/test_store_and_attend.py::test_bits_do_not_depend_on_how_tokens_are_fed",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/draft_children.py",
        "tests/kernels/test_trees_triton.py::test_several_blocks tests/kernels/test_trees_triton.py::test_as_many_children_as_allowed",
        {
            "triton-tree-sampled-children-are-the-likely-ones": (
                "arrival = w / E",
                "arrival = w / (E * 0.0 + 1.0)",
            ),
            "triton-tree-ties-are-lost": ("| ((score == last_score) & (ids > last_token))", ""),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/draft_step.py",
        "tests/kernels/test_parity.py::test_drafts_of_a_reduced_vocabulary -k triton",
        {
            "triton-drafts-at-d2t-ids-lost": (
                "        token = target_ids(rows, token)\n    store_draft",
                "    store_draft",
            ),
            "triton-q-of-raw-logits": (
                "log_q = log_probability(logit, inverse(temperature), lse, cutoff)",
                "log_q = log_probability(raw, inverse(temperature), lse, cutoff)",
                "tests/kernels/test_triton.py::test_q_of_a_draft_is_of_processed_logits",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/rows.py",
        "tests/kernels/test_penalties.py -k triton",
        {
            "triton-ends-of-the-first-sequence": (
                "sampling.ends_ptr + b * sampling.num_ends + i",
                "sampling.ends_ptr + i",
            ),
            "triton-tree-q-of-first-children-only": (
                "        return found > 0",
                "        return found == i",
                "tests/kernels/test_trees_triton.py::test_rules",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/siblings.py",
        "tests/kernels/test_trees_triton.py::test_many_are_rejected tests/kernels/test_trees_triton.py::test_rules",
        {
            "triton-tree-recovers-from-what-was-weighed-last": (
                "drawn_from = next_scale(h, scale, mass, left)",
                "drawn_from = tl.where(scale < INFINITY, scale, h)",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/draw.py",
        "tests/kernels/test_trees_triton.py::test_rules[walk]",
        {
            "triton-tree-walks-with-the-steps-position": (" + place_of(rows.sampling, b, j)", " + j * 0"),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/verify.py",
        "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'",
        {
            "triton-one-hot-q-is-empty": (
                "return tl.where(ids == x, 0.0, -INFINITY)",
                "return tl.where(ids == x, -INFINITY, -INFINITY)",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/measure.py",
        "tests/kernels/test_triton.py::test_races_over_several_blocks",
        {
            "triton-coupled-races-of-the-first-blocks": (
                "race_tokens(rows, b, j, block, x, largest, raced, there)",
                "race_tokens(rows, b, j, block * 0, x, largest, raced, there)",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/walk.py",
        "tests/kernels/test_corners.py -k triton",
        {
            "triton-zero-q-accepted": (
                "kept = drafted & (log_q != -INFINITY)",
                "kept = drafted",
            ),
            "triton-greedy-takes-a-later-id-of-a-tie": (
                "place = tl.min(tl.where(logits == its_largest[:, None], tl.arange(0, BLOCK)[None, :], BLOCK), 1)",
                "place = tl.max(tl.where(logits == its_largest[:, None], tl.arange(0, BLOCK)[None, :], -1), 1)",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/recover.py",
        "tests/kernels/test_best_block_first.py -k 'mass or peaked'",
        {
            "triton-visits-end-with-the-first-blocks": ("while bound * MARGIN > best:", "while best == 0.0:"),
            "triton-visits-in-the-order-of-ids": (
                "tl.store(order_ptr + place, keys,",
                "tl.store(order_ptr + block, keys,",
            ),
            "triton-tree-q-keeps-the-rejected-child": (
                "q = tl.where(ids == missing.to(tl.int32), 0.0, q)",
                "q = tl.where(ids == missing.to(tl.int32), q, q)",
                "tests/kernels/test_trees_triton.py::test_many_are_rejected",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/sums.py",
        "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'",
        {
            "triton-block-tests-with-the-next-number": ("tl.maximum(j - 1, 0)", "j"),
            "triton-prefixes-below-w-are-kept": (
                "((state != RECOVER) & (u < w))",
                "(u < w)",
                "tests/kernels/test_best_block_first.py -k rule_block",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/select.py",
        "tests/kernels/test_select_triton.py -k 'limit and 1025'",
        {
            "triton-lists-lose-what-has-no-room": ("if size <= LISTED:", "if size <= LISTED + 1:"),
            "triton-parts-beyond-the-best-do-not-count": (
                "| (listed >= left)",
                "| (listed >= 0)",
                "tests/kernels/test_select_triton.py::test_top_p_alone",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/shortlist.py",
        "tests/kernels/test_triton.py::test_cutoffs",
        {
            "triton-top-p-before-top-k": ("mass = tl.sum(tl.where(counted, amount, 0), 0)", "mass = tl.sum(amount, 0)"),
            "triton-ties-at-the-k-th-are-lost": (
                "tl.where(others[:, None] > keys[None, :],",
                "tl.where(others[:, None] >= keys[None, :],",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/select_flat.py",
        "tests/kernels/test_select_triton.py -k 'too_many and normal'",
        {
            "triton-passes-forget-what-is-above": ("tl.where(counting, wanted - above, INFINITY)", "wanted"),
            "triton-flat-top-p-of-the-whole-row": (
                "wanted = tl.full([], -1.0, tl.float32)",
                "wanted = top_p * total",
            ),
        },
    ),
]

"""Mutations of the Triton backend."""

from .mutation import Mutation, mutations

FOLDER = "specdec_kernels/backends/triton"
TRITON = "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'"
FILTERS = "tests/kernels/test_triton.py tests/kernels/test_filters.py -k 'triton and not compiles'"
PENALTIES = "tests/kernels/test_penalties.py -k triton"
NOISE = "tests/kernels/test_extreme_noise.py -k triton"
FAULTS = "tests/kernels/test_faults.py -k triton"
CORNERS = "tests/kernels/test_corners.py -k triton"
DRAFTS = "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'"
LAST = "tests/kernels/test_triton.py -k 'last or scratch'"

MUTATIONS: list[Mutation] = [
    *mutations(
        f"{FOLDER}/core.py",
        TRITON,
        {
            "triton-residual-not-subtracted": ("difference = p - q\n", "difference = p\n"),
            "triton-ratio-inverted": ("return u < tl.exp(log_p - log_q)", "return u < tl.exp(log_q - log_p)"),
            "triton-words-out-of-order": (
                "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
                "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
            ),
            "triton-nan-unseen": (
                '    return tl.where(any_nan, float("nan"), largest), tl.where(temperature == 0.0, 0.0, total)',
                "    return largest, tl.where(temperature == 0.0, 0.0, total)",
                FAULTS,
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/core.py",
        PENALTIES,
        {
            "triton-repetition-penalty-inverted": (
                "tl.where(x < 0.0, rounded_product(x, repetition), tl.div_rn(x, repetition))",
                "tl.where(x < 0.0, tl.div_rn(x, repetition), rounded_product(x, repetition))",
            ),
            "triton-contracts-penalties": (
                "return tl.fma(a, b, 0.0)",
                "return a * b",
                "tests/kernels/test_contraction.py::test_triton",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/rows.py",
        PENALTIES,
        {
            "triton-ends-of-the-first-sequence": (
                "sampling.ends_ptr + b * sampling.num_ends + i",
                "sampling.ends_ptr + i",
            )
        },
    ),
    *mutations(
        f"{FOLDER}/core.py",
        NOISE,
        {"triton-u-may-be-one": ("return tl.minimum(u, 0.99999994)", "return u")},
    ),
    *mutations(
        f"{FOLDER}/arrivals.py",
        LAST,
        {
            "triton-arrivals-never-set-to-zero": (
                "    tl.store(arrivals_ptr + b, 0)",
                "    tl.store(arrivals_ptr + b, 0, mask=b < 0)",
            ),
            "triton-last-but-one-decides": ("return before == expected - 1", "return before == expected - 2"),
            "triton-first-to-arrive-decides": ("return before == expected - 1", "return before == 0"),
        },
    ),
    *mutations(
        f"{FOLDER}/speculative_step.py",
        LAST,
        {
            "triton-unneeded-rows-do-not-arrive": (
                "        race_block(step.target, b, j, block, score_ptr, winner_ptr)\n"
                "    if arrives_last(arrivals_ptr, b, num_rows * num_blocks):\n        j, status",
                "        race_block(step.target, b, j, block, score_ptr, winner_ptr)\n    else:\n        return\n"
                "    if arrives_last(arrivals_ptr, b, num_rows * num_blocks):\n        j, status",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/rows.py",
        TRITON,
        {
            "triton-token-V-at-a-ragged-tail": (
                "mask=index < rows.vocabulary, other=-INFINITY).to(tl.float32)",
                "mask=index < rows.vocabulary, other=0.0).to(tl.float32)",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/filters.py",
        FILTERS,
        {
            "triton-top-p-before-top-k": (
                "total, above, below = weigh(rows, b, j, low, low, largest",
                "all = low * 0 + LOWEST\n        total, above, below = weigh(rows, b, j, all, all, largest",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/verify.py",
        TRITON,
        {
            "triton-zero-q-accepted": (
                "kept = drafted & (log_q != -INFINITY) & accept(",
                "kept = drafted & accept(",
                CORNERS,
            ),
            "triton-block-with-the-token-residual": (
                "return residual(w * p, ",
                "return residual(p, ",
                "tests/kernels/test_triton.py::test_blocks_that_stand_in_part",
            ),
            "triton-block-tests-with-the-next-number": (
                "accept_noise(seed, position, j - 1)",
                "accept_noise(seed, position, j)",
            ),
            "triton-one-hot-q-is-empty": (
                "return tl.where(ids == x, 0.0, -INFINITY)",
                "return tl.where(ids == x, -INFINITY, -INFINITY)",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/draw.py",
        TRITON,
        {
            "triton-coupled-noise-of-the-first-position": (
                "tl.load(rows.sampling.position_ptr + b) + j\n",
                "tl.load(rows.sampling.position_ptr + b)\n",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/draft_step.py",
        DRAFTS,
        {
            "triton-drafts-at-d2t-ids-lost": (
                "        token = target_ids(rows, token)\n    store_draft",
                "    store_draft",
                "tests/kernels/test_parity.py::test_drafts_of_a_reduced_vocabulary -k triton",
            ),
            "triton-draft-streams-exchanged": (
                "BLOCKS, DRAFT_BLOCK, DRAFT_TOKEN)",
                "BLOCKS, DRAFT_TOKEN, DRAFT_BLOCK)",
                "tests/kernels/test_triton.py::test_settings",
            ),
            "triton-q-of-raw-logits": (
                "log_q = log_probability(logit, inverse(temperature), lse, cutoff)",
                "log_q = log_probability(raw, inverse(temperature), lse, cutoff)",
                "tests/kernels/test_triton.py::test_q_of_a_draft_is_of_processed_logits",
            ),
            "triton-faulty-draft-has-an-lse": (
                'tl.where(fault == 0, lse, float("nan"))',
                "lse",
                "tests/kernels/test_faults.py -k 'triton and draft_step'",
            ),
            "triton-coupled-draft-of-the-first-block": (
                "        race_block(rows, b, j, block, score_ptr, winner_ptr)",
                "        race_block(rows, b, j, block * 0, score_ptr, winner_ptr)",
                "tests/kernels/test_triton.py::test_several_blocks",
            ),
            "triton-compact-drops-the-last-tie": ("(tl.cumsum(tie, 0) <= ties)", "(tl.cumsum(tie, 0) < ties)"),
            "triton-compact-takes-the-ties-of-every-block": (
                "            ties -= tl.sum(tie, 0)\n",
                "",
                "tests/kernels/test_triton.py::test_the_ties_of_a_compact_q_lie_in_several_blocks",
            ),
            "triton-compact-q-not-renormalised": (
                "            lse = largest * inverse(temperature) + tl.log(tl.sum(w, 0))\n",
                "",
            ),
            "triton-compact-drafts-repeat-their-noise": (
                "race(w, 0, SLOTS, seed, position, j, DRAFT_TOKEN)",
                "race(w, 0, SLOTS, seed, position, j * 0, DRAFT_TOKEN)",
            ),
            "triton-compact-q-in-draft-ids": (
                "tl.where(slots < num_listed, target_ids(rows, index), PADDING)",
                "tl.where(slots < num_listed, index, PADDING)",
                "tests/kernels/test_triton.py::test_a_compact_q_has_the_targets_ids",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/tables.py",
        "tests/kernels/test_triton.py::test_each_gpu_has_its_launches",
        {
            "triton-launches-of-another-family": ('"ampere" if major < 9', '"ampere" if major <= 9'),
            "triton-limits-registers-on-amd": ('if its_family == "amd" or not table:', "if not table:"),
        },
    ),
    *mutations(
        "specdec_kernels/backends/__init__.py",
        "tests/kernels/test_imports.py",
        {"auto-prefers-triton-to-cuda": ("(Backend.CUDA, Backend.TRITON)", "(Backend.TRITON, Backend.CUDA)")},
    ),
]

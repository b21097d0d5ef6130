"""Of the mathematics that the CPU and CUDA kernels share."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "csrc/core/accept.h",
        "tests/kernels/test_parity.py -k cpu",
        {
            "ratio-inverted": ("return expf(log_p - log_q);", "return expf(log_q - log_p);"),
            "certain-acceptance-only": (
                "return u < ratio(log_p, log_q);",
                "return ratio(log_p, log_q) >= 1.0f + 0.0f * u;",
            ),
            "joint-ratio-beyond-one": ("return longer < 1.0f ? longer : 1.0f;", "return longer;"),
            "keep-probability-of-the-token-rule": (
                "const float either = mass + (1.0f - w);",
                "const float either = mass + 1.0f - 0.0f * w;",
            ),
        },
    ),
    *mutations(
        "csrc/core/distribution.h",
        "tests/kernels/test_penalties.py tests/kernels/test_parity.py -k cpu",
        {
            "penalties-are-contracted": (
                "rounded_product(penalties.frequency, static_cast<float>(count))",
                "penalties.frequency * static_cast<float>(count)",
                "tests/kernels/test_contraction.py::test_a_host_with_fused_operations",
            ),
            "repetition-penalty-inverted": (
                "x < 0.0f ? rounded_product(x, penalties.repetition) : x / penalties.repetition",
                "x < 0.0f ? x / penalties.repetition : rounded_product(x, penalties.repetition)",
            ),
            "repetition-penalty-ignores-the-sign": (
                "x < 0.0f ? rounded_product(x, penalties.repetition) : x / penalties.repetition",
                "x / penalties.repetition",
            ),
            "presence-counts-the-prompt": (
                "if (count > 0) x = x - penalties.presence",
                "if (in_prompt || count > 0) x = x - penalties.presence",
            ),
            "tie-dropped-from-p": (
                "return logit >= distribution.cutoff ? p : 0.0f;",
                "return logit > distribution.cutoff ? p : 0.0f;",
                "tests/kernels/test_parity.py -k cpu",
            ),
            "tie-dropped-from-log-p": (
                "return logit >= distribution.cutoff ? log_probability",
                "return logit > distribution.cutoff ? log_probability",
                "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu",
            ),
            "zeros-have-two-keys": (
                "return 0x80000000u + ((magnitude ^ negative) - negative);",
                "return bits ^ (negative | 0x80000000u);",
                "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu",
            ),
            "min-p-before-temperature": (
                "return max + temperature * logf(min_p);",
                "return max + 0.0f * temperature + logf(min_p);",
                "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu",
            ),
        },
    ),
    *mutations(
        "csrc/core/params.h",
        "tests/kernels/test_corners.py tests/kernels/test_faults.py -k cpu",
        {
            "row-offset-in-32-bits": ("b * sequence_stride", "static_cast<int32_t>(b * sequence_stride)"),
        },
    ),
    *mutations(
        "csrc/core/random.h",
        "tests/kernels/test_extreme_noise.py tests/kernels/test_parity.py -k cpu",
        {
            "u-may-be-one": ("return u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;", "return u;"),
            "u-may-be-zero": ("(static_cast<float>(bits) + 0.5f) * 0x1p-32f", "static_cast<float>(bits) * 0x1p-32f"),
            "u-of-24-bits": (
                "(static_cast<float>(bits) + 0.5f) * 0x1p-32f",
                "(static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f",
            ),
            "seed-in-32-bits": ("k1 = static_cast<uint32_t>(seed >> 32);", "k1 = 0;"),
            "nine-rounds": ("round < 10", "round < 9"),
        },
    ),
    *mutations(
        "csrc/core/tree.h",
        "tests/kernels/test_trees.py -k 'parity or chain'",
        {
            "tree-p-is-not-updated-between-siblings": (
                "ratio(log_p, log_q) - 1.0f / siblings.scale;",
                "ratio(log_p, log_q);",
            ),
            "tree-p-is-not-renormalised": ("* siblings.left / siblings.mass;", "* siblings.left;"),
            "tree-q-is-not-renormalised": ("beyond * siblings.left / siblings.mass", "beyond / siblings.mass"),
            "tree-block-keeps-the-ratio-after-a-rejection": ("if (joint) after.h", "if (false) after.h"),
            "tree-residuals-forget-earlier-siblings": (
                "return h / (h / siblings.scale + siblings.mass);",
                "return h / siblings.mass;",
            ),
            "tree-residuals-ignore-what-is-left-of-q": (
                "const float h = siblings.h * siblings.left;",
                "const float h = siblings.h;",
            ),
        },
    ),
]

"""Mutations of the reference, which every backend is compared with, and of the checks that all backends share."""

from .mutation import Mutation, mutations

EXACT = "tests/kernels/test_exact.py tests/kernels/test_exact_rules.py"
PENALTIES = "tests/kernels/test_penalties.py -k reference"
FILTERS = "tests/kernels/test_filters.py -k reference"
NUMBERS = "tests/kernels/test_extreme_noise.py tests/kernels/test_exact_noise.py tests/kernels/test_randomness.py"
VALIDATION = "tests/kernels/test_validation.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "specdec_kernels/backends/reference.py",
        EXACT,
        {
            "reference-residual-not-subtracted": (
                "torch.where(drafted[:, None], (p.probability - q).clamp(min=0.0), p.probability)",
                "p.probability",
            ),
            "reference-residual-subtracts-only-the-draft": (
                "(p.probability - q).clamp(min=0.0)",
                "(p.probability - torch.zeros_like(q).scatter(1, x[:, None], q.gather(1, x[:, None]))).clamp(min=0.0)",
            ),
            "reference-ratio-inverted": ("(log_p_x - log_q_x).exp()", "(log_q_x - log_p_x).exp()"),
            "reference-block-with-the-token-residual": (
                "weights = (w[:, None] * p.probability - q).clamp(min=0.0)",
                "weights = (p.probability - q).clamp(min=0.0)",
            ),
            "reference-block-keeps-too-little": (
                "mass / (mass + 1 - w), 1.0), w)",
                "mass / (mass + 1 - w).clamp(min=1.0), 1.0), w)",
            ),
            "reference-block-joint-ratio-beyond-one": ("(w * ratio).clamp(max=1.0))", "w * ratio)"),
            "reference-compact-q-not-renormalised": (
                "q.log_probability.gather(1, columns) - log_mass[:, None], -torch.inf)",
                "q.log_probability.gather(1, columns), -torch.inf)",
            ),
            "reference-drafts-at-d2t-ids-lost": ("torch.where(bad, -1, ids[drawn])", "torch.where(bad, -1, drawn)"),
        },
    ),
    *mutations(
        "specdec_kernels/backends/reference.py",
        NUMBERS,
        {
            "reference-block-keyed-by-position-alone": (
                "self.position, j, ACCEPT)",
                "self.position + j, 0, ACCEPT)",
            ),
            "reference-recovery-shares-the-drafts-noise": (
                "j, (RECOVER_BLOCK, RECOVER_TOKEN))",
                "j, (DRAFT_BLOCK, DRAFT_TOKEN))",
            ),
            "reference-u-in-the-closed-interval": ("return u.clamp(max=1 - 2.0**-24).double()", "return u.double()"),
        },
    ),
    *mutations(
        "specdec_kernels/backends/reference_distribution.py",
        FILTERS,
        {
            "reference-top-p-before-top-k": ("    weight = torch.where(falling >= by_k[:, None], weight, 0.0)\n", ""),
            "reference-top-p-of-raw-logits": (
                "((falling - largest[:, None]) / temperature[:, None]).exp()",
                "(falling - largest[:, None]).exp()",
            ),
            "reference-tie-dropped": (
                "torch.where(x >= cutoff.double()[:, None]",
                "torch.where(x > cutoff.double()[:, None]",
            ),
            "reference-top-p-one-token-less": (
                "(weight.cumsum(-1) < wanted[:, None]).sum(-1)",
                "((weight.cumsum(-1) < wanted[:, None]).sum(-1) - 1)",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/reference_distribution.py",
        PENALTIES,
        {
            "reference-drafts-not-counted": ("count = count + (columns == drafts[:, i : i + 1])", "pass"),
            "reference-presence-counts-the-prompt": (
                "torch.where(count > 0, x - presence",
                "torch.where(in_prompt | (count > 0), x - presence",
            ),
            "reference-ends-of-the-first-row": ("early = position + drafts.shape[1] <", "early = position <"),
        },
    ),
    *mutations(
        "specdec_kernels/validation.py",
        VALIDATION,
        {
            "d2t-may-hold-V": ("d2t[-1] >= vocabulary", "d2t[-1] > vocabulary"),
            "more-drafts-than-K": ("low < 0 or high > most", "low < 0 or high > most + 1"),
            "a-seed-for-the-batch-counts-rows": (
                "return torch.full((batch,), value, dtype=torch.int64, device=device)",
                "return torch.arange(batch, device=device) + value",
                "tests/kernels/test_numbers_for_all.py",
            ),
            "packed-parameters-are-packed-again": (
                "if params._packed is None:",
                "if True:",
                "tests/loop/test_step_operations.py",
            ),
            "packed-parameters-of-another-batch": (
                "        if tensor is not None:\n            check_like(",
                "        if False:\n            check_like(",
                "tests/kernels/test_sampling_params.py",
            ),
            "a-table-may-list-a-token-twice": (
                "wrong = ids[..., 1:] <= ids[..., :-1]",
                "wrong = ids[..., 1:] < ids[..., :-1]",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/api.py",
        PENALTIES,
        {"penalties-forget-the-steps-drafts": ("drafts = drafts.to(torch.int64)", "drafts = None")},
    ),
]

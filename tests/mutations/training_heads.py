"""Of heads in training: what they see, what they are compared with, and what is written of them."""

from .mutation import Mutation, mutations

KINDS = "tests/training/test_head_kinds.py"
TRAINING = "tests/training/test_train_heads.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/training/heads/in_turn.py",
        KINDS,
        {
            "a-head-in-training-sees-what-others-made": ("[itself] * i", "[causal] * i"),
            "a-head-in-training-never-goes-on-from-itself": ("features = head.recycled(out)", "pass"),
            "a-head-in-training-is-about-the-token-before": (
                "lesson.logits[:, 1 + i : 1 + i + rows]",
                "lesson.logits[:, i : i + rows]",
            ),
        },
    ),
    *mutations(
        "python/specdec/training/heads/dflash.py",
        KINDS,
        {
            "a-block-in-training-sees-its-own-token": ("before < anchors", "before <= anchors"),
            "blocks-in-training-see-each-other": ("(number[:, None] == number)", "(number[:, None] >= number)"),
            "a-block-in-training-is-about-the-token-before": (
                "lesson.logits[text, anchors + i]",
                "lesson.logits[text, anchors + i - 1]",
            ),
        },
    ),
    *mutations(
        "python/specdec/training/heads/medusa.py",
        KINDS,
        {"medusa-in-training-is-about-the-token-before": ("lesson.logits[:, 1 + i :]", "lesson.logits[:, i : -1]")},
    ),
    *mutations(
        "python/specdec/training/heads/eagle3.py",
        KINDS,
        {"d2t-is-written-without-the-difference": ("kept - torch.arange(len(kept), device=kept.device)", "kept")},
    ),
    *mutations(
        "python/specdec/training/heads/learner.py",
        KINDS,
        {"layer-ids-are-written-one-late": ("[state - 1 for state in states]", "[*states]")},
    ),
    *mutations(
        "python/specdec/training/heads/kinds.py",
        KINDS,
        {
            "the-mask-is-always-the-padding": ("and counts[pad] == counts.min()", ""),
        },
    ),
    *mutations(
        "python/specdec/training/features.py",
        KINDS,
        {
            "cached-states-of-another-layer": (
                "own = taken[..., : len(self._features.states) * self._width]",
                "own = taken[..., -len(self._features.states) * self._width :]",
            ),
            "cached-logits-that-are-not-the-targets": ("if not difference <= ", "if False and difference <= "),
        },
    ),
    *mutations(
        "python/specdec/training/head_trainer.py",
        TRAINING,
        {
            "cached-features-are-not-asked": ("self._known is not None and blocks is not None", "False"),
            "blocks-of-a-resumed-head-are-others": ("self._settings.seed * 1_000_003 + step", "len(self._learned)"),
        },
    ),
    *mutations(
        "python/specdec/training/head_files.py",
        KINDS,
        {"files-are-not-compared-with-what-was-trained": ("after < before - ROUNDING", "False")},
    ),
    *mutations(
        "python/specdec/training/train_heads.py",
        TRAINING,
        {"a-heads-training-fills-the-targets-gradients": ("parameter.requires_grad_(False)", "pass")},
    ),
]

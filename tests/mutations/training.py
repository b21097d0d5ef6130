"""Of rollouts: what makes them samples of the model as it is, one independent of the other."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/training/rollout.py",
        "tests/training/test_rollout.py",
        {
            "rollout-drops-out": ("        module.training = False", "        pass"),
            "rollout-samples-share-noise": ('q", seed, sample, *prompt)', 'q", seed, 0, *prompt)'),
            "rollout-depends-on-drafts": ("rule=Rule.COUPLED", "rule=Rule.TOKEN"),
            "rollout-scored-a-token-late": (
                "self.prompt_lengths[:, None] - 1 +",
                "self.prompt_lengths[:, None] +",
                "tests/training/test_rollout.py::test_log_probs_are_the_trainers",
            ),
        },
    ),
]

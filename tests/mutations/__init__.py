"""The mutation gate: bugs that samplers have had or may have, each of which some everyday test has to see.

``python -m tests.mutations`` applies one after the other to a copy of the repository and shows which test kills it.
"""

from . import core, cpu, cuda, drafters, evaluation, loop, models, reference, sampling, training, triton
from .mutation import Mutation

MUTATIONS: list[Mutation] = [
    *core.MUTATIONS,
    *reference.MUTATIONS,
    *cpu.MUTATIONS,
    *cuda.MUTATIONS,
    *triton.MUTATIONS,
    *loop.MUTATIONS,
    *models.MUTATIONS,
    *drafters.MUTATIONS,
    *sampling.MUTATIONS,
    *training.MUTATIONS,
    *evaluation.MUTATIONS,
]

"""The mutation gate: bugs that samplers have had or may have, each of which some everyday test has to see.

``python -m tests.mutations`` applies one after the other to a copy of the repository and shows which test kills it.
"""

from . import (
    adaptive,
    cli,
    cpu,
    cuda,
    heads,
    hf,
    jobs,
    loop,
    memory,
    models,
    openai,
    operations,
    proposals,
    reference,
    rows,
    serving,
    texts,
    tree_attention,
    tree_growth,
    trees,
    triton,
    triton_trees,
    verification,
)
from .mutation import Mutation

MUTATIONS: list[Mutation] = [
    *reference.MUTATIONS,
    *loop.MUTATIONS,
    *adaptive.MUTATIONS,
    *proposals.MUTATIONS,
    *serving.MUTATIONS,
    *operations.MUTATIONS,
    *models.MUTATIONS,
    *memory.MUTATIONS,
    *tree_attention.MUTATIONS,
    *tree_growth.MUTATIONS,
    *rows.MUTATIONS,
    *texts.MUTATIONS,
    *openai.MUTATIONS,
    *heads.MUTATIONS,
    *hf.MUTATIONS,
    *jobs.MUTATIONS,
    *cli.MUTATIONS,
    *verification.MUTATIONS,
    *trees.MUTATIONS,
    *triton.MUTATIONS,
    *triton_trees.MUTATIONS,
    *cpu.MUTATIONS,
    *cuda.MUTATIONS,
]

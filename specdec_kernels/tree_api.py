"""The public operations on trees of candidates: as in api.py, each checks its arguments and calls a backend."""

from __future__ import annotations

import torch

from . import validation as check
from .backends import operation
from .ops import SamplingTensors
from .types import MAX_WIDTH, DraftChildren, SamplingParams, TokenTable, TreeRule, TreeStep


def draft_children(
    logits: torch.Tensor,
    width: int,
    params: SamplingParams | SamplingTensors,
    *,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    offset: int | torch.Tensor,
    table: TokenTable | None = None,
    drafts: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    sampled: bool = True,
    backend: str = "auto",
) -> DraftChildren:
    """Draws up to ``width`` different tokens of every row of raw logits, as children of one node of a tree.

    q is made from the logits as by ``draft_step``. Sampled children are drawn from q without replacement, in order:
    each from q without the ones before it, renormalised (the first arrivals of an exponential race over single tokens,
    or Gumbel top-k; Kool et al., arXiv 1903.06059). They are for the rules ``token`` and ``block`` of ``verify_tree``,
    which must then be given all of them, in this order, and the same logits. Which tokens were drawn may only decide
    whether *their* children are drawn. Deterministic children (``sampled=False``) are the most likely tokens. They are
    for the rule ``walk``, and may be chosen and dropped in any way.

    The rows of a batch may be several nodes of the same sequence, each with that sequence's seed and its own offset.

    Args:
        logits: [B, V], as in ``draft_step``.
        width: how many, 1 to 1024.
        params, seed, position: as in ``draft_step``.
        offset: [B] int64, or one int: the row of the node in ``verify_tree``: 0 for the root, 1 + i for node i. Each
            row is drawn from once in a step, by ``draft_children`` or ``draft_step``: it is the number of the row's
            noise.
        table: as in ``draft_step``.
        drafts: [B, depth] int64 or int32: the tokens from the root's child down to the node itself, which the penalties
            count as generated. Required with a ``table``, but for the root.
        d2t: as in ``draft_step``.
        sampled: False takes the most likely tokens, the largest logit first (the lowest id of a tie). At temperature 0,
            q is then that of temperature 1 without filters, since the one-hot q would have a single child.
        backend: as in ``draft_step``.

    Returns:
        DraftChildren: tokens [B, width] int64, log_q [B, width] float32, cutoff, lse [B] float32, status [B] int32. A
        token is -1 where q has no more, and where the row has no distribution.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        RuntimeError: the backend is not available; says what is missing.

    Example:
        >>> import torch
        >>> from specdec_kernels import SamplingParams, draft_children
        >>> logits, greedy = torch.tensor([[0.0, 2.0, 1.0, -torch.inf]]), SamplingParams(temperature=0.0)
        >>> draft_children(logits, 2, greedy, seed=0, position=7, offset=0, sampled=False).tokens.tolist()
        [[1, 2]]
        >>> drawn = draft_children(logits, 4, SamplingParams(), seed=0, position=7, offset=0)  # q has three tokens
        >>> sorted(drawn.tokens[0].tolist())
        [-1, 0, 1, 2]
    """
    check.check_logits("logits", logits, "[B, V]", reference=backend == "reference")
    (batch, vocabulary), device = logits.shape, logits.device
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_WIDTH:
        check.refuse("width", repr(width), f"an integer from 1 to {MAX_WIDTH}")
    sampling = check.sampling_of(params, table, batch, device)
    if drafts is None:
        if sampling.table_ids is not None and not (isinstance(offset, int) and offset == 0):
            check.refuse(
                "drafts", "None with a table and an offset beyond 0", "the tokens down to the node, [B, depth]"
            )
    else:
        depth = drafts.shape[1] if isinstance(drafts, torch.Tensor) and drafts.dim() == 2 else 0
        check.check_like("drafts", drafts, (batch, depth), check.INTEGER_DTYPES, device)
        drafts = None if sampling.table_ids is None else check.as_int64(drafts)  # only penalties depend on them
    if d2t is not None:
        check.check_d2t(d2t, vocabulary, device)
    return DraftChildren(
        *operation("draft_children", backend, device.type)(
            logits,
            list(sampling),
            drafts,
            d2t,
            check.per_sequence("seed", seed, batch, device, lowest=-(2**63)),
            check.per_sequence("position", position, batch, device, lowest=0),
            check.per_sequence("offset", offset, batch, device, lowest=0),
            width,
            bool(sampled),
        )
    )


def verify_tree(
    target_logits: torch.Tensor,
    node_tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    params: SamplingParams | SamplingTensors,
    seed: int | torch.Tensor,
    position: int | torch.Tensor,
    num_nodes: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    table: TokenTable | None = None,
    depth: int | None = None,
    rule: str = "walk",
    backend: str = "auto",
) -> TreeStep:
    """Verifies a tree of N drafted tokens for every sequence: accepts a path from the root, and emits its tokens and
    one recovered or bonus token. The emitted text has exactly the target's distribution.

    ``walk`` draws a token from p at the root with the noise of rule ``coupled``, goes on to the child that holds it if
    there is one, and so on. Children may be chosen in any way that does not depend on that noise. ``token`` tests
    children c of a node in order, and accepts with probability min(1, p(c) / q(c)); after a rejection, p becomes max(0,
    p - q) and q loses c, both renormalised (SpecInfer, arXiv 2305.09781; without replacement as in Sequoia, arXiv
    2402.12374). ``block`` tests paths jointly, from the leaves to the root (Traversal verification, arXiv 2505.12398),
    and accepted at least as many in expectation wherever that was enumerated. Both are for children that
    ``draft_children`` sampled. On a chain, ``walk``, ``token`` and ``block`` return the same tokens as ``coupled``,
    ``token`` and ``block`` of ``speculative_step``. At temperature 0 every rule goes to the child that has the target's
    largest logit (the lowest id of a tie).

    Args:
        target_logits: [B, N+1, V] raw logits, N >= 0. Row 0 decides the token after the known text, row 1 + i the one
            after node i. float32, bfloat16 or float16 (float64 with ``backend="reference"``). Never written.
        node_tokens: [B, N] int64 or int32. A node of token -1 or an id >= V is no candidate, nor is any below it.
        parents: [N] or [B, N] int64 or int32: the node that each one is a child of, which comes before it; -1: the
            root. Siblings are tested in the order of their numbers.
        draft_logits: [B, N+1, V] in any of these dtypes, with ``token`` and ``block``: row r holds the logits that the
            children of row r were drawn from. Rows without children are not read. Must be None with ``walk``.
        params, seed: as in ``speculative_step``.
        position: as there: the absolute position of the token that row 0 decides.
        num_nodes: [B] int64 or int32, 0 to N: how many nodes of each sequence count. None: all N.
        d2t: as in ``speculative_step``; ``draft_logits`` is then [B, N+1, draft vocabulary].
        table: as in ``draft_step``; in the row of a node, this node and its ancestors count as generated.
        depth: D, how many nodes a path has at most: those further down are no candidates. None: N.
        rule: ``walk``, ``token`` or ``block``.
        backend: as in ``draft_step``.

    Returns:
        TreeStep: path [B, D+1] int64 (the accepted nodes, then -1), tokens [B, D+1] int64 (their tokens, one recovered
        or bonus token, then -1), num_accepted, num_emitted and status (:class:`Status`) [B] int32.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        RuntimeError: the backend is not available; says what is missing.

    Example:
        >>> import torch
        >>> from specdec_kernels import SamplingParams, verify_tree
        >>> nodes, parents = torch.tensor([[3, 1, 2]]), torch.tensor([-1, -1, 1])  # 3 or 1 come next, 2 follows the 1
        >>> target = torch.eye(5)[None, [1, 0, 2, 4]]  # what the target wants after the text, and after each node
        >>> out = verify_tree(target, nodes, parents, params=SamplingParams(temperature=0.0), seed=0, position=7)
        >>> out.path.tolist(), out.tokens.tolist()  # the nodes 1 and 2, and then the target's own 4
        ([[1, 2, -1, -1]], [[1, 2, 4, -1]])
    """
    check.check_logits("target_logits", target_logits, "[B, N+1, V]", reference=backend == "reference")
    number = check.check_tree_rule(rule)
    (batch, rows, vocabulary), device = target_logits.shape, target_logits.device
    if rows < 1:
        check.refuse("target_logits", f"shape {list(target_logits.shape)}", "[B, N+1, V] with N >= 0")
    nodes = rows - 1
    check.check_like("node_tokens", node_tokens, (batch, nodes), check.INTEGER_DTYPES, device)
    parents = check.check_parents(parents, batch, nodes, device)
    if rule == TreeRule.WALK and draft_logits is not None:
        check.refuse("draft_logits", "a value with rule='walk'", "None: this rule needs no q")
    if rule != TreeRule.WALK and draft_logits is None:
        check.refuse("draft_logits", f"None with rule={str(rule)!r}", "[B, N+1, V], which the children were drawn from")
    check.check_draft_logits(draft_logits, d2t, "[B, N+1, V]", (batch, rows), vocabulary, device, backend)
    if num_nodes is not None:
        check.check_like("num_nodes", num_nodes, (batch,), check.INTEGER_DTYPES, device)
        check.check_counts("num_nodes", num_nodes, nodes, "N")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= nodes):
        check.refuse("depth", repr(depth), f"an integer from 0 to N = {nodes}, or None")
    return TreeStep(
        *operation("verify_tree", backend, device.type)(
            target_logits,
            check.as_int64(node_tokens),
            parents,
            draft_logits,
            d2t,
            None if num_nodes is None else check.as_int64(num_nodes),
            list(check.sampling_of(params, table, batch, device)),
            check.per_sequence("seed", seed, batch, device, lowest=-(2**63)),
            check.per_sequence("position", position, batch, device, lowest=0),
            number,
            nodes if depth is None else depth,
        )
    )

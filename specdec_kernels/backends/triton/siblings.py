"""Rules `token` and `block` of trees (docs/numerics.md): a row's children are tested in turn, and each that is rejected
changes p and q for the next ones. With `block`, a row's own node is tested after everything below it."""

from __future__ import annotations

import triton
import triton.language as tl

from .core import (
    DRAFT_FLAG_FACTOR,
    DRAFT_ZERO_PROBABILITY,
    INFINITY,
    TREE_BLOCK,
    child_ratio,
    inverse,
    log_probability,
    next_scale,
    ratio_after_rejection,
    row_fault,
)
from .random import accept_noise
from .recover import best_residual, race_blocks
from .rows import load_row, load_token, parent_of
from .tree import find_child, load_nodes
from .verify import draw_in_block, load_q, log_q_of

# What is to be done at a row.
DONE = tl.constexpr(0)
LOOK = tl.constexpr(1)  # test the next child
REJECT = tl.constexpr(2)  # reject the present child
BACK = tl.constexpr(3)  # go back to the row above, and reject the row's own node
END = tl.constexpr(4)  # end the path here


@triton.jit
def ratio_of(step, b, j, x, gone, p_lse, p_cutoff, q_lse, q_cutoff, h, scale, mass, left):
    """(the joint ratio of the path to a child x of row j, 0 if q(x) = 0; whether it is). ``gone``: q has lost x."""
    logit, raw = load_token(step.target, b, j, x)
    log_p = log_probability(logit, inverse(tl.load(step.target.sampling.temperature_ptr + b)), p_lse, p_cutoff)
    log_q = tl.where(gone, -INFINITY, log_q_of(step, b, j, x, q_lse, q_cutoff))
    impossible = log_q == -INFINITY
    ratio = child_ratio(h, scale, mass, left, log_p, tl.where(impossible, 0.0, log_q))
    return tl.where(impossible, 0.0, ratio), impossible


@triton.jit
def test_tree(
    step, b, depth, visits, RULE: tl.constexpr, BLOCKS: tl.constexpr, NODES: tl.constexpr, VISITS: tl.constexpr
):
    """Finds the path that is accepted. Returns (its last row, its level, status, the token drawn there or -1)."""
    target, node = step.target, tl.arange(0, NODES)
    seed, position = tl.load(target.sampling.seed_ptr + b), tl.load(target.sampling.position_ptr + b)
    parents, tokens = load_nodes(step, b, NODES)
    anything = node >= 0
    nothing, zero, one = node * 0, tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32)
    infinity = tl.full([], INFINITY, tl.float32)

    # The present row, its child whose turn it is, and what p and q are after the rejections (core.py).
    row, level, status, child = b * 0, (b * 0).to(tl.int32), tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
    fault, q_fault = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    p_lse, p_cutoff, q_lse, q_cutoff = zero, zero, zero, zero
    h, scale, mass, left = one, infinity, one, one
    drawn_from, drafted, block = one, False, tl.full([], 0, tl.int32)
    # What the rows above are, each at the node below it that the path goes through.
    above_status, above_h, above_scale = nothing, nothing.to(tl.float32), nothing.to(tl.float32)
    above_mass, above_left = nothing.to(tl.float32), nothing.to(tl.float32)
    removed = nothing  # 1: the row above has lost the node's token from its q

    state, arrived = tl.full([], LOOK, tl.int32), True
    while state != DONE:
        if arrived:
            largest, p_lse, p_cutoff, block_mass, block_max = load_row(target, b, row, BLOCKS)
            fault = row_fault(largest * inverse(tl.load(target.sampling.temperature_ptr + b)))
            status = status | fault
            first, flags = find_child(step, parents, tokens, row, child - 1, anything, NODES)
            if first < NODES:  # else there is no q
                q_lse, q_cutoff, q_fault = load_q(step, b, row, BLOCKS)
        lost = (removed != 0) & (parents == row - 1)
        enter, ratio = False, one  # of a child that was entered and then rejected: more than 0
        if state == LOOK:
            after = tl.where((fault == 0) & (level < depth), child, NODES)
            child, flags = find_child(step, parents, tokens, row, after, anything, NODES)
            status = status | flags
            testing = child < NODES
            if testing:
                status = status | q_fault * DRAFT_FLAG_FACTOR
                testing = (q_fault == 0) & (h > 0.0)  # if h is 0, neither the node nor anything below can be kept
            if testing:
                x = tl.sum(tl.where(node == child, tokens, 0), 0)
                gone = tl.max((lost & (tokens == x)).to(tl.int32), 0) > 0
                ratio, impossible = ratio_of(
                    step, b, row, x, gone, p_lse, p_cutoff, q_lse, q_cutoff, h, scale, mass, left
                )
                status = tl.where(impossible, status | DRAFT_ZERO_PROBABILITY, status)
                enter = accept_noise(seed, position, child) < ratio
                if RULE == TREE_BLOCK:
                    # A node without candidates below it is kept iff u < h, which needs no more than this.
                    after = tl.where(level + 1 < depth, -1, NODES)
                    below, flags = find_child(step, parents, tokens, child + 1, after, anything, NODES)
                    enter = enter | ((ratio > 0.0) & (below < NODES))
                # Without anything left of q there is nothing to subtract.
                state = tl.where((enter == 0) & (left > 0.0), REJECT, LOOK).to(tl.int32)
            else:
                state = tl.full([], END, tl.int32)
                if RULE == TREE_BLOCK:
                    if row > 0:
                        state = tl.where(accept_noise(seed, position, row - 1) < h, END, BACK).to(tl.int32)
        enter_h = one
        if RULE == TREE_BLOCK:
            enter_h = tl.minimum(ratio, 1.0)

        drawn_from, told = scale, status  # what a token is drawn from, if the path ends here, and its status
        sure = True  # whether nothing but that token depends on the mass of what p is
        if state == REJECT:
            drawn_from = next_scale(h, scale, mass, left)
            following, flags = find_child(step, parents, tokens, row, child, anything, NODES)
            told, sure = status | flags, following == NODES
            if RULE == TREE_BLOCK:
                if sure & (h < 1.0):
                    # The row's own node is kept iff u < h, which falls with every rejection.
                    sure = accept_noise(seed, position, row - 1) >= h
                    state = tl.where(sure, BACK, REJECT).to(tl.int32)
        if ((state == END) & (fault == 0)) | (state == REJECT):
            drafted = drawn_from < INFINITY
            drawn_from = tl.where(drafted, drawn_from, 1.0)
            block = race_blocks(step, b, row, drawn_from, p_lse, visits, BLOCKS)
            if drafted:
                removing = lost | ((node == child) & (state == REJECT))
                found, total, left_then = best_residual(
                    step, b, row, drawn_from, p_lse, p_cutoff, q_lse, q_cutoff, visits, sure == 0, tokens, removing,
                    BLOCKS, VISITS,
                )  # fmt: skip
                drafted, block = found >= 0, tl.where(found >= 0, found, block)
                if state == REJECT:
                    if (found < 0) & (h == 1.0):
                        # p and q are equal up to rounding: the child is accepted after all, unless p(x) = 0.
                        enter, enter_h, sure = ratio > 0.0, one, False
                    elif sure == 0:
                        removed = tl.where(node == child, 1, removed)
                        if RULE == TREE_BLOCK:
                            h = ratio_after_rejection(h, mass, drawn_from, total)
                        scale, mass, left = drawn_from, total / drawn_from, left_then
                    state, status = tl.where(sure, END, LOOK).to(tl.int32), tl.where(sure, told, status)

        arrived = enter
        here = node == tl.where(enter, child, row.to(tl.int32) - 1)
        if enter:
            above_status = tl.where(here, status, above_status)
            above_h, above_scale = tl.where(here, h, above_h), tl.where(here, scale, above_scale)
            above_mass, above_left = tl.where(here, mass, above_mass), tl.where(here, left, above_left)
            removed = tl.where(parents == child, 0, removed)  # by the last visit, if the row is entered once more
            row, level, child = b * 0 + child + 1, level + 1, tl.full([], -1, tl.int32)
            h, scale, mass, left = enter_h, infinity, one, one
        elif state == BACK:
            status = tl.sum(tl.where(here, above_status, 0), 0)
            h, scale = tl.sum(tl.where(here, above_h, 0.0), 0), tl.sum(tl.where(here, above_scale, 0.0), 0)
            mass, left = tl.sum(tl.where(here, above_mass, 0.0), 0), tl.sum(tl.where(here, above_left, 0.0), 0)
            child = row.to(tl.int32) - 1
            row, level = b * 0 + parent_of(target.sampling, b, child) + 1, level - 1
            state, arrived = tl.full([], REJECT, tl.int32), True
        elif state == END:
            state = tl.full([], DONE, tl.int32)

    token = tl.full([], -1, tl.int64)
    if fault == 0:
        token = draw_in_block(step, b, row, drawn_from, block, drafted, p_lse, p_cutoff, q_lse, q_cutoff)
    return row, level, status, token

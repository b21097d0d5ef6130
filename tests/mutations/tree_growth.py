"""Of trees that models grow: which nodes they have, and what each node was computed from."""

from .mutation import Mutation, mutations

GROWTH = "tests/drafters/test_tree_growth.py"
LIKELY = f"{GROWTH} -k 'probable or plain_heads or shape'"
DRAWN = f"{GROWTH} -k 'drawn or shape or distribution'"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/drafters/drawing.py",
        DRAWN,
        {
            "growth-draws-a-child-twice": (
                "logits = logits.scatter(1, column, -torch.inf)",
                "logits = logits.clone()",
            )
        },
    ),
    *mutations(
        "python/specdec/drafters/tree_growth.py",
        LIKELY,
        {
            "growth-ranks-by-q-alone": (
                "joint = self.joint[..., None] + torch.where(",
                "joint = 0 * self.joint[..., None] + torch.where(",
            ),
            "growth-takes-the-first-nodes": (
                "best = _largest(joint, self.nodes)",
                "best = _largest(torch.zeros_like(joint), self.nodes)",
            ),
            "growth-takes-the-least-likely-of-a-level": (
                "best = _largest(joint, self.width)",
                "best = _largest(-joint, self.width)",
            ),
            "growth-sees-no-ancestors": (
                "torch.cat((_rows(self.ancestors, parents), itself), 2)",
                "torch.cat((_rows(self.ancestors, parents) * 0, itself), 2).bool()",
            ),
            "growth-sees-another-nodes-ancestors": (
                "torch.cat((_rows(self.ancestors, parents), itself), 2)",
                "torch.cat((_rows(self.ancestors, parents.flip(1)), itself), 2)",
            ),
            "growth-feeds-every-level-at-one-position": (
                "positions = (root + self.depth)[:, None]",
                "positions = (root + 1)[:, None]",
            ),
            "growth-writes-over-the-level-before": (
                "number = torch.arange(best.shape[1], device=best.device) + self.fed",
                "number = torch.arange(best.shape[1], device=best.device)",
            ),
            "growth-penalises-other-paths": (
                "self.paths = torch.cat((_rows(self.paths, parents), tokens",
                "self.paths = torch.cat((_rows(self.paths, parents * 0), tokens",
            ),
            "growth-forgets-the-room": (
                "torch.where(allowed[:, None, None], joint, -torch.inf)",
                "torch.where(allowed[:, None, None] | True, joint, -torch.inf)",
            ),
            "growth-offset-of-the-node-before": (
                "paths, offset=own.numbers + 1).tokens",
                "paths, offset=own.numbers.clamp(min=0)).tokens",
                DRAWN,
            ),
            "growth-keeps-the-wrong-rows": (
                "rows, fed = torch.cat([own.numbers for own in self.shape]) + 1, torch",
                "rows, fed = torch.cat([own.numbers for own in self.shape]).clamp(min=0), torch",
                DRAWN,
            ),
            # The same random numbers for the children of all nodes.
            "growth-shares-noise-between-nodes": (
                "offset=0 if offset is None else offset.repeat(len(logits)),",
                "offset=0,",
                DRAWN,
            ),
            "growth-needs-no-slots": (
                "self.width_of(nodes, depth) * (min(nodes, depth) - 1))",
                "0 * (min(nodes, depth) - 1))",
                f"{GROWTH} -k refused",
            ),
            "growth-attention-reads-too-few-slots": (
                "return visible_slots(step.visible + more, capacity)",
                "return step.visible - 32",
                GROWTH,
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/tree_shape.py",
        DRAWN,
        {
            "shape-has-equal-siblings": (
                "sibling = cost + math.log(acceptance[path[-1]]) - math.log(acceptance[path[-1] + 1])",
                "sibling = cost",
            ),
            "shape-is-deeper-than-k": ("if len(path) < depth:", "if len(path) <= depth:"),
            "shape-feeds-the-first-nodes-ancestors": ("whole.ancestors[:, fed]", "whole.ancestors[:, fed * 0]"),
        },
    ),
    *mutations(
        "python/specdec/drafters/model.py",
        f"{GROWTH} -k 'probable or drawn'",
        {
            "model-leaves-accepted-keys": ("            self.cache.compact(self.growth.fed(path))", "            pass"),
            "model-moves-the-keys-of-other-nodes": (
                "self.cache.compact(self.growth.fed(path))",
                "self.cache.compact(path)",
            ),
            "model-moves-keys-one-slot-late": (
                "        cache.lengths = root\n",
                "        cache.lengths = root + 1\n",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/in_turn.py",
        f"{GROWTH} -k 'heads or chain'",
        {
            "heads-recycle-the-first-nodes-feature": (
                "self.recycled(out).gather(1, parents)",
                "self.recycled(out).gather(1, parents * 0)",
            ),
            "heads-recycle-what-the-trees-logits-read": (
                "self.recycled(out).gather(1, parents)",
                "out.gather(1, parents)",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/drafter.py",
        f"{GROWTH} -k 'heads or chain'",
        {"heads-grow-one-place-late": ("root = step.lengths - 1 ", "root = step.lengths ")},
    ),
    *mutations(
        "python/specdec/models/attention.py",
        "tests/models/test_attention.py",
        {
            "level-is-taken-for-a-tree": (
                "root = queries.positions[b, i * 0] if tree.root is None else tree.root[b]",
                "root = queries.positions[b, i * 0]",
            ),
            "level-reads-up-to-its-root": (
                "tree.root + tree.depths.shape[1] - q",
                "tree.root",
            ),
        },
    ),
]

"""Of memory: how large caches are planned to be, what sequences reserve, what is free, and what happens without."""

from .mutation import Mutation, mutations

PLAN = "tests/models/test_cache_plan.py"
MEMORY = "tests/models/test_memory.py"
CHUNKS = f"{MEMORY} -k 'chunk or rows or warning or tried'"
ALLOCATION = "tests/models/test_allocation.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/models/cache_plan.py",
        PLAN,
        {
            "plan-has-no-trash-slot": ("(self.max_length + self.nodes + 1)", "(self.max_length + self.nodes)"),
            "plan-rounds-slots-down": (
                "-(-(self.max_length + self.nodes + 1) // self.step) * self.step",
                "(self.max_length + self.nodes + 1) // self.step * self.step",
            ),
            "plan-lets-sequences-reserve-trash-slots": (
                "return self.rows * self.max_length",
                "return self.rows * self.capacity",
            ),
            "plan-forgets-the-drafts-cache": (
                "return sum(self.slot_bytes.values())",
                "return next(iter(self.slot_bytes.values()), 0)",
            ),
            "plan-takes-the-looser-limit": (
                "return min(limits, default=None)",
                "return max(limits, default=None)",
            ),
            "plan-refuses-what-fits-exactly": ("budget.slots > most[0]", "budget.slots >= most[0]"),
            "plan-divides-trash-slots-among-tokens": (
                "most[0] // rows // step * step - nodes - 1",
                "most[0] // rows // step * step - nodes",
            ),
            "plan-outgrows-the-positions": ("max_length = min(fitting)", "max_length = max(fitting)"),
            "plan-refuses-the-last-position": (
                "max_length > longest:",
                "max_length >= longest:",
                "tests/loop/test_decoder_limits.py::test_gpt2_runs_to_its_last_position",
            ),
            "plan-compares-slots-with-free-bytes": (
                "free is not None and budget.bytes > free",
                "free is not None and budget.slots > free",
                ALLOCATION,
            ),
        },
    ),
    *mutations(
        "python/specdec/serving/ledger.py",
        f"{PLAN} -k ledger",
        {
            "ledger-keeps-the-last-token-back": (
                "self.used + tokens > self.budget",
                "self.used + tokens >= self.budget",
            ),
            "ledger-never-gets-tokens-back": ("        self.used -= tokens\n", ""),
            "ledger-is-released-twice": ("self._promised.pop(sequence)", "self._promised[sequence]"),
        },
    ),
    *mutations(
        "python/specdec/models/free_memory.py",
        MEMORY,
        {
            "memory-is-the-larger-of-two-limits": (
                "return min((*_available(root), *_left_in_groups(root))",
                "return max((*_available(root), *_left_in_groups(root))",
            ),
            "memory-forgets-what-its-group-uses": ("yield max(most - now + _numbers", "yield max(most + _numbers"),
            "memory-that-torch-holds-is-not-free": (
                "return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)",
                "return free",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/prefill.py",
        CHUNKS,
        {
            "prefill-tries-the-large-chunk-again": ("                self.size = columns * rows\n", ""),
            "prefill-takes-columns-for-tokens": ("self.size = columns * rows", "self.size = columns"),
            "prefill-takes-any-error-for-lack-of-memory": (
                "if columns == 1 or not is_out_of_memory(error):",
                "if columns == 1:",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cache_dtype.py",
        "tests/models/test_cache_dtype.py",
        {
            "cache-dtype-may-have-eight-bits": ("2 <= dtype.itemsize <=", "1 <= dtype.itemsize <="),
            "cache-dtype-of-autocast-goes-unnoticed": (
                "asked is None and comes.itemsize < computes.itemsize",
                "False",
            ),
            "cache-dtype-is-ignored": ("return asked or comes", "return comes"),
        },
    ),
    *mutations(
        "python/specdec/decoder.py",
        ALLOCATION,
        {
            "decoder-plans-without-the-drafts-cache": ('costs["draft"] = draft_cost()', "draft_cost()"),
        },
    ),
    *mutations(
        "python/specdec/models/control_groups.py",
        "tests/models/test_memory.py tests/evaluation/test_machine.py",
        {
            "memory-of-its-own-group-alone": (
                "range(len(names), -1, -1)",
                "range(len(names), len(names) - 1, -1)",
            ),
        },
    ),
]

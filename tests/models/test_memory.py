"""What a token costs against what is allocated; what is free; and prefill that goes on where memory runs out."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch
from specdec.models.forward.cached_model import CachedModel
from specdec.models.forward.prefill import PrefillChunk
from specdec.models.machine.free_memory import free_memory, is_out_of_memory, size_text
from support.allocations import LittleMemory, allocated, masked
from support.model_types import CASES, model_of
from support.models import DECODER, prompts, tiny_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3nTextConfig

CPU = torch.device("cpu")


def deepseek():
    """Latent attention: keys and values of different sizes."""
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1}
    shape = {**DECODER, "num_key_value_heads": 4, "head_dim": 4, "topk_group": 1, **sizes, **experts}
    config = DeepseekV3Config(num_hidden_layers=3, first_k_dense_replace=1, **shape)
    return AutoModelForCausalLM.from_config(config).eval()


def gemma3n():
    """The last two of four layers read the keys of others."""
    shape = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8, "vocab_size_per_layer_input": 101}
    types = ["sliding_attention", "full_attention"] * 2
    more = {"laurel_rank": 4, "hidden_size_per_layer_input": 4, "activation_sparsity_pattern": [0.0] * 4}
    config = Gemma3nTextConfig(**DECODER, **shape, **more, layer_types=types)
    return AutoModelForCausalLM.from_config(config).eval()


BYTES = {  # by hand: layers x 2 x heads x size x 4 bytes
    "llama": 2 * 2 * 2 * 8 * 4,
    "gpt2": 2 * 2 * 4 * 8 * 4,
    "gpt_bigcode": 2 * 2 * 1 * 8 * 4,
    "gemma3_text": 2 * 2 * 1 * 8 * 4,
    "falcon, ALiBi": 2 * 2 * 1 * 8 * 4,
}


@pytest.mark.parametrize("case", [*CASES, "deepseek", "gemma3n"])
def test_a_slot_costs_what_is_allocated(case):
    model = {"deepseek": deepseek, "gemma3n": gemma3n}.get(case, lambda: model_of(case))()
    cached = CachedModel(model)
    each = cached.slot_bytes()
    cache = cached.new_cache(3, 20)
    with torch.inference_mode():
        cached.prefill(cache, prompts(3, 2, 9))
    assert each * 3 * 20 + 3 * cached.row_bytes(1) == sum(size for _, size in allocated(cache))
    assert each == BYTES.get(case, each)


def test_the_cases_have_what_is_particular():
    (keys, values), *_ = CachedModel(deepseek()).layer_slots()
    assert keys.size != values.size
    stored = [pair is not None for pair in CachedModel(gemma3n()).layer_slots()]
    assert stored in ([True, True, False, False], [True, True])


def test_a_slot_costs_half_in_half_the_bits():
    cached = CachedModel(tiny_model("llama"))
    narrow = CachedModel(type(cached.model)(cached.model.config).eval().to(torch.bfloat16))
    assert 2 * narrow.slot_bytes() == cached.slot_bytes() > 0


def test_measured_once_a_model_and_kind_of_autocast(monkeypatch):
    cached, fed = CachedModel(tiny_model("llama")), []
    handle = cached.model.base_model.register_forward_hook(lambda *_: fed.append(1))
    try:
        plain = cached.layer_slots()
        with torch.autocast("cpu", torch.bfloat16):
            lowered = cached.layer_slots()
        assert cached.layer_slots() == plain and lowered != plain
        assert [v.dtype for _, v in lowered] == [torch.bfloat16] * 2 and [v.dtype for _, v in plain] == [
            torch.float32
        ] * 2
        assert len(fed) == 2
    finally:
        handle.remove()


# ---- what is free --------------------------------------------------------------------------------------------


def system(root, files: dict[str, str | int]):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


MEMINFO = "MemTotal: 9000 kB\nMemFree:     100 kB\nMemAvailable:    5000 kB\nHugePages_Total: 0"


def test_memory_that_is_available(tmp_path):
    assert free_memory(CPU, tmp_path) is None  # no Linux
    assert free_memory(CPU, system(tmp_path, {"proc/meminfo": MEMINFO})) == 5000 * 1024
    assert free_memory(torch.device("meta"), tmp_path) is None
    assert 0 < free_memory(CPU)  # here


@pytest.mark.parametrize("version", (1, 2))
def test_control_groups_bound_it(tmp_path, version):
    base, limit, used, reclaimable, line = (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "0::/outer/inner"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
         "9:name=systemd:/\n8:cpu,memory:/outer/inner\n0::/"),
    )[2 - version]  # fmt: skip
    inner, none = f"{base}/outer/inner", {2: "max", 1: 9223372036854771712}[version]
    root = system(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": line, f"{inner}/{limit}": none})
    assert free_memory(CPU, root) == 5000 * 1024  # no limit
    system(root, {f"{inner}/{used}": 3_000_000})
    assert free_memory(CPU, root) == 5000 * 1024
    system(root, {f"{inner}/{limit}": 4_000_000})
    assert free_memory(CPU, root) == 1_000_000
    system(root, {f"{inner}/memory.stat": f"anon 5\n{reclaimable} 250000\nactive_file 77"})
    assert free_memory(CPU, root) == 1_250_000  # page cache that would be dropped
    system(root, {f"{base}/outer/{limit}": 3_500_000, f"{base}/outer/{used}": 3_100_000})
    assert free_memory(CPU, root) == 400_000  # of the group around it
    system(root, {f"{base}/{limit}": 5_000_000, f"{base}/{used}": 5_000_001})
    assert free_memory(CPU, root) == 0  # a container sees its own group as the root


def test_groups_that_are_not_to_be_seen(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/../../elsewhere", "sys/fs/cgroup/memory.max": 10**6}
    root = system(tmp_path, {**files, "sys/fs/cgroup/memory.current": 10**5})
    assert free_memory(CPU, root) == 9 * 10**5


def test_what_torch_holds_and_does_not_use_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert free_memory(torch.device("cuda:1")) == 1400


def test_sizes_for_people():
    sizes = (0, 1023, 1024, 1000000, 2**20, 3 * 2**29, 2**40)
    told = ["0 bytes", "1023 bytes", "1.00 KiB", "976.56 KiB", "1.00 MiB", "1.50 GiB", "1024.00 GiB"]
    assert [size_text(size) for size in sizes] == told


# ---- where it runs out ---------------------------------------------------------------------------------------


def test_what_running_out_looks_like():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert type(refused.value) is RuntimeError and is_out_of_memory(refused.value)
    for error in (RuntimeError("shapes do not fit"), ValueError("DefaultCPUAllocator: can't allocate memory"), None):
        assert not is_out_of_memory(error)


def prefill(cached, prompt, capacity=201):
    cache = cached.new_cache(1, capacity)
    with torch.inference_mode():
        cached.prefill(cache, [prompt])
    return cache


def with_room(room: int, call):
    """``call`` where the last layer runs out: the first has stored its keys by then."""
    model, little = tiny_model("llama"), LittleMemory(room)
    handle = model.model.layers[-1].self_attn.register_forward_pre_hook(little.before, with_kwargs=True)
    try:
        return call(), little.seen
    finally:
        handle.remove()


def assert_same_keys(cache, other, length: int) -> None:
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert torch.equal(a[:, :, :length], b[:, :, :length])
            assert (a[:, :, :length].abs().amax((1, 3)) > 0).all()  # no slot was left out


@pytest.mark.parametrize("room, sizes", [(64 * 20, (16, 8, 4)), (64 * 10, (8, 4, 2))])
def test_a_smaller_chunk_stores_the_same_keys(room, sizes, monkeypatch):
    """The prompt sees 64, 128 and then 192 slots: memory runs out again as it grows. The keys are, bit for bit, those
    of a prefill that was cut like this without any fault."""
    masked(monkeypatch)
    cached, prompt = CachedModel(tiny_model("llama")), prompts(1, 150, 150)[0]
    cached.layer_slots()  # not where the fault is
    cached.prefill_chunk = PrefillChunk(32)
    with pytest.warns(RuntimeWarning) as told:
        cache, seen = with_room(room, lambda: prefill(cached, prompt))
    assert [str(w.message) for w in told] == [
        f"out of memory in prefill: {small} tokens a forward instead of {large} from now on"
        for large, small in pairwise((32, *sizes))
    ]
    fed = [tokens for tokens, slots in seen if tokens * slots <= room]
    left = [sizes[2]] * (22 // sizes[2]) + [2] * (22 % sizes[2] > 0)
    assert fed == [sizes[0]] * (64 // sizes[0]) + [sizes[1]] * (64 // sizes[1]) + left

    cached = CachedModel(tiny_model("llama"))  # which never ran out
    plain, stored = cached.new_cache(1, 201), 0
    with torch.inference_mode():
        for size in fed:
            stored += size
            cached.extend(plain, [prompt[:stored]], [stored - size])
    assert_same_keys(cache, plain, 150)
    assert cache.lengths.tolist() == [150]


def test_rows_are_not_cut():
    """The last chunk is a column."""
    cached, three = CachedModel(tiny_model("llama")), prompts(3, 40, 50)
    cached.layer_slots()
    seen = []

    def before(module, args, kwargs):
        seen.append(kwargs["attention_mask"].shape[2])
        raise torch.OutOfMemoryError("no")

    handle = cached.model.model.layers[-1].self_attn.register_forward_pre_hook(before, with_kwargs=True)
    cache = cached.new_cache(3, 201)
    told = "3 tokens a forward instead of 150 from now on"
    try:
        with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError), pytest.warns(RuntimeWarning, match=told):
            cached.prefill(cache, [(p * 2)[:50] for p in three])
    finally:
        handle.remove()
    assert seen == [50, 25, 12, 6, 3, 1]


def test_one_warning_from_what_to_what_and_never_back():
    chunk, asked = PrefillChunk(100), []

    def feed(size):
        asked.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("no")
        return None

    limit = 15
    with pytest.warns(RuntimeWarning) as told:
        assert chunk.run(feed, 200) is None
    assert asked == [100, 50, 25, 12] and chunk.size == 12
    (only,) = told
    assert str(only.message) == "out of memory in prefill: 12 tokens a forward instead of 100 from now on"
    assert only.filename == __file__
    limit, asked[:] = 1000, []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk.run(feed, 200)
        chunk.run(feed, 5)
    assert asked == [12, 5] and chunk.size == 12
    of_rows, asked[:], limit = PrefillChunk(100), [], 15
    with pytest.warns(RuntimeWarning, match="24 tokens a forward instead of 99"):
        of_rows.run(feed, 200, rows=3)
    assert asked == [33, 16, 8] and of_rows.size == 3 * 8
    limit, asked[:] = 0, []
    with (
        pytest.warns(RuntimeWarning, match="1 tokens a forward instead of 10"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        chunk.run(feed, 10)
    assert asked == [10, 5, 2, 1]
    with pytest.raises(ValueError, match="prefill_chunk: got 0"):
        PrefillChunk(0)


def test_other_errors_are_not_tried_again():
    asked = []

    def feed(size):
        asked.append(size)
        raise RuntimeError("shapes do not fit")

    chunk = PrefillChunk(8)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="shapes"):
        warnings.simplefilter("error")
        chunk.run(feed, 100)
    assert asked == [8] and chunk.size == 8


def test_the_failed_forward_keeps_nothing():
    """Its tensors, in the traceback, would be what the next forward lacks."""
    import gc
    import weakref

    alive = []

    def feed(size):
        if alive:
            return alive[0]() is None
        large = torch.zeros(8)
        alive.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no")

    gc.disable()
    try:
        with pytest.warns(RuntimeWarning):
            assert PrefillChunk(2).run(feed, 100)
    finally:
        gc.enable()

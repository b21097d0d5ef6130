"""Models whose weights are not all on one device are refused by name; placements that come to one device work."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models.supported import cached_model
from support.models import generate, tiny_model

PLACES = {"model": "cpu", "lm_head": "cpu"}


@pytest.fixture
def model():
    return copy.deepcopy(tiny_model("llama"))


@pytest.mark.parametrize(
    "place",
    [
        lambda model: accelerate.dispatch_model(model, {"": "cpu"}),
        lambda model: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
        lambda model: accelerate.dispatch_model(model, PLACES, force_hooks=True),
    ],
)
def test_one_device_works(model, place):
    placed, kwargs = place(model), {"max_new_tokens": 12, "seed": 3}
    assert placed.hf_device_map
    expected = generate(tiny_model("llama"), tiny_model("llama", 1), [[1, 2, 3], [4]], **kwargs)
    assert generate(placed, tiny_model("llama", 1), [[1, 2, 3], [4]], **kwargs).tokens == expected.tokens
    assert generate(tiny_model("llama"), placed, [[1, 2, 3], [4]], **kwargs).tokens == expected.tokens


def test_loaded_onto_one_device_works(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map={"": "cpu"})
    assert generate(loaded, None, [[1, 2, 3]], max_new_tokens=5).tokens == (
        generate(model, None, [[1, 2, 3]], max_new_tokens=5).tokens
    )


@pytest.mark.parametrize("place", ["disk", "offload to the CPU", "offload to the disk", "offload with a hook"])
def test_offloaded_models_are_refused(model, place, tmp_path):
    match place:
        case "disk":
            places, given = {**PLACES, "lm_head": "disk"}, r"weights spread over cpu and disk \(device_map\)"
            placed = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
        case "offload to the CPU":
            placed = accelerate.cpu_offload(model, execution_device="cpu")
            given = r"weights that are brought to cpu for each forward \(offloading\)"
        case "offload to the disk":
            placed = accelerate.disk_offload(model, tmp_path, execution_device="cpu")
            given = r"weights that are brought to cpu for each forward \(offloading\)"
        case "offload with a hook":
            placed, _ = accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cuda:0"))
            given = r"weights that are brought to cuda:0 for each forward \(offloading\)"
            assert {p.device.type for p in placed.parameters()} == {"cpu"}  # the hook alone gives it away
    for name, make in (("target", lambda: SpeculativeDecoder(placed, None, 0)), ("draft", lambda: drafting(placed))):
        with pytest.raises(ValueError, match=f"^{name}: got {given}, allowed: all of them, whole, on one device"):
            make()


def drafting(model):
    return SpeculativeDecoder(tiny_model("llama"), model)


def test_offloading_after_other_hooks_is_found(model):
    accelerate.hooks.add_hook_to_module(model.lm_head, accelerate.hooks.ModelHook())
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", offload=True)
    cached_model(model, "target")
    accelerate.hooks.add_hook_to_module(model.lm_head, hook, append=True)
    with pytest.raises(ValueError, match="target: got weights that are brought to cpu"):
        cached_model(model, "target")


def test_several_devices_are_refused_and_named(model):
    model.lm_head.to("meta")  # instead of a second device
    with pytest.raises(ValueError, match="target: got weights on cpu, meta, allowed"):
        cached_model(model, "target")
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}  # as from_pretrained leaves it
    with pytest.raises(ValueError, match=r"target: got weights spread over cpu and cuda:0 \(device_map\)"):
        cached_model(model, "target")


def test_models_that_were_brought_together_again_work(model, tmp_path):
    """The map that accelerate leaves on the model is not what counts."""
    places = {**PLACES, "lm_head": "disk"}
    placed = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    accelerate.hooks.remove_hook_from_submodules(placed)
    placed.lm_head.weight = torch.nn.Parameter(tiny_model("llama").lm_head.weight.detach().clone())
    assert len(set(placed.hf_device_map.values())) == 2
    cached_model(placed, "target")


def test_shards_are_refused(model):
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(model.lm_head.weight.detach(), DeviceMesh("cpu", [0]), [Shard(0)])
        model.lm_head.weight = torch.nn.Parameter(weight)
        with pytest.raises(ValueError, match=r"target: got weights in shards over a device mesh \(DTensor\)"):
            cached_model(model, "target")
    finally:
        destroy_process_group()


def test_tensor_parallel_models_are_refused(model):
    """Whatever their weights look like: a version of transformers keeps plain shards."""
    model._tp_size = 2
    with pytest.raises(ValueError, match=r"target: got weights in shards over 2 devices \(tensor parallel\)"):
        cached_model(model, "target")
    model._tp_size = 1
    cached_model(model, "target")

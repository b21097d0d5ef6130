"""Weights are moved to huge pages: the same objects and numbers, and only those that nobody else looks at."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from specdec.models.exchanged import huge_pages
from specdec.models.exchanged.huge_pages import has_huge_pages, move_to_huge_pages
from specdec.models.forward.cached_model import CachedModel
from support.models import prompts, tiny_model
from torch import nn

there_are = pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages")


def weights(*bytes_of_each: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size // 40, 10, generator=generator)) for size in bytes_of_each]


def in_huge_pages(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Whether the memory of each has the flag ``hg`` of smaps (proc(5)), which is read once: it takes long."""
    begin = end = 0
    asked: list[tuple[int, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in found.groups())
        elif line.startswith("VmFlags:") and "hg" in line.split():
            asked.append((begin, end))
    places = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]
    return [any(begin <= first and last <= end for begin, end in asked) for first, last in places]


@there_are
def test_they_stay_the_same_objects_with_the_same_numbers():
    own = [*weights(6 << 20, 12 << 20, 1000), nn.Parameter(torch.arange(9).to(torch.bfloat16))]
    packed = nn.Parameter(torch.arange(200, dtype=torch.uint8)[None].repeat(5, 1), requires_grad=False)
    own.append(packed)
    before = copy.deepcopy(own)
    assert not any(in_huge_pages(own))
    assert move_to_huge_pages([*own, own[1]]) == sum(x.nbytes for x in own)
    assert all(map(torch.equal, own, before)) and all(in_huge_pages(own))
    assert all(x.data_ptr() % 64 == 0 and x.is_leaf for x in own)
    assert [x.requires_grad for x in own] == [True] * 4 + [False]
    assert [x.untyped_storage().nbytes() for x in own] == [x.nbytes for x in own]
    own[0].data.zero_()  # and none is over another
    assert all(map(torch.equal, own[1:], before[1:]))


@there_are
def test_weights_are_moved_once_and_again_when_they_are_others():
    own = weights(10 << 20, 10 << 20)
    assert move_to_huge_pages(own) == 2 * own[0].nbytes and move_to_huge_pages(own) == 0
    own[0].data, own[1].data = own[0].data * 2, own[1].data * 2
    assert move_to_huge_pages(own) == 2 * own[0].nbytes


@there_are
def test_more_than_one_mapping(monkeypatch):
    monkeypatch.setattr(huge_pages, "AT_ONCE", 8 << 20)
    own = weights(5 << 20, 5 << 20, 20 << 20, 1 << 20, 3 << 20)
    before = copy.deepcopy(own)
    assert move_to_huge_pages(own) == sum(x.nbytes for x in own)
    assert all(map(torch.equal, own, before)) and all(in_huge_pages(own))


@there_are
def test_what_shares_its_memory_stays():
    own, whole = weights(30 << 20), torch.zeros(6 << 20)
    with_others, same = nn.Parameter(torch.zeros(6 << 20)), torch.zeros(6 << 20)
    with_others.share_memory_()
    ties = [nn.Parameter(same), nn.Parameter(same)]
    staying = [nn.Parameter(whole[:100]), with_others, *ties, nn.Parameter(torch.zeros(2000, 3000).t())]
    places = [x.data_ptr() for x in staying]
    assert move_to_huge_pages([*staying, *own]) == own[0].nbytes
    assert [x.data_ptr() for x in staying] == places


def test_small_models_and_systems_without_are_left_alone(monkeypatch, tmp_path):
    own = weights(1 << 20)
    place = own[0].data_ptr()
    assert move_to_huge_pages(own) == 0
    setting = tmp_path / "enabled"
    assert not has_huge_pages(setting)
    for text, expected in (("always madvise [never]\n", False), ("always [madvise] never\n", True)):
        setting.write_text(text)
        assert has_huge_pages(setting) == (expected and hasattr(huge_pages.mmap, "MADV_HUGEPAGE"))
    monkeypatch.setattr(huge_pages, "LEAST", 0)
    monkeypatch.setattr(huge_pages, "has_huge_pages", lambda: False)
    assert move_to_huge_pages(own) == 0 and own[0].data_ptr() == place


@there_are
def test_a_decoder_moves_what_it_reads(monkeypatch):
    """For the first cache, and not an embedding that is nothing else."""
    monkeypatch.setattr(huge_pages, "LEAST", 0)
    plain, model = tiny_model(), copy.deepcopy(tiny_model())
    parameters = dict(model.named_parameters())
    cached = CachedModel(model)
    cached.new_cache(1, 20)
    moved = {*itertools.compress(parameters, in_huge_pages(parameters.values()))}
    assert moved == {*parameters} - {"model.embed_tokens.weight"}
    assert all(x is parameters[name] for name, x in model.named_parameters())
    ids = torch.tensor(prompts(1, 9, 9))
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, plain(ids).logits)

"""Native operations have torch's threads for themselves, and give them back."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from specdec_layers import linear, native_threads, threads


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_torch_has_one_inside_and_its_own_after():
    with native_threads():
        assert torch.get_num_threads() == 1
        with native_threads():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_an_exception_gives_them_back():
    with pytest.raises(ValueError, match="inside"), native_threads():
        raise ValueError("inside")
    assert torch.get_num_threads() == 3


def test_a_new_thread_while_another_is_inside():
    """It begins with what was set last, 1, and has the process's number from its first own work on."""
    found = []

    def second():
        found.append(torch.get_num_threads())
        with native_threads():
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    with native_threads():
        other = threading.Thread(target=second)
        other.start()
        other.join()
    assert found == [1, 1, 3] and torch.get_num_threads() == 3


def test_one_thread_stays_one(monkeypatch):
    monkeypatch.setattr(threads, "_known", threading.local())
    torch.set_num_threads(1)
    for _ in range(2):
        with native_threads():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1


def test_results_are_the_same():
    x, weight = torch.randn(1, 9, 512), torch.randn(300, 512)
    outside = linear(x, weight)
    with native_threads():
        assert torch.equal(linear(x, weight), outside)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_is_forked_inside_goes_on_with_one():
    """Its own thread stays inside, and those of others, which it has not, are forgotten."""
    entered, left = threading.Event(), threading.Event()

    def other():
        with native_threads():
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    try:
        with native_threads():
            if (child := os.fork()) == 0:
                right = [*threads._inside] == [threading.get_ident()]
                os._exit(0 if right else 1)
    finally:
        left.set()
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.get_num_threads() == 3

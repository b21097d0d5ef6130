"""Runs every method over one cell: warm-up, windows on the clock, and steps under watch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from forward_costs import costs_of, free
from loop_efficiency import Window, tau, windows
from loop_methods import MODES, Cell, Specdec, Transformers, Unavailable, decoder_of, transformers_methods
from measure import first_line, summary
from tunable_pair import TunablePair
from watched_steps import profiled, synchronisations

WATCHED = 20  # steps


@dataclass
class Plan:
    """How a cell is measured.

    Attributes:
        not_compiling: why nothing is compiled; None: it is.
        watch: profile kernels and count synchronisations, on a GPU, at batch 1.
        seconds: for the forwards of a mode.
        deadline: on the clock of ``time.perf_counter``; no method begins after it.
        progress: is told what runs.
    """

    not_compiling: str | None
    watch: bool
    seconds: float
    deadline: float
    progress: Callable[[str], None]

    def check_time(self) -> None:
        if time.perf_counter() > self.deadline:
            raise Unavailable("no time was left for it (--limit)")


def ours(
    pair: TunablePair,
    cell: Cell,
    modes: list[str],
    plan: Plan,
) -> tuple[dict[str, list[Window]], list[dict], dict[str, dict], dict[str, str]]:
    """(windows by method, what else is said of each, costs of forwards by mode, what could not run and why)."""
    found: dict[str, list[Window]] = {}
    said, costs, unavailable, decoders = [], {}, {}, {}
    device = pair.target.device
    for mode in (MODES[m] for m in modes):
        for speculative in (False, True):
            name = f"{f'specdec K={cell.num_drafts}' if speculative else 'plain'} {mode}"
            plan.progress(name)
            loop = None
            try:
                plan.check_time()
                if mode.compiled and plan.not_compiling:
                    raise Unavailable(plan.not_compiling)
                key = speculative, mode.compiled
                decoder = decoders[key] = decoders.get(key) or decoder_of(pair, cell, *key)
                forwards = str(mode._replace(deferred=False))
                if speculative and forwards not in costs and not (mode.graphs and device.type != "cuda"):
                    costs[forwards] = costs_of(decoder, cell, mode.graphs, plan.seconds)
                free(device)
                loop = Specdec(name, decoder, cell, mode)
                found[name], about = run_loop(loop, cell, plan.watch and cell.batch == 1 and device.type == "cuda")
                said.append(about)
            except Unavailable as error:
                unavailable[name] = str(error)
            except Exception as error:  # out of memory, or what cannot be compiled: a result
                unavailable[name] = first_line(error)
            finally:
                if loop is not None:
                    loop.close()
                del loop
                free(device)
    return found, said, costs, unavailable


def run_loop(loop: Specdec, cell: Cell, watch: bool) -> tuple[list[Window], dict[str, object]]:
    """Once so that all is compiled and captured, once for the clock, and once under watch."""
    on_gpu = loop.decoder.target.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        loop.run(cell, more=4)  # the same texts, so the same shapes, and each of them at least twice
        captured = loop.graphs()
        ran = loop.run(cell)
    found = windows(ran.marks, cell.window)
    about: dict[str, object] = {
        "name": loop.name,
        "tau": tau(found, cell.batch),
        "alpha": ran.stats.alpha if loop.decoder.most_drafts else None,
        "graphs": loop.graphs(),
        "captured_while_timed": None if captured is None else loop.graphs()["count"] - captured["count"],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "warnings": sorted({str(w.message) for w in caught}),
    }
    if watch:
        loop.begin(cell)
        try:
            for _ in range(3):
                loop.step()
            about["profile"] = profiled(loop.step, WATCHED)
            about["synchronisations"] = synchronisations(loop.step, WATCHED)  # may end what is decoded
        finally:
            loop.end()
    return found, about


def theirs(
    methods: list[Transformers], cell: Cell, plan: Plan
) -> tuple[dict[str, list[Window]], list[dict], dict[str, str]]:
    found: dict[str, list[Window]] = {}
    said, unavailable = [], {}
    short = Cell(cell.batch, min(cell.context, 16), 2, 1, cell.num_drafts, cell.temperature)
    for method in methods:
        plan.progress(method.name)
        try:
            plan.check_time()
            method.run(short)
            found[method.name] = windows(method.run(cell).marks, cell.window)
            said.append({"name": method.name, "tau": tau(found[method.name], cell.batch), "alpha": None})
        except Unavailable as error:
            unavailable[method.name] = str(error)
        except Exception as error:
            unavailable[method.name] = first_line(error)
        free(method.model.device)
    return found, said, unavailable


def measure(
    pair: TunablePair,
    cell: Cell,
    modes: list[str],
    plan: Plan,
) -> tuple[dict, dict[str, list[float]]]:
    """(methods, forwards and unavailable of a row, tokens a second by method and window)."""
    their_windows, they_say, they_lack = theirs(transformers_methods(pair, cell), cell, plan)
    our_windows, we_say, costs, we_lack = ours(pair, cell, modes, plan)
    by_method = {n: w for n, w in {**their_windows, **our_windows}.items() if w}
    speeds = {name: [w.tokens / w.seconds for w in found] for name, found in by_method.items()}
    methods = [
        {**about, "tokens_per_second": summary(speeds[about["name"]])}
        for about in they_say + we_say
        if about["name"] in speeds
    ]
    return {"methods": methods, "forwards": costs, "unavailable": they_lack | we_lack}, speeds

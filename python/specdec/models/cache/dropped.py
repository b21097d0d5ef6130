"""Which tokens of each row's text a cache has dropped, and what positions the others then have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class Dropped:
    """Of each row's text a cache has the first ``sinks`` tokens, in slots of their own, and after them those that come
    after the ``counts`` dropped ones. Attention follows the order of the slots, so masks know nothing of this. Keys
    were rotated by the positions of the text, and so are the queries: what is dropped needs no rotation to be undone,
    which each family of models has another of.

    Args:
        sinks: tokens of each row that are never dropped, >= 1: padding is fed at place 0, which stays position 0.
        rows: of the cache.

    Attributes:
        counts: [B] int64, the tokens that each row has dropped. It is always the same tensor.
        of_rows: the same, as the host knows it.
    """

    def __init__(self, sinks: int, rows: int, device: torch.device):
        self.sinks, self.of_rows = sinks, [0] * rows
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)

    def forget(self, *rows: int) -> None:
        """Begins new texts in these rows."""
        for row in rows:
            self.of_rows[row] = self.counts[row] = 0

    def drop(self, counts: Mapping[int, int], storage: Sequence[torch.Tensor]) -> None:
        """Drops tokens of the texts in some rows, until these are ``counts``, and moves what comes after them in the
        cache's ``storage`` to their slots. Where these are fewer than before, it is another text, of which nothing is
        stored."""
        for row, count in counts.items():
            more = count - self.of_rows[row]
            if more == 0:
                continue
            for states in storage if more > 0 else ():
                later = states[row, :, self.sinks + more :].clone()  # it overlaps with where it goes
                states[row, :, self.sinks : self.sinks + later.shape[1]] = later
            self.of_rows[row] = self.counts[row] = count

    def positions(self, places: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Returns the positions in the text, [n, q] int64, of the slots ``places`` [n, q] int64 of n rows."""
        counts = self.counts[first_row : first_row + len(places), None]
        return places + counts * (places >= self.sinks)

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the slots [n, q] int64 of the first n rows' tokens at ``positions`` [n, q] int64, none of which is
        dropped."""
        return positions - self.counts[: len(positions), None] * (positions >= self.sinks)

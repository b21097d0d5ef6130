"""``place_rows`` and ``advance_rows`` in plain PyTorch."""

from __future__ import annotations

import torch

from ..ops import implement


def place_rows(known, room, wanted, num_drafts, trash):
    columns = torch.arange(-2, num_drafts, device=known.device)
    live = room > 0
    allowed = torch.minimum(wanted, room - 1).clamp_(0, num_drafts)
    places = known[:, None] + columns
    counts = (columns < allowed[:, None]) & (places >= 0) & live[:, None]
    return places[:, 1].clamp(0), places * counts, torch.where(counts, places, trash), allowed, live


def advance_rows(state, tokens, num_emitted, status, faults):
    (known, room), last_two, ends = state[:2], state[3:5], state[5:]
    live, index = room > 0, torch.arange(tokens.shape[1], device=tokens.device)
    count = num_emitted.to(torch.int64)
    is_end = (tokens[:, :, None] == ends.T[:, None]).any(-1) & (index < count[:, None])
    beyond = tokens.shape[1]
    first = torch.where(is_end, index, beyond).amin(1)
    count = torch.minimum(count, first + 1) * live
    room.sub_(count).mul_(~((first < beyond) | ((status & faults) != 0)))
    known.add_(count)
    text = torch.cat((last_two.T, tokens), 1)
    last_two.copy_(text.gather(1, count[:, None] + torch.arange(2, device=tokens.device)).T)
    return count


implement("place_rows_reference", place_rows)
implement("advance_rows_reference", advance_rows)

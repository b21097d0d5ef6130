"""The cache of a head in training: it keeps what it is given, with its gradient."""

from __future__ import annotations

import torch


class Growing:
    """Stands where a :class:`~specdec.models.kv_cache.StaticKVCache` does when a head drafts. Each layer's new keys and
    values come after those before, whatever their slots, and all of them are visible: the mask says what counts."""

    def __init__(self, layers: int):
        self.layers = [_Layer() for _ in range(layers)]

    def write_at(self, slots: torch.Tensor, visible: int, first_row: int = 0) -> None:
        pass

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' layers call it."""
        return self.layers[layer].update(keys, values)


class _Layer:
    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes keys and values [B, H_kv, q, D], and returns all so far."""
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, 2), torch.cat(self._values, 2)

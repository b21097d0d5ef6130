"""One layer of a static cache that has a state, of a recurrence or of a short convolution."""

from __future__ import annotations

import torch
from specdec_layers import DeltaState, Feed, SsdState, conv_window, delta_step, ssd_step
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...checks import refuse
from .kv_layer import KVLayer, Writer
from .tree import Tree


class RecurrentLayer(KVLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]  # both have lazy_initialization
    """The state of a layer for all rows, and the inputs of the last tokens, by which a rejected draft is taken back;
    the layer may also store keys and values. What is allocated follows from the first inputs, or from another layer.

    A row whose next token is at position 0 starts from nothing, so nothing is done when it gets a new sequence.
    """

    is_compileable = True

    def __init__(self, writer: Writer):
        KVLayer.__init__(self, writer)
        # transformers takes a layer that never has a previous state for one at its beginning, and so gives it several
        # tokens in the form in which it would give it one.
        LinearAttentionCacheLayerMixin.__init__(self)
        self.inputs: torch.Tensor | None = None  # of the convolution, [R, M, C]
        self.state: DeltaState | SsdState | None = None

    @property
    def feed(self) -> Feed:
        feed = self._writer.feed
        assert feed is not None, "a forward without write_at"
        return feed

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: object) -> torch.Tensor:
        """Returns the inputs [n, C, q] as they are: ``convolve`` stores them."""
        if state_idx != 0:
            refuse("target", "a layer with several states", "layers with one")
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object):
        """Returns the state as it is: the scans advance it."""
        return recurrent_states

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
    ) -> torch.Tensor:
        """Returns the causal convolution of x [n, C, q] with weight [C, k], [n, C, q]."""
        if activation not in (None, "silu", "swish"):
            refuse("activation", repr(activation), "silu or none")
        inputs = self._computed(x.transpose(1, 2))
        if self.inputs is None:
            places = self._writer.window + weight.shape[1] - 1
            self.inputs = inputs.new_zeros(self._writer.batch_size, places, inputs.shape[2])
        weight, bias = weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype)
        y = conv_window(self.inputs, inputs, weight, bias, self.feed, silu=activation is not None)
        return y.to(x.dtype).transpose(1, 2)

    def delta_rule(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, normalize: bool
    ) -> torch.Tensor:
        """Returns what :func:`~specdec_layers.delta_step` does, in float32."""
        q, k, v, g, beta = (self._computed(x) for x in (q, k, v, g, beta))
        if self.state is None:
            self.state = DeltaState.empty(self._writer.batch_size, self._writer.window, k, v, g, beta)
        assert isinstance(self.state, DeltaState)
        return delta_step(self.state, q, k, v, g, beta, self.feed, normalize=normalize)

    def state_space(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns what :func:`~specdec_layers.ssd_step` does, in float32."""
        x, dt, B, C = (self._computed(i) for i in (x, dt, B, C))
        if self.state is None:
            self.state = SsdState.empty(self._writer.batch_size, self._writer.window, x, dt, B)
        assert isinstance(self.state, SsdState)
        return ssd_step(self.state, x, dt, B, C, A.float(), None if D is None else D.float(), self.feed)

    def windows(self) -> list[torch.Tensor]:
        """Returns the inputs of the last tokens, each a ring by position [R, places, ...]."""
        of_convolution = [] if self.inputs is None else [self.inputs]
        return [*of_convolution, *(self.state or ())[2:]]

    def allocate_like(self, other: RecurrentLayer) -> None:
        """Allocates what ``other``, of the same layer of the model, had to."""
        rows, more = self._writer.batch_size, self._writer.window - other._writer.window
        if other.inputs is not None:
            _, places, channels = other.inputs.shape
            self.inputs = other.inputs.new_zeros(rows, places + more, channels)
        if other.state is not None:
            self.state = other.state.empty(rows, self._writer.window, *other.state[2:])

    def row_bytes(self, window: int) -> int:
        """Returns what a row would take with a window of so many tokens."""
        found = 0
        if self.inputs is not None:
            _, places, channels = self.inputs.shape
            found += (places + window - self._writer.window) * channels * self.inputs.element_size()
        for i, part in enumerate(self.state or ()):
            numbers = part[0].numel() if i < 2 else part[0, 0].numel() * window
            found += numbers * part.element_size()
        return found

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        """On a CPU everything is computed in float32."""
        return x.float() if x.device.type == "cpu" else x


class Committed:
    """How many tokens of each row can no longer be rolled back, by what is fed to layers with a state.

    Args:
        window: the most tokens of a sequence that are fed in a step, over all its forwards.
    """

    def __init__(self, batch_size: int, window: int, device: torch.device):
        self.counts = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._window = window

    def feed(
        self,
        slots: torch.Tensor,
        valid: torch.Tensor,
        lengths: torch.Tensor,
        first_row: int,
        keep: bool,
        tree: Tree | None,
    ) -> Feed:
        """Returns what a forward of n sequences feeds.

        Args:
            slots, valid: [n, q] int64 and bool: where keys go, and which of them are of tokens.
            lengths: [n] int64, how many tokens of each sequence are stored.
            first_row, keep, tree: as in ``StaticKVCache.write_at``.
        """
        rows, columns = slots.shape
        if columns > self._window and not keep:
            refuse("window", f"{self._window} for a forward of {columns} tokens", ">= the tokens of a forward")
        first = valid.to(torch.int8).argmax(1, keepdim=True)
        start = slots.gather(1, first)[:, 0]
        # A draft model's first forward begins before ``lengths``, where the next step may begin, too.
        commit = start if keep else torch.minimum(start, lengths)
        own = self.counts[first_row : first_row + rows]
        own.copy_(torch.where(valid.any(1), commit + valid.sum(1) if keep else commit, own))
        parents = None
        if tree is not None:
            assert tree.parents is not None, "a part of a tree was fed to recurrent layers"
            parents = tree.parents.expand(slots.shape)
        return Feed(start, commit, valid, first_row, keep, parents)

"""What every head has: a small network that reads hidden states of its target and proposes the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...models.cache.features import FeatureStore
from ...models.cache.kv_cache import StaticKVCache
from ...models.cache.kv_layer import Slot
from ...models.cache.tree import Tree
from ...models.exchanged.beside import BESIDE, Names
from ...models.forward.attention import Queries, can_be_fused, dense_mask, seen_slots
from ...models.forward.layout import Layout
from ..tree_growth import Growing, Level

WHOSE = "Is it this target's head?"  # what to ask if its drafts are rarely accepted
Logits = Generator[torch.Tensor, torch.Tensor, Any]  # what it returns is said at ``Head.draft``


class HeadInput(NamedTuple):
    """Known tokens of n sequences, q of each. Column c has the feature of one token and the *next* token, at the
    position and in the slot of the first of the two."""

    features: torch.Tensor  # [n, q, width], as ``Head.combine`` made them of the target's states
    tokens: torch.Tensor  # [n, q] int64; [n, q + lookahead] to be read
    layout: Layout  # its mask is [n, 1, q, visible] bool, or that of ``seen_slots``
    first_row: int = 0  # of the cache


class Variant(NamedTuple):
    """Another reading of a checkpoint that does not say how it is meant."""

    name: str
    changes: Mapping[str, Any]  # attributes of the head


class Head(nn.Module):
    """A head in one of the formats of ``formats.FORMATS``. It has no state: what belongs to a batch is in a feature
    store and a cache. A head that was rejected drafts needs no cropping, as a later call with the same slots writes
    over them, and the mask hides those beyond a query's position.

    Attributes:
        kind: the format's name.
        at_once: whether one call of the head makes all drafts of a step.
        independent: whether, beyond that, each draft's distribution does not depend on the drafts before it.
        grows_trees: whether ``grow`` is there.
        says_how_sure: whether ``draft`` returns how likely it finds its drafts.
        states: which hidden states of the target it reads, as :class:`~specdec.models.cache.features.FeatureStore`
            counts.
        width: of its features.
        vocab_size: ids that it may be fed.
        d2t: [columns] int64, ascending: the target's ids of the columns of its logits; None: the whole vocabulary.
        most_drafts: the most tokens that it can propose in a step; None: any number.
        num_layers: layers of its cache; 0: it needs none.
        lookahead: how many tokens beyond the next one ``read`` takes.
        doubts: readings of the checkpoint other than the one that is set, of which the self-check takes the best.
        reads_target_cache: whether ``draft`` is given the target's cache, since it has none of its own.
        certain: whether the format says which reading is right, so that only another one is worth a warning.
        beside: names of layers of a module that are called with the same tensor.
        can_fuse: whether its layers take the slots that each token sees in place of a mask.
        fuses: whether they do, in forwards of few tokens (``fused``).
    """

    kind: str
    at_once = independent = grows_trees = says_how_sure = False
    can_fuse = fuses = False
    reads_only_filled = False  # attention reads all ``visible`` slots
    lookahead = 0
    reads_target_cache = certain = False
    beside: Names = BESIDE
    in_float32: tuple[str, ...] = ()  # how the names of weights end that are not of the target's dtype

    def __init__(self, states: tuple[int, ...], width: int, hidden: int, vocab_size: int, num_layers: int = 0):
        super().__init__()
        self.states, self.width, self.hidden, self.vocab_size = states, width, hidden, vocab_size
        self.num_layers, self.key_heads, self.head_dim = num_layers, 0, 0
        self.d2t: torch.Tensor | None = None
        self.most_drafts: int | None = None
        self.doubts: list[Variant] = []
        # The target's, where the head has none of its own. Functions, since a module would become a part of the head.
        self.target_embedding: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.target_head: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def weight(self) -> torch.Tensor:
        return next(self.parameters())

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the features [n, q, width] of the target's states [n, q, len(self.states) * hidden], side by side."""
        return states

    def read(self, rows: HeadInput, cache: StaticKVCache) -> None:
        """Stores what later drafts need of known tokens."""

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        """Yields logits [B, columns] of one draft after the other, ``count`` times, and is sent the token [B, 1] that
        was drawn from each. Returns how likely it finds that each is accepted after those before it were, [B, count]
        float32, of which no entry depends on its own draft or a later one; None: it does not say.

        Args:
            rows: the sequences' last known tokens, padded on the left. What is stored of them may stem from guesses.
            ahead: the places of ``count - 1`` tokens after these.
        """
        raise NotImplementedError

    def grow(self, rows: HeadInput, growing: Growing, layout: Callable[[Level], Layout], cache: StaticKVCache) -> int:
        """Grows trees after the last of ``rows``, which are those of ``draft``. Returns how many forwards it took.

        Args:
            layout: returns the places of nodes.
        """
        raise NotImplementedError

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        embed = getattr(self, "embed_tokens", None) or self.target_embedding
        assert embed is not None
        return embed(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = getattr(self, "lm_head", None) or self.target_head
        assert head is not None
        return head(hidden)

    def layout(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        visible: int,
        tree: Tree | None = None,
        fed: int | None = None,
    ) -> Layout:
        """Returns the layout of tokens at ``positions`` [n, q] int64 in ``slots``. Each sees itself and what is before;
        of a tree, only its ancestors.

        Args:
            fed: how many of them a forward is fed; None: all.
        """
        queries = Queries(positions, tree=tree)
        if self.fuses and can_be_fused(positions.shape[1] if fed is None else fed, tree):
            return Layout(positions, slots, visible, seen_slots(queries), tree)
        keys = torch.arange(visible, device=positions.device)
        return Layout(positions, slots, visible, dense_mask(queries, keys), tree)

    # ---- memory ----------------------------------------------------------------------------------------------

    def new_store(self, size: int, capacity: int) -> FeatureStore:
        w = self.weight
        return FeatureStore(self.states, self.combine, size, capacity, self.width, w.dtype, w.device)

    def new_cache(self, size: int, capacity: int) -> StaticKVCache:
        cache = StaticKVCache(_Layers(self.num_layers), size, capacity, self.weight.device)
        cache.allocate([self.layer_slot()] * self.num_layers)
        return cache

    def layer_slot(self) -> tuple[Slot, Slot]:
        """Returns the keys and the values that a token stores in a layer."""
        slot = Slot(self.key_heads, self.head_dim, self.weight.dtype)
        return slot, slot

    def slot_bytes(self) -> int:
        """Returns the bytes of a token's features, keys and values."""
        stored = self.num_layers * sum(slot.bytes for slot in self.layer_slot())
        return self.width * self.weight.dtype.itemsize + stored + torch.int64.itemsize


class _Layers(PreTrainedConfig):
    """What a cache reads of a configuration."""

    def __init__(self, num_hidden_layers: int = 1):
        super().__init__()
        self.num_hidden_layers = num_hidden_layers


def known_rows(
    head: Head,
    store: FeatureStore,
    places: torch.Tensor,
    end: torch.Tensor,
    last: torch.Tensor,
    visible: int,
    first_row: int = 0,
    lookahead: int = 0,
) -> HeadInput:
    """Returns what the store has for ``head`` of the tokens at ``places`` [n, q] int64, and the tokens after them.

    Args:
        end: [n] int64; places that are not in [0, end) are padding.
        last: [n] int64, the token at ``end``, which the target was not fed.
        lookahead: how many more tokens, after the next one of the last place. Those after ``end`` are arbitrary.
    """
    trash = store.capacity - 1
    valid = (places >= 0) & (places < end[:, None])
    slots = torch.where(valid, places, trash)
    row = torch.arange(first_row, first_row + len(places), device=places.device)[:, None]
    more = places[:, -1:] + torch.arange(1, lookahead + 1, device=places.device)
    following = torch.cat((slots, more), 1) + 1
    known = store.tokens[row, following.clamp(max=trash)]
    tokens = torch.where(torch.cat((places, more), 1) + 1 == end[:, None], last[:, None], known)
    return HeadInput(store.features[row, slots], tokens, head.layout(places * valid, slots, visible), first_row)


def returned(logits: Logits, last: torch.Tensor) -> torch.Tensor | None:
    """Returns what ``Head.draft`` returns when it is sent its last draft."""
    try:
        logits.send(last)
    except StopIteration as end:
        return end.value
    raise AssertionError("there are more distributions than drafts")

"""Addresses of cache entries, scores of the indexer, and the choice of the best entries and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headrace.modeling import Cache
from headrace.ops import KernelContext
from headrace_plugins.reference.kernels.cache import load
from headrace_plugins.reference.kernels.formats import act_dtype

SCRATCH = 1 << 24
"""Numbers of scratch memory that one pass takes; longer work is cut."""
EXACT_ENTRIES = 256
"""Entries that the exact scorer takes at a time: its shapes must not depend on the batch. The plain one takes more."""
PLAIN_SCRATCH = 1 << 20
"""Numbers that the plain scorer works on at a time, few enough for a CPU's caches (a third quicker than 16 times as
many, for one token or 64 and 64k entries)."""

_NONE = -torch.inf


def paged_addresses(entries: Tensor, table: Tensor, row: Tensor, grain: int) -> Tensor:
    """Op `index.entries`."""
    # -1 reads the last column; a block of -1 is none either
    blocks = table[row.unsqueeze(1), entries // grain]
    return torch.where((entries < 0) | (blocks < 0), -1, blocks * grain + entries % grain)


def index_entries(context: KernelContext) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    return paged_addresses


def index_window(context: KernelContext) -> Callable[[Tensor, Tensor, Tensor, int, int], Tensor]:
    def index_window(slot: Tensor, positions: Tensor, first: Tensor, window: int, ring: int) -> Tensor:
        return _ring_span(slot, torch.maximum(first, positions - window + 1), positions + 1, window, ring)

    return index_window


def draft_index(context: KernelContext) -> Callable[[Tensor, Tensor, Tensor, int, int, int], Tensor]:
    def draft_index(slot: Tensor, positions: Tensor, first: Tensor, window: int, ring: int, gamma: int) -> Tensor:
        return _ring_span(slot, torch.maximum(first, positions - window), positions + gamma, window + gamma, ring)

    return draft_index


def _ring_span(slot: Tensor, start: Tensor, end: Tensor, width: int, ring: int) -> Tensor:
    """Addresses of positions [start, end) of each row's ring, right-padded by -1. -> [n, width] int64."""
    positions = start.unsqueeze(1) + torch.arange(width, device=start.device)
    addresses = slot.unsqueeze(1) * ring + positions % ring
    return addresses.masked_fill_(positions >= end.unsqueeze(1), -1)


# --- scores ----------------------------------------------------------------------------------------------------------


def index_score(context: KernelContext) -> Callable[..., Tensor]:
    return _scorer(act_dtype(context), exact=False)


def index_score_tiled(context: KernelContext) -> Callable[..., Tensor]:
    """Every product has the shape [heads, d] x [d, EXACT_ENTRIES], at entries that are a multiple of that."""
    return _scorer(act_dtype(context), exact=True)


def _scorer(act: torch.dtype, exact: bool) -> Callable[..., Tensor]:
    def index_score(
        q: Tensor, weights: Tensor, keys: Cache, table: Tensor, row: Tensor, visible: Tensor,
        blocks: Tensor | None = None, block: int = 0,
    ) -> Tensor:  # fmt: skip
        m = int(visible.max()) if len(visible) else 0
        scores = q.new_full((len(q), m), _NONE, dtype=act)
        weights = weights.float().unsqueeze(1)
        for tokens in equal_rows(row, EXACT_ENTRIES * max(q.shape[1], keys.format.width)):
            _score_tokens(scores, tokens, q[tokens].float(), weights[tokens], keys, table, row[tokens], visible, exact)
        if blocks is not None:
            scores.masked_fill_(~_entries_of_blocks(blocks, block, m), _NONE)
        return scores

    return index_score


def _score_tokens(
    scores: Tensor, tokens: Tensor, q: Tensor, weights: Tensor, keys: Cache, table: Tensor, row: Tensor,
    visible: Tensor, exact: bool,
) -> None:  # fmt: skip
    """Write scores [n, m] of `tokens`: all of one row of the table, or each of another."""
    visible = visible[tokens]
    m = int(visible.max())
    shared = len(row) == 1 or bool(row[0] == row[1])
    rows = row[:1] if shared else row
    per_entry = q.shape[1] * len(q) + keys.format.width * len(rows)
    step = EXACT_ENTRIES if exact else max(1, min(m, max(EXACT_ENTRIES, PLAIN_SCRATCH // per_entry)))
    for start in range(0, m, step):
        entries = torch.arange(start, start + step, device=q.device)
        wanted = entries.masked_fill(entries >= m, -1).expand(len(rows), -1)
        tile = load(keys, paged_addresses(wanted, table, rows, keys.grain), torch.float32).mT
        # one product for all tokens of a row is faster, but its shape depends on how many there are
        dots = torch.matmul(q, tile[0]) if shared and not exact else torch.bmm(q, tile.expand(len(q), -1, -1))
        found = torch.bmm(weights, dots.relu_()).squeeze(1)
        found.masked_fill_(entries >= visible.unsqueeze(1), _NONE)
        end = min(start + step, m)
        scores[tokens, start:end] = found[:, : end - start].to(scores.dtype)


def equal_rows(row: Tensor, scratch: int) -> Iterator[Tensor]:
    """Tokens in groups that can be scored together, as indices: those of one row, or all that are alone in theirs;
    at most as many as have room, at `scratch` numbers each."""
    most = max(1, SCRATCH // scratch)
    counts = torch.unique_consecutive(row, return_counts=True)[1]
    ends = counts.cumsum(0)
    groups = [
        torch.arange(end - count, end) for end, count in zip(ends.tolist(), counts.tolist(), strict=True) if count > 1
    ]
    groups.append(ends[counts == 1] - 1)
    for group in groups:
        yield from group.split(most) if len(group) else ()


def _entries_of_blocks(blocks: Tensor, block: int, m: int) -> Tensor:
    """Which of m entries lie in the blocks [n, c], -1 = none. -> [n, m] bool."""
    n_blocks = -(-m // block)
    chosen = blocks.new_zeros((len(blocks), n_blocks + 1), dtype=torch.bool)  # the last column takes the -1
    chosen.scatter_(1, blocks.masked_fill(blocks < 0, n_blocks), True)
    return chosen[:, :n_blocks].repeat_interleave(block, 1)[:, :m]


# --- choice ----------------------------------------------------------------------------------------------------------


def topk(scores: Tensor, k: int) -> Tensor:
    """Op `index.topk`."""
    n, m = scores.shape
    best = torch.full((n, k), -1, dtype=torch.int64, device=scores.device)
    step = max(1, SCRATCH // max(m, 1))
    for start in range(0, n if m else 0, step):
        part = scores[start : start + step]
        keep = part > _NONE
        if m > k:
            least = torch.topk(part, k, sorted=True).values[:, -1:]
            better, equal = part > least, part == least
            room = k - better.sum(1, keepdim=True)
            keep &= better | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))
        rows, entries = keep.nonzero(as_tuple=True)
        places = keep.cumsum(1, dtype=torch.int32)[rows, entries] - 1
        best[rows + start, places] = entries
    return best


def index_topk(context: KernelContext) -> Callable[[Tensor, int], Tensor]:
    return topk


def index_candidates(context: KernelContext) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    def index_candidates(scores: Tensor, visible: Tensor, block: int, top: int) -> Tensor:
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % block), value=_NONE)
        best = padded.unflatten(1, (-1, block)).amax(2).clamp_max_(torch.finfo(scores.dtype).max)
        some = (visible > 0).nonzero().squeeze(1)
        best[some, (visible[some] - 1) // block] = torch.inf
        return topk(best, top)

    return index_candidates

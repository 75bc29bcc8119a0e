"""Attention over cache entries: chosen ones with sinks (sparse), and all of a row's blocks (paged).

Scores, softmax and sums are float32 whatever the compute type; the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.modeling import Cache
from headrace.ops import KernelContext
from headrace_plugins.reference.kernels.cache import load
from headrace_plugins.reference.kernels.formats import act_dtype
from headrace_plugins.reference.kernels.index import SCRATCH, equal_rows, paged_addresses

ROW_TILE = 8
"""Tokens of one row that the exact paged kernel computes together; fewer are padded."""
KEY_TILE = 64
"""Keys that it takes at a time, at positions that are a multiple of this."""


def attn_sparse(context: KernelContext) -> Callable[..., Tensor]:
    return _sparse(act_dtype(context), exact=False)


def attn_sparse_tiled(context: KernelContext) -> Callable[..., Tensor]:
    """One product per token, of the fixed shape [heads, d] x [d, keys], with all columns of the index lists."""
    return _sparse(act_dtype(context), exact=True)


def _sparse(act: torch.dtype, exact: bool) -> Callable[..., Tensor]:
    def attn_sparse(
        q: Tensor, window: Cache, window_index: Tensor, compressed: Cache | None, compressed_index: Tensor | None,
        sink: Tensor | None, scale: float,
    ) -> Tensor:  # fmt: skip
        caches = [(window, window_index)]
        if compressed is not None and compressed_index is not None:
            caches.append((compressed, compressed_index))
        if not exact:
            caches = [(cache, _without_padding(index)) for cache, index in caches]
        n_keys = sum(index.shape[1] for _, index in caches)
        out = torch.empty_like(q, dtype=act)
        step = max(1, SCRATCH // (max(n_keys, 1) * q.shape[2]))
        for start in range(0, len(q), step):
            part = slice(start, start + step)
            keys = torch.cat([load(cache, index[part], torch.float32) for cache, index in caches], 1)
            absent = torch.cat([index[part] < 0 for _, index in caches], 1)
            out[part] = _attend(q[part].float(), keys, absent, sink, scale)
        return out

    return attn_sparse


def _without_padding(index: Tensor) -> Tensor:
    """The index lists without columns in which every row has -1 (they are right-padded)."""
    used = (index >= 0).any(0).nonzero()
    return index[:, : int(used[-1]) + 1] if len(used) else index[:, :0]


def _attend(q: Tensor, keys: Tensor, absent: Tensor, sink: Tensor | None, scale: float) -> Tensor:
    """Softmax over each token's own keys and the sink. q: [n, h, d], keys (= values): [n, k, d], float32; absent:
    [n, k] bool; sink: [h]. -> [n, h, d] float32."""
    if not keys.shape[1]:
        return torch.zeros_like(q)
    scores = torch.bmm(q, keys.mT).mul_(scale).masked_fill_(absent.unsqueeze(1), -torch.inf)
    most = scores.amax(2, keepdim=True)
    if sink is not None:
        sink = sink.float().unsqueeze(1)
        most = torch.maximum(most, sink)
    most = most.masked_fill(most == -torch.inf, 0.0)  # no key at all
    shares = (scores - most).exp_()
    total = shares.sum(2, keepdim=True)
    total = total + (sink - most).exp() if sink is not None else total.masked_fill(total == 0, 1.0)
    return torch.bmm(shares, keys) / total


# --- paged -----------------------------------------------------------------------------------------------------------


def attn_paged(context: KernelContext) -> Callable[..., Tensor]:
    """As few passes as memory allows: over the tokens that are alone in their row, then over each other row."""
    act = act_dtype(context)

    def attn_paged(
        q: Tensor, keys: Cache, values: Cache, table: Tensor, row: Tensor, positions: Tensor, scale: float
    ) -> Tensor:
        out = torch.empty_like(q, dtype=act)
        for tokens in equal_rows(row, KEY_TILE * max(keys.format.width, q.shape[1])):
            tile = tokens.unsqueeze(int(row[tokens[0]] != row[tokens[-1]]))
            most = int(positions[tokens].max()) + 1
            per_key = len(tile) * keys.format.width + len(tokens) * q.shape[1]
            n_keys = min(most, max(KEY_TILE, SCRATCH // per_key))
            _attend_tiles(out, q, tile, keys, values, table, row, positions, scale, n_keys)
        return out

    return attn_paged


def attn_paged_tiled(context: KernelContext) -> Callable[..., Tensor]:
    """Products of fixed shapes only: ROW_TILE tokens with KEY_TILE keys. A tile of keys that a token can't see changes
    no bit of its result, so that it doesn't matter how long the other rows are."""
    act = act_dtype(context)

    def attn_paged(
        q: Tensor, keys: Cache, values: Cache, table: Tensor, row: Tensor, positions: Tensor, scale: float
    ) -> Tensor:
        out = torch.empty_like(q, dtype=act)
        for tiles in row_tiles(row, ROW_TILE).split(max(1, SCRATCH // (KEY_TILE * keys.format.width))):
            if len(tiles):
                _attend_tiles(out, q, tiles, keys, values, table, row, positions, scale, KEY_TILE)
        return out

    return attn_paged


def row_tiles(row: Tensor, size: int) -> Tensor:
    """Tokens in tiles of `size` that lie in one row each. row: [n] int64 -> [tiles, size] int64, right-padded by -1."""
    counts = torch.unique_consecutive(row, return_counts=True)[1]
    n_tiles = (counts + size - 1) // size
    ends = counts.cumsum(0).repeat_interleave(n_tiles)
    # tiles of a row from its end: how many come after this one
    after = n_tiles.cumsum(0).repeat_interleave(n_tiles) - torch.arange(1, len(ends) + 1, device=row.device)
    starts = ends - counts.repeat_interleave(n_tiles) + (n_tiles.repeat_interleave(n_tiles) - 1 - after) * size
    tokens = starts.unsqueeze(1) + torch.arange(size, device=row.device)
    return tokens.masked_fill_(tokens >= ends.unsqueeze(1), -1)


def _attend_tiles(
    out: Tensor, q: Tensor, tiles: Tensor, keys: Cache, values: Cache, table: Tensor, row: Tensor, positions: Tensor,
    scale: float, n_keys: int,
) -> None:  # fmt: skip
    """Online softmax over `n_keys` keys at a time. Writes out[token] for all tokens in tiles [t, s], each of one row
    of the table."""
    heads, d = q.shape[1:]
    n_tiles, size = tiles.shape
    kv_heads = keys.format.width // d
    last = positions[tiles].masked_fill_(tiles < 0, 0)  # padding sees one key, and is dropped
    rows, horizon = row[tiles[:, 0]], last.amax(1)
    # [t, kv_heads, s * heads / kv_heads, d]: queries that meet the same keys, together
    shape = (n_tiles, size, kv_heads, heads // kv_heads)
    queries = q[tiles].float().view(*shape, d).transpose(1, 2).reshape(n_tiles, kv_heads, -1, d)
    most = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total, mixed = torch.zeros_like(most), torch.zeros_like(queries)
    for start in range(0, int(horizon.max()) + 1, n_keys):
        seeing = (horizon >= start).nonzero().squeeze(1)
        live = slice(None) if len(seeing) == n_tiles else seeing
        at = torch.arange(start, start + n_keys, device=q.device)
        # the entries of a row are read once for all its tiles
        own, place = torch.unique_consecutive(rows[live], return_inverse=True)
        written = torch.zeros_like(own).scatter_reduce_(0, place, horizon[live], "amax")
        wanted = torch.where(at <= written.unsqueeze(1), at, -1)
        addresses = paged_addresses(wanted, table, own, keys.grain)
        tile_keys, tile_values = (_by_head(load(cache, addresses, torch.float32), d) for cache in (keys, values))
        if len(own) < len(place):
            tile_keys, tile_values = tile_keys[place], tile_values[place]
        hidden = (at > last[live].unsqueeze(2)).repeat_interleave(heads // kv_heads, 1).unsqueeze(1)
        scores = _products(queries[live], tile_keys.mT).mul_(scale).masked_fill_(hidden, -torch.inf)
        before = most[live]
        now = torch.maximum(before, scores.amax(3, keepdim=True))
        fade, shares = (before - now).exp_(), (scores - now).exp_()
        total[live] = total[live] * fade + shares.sum(3, keepdim=True)
        mixed[live] = mixed[live] * fade + _products(shares, tile_values)
        most[live] = now
    done = (mixed / total).view(n_tiles, kv_heads, size, -1, d).transpose(1, 2).reshape(n_tiles, size, heads, d)
    real = tiles >= 0
    out[tiles[real]] = done[real].to(out.dtype)


def _by_head(entries: Tensor, d: int) -> Tensor:
    """[t, n, kv_heads d] -> [t, kv_heads, n, d]"""
    return entries.unflatten(2, (-1, d)).transpose(1, 2)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a [t, k, m, x] times b [t, k, x, n], each pair of matrices by itself. -> [t, k, m, n]"""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])

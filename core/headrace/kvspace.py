"""Who holds which KV: `PagedSpace` for executors with block tables, `SlotSpace` for those with one run per slot.

Pure bookkeeping on the host. A hash is only a hint here: a prefix is shared after its tokens, salt, adapter and media
were compared one by one, so neither a collision nor a crafted prompt can reach another tenant's cache.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from headrace.contracts import KVSpace
from headrace.snapshots import Snapshots
from headrace.types import Begin, Fork, Free, KVLayout, KVOp, Request, Restore, Sequence, Snapshot, Trim

if TYPE_CHECKING:
    from numpy.typing import NDArray

Root = tuple[object, ...]

MAX_MISFITS = 256
"""Sequences without room that are remembered at once; they are few, since admission tries few."""


def root_of(request: Request) -> Root:
    """What must be equal, besides tokens, for two sequences to share KV."""
    return (request.cache_salt, request.adapter, request.media, request.extra_keys)


class PagedSpace(KVSpace):
    """Ref-counted blocks with a chained prefix index.

    Life of a block:  free -> held (ref >= 1) -> cached (ref 0, still indexed, LRU) -> held again, or evicted to free.
    Only full blocks whose KV is committed are indexed, so a shared block is never written. A block's key is
    sha256(parent key + tokens): the same tokens after another prefix have another key.

    A layout may have rings beside the blocks: states of the last positions only, kept per row and overwritten as the
    row goes on. Blocks alone then let nobody start after a cached prefix. Either the rings were kept too (Snapshot, at
    the end of a block) and come back exactly, or they are rebuilt: the last tokens before the hit run again, with
    their writes to the shared blocks suppressed (`write_from`).

        hit without rings     |== cached ==|-- computed ->
        snapshot at its end   |== cached ==|-- computed ->         Begin, Restore
        replay                |== cached |~~~~|-- computed ->      Begin; ~ runs again, from `computed` to `write_from`

    A snapshot is asked for once a step has passed the end of a block, and is taken before the next plan's rows run. By
    then the row may be released and its ring in another's hands: that one's Begin comes later in the same list.
    """

    def __init__(
        self, layout: KVLayout, max_sequences: int, *, prefix_cache: bool = True, context_tokens: int | None = None
    ) -> None:
        """context_tokens: most tokens of one sequence; None: as many as the blocks hold."""
        self.block_tokens = layout.block_tokens
        self.n_blocks = layout.n_blocks
        self._width = layout.n_blocks
        if context_tokens is not None:
            self._width = min(self._width, -(-context_tokens // layout.block_tokens))
        self.prefix_cache = prefix_cache
        self.max_sequences = max_sequences
        self.has_rings = layout.has_rings
        self.slack_tokens = layout.slack_tokens
        self.replay_tokens = layout.replay_tokens
        self.rerun_tokens = layout.rerun_tokens
        self.n_snapshots = layout.n_snapshots if self.has_rings and prefix_cache else 0
        self.reset([])

    def reset(self, ops: list[KVOp]) -> None:
        n = self.n_blocks
        self._free = list(range(n - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref = [0] * n
        self._key: list[bytes | None] = [None] * n
        self._proof: list[tuple[bytes, list[int], Root] | None] = [None] * n
        """What the key stands for: (parent key, tokens, root), compared on every hit."""
        self._index: dict[bytes, int] = {}
        self._rows = list(range(self.max_sequences - 1, -1, -1))
        self._blocks: list[list[int]] = [[] for _ in range(self.max_sequences)]
        self._chain: list[list[bytes]] = [[] for _ in range(self.max_sequences)]
        """Keys of the row's committed full blocks; entry 0 is the root key."""
        self._roots: list[Root] = [()] * self.max_sequences
        self._table = np.full((self.max_sequences, max(1, self._width)), -1, np.int32)
        self._gains = 0
        """Blocks that were indexed, and idle ones that a hit took: each may bring a waiting sequence a block nearer."""
        self._snapshots = Snapshots(self.n_snapshots)
        self._high = [0] * self.max_sequences
        """End of what the row's last step wrote, rejected drafts included: its rings hold the slack and a window before
        that. Earlier steps reached further only by less than the slack."""
        self._passed = [0] * self.max_sequences
        """Last end of a block that the row passed."""
        self._write_from: dict[int, int] = {}
        """Row -> end of the KV in its blocks, while it computes positions before that end again."""
        self._misfits: dict[Sequence, int] = {}
        """Sequence that found no room -> the room (as `admit` counts it) below which it need not be tried again. Else
        every step would hash the long prompts that wait for a full pool."""

    # --- admission -------------------------------------------------------------------------------------------------

    def capacity_tokens(self) -> int:
        return self._width * self.block_tokens

    def admit(self, seq: Sequence, ops: list[KVOp], use_prefix: bool = True) -> bool:
        if not self._rows or len(seq.tokens) > self.capacity_tokens():
            return False
        n_held = self.max_sequences - len(self._rows)
        room = len(self._free) + len(self._cached) - n_held + self._gains
        if room < self._misfits.get(seq, room):
            return False
        tokens = seq.tokens
        root = root_of(seq.request)
        chain = [_root_key(root)]
        hits = self._hits(seq, root, chain) if use_prefix else []
        need = -(-len(tokens) // self.block_tokens) - len(hits)
        idle_hits = sum(1 for block in hits if self._ref[block] == 0)
        # one block of headroom per sequence that already runs, or admission would cause the next preemption
        missing = need + n_held - (len(self._free) + len(self._cached) - idle_hits)
        if missing > 0:
            if len(self._misfits) >= MAX_MISFITS:
                self._misfits.clear()
            self._misfits[seq] = room + missing
            return False
        self._misfits.pop(seq, None)
        self._gains += idle_hits
        for block in hits:
            if self._ref[block] == 0:
                del self._cached[block]
            self._ref[block] += 1
        row = self._rows.pop()
        seq.slot = row
        seq.computed = valid = len(hits) * self.block_tokens
        self._blocks[row] = hits
        self._chain[row] = chain[: len(hits) + 1]
        self._roots[row] = root
        self._table[row, : len(hits)] = hits
        if self.has_rings:
            if not self.n_snapshots:
                seq.computed = max(0, valid - self.replay_tokens)
            self._begin(row, seq.computed, valid, hits[-1] if hits and self.n_snapshots else None, ops)
        self._grow(row, need)
        return True

    def restorable(self, seq: Sequence) -> int:
        root = root_of(seq.request)
        hits = self._hits(seq, root, [_root_key(root)])
        return 0 if self.has_rings and not self.n_snapshots else len(hits) * self.block_tokens

    def _hits(self, seq: Sequence, root: Root, chain: list[bytes]) -> list[int]:
        """Blocks after which seq can start, or (replay) up to which it need not write; appends their keys to chain."""
        if not self.prefix_cache or (self.has_rings and not self.n_snapshots and not self.replay_tokens):
            return []
        hits = self._match(seq.tokens, root, chain, self._limit(seq) // self.block_tokens)
        if self.n_snapshots:
            while hits and hits[-1] not in self._snapshots:
                hits.pop()
        return hits

    def _limit(self, seq: Sequence) -> int:
        """Where seq must start at the latest: its last token's logits are needed, and the layout may want the end of
        the prompt (not of what was generated after it, which a preempted sequence computes again) to run."""
        limit = len(seq.tokens) - 1
        return min(limit, seq.n_prompt - self.rerun_tokens) if self.rerun_tokens else limit

    def _begin(self, row: int, start: int, valid: int, block: int | None, ops: list[KVOp]) -> None:
        """The row starts (over) at `start`; its blocks hold KV up to `valid`. block: whose snapshot its rings take."""
        ops.append(Begin(row))
        if block is not None:
            ops.append(Restore(row, 0, self._snapshots.use(block)))
        self._high[row] = start
        self._passed[row] = start - start % self.block_tokens
        if start < valid:
            self._write_from[row] = valid

    def _match(self, tokens: list[int], root: Root, chain: list[bytes], most: int) -> list[int]:
        """Blocks that already hold a prefix of tokens, at most so many; appends their keys to chain."""
        size, hits = self.block_tokens, []
        for i in range(most):
            part = tokens[i * size : (i + 1) * size]
            key = _chained(chain[-1], part)
            block = self._index.get(key)
            if block is None or not self._proven(block, chain[-1], part, root):
                break
            chain.append(key)
            hits.append(block)
        return hits

    def _proven(self, block: int, parent: bytes, tokens: list[int], root: Root) -> bool:
        """A hash brought us here; only equality lets us stay."""
        return self._proof[block] == (parent, tokens, root)

    def reserve(self, seq: Sequence, upto: int, ops: list[KVOp]) -> bool:
        blocks = self._blocks[seq.slot]
        if upto > len(blocks) * self.block_tokens:
            need = -(-upto // self.block_tokens) - len(blocks)
            if len(self._free) + len(self._cached) < need or len(blocks) + need > self._width:
                return False
            self._grow(seq.slot, need)
        if self.has_rings:
            self._high[seq.slot] = upto
        return True

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """The first end of a block that wants a snapshot for which the rings would not hold enough after `end`."""
        if self.n_snapshots:
            for boundary in self._boundaries(seq, seq.computed, end):
                if end - boundary > self.slack_tokens:
                    return boundary
        return end

    def _boundaries(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Ends of blocks in (start, end] that want a snapshot, ascending: the last one at which the same prompt may
        start (its n samples do, for one), and the last one, for prompts that go on from there."""
        last = end - end % self.block_tokens
        usable = seq.n_prompt - max(1, self.rerun_tokens)
        usable -= usable % self.block_tokens
        return [boundary for boundary in sorted({min(usable, last), last}) if boundary > start]

    def _grow(self, row: int, n: int) -> None:
        blocks = self._blocks[row]
        for _ in range(n):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._ref[block] = 1
            self._table[row, len(blocks)] = block
            blocks.append(block)

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None and self._index.get(key) == block:
            del self._index[key]
        self._key[block] = None
        self._proof[block] = None
        if self.n_snapshots:
            self._snapshots.drop(block)

    # --- progress --------------------------------------------------------------------------------------------------

    def commit(self, seq: Sequence, keep: int, ops: list[KVOp]) -> None:
        chain = self._chain[seq.slot]
        size = self.block_tokens
        while len(chain) * size <= keep and self.prefix_cache:
            i = len(chain) - 1
            part = seq.tokens[i * size : (i + 1) * size]
            key = _chained(chain[i], part)
            block = self._blocks[seq.slot][i]
            if key not in self._index:
                self._gains += 1
                self._index[key] = block
                self._key[block] = key
                self._proof[block] = (chain[i], part, self._roots[seq.slot])
            chain.append(key)
        if self.has_rings:
            self._passes(seq, keep, ops)

    def _passes(self, seq: Sequence, keep: int, ops: list[KVOp]) -> None:
        """Ask for snapshots where the row passed the end of a block and its rings still hold all that belongs to it."""
        row = seq.slot
        if self._write_from and keep >= self._write_from.get(row, keep + 1):
            del self._write_from[row]
        if keep < self._passed[row] + self.block_tokens:
            return
        for boundary in self._boundaries(seq, self._passed[row], keep):
            self._passed[row] = boundary
            if self.n_snapshots and self._high[row] - boundary <= self.slack_tokens:
                self._keep(seq, boundary // self.block_tokens, ops)

    def _keep(self, seq: Sequence, n: int, ops: list[KVOp]) -> None:
        """Have a snapshot of seq's rings at the end of its n-th block, if others can find that block."""
        block = self._indexed(seq, n)
        if block is None:
            return
        if block in self._snapshots:
            self._snapshots.use(block)
        else:
            ops.append(Snapshot(seq.slot, 0, self._snapshots.take(block)))
            self._gains += n

    def _indexed(self, seq: Sequence, n: int) -> int | None:
        """The block that others find for the n-th committed block of seq: its own, or one with the same content."""
        chain, size = self._chain[seq.slot], self.block_tokens
        block = self._index.get(chain[n])
        part = seq.tokens[(n - 1) * size : n * size]
        return block if block is not None and self._proven(block, chain[n - 1], part, self._roots[seq.slot]) else None

    def rollback(self, seq: Sequence, ops: list[KVOp]) -> None:
        """Positions of blocks from `computed` on are written again before anybody reads them. Rings may have lost what
        lay before `computed`: then the row starts over from a snapshot or by replay, and writes no block again."""
        row = seq.slot
        if not self.has_rings or self._high[row] - seq.computed <= self.slack_tokens:
            return
        valid = max(seq.computed, self._write_from.get(row, 0))
        limit = min(valid, self._limit(seq))
        start, source = 0, None
        if self.n_snapshots:
            for n in range(min(len(self._chain[row]) - 1, limit // self.block_tokens), 0, -1):
                block = self._indexed(seq, n)
                if block is not None and block in self._snapshots:
                    start, source = n * self.block_tokens, block
                    break
        elif self.replay_tokens:
            start = max(0, limit - self.replay_tokens)
        seq.computed = start
        self._begin(row, start, valid, source, ops)

    def release(self, seq: Sequence, ops: list[KVOp], reuse: bool = True) -> None:
        row = seq.slot
        blocks = self._blocks[row]
        if self.n_snapshots and not reuse:
            for key in self._chain[row][1:]:  # this row may have made them
                self._snapshots.drop(self._index.get(key, -1))
        self._write_from.pop(row, None)
        for block in reversed(blocks):  # tails go to the LRU first, so a chain is evicted from its end
            self._ref[block] -= 1
            if self._ref[block]:
                continue
            if not reuse:
                self._forget(block)
            if self._key[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        self._table[row, : len(blocks)] = -1
        self._blocks[row] = []
        self._chain[row] = []
        self._rows.append(row)
        seq.slot = -1

    # --- views -----------------------------------------------------------------------------------------------------

    def table(self, slots: NDArray[np.int32]) -> NDArray[np.int32] | None:
        width = max((len(self._blocks[slot]) for slot in slots.tolist()), default=0)
        return self._table[slots, :width]

    def write_from(self, slots: NDArray[np.int32]) -> NDArray[np.int32] | None:
        found = self._write_from
        if not found:
            return None
        return np.array([found.get(slot, 0) for slot in slots.tolist()], np.int32)

    def used_ratio(self) -> float:
        return 1.0 - (len(self._free) + len(self._cached)) / max(1, self.n_blocks)

    def check(self, running: Iterable[Sequence]) -> None:
        counts = [0] * self.n_blocks
        rows = set()
        for seq in running:
            assert seq.slot >= 0, "a running sequence has no row"
            assert seq.slot not in rows, "two sequences share a row"
            rows.add(seq.slot)
            blocks = self._blocks[seq.slot]
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            assert seq.computed <= len(blocks) * self.block_tokens, "computed beyond the reserved blocks"
            assert self._table[seq.slot, : len(blocks)].tolist() == blocks, "table differs from the block list"
            n_committed = max(seq.computed, self._write_from.get(seq.slot, 0)) // self.block_tokens
            if self.has_rings:
                ahead = self._high[seq.slot] - seq.computed
                assert 0 <= ahead <= self.slack_tokens, "the rings lost what the next token reads"
            for i, block in enumerate(blocks):
                counts[block] += 1
                assert self._ref[block] == 1 or i < n_committed, "a block that may be written is shared"
        assert len(rows) + len(self._rows) == self.max_sequences, "rows leak"
        assert counts == self._ref, "reference counts differ from what sequences hold"
        idle = [block for block, ref in enumerate(self._ref) if ref == 0]
        assert sorted(self._free + list(self._cached)) == idle, "free + cached + held != all blocks"
        for key, block in self._index.items():
            assert self._key[block] == key, "the index points to a forgotten block"
            assert self._proof[block] is not None, "an indexed block has no proof"
        assert all(self._key[block] is not None for block in self._cached), "a cached block is not indexed"
        assert all(self._key[block] is None for block in self._free), "a free block is indexed"
        assert set(self._write_from) <= rows, "a row that nobody holds computes again"
        self._snapshots.check(lambda block: self._index.get(self._key[block] or b"") == block)


def _root_key(root: Root) -> bytes:
    return sha256(repr(root).encode("utf-8", "surrogatepass")).digest()


def _chained(parent: bytes, tokens: list[int]) -> bytes:
    return sha256(parent + array("i", tokens).tobytes()).digest()


class SlotSpace(KVSpace):
    """One run of positions per slot; the longest common prefix of what a slot already holds is kept.

    A released slot keeps its content until another sequence takes it, so a chat's next turn or a preempted sequence
    finds its own KV again. Where the executor refuses partial trims, only a slot whose whole content is a prefix of
    the new tokens is reused.
    """

    def __init__(
        self, layout: KVLayout, *, partial_trim: bool = True, fork: bool = False, prefix_cache: bool = True
    ) -> None:
        self.n_slots = layout.n_slots
        self.slot_tokens = layout.slot_tokens
        self.partial_trim = partial_trim
        self.fork = fork
        self.prefix_cache = prefix_cache
        self.reset([])

    def reset(self, ops: list[KVOp]) -> None:
        n = self.n_slots
        ops.extend(Free(slot) for slot in range(n))
        self._holder: list[Sequence | None] = [None] * n
        self._content: list[list[int]] = [[] for _ in range(n)]
        """Tokens of idle slots; a held slot's content is its holder's tokens[:computed]."""
        self._root: list[Root] = [()] * n
        self._length = [0] * n
        """Positions physically in the slot, rejected drafts included."""
        self._stamp = [0] * n
        self._clock = 0

    def capacity_tokens(self) -> int:
        return self.slot_tokens if self.n_slots else 0

    def admit(self, seq: Sequence, ops: list[KVOp], use_prefix: bool = True) -> bool:
        idle = [slot for slot in range(self.n_slots) if self._holder[slot] is None]
        if not idle or len(seq.tokens) > self.slot_tokens:
            return False
        root = root_of(seq.request)
        limit = len(seq.tokens) - 1
        best, slot = 0, -1
        if use_prefix and self.prefix_cache:
            for candidate in idle:
                common = self._usable(candidate, seq.tokens, root, limit)
                if common > best:
                    best, slot = common, candidate
        source = -1
        if use_prefix and self.prefix_cache and self.fork:
            for other, holder in enumerate(self._holder):
                if holder is not None and self._root[other] == root:
                    common = min(_common_prefix(holder.tokens, seq.tokens, holder.computed), limit)
                    if common > best and (self.partial_trim or common == holder.computed):
                        best, source = common, other
        if slot < 0 or source >= 0:  # an empty slot first, then the one that was idle for longest
            slot = min(idle, key=lambda i: (self._length[i] > 0, self._stamp[i]))
        if source >= 0:
            ops.append(Fork(source, slot, best))
        elif best == 0 and self._length[slot]:
            ops.append(Free(slot))
        elif best < self._length[slot]:
            ops.append(Trim(slot, best))
        self._length[slot] = best
        self._content[slot] = []
        self._holder[slot] = seq
        self._root[slot] = root
        seq.slot = slot
        seq.computed = best
        return True

    def _usable(self, slot: int, tokens: list[int], root: Root, limit: int) -> int:
        """How much of an idle slot's content can stay for tokens."""
        content = self._content[slot]
        if not content or self._root[slot] != root:
            return 0
        common = min(_common_prefix(content, tokens, len(content)), limit)
        return common if self.partial_trim or common == self._length[slot] else 0

    def reserve(self, seq: Sequence, upto: int, ops: list[KVOp]) -> bool:
        if upto > self.slot_tokens:
            return False
        self._length[seq.slot] = upto
        return True

    def commit(self, seq: Sequence, keep: int, ops: list[KVOp]) -> None:
        if self._length[seq.slot] > keep:
            ops.append(Trim(seq.slot, keep))
            self._length[seq.slot] = keep

    def rollback(self, seq: Sequence, ops: list[KVOp]) -> None:
        if not self.partial_trim or seq.computed == 0:
            seq.computed = 0
            ops.append(Free(seq.slot))
        else:
            ops.append(Trim(seq.slot, seq.computed))
        self._length[seq.slot] = seq.computed

    def release(self, seq: Sequence, ops: list[KVOp], reuse: bool = True) -> None:
        slot = seq.slot
        self._clock += 1
        self._stamp[slot] = self._clock
        self._holder[slot] = None
        self._content[slot] = seq.tokens[: seq.computed] if reuse else []
        if not reuse and self._length[slot]:
            ops.append(Free(slot))
            self._length[slot] = 0
        seq.slot = -1

    def table(self, slots: NDArray[np.int32]) -> NDArray[np.int32] | None:
        return None

    def used_ratio(self) -> float:
        held = sum(holder.computed for holder in self._holder if holder is not None)
        return held / max(1, self.n_slots * self.slot_tokens)

    def check(self, running: Iterable[Sequence]) -> None:
        held = {slot: holder for slot, holder in enumerate(self._holder) if holder is not None}
        running = list(running)
        assert {seq.slot for seq in running} == set(held), "slots held by nobody, or by a sequence that does not run"
        for seq in running:
            assert held[seq.slot] is seq, "a slot has another holder"
            assert seq.computed <= len(seq.tokens), "computed beyond the tokens"
            assert seq.computed <= self._length[seq.slot] <= self.slot_tokens, "slot length out of range"
        for slot in range(self.n_slots):
            if slot not in held:
                assert len(self._content[slot]) <= self._length[slot], "content beyond what is in the slot"


def _common_prefix(a: list[int], b: list[int], upto: int) -> int:
    """Length of the common prefix of a[:upto] and b. Bisects on slice equality, which compares at C speed."""
    low, high = 0, min(upto, len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

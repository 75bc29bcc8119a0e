"""What torch-family backends and model architectures tell each other: tensors, caches, the rows of a step.

A model is a plugin (`ArchSpec`) on a table of ops (`headrace.ops`); a backend owns devices, weights and caches. This
module is the seam between them and knows no tensor library: `Tensor` is whatever the backend's ops take.

    backend: config.json -> Model(config, ops, ...) -> model.tensors(), model.states() -> loads, allocates
             model.load(weights); each step: model.forward(batch, caches) -> logits
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headrace.contracts import Contract

if TYPE_CHECKING:
    from headrace.contracts import Tokenizer
    from headrace.ops import Ops

Tensor = Any
"""A tensor of the backend's library. Core never computes with one."""

Packing = Literal["none", "fp8_block", "fp4_row", "fp8_row"]
"""How a checkpoint may store a matrix [m, k] (beside a plain one):
fp8_block  e4m3 codes [m, k], scale ue8m0 [ceil(m/32), ceil(k/32)]
fp4_row    two e2m1 codes per byte [m, k/2], low nibble = even column, scale ue8m0 [m, k/32]
fp8_row    e4m3 codes [m, k], scale ue8m0 [m, k/32]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor that a model needs from its checkpoint."""

    name: str
    """Name in the checkpoint, without the optional "model." in front. A packed tensor `x.weight` has `x.scale`."""
    shape: tuple[int, ...]
    """Logical shape, unpacked."""
    packing: Packing = "none"
    """How a quantised checkpoint stores it; a plain one (bfloat16, float32) is always accepted too."""
    dtype: Literal["compute", "float32"] = "compute"
    """Type that the model computes with: the backend's compute type, or float32 whatever that is."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix that is kept packed; ops unpack it when they use it."""

    codes: Tensor
    scales: Tensor
    packing: Packing
    shape: tuple[int, ...]


Weight = Any
"""Tensor [m, k] or Quantised."""


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How an entry of `width` numbers lies in bytes.

    q8  e4m3 codes, groups of 32, ue8m0 scale: [codes | scales] per entry, width + width/32 bytes
    q4  e2m1 codes (low nibble = even index), groups of 16, e4m3 scale: [codes | scales] per entry, width/2 + width/16
    qm  e2m1 codes, groups of 32, ue8m0 scale: per grain, codes of all entries, then scales of all entries
    float32, bfloat16  plain
    Source: DeepInfer kv_cache layouts, as in its byte oracles.
    """

    name: Literal["q8", "q4", "qm", "float32", "bfloat16"]
    width: int

    @property
    def entry_bytes(self) -> int:
        match self.name:
            case "q8":
                return self.width + self.width // 32
            case "q4":
                return self.width // 2 + self.width // 16
            case "qm":
                return self.width // 2 + self.width // 32
            case "float32":
                return 4 * self.width
            case "bfloat16":
                return 2 * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One cache of a model, per layer or shared. The block manager sees its bytes and grains, nothing else.

    paged: one entry per `ratio` tokens, in blocks that core allocates; entry i belongs to positions [i ratio, ...).
    ring:  `entries` entries per sequence, position p at p mod entries; rebuilt or restored after a prefix hit.
    """

    name: str
    kind: Literal["paged", "ring"]
    format: CacheFormat
    ratio: int = 1
    """paged: tokens per entry; the block size must be a multiple."""
    entries: int = 0
    """ring: its length, slack for rejected drafts included."""


@dataclass(frozen=True, slots=True)
class Cache:
    """The memory of one state. Entry e of grain g has the flat address g * grain + e; -1 addresses nothing.

    paged: a grain is a block, grain = block tokens / ratio. ring: a grain is a sequence slot, grain = entries.
    """

    pool: Tensor
    """[grains, grain bytes] uint8, may be a strided view of a larger pool."""
    format: CacheFormat
    grain: int


@dataclass(slots=True, kw_only=True)
class Batch:
    """The tokens of one step, flat, as tensors on the device. T tokens of R rows; rows lie one after another and each
    row's positions ascend by one. Valid during one forward."""

    tokens: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, absolute"""
    row: Tensor
    """[T] int64, index into `table`"""
    slot: Tensor
    """[T] int64, grain of ring states"""
    first: Tensor
    """[T] int64, lowest position whose ring entries this token may read"""
    tail: Tensor | None = None
    """[T] int64, first position that the consumer half of a split model computes; None = all"""
    store: Tensor | None = None
    """[T] bool, whether paged entries of this position are written; None = all"""
    table: Tensor = None
    """[R, B] int64 block numbers, -1 padded"""
    block_tokens: int = 0
    """Tokens per block."""
    history: Tensor | None = None
    """[T, h] int64 tokens at positions p - 1 .. p - h, -1 before the start and where the input was an embedding; for
    models with `history_tokens` = h"""
    embeds: Tensor | None = None
    """[T, H] input embeddings; used where `image` is set"""
    image: Tensor | None = None
    """[T] bool, positions whose input is an embedding; None = none"""
    wanted: Tensor = None
    """[M] int64, indices into T whose logits are needed, ascending"""
    trace: dict[str, Any] | None = None
    """Where a model notes what happens inside, by names of its own, for tests; None = nowhere."""

    def take(self, keep: Tensor) -> Batch:
        """The same rows with the tokens at `keep` [K] int64 only. `wanted` does not survive."""
        per_token = ("tokens", "positions", "row", "slot", "first", "tail", "store", "history", "embeds", "image")
        taken = {name: value[keep] for name in per_token if (value := getattr(self, name)) is not None}
        return replace(self, **taken, wanted=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What a backend decides about a model."""

    block_tokens: int
    """Tokens per block of paged states."""
    slack_tokens: int
    """How far a sequence may be rolled back (drafts of one step + 1); rings are that much longer than their window."""
    cache: Literal["quantised", "plain"] = "quantised"
    """plain: caches in the compute type, nothing is rounded on its way through a cache."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    quantise_activations: bool = False
    """Round inputs of fp8 and fp4 linears to e4m3, as the kernels of the released model do."""
    replay: Literal["off", "mask", "compact"] = "off"
    """How the consumer half of a split model treats prompt tokens before `Batch.tail`: computed; computed with the
    visibility of compact; left out."""
    draft: bool = False
    """Keep the drafter's caches and weights."""
    tokenizer: Tokenizer | None = None
    """For models that derive tables from the texts of tokens; None: the checkpoint brings none."""


class Model(Contract):
    """One architecture: `factory(config, ops, context)`; config is the parsed config.json.

    The constructor checks the config and raises ModelError for one that it can't serve exactly; it allocates nothing.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the ops that it uses."""
    vocab_size: int
    context_tokens: int
    """Most positions that the model was made for."""
    history_tokens: int = 0
    """Tokens before each position that forward wants to know."""
    rerun_tokens: int = 0
    """Last tokens of a prompt that must run even after a prefix hit (the consumer half was cut before them)."""
    replay_tokens: int = 0
    """Tokens before a prefix hit that rebuild all rings, approximately; 0: the model has no rings."""

    @abstractmethod
    def tensors(self) -> Iterable[TensorSpec]:
        """Every tensor of the checkpoint that forward uses."""

    @abstractmethod
    def states(self) -> Iterable[StateSpec]:
        """Every cache, in a fixed order."""

    @abstractmethod
    def load(self, weights: Mapping[str, Weight]) -> None:
        """Take the tensors, by name. Called once, before the first forward."""

    @abstractmethod
    def forward(self, batch: Batch, caches: Mapping[str, Cache]) -> Tensor:
        """Run the tokens, write their caches, return float32 logits [M, vocab] of `batch.wanted`."""

    def ignored(self, name: str) -> bool:
        """Whether a tensor of the checkpoint may be left unread (weights of a part that was not asked for)."""
        return False


def build_model(factory: Any, config: Mapping[str, Any], ops: Ops, context: ModelContext) -> Model:
    """Call a model factory, or raise TypeError when it gives something else."""
    model = factory(config, ops, context)
    if not isinstance(model, Model):
        raise TypeError(f"{factory!r} gave a {type(model).__name__}, not a headrace.modeling.Model")
    return model

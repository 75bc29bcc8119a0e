"""The `toy` backend: `model = "toy://vocab=512,seed=0,kv=slots"`, no weights, no library, for tests and examples.

Light on purpose: numpy and the executors come in only when a pipeline opens one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError, did_you_mean
from headrace.types import BuildContext, Fit, MachineInfo, ModelSource, Reject

if TYPE_CHECKING:
    from headrace.contracts import Executor
    from headrace.testing.toy_options import ToyOptions

SCHEME = "toy://"

_MODEL_KEYS = {"vocab": int, "seed": int, "context": int, "repeat": float, "eos_rate": float, "fast": int}
_KV_KEYS = {"kv": str, "blocks": int, "block_tokens": int, "slots": int, "slot_tokens": int}
_RING_KEYS = {"window": int, "slack": int, "snapshots": int, "replay": int}


def resolve(uri: str) -> ModelSource | None:
    """`toy://key=value,...`; any key may be left out. Other schemes: None. Raises ModelError."""
    if not uri.startswith(SCHEME):
        return None
    keys = _MODEL_KEYS | _KV_KEYS | _RING_KEYS
    facts: dict[str, Any] = {}
    for part in filter(None, uri.removeprefix(SCHEME).split(",")):
        key, _, value = part.partition("=")
        if key not in keys:
            raise ModelError(
                "HR-TOY-01", f"unknown key '{key}' in '{uri}'", f"{did_you_mean(key, keys)}known: {', '.join(keys)}."
            )
        try:
            facts[key] = keys[key](value)
        except ValueError:
            raise ModelError(
                "HR-TOY-01", f"{part!r} in '{uri}' is no {keys[key].__name__}", f"write {key}=<number>"
            ) from None
    _check(uri, facts)
    return ModelSource(uri=uri, path="", format="toy", facts=facts)


def _check(uri: str, facts: dict[str, Any]) -> None:
    limits = {
        "vocab": (258, 2**20), "seed": (0, 2**64 - 1), "context": (2, 2**24), "repeat": (0, 1), "eos_rate": (0, 1),
        "fast": (0, 1), "blocks": (1, 2**20), "block_tokens": (1, 4096), "slots": (1, 4096), "slot_tokens": (2, 2**24),
        "window": (2, 4096), "slack": (0, 4096), "snapshots": (0, 4096), "replay": (0, 2**24),
    }  # fmt: skip
    for key, (low, high) in limits.items():
        if key in facts and not low <= facts[key] <= high:
            raise ModelError("HR-TOY-01", f"{key}={facts[key]} in '{uri}' is out of range", f"from {low} to {high}")
    if facts.get("kv", "paged") not in ("paged", "slots"):
        raise ModelError("HR-TOY-01", f"kv={facts['kv']} in '{uri}' is unknown", "write kv=paged or kv=slots")


def probe(machine: MachineInfo, source: ModelSource) -> Fit | Reject:
    if source.format != "toy":
        return Reject(f"model is {source.format}", 'write model = "toy://vocab=512"')
    return Fit(10, "toy models run anywhere", {"context_tokens": source.facts.get("context", 4096)})


def open_executor(source: ModelSource, options: ToyOptions, context: BuildContext) -> Executor:
    """Build the executor that the URI and the options describe (options win); it is not opened."""
    from headrace.testing.toy import ToyModel, ToyPaged, ToySlots

    chosen = {**source.facts, **options.model_dump(exclude_none=True)}
    facts = {key: chosen[key] for key in _MODEL_KEYS if key in chosen}
    model = ToyModel(**facts | {"fast": bool(facts.get("fast", False))})
    common: dict[str, Any] = {
        "max_rows": context.engine.max_sequences,
        "max_tokens": context.engine.max_batch_tokens,
        "uri": source.uri,
    }
    rings = _rings(source.uri, chosen)
    if chosen.get("kv", "paged") == "slots":
        return ToySlots(
            model,
            n_slots=chosen.get("slots", context.engine.max_sequences),
            slot_tokens=chosen.get("slot_tokens", model.context),
            partial_trim=chosen.get("partial_trim", True),
            fork=chosen.get("fork", True),
            **common,
        )
    size = chosen.get("block_tokens", context.engine.block_tokens)
    return ToyPaged(model, n_blocks=chosen.get("blocks", 16384 // size), block_tokens=size, **common, **rings)


def _rings(uri: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a toy with a sliding window: snapshots of it by default, replay where that is set."""
    window = chosen.get("window", 0)
    if not window or chosen.get("kv") == "slots":
        for key in _RING_KEYS:
            if chosen.get(key):
                why = "kv=slots has no rings" if window else "there is no window"
                raise ModelError("HR-TOY-02", f"{key}={chosen[key]} for '{uri}', but {why}", "set window, and kv=paged")
        return {}
    replay = chosen.get("replay", 0)
    return {
        "window": window,
        "slack": chosen.get("slack", 8),
        "n_snapshots": chosen.get("snapshots", 0 if replay else 32),
        "replay_tokens": replay,
    }

"""What an option says is what llama.cpp is told: each one, seen where it crosses into the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_driver import Driver, Row

from headrace.types import SamplingParams
from headrace_gguf.llama import KV_TYPES, library

pytestmark = pytest.mark.gguf

DEFAULT: dict[str, Any] = {"slots": 2, "context_tokens": 256, "batch_tokens": 64, "threads": 1}

# options -> fields of llama.cpp's parameters
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"n_ctx": 512, "n_seq_max": 2, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}),
    ({"slots": 3, "context_tokens": 300}, {"n_ctx": 1536, "n_seq_max": 3}),
    ({"threads": 2, "batch_threads": 3}, {"n_threads": 2, "n_threads_batch": 3}),
    ({"ubatch_tokens": 32}, {"n_ubatch": 32, "n_batch": 64}),
    ({"kv_type": "bf16"}, {"type_k": KV_TYPES["bf16"], "type_v": KV_TYPES["bf16"]}),
    ({"kv_type": "f32", "kv_type_v": "bf16"}, {"type_k": KV_TYPES["f32"], "type_v": KV_TYPES["bf16"]}),
    ({"flash_attention": "auto"}, {"flash_attn_type": -1}),
    ({"flash_attention": "off"}, {"flash_attn_type": 0}),
    ({"flash_attention": "on"}, {"flash_attn_type": 1}),
    ({"gpu_layers": 0}, {"n_gpu_layers": 0}),
    ({"mmap": True, "mlock": False}, {"load_mode": 1}),
    ({"mmap": False, "mlock": False}, {"load_mode": 0}),
    ({"mmap": True, "mlock": True}, {"load_mode": 3}),
]


@pytest.mark.parametrize(("options", "told"), CASES)
def test_parameters(
    tiny: Callable[..., str], opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, options: Any, told: Any
) -> None:
    c, seen = library().c, {}

    def record(name: str) -> None:
        real = getattr(c, name)

        def call(first: Any, params: Any) -> Any:
            seen.update({field: getattr(params, field) for field, *_ in params._fields_})
            return real(first, params)

        monkeypatch.setattr(c, name, call)

    record("llama_model_load_from_file")
    record("llama_init_from_model")
    opened(tiny(), **{**DEFAULT, **options})
    assert {name: seen[name] for name in told} == told


SAMPLER: dict[str, Any] = {"temperature": 0.5, "top_p": 1.0, "seed": 5}

# native_sampler options, request -> samplers of the chain and their arguments; None: not compared
CHAINS: list[tuple[dict[str, Any], dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    ({}, {}, {"temp": (0.5,), "dist": (5,)}),
    ({}, {"temperature": 0}, {"greedy": ()}),
    ({}, {"seed": 9, "top_k": 7}, {"top_k": (7,), "temp": (0.5,), "dist": (9,)}),
    ({}, {"top_p": 0.75}, {"top_p": (0.75, 1), "temp": (0.5,), "dist": (5,)}),
    ({}, {"min_p": 0.25}, {"min_p": (0.25, 1), "temp": (0.5,), "dist": (5,)}),
    ({}, {"typical_p": 0.5}, {"typical": (0.5, 1), "temp": (0.5,), "dist": (5,)}),
    ({}, {"repetition_penalty": 1.5}, {"penalties": (None, 64, 1.5, 0.0, 0.0), "temp": (0.5,), "dist": (5,)}),
    (
        {"penalty_last_n": 9},
        {"frequency_penalty": 0.25, "presence_penalty": 0.5},
        {"penalties": (None, 9, 1.0, 0.25, 0.5), "temp": (0.5,), "dist": (5,)},
    ),
    ({"top_n_sigma": 1.5}, {}, {"top_n_sigma": (1.5,), "temp": (0.5,), "dist": (5,)}),
    (
        {"xtc_probability": 0.5, "xtc_threshold": 0.25},
        {},
        {"xtc": (0.5, 0.25, 1, 5), "temp": (0.5,), "dist": (5,)},
    ),
    (
        {"dry_multiplier": 0.5, "dry_base": 1.25, "dry_allowed_length": 3, "dry_last_n": 17,
         "dry_sequence_breakers": ["a", "b", "c"]},
        {},
        {"dry": (None, 0.5, 1.25, 3, 17, None, 3), "temp": (0.5,), "dist": (5,)},
    ),
    (
        {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.25},
        {},
        {"temp": (0.5,), "mirostat": (None, 5, 3.0, 0.25, 100)},
    ),
    ({"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.25}, {}, {"temp": (0.5,), "mirostat_v2": (5, 3.0, 0.25)}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "request_", "told"), CHAINS)
def test_the_native_chain(
    tiny: Callable[..., str],
    opened: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    options: Any,
    request_: Any,
    told: Any,
) -> None:
    driver = Driver(opened(tiny(), sampler="native", native_sampler=options))
    driver.params[0] = SamplingParams(**{**SAMPLER, **request_})
    c, seen = library().c, {}

    def record(name: str) -> None:
        real = getattr(c, f"llama_sampler_init_{name}")

        def call(*args: Any) -> Any:
            seen[name] = args
            return real(*args)

        monkeypatch.setattr(c, f"llama_sampler_init_{name}", call)

    for name in dir(c):
        if name.startswith("llama_sampler_init_"):
            record(name.removeprefix("llama_sampler_init_"))
    driver.step([Row(0, 0, [1, 2, 3])])
    assert list(seen) == list(told), "the samplers, in their order"
    for name, args in told.items():
        shown = tuple(None if wanted is None else given for given, wanted in zip(seen[name], args, strict=True))
        assert shown == args, name


def test_the_models_own_mirostat_holds(tiny: Callable[..., str], opened: Callable[..., Any]) -> None:
    path = tiny(general__sampling__mirostat=2, general__sampling__mirostat_tau=3.5)
    chosen = opened(path, sampler="native", native_sampler={"mirostat_eta": 0.5})._native_options
    assert (chosen["mirostat"], chosen["mirostat_tau"], chosen["mirostat_eta"]) == (2, 3.5, 0.5)

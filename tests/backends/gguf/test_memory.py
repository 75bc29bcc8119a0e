"""Slots, context and memory are settled before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
from gguf_driver import MACHINE
from gguf_writer import F32, I32, U32, File, Tensor, array, key, sound_keys

from headrace.errors import ConfigError, ModelError
from headrace.types import EngineOptions
from headrace_gguf.facts import KV_TYPE_BYTES, read_facts
from headrace_gguf.llama import KV_TYPES
from headrace_gguf.memory import resolve
from headrace_gguf.options import GGUFOptions, KVType


@pytest.fixture
def facts(tmp_path):
    """A model with 4 KiB of f16 KV per token and 8192 positions."""
    entries = sound_keys() | {
        "llama.context_length": key("llama.context_length", U32, 8192),
        "llama.block_count": key("llama.block_count", U32, 16),
        "llama.attention.key_length": key("llama.attention.key_length", U32, 32),
        "llama.attention.value_length": key("llama.attention.value_length", U32, 32),
    }
    return read_facts(File(keys=entries).write(tmp_path / "m.gguf"))


def shape_of(facts, *, memory: int = 8 << 30, cores: int = 3, gpu: bool = False, engine=None, **options):
    machine = replace(MACHINE, available_memory_bytes=memory, physical_cores=cores)
    return resolve(facts, GGUFOptions.model_validate(options), engine or EngineOptions(), machine, gpu)


def test_every_kv_type_has_a_size_and_a_number():
    assert set(get_args(KVType)) == set(KV_TYPE_BYTES) == set(KV_TYPES)


def test_defaults(facts):
    assert facts.kv_bytes_per_token("f16", "f16") == 4096
    shape = shape_of(facts)
    assert (shape.context_tokens, shape.slots, shape.threads, shape.batch_threads) == (4096, 8, 3, 3)
    assert (shape.gpu_layers, shape.batch_tokens, shape.type_k, shape.type_v) == (0, 2048, "f16", "f16")
    assert shape_of(facts, gpu=True).gpu_layers == -1
    assert shape_of(facts, gpu=True, memory=1000).context_tokens == 4096
    assert shape_of(facts, threads=1, batch_threads=2).batch_threads == 2


def test_automatic_slots_take_a_quarter_of_the_memory_at_most(facts):
    kv = 4096 * 4096
    assert shape_of(facts, memory=4 * 8 * kv).slots == 8
    assert shape_of(facts, memory=4 * 8 * kv - 4).slots == 4
    assert shape_of(facts, memory=4 * 2 * kv).slots == 2
    assert shape_of(facts, engine=EngineOptions(max_sequences=2)).slots == 2


def test_automatic_context_shrinks_until_it_fits(facts):
    shape = shape_of(facts, memory=10 << 20, slots=1, ubatch_tokens=32)
    assert 256 <= shape.context_tokens < 4096
    assert shape.needed_bytes <= 10 << 20


def test_what_does_not_fit_is_told_before_the_load(facts):
    with pytest.raises(ModelError) as raised:
        shape_of(facts, memory=100 << 20, slots=8, context_tokens=8192)
    error = raised.value
    assert error.code == "HR-MEMORY-01"
    found = re.search(r"8 slots of 8192 tokens needs 0\.2\d GiB, 0\.10 GiB are available", error.message)
    assert found, error.message
    largest = int(re.search(r"largest context that fits is (\d+)", error.message)[1])
    assert error.help == f"set context_tokens = {largest}, or fewer slots (now 8)"
    shape_of(facts, memory=100 << 20, slots=8, context_tokens=largest)
    with pytest.raises(ModelError):
        shape_of(facts, memory=100 << 20, slots=8, context_tokens=largest + 256)
    with pytest.raises(ModelError, match="the weights alone take"):
        shape_of(facts, memory=1000)


def test_options_that_can_not_be(facts):
    with pytest.raises(ConfigError, match=r"gpu_layers = 5, but this llama.cpp has no GPU support"):
        shape_of(facts, gpu_layers=5)
    assert shape_of(facts, gpu_layers=0).gpu_layers == 0
    assert shape_of(facts, gpu_layers=5, gpu=True).gpu_layers == 5
    with pytest.raises(ConfigError, match=r"context_tokens = 8193, but .* trained for 8192"):
        shape_of(facts, context_tokens=8193)
    with pytest.raises(ConfigError, match="value cache of type q8_0 needs flash attention"):
        shape_of(facts, kv_type="q8_0", flash_attention="off")
    with pytest.raises(ValueError, match="set sampler ="):
        GGUFOptions.model_validate({"native_sampler": {"mirostat": 2}})


def test_smaller_kv_types_take_less(facts):
    f16, q8 = shape_of(facts), shape_of(facts, kv_type="q8_0")
    assert q8.needed_bytes < f16.needed_bytes


def test_layers_without_attention_hold_no_kv(tmp_path):
    entries = sound_keys() | {
        "llama.block_count": key("llama.block_count", U32, 3),
        "x": array("llama.attention.head_count_kv", I32, [0, 2, 0]),
    }
    hybrid = read_facts(File(keys=entries).write(tmp_path / "m.gguf"))
    assert hybrid.kv_elements == (8, 8)


def test_explain_says_what_is_not_used(tmp_path):
    entries = sound_keys() | {
        "x": key("general.sampling.mirostat", I32, 2),
        "y": key("general.sampling.temp", F32, 0.5),
    }
    model = read_facts(File(keys=entries, tensors=[Tensor()]).write(tmp_path / "m.gguf"))
    shape = shape_of(model)
    assert "mirostat = 2" in shape.describe(model, GGUFOptions())["not used"]
    assert "not used" not in shape.describe(model, GGUFOptions(sampler="native"))

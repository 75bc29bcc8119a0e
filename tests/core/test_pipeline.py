"""Building pipelines: which backend wins and why, what is refused, and what is closed when a step fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from plugin_text import plugin_module

from headrace.catalog import Catalog
from headrace.config import load_config
from headrace.contracts import ConstraintEngine, Drafter, Observer
from headrace.engine import Engine
from headrace.errors import ConfigError, HeadraceError, ModelError, PluginError
from headrace.kvspace import PagedSpace, SlotSpace
from headrace.options import Options
from headrace.pipeline import Decision, build, explain
from headrace.testing.toy import ToyConstraint, ToyModel, ToyOracle, ToyPaged, ToySlots
from headrace.types import (
    BuildContext,
    Capabilities,
    Fit,
    MachineInfo,
    ModelSource,
    ModelSpec,
    Reject,
    Request,
    SamplingParams,
)

PLUGIN = """
from headrace.types import ModelSource

@hookimpl
def headrace_resolve(uri):
    if uri.startswith("fake://"):
        return ModelSource(uri=uri, path="", format=uri.removeprefix("fake://"))

@hookimpl
def headrace_backends():
    common = dict(formats=("fake",), probe="fake_parts:probe", summary="")
    yield BackendSpec(name="fake", factory="fake_parts:Backend", options="fake_parts:BackendOptions", **common)
    yield BackendSpec(name="slow", factory="fake_parts:Slow", formats=("fake",), probe="fake_parts:slow", summary="")
    common |= dict(requires=("no_such",), install="pip install it")
    yield BackendSpec(name="lacking", factory="fake_parts:Slow", **common)

@hookimpl
def headrace_drafters():
    yield DrafterSpec(name="oracle", factory="fake_parts:oracle", summary="")
    yield DrafterSpec(name="fused", factory="fake_parts:oracle", placement="fused", summary="")
    yield DrafterSpec(name="broken", factory="fake_parts:broken", summary="")
    yield DrafterSpec(name="wrong", factory="fake_parts:wrong", summary="")

@hookimpl
def headrace_constraints():
    yield ConstraintSpec(name="masks", kinds=("choice",), factory="fake_parts:constraint", summary="")

@hookimpl
def headrace_observers():
    yield ObserverSpec(name="watch", factory="fake_parts:Watch", options="fake_parts:WatchOptions", summary="")

@hookimpl
def headrace_stores():
    yield StoreSpec(name="memory", factory="fake_parts:wrong", summary="")

@hookimpl
def headrace_strategies():
    yield StrategySpec(name="dp", axis="dp", factory="fake_parts:wrong", summary="")
"""


class BackendOptions(Options):
    context: int = 64
    kv: str = "paged"


class WatchOptions(Options):
    level: int = 1


class Fake:
    """What the fake plugin's objects are made of; a test changes it before it builds."""

    def __init__(self) -> None:
        self.caps: dict[str, Any] = {}
        self.answer: Callable[[MachineInfo, ModelSource], Any] = lambda machine, source: Fit(5, "fits", {"eos": [1]})
        self.slow_answer: Any = Fit(1, "slowly")
        self.log: list[str] = []
        self.open_error: Exception | None = None
        self.context: BuildContext | None = None
        self.model: dict[str, Any] = {}

    def backend(self, source: ModelSource, options: BackendOptions, context: BuildContext) -> Any:
        fake, self.context = self, context
        base: Any = ToyPaged if options.kv == "paged" else ToySlots

        class Backend(base):
            caps: Capabilities
            model: ModelSpec

            def open(self) -> None:
                fake.log.append("open")
                if fake.open_error is not None:
                    raise fake.open_error
                super().open()
                self.caps = replace(self.caps, **fake.caps)
                self.model = replace(self.model, **fake.model)

            def close(self) -> None:
                fake.log.append("close")
                super().close()

        return Backend(ToyModel(context=options.context))

    def watch(self, options: WatchOptions) -> Observer:
        fake = self

        class Watch(Observer):
            level = options.level

            def close(self) -> None:
                fake.log.append("observer closed")

        return Watch()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    parts = ModuleType("fake_parts")
    vars(parts).update(
        Backend=fake.backend,
        Slow=lambda source, options, context: fake.backend(source, BackendOptions(), context),
        probe=lambda machine, source: fake.answer(machine, source),
        slow=lambda machine, source: fake.slow_answer,
        BackendOptions=BackendOptions,
        WatchOptions=WatchOptions,
        Watch=fake.watch,
        oracle=lambda options, model: ToyOracle(lambda tokens, n: tokens[:n]),
        constraint=lambda options, tokenizer: ToyConstraint(tokenizer),
        broken=lambda options, model: 1 / 0,
        wrong=lambda *args: "not a drafter",
    )
    monkeypatch.setitem(sys.modules, "fake_parts", parts)
    return fake


@pytest.fixture
def catalog(fake: Fake) -> Catalog:
    return Catalog.load(extra={"fake": plugin_module(PLUGIN)})


def decisions(catalog: Catalog, *sets: str, model: str = "fake://fake") -> dict[str, Decision]:
    return {each.key: each for each in explain(load_config(None, model=model, sets=sets), catalog)}


def refused(catalog: Catalog, *sets: str, model: str = "fake://fake") -> HeadraceError:
    with pytest.raises(HeadraceError) as raised:
        build(load_config(None, model=model, sets=sets), catalog=catalog)
    return raised.value


# --- what is built ---------------------------------------------------------------------------------------------------


def test_everything_is_bound(catalog: Catalog, fake: Fake) -> None:
    fake.model = {"sampling_defaults": {"temperature": 0.3, "top_k": 7}}
    sets = ["drafter.use=oracle", "constraints.use=masks", "observers.w.use=watch", "observers.w.level=3",
            "sampling.top_k=9", "backend.context=32", "engine.max_sequences=2"]  # fmt: skip
    config = load_config(None, model="fake://fake", sets=sets)
    with build(config, catalog=catalog) as pipeline:
        assert pipeline.config is config
        assert isinstance(pipeline.kv, PagedSpace)
        assert isinstance(pipeline.drafter, Drafter)
        assert isinstance(pipeline.constraints, ConstraintEngine)
        assert [observer.level for observer in pipeline.observers] == [3]  # type: ignore[attr-defined]
        assert pipeline.sampling_defaults == {"temperature": 0.3, "top_k": 9}
        assert pipeline.model.context_tokens == 32
        assert fake.context is not None
        assert fake.context.engine.max_sequences == 2
        engine = pipeline.engine()
        assert isinstance(engine, Engine)
        assert engine.drafter is pipeline.drafter
    assert fake.log == ["open", "close"]


def test_constraints_are_served_without_being_asked_for(catalog: Catalog, fake: Fake) -> None:
    def made(*sets: str) -> ConstraintEngine | None:
        with build(load_config(None, model="fake://fake", sets=sets), catalog=catalog) as pipeline:
            return pipeline.constraints

    assert type(made()).__module__.startswith("headrace_plugins.")
    assert isinstance(made("constraints.use=masks"), ToyConstraint)
    assert made("constraints.use=none") is None
    fake.caps = {"masks": False}
    assert made() is None, "nobody asked for it, so a backend without masks is no error"
    assert decisions(catalog)["constraints"].value == "auto", "masks may be what only open() can tell"


def test_slots_get_a_slot_space(catalog: Catalog) -> None:
    with build(load_config(None, model="fake://fake", sets=["backend.kv=slots"]), catalog=catalog) as pipeline:
        assert isinstance(pipeline.kv, SlotSpace)


def test_progress_reaches_the_backend(catalog: Catalog, fake: Fake) -> None:
    seen: list[Any] = []
    build(load_config(None, model="fake://fake"), catalog=catalog, report=lambda *a: seen.append(a)).close()
    assert fake.context is not None
    fake.context.report("read", 0.5)
    assert seen == [("read", 0.5)]


def test_no_hook_is_called_once_it_is_built(catalog: Catalog) -> None:
    calls: list[str] = []
    with build(load_config(None, model="fake://fake"), catalog=catalog) as pipeline:
        stop = catalog.manager.add_hookcall_monitoring(lambda name, *_: calls.append(name), lambda *_: None)
        engine = pipeline.engine()
        (seq,) = engine.add(Request(id="r", prompt_ids=(70, 71, 72), params=SamplingParams(max_tokens=5).resolved()))
        while engine.has_work():
            engine.step()
        engine.close()
        assert not calls
        catalog.resolve("fake://x")
        stop()
    assert calls, "the monitor sees nothing"
    assert seq.finish_reason


# --- selection -------------------------------------------------------------------------------------------------------


def test_the_best_score_wins_and_the_others_keep_their_reasons(catalog: Catalog) -> None:
    backend = decisions(catalog)["backend"]
    assert (backend.value, backend.plugin) == ("fake", "fake (in-process)")
    assert "best score, 5: fits" in backend.why
    reasons = dict(backend.rejected)
    assert reasons["slow"] == "score 1 < 5: slowly"
    assert reasons["lacking"] == "needs no_such, not installed"
    assert reasons["toy"] == "reads toy; the model is fake"
    assert backend.facts["verified on"] == "UNVERIFIED on any hardware"


def test_ties_go_by_name(catalog: Catalog, fake: Fake) -> None:
    fake.slow_answer = Fit(5, "as well")
    assert decisions(catalog)["backend"].value == "fake"


def test_a_named_backend_is_the_only_one_asked(catalog: Catalog, fake: Fake) -> None:
    fake.answer = lambda machine, source: 1 / 0
    backend = decisions(catalog, "backend.use=slow")["backend"]
    assert backend.value == "slow"
    assert "(--set backend.use=slow): slowly" in backend.why
    assert dict(backend.rejected)["fake"] == "not asked: the config chose 'slow'"


def test_options_of_an_automatic_backend_are_checked(catalog: Catalog) -> None:
    error = refused(catalog, "backend.contxt=3")
    assert error.message == "unknown key 'backend.contxt' (--set backend.contxt=3)"
    assert "backend 'fake' accepts: context, kv" in error.help


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda machine, source: Reject("too old", "buy a new one"), "fake: too old"),
        (lambda machine, source: 1 / 0, "fake: its probe failed with ZeroDivisionError"),
        (lambda machine, source: "yes", "fake: its probe answered 'yes'"),
    ],
)
def test_no_backend_fits(catalog: Catalog, fake: Fake, answer: Any, reason: str) -> None:
    fake.answer, fake.slow_answer = answer, Reject("too slow")
    error = refused(catalog)
    assert isinstance(error, ModelError)
    assert reason in error.message
    assert "slow: too slow" in error.message
    assert "pip install it" in error.help
    error = refused(catalog, "backend.use=fake")
    assert error.message.startswith("backend 'fake' (--set backend.use=fake) can't serve fake://fake: ")
    assert "slow" not in error.message


def test_a_damaged_model_ends_the_build(catalog: Catalog, fake: Fake) -> None:
    def damaged(machine: MachineInfo, source: ModelSource) -> Fit:
        raise ModelError("HR-X-01", "the file is cut off")

    fake.answer = damaged
    assert refused(catalog).code == "HR-X-01"


def test_a_format_that_nobody_reads_names_the_extra(catalog: Catalog) -> None:
    without = catalog.without([each.name for each in catalog.plugins if each.name == "gguf"])
    error = refused(without, model="fake://gguf")
    assert "(format gguf)" in error.message
    assert error.help.startswith("pip install 'headrace[gguf]'")


def test_a_backend_of_another_format_names_those_that_read_it(catalog: Catalog) -> None:
    error = refused(catalog, "[backend]\nuse = 'toy'", model="fake://fake")
    assert error.help == "leave 'backend.use' out, or name one that reads fake: fake, lacking, slow"


def test_two_backends_of_one_name(fake: Fake) -> None:
    text = PLUGIN.partition("@hookimpl\ndef headrace_drafters")[0]
    modules = {name: plugin_module(text, name) for name in "ab"}
    error = refused(Catalog.load(extra=modules))
    assert error.code == "HR-PLUGIN-04"
    assert "'a' (in-process) and 'b' (in-process)" in error.message


def test_plugins_of_the_config_are_disabled(catalog: Catalog) -> None:
    assert "fake://" in refused(catalog, 'plugins.disable=["fake"]').message
    error = refused(catalog, 'plugins.disable=["fak"]')
    assert (error.code, "did you mean 'fake'" in error.help) == ("HR-PLUGIN-08", True)


# --- what can't be served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "sets", "message"),
    [
        ({"row_invariant": False}, ["determinism=batch-invariant"], "determinism = 'batch-invariant' (--set"),
        ({"drafts": False}, ["drafter.use=oracle"], "[drafter] use = 'oracle' (--set drafter.use=oracle) can't be"),
        ({"partial_trim": False}, ["drafter.use=oracle"], "can't take back rejected drafts"),
        ({}, ["drafter.use=fused"], "backend 'fake' can't fuse it"),
        ({"masks": False}, ["constraints.use=masks"], "backend 'fake' takes no token masks"),
        (
            {"refuses": {"min_p": "not in this chain"}},
            ["sampling.min_p=0.1"],
            "sampling.min_p (--set sampling.min_p=0.1)",
        ),
    ],
)
def test_what_the_executor_lacks_is_an_error(
    catalog: Catalog, fake: Fake, caps: dict[str, Any], sets: list[str], message: str
) -> None:
    fake.caps = caps
    error = refused(catalog, *sets)
    assert isinstance(error, ConfigError)
    assert error.code == "HR-CONFIG-10"
    assert message in error.message
    assert error.help
    assert fake.log == ["open", "close"]
    if caps:
        fake.caps = {}
        build(load_config(None, model="fake://fake", sets=sets), catalog=catalog).close()


def test_explain_refuses_what_is_foreseen(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="can't fuse it"):
        explain(load_config(None, model="fake://fake", sets=["drafter.use=fused"]), catalog)


def test_alternatives_are_listed(catalog: Catalog, fake: Fake) -> None:
    fake.caps = {"row_invariant": False, "drafts": False, "fused_drafters": frozenset({"fused"})}
    error = refused(catalog, "determinism=batch-invariant", "drafter.use=oracle")
    assert isinstance(error, ConfigError)
    invariance, drafter = error.problems
    assert "up to near ties, or try another backend: " in invariance.help
    assert "slow" in invariance.help
    assert not any(name in invariance.help for name in ("gguf", "toy")), "they read other formats"
    assert "has its own: fused" in drafter.help
    fake.caps = {"fused_drafters": frozenset({"fused"})}
    build(load_config(None, model="fake://fake", sets=["drafter.use=fused"]), catalog=catalog).close()


def test_stores_and_splits_are_refused_before_the_load(catalog: Catalog, fake: Fake) -> None:
    error = refused(catalog, "store.use=memory", "parallel.attention.use=dp")
    assert isinstance(error, ConfigError)
    assert [each.message.partition("]")[0] for each in error.problems] == ["[parallel.attention", "[store"]
    assert fake.log == []


# --- failing steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "kind", "message"),
    [
        (
            ["drafter.use=broken"],
            PluginError,
            "drafter 'broken' of plugin 'fake' (in-process) could not be made: ZeroDiv",
        ),
        (["drafter.use=wrong"], PluginError, "gave a str, not a Drafter"),
    ],
)
def test_factories_that_fail(
    catalog: Catalog, fake: Fake, sets: list[str], kind: type[HeadraceError], message: str
) -> None:
    error = refused(catalog, *sets)
    assert isinstance(error, kind)
    assert message in error.message
    assert fake.log == ["open", "close"]


def test_a_failing_open_is_closed(catalog: Catalog, fake: Fake) -> None:
    fake.open_error = OSError("no such device")
    error = refused(catalog)
    assert isinstance(error, ModelError)
    assert "backend 'fake' could not load fake://fake: OSError: no such device" in error.message
    assert fake.log == ["open", "close"]
    fake.open_error = ModelError("HR-X-02", "typed")
    assert refused(catalog).code == "HR-X-02"


def test_observers_are_closed_in_reverse(catalog: Catalog, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.pipeline._make_kv", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(load_config(None, model="fake://fake", sets=["observers.w.use=watch"]), catalog=catalog)
    assert fake.log == ["open", "observer closed", "close"]


# --- explaining ------------------------------------------------------------------------------------------------------


def test_explain_says_where_each_value_came_from(catalog: Catalog, fake: Fake) -> None:
    facts = {"context": 9, "sampling_defaults": {"top_k": 3, "top_p": 0.5}}
    fake.answer = lambda machine, source: Fit(5, "fits", facts)
    found = decisions(
        catalog, "sampling.top_p=0.9", "engine.max_waiting=3", "engine.max_sequences=5000", "drafter.use=oracle"
    )
    assert found["model"].facts["context"] == 9
    assert (found["sampling.top_p"].value, found["sampling.top_p"].why) == ("0.9", "config (--set sampling.top_p=0.9)")
    assert (found["sampling.top_k"].value, found["sampling.top_k"].why) == ("3", "the model's metadata")
    assert found["sampling.min_p"].why == "Headrace's default"
    assert found["engine.max_waiting"].why == "config (--set engine.max_waiting=3)"
    assert "at most 64" in found["engine.max_sequences"].why
    assert found["engine.block_tokens"].why == "default"
    assert found["drafter"].value == "oracle"
    assert ("ngram", "the config chose 'oracle'") in found["drafter"].rejected
    assert (found["constraints"].value, found["constraints"].why) == ("auto", "default")
    assert ("masks", "no [constraints] table asks for it") in found["constraints"].rejected
    assert fake.log == ["close"]


def test_explain_admits_near_ties(catalog: Catalog, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "near ties" not in str(decisions(catalog)["determinism"].facts)
    monkeypatch.setattr(fake, "backend", None)
    sys.modules["fake_parts"].Backend = lambda *_: ToyPaged(ToyModel(), row_invariant=False)  # type: ignore[attr-defined]
    assert "identical up to near ties" in str(decisions(catalog)["determinism"].facts)


def test_the_toy_backend() -> None:
    with build(load_config(None, model="toy://vocab=300,kv=slots", sets=["drafter.use=ngram"])) as pipeline:
        assert isinstance(pipeline.kv, SlotSpace)
        assert pipeline.model.vocab_size == 300

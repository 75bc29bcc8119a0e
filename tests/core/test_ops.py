"""Ops: which kernel is bound and why, what is refused, and what the op declarations say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from plugin_text import plugin_module

from headrace.catalog import Catalog
from headrace.config import load_config
from headrace.errors import ConfigError, HeadraceError, ModelError, PluginError
from headrace.hooks import KernelSpec
from headrace.ops import OPS, BoundOp, Candidate, KernelContext, Ops, bind, kernel_problem
from headrace.pipeline import build, explain
from headrace.testing.conformance import PluginConformance
from headrace.testing.conformance._op_text import bind as bind_shape
from headrace.testing.conformance._op_text import read
from headrace.testing.toy import ToyModel, ToyPaged
from headrace.types import BuildContext, Capabilities, Fit

CPU = KernelContext(device="cpu")
EXACT = KernelContext(device="cpu", exact=True)


def norm(x: Any, weight: Any, eps: float) -> Any:
    return ("norm", x, weight, eps)


def topk(scores: Any, k: int) -> Any:
    return ("topk", scores, k)


KERNELS: Mapping[str, Callable[..., Any]] = {"norm.rms": norm, "index.topk": topk}


def offer(
    name: str, op: str = "norm.rms", priority: int = 0, *, kernel: Any = None, when: Any = None,
    source: str = "lab 1.0", missing: tuple[str, ...] = (), **facts: Any,
) -> Candidate:  # fmt: skip
    """A candidate whose factory gives `kernel`; calling load("factory") or load("when") is what imports it."""
    objects = {"lab:make": lambda context: kernel or KERNELS[op], "lab:when": when}
    spec = KernelSpec(
        name=name, op=op, factory="lab:make", summary="", priority=priority, when="lab:when" if when else None, **facts
    )
    return Candidate(spec, source, objects.__getitem__, missing)


def refused(needed: tuple[str, ...], *offers: Candidate, context: KernelContext = CPU, **overrides: str) -> Any:
    with pytest.raises(HeadraceError) as caught:
        bind(needed, offers, context, {key.replace("_", "."): value for key, value in overrides.items()})
    return caught.value


# --- what is chosen --------------------------------------------------------------------------------------------------


def test_bound_kernels_are_called_by_group_and_verb() -> None:
    ops = bind(("norm.rms", "index.topk", "norm.rms"), [offer("a"), offer("b", "index.topk")], CPU)
    assert ops.norm.rms(1, 2, 3) == ("norm", 1, 2, 3)
    assert ops.index.topk("s", 4) == ("topk", "s", 4)
    assert [(each.op, each.kernel, each.source) for each in ops.bound] == [
        ("norm.rms", "a", "lab 1.0"), ("index.topk", "b", "lab 1.0"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("offers", "context", "override", "chosen", "reason", "rejected"),
    [
        ([offer("a")], CPU, None, "a", "the only one installed", ()),
        (
            [offer("a"), offer("b", priority=5)], CPU, None, "b",
            "the highest priority (5) that serves float32 on 'cpu'", (("a", "priority 0, lower"),),
        ),
        (
            [offer("b"), offer("a")], CPU, None, "a",
            "the highest priority (0) that serves float32 on 'cpu'", (("b", "priority 0, comes later by name"),),
        ),
        (
            [offer("a", exact=True), offer("b", priority=5)], EXACT, None, "a",
            "the highest priority (0) that serves exact float32 on 'cpu'", (("b", "not exact"),),
        ),
        (
            [offer("a"), offer("b", priority=5)], CPU, "a", "a", "the config chose it",
            (("b", "the config chose 'a'"),),
        ),
        (
            [offer("a"), offer("b", priority=5, when=lambda context: f"no {context.device}s")], CPU, None, "a",
            "the highest priority (0) that serves float32 on 'cpu'", (("b", "no cpus"),),
        ),
        (
            [offer("a"), offer("b", priority=5, when=lambda context: 1 / 0)], CPU, None, "a",
            "the highest priority (0) that serves float32 on 'cpu'",
            (("b", "its predicate failed with ZeroDivisionError: division by zero"),),
        ),
        (
            [offer("a"), offer("b", priority=5, when=lambda context: True)], CPU, None, "a",
            "the highest priority (0) that serves float32 on 'cpu'",
            (("b", "its predicate answered True instead of a text"),),
        ),
        (
            [offer("a"), offer("b", priority=5, missing=("triton",))], CPU, None, "a",
            "the highest priority (0) that serves float32 on 'cpu'", (("b", "needs triton, not installed"),),
        ),
        (
            [offer("a", when=lambda context: "")], CPU, None, "a", "the only one installed", (),
        ),
    ],
    ids=["one", "priority", "ties", "exact", "override", "when", "when-raises", "when-odd", "missing", "when-serves"],
)  # fmt: skip
def test_choice(
    offers: list[Candidate], context: KernelContext, override: str | None, chosen: str, reason: str, rejected: Any
) -> None:
    for order in (offers, offers[::-1]):
        ops = bind(("norm.rms",), order, context, {"norm.rms": override} if override else None)
        assert ops.bound == (BoundOp("norm.rms", chosen, "lab 1.0", reason, rejected),)


def test_only_what_is_chosen_is_imported() -> None:
    def never(target: str) -> Any:
        raise AssertionError(f"{target} was imported")

    losers = [Candidate(offer(name, priority=-1, when=True).spec, "lab", never) for name in "ab"]
    assert bind(("norm.rms",), [*losers, offer("c")], CPU).bound[0].kernel == "c"


def test_factories_and_predicates_see_the_context() -> None:
    context = KernelContext(device="npu", compute="bfloat16", exact=True, facts={"arch": "x"})
    seen: list[Any] = []
    spec = offer("a", exact=True, when=True).spec
    objects = {"lab:make": lambda it: seen.append(it) or norm, "lab:when": lambda it: seen.append(it) or ""}
    bind(("norm.rms",), [Candidate(spec, "lab", objects.__getitem__)], context)
    assert seen == [context, context]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_everything_that_nobody_serves_is_told_at_once() -> None:
    offers = [
        offer("plain", source="lab (headrace-lab 1.0)"),
        offer("fast", priority=3, missing=("triton",), exact=True, install="pip install lab[fast]"),
        offer("picky", when=lambda context: "wants 4 chips", exact=True),
    ]
    error = refused(("norm.rms", "index.topk", "kv.load"), *offers, context=EXACT)
    assert isinstance(error, ConfigError)
    assert [problem.code for problem in error.problems] == ["HR-OPS-01"] * 3
    first, second, third = (problem.message for problem in error.problems)
    assert first == (
        "no kernel serves op 'norm.rms' as exact float32 on 'cpu'; candidates: fast of lab 1.0 (needs triton, not "
        "installed); picky of lab 1.0 (wants 4 chips); plain of lab (headrace-lab 1.0) (not exact)"
    )
    assert error.problems[0].help == "pip install lab[fast]; determinism = 'seeded' takes kernels that are not exact"
    assert second == "no kernel serves op 'index.topk' as exact float32 on 'cpu'; candidates: none is installed"
    assert "'kv.load'" in third
    assert "headrace plugins list" in error.problems[2].help


def test_overrides_that_lead_nowhere() -> None:
    error = refused(("norm.rms",), offer("torch"), offer("other", "index.topk"), norm_rns="torch", norm_rms="tourch",
                    index_topk="oter")  # fmt: skip
    assert isinstance(error, ConfigError)
    assert [(problem.code, problem.help.partition("?")[0]) for problem in error.problems] == [
        ("HR-OPS-02", "did you mean 'norm.rms'"),
        ("HR-OPS-03", "did you mean 'torch'"),
        ("HR-OPS-03", "did you mean 'other'"),
    ]
    assert "kernel 'torch' was chosen for op 'norm.rns'" in error.problems[0].message


def test_an_override_is_never_a_downgrade() -> None:
    error = refused(("norm.rms",), offer("plain"), offer("slow", exact=True), context=EXACT, norm_rms="plain")
    assert error.code == "HR-OPS-04"
    assert "exact float32 on 'cpu': plain of lab 1.0 (not exact)" in error.message
    assert "slow" not in error.message
    assert "leave the choice for norm.rms out" in error.help
    error = refused(("norm.rms",), offer("plain", when=lambda context: "wants rain"), offer("slow"), norm_rms="plain")
    assert (error.code, "wants rain" in error.message) == ("HR-OPS-04", True)
    assert error.help == "leave the choice for norm.rms out"


def test_an_override_of_an_op_that_is_not_needed_is_fine() -> None:
    offers = [offer("a"), offer("b", "index.topk")]
    assert [each.op for each in bind(("norm.rms",), offers, CPU, {"index.topk": "b"}).bound] == ["norm.rms"]


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (lambda x, weight: None, "parameter 'eps' is missing"),
        (lambda x, eps, weight: None, "parameters are in another order"),
        (lambda x, weight, eps, more: None, "parameter 'more' has no default"),
        (lambda x, weight, *, eps: None, "parameter 'eps' is keyword-only"),
        (3, "gave a int, not a callable"),
    ],
)
def test_a_kernel_of_another_signature(kernel: Any, says: str) -> None:
    error = refused(("norm.rms",), offer("odd", kernel=kernel, source="lab (headrace-lab 1.0)"))
    assert (type(error), error.code) == (PluginError, "HR-OPS-05")
    assert "kernel 'odd' of op 'norm.rms', from plugin lab (headrace-lab 1.0)," in error.message
    assert says in error.message


def test_defaults_have_to_be_there() -> None:
    dense = OPS["linear.dense"]
    assert "'bias' has no default" in kernel_problem(dense, lambda x, weight, bias, wide: None)
    assert "'wide' defaults to True, not False" in kernel_problem(dense, lambda x, weight, bias=None, wide=True: None)
    assert kernel_problem(dense, lambda x, weight, bias=None, wide=False, fast=True: None) == ""
    assert kernel_problem(OPS["norm.rms"], lambda x, weight, eps=1e-6: None) == ""
    assert kernel_problem(dense, lambda *args, **kwargs: None) == ""
    assert kernel_problem(dense, max) == "", "a built-in one has no signature to judge by"


def test_a_factory_that_fails_names_its_plugin() -> None:
    def boom(context: KernelContext) -> Any:
        raise RuntimeError("no device")

    error = refused(("norm.rms",), Candidate(offer("a").spec, "lab (headrace-lab 1.0)", lambda target: boom))
    assert (type(error), error.code) == (PluginError, "HR-OPS-05")
    assert "lab (headrace-lab 1.0), could not be made: RuntimeError: no device" in error.message


def test_two_plugins_with_one_kernel() -> None:
    twins = [offer("a", source="lab 1.0"), offer("a", source="other 2.0")]
    error = refused(("norm.rms",), *twins)
    assert (error.code, "by lab 1.0 and other 2.0" in error.message) == ("HR-OPS-06", True)
    assert bind(("norm.rms",), [*twins, offer("b", priority=1)], CPU).bound[0].kernel == "b"


def test_an_op_that_does_not_exist() -> None:
    error = refused(("norm.rmss",), offer("a"))
    assert (type(error), error.code, "did you mean 'norm.rms'?" in error.help) == (PluginError, "HR-OPS-07", True)


# --- the frozen object -----------------------------------------------------------------------------------------------


def test_ops_are_frozen() -> None:
    ops = Ops(KERNELS)
    for owner, name in ((ops, "norm"), (ops.norm, "rms"), (ops.norm, "other")):
        with pytest.raises(AttributeError, match="bound once"):
            setattr(owner, name, norm)
    with pytest.raises(AttributeError, match="bound once"):
        del ops.norm.rms
    with pytest.raises(TypeError):
        OPS["mine.op"] = OPS["norm.rms"]  # type: ignore[index]


def test_an_op_that_was_not_bound_is_named() -> None:
    ops = Ops({"norm.rms": norm})
    with pytest.raises(AttributeError, match=r"op 'norm\.max' was not bound; the model must name it in `needs`"):
        ops.norm.max(1)
    with pytest.raises(AttributeError, match=r"op 'moe\.\*' was not bound"):
        ops.moe.route(1)
    assert not hasattr(ops, "__wrapped__")


# --- the declarations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_every_tensor_has_a_shape_in_the_text(name: str) -> None:
    contract = OPS[name]
    said = read(contract)
    parameters = contract.signature.parameters
    tensors = {key for key, each in parameters.items() if "Tensor" in each.annotation or "Weight" in each.annotation}
    assert tensors == set(said.inputs), "a shape for each, and for nothing else"
    gives = contract.signature.return_annotation
    n_results = 1 if said.like else len(said.results)
    assert n_results == (gives.count("Tensor") if "Tensor" in gives else 0)
    assert not said.like or said.like in parameters


def test_the_text_is_read() -> None:
    route, apply, mix = read(OPS["moe.route"]), read(OPS["rope.apply"]), read(OPS["mhc.mix"])
    assert [str(shape) for shape in route.inputs["bias"]] == ["[e] float32", "[n, e] float32"]
    assert [str(shape) for shape in route.results] == ["[n, top] int64", "[n, top] float32"]
    assert apply.like == "x"
    assert [str(shape) for shape in mix.results] == ["[n, s] float32", "[n, s] float32", "[n, s, s] float32"]
    known = {"h": 4, "r": 2}
    (shape,) = read(OPS["draft.confidence"]).inputs["weight"]
    assert bind_shape(shape, (1, 6), known) == ""
    assert "h + r is 6" in bind_shape(shape, (1, 7), known)
    (leading,) = read(OPS["norm.rms"]).inputs["x"]
    assert bind_shape(leading, (2, 3, 5), known) == ""
    assert (known["..."], known["d"]) == ((2, 3), 5)
    assert "is [9, 5]" in bind_shape(leading, (9, 5), known)


def test_an_op_is_shown_as_it_is_called() -> None:
    assert str(OPS["rope.apply"]) == "rope.apply(x, cos, sin, layout='pairs', inverse=False)"


# --- kernels and models of a catalog, in a pipeline ------------------------------------------------------------------

PLUGIN = """
from headrace.ops import bind, KernelContext
from headrace.testing.toy import ToyModel, ToyPaged
from headrace.types import Fit, ModelSource

@hookimpl
def headrace_resolve(uri):
    if uri.startswith("fake://"):
        return ModelSource(uri=uri, path="", format="fake")

@hookimpl
def headrace_backends():
    yield BackendSpec(name="fake", formats=("fake",), probe="ops_parts:probe", factory="ops_parts:Backend", summary="")

@hookimpl
def headrace_kernels(device):
    if device == "cpu":
        yield KernelSpec(name="plain", op="norm.rms", factory="ops_parts:make_norm", summary="plain")
        yield KernelSpec(name="lacking", op="norm.rms", factory="ops_parts:nothing", summary="", priority=9,
                         requires=("no_such",), install="pip install it")

@hookimpl
def headrace_models():
    yield ArchSpec(name="one", architectures=("OneForCausalLM", "Shared"), factory="ops_parts:norm", summary="one")
    yield ArchSpec(name="two", architectures=("Shared",), factory="ops_parts:nothing", summary="two")
"""


class Parts:
    """What the plugin's factories are; a test changes it before it builds."""

    def __init__(self) -> None:
        self.caps: dict[str, Any] = {}
        self.context: BuildContext | None = None

    def backend(self, source: Any, options: Any, context: BuildContext) -> ToyPaged:
        parts, self.context = self, context
        exact = context.determinism == "batch-invariant"
        ops = bind(("norm.rms",), context.kernels("cpu"), KernelContext(device="cpu", exact=exact))

        class Backend(ToyPaged):
            def __init__(self, model: ToyModel) -> None:
                super().__init__(model)
                self.caps: Capabilities = Capabilities(**(self._fields() | parts.caps))

            def _fields(self) -> dict[str, Any]:
                return {name: getattr(ToyPaged(ToyModel()).caps, name) for name in Capabilities.__slots__}

            def bound(self) -> tuple[BoundOp, ...]:
                return ops.bound

        return Backend(ToyModel(context=64))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    parts, module = Parts(), ModuleType("ops_parts")
    vars(module).update(probe=lambda machine, source: Fit(1, "fits"), Backend=parts.backend, norm=norm,
                        make_norm=lambda context: norm)  # fmt: skip
    monkeypatch.setitem(sys.modules, "ops_parts", module)
    return parts


@pytest.fixture
def catalog(parts: Parts) -> Catalog:
    return Catalog.load(disable=("builtin", "gguf"), extra={"fake": plugin_module(PLUGIN)})


def test_explain_tells_kernels(catalog: Catalog) -> None:
    told = {each.key: each for each in explain(load_config(None, model="fake://"), catalog)}["ops.norm.rms"]
    assert (told.value, told.plugin) == ("plain", "fake (in-process)")
    assert told.rejected == (("lacking", "needs no_such, not installed"),)
    assert told.why == "the highest priority (0) that serves float32 on 'cpu'"


def test_a_missing_kernel_is_a_build_error(catalog: Catalog) -> None:
    config = load_config(None, model="fake://", sets=["determinism=batch-invariant"])
    with pytest.raises(
        ConfigError, match=r"HR-OPS-01: no kernel serves op 'norm\.rms' as exact float32 on 'cpu'"
    ) as it:
        build(config, catalog=catalog)
    assert "plain of fake (in-process) (not exact)" in it.value.message


def test_architectures_are_looked_up(catalog: Catalog, parts: Parts) -> None:
    explain(load_config(None, model="fake://"), catalog)
    assert parts.context is not None
    assert parts.context.architecture is not None
    assert parts.context.architecture("OneForCausalLM") is norm
    with pytest.raises(ModelError, match=r"HR-MODEL-03: .*'OneForCausalLn'") as unknown:
        parts.context.architecture("OneForCausalLn")
    assert "did you mean" not in unknown.value.help, "a name alike is another architecture"
    assert "known: OneForCausalLM, Shared" in unknown.value.help
    with pytest.raises(PluginError, match=r"HR-PLUGIN-04: .*model 'one' of plugin 'fake' .* and model 'two'"):
        parts.context.architecture("Shared")


def test_approximations_are_no_batch_invariance(catalog: Catalog, parts: Parts) -> None:
    sentences = ('a prefix hit rebuilds windows (backend.prefix = "replay")', "the moon is in the way")
    parts.caps = {"row_invariant": True, "approximations": sentences}
    told = {each.key: each for each in explain(load_config(None, model="fake://"), catalog)}
    assert told["determinism"].facts["but approximate"] == "; ".join(sentences)
    assert "approximations" not in told["backend"].facts["capabilities"]
    exact = plugin_module(PLUGIN.replace('"plain", op', '"plain", exact=True, op'))
    catalog = Catalog.load(disable=("builtin", "gguf"), extra={"fake": exact})
    config = load_config(None, model="fake://", sets=["determinism=batch-invariant"])
    with pytest.raises(ConfigError) as refused:
        explain(config, catalog)
    assert refused.value.code == "HR-CONFIG-10"
    assert all(f"'{sentence}'" in refused.value.message for sentence in sentences)
    assert refused.value.help == "change backend.prefix, or set determinism = 'seeded'"
    parts.caps |= {"approximations": (), "departures": sentences}
    told = {each.key: each for each in explain(config, catalog)}
    assert told["determinism"].facts["but not the whole model"] == "; ".join(sentences)


def test_a_kernel_of_no_op_breaks_its_plugin_only() -> None:
    code = """
@hookimpl
def headrace_kernels(device):
    yield KernelSpec(name="mine", op="norm.rsm", factory="m:f", summary="")
"""
    catalog = Catalog.load(disable=("gguf",), extra={"mine": plugin_module(code)})
    with pytest.raises(PluginError, match=r"kernel 'mine' is for the op 'norm\.rsm'") as caught:
        catalog.kernels("cpu")
    assert "did you mean 'norm.rms'?" in caught.value.help
    assert "--no-plugin mine" in caught.value.help
    (builtin,) = [plugin for plugin in catalog.plugins if plugin.name == "builtin"]
    assert catalog.kernels_of(builtin, "npu") == []


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("", ""),
        ("factory='ops_parts:make_topk'", "parameter 'x' is missing"),
        ("factory='ops_parts:make_three'", "gave 3"),
        ("op='norm.rsm'", "is no op"),
        ("name='twin'", "'twin' twice for norm.rms on cpu"),
    ],
)
def test_plugin_conformance_of_kernels(record: str, says: str, parts: Parts) -> None:
    vars(sys.modules["ops_parts"]).update(make_topk=lambda context: topk, make_three=lambda context: 3)
    code = """
@hookimpl
def headrace_kernels(device):
    common = dict(name="mine", op="norm.rms", factory="ops_parts:make_norm", summary="")
    if device == "cpu":
        yield KernelSpec(**(common | dict(name="twin")))
        yield KernelSpec(**(common | dict(RECORD)))
        yield KernelSpec(**(common | dict(name="lacking", factory="ops_parts:none", requires=("no_such",))))
"""
    plugin = plugin_module(code.replace("RECORD", record))
    if not says:
        PluginConformance().test_kernels_serve_ops(plugin)
        return
    with pytest.raises(AssertionError, match=says):
        PluginConformance().test_kernels_serve_ops(plugin)

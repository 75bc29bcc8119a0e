"""Exact kernels give a row the same bits alone, among others, and in any order; the quick ones don't."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need torch")

from kernel_cases import numbers  # noqa: E402

from headrace.modeling import Quantised  # noqa: E402
from headrace.ops import OPS, KernelContext  # noqa: E402
from headrace_plugins.reference import specs  # noqa: E402
from headrace_plugins.reference.kernels import basic, formats, streams  # noqa: E402

COUNTS = (1, 3, 8, 45)
ROWS = 45
COMPUTE = ("float32", "bfloat16")


class Call(NamedTuple):
    """A kernel call: tensors with one entry per row, and what all rows share."""

    rows: tuple[torch.Tensor, ...]
    rest: tuple[Any, ...] = ()


def calls(act: torch.dtype) -> dict[str, Iterator[Call]]:
    """Calls of each op, odd sizes and released-like ones."""

    def x(*shape: int) -> torch.Tensor:
        return (numbers(ROWS, *shape) * 2).to(act)

    def w(*shape: int) -> torch.Tensor:
        return (numbers(*shape, seed=7) / 4).to(act)

    ids = torch.randint(0, 40, (ROWS,), generator=torch.Generator().manual_seed(0))
    slots = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(ROWS)])
    angles = (numbers(ROWS, 8).cos(), numbers(ROWS, 8).sin())
    fp8 = Quantised(*formats.quantise_fp8_block(numbers(96, 64)), "fp8_block", (96, 64))
    fp4 = [Quantised(*formats.quantise_fp4_row(numbers(64, 64, seed=i)), "fp4_row", (64, 64)) for i in range(6)]
    e1, e3, e2 = ([w(64, 64) for _ in range(6)] for _ in range(3))
    mixing = (numbers(24, 4 * 64), numbers(24), numbers(3), 1e-20, 1e-6, 20)

    def dense() -> Iterator[Call]:
        for k, m in ((64, 24), (33, 17), (1280, 96)):
            yield Call((x(k),), (w(m, k),))
            yield Call((x(k),), (w(m, k), w(m), True))
        yield Call((x(64),), (fp8,))

    return {
        "embed.lookup": iter([Call((ids,), (w(40, 64),))]),
        "norm.rms": (Call((x(d),), (numbers(d), 1e-20)) for d in (64, 33, 5120)),
        "rope.table": iter([Call((ids * 1000,), (torch.logspace(0, -4, 32),))]),
        "rope.apply": iter([Call((x(3, 24), *angles)), Call((x(16), *angles), ("halves", True))]),
        "linear.dense": dense(),
        "linear.grouped": iter([Call((x(3, 64),), (w(3 * 24, 64),)), Call((x(2, 64),), (fp8,))]),
        "quant.activation": iter([Call((x(96),))]),
        "act.swiglu": (Call((x(d), x(d) + 1), (1.5,)) for d in (24, 33, 2304)),
        "moe.route": (Call((numbers(ROWS, e) * 3,), (numbers(e), 4, 1.5)) for e in (16, 33, 384)),
        "moe.experts": iter(
            [
                Call((x(64), slots, numbers(ROWS, 3)), (e1, e3, e2, 2.0)),
                Call((x(64), slots, numbers(ROWS, 3)), (fp4, fp4, fp4, 2.0, True)),
            ]
        ),
        "mhc.mix": iter([Call((x(4, 64),), mixing), Call((x(2, 33),), (numbers(8, 66), numbers(8), *mixing[2:]))]),
        "mhc.collapse": (Call((x(4, h), numbers(ROWS, 4))) for h in (64, 33, 5120)),
        "mhc.update": (Call((x(4, h), x(h), numbers(ROWS, 4), numbers(ROWS, 4, 4))) for h in (64, 33, 5120)),
        "engram.gate": (
            Call((x(4, h), x(5, h)), (numbers(4, h), numbers(4, h), 1e-20)) for h in (64, 33, 5120)
        ),
        "engram.hash": iter(
            [Call((slots,), (torch.tensor([3, 5, 7]), torch.tensor([97, 101]), torch.tensor([0, 97])))]
        ),
        "draft.feature": (Call((x(4, h),)) for h in (64, 33)),
        "draft.confidence": (Call((x(h), x(32)), (w(1, h + 32), 0.7)) for h in (64, 5120)),
    }  # fmt: skip


def run(kernel: Callable[..., Any], call: Call, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = kernel(*(tensor[chosen] for tensor in call.rows), *call.rest)
    return found if isinstance(found, tuple) else (found,)


def differs(kernel: Callable[..., Any], call: Call) -> list[str]:
    """Which selections of rows give one of them other bits than all rows together."""
    every = run(kernel, call, torch.arange(ROWS))
    found = []
    for count in COUNTS:
        for seed in range(4):
            chosen = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:count]
            some = run(kernel, call, chosen)
            if not all(torch.equal(a, b[chosen]) for a, b in zip(some, every, strict=True)):
                found.append(f"{count} rows, selection {seed}")
    return found


EXACT = {"basic": basic, "streams": streams}
SPECS = [spec for spec in specs.kernels() if spec.factory.split(".")[-1].split(":")[0] in EXACT]


def make(spec: Any, compute: Any) -> Callable[..., Any]:
    module, _, factory = spec.factory.rpartition(".")[2].partition(":")
    kernel: Callable[..., Any] = getattr(EXACT[module], factory)(KernelContext(device="cpu", compute=compute))
    return kernel


def rows_first(spec: Any, compute: Any) -> Callable[..., Any]:
    """The kernel with what it has per row as its first arguments."""
    kernel = make(spec, compute)
    return kernel if spec.op != "embed.lookup" else lambda ids, weight: kernel(weight, ids)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("spec", [s for s in SPECS if s.exact and s.op != "sample.step"], ids=lambda s: s.factory)
def test_rows_of_exact_kernels_are_independent(spec: Any, compute: str) -> None:
    checked = 0
    for call in calls(getattr(torch, compute))[spec.op]:
        assert not differs(rows_first(spec, compute), call), [tuple(t.shape) for t in call.rows]
        checked += 1
    assert checked


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.exact], ids=lambda s: s.factory)
def test_rows_of_quick_kernels_are_not(spec: Any, varying_products: None) -> None:
    assert any(differs(rows_first(spec, "float32"), call) for call in calls(torch.float32)[spec.op])


def test_every_op_has_an_exact_kernel_and_plain_products_are_preferred() -> None:
    by_op: dict[str, list[Any]] = {}
    for spec in SPECS:
        by_op.setdefault(spec.op, []).append(spec)
        assert spec.op in OPS
    for op, offered in by_op.items():
        assert sum(spec.exact for spec in offered) == 1, op
        first, *others = sorted(offered, key=lambda spec: -spec.priority)
        assert first.name == "torch", op
        assert first.exact == (not others), op
        assert all(spec.priority < first.priority for spec in others), op


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.factory)
def test_kernels_have_the_signature_of_their_op(spec: Any) -> None:
    import inspect

    found = inspect.signature(make(spec, "float32")).parameters
    assert list(found) == list(OPS[spec.op].signature.parameters)
    for name, parameter in OPS[spec.op].signature.parameters.items():
        if parameter.default is not parameter.empty:
            assert found[name].default == parameter.default


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("spec", [s for s in SPECS if s.op != "sample.step"], ids=lambda s: s.factory)
def test_inputs_are_left_alone(spec: Any, compute: str) -> None:
    for call in calls(getattr(torch, compute))[spec.op]:
        before = [tensor.clone() for tensor in call.rows]
        rows_first(spec, compute)(*call.rows, *call.rest)
        assert all(torch.equal(a, b) for a, b in zip(before, call.rows, strict=True))

"""What every kernel must do: accept what its op declares, give what it promises, and treat rows as rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.ops import OPS, KernelContext, OpContract, kernel_problem
from headrace.testing.conformance import _op_text

N_ROWS = (1, 3, 8, 45)
"""One; less than a tile; one tile of the usual size; several and a rest."""
WRITES: Mapping[str, tuple[str, ...]] = {
    "kv.store": ("cache",),
    "compress.pool": ("cache",),
    "sample.step": ("logits",),
}
"""Op -> arguments that it may change."""
BOUND_ROWS = frozenset({"kv.store", "compress.pool", "sample.step"})
"""Ops in which a row may depend on the others of its call."""

Arguments = dict[str, Any]


class KernelConformance:
    """Subclass, name the op, make the kernel, and give inputs and something to compare with:

        class TestFastNorm(KernelConformance):
            op = "norm.rms"
            exact = True

            def make(self, context):
                return make_norm(context)

            def inputs(self, n):
                rng = np.random.default_rng(n)
                return {"x": rng.standard_normal((n, 64), np.float32), "weight": np.ones(64, np.float32), "eps": 1e-6}

            def reference(self, x, weight, eps):
                return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    Arrays are of any library that slices, permutes and copies (copy.deepcopy) as numpy does; `array` makes them numpy.
    """

    op: ClassVar[str]
    """Name in headrace.ops.OPS."""
    exact: ClassVar[bool] = False
    """As the KernelSpec says: rows have the same bits in any company."""
    context: ClassVar[KernelContext] = KernelContext(device="cpu")
    rtol: ClassVar[float] = 1e-5
    atol: ClassVar[float] = 1e-6
    """How far floats may be from the reference, and from themselves in other company where not exact. Integers and
    booleans have to be equal. The defaults are for float32 sums of a few hundred terms."""

    def make(self, context: KernelContext) -> Callable[..., Any]:
        raise NotImplementedError("return your kernel, as the factory of its record makes it")

    def inputs(self, n: int) -> Arguments:
        """The arguments of a call of n rows, by name; the same each time."""
        raise NotImplementedError("return the arguments of a call of n rows, by name")

    def reference(self, **arguments: Any) -> Any:
        """What the op gives for these arguments, by plain means: an array or a tuple of them (`outcome` of it)."""
        raise NotImplementedError("return what the op gives for these arguments")

    def array(self, value: Any) -> np.ndarray[Any, Any]:
        """An array as numpy, without loss (bfloat16 as float32)."""
        return np.asarray(value)

    def outcome(self, result: Any, arguments: Arguments) -> tuple[Any, ...]:
        """What a call brought about, arrays with a row per row: its results. Override it where the number of columns
        depends on the other rows, or where the op writes and returns nothing. arguments: as they are after the call."""
        return result if isinstance(result, tuple) else (result,)

    def take(self, arguments: Arguments, rows: Seq[int]) -> Arguments:
        """The call of these rows alone: every argument that has one row per row, by its shape in the op's text."""
        inputs = _op_text.read(OPS[self.op]).inputs
        chosen = np.asarray(rows, np.int64)
        taken = dict(arguments)
        for name, shapes in inputs.items():
            if _is_array(arguments.get(name)) and self._shape(shapes, arguments[name]).per_row:
                taken[name] = arguments[name][chosen]
        return taken

    # --- checks ------------------------------------------------------------------------------------------------------

    @pytest.fixture
    def kernel(self) -> Callable[..., Any]:
        return self.make(self.context)

    @pytest.fixture
    def contract(self) -> OpContract:
        return OPS[self.op]

    def test_signature(self, kernel: Callable[..., Any], contract: OpContract) -> None:
        problem = kernel_problem(contract, kernel)
        assert not problem, f"does not match {contract}: {problem}"

    @pytest.mark.parametrize("n", N_ROWS)
    def test_shapes_and_types(self, kernel: Callable[..., Any], contract: OpContract, n: int) -> None:
        """Of the arguments too: a check on this test's own inputs."""
        said, arguments, known = _op_text.read(contract), self.inputs(n), dict[str, Any]()
        known |= {name: value for name, value in arguments.items() if type(value) is int}
        for name, shapes in said.inputs.items():
            if _is_array(arguments.get(name)):
                shape = self._shape(shapes, arguments[name])
                problem = _op_text.bind(shape, tuple(arguments[name].shape), known) or self._type(
                    shape, arguments[name]
                )
                assert not problem, f"{name} {problem}; inputs() must give what {contract} declares"
        result = kernel(**arguments)
        if said.like:
            model = arguments[said.like]
            assert (tuple(result.shape), result.dtype) == (tuple(model.shape), model.dtype)
            return
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        assert len(results) == len(said.results), f"gave {len(results)} results, not {len(said.results)}"
        for place, (shape, value) in enumerate(zip(said.results, results, strict=True)):
            problem = _op_text.bind(shape, tuple(value.shape), known) or self._type(shape, value)
            assert not problem, f"result {place} {problem}"

    @pytest.mark.parametrize("n", N_ROWS)
    def test_equals_the_reference(self, kernel: Callable[..., Any], n: int) -> None:
        wanted_arguments = copy.deepcopy(self.inputs(n))
        wanted = self.outcome(self.reference(**wanted_arguments), wanted_arguments)
        self._same(self._call(kernel, self.inputs(n)), wanted, bits=False)

    def test_same_call_same_bits(self, kernel: Callable[..., Any]) -> None:
        n = N_ROWS[-1]
        self._same(self._call(kernel, self.inputs(n)), self._call(kernel, self.inputs(n)), bits=True)

    def test_positions_and_names_are_the_same(self, kernel: Callable[..., Any], contract: OpContract) -> None:
        """Models call with positional arguments."""
        arguments = self.inputs(3)
        named = self._call(kernel, arguments)
        order = [name for name in contract.signature.parameters if name in arguments]
        n_leading = next(
            (i for i, name in enumerate(contract.signature.parameters) if name not in arguments), len(order)
        )
        leading, rest = order[:n_leading], order[n_leading:]
        mine = copy.deepcopy(self.inputs(3))
        result = kernel(*(mine[name] for name in leading), **{name: mine[name] for name in rest})
        self._same(self.outcome(result, mine), named, bits=True)

    def test_inputs_are_left_alone(self, kernel: Callable[..., Any]) -> None:
        arguments = self.inputs(8)
        before = copy.deepcopy(arguments)
        kernel(**arguments)
        for name, value in arguments.items():
            if name not in WRITES.get(self.op, ()):
                same = [self._bits(one) for one in _arrays(value)] == [self._bits(one) for one in _arrays(before[name])]
                assert same, f"changed its argument '{name}'"

    def test_rows_in_another_order(self, kernel: Callable[..., Any]) -> None:
        self._need_rows()
        n = N_ROWS[-1]
        order = np.random.default_rng(0).permutation(n)
        whole = self._call(kernel, self.inputs(n))
        moved = self._call(kernel, self.take(self.inputs(n), order.tolist()))
        self._same(moved, tuple(each[order] for each in whole), bits=self.exact)

    @pytest.mark.parametrize("n", [n for n in N_ROWS if n != N_ROWS[-1]])
    def test_rows_in_other_company(self, kernel: Callable[..., Any], n: int) -> None:
        """Rows of a large call, n at a time: the same bits where the kernel is exact, near ones where not."""
        self._need_rows()
        whole = self._call(kernel, self.inputs(N_ROWS[-1]))
        for start in range(0, N_ROWS[-1], n):
            rows = list(range(start, min(start + n, N_ROWS[-1])))
            part = self._call(kernel, self.take(self.inputs(N_ROWS[-1]), rows))
            self._same(part, tuple(each[rows] for each in whole), bits=self.exact)

    # --- how they are made -------------------------------------------------------------------------------------------

    def _need_rows(self) -> None:
        if self.op in BOUND_ROWS:
            pytest.skip(f"rows of {self.op} depend on each other")

    def _call(self, kernel: Callable[..., Any], arguments: Arguments) -> tuple[Any, ...]:
        arguments = copy.deepcopy(arguments)
        return self.outcome(kernel(**arguments), arguments)

    def _same(self, got: tuple[Any, ...], wanted: tuple[Any, ...], *, bits: bool) -> None:
        assert len(got) == len(wanted)
        for place, (one, two) in enumerate(zip(got, wanted, strict=True)):
            a, b = self.array(one), self.array(two)
            assert a.shape == b.shape, f"result {place}: {a.shape} beside {b.shape}"
            if bits:
                assert one.dtype == two.dtype
                differ = int((a != b).sum())
                assert a.tobytes() == b.tobytes(), f"result {place}: {differ} of {a.size} numbers differ"
            elif a.dtype.kind == "f":
                np.testing.assert_allclose(a, b, rtol=self.rtol, atol=self.atol, err_msg=f"result {place}")
            else:
                np.testing.assert_array_equal(a, b, err_msg=f"result {place}")

    def _bits(self, value: Any) -> tuple[Any, bytes]:
        return value.dtype, self.array(value).tobytes()

    def _type(self, shape: _op_text.Shape, value: Any) -> str:
        name = str(value.dtype).rpartition(".")[2]
        allowed = {self.context.compute if each == "act" else each for each in shape.dtypes}
        return f"is {name}, not {' or '.join(sorted(allowed))}" if allowed and name not in allowed else ""

    def _shape(self, shapes: tuple[_op_text.Shape, ...], value: Any) -> _op_text.Shape:
        """Of the shapes that an argument may have, the one of as many axes."""
        rank = len(value.shape)
        return next((each for each in shapes if len(each.dims) == rank and each.dims[0] != "..."), shapes[0])


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _arrays(value: Any) -> Iterator[Any]:
    """The arrays that an argument holds: itself, or those of a cache, a packed matrix, a list of them."""
    if _is_array(value):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _arrays(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _arrays(getattr(value, each.name))

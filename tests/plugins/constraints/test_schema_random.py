"""Shapes against the `jsonschema` library, on random schemas and values."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_gen import PATTERNS, random_schema, random_value
from shape_values import belongs

from headrace.errors import HeadraceError
from headrace_plugins.constraints.schema.limits import SchemaLimits
from headrace_plugins.constraints.schema.reading import read_schema

jsonschema = pytest.importorskip("jsonschema", reason="needs the jsonschema library as an oracle")

FEW = SchemaLimits(steps=20_000)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def validator(schema, draft):
    kinds = {"7": jsonschema.Draft7Validator, "2020-12": jsonschema.Draft202012Validator}
    return kinds[draft](schema)


@pytest.mark.parametrize("draft", ["7", "2020-12"])
@QUICK
@given(random=st.randoms(use_true_random=False))
def test_a_value_is_of_the_shapes_exactly_when_it_is_valid(draft, random):
    schema = random_schema(random, 3, draft)
    oracle = validator(schema, draft)
    try:
        table = read_schema(schema, draft=draft, limits=FEW)
        for _ in range(12):
            value = random_value(random)
            shown = f"{json.dumps(schema)}\n{json.dumps(value)}"
            assert belongs(value, table.root, table) == oracle.is_valid(value), shown
    except HeadraceError as error:
        assert error.code == "HR-CONSTRAINT-04", f"{error}\n{json.dumps(schema)}"  # noqa: PT017


@pytest.mark.parametrize("draft", ["7", "2020-12"])
@QUICK
@given(random=st.randoms(use_true_random=False))
def test_what_is_dropped_never_refuses_a_valid_value(draft, random):
    text = json.dumps(random_schema(random, 3, draft))
    for pattern, irregular in zip(PATTERNS[:2], (r"(?<=a)b", r"(a)\1"), strict=True):
        text = text.replace(json.dumps(pattern), json.dumps(irregular))
    schema = json.loads(text)
    oracle = validator(schema, draft)
    try:
        table = read_schema(schema, draft=draft, limits=FEW, lenient=True)
        for _ in range(12):
            value = random_value(random)
            allowed, valid = belongs(value, table.root, table), oracle.is_valid(value)
            assert allowed or not valid, f"{text}\n{json.dumps(value)}"
            assert allowed == valid or table.problems, f"{text}\n{json.dumps(value)}"
    except HeadraceError as error:
        assert error.code == "HR-CONSTRAINT-04", f"{error}\n{text}"  # noqa: PT017

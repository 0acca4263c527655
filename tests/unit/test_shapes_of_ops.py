"""What is remembered of ops on `meta` is what they would give again, and nothing else is remembered."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from hf_parallel.model import shapes_of_ops
from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan import discover


aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(op: Any) -> tuple[Any, list[int]]:
    """The op with its schema, and how often it is called."""
    calls: list[int] = []

    class Counted:
        _schema = op._schema

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return op(*args, **kwargs)

    return Counted(), calls


def facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.untyped_storage().nbytes()
    return type(value), *map(facts, value)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (meta(2, 1, 3), meta(4, 1))),
        (aten.mul.Tensor, (meta(2, 3).t(), 2)),
        (aten.mm.default, (meta(2, 3), meta(3, 5).bfloat16().float())),
        (aten.native_layer_norm.default, (meta(2, 3), [3], None, None, 1e-5)),
        (aten.arange.default, (7,)),
    ],
)
def test_a_second_call_gives_new_tensors_of_the_same_shapes_without_the_op(op: Any, args: Any) -> None:
    called, calls = counted(op)
    options = {"device": torch.device("meta")} if op is aten.arange.default else {}
    first, second = (shapes_of_ops.call(called, args, options) for _ in range(2))
    assert len(calls) == 1
    assert facts(second) == facts(first) == facts(op(*args, **options))
    assert second is not first


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.view.default, (meta(2, 3), [6])),
        (aten.add_.Tensor, (meta(2, 3), 1)),
        (aten.mul.Tensor, (torch.ones(2), 2)),
        (aten.nonzero.default, (torch.ones(2),)),
        (aten.mul.Tensor, (torch._conj(meta(2, dtype=torch.complex64)), 2)),
        (aten.native_dropout.default, (meta(2, 3), 0.5, False)),  # returns its input
    ],
    ids=["view", "in_place", "values", "shape_of_values", "conjugate", "returns_its_input"],
)
def test_an_op_that_may_depend_on_more_than_shapes_is_called_each_time(op: Any, args: Any) -> None:
    called, calls = counted(op)
    for _ in range(2):
        shapes_of_ops.call(called, args, {})
    assert len(calls) == 2


def test_the_default_dtype_and_kinds_of_numbers_are_told_apart() -> None:
    ints = meta(3, dtype=torch.int64)
    given = [shapes_of_ops.call(aten.mul.Scalar, (ints, number), {}).dtype for number in (1, 1.0, True, 1, 1.0)]
    assert given == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]
    torch.set_default_dtype(torch.float64)
    try:
        assert shapes_of_ops.call(aten.mul.Scalar, (ints, 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_experts_have_the_shapes_of_their_kernel_in_every_dtype(dtype: torch.dtype) -> None:
    rows, weights = torch.ones(6, 16, dtype=dtype), torch.ones(3, 8, 16, dtype=dtype).transpose(1, 2)
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    grouped = aten._grouped_mm.default
    made = shapes_of_ops.call(grouped, (rows.to("meta"), weights.to("meta"), ends.to("meta")), {})
    real = grouped(rows, weights, ends)
    assert facts(made)[:3] == facts(real)[:3]


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "gemma3n", "llama_lora"])
def test_records_of_a_model_are_those_without_what_is_remembered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[Any] = []
    record_forward = discover.record_forward

    def recorded(*args: Any, **options: Any) -> Any:
        records.append(record_forward(*args, **options))
        return records[-1]

    def plan() -> list[Any]:
        model = tiny.MODELS[name]()
        probes = Probes(model, torch.device("cpu"))
        records.clear()
        discover.discover_stages(model, probes.discovery, cost_tokens=probes.cost_tokens)
        return list(records)

    monkeypatch.setattr(discover, "record_forward", recorded)
    plan()
    remembered = plan()
    monkeypatch.setattr(shapes_of_ops, "call", lambda op, args, kwargs: op(*args, **kwargs))
    assert remembered == plan()
    assert len(remembered) > 2

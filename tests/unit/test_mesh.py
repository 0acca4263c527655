"""Coordinates and groups of the mesh: every rank stands at exactly one place, and groups partition the world."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_parallel.errors import ConfigError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape


SHAPES = st.builds(MeshShape, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
ORDERED = st.sampled_from(
    [
        MeshShape(outside * inside, *sizes, dp_inside=inside)
        for outside, inside, *sizes in product((1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2), (1, 2))
    ]
)


@given(ORDERED)
@settings(deadline=None)
def test_coordinates_and_ranks_are_inverse(shape: MeshShape) -> None:
    places = [shape.coordinates(rank) for rank in range(shape.world_size)]
    assert len(set(places)) == shape.world_size == shape.dp_size * shape.pp_size * shape.tp_size * shape.sp_size
    assert [shape.rank_at(*place) for place in places] == list(range(shape.world_size))
    sizes = shape.dp_size, shape.pp_size, shape.tp_size, shape.sp_size
    assert all(here < size for place in places for here, size in zip(place, sizes, strict=True))


@given(SHAPES)
@settings(deadline=None)
def test_the_ranks_of_a_model_copy_are_neighbours_and_tp_is_innermost(shape: MeshShape) -> None:
    for ranks in shape.groups(lambda d, p, t, s: (d,)):
        assert ranks == list(range(ranks[0], ranks[0] + shape.mp_size))
    for ranks in shape.groups(lambda d, p, t, s: (d, p, s)):
        assert ranks == list(range(ranks[0], ranks[0] + shape.tp_size))
    for ranks in shape.groups(lambda d, p, t, s: (d, p)):
        assert ranks == list(range(ranks[0], ranks[0] + shape.stage_size))


@given(ORDERED)
@settings(deadline=None)
def test_groups_partition_the_world(shape: MeshShape) -> None:
    for axis in range(4):
        groups = shape.groups(lambda *place, axis=axis: (*place[:axis], *place[axis + 1 :]))
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(shape.world_size))
        assert {len(ranks) for ranks in groups} == {(shape.dp_size, shape.pp_size, shape.tp_size, shape.sp_size)[axis]}
        assert all(ranks == sorted(ranks) for ranks in groups)


@given(ORDERED)
@settings(deadline=None)
def test_so_many_replicas_of_a_stage_are_neighbours_and_places_in_groups_stay(shape: MeshShape) -> None:
    inside = shape.groups(lambda d, p, t, s: (d // shape.dp_inside, p))
    assert all(ranks == list(range(ranks[0], ranks[0] + shape.dp_inside * shape.stage_size)) for ranks in inside)
    usual = dataclasses.replace(shape, dp_inside=1)
    for key in (lambda d, p, t, s: (d,), lambda d, p, t, s: (p, t), lambda d, p, t, s: (d, t, s)):
        for ranks in shape.groups(key):
            assert [usual.rank_at(*shape.coordinates(rank)) for rank in ranks] == sorted(
                usual.rank_at(*shape.coordinates(rank)) for rank in ranks
            )
    for replica in range(shape.dp_size):
        assert [shape.coordinates(rank)[0] for rank in shape.ranks_of_copy(replica)] == [replica] * shape.mp_size
        assert shape.ranks_of_copy(replica) in shape.groups(lambda d, p, t, s: (d,))


def test_a_file_says_the_order_of_axes_only_where_it_is_another() -> None:
    assert MeshShape(2, 2, 1).sizes == {"dp_size": 2, "pp_size": 2, "tp_size": 1}
    other = MeshShape(2, 2, 1, dp_inside=2)
    assert MeshShape(**other.sizes) == other != MeshShape(2, 2, 1)


def test_a_rank_is_described_by_the_axes_that_exist() -> None:
    assert MeshShape(2, 2, 2).describe(5) == "rank 5 (pp 0 of 2, tp 1 of 2, dp 1 of 2)"
    assert MeshShape(2, 1, 2, 2).describe(6) == "rank 6 (tp 0 of 2, sp 1 of 2, dp 1 of 2)"
    assert MeshShape(1, 4, 1).describe(3) == "rank 3 (pp 3 of 4)"
    assert MeshShape(1, 1, 1).describe(0) == "rank 0"
    assert MeshShape(1, 2, 1, hosts=("nodea", "nodeb")).describe(1) == "rank 1 (pp 1 of 2) on nodeb"
    assert MeshShape(1, 2, 1, hosts=("nodea", "nodeb")) == MeshShape(1, 2, 1)


def test_a_shape_that_does_not_cover_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dp 1 x pp 2 x tp 2 needs 4 processes, but 1 run\. Launch 4 processes"):
        Mesh.build(MeshShape(1, 2, 2), timeout=timedelta(seconds=5))


def test_one_process_has_no_groups() -> None:
    mesh = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
    assert {mesh.tp_group, mesh.pp_group, mesh.dp_group, mesh.mp_group} == {None}
    assert mesh.pp_rank == 0
    assert mesh.describe() == "rank 0"

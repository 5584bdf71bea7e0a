"""Which rank sits where, who is in whose group, and how that is told."""

import pytest
import torch
import torch.distributed as dist

from tensorshard import Plan
from tensorshard.plan.mesh import Mesh, group_ranks
from tensorshard.plan.plan import AXES, coordinates

DEGREES = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 1, "tp": 2}


def test_the_last_axis_is_innermost():
    assert coordinates(0, DEGREES) == dict.fromkeys(AXES, 0)
    assert coordinates(1, DEGREES) == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert coordinates(2, DEGREES)["dp_shard"] == 1
    assert coordinates(23, DEGREES) == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 0, "tp": 1}


def test_coordinates_tell_all_ranks_apart():
    assert len({tuple(coordinates(rank, DEGREES).values()) for rank in range(24)}) == 24


@pytest.mark.parametrize(
    ("rank", "axis", "expected"),
    [
        (0, "tp", [0, 1]),
        (3, "dp_shard", [1, 3, 5]),
        (7, "dp_replicate", [1, 7]),
        (13, "pp", [1, 13]),
        (13, "cp", [13]),
    ],
)
def test_group_ranks_differ_along_one_axis_alone(rank, axis, expected):
    assert group_ranks(rank, axis, DEGREES) == expected


@pytest.mark.parametrize("axis", AXES)
def test_groups_of_an_axis_partition_the_world(axis):
    groups = {tuple(group_ranks(rank, axis, DEGREES)) for rank in range(24)}
    assert sorted(rank for group in groups for rank in group) == list(range(24))


def _groups_of_equal_meshes() -> list[list[str]]:
    plans = [Plan(tp=2), Plan(tp=2, zero=3), Plan(tp=2, zero=1)]
    meshes = [Mesh(plan, "cpu") for plan in plans]
    return [[mesh.along("dp_shard").get_group().group_name, mesh.group("dp_shard").group_name] for mesh in meshes]


def test_meshes_that_torch_takes_for_one_have_the_same_groups(ranks):
    """Its caches give a DTensor the mesh of any of them: with groups of its own each, ranks wait in different ones."""
    for names in ranks(4, _groups_of_equal_meshes):
        assert len({name for pair in names for name in pair}) == 1


def _one_after_another() -> list[int]:
    sizes = []
    for _ in range(2):
        group = dist.new_group([0, 1])
        mesh = Mesh(Plan(zero=3), "cpu", group)
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.group("dp_shard"))
        sizes.append(int(total))
        dist.destroy_process_group(group)
    return sizes


def test_a_group_that_was_destroyed_is_not_used_again(ranks):
    assert ranks(2, _one_after_another) == [[2, 2]] * 2


def _hybrid() -> dict:
    mesh = Mesh(Plan(dp_replicate=2), "cpu")
    groups = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in ("dp_replicate", "dp_shard")}
    try:
        mesh.group("tp")
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    return {
        "axes": mesh.device_mesh.mesh_dim_names,
        "groups": groups,
        "dp": (mesh.dp_rank, mesh.dp_size, dist.get_process_group_ranks(mesh.dp_group)),
        "index": {axis: mesh.index(axis) for axis in AXES},
        "description": mesh.describe(),
        "refusal": refusal,
    }


def test_a_hybrid_mesh(ranks):
    found = ranks(4, _hybrid)
    assert all(each["axes"] == ("dp_replicate", "dp_shard") for each in found)
    assert [each["groups"]["dp_shard"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["groups"]["dp_replicate"] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["dp"] for each in found] == [(rank, 4, [0, 1, 2, 3]) for rank in range(4)]
    assert found[3]["index"] == {"pp": 0, "dp_replicate": 1, "dp_shard": 1, "cp": 0, "tp": 0}
    assert "tp axis has degree 1 and therefore no group" in found[0]["refusal"]


def test_the_description_of_a_hybrid_mesh(ranks):
    lines = ranks(4, _hybrid)[2]["description"].splitlines()
    assert lines[0] == "rank 2 of 4"
    assert [line.split() for line in lines[1:6]] == [
        ["pp", "degree", "1", "index", "0", "ranks", "2"],
        ["dp_replicate", "degree", "2", "index", "1", "ranks", "0", "2"],
        ["dp_shard", "degree", "2", "index", "0", "ranks", "2", "3"],
        ["cp", "degree", "1", "index", "0", "ranks", "2"],
        ["tp", "degree", "1", "index", "0", "ranks", "2"],
    ]
    assert lines[6:] == ["all groups along dp_replicate: 0 2 | 1 3", "all groups along dp_shard: 0 1 | 2 3"]


def _alone() -> tuple:
    mesh = Mesh(Plan(), "cpu")
    return mesh.world_size, mesh.dp_size, mesh.dp_rank, mesh.device_mesh.mesh_dim_names, mesh.group("dp_shard").size()


def test_a_world_of_one_has_a_dp_shard_group(ranks):
    assert ranks(1, _alone) == [(1, 1, 0, ("dp_shard",), 1)]


def _in_halves() -> tuple:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = Mesh(Plan(), "cpu", halves[dist.get_rank() // 2])
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.dp_group)
    return mesh.rank, mesh.world_size, total.item(), mesh.describe().splitlines()[3].split("ranks ")[1]


def test_a_mesh_over_a_part_of_the_world(ranks):
    assert ranks(4, _in_halves) == [(0, 2, 1.0, "0 1"), (1, 2, 1.0, "0 1"), (0, 2, 5.0, "2 3"), (1, 2, 5.0, "2 3")]


def _wrong() -> str:
    try:
        Mesh(Plan(dp_shard=3), "cpu")
    except ValueError as error:
        return str(error)
    return ""


def test_a_mesh_that_does_not_fit_the_world(ranks):
    assert "multiply to 3, but the number of processes is 2" in ranks(2, _wrong)[0]

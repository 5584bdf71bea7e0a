"""Model-parallel groups: who is in which, and what is refused."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import tensorshard as ts
import tensorshard.distributed as tsd
from rank_pool import RankError
from tensorshard.utils.data import DistributedGroupSampler


def _places(group_size: int | None) -> dict[str, object]:
    assert not tsd.is_initialized()
    tsd.init_process_group(group_size)
    assert tsd.is_initialized()
    found = {
        "model": dist.get_process_group_ranks(tsd.get_group()),
        "data": dist.get_process_group_ranks(tsd.get_data_parallel_group()),
        "rank": tsd.get_rank(),
        "sizes": (tsd.get_group_size(), tsd.get_data_parallel_size(), tsd.get_world_size()),
        "data_rank": tsd.get_data_parallel_rank(),
        "mesh": tsd.get_mesh().mesh.tolist(),
    }
    tsd.destroy_process_group()
    assert not tsd.is_initialized()
    return found


def test_groups_of_half_the_world(ranks):
    places = ranks(4, _places, 2)
    assert [place["model"] for place in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place["data"] for place in places] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [place["rank"] for place in places] == [0, 1, 0, 1]
    assert [place["data_rank"] for place in places] == [0, 0, 1, 1]
    assert places[0]["sizes"] == (2, 2, 4)
    assert places[0]["mesh"] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("group_size", "sizes"), [(None, (2, 1, 2)), (2, (2, 1, 2)), (1, (1, 2, 2))])
def test_the_whole_world_and_single_ranks(ranks, group_size, sizes):
    assert [place["sizes"] for place in ranks(2, _places, group_size)] == [sizes] * 2


def _init(group_size: int) -> None:
    dist.barrier()  # so that no rank fails, and leaves, while another is still joining the world
    tsd.init_process_group(group_size)


def _init_twice(first: int, second: int) -> int:
    dist.barrier()
    tsd.init_process_group(first)
    tsd.init_process_group(second)
    return tsd.get_group_size()


def _init_again_after_destroying(first: int, second: int) -> int:
    tsd.init_process_group(first)
    tsd.destroy_process_group()
    tsd.init_process_group(second)
    return tsd.get_group_size()


def test_making_groups_twice(ranks):
    assert ranks(2, _init_twice, 2, 2) == [2, 2]
    assert ranks(2, _init_again_after_destroying, 2, 1) == [1, 1]
    with pytest.raises(RankError, match="groups of 2 exist already and were asked for again with group_size=1"):
        ranks(2, _init_twice, 2, 1)


def test_groups_end_with_their_world(ranks):
    ranks(2, _leave_groups_behind)
    assert ranks(2, tsd.is_initialized) == [False, False]


def _leave_groups_behind() -> None:
    tsd.init_process_group(2)


@pytest.mark.parametrize("group_size", [3, 0, -1, 8])
def test_sizes_that_do_not_divide(ranks, group_size):
    with pytest.raises(RankError, match=rf"group_size={group_size} does not divide.*4 processes: use one of 1, 2, 4"):
        ranks(4, _init, group_size)


def _init_with_a_word() -> None:
    tsd.init_process_group("2")


def test_sizes_that_are_no_numbers(ranks):
    with pytest.raises(RankError, match="group_size='2' was given: it is a number of ranks, or None for all 2"):
        ranks(2, _init_with_a_word)


def test_nothing_works_without_groups():
    for call in (tsd.get_group, tsd.get_rank, tsd.get_group_size, tsd.get_world_size, tsd.get_mesh):
        with pytest.raises(RuntimeError, match="call tensorshard"):
            call()
    with pytest.raises(RuntimeError, match="or pass group="):
        tsd.gather(torch.ones(2))


def _pass_a_mesh_of_two_dimensions() -> None:
    _init(1)
    tsd.reduce(torch.ones(2), tsd.get_mesh())


def test_a_mesh_of_two_dimensions_is_no_group(ranks):
    with pytest.raises(RankError, match="pass one of them"):
        ranks(2, _pass_a_mesh_of_two_dimensions)


def _pass_what_is_no_group(what: str) -> None:
    group = dist.new_group([0]) if what == "another's" else "tp"
    dist.barrier()
    if dist.get_rank() == 1:
        tsd.reduce(torch.ones(2), group)


def test_what_is_no_group(ranks):
    with pytest.raises(RankError, match="group= is one that rank 1 is not in"):
        ranks(2, _pass_what_is_no_group, "another's")
    with pytest.raises(RankError, match="group='tp' was given: pass a"):
        ranks(2, _pass_what_is_no_group, "a word")


def _call_different_collectives(how: str) -> None:
    tsd.init_process_group(2, check_collectives=True, timeout=timedelta(seconds=1.5))
    first = dist.get_rank() % 2 == 0
    tsd.reduce(torch.ones(3))
    if how == "kinds":
        tsd.reduce(torch.ones(3)) if first else tsd.gather(torch.ones(3), size=6)
    elif how == "shapes":
        tsd.reduce(torch.ones(3 if first else 4))
    elif first:
        tsd.reduce(torch.ones(3))


def test_the_monitor_names_what_differs(ranks):
    with pytest.raises(RankError, match=r"rank 0: all_reduce of \[3\] float32; rank 1: all_gather of \[3\] float32"):
        ranks(4, _call_different_collectives, "kinds")
    with pytest.raises(RankError, match=r"as their number 2: rank 0: all_reduce of \[3\].*rank 1: all_reduce of \[4\]"):
        ranks(2, _call_different_collectives, "shapes")


@pytest.mark.slow
def test_the_monitor_does_not_wait_for_ever(ranks):
    with pytest.raises(RankError, match=r"not all of the ranks .* reached collective number 2 .* within 2 s"):
        ranks(2, _call_different_collectives, "absence")


def _call_different_collectives_in_detail() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        tsd.init_process_group(2, timeout=timedelta(seconds=2))
        tsd.reduce(torch.ones(3)) if dist.get_rank() % 2 == 0 else tsd.gather(torch.ones(3), size=6)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_torchs_own_check_works_too(ranks):
    with pytest.raises(RankError, match="Detected mismatch between collectives on ranks"):
        ranks(4, _call_different_collectives_in_detail)


def _sampled(shuffle: bool, drop_last: bool) -> list[int]:
    tsd.init_process_group(2)
    sampler = DistributedGroupSampler(range(7), shuffle=shuffle, drop_last=drop_last)
    sampler.set_epoch(3)
    loader = torch.utils.data.DataLoader(range(7), batch_size=2, sampler=sampler)
    return torch.cat(list(loader)).tolist()


def test_the_sampler_gives_each_group_its_share(ranks):
    seen = ranks(4, _sampled, False, True)
    assert seen == [[0, 2, 4], [0, 2, 4], [1, 3, 5], [1, 3, 5]]
    shuffled = ranks(4, _sampled, True, False)
    assert shuffled[0] == shuffled[1] and shuffled[2] == shuffled[3]
    assert sorted(set(shuffled[0] + shuffled[2])) == list(range(7))
    assert shuffled[0] != [0, 2, 4, 6]


def test_the_sampler_without_groups():
    with pytest.raises(RuntimeError, match="call tensorshard"):
        DistributedGroupSampler(range(4))
    assert list(ts.utils.data.DistributedGroupSampler(range(4), num_groups=2, group_index=1, shuffle=False)) == [1, 3]
    with pytest.raises(ValueError, match="group_index=5 of num_groups=2 was given"):
        DistributedGroupSampler(range(4), num_groups=2, group_index=5)

"""Where the time of a step goes: nothing twice, nothing missing, and nothing that is no part of a step."""

import threading

import pytest
import torch.distributed as dist

from rechpc.rank.breakdown import Breakdown, Part


class Clock:
    """A clock that goes on when it is told to. Its marks pass as the events of a GPU do, which cannot be had here."""

    def __init__(self):
        self.now_s, self.passed_s = 0.0, 0.0

    def between(self, start, end):
        assert max(start, end) <= self.passed_s, "read before the device was there"
        return end - start


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def parts(clock):
    return Breakdown(lambda: clock.now_s, clock.between)


def spend(clock, parts, part, seconds, *inside):
    with parts.part(part):
        clock.now_s += seconds
        for one in inside:
            spend(clock, parts, *one)


def test_the_parts_of_a_step_make_up_its_time_and_what_is_inside_another_is_not_counted_twice(clock, parts):
    for _ in range(2):
        spend(clock, parts, Part.all_to_all, 1.0)
        spend(clock, parts, Part.forward, 2.0, (Part.all_to_all, 4.0, (Part.forward, 8.0)))
        clock.now_s += 16.0
        parts.end_step()
    clock.passed_s = clock.now_s
    found = {"data_wait": 0, "forward": 10, "backward": 0, "all_to_all": 5, "optimizer": 0, "other": 16}
    assert [parts.take(), parts.take()] == [found, found]


def test_a_step_is_read_when_a_later_one_goes_on(clock, parts):
    spend(clock, parts, Part.backward, 3.0)
    parts.end_step()
    clock.passed_s = clock.now_s
    spend(clock, parts, Part.backward, 5.0)
    assert parts.take()["backward"] == 3.0
    clock.now_s += 1.0
    parts.end_step()
    clock.passed_s = clock.now_s
    assert parts.take()["backward"] == 5.0


def test_a_pause_and_what_came_before_it_are_no_part_of_a_step(clock, parts):
    clock.now_s += 1.0
    with parts.paused():
        spend(clock, parts, Part.forward, 100.0)
    spend(clock, parts, Part.forward, 2.0)
    parts.end_step()
    clock.passed_s = clock.now_s
    assert sum(parts.take().values()) == 2.0


@pytest.fixture
def wait(monkeypatch, clock):
    """What stands in for waiting for a collective takes a second."""

    def wait(work):
        clock.now_s += 1.0

    monkeypatch.setattr(dist.Work, "wait", wait)
    return wait


def test_forward_and_backward_wait_for_ranks_and_nothing_else_does(clock, parts, wait):
    with parts.counting_waits():
        for part in (Part.forward, Part.backward, Part.optimizer):
            with parts.part(part):
                dist.Work.wait(None)
        dist.Work.wait(None)
    assert dist.Work.wait is wait
    parts.end_step()
    clock.passed_s = clock.now_s
    taken = parts.take()
    assert {part: seconds for part, seconds in taken.items() if seconds} == {
        "all_to_all": 2.0, "optimizer": 1.0, "other": 1.0
    }  # fmt: skip


def test_a_thread_that_writes_a_checkpoint_waits_for_itself(clock, parts, wait):
    with parts.counting_waits(), parts.part(Part.forward):
        thread = threading.Thread(target=dist.Work.wait, args=(None,))
        thread.start()
        thread.join()
    parts.end_step()
    clock.passed_s = clock.now_s
    assert parts.take()["forward"] == 1.0

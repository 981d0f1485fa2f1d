"""What a front end does not take at once: nothing overtakes, nothing is lost, and of the reports the newest stays."""

from __future__ import annotations

from postproc_workers.outbound import Outbound


class Queue:
    """Takes so many frames. taken: all of them, in order."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[bytes] = []

    def send(self, frame: bytes) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.taken.append(frame)
        return True


def test_what_is_refused_waits_and_leaves_in_order() -> None:
    queue = Queue(2)
    outbound = Outbound(queue.send)
    for number in range(5):
        assert outbound.full is (number > 2)
        outbound.send(b"%d" % number)
    assert queue.taken == [b"0", b"1"]
    queue.room = 1
    outbound.send(b"5")  # there is room, but others wait
    outbound.retry()
    assert queue.taken == [b"0", b"1", b"2"] and outbound.full
    queue.room = 9
    outbound.retry()
    assert queue.taken == [b"0", b"1", b"2", b"3", b"4", b"5"] and not outbound.full
    outbound.send(b"6")
    assert queue.taken[-1] == b"6"


def test_the_newest_report_comes_behind_all_else() -> None:
    queue = Queue(0)
    outbound = Outbound(queue.send)
    outbound.send(b"0")
    outbound.report(b"old")
    outbound.report(b"new")
    outbound.send(b"1")
    queue.room = 2
    outbound.retry()
    assert queue.taken == [b"0", b"1"] and outbound.full
    queue.room = 2
    outbound.retry()
    assert queue.taken == [b"0", b"1", b"new"] and not outbound.full


def test_a_report_alone_waits_too() -> None:
    queue = Queue(1)
    outbound = Outbound(queue.send)
    for report in (b"0", b"1", b"2"):
        outbound.report(report)
    assert queue.taken == [b"0"] and outbound.full
    queue.room = 1
    outbound.retry()
    assert queue.taken == [b"0", b"2"] and not outbound.full

"""Requests that are fed by column: what each is told is what a row of its own would have told."""

from __future__ import annotations

import gc
import weakref

import pytest

from executor.messages import OUTPUT_END, REQUEST_END, Emissions, Message, Resubmit, WorkerLost
from executor.pending import Cohort, Pending
from executor.proxy import GenerationExecutor
from executor.rids import Rids
from tests.helpers import CHAT, Client, request_of, spec_of

RIDS = Rids((3, 4, 5))


class Wired(GenerationExecutor):
    """A proxy whose messages are kept, with three requests."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self.connect_in_process(self.sent.append)
        self.clients = [Client() for _ in RIDS]
        for rid, client in zip(RIDS, self.clients):
            self.open(request_of(rid, spec_of(CHAT)), client)

    def column(self, count: int, *, epoch: int = 0, worker: int = 0, rids: Rids = RIDS) -> None:
        """A row of each request, as a column."""
        n = len(rids)
        self.receive(
            Emissions(worker, rids, [epoch] * n, [0] * n, [count] * n, [0] * n, [2] * n, b"%02d" % (count % 100) * n)
        )

    def pieces(
        self, piece: bytes, count: int, around: dict[int, tuple[bytes, bytes]] | None = None, *, rids: Rids = RIDS
    ) -> None:
        """A column of pieces. around: rid -> head and tail, of those that are told."""
        n = len(rids)
        told = {rids.index(rid): constants for rid, constants in (around or {}).items()}
        sizes, payload = [len(piece)] * n, piece * n
        self.receive(Emissions(0, rids, [0] * n, [0] * n, [count] * n, [0] * n, sizes, payload, around=told))

    def row(self, rid: int, count: int, flags: int = 0, *, epoch: int = 0, worker: int = 0) -> None:
        self.receive(Emissions.build(worker, [(rid, epoch, 0, count, flags, b"..")]))

    def cohort_of(self, rid: int) -> Cohort | None:
        """Of an open request."""
        return self._pending[rid].cohort

    @property
    def bodies(self) -> list[bytes]:
        return [client.body for client in self.clients]

    def told(self) -> list[int]:
        """How much the executor would hear that each has."""
        return [self.tokens_of(rid) for rid in RIDS]


@pytest.fixture
def proxy() -> Wired:
    return Wired()


def test_columns_feed_and_are_told(proxy: Wired) -> None:
    for count in (1, 2, 3):
        proxy.column(count)
    assert proxy.bodies == [b"010203"] * 3 and proxy.told() == [3] * 3 and proxy.late_rows == 0
    proxy.worker_lost(0)
    lost = proxy.sent[-1]
    assert isinstance(lost, WorkerLost) and lost.delivered == {rid: [(3, False)] for rid in RIDS}


def test_a_row_between_columns_counts(proxy: Wired) -> None:
    proxy.column(1)
    proxy.row(4, 2)
    assert proxy.told() == [1, 2, 1]
    proxy.column(3)
    assert proxy.told() == [3] * 3 and proxy.bodies == [b"0103", b"01..03", b"0103"]


def test_an_end_leaves_the_others_what_they_have(proxy: Wired) -> None:
    proxy.column(1)
    proxy.column(2)
    proxy.row(4, 3, OUTPUT_END | REQUEST_END)
    assert [proxy.tokens_of(rid) for rid in (3, 5)] == [2, 2] and proxy.open_requests == 2
    proxy.column(3)  # what is late for one is not for the others
    assert proxy.late_rows == 1 and proxy.bodies == [b"010203", b"0102..", b"010203"]
    proxy.column(4, rids=Rids((3, 5)))
    assert [proxy.tokens_of(rid) for rid in (3, 5)] == [4, 4]


def test_a_request_that_nobody_reads_any_more(proxy: Wired) -> None:
    proxy.column(1)
    proxy.discard(4)
    proxy.column(2)
    assert proxy.bodies == [b"0102", b"01", b"0102"] and proxy.told() == [2, 2, 2]


def test_another_worker_takes_over_in_the_middle(proxy: Wired) -> None:
    proxy.column(1)
    proxy.row(4, 2, epoch=1, worker=1)
    proxy.column(2)  # the last words of the first: late for the one that is elsewhere
    assert proxy.late_rows == 1 and proxy.bodies == [b"0102", b"01..", b"0102"] and proxy.told() == [2, 2, 2]
    proxy.column(7, epoch=1, worker=1)
    proxy.worker_lost(0)
    lost = proxy.sent[-1]
    assert isinstance(lost, WorkerLost) and lost.delivered == {}
    assert proxy.told() == [7] * 3 and proxy.late_rows == 1
    proxy.column(8)  # of the lost one
    assert proxy.late_rows == 4 and proxy.told() == [7] * 3


def test_a_new_executor_hears_of_the_columns(proxy: Wired) -> None:
    proxy.column(1)
    proxy.column(2)
    proxy.executor_lost()
    proxy.executor_joined()
    resubmits = [message for message in proxy.sent if isinstance(message, Resubmit)]
    assert [resubmit.delivered for resubmit in resubmits] == [[(2, False)]] * 3


def test_one_that_comes_and_one_that_goes(proxy: Wired) -> None:
    more = [Client() for _ in range(8)]
    for rid, client in enumerate(more, 10):
        proxy.open(request_of(rid, spec_of(CHAT)), client)
    batch = [3, *range(10, 17), 4]
    proxy.column(1, rids=Rids(batch))
    proxy.row(12, 2, OUTPUT_END | REQUEST_END)
    proxy.discard(14)
    batch = [3, 10, 11, 13, *range(15, 18), 4, 5]
    proxy.column(2, rids=Rids(batch))
    assert proxy.bodies == [b"0102", b"0102", b"02"] and [proxy.tokens_of(rid) for rid in batch] == [2] * 9
    assert [client.body for client in more] == [
        b"0102", b"0102", b"01..", b"0102", b"01", b"0102", b"0102", b"02",
    ]  # fmt: skip
    assert proxy.tokens_of(14) == 1 and proxy.late_rows == 0
    proxy.worker_lost(0)
    lost = proxy.sent[-1]
    assert isinstance(lost, WorkerLost)
    assert lost.delivered == {rid: [(2, False)] for rid in batch} | {14: [(1, False)]}


def test_what_comes_beside_a_column_leaves_it_alone(proxy: Wired) -> None:
    for rid in range(10, 14):
        proxy.open(request_of(rid, spec_of(CHAT)), Client())
    most, beside = Rids((3, 4, 5, 10, 11)), Rids((12, 13))
    proxy.column(1, rids=most)
    cohort = proxy.cohort_of(3)
    for count in (2, 3):
        proxy.column(count, rids=beside)
        proxy.column(count, rids=most)
    assert cohort is not None and proxy.cohort_of(3) is cohort and proxy.cohort_of(12) is None
    assert [proxy.tokens_of(rid) for rid in (*most, *beside)] == [3] * 7
    for count in (4, 5, 6):  # the others are silent from here on
        proxy.column(count, rids=Rids((3, 4)))
    assert proxy.cohort_of(3) is not cohort and [proxy.tokens_of(rid) for rid in most] == [6, 6, 3, 3, 3]


def test_the_same_request_twice_is_no_column(proxy: Wired) -> None:
    proxy.column(1, rids=Rids((3, 3, 4)))
    assert proxy.bodies == [b"0101", b"01", b""] and proxy.told() == [1, 1, 0]


def test_failing_all_in_the_middle_of_columns(proxy: Wired) -> None:
    proxy.column(1)
    proxy.fail_all("over")
    proxy.column(2)
    assert proxy.late_rows == 3 and proxy.open_requests == 0


def test_one_that_has_left_is_not_kept(proxy: Wired) -> None:
    proxy.column(1)
    gone = [weakref.ref(client) for client in proxy.clients[:2]]
    del proxy.clients[:2]
    proxy.row(3, 2, OUTPUT_END | REQUEST_END)
    proxy.row(4, 2, OUTPUT_END | REQUEST_END)  # from here on there is no column, and none that would end the old one
    proxy.row(5, 2)
    gc.collect()
    assert [client() for client in gone] == [None, None] and proxy.tokens_of(5) == 2


def test_one_that_leaves_while_others_are_fed(proxy: Wired) -> None:
    class Leaving(Client):
        """Has its neighbour leave."""

        def feed(self, payload: bytes, flags: int) -> None:
            super().feed(payload, flags)
            if len(self.payloads) == 2:
                proxy.discard(5)

    proxy.open(request_of(6, spec_of(CHAT)), Leaving())
    for count in (1, 2, 3):
        proxy.column(count, rids=Rids((3, 6, 4, 5)))
    assert proxy.bodies == [b"010203", b"010203", b"01"] and proxy.told() == [3] * 3


def test_all_leave_one_by_one() -> None:
    """In one step, say: thousands of them must not each be looked for among all."""
    compared = 0

    class Counted(Pending):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    rids = Rids(range(1000))
    pendings = [Counted(Client(), request_of(rid, spec_of(CHAT)), counts=[0], ends=[False]) for rid in rids]
    cohort = Cohort(rids, [0] * len(rids), 0, pendings)
    cohort.feed([7] * len(rids), iter([b"."] * len(rids)))
    for pending in reversed(pendings):
        pending.alone()
    assert all(pending.delivered == [(7, False)] for pending in pendings) and compared < 100 * len(rids)


def test_what_does_not_fit() -> None:
    def pending(epoch: int = 0, read: bool = True) -> Pending:
        return Pending(Client() if read else None, request_of(1, spec_of(CHAT)), epoch=epoch, counts=[0], ends=[False])

    assert Cohort.fits([pending(), pending(), pending()], [0] * 3)
    assert not Cohort.fits([pending(), None, pending()], [0] * 3)
    assert not Cohort.fits([pending(), pending(read=False), pending()], [0] * 3)
    assert not Cohort.fits([pending(), pending(epoch=2), pending()], [0, 1, 0])


# ------------------------------------------------------------------------------------------------------ pieces


AROUND = {rid: (b"%d<" % rid, b">") for rid in (*RIDS, 6)}
SOME = {rid: AROUND[rid] for rid in RIDS}


def test_pieces_stand_between_what_was_told(proxy: Wired) -> None:
    proxy.pieces(b"a", 1, SOME)
    proxy.pieces(b"b", 2)
    assert proxy.bodies == [b"3<a>3<b>", b"4<a>4<b>", b"5<a>5<b>"] and proxy.told() == [2] * 3


def test_one_that_comes_is_told(proxy: Wired) -> None:
    client = Client()
    proxy.pieces(b"a", 1, SOME)
    proxy.open(request_of(6, spec_of(CHAT)), client)
    proxy.pieces(b"b", 2, {6: AROUND[6]}, rids=Rids((3, 6, 4, 5)))
    proxy.row(3, 3, OUTPUT_END | REQUEST_END)
    proxy.pieces(b"c", 3, rids=Rids((6, 4, 5)))
    assert client.body == b"6<b>6<c>" and proxy.bodies == [b"3<a>3<b>..", b"4<a>4<b>4<c>", b"5<a>5<b>5<c>"]


def test_pieces_and_events_take_turns(proxy: Wired) -> None:
    proxy.pieces(b"a", 1, SOME)
    proxy.column(2)
    proxy.pieces(b"c", 3)
    proxy.row(4, 4)
    proxy.pieces(b"d", 5)
    assert proxy.bodies == [b"3<a>023<c>3<d>", b"4<a>024<c>..4<d>", b"5<a>025<c>5<d>"] and proxy.late_rows == 0


def test_pieces_of_a_column_that_does_not_stand(proxy: Wired) -> None:
    """Nobody reads one of them, so all go row by row."""
    proxy.discard(4)
    proxy.pieces(b"a", 1, SOME)
    assert proxy.bodies == [b"3<a>", b"", b"5<a>"] and proxy.told() == [1] * 3


def test_pieces_that_nobody_can_place_are_late(proxy: Wired) -> None:
    proxy.pieces(b"a", 1, {3: AROUND[3], 5: AROUND[5]})
    assert proxy.bodies == [b"3<a>", b"", b"5<a>"] and proxy.late_rows == 1


def test_a_few_events_beside_many_pieces_leave_the_column_alone(proxy: Wired) -> None:
    clients = [Client() for _ in range(6)]
    for rid, client in enumerate(clients, 10):
        proxy.open(request_of(rid, spec_of(CHAT)), client)
    many, few = Rids((*RIDS, *range(10, 14))), Rids((14, 15))
    around = {rid: (b"<", b">") for rid in many}
    for count in (1, 2, 3):
        proxy.pieces(b"%d" % count, count, around if count == 1 else None, rids=many)
        proxy.column(count, rids=few)
        if count == 1:
            cohort = proxy.cohort_of(10)
        assert proxy.cohort_of(10) is cohort is not None and proxy.cohort_of(14) is None
    assert [client.body for client in clients] == [b"<1><2><3>"] * 4 + [b"010203"] * 2

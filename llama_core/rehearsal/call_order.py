"""The order of communication as data: what ranks ask of communicators, and whether it can end.

The model of a run on CUDA with NCCL:

* The host makes its calls in program order and does not wait for them. A communicator is a queue:
  an operation begins after the operations before it on that communicator, after all that the
  issuing stream had waited for when the call was made, and after all that the host had waited for.
* A collective ends on all members once it has begun on all of them. A send and its receive are one
  event too, even though a small send could end early. Operations that are launched together begin
  together, and end together once each of them can.
* ``work.wait()`` and events make a stream wait. Reading a value, a control message and making a
  group make the host wait.
* The first collective of a communicator, and the first transfer from one rank to another, connect
  their ranks: the host goes on when the other ranks have made their calls.

So a run cannot hang if the members of every communicator agree on their calls (``mismatches``) and
no operation waits for itself (``circle``). What a device lacks is not modelled: free
multiprocessors, hardware queues, memory.

Source: NVIDIA, NCCL user guide, "Creating a communicator", "Group calls" and
"Point-to-point communication".
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise

SEND = "send"
RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group, as all of its members know it."""

    ranks: tuple[int, ...]
    """Global ranks of the members, in order."""
    number: int = 0
    """How many groups of the same members were made before it."""
    purpose: str = field(default="", compare=False)
    """What it is for, in messages."""

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}{self.purpose and f' ({self.purpose})'}"


@dataclass(frozen=True, slots=True)
class CalledOperation:
    """What one rank passes to an operation of a communicator."""

    name: str
    """``send``, ``receive`` or a collective, with its reduction or root."""
    dtype: str = ""
    elements: tuple[int, ...] = ()
    """Elements of every tensor; for an all-to-all, those that each member gets."""
    received: tuple[int, ...] = ()
    """For an all-to-all, the elements that come from each member."""
    peer: int | None = None
    """Global rank of the other side of a send or a receive."""
    content: str = ""
    """What is sent, where that is known: by equal sizes alone, two ranks may
    mean different things."""

    def __str__(self) -> str:
        where = ""
        if self.name in {SEND, RECEIVE}:
            preposition = "to" if self.name == SEND else "from"
            where = f" {preposition} rank {self.peer}"
        size = f" of {' + '.join(map(str, self.elements))} {self.dtype}" if self.elements else ""
        return f"{self.name}{size}{where}{self.content and f' ({self.content})'}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one rank to a communicator."""

    communicator: Communicator
    operations: tuple[CalledOperation, ...]
    """A collective, or sends and receives that are launched together."""
    after: tuple[int, ...] = ()
    """Numbers of the rank's earlier calls that the issuing stream had waited for."""
    host_after: tuple[int, ...] = ()
    """Numbers of those that the host has waited for since its last call."""
    behind: tuple[int, ...] = ()
    """Numbers of those that any stream had waited for."""
    where: str = ""
    """The part of the run that made it, for messages."""

    @property
    def is_transfer(self) -> bool:
        """Whether it consists of sends and receives."""
        return self.operations[0].peer is not None

    def __str__(self) -> str:
        return f"{' with '.join(map(str, self.operations))}{self.where and f' in {self.where}'}"


Ranks = Sequence[Sequence[Call]]
"""The calls of every rank, in the order in which its host makes them."""
QueueOf = Callable[[int, Call], Hashable | None]
"""Returns the queue that a rank's call waits in beside its communicator's;
None if there is none."""


def own_queue(rank: int, call: Call) -> Hashable | None:
    """Return no other queue."""
    return None


def collectives_in_line(rank: int, call: Call) -> Hashable | None:
    """Return a queue for all collectives of a rank.

    NCCL asks that ranks issue the collectives of all communicators in one order, as a device may
    lack the room to run two of them at once.
    """
    return None if call.is_transfer else "collectives"


def mismatches(ranks: Ranks) -> list[str]:
    """Return a line for the first disagreement on every communicator: two ranks and their calls.

    Members agree on their collectives if these have the same order, operations, elements and
    dtypes; in an all-to-all, rank i sends to j what j receives from i. Every send has its receive,
    in the same order between two ranks of a communicator.
    """
    return [*_unequal_collectives(ranks), *_unequal_transfers(ranks)]


def _unequal_collectives(ranks: Ranks) -> Iterator[str]:
    calls: dict[Communicator, dict[int, list[Call]]] = {}
    for rank, made in enumerate(ranks):
        for call in made:
            communicator = call.communicator
            if communicator not in calls:
                calls[communicator] = {member: [] for member in communicator.ranks}
            if not call.is_transfer:
                calls[communicator][rank].append(call)
    for communicator, by_member in calls.items():
        first, *others = communicator.ranks
        for other in others:
            disagreement = _disagreement(by_member[first], by_member[other])
            if disagreement is not None:
                number, mine, others_call = disagreement
                yield (
                    f"collective {number + 1} on {communicator}: rank {first} makes "
                    f"{_named(mine)}, rank {other} {_named(others_call)}"
                )
                break
        else:
            yield from _unequal_exchanges(communicator, by_member)


def _disagreement(
    calls: Sequence[Call],
    others: Sequence[Call],
) -> tuple[int, Call | None, Call | None] | None:
    """Return the number of the first collective that two ranks do not share, and those of both."""
    for number in range(max(len(calls), len(others))):
        one = calls[number] if number < len(calls) else None
        other = others[number] if number < len(others) else None
        if one is None or other is None or _shape(one) != _shape(other):
            return number, one, other
    return None


def _shape(call: Call) -> tuple[Hashable, ...]:
    """Return what all members of a collective have in common."""
    (operation,) = call.operations
    # an all-to-all has other sizes on every member
    elements = len(operation.elements) if operation.received else operation.elements
    return operation.name, operation.dtype, elements, len(operation.received), operation.content


def _unequal_exchanges(
    communicator: Communicator,
    by_member: Mapping[int, Sequence[Call]],
) -> Iterator[str]:
    """Yield the first all-to-all in which a member does not expect what another one sends it."""
    members = communicator.ranks
    calls_of_members = [by_member[member] for member in members]
    for number, exchange in enumerate(zip(*calls_of_members, strict=True)):
        operations = [call.operations[0] for call in exchange]
        if not operations[0].received:
            continue
        for place, (sender, sent) in enumerate(zip(members, operations, strict=True)):
            for target, (receiver, expected) in enumerate(zip(members, operations, strict=True)):
                if sent.elements[target] != expected.received[place]:
                    yield (
                        f"collective {number + 1} on {communicator}: rank {sender} sends "
                        f"{sent.elements[target]} elements to rank {receiver}, which expects "
                        f"{expected.received[place]}, in {sent.name} in {exchange[place].where}"
                    )
                    return


def _named(call: Call | None) -> str:
    return "none" if call is None else str(call)


_Route = tuple[Communicator, int, int]
"""A communicator, and the global ranks that send and receive on it."""
_Message = tuple[CalledOperation, str]
"""A send or a receive, and the part of the run that makes it."""


def _unequal_transfers(ranks: Ranks) -> Iterator[str]:
    sent: dict[_Route, list[_Message]] = defaultdict(list)
    received: dict[_Route, list[_Message]] = defaultdict(list)
    for rank, made in enumerate(ranks):
        for call in made:
            for operation in call.operations:
                if operation.peer is None:
                    continue
                message = (operation, call.where)
                if operation.name == SEND:
                    sent[call.communicator, rank, operation.peer].append(message)
                else:
                    received[call.communicator, operation.peer, rank].append(message)

    def order(route: _Route) -> tuple[int, int, tuple[int, ...], int]:
        communicator, source, target = route
        return source, target, communicator.ranks, communicator.number

    for route in sorted({*sent, *received}, key=order):
        communicator, source, target = route
        for number in range(max(len(sent[route]), len(received[route]))):
            send, send_where = _at(sent[route], number)
            receive, receive_where = _at(received[route], number)
            if send is not None and receive is not None and _is_met(send, receive):
                continue
            yield (
                f"message {number + 1} from rank {source} to rank {target} on {communicator}: rank "
                f"{source} makes {_message(send, send_where)}, rank {target} "
                f"{_message(receive, receive_where)}"
            )
            break


def _at(messages: Sequence[_Message], number: int) -> tuple[CalledOperation | None, str]:
    return messages[number] if number < len(messages) else (None, "")


def _is_met(send: CalledOperation, receive: CalledOperation) -> bool:
    known = (send.dtype, send.elements, send.content)
    return known == (receive.dtype, receive.elements, receive.content)


def _message(operation: CalledOperation | None, where: str) -> str:
    return "none" if operation is None else f"{operation}{where and f' in {where}'}"


def circle(ranks: Ranks, queue_of: QueueOf = own_queue, *, in_one_stream: bool = False) -> str:
    """Return one circle of operations that wait for each other, in one line; empty without one.

    Args:
        ranks: calls without mismatches.
        queue_of: the queues that calls wait in beside those of their communicators.
        in_one_stream: let whatever one stream of a rank waits for hold up all of them. This can
            happen to streams that share a hardware queue of the device.
    """
    graph = _Graph(ranks, queue_of, in_one_stream=in_one_stream)
    try:
        TopologicalSorter(graph.before).prepare()
    except CycleError as error:
        return graph.described(graph.shortest_circle(error.args[1][0]))
    return ""


_Node = tuple[Hashable, ...]


class _Graph:
    """Which events of all ranks come before which others, and on which rank.

    A collective, or a send with its receive, is one event. The others are: all operations that
    were launched together have ended; a rank's host goes on after it has waited; the hosts of
    ranks that connect have met.
    """

    def __init__(self, ranks: Ranks, queue_of: QueueOf, *, in_one_stream: bool) -> None:
        self.before: dict[_Node, dict[_Node, int]] = defaultdict(dict)
        """For each event, those that come before it, with the rank for which they do."""
        self._calls: dict[_Node, dict[int, Call]] = defaultdict(dict)
        """The calls of each operation, by rank."""
        self._in_one_stream = in_one_stream
        for rank, calls in enumerate(ranks):
            self._add(rank, calls, queue_of)

    def _add(self, rank: int, calls: Sequence[Call], queue_of: QueueOf) -> None:
        ends: list[_Node] = []
        last: dict[Hashable, _Node] = {}
        counts: Counter[_Node] = Counter()
        host: _Node = ("host", rank, 0)
        for number, call in enumerate(calls):
            if call.host_after:
                waited_for = [ends[earlier] for earlier in call.host_after]
                host = self._host_goes_on(rank, number, host, waited_for)
            queues = {call.communicator, queue_of(rank, call)} - {None}
            before = call.behind if self._in_one_stream else call.after
            begins = [host, *(ends[earlier] for earlier in before)]
            begins += (last[queue] for queue in queues if queue in last)
            matched: list[_Node] = []
            for route in _routes(rank, call):
                matched.append((*route, counts[route]))
                counts[route] += 1
            for node in matched:
                self._come_before(node, begins, rank)
                self._calls[node][rank] = call
            # operations that are launched together end together, which is an event of its own
            end = matched[0] if len(matched) == 1 else ("launched", rank, number)
            if end not in matched:
                self._come_before(end, matched, rank)
            ends.append(end)
            last |= dict.fromkeys(queues, end)
            # the first operation of a communicator, or between two ranks, connects its ranks
            met: list[_Node] = [("met", *node) for node in matched if node[-1] == 0]
            for node in met:
                self._come_before(node, [host], rank)
            if met:
                host = self._host_goes_on(rank, number, host, met)

    def _host_goes_on(
        self,
        rank: int,
        number: int,
        host: _Node,
        waited_for: Sequence[_Node],
    ) -> _Node:
        goes_on: _Node = ("host", rank, number, *waited_for)
        self._come_before(goes_on, [host, *waited_for], rank)
        return goes_on

    def _come_before(self, node: _Node, others: Iterable[_Node], rank: int) -> None:
        for other in others:
            self.before[node].setdefault(other, rank)

    def shortest_circle(self, start: _Node) -> list[_Node]:
        """Return a shortest way from an event, each time to one that comes before it, to itself."""
        found_from: dict[_Node, _Node] = {}
        ahead = deque([start])
        while start not in found_from:
            node = ahead.popleft()
            for earlier in self.before[node]:
                if earlier not in found_from:
                    found_from[earlier] = node
                    ahead.append(earlier)
        way = [start]
        while len(way) == 1 or way[-1] != start:
            way.append(found_from[way[-1]])
        return way[::-1]

    def described(self, way: Sequence[_Node]) -> str:
        """Return a circle in words, a clause for each rank on which an operation waits."""
        edges = [(waits, earlier, self.before[waits][earlier]) for waits, earlier in pairwise(way)]
        # begin where the rank changes, so that no rank is in two clauses, the first and the last
        start = next(place for place, edge in enumerate(edges) if edge[2] != edges[place - 1][2])
        clauses: list[str] = []
        for rank, on_rank in groupby([*edges[start:], *edges[:start]], key=lambda edge: edge[2]):
            part = list(on_rank)
            waiting = self._named(part[0][0], rank)
            earlier = self._named(part[-1][1], rank)
            clauses.append(f"on rank {rank}, {waiting} waits for {earlier}")
        return "; ".join(clauses)

    def _named(self, node: _Node, rank: int) -> str:
        if node[0] == "met":
            return f"connecting for {self._named(node[1:], rank)}"
        call = self._calls[node][rank]
        return f"{call} on {call.communicator}"


def _routes(rank: int, call: Call) -> Iterator[_Node]:
    """Yield what the operations of a call are numbered by.

    That is the communicator and, for a transfer, the two ranks.
    """
    for operation in call.operations:
        if operation.peer is None:
            yield (call.communicator,)
        elif operation.name == SEND:
            yield call.communicator, rank, operation.peer
        else:
            yield call.communicator, operation.peer, rank

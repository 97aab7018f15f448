"""The order of communication as data: what every rank asks of its communicators, and whether all of it can end.

The model of a run on CUDA with NCCL:

* The host makes its calls in program order and does not wait for them. A communicator is a queue: an operation begins
  after the operations before it on that communicator, after all that the issuing stream had waited for when the call
  was made, and after all that the host had waited for.
* A collective ends on all members once it has begun on all of them. A send and its receive are one event too, even
  though a small send could end early. Operations that are launched together begin together, and end together once each
  of them can.
* ``work.wait()`` and events make a stream wait. Reading a value, a control message and making a group make the host
  wait.
* The first collective of a communicator, and the first transfer from one rank to another, connect their ranks: the host
  goes on when the other ranks have made their calls.

So a run cannot hang if the members of every communicator agree on their calls (``mismatches``) and no operation waits
for itself (``circle``). What a device lacks is not modelled: free multiprocessors, hardware queues, memory.

Source: NVIDIA, NCCL user guide, "Creating a communicator", "Group calls" and "Point-to-point communication".
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
    """What is sent, where that is known; equal sizes alone do not show that two ranks mean the same."""

    def __str__(self) -> str:
        where = {SEND: f" to rank {self.peer}", RECEIVE: f" from rank {self.peer}"}.get(self.name, "")
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
"""Returns the queue that a rank's call waits in beside that of its communicator; None if there is none."""


def own_queue(rank: int, call: Call) -> Hashable | None:
    """Return no other queue."""
    return None


def collectives_in_line(rank: int, call: Call) -> Hashable | None:
    """Return a queue for all collectives of a rank.

    NCCL asks that ranks issue the collectives of all communicators in one order, as a device may lack the room to run
    two of them at once.
    """
    return None if call.is_transfer else "collectives"


def mismatches(ranks: Ranks) -> list[str]:
    """Return a line for the first disagreement on every communicator: the two ranks and their calls.

    Members agree on their collectives if these have the same order, operations, elements and dtypes; in an all-to-all,
    rank i sends to j what j receives from i. Every send has its receive, in the same order between two ranks of a
    communicator.
    """
    return [*_unequal_collectives(ranks), *_unequal_transfers(ranks)]


def _unequal_collectives(ranks: Ranks) -> Iterator[str]:
    calls: dict[Communicator, dict[int, list[Call]]] = {}
    for rank, made in enumerate(ranks):
        for call in made:
            by_member = calls.setdefault(call.communicator, {member: [] for member in call.communicator.ranks})
            if not call.is_transfer:
                by_member[rank].append(call)
    for communicator, by_member in calls.items():
        first, *others = communicator.ranks
        for other in others:
            disagreement = _disagreement(by_member[first], by_member[other])
            if disagreement is not None:
                number, mine, theirs = disagreement
                yield (
                    f"collective {number + 1} on {communicator}: rank {first} makes {_named(mine)}, "
                    f"rank {other} {_named(theirs)}"
                )
                break
        else:
            yield from _unequal_exchanges(communicator, by_member)


def _disagreement(calls: Sequence[Call], others: Sequence[Call]) -> tuple[int, Call | None, Call | None] | None:
    """Return the number of the first collective that two ranks do not share, and what each makes instead."""
    for number in range(max(len(calls), len(others))):
        one = calls[number] if number < len(calls) else None
        other = others[number] if number < len(others) else None
        if one is None or other is None or _shape(one) != _shape(other):
            return number, one, other
    return None


def _shape(call: Call) -> tuple[Hashable, ...]:
    """Return what all members of a collective have in common; an all-to-all has other sizes on every member."""
    (operation,) = call.operations
    elements = len(operation.elements) if operation.received else operation.elements
    return operation.name, operation.dtype, elements, len(operation.received), operation.content


def _unequal_exchanges(communicator: Communicator, by_member: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Yield the first all-to-all in which a member does not expect what another one sends it."""
    for number, exchange in enumerate(zip(*(by_member[member] for member in communicator.ranks), strict=True)):
        operations = [call.operations[0] for call in exchange]
        if not operations[0].received:
            continue
        for place, (sender, sent) in enumerate(zip(communicator.ranks, operations, strict=True)):
            for target, (receiver, expected) in enumerate(zip(communicator.ranks, operations, strict=True)):
                if sent.elements[target] != expected.received[place]:
                    yield (
                        f"collective {number + 1} on {communicator}: rank {sender} sends {sent.elements[target]} "
                        f"elements to rank {receiver}, which expects {expected.received[place]}, in "
                        f"{sent.name} in {exchange[place].where}"
                    )
                    return


def _named(call: Call | None) -> str:
    return "none" if call is None else str(call)


def _unequal_transfers(ranks: Ranks) -> Iterator[str]:
    sent: dict[tuple[Communicator, int, int], list[tuple[CalledOperation, str]]] = defaultdict(list)
    received: dict[tuple[Communicator, int, int], list[tuple[CalledOperation, str]]] = defaultdict(list)
    for rank, made in enumerate(ranks):
        for call in made:
            for operation in call.operations:
                if operation.peer is None:
                    continue
                if operation.name == SEND:
                    sent[call.communicator, rank, operation.peer].append((operation, call.where))
                else:
                    received[call.communicator, operation.peer, rank].append((operation, call.where))
    for route in sorted({*sent, *received}, key=lambda route: (route[1:], route[0].ranks, route[0].number)):
        communicator, source, target = route
        for number in range(max(len(sent[route]), len(received[route]))):
            send, send_where = _at(sent[route], number)
            receive, receive_where = _at(received[route], number)
            if send is not None and receive is not None and _is_met(send, receive):
                continue
            yield (
                f"message {number + 1} from rank {source} to rank {target} on {communicator}: "
                f"rank {source} makes {_message(send, send_where)}, rank {target} {_message(receive, receive_where)}"
            )
            break


def _at(messages: Sequence[tuple[CalledOperation, str]], number: int) -> tuple[CalledOperation | None, str]:
    return messages[number] if number < len(messages) else (None, "")


def _is_met(send: CalledOperation, receive: CalledOperation) -> bool:
    known = (send.dtype, send.elements, send.content)
    return known == (receive.dtype, receive.elements, receive.content)


def _message(operation: CalledOperation | None, where: str) -> str:
    return "none" if operation is None else f"{operation}{where and f' in {where}'}"


def circle(ranks: Ranks, queue_of: QueueOf = own_queue, *, in_one_stream: bool = False) -> str:
    """Return one circle of operations that wait for each other, in one line; empty if there is none.

    Args:
        ranks: calls without mismatches.
        queue_of: the queues that calls wait in beside those of their communicators.
        in_one_stream: let whatever one stream of a rank waits for hold up all of them. This can happen to streams that
            share a hardware queue of the device.
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

    A collective, or a send with its receive, is one event. The others are: all operations that were launched together
    have ended; a rank's host goes on after it has waited; the hosts of ranks that connect have met.
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
                host = self._host_goes_on(rank, number, host, [ends[earlier] for earlier in call.host_after])
            queues = {call.communicator, queue_of(rank, call)} - {None}
            waited_for = call.behind if self._in_one_stream else call.after
            begins = [host, *(ends[earlier] for earlier in waited_for)]
            begins += (last[queue] for queue in queues if queue in last)
            matched: list[_Node] = []
            for route in _routes(rank, call):
                matched.append((*route, counts[route]))
                counts[route] += 1
            for node in matched:
                self._come_before(node, begins, rank)
                self._calls[node][rank] = call
            end = matched[0] if len(matched) == 1 else ("launched", rank, number)
            if end not in matched:
                self._come_before(end, matched, rank)
            ends.append(end)
            last |= dict.fromkeys(queues, end)
            met: list[_Node] = [("met", *node) for node in matched if node[-1] == 0]
            for node in met:
                self._come_before(node, [host], rank)
            if met:
                host = self._host_goes_on(rank, number, host, met)

    def _host_goes_on(self, rank: int, number: int, host: _Node, waited_for: Sequence[_Node]) -> _Node:
        goes_on: _Node = ("host", rank, number, *waited_for)
        self._come_before(goes_on, [host, *waited_for], rank)
        return goes_on

    def _come_before(self, node: _Node, others: Iterable[_Node], rank: int) -> None:
        for other in others:
            self.before[node].setdefault(other, rank)

    def shortest_circle(self, start: _Node) -> list[_Node]:
        """Return a shortest way from an event, over one that comes before it and so on, back to itself."""
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
        """Return a circle in words, a clause for each rank on which one operation waits for another."""
        edges = [(waits, earlier, self.before[waits][earlier]) for waits, earlier in pairwise(way)]
        start = next(place for place, edge in enumerate(edges) if edge[2] != edges[place - 1][2])
        clauses = []
        for rank, on_rank in groupby([*edges[start:], *edges[:start]], key=lambda edge: edge[2]):
            part = list(on_rank)
            clauses.append(
                f"on rank {rank}, {self._named(part[0][0], rank)} waits for {self._named(part[-1][1], rank)}"
            )
        return "; ".join(clauses)

    def _named(self, node: _Node, rank: int) -> str:
        if node[0] == "met":
            return f"connecting for {self._named(node[1:], rank)}"
        call = self._calls[node][rank]
        return f"{call} on {call.communicator}"


def _routes(rank: int, call: Call) -> Iterator[_Node]:
    """Yield what the operations of a call are numbered by: the communicator and, for a transfer, the two ranks."""
    for operation in call.operations:
        if operation.peer is None:
            yield (call.communicator,)
        elif operation.name == SEND:
            yield call.communicator, rank, operation.peer
        else:
            yield call.communicator, operation.peer, rank

"""The communicator of one dimension: who is in it, and its collectives. mesh.py adds the mesh that
it belongs to."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, Optional, Tuple, Union

from . import _interrupt as interrupt
from ._library import check, int32, is_bool, library, listed, within
from ._open_groups import opened
from ._queries import MeshQueries
from .buffers import Memory, changed, memory, stream_handle
from .constants import DType, ReduceOp, reduction
from .errors import InvalidArgumentError, UnsupportedError
from .group import Queued, operation

__all__ = ["Collectives"]

# Any includes the operators of torch and mpi4py, which this package does not import.
Op = Union[ReduceOp, str, int, Any]


class Collectives:
    """This rank's group along one dimension of a mesh: ``mesh.get_group("tp")``.

    Buffers are anything with the buffer protocol (bytearray, array, numpy), DLPack (torch, jax,
    cupy) or __cuda_array_interface__, contiguous, used in place without copying: host memory on a
    cpu mesh, device memory on a cuda mesh. On cpu a collective returns when the result is there.
    On cuda it returns when the work is enqueued on ``stream`` (an integer, torch.cuda.Stream ...,
    None for the default stream), and the buffers must stay until it has run.

    The interpreter lock is released while a call blocks, and Ctrl-C ends it (and the mesh with it).
    """

    def __init__(self, mesh: MeshQueries, name: str) -> None:
        self._mesh = mesh
        self._name = name
        self._dim = name.encode()
        self._handle = mesh._handle
        self._end = partial(library.dm_abort, mesh._handle)
        self._device = mesh.device_type
        rank = ctypes.c_int32()
        check(library.dm_get_local_rank(self._handle, self._dim, ctypes.byref(rank)))
        self._rank = rank.value
        self._ranks: Tuple[int, ...] = tuple(
            listed(ctypes.c_int32, lambda *out: int(library.dm_group_ranks(self._handle, self._dim, *out))))

    @property
    def name(self) -> str:
        """The dimension's name."""
        return self._name

    @property
    def rank(self) -> int:
        """This process's rank in the group: its coordinate along the dimension."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self._ranks)

    @property
    def ranks(self) -> Tuple[int, ...]:
        """The world ranks of the group, in the order of their ranks in it."""
        return self._ranks

    @property
    def handle(self) -> int:
        """The raw ncclComm_t, for calls through ``mesh.get_proc``. Valid until the mesh is
        finalized or aborted; never destroy it."""
        comm = ctypes.c_void_p()
        check(interrupt.call(self._end, library.dm_get_comm, self._handle, self._dim, ctypes.byref(comm)))
        return comm.value or 0

    def check(self) -> None:
        """Raises the communicator's asynchronous error, if it has one. Does not wait."""
        check(library.dm_check(self._handle, self._dim))

    @operation
    def all_reduce(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None) -> None:
        """Reduces over all ranks. Every rank gets the result in ``out``, or in ``buffer`` when
        ``out`` is None."""
        op = reduction(op)
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        self._apart("all_reduce", send, receive, receive.address - send.address)
        self._run(library.dm_all_reduce, send, receive, send.address, receive.address, send.count, send.dtype, op, on)

    @operation
    def reduce(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, root: int = 0, stream: Any = None) -> None:
        """Reduces over all ranks. Rank root of the group gets the result, in ``out`` or in place.
        The ``out`` of the other ranks is not used."""
        op, root = reduction(op), self._member("root", root)
        if root != self._rank:
            on = stream_handle(stream)
            send = self._one(buffer, False, on)
            if out is not None:
                # This rank does not use out. But reduce(buffer, 1), which in PyTorch means "to
                # rank 1", must fail on every rank.
                memory(out, "out", on).release()
            self._run(library.dm_reduce, send, None, send.address, None, send.count, send.dtype, op, root, on)
            return
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        self._apart("reduce", send, receive, receive.address - send.address)
        self._run(library.dm_reduce, send, receive, send.address, receive.address, send.count, send.dtype, op, root, on)

    @operation
    def broadcast(self, buffer: Any, out: Any = None, *, root: int = 0, stream: Any = None) -> None:
        """Copies the buffer of rank root of the group to all ranks: into ``out``, or in place.
        ``buffer`` may be None where ``out`` is given and this rank is not the root."""
        root, on = self._member("root", root), stream_handle(stream)
        if root == self._rank:
            send, receive, on = self._two(buffer, out, stream, readonly_in_place=True)
            self._same_count(send, receive)
            self._apart("broadcast", send, receive, receive.address - send.address)
        else:
            send = receive = self._one(buffer, True, on) if out is None else self._one(out, True, on, "out")
        self._run(library.dm_broadcast, send, receive, send.address, receive.address, receive.count, receive.dtype, root, on)

    @operation
    def all_gather(self, buffer: Any, out: Any, *, stream: Any = None) -> None:
        """Gathers every rank's buffer in ``out``, in rank order. When ``buffer`` is None, this
        rank's data is already in its block of ``out``."""
        if buffer is None:
            receive = self._one(out, True, stream_handle(stream), "out")
            count = self._share(receive, "out")
            self._run(library.dm_all_gather, receive, None, receive.part(self._rank, count), receive.address, count, receive.dtype, stream_handle(stream))
            return
        send, receive, on = self._two(buffer, out, stream)
        self._times(receive, "out", send, "buffer")
        self._apart("all_gather", send, receive, receive.part(self._rank, send.count) - send.address)
        self._run(library.dm_all_gather, send, receive, send.address, receive.address, send.count, send.dtype, on)

    @operation
    def reduce_scatter(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None) -> None:
        """Reduces over all ranks and leaves block i on rank i: in ``out``, or in block i of
        ``buffer`` when ``out`` is None."""
        op = reduction(op)
        if out is None:
            on = stream_handle(stream)
            send = self._one(buffer, True, on)
            count = self._share(send, "buffer")
            self._run(library.dm_reduce_scatter, send, None, send.address, send.part(self._rank, count), count, send.dtype, op, on)
            return
        send, receive, on = self._two(buffer, out, stream)
        self._times(send, "buffer", receive, "out")
        self._apart("reduce_scatter", send, receive, receive.address - send.part(self._rank, receive.count))
        self._run(library.dm_reduce_scatter, send, receive, send.address, receive.address, receive.count, send.dtype, op, on)

    @operation
    def all_to_all(self, buffer: Any, out: Any, *, stream: Any = None) -> None:
        """Sends block i of ``buffer`` to rank i, and receives block i of ``out`` from rank i. On
        cpu they may be the same, on cuda they must lie apart."""
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        count = self._share(send, "buffer", receive)
        self._apart("all_to_all", send, receive, receive.address - send.address if self._device == "cpu" or self.size == 1 else None)
        self._run(library.dm_all_to_all, send, receive, send.address, receive.address, count, send.dtype, on)

    @operation
    def send(self, buffer: Any, peer: int, *, stream: Any = None) -> None:
        """Sends to rank peer of the group. That rank must receive. Put the sends and receives of
        one exchange into ``with mesh.group():``."""
        peer, on = self._member("peer", peer), stream_handle(stream)
        source = self._one(buffer, False, on)
        self._run(library.dm_send, source, None, source.address, source.count, source.dtype, peer, on)

    @operation
    def recv(self, buffer: Any, peer: int, *, stream: Any = None) -> None:
        """Receives from rank peer of the group. That rank must send as many elements."""
        peer, on = self._member("peer", peer), stream_handle(stream)
        target = self._one(buffer, True, on)
        self._run(library.dm_recv, target, None, target.address, target.count, target.dtype, peer, on)

    def _run(self, function: Any, one: Memory, two: Optional[Memory], *arguments: Any) -> None:
        """Makes the call, or queues it inside a group. Its buffers are kept until it is over."""
        kept = (one,) if two is None or two is one else (one, two)
        if opened.groups:
            opened.groups[-1].add(Queued(self, partial(function, self._handle, self._dim, *arguments), kept))
            return
        try:
            check(interrupt.issue(self._end, function, self._handle, self._dim, *arguments))
        finally:
            for each in kept:
                each.release()

    def _member(self, what: str, rank: Any) -> int:
        """A rank of the group."""
        number = int32(what, rank)
        if not 0 <= number < self.size:
            self._refuse(f"{what} is {number}, but dimension {self._name} has ranks 0 to {self.size - 1}")
        return number

    def _one(self, array: Any, written: bool, stream: int, what: str = "buffer") -> Memory:
        found = memory(array, what, stream)
        if found.device != self._device and found.device != "managed":
            self._refuse(f"{what} lies in {found.device} memory, but the mesh is on {self._device}", found)
        if stream and self._device == "cpu":
            self._refuse(f"stream is {stream:#x}, but device type cpu has no streams: pass None", found)
        if written and found.readonly:
            self._refuse(f"{what} is read-only, and the result would be written into it", found)
        if written and found.copied:
            self._refuse(f"{what} gives a copy of itself through __dlpack__, so the result that is written there would be lost", found)
        if written:
            changed(array)
        return found

    def _two(self, buffer: Any, out: Any, stream: Any, readonly_in_place: bool = False) -> Tuple[Memory, Memory, int]:
        on = stream_handle(stream)
        if out is None or out is buffer:
            both = self._one(buffer, not readonly_in_place, on)
            return both, both, on
        send = self._one(buffer, False, on)
        try:
            receive = self._one(out, True, on, "out")
        except BaseException:
            send.release()
            raise
        if send.dtype != receive.dtype:
            self._refuse(f"buffer has {DType(send.dtype).name.lower()} elements, out has {DType(receive.dtype).name.lower()}", send, receive)
        return send, receive, on

    def _refuse(self, why: str, *taken: Memory) -> None:
        for each in taken:
            each.release()
        raise InvalidArgumentError(why)

    def _same_count(self, send: Memory, receive: Memory) -> None:
        if send.count != receive.count:
            self._refuse(f"buffer has {send.count} elements, out has {receive.count}", send, receive)

    def _times(self, large: Memory, its_name: str, small: Memory, other_name: str) -> None:
        if large.count != small.count * self.size:
            self._refuse(
                f"{its_name} has {large.count} elements, but {self.size} ranks x {small.count} of {other_name} are {small.count * self.size}", large, small)

    def _share(self, whole: Memory, what: str, *others: Memory) -> int:
        if whole.count % self.size:
            self._refuse(f"{what} has {whole.count} elements, which {self.size} ranks do not share evenly", whole, *others)
        return whole.count // self.size

    def _apart(self, call: str, send: Memory, receive: Memory, off: Optional[int]) -> None:
        """In a group: refuses buffers that overlap, unless they are exactly in place (off is 0),
        before anything of the group is under way.

        Outside a group the library does so.
        """
        if off == 0 or not opened.groups:
            return
        apart = send.address + send.nbytes <= receive.address or receive.address + receive.nbytes <= send.address
        if not apart and send.count and receive.count:
            self._refuse(f"{call}: buffer and out overlap, but are not in place exactly; let them lie apart", send, receive)

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError("a Communicator lives in one process and cannot be pickled; pickle its mesh")

    def __repr__(self) -> str:
        return f"Communicator({self._name!r}, rank={self._rank}, ranks={self._ranks})"


def adopted_handle(group: Any, device_type: str) -> int:
    """The ncclComm_t of what from_group takes: an address, a Communicator, or PyTorch's
    ProcessGroup with an NCCL backend."""
    if isinstance(group, Collectives):
        return group.handle
    if isinstance(group, int) and not is_bool(group):
        return within("group", group, 1, 2**64 - 1)
    if hasattr(group, "_get_backend"):
        import torch  # type: ignore[import-not-found, unused-ignore]

        backend = group._get_backend(torch.device(device_type))
        if not hasattr(backend, "_comm_ptr"):
            raise UnsupportedError(f"PyTorch's {type(backend).__name__} has no NCCL communicator to adopt; device type {device_type} needs its nccl backend")
        address = int(backend._comm_ptr())
        if address == 0:
            raise InvalidArgumentError(
                "PyTorch makes its NCCL communicator at the group's first collective: run one, or give init_process_group a device_id")
        return address
    raise TypeError(f"a group is a {type(group).__name__}; an ncclComm_t's address, a Communicator or a torch ProcessGroup was expected")

"""The communicator of one dimension, and its collectives."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, List, Optional, Tuple, Union

from . import _interrupt as interrupt
from ._beside import group_changes
from ._library import check, int32, library, listed
from .buffers import Memory, memory, stream_handle
from .constants import DType, ReduceOp, reduction
from .errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from .mesh import DeviceMesh

__all__ = ["Communicator", "Group"]

Op = Union[ReduceOp, str, int]


class Issued(threading.local):
    """Buffers that operations of this thread's open groups still use, and how many groups are open."""

    def __init__(self) -> None:
        self.depth = 0
        self.buffers: List[Memory] = []


issued = Issued()


class Communicator:
    """This rank's group along one dimension of a mesh: ``mesh.get_group("tp")``.

    Buffers are anything with the buffer protocol (bytearray, array, numpy), DLPack (torch, jax, cupy) or __cuda_array_interface__, contiguous, used in
    place without copying: host memory on a cpu mesh, device memory on a cuda mesh. On cpu a collective returns when the result is there; on cuda when the
    work is enqueued on ``stream`` (an integer, torch.cuda.Stream ..., None for the default stream), and the buffers must stay until it has run.

    The interpreter lock is released while a call blocks, and Ctrl-C ends it (and the mesh with it).
    """

    def __init__(self, mesh: "DeviceMesh", name: str) -> None:
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
    def mesh(self) -> "DeviceMesh":
        """The mesh whose dimension this is."""
        return self._mesh

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
        """The raw ncclComm_t, for calls through ``mesh.get_proc``. Valid until the mesh is finalized or aborted; never destroy it."""
        comm = ctypes.c_void_p()
        check(interrupt.call(self._end, library.dm_get_comm, self._handle, self._dim, ctypes.byref(comm)))
        return comm.value or 0

    def check(self) -> None:
        """Raises the communicator's asynchronous error, if it has one. Does not wait."""
        check(library.dm_check(self._handle, self._dim))

    def all_reduce(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None) -> None:
        """Reduces over all ranks; every rank gets the result in ``out``, or in place when there is none."""
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        self._run(library.dm_all_reduce, send, receive, send.address, receive.address, send.count, send.dtype, reduction(op), on)

    def reduce(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, root: int = 0, stream: Any = None) -> None:
        """Reduces over all ranks to rank root of the group, into its ``out`` or in place; the other ranks' ``out`` is not used."""
        root = int32("root", root)
        if root != self._rank:
            send = self._one(buffer, False, stream_handle(stream))
            self._run(library.dm_reduce, send, None, send.address, None, send.count, send.dtype, reduction(op), root, stream_handle(stream))
            return
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        self._run(library.dm_reduce, send, receive, send.address, receive.address, send.count, send.dtype, reduction(op), root, on)

    def broadcast(self, buffer: Any, out: Any = None, *, root: int = 0, stream: Any = None) -> None:
        """Copies the buffer of rank root of the group to all ranks: into ``out``, or in place. ``buffer`` may be None where ``out`` is given and
        this rank is not the root."""
        root, on = int32("root", root), stream_handle(stream)
        if root == self._rank:
            send, receive, on = self._two(buffer, out, stream, readonly_in_place=True)
            self._same_count(send, receive)
        else:
            send = receive = self._one(buffer if out is None else out, True, on)
        self._run(library.dm_broadcast, send, receive, send.address, receive.address, receive.count, receive.dtype, root, on)

    def all_gather(self, buffer: Any, out: Any, *, stream: Any = None) -> None:
        """Gathers every rank's buffer in ``out``, in rank order. ``buffer`` None: it is this rank's block of ``out`` already."""
        if buffer is None:
            receive = self._one(out, True, stream_handle(stream), "out")
            count = self._share(receive, "out")
            self._run(library.dm_all_gather, receive, None, receive.part(self._rank, count), receive.address, count, receive.dtype, stream_handle(stream))
            return
        send, receive, on = self._two(buffer, out, stream)
        self._times(receive, "out", send, "buffer")
        self._run(library.dm_all_gather, send, receive, send.address, receive.address, send.count, send.dtype, on)

    def reduce_scatter(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None) -> None:
        """Reduces over all ranks and leaves block i on rank i, in ``out``, or in its place in ``buffer`` when there is none."""
        if out is None:
            send = self._one(buffer, True, stream_handle(stream))
            count = self._share(send, "buffer")
            self._run(
                library.dm_reduce_scatter, send, None, send.address, send.part(self._rank, count), count, send.dtype, reduction(op), stream_handle(stream))
            return
        send, receive, on = self._two(buffer, out, stream)
        self._times(send, "buffer", receive, "out")
        self._run(library.dm_reduce_scatter, send, receive, send.address, receive.address, receive.count, send.dtype, reduction(op), on)

    def all_to_all(self, buffer: Any, out: Any, *, stream: Any = None) -> None:
        """Sends block i of ``buffer`` to rank i, and receives block i of ``out`` from rank i. They must not overlap."""
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        count = self._share(send, "buffer", receive)
        self._run(library.dm_all_to_all, send, receive, send.address, receive.address, count, send.dtype, on)

    def send(self, buffer: Any, peer: int, *, stream: Any = None) -> None:
        """Sends to rank peer of the group, which receives. Sends and receives of one exchange belong in ``with mesh.group():``."""
        on = stream_handle(stream)
        source = self._one(buffer, False, on)
        self._run(library.dm_send, source, None, source.address, source.count, source.dtype, int32("peer", peer), on)

    def recv(self, buffer: Any, peer: int, *, stream: Any = None) -> None:
        """Receives from rank peer of the group, which sends as many elements."""
        on = stream_handle(stream)
        target = self._one(buffer, True, on)
        self._run(library.dm_recv, target, None, target.address, target.count, target.dtype, int32("peer", peer), on)

    def _run(self, function: Any, one: Memory, two: Optional[Memory], *arguments: Any) -> None:
        """The call; its buffers are kept until it is over, in a group until that ends."""
        try:
            check(interrupt.issue(self._end, function, self._handle, self._dim, *arguments))
        finally:
            if issued.depth:
                issued.buffers += (one,) if two is None or two is one else (one, two)
            else:
                one.release()
                if two is not None and two is not one:
                    two.release()

    def _one(self, array: Any, written: bool, stream: int, what: str = "buffer") -> Memory:
        found = memory(array, what, stream)
        if found.device != self._device and found.device != "managed":
            where = found.device
            found.release()
            raise InvalidArgumentError(f"{what} lies in {where} memory, but the mesh is on {self._device}")
        if written and found.readonly:
            found.release()
            raise InvalidArgumentError(f"{what} is read-only, and the result would be written into it")
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

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError("a Communicator lives in one process and cannot be pickled; pickle its mesh")

    def __repr__(self) -> str:
        return f"Communicator({self._name!r}, rank={self._rank}, ranks={self._ranks})"


class Group:
    """``with mesh.group():`` runs the operations of its body together, so that no order of sends and receives blocks.

    They run at the end of the outermost group of the thread, with an exception of the body too: the ranks wait for what was issued.
    """

    def __init__(self, mesh: "DeviceMesh") -> None:
        self._mesh = mesh

    def __enter__(self) -> "Group":
        check(interrupt.issue(self._mesh._end, library.dm_group_start, self._mesh._handle))
        issued.depth += 1
        for changed in group_changes:
            changed(1)
        return self

    def __exit__(self, *_: Any) -> None:
        issued.depth -= 1
        try:
            check(interrupt.call(self._mesh._end, library.dm_group_end, self._mesh._handle))
        finally:
            for changed in group_changes:
                changed(-1)
            if issued.depth == 0:
                for each in issued.buffers:
                    each.release()
                issued.buffers.clear()


def adopted_handle(group: Any, device_type: str) -> int:
    """The ncclComm_t of what from_group takes: an address, a Communicator, or PyTorch's ProcessGroup with an NCCL backend."""
    if isinstance(group, Communicator):
        return group.handle
    if isinstance(group, int):
        return group
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

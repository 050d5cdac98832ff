"""The communicator of one dimension: who is in it, and its collectives. mesh.py adds the mesh that
it belongs to."""

from __future__ import annotations

from math import prod
from typing import Any, List, Optional, Sequence, Tuple

from . import _control as control
from ._library import Deadline, Timeout, check, is_bool, library, within
from ._open_groups import outside_groups
from ._operands import Operands
from .buffers import memory
from .constants import DType, Op, ReduceOp, reduction
from .errors import InvalidArgumentError, UnsupportedError
from .group import operation, taken
from .objects import ObjectCollectives
from .work import Work, after_earlier_along, queues

__all__ = ["Collectives"]


class Collectives(Operands, ObjectCollectives):
    """This rank's group along one dimension of a mesh: ``mesh.get_group("tp")``.

    Buffers are anything with the buffer protocol (bytearray, array, numpy), DLPack (torch, jax,
    cupy) or __cuda_array_interface__, contiguous, used in place without copying: host memory on a
    cpu mesh, device memory on a cuda mesh. On cpu a collective returns when the result is there.
    On cuda it returns when the work is enqueued on ``stream`` (an integer, torch.cuda.Stream ...).
    None is the current stream of torch or CuPy, by the kind of the array; of an array of another
    library it is the stream that its __cuda_array_interface__ names, or the default stream. The
    operation comes after what the array's library has enqueued before the call, and that library's
    current stream waits for the operation. The memory stays until the stream has passed it.

    With ``async_op=True`` a collective on cpu returns at once, and runs on a thread of this package
    after those that were issued before it along this dimension. On cuda the current stream waits
    for it in wait() of the Work. Leave the buffers alone until that wait().

    Ranks (``root``, ``peer``) count along the dimension, from 0 to size - 1. mesh.translate_rank
    makes a world rank of one, and mesh.translate_world_rank makes one of a world rank.

    Bytes and objects (all_gather_object ...) and barriers come after the asynchronous operations
    that were issued before them along the dimension.

    The interpreter lock is released while a call blocks, and Ctrl-C ends it (and the mesh with it).
    """

    @property
    def name(self) -> str:
        """The dimension's name."""
        return self._name

    @property
    def rank(self) -> int:
        """This process's rank in the group: its coordinate along the dimension."""
        return self._rank

    @property
    def ranks(self) -> Tuple[int, ...]:
        """The world ranks of the group, in the order of their ranks in it."""
        return self._ranks

    def check(self) -> None:
        """Raises the communicator's asynchronous error, if it has one. Does not wait."""
        check(library.dm_check(self._handle, self._dim))

    def wait(self, stream: Any = None, *, timeout: Timeout = None) -> None:
        """Waits until the work on a stream is done, with a deadline, and looks at this dimension
        meanwhile. See DeviceMesh.wait."""
        self._mesh.wait(stream, self._name, timeout=timeout)  # type: ignore[attr-defined]

    @operation
    def all_reduce(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None, async_op: bool = False) -> Work:
        """Reduces over all ranks. Every rank gets the result in ``out``, or in ``buffer`` when
        ``out`` is None."""
        op = reduction(op)
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        self._apart("all_reduce", send, receive, receive.address - send.address)
        return self._run(async_op, library.dm_all_reduce, send.address, receive.address, send.count, send.dtype, op, on)

    @operation
    def reduce(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *, root: int = 0, stream: Any = None,
               async_op: bool = False) -> Work:
        """Reduces over all ranks. Rank root of the group gets the result, in ``out`` or in place.
        The ``out`` of the other ranks is not used."""
        op, root = reduction(op), self._member("root", root)
        if root != self._rank:
            on = self._stream(stream, buffer)
            send = self._one(buffer, False, on)
            if out is not None:
                # This rank does not use out. But reduce(buffer, 1), which in PyTorch means "to
                # rank 1", must fail on every rank.
                taken.memories.append(memory(out, "out", on))
            return self._run(async_op, library.dm_reduce, send.address, None, send.count, send.dtype, op, root, on)
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        self._apart("reduce", send, receive, receive.address - send.address)
        return self._run(async_op, library.dm_reduce, send.address, receive.address, send.count, send.dtype, op, root, on)

    @operation
    def broadcast(self, buffer: Any, out: Any = None, *, root: int = 0, stream: Any = None, async_op: bool = False) -> Work:
        """Copies the buffer of rank root of the group to all ranks: into ``out``, or in place.
        ``buffer`` may be None where ``out`` is given and this rank is not the root."""
        root = self._member("root", root)
        if root == self._rank:
            send, receive, on = self._two(buffer, out, stream, readonly_in_place=True)
            self._same_count(send, receive)
            self._apart("broadcast", send, receive, receive.address - send.address)
        else:
            on = self._stream(stream, buffer if out is None else out)
            send = receive = self._one(buffer, True, on) if out is None else self._one(out, True, on, "out")
        return self._run(async_op, library.dm_broadcast, send.address, receive.address, receive.count, receive.dtype, root, on)

    @operation
    def all_gather(self, buffer: Any, out: Any, *, counts: Optional[Sequence[int]] = None, stream: Any = None,
                   async_op: bool = False) -> Work:
        """Gathers every rank's buffer in ``out``, in rank order. When ``buffer`` is None, this
        rank's data is already in its block of ``out``.

        With ``counts``, rank i gives counts[i] elements. ``out`` may also be a list of arrays, one
        for each rank, also of different sizes; then the arguments may come in torch's order:
        all_gather(list, array). All ranks use the same one of the three ways.
        """
        if isinstance(buffer, (list, tuple)) and not isinstance(out, (list, tuple)):
            buffer, out = out, buffer
        if counts is not None or isinstance(out, (list, tuple)):
            on = self._stream(stream, *arrays(out), buffer)
            blocks = self._blocks(out, counts, True, on, "out")
            own = None if buffer is None else self._own_block(blocks, "out", buffer, False, on, "buffer")
            self._block_apart("all_gather", blocks, own, True)
            return self._run(async_op, library.dm_all_gatherv,
                             blocks.begin(self._rank) if own is None else own.address, blocks.address, blocks.counts,
                             blocks.displacements, blocks.dtype, on)
        if buffer is None:
            on = self._stream(stream, out)
            receive = self._one(out, True, on, "out")
            count = self._share(receive, "out")
            return self._run(async_op, library.dm_all_gather, receive.part(self._rank, count), receive.address, count, receive.dtype, on)
        send, receive, on = self._two(buffer, out, stream)
        self._times(receive, "out", send, "buffer")
        self._apart("all_gather", send, receive, receive.part(self._rank, send.count) - send.address)
        return self._run(async_op, library.dm_all_gather, send.address, receive.address, send.count, send.dtype, on)

    @operation
    def reduce_scatter(self, buffer: Any, out: Any = None, op: Op = ReduceOp.SUM, *,
                       counts: Optional[Sequence[int]] = None, stream: Any = None, async_op: bool = False) -> Work:
        """Reduces over all ranks and leaves block i on rank i: in ``out``, or in block i of
        ``buffer`` when ``out`` is None.

        With ``counts``, block i has counts[i] elements. ``buffer`` may also be a list of arrays, as
        in all_gather; torch's order is reduce_scatter(array, list).
        """
        op = reduction(op)
        if isinstance(out, (list, tuple)) and not isinstance(buffer, (list, tuple)):
            buffer, out = out, buffer
        if counts is not None or isinstance(buffer, (list, tuple)):
            on = self._stream(stream, out, *arrays(buffer))
            blocks = self._blocks(buffer, counts, out is None, on, "buffer")
            own = None if out is None else self._own_block(blocks, "buffer", out, True, on, "out")
            self._block_apart("reduce_scatter", blocks, own, False)
            return self._run(async_op, library.dm_reduce_scatterv, blocks.address, blocks.counts, blocks.displacements,
                             blocks.begin(self._rank) if own is None else own.address, blocks.dtype, op, on)
        if out is None:
            on = self._stream(stream, buffer)
            send = self._one(buffer, True, on)
            count = self._share(send, "buffer")
            return self._run(async_op, library.dm_reduce_scatter, send.address, send.part(self._rank, count), count, send.dtype, op, on)
        send, receive, on = self._two(buffer, out, stream)
        self._times(send, "buffer", receive, "out")
        self._apart("reduce_scatter", send, receive, receive.address - send.part(self._rank, receive.count))
        return self._run(async_op, library.dm_reduce_scatter, send.address, receive.address, receive.count, send.dtype, op, on)

    @operation
    def all_to_all(self, buffer: Any, out: Any, *, send_counts: Optional[Sequence[int]] = None,
                   recv_counts: Optional[Sequence[int]] = None, stream: Any = None, async_op: bool = False) -> Work:
        """Sends block i of ``buffer`` to rank i, and receives block i of ``out`` from rank i. On
        cpu they may be the same, on cuda they must lie apart.

        With ``send_counts`` and ``recv_counts``, the blocks have so many elements, one after the
        other; what rank i sends to rank k is what k expects from i.
        """
        if isinstance(buffer, (list, tuple)) or isinstance(out, (list, tuple)):
            raise TypeError("all_to_all takes no lists, because torch has them in the other order: concatenate the arrays, and pass send_counts= and recv_counts=")
        if (send_counts is None) != (recv_counts is None):
            raise TypeError("all_to_all takes send_counts and recv_counts, or neither")
        if send_counts is not None:
            on = self._stream(stream, out, buffer)
            sent = self._blocks(buffer, send_counts, False, on, "buffer")
            received = self._blocks(out, recv_counts, True, on, "out")
            if sent.dtype != received.dtype:
                self._refuse(f"buffer has {DType(sent.dtype).name.lower()} elements, out has {DType(received.dtype).name.lower()}")
            self._blocks_apart("all_to_all", sent, received)
            return self._run(async_op, library.dm_all_to_allv, sent.address, sent.counts, None, received.address,
                             received.counts, None, sent.dtype, on)
        send, receive, on = self._two(buffer, out, stream)
        self._same_count(send, receive)
        count = self._share(send, "buffer")
        self._apart("all_to_all", send, receive, receive.address - send.address if self._device == "cpu" or self.size == 1 else None)
        return self._run(async_op, library.dm_all_to_all, send.address, receive.address, count, send.dtype, on)

    @operation
    def send(self, buffer: Any, peer: int, *, stream: Any = None, async_op: bool = False) -> Work:
        """Sends to rank peer of the group. That rank must receive. Put the sends and receives of
        one exchange into ``with mesh.group():``."""
        peer, on = self._member("peer", peer), self._stream(stream, buffer)
        source = self._one(buffer, False, on)
        return self._run(async_op, library.dm_send, source.address, source.count, source.dtype, peer, on)

    @operation
    def recv(self, buffer: Any, peer: int, *, stream: Any = None, async_op: bool = False) -> Work:
        """Receives from rank peer of the group. That rank must send as many elements."""
        peer, on = self._member("peer", peer), self._stream(stream, buffer)
        target = self._one(buffer, True, on)
        return self._run(async_op, library.dm_recv, target.address, target.count, target.dtype, peer, on)

    def barrier(self, *, timeout: Timeout = None) -> None:
        """Returns when every rank of the group has called it. It does not wait for work on
        devices."""
        with self._refusals.barrier():
            deadline = self._begin("barrier", timeout)
        control.barrier(self, deadline)

    @property
    def _refusals(self) -> control.Refusals:
        return control.group_refusals(self)

    def _begin(self, call: str, timeout: Timeout) -> Deadline:
        outside_groups(call)
        deadline = Deadline(timeout)
        if queues:
            after_earlier_along(self, deadline, call)
        return deadline

    def _gather(self, data: bytes, deadline: Deadline) -> List[bytes]:
        return control.all_gather(self, data, deadline)

    def _cast(self, data: bytes, root: int, deadline: Deadline) -> bytes:
        return control.broadcast(self, data, root, deadline)

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError("a Communicator lives in one process and cannot be pickled; pickle its mesh")

    def __repr__(self) -> str:
        return f"Communicator({self._name!r}, rank={self._rank}, ranks={self._ranks})"


def arrays(array: Any) -> Sequence[Any]:
    """The arrays of a list, or the one array."""
    return array if isinstance(array, (list, tuple)) else (array,)


def is_process_group(group: Any) -> bool:
    """Whether the group is a ProcessGroup of PyTorch."""
    return hasattr(group, "_get_backend")


def process_group_ranks(group: Any) -> List[int]:
    """The global ranks of a ProcessGroup, in the order of their ranks in it."""
    import torch.distributed  # type: ignore[import-not-found, unused-ignore]

    return list(torch.distributed.get_process_group_ranks(group))


def refuse_other_ranks(index: int, ranks: List[int], numbers: List[int], shape: Sequence[int]) -> None:
    """Raises InvalidArgumentError where a group does not have the ranks of one line of the mesh
    along dimension ``index``. ``numbers`` has the elements of the mesh in row-major order."""
    step = prod(shape[index + 1:])
    inner = range(step) if shape[index] else ()
    starts = [block + offset for block in range(0, len(numbers), shape[index] * step or 1) for offset in inner]
    lines = [numbers[start:start + shape[index] * step:step] for start in starts]
    if ranks not in lines:
        shown = ", ".join(map(str, lines[:4])) + (" ..." if len(lines) > 4 else "")
        raise InvalidArgumentError(f"group {index} has the ranks {ranks}, but the mesh has along dimension {index}: {shown}")


def adopted_handle(group: Any, device_type: str) -> int:
    """The ncclComm_t of what from_group takes: an address, a Communicator, or PyTorch's
    ProcessGroup with an NCCL backend."""
    if isinstance(group, Collectives):
        return group.handle
    if isinstance(group, int) and not is_bool(group):
        return within("group", group, 1, 2**64 - 1)
    if is_process_group(group):
        import torch  # type: ignore[import-not-found, unused-ignore]

        backend = group._get_backend(torch.device(device_type))
        if not hasattr(backend, "_comm_ptr"):
            raise UnsupportedError(
                f"PyTorch's {type(backend).__name__} has no NCCL communicator to adopt; device type {device_type} needs its nccl backend"
            )
        address = int(backend._comm_ptr())
        if address == 0:
            raise InvalidArgumentError(
                "PyTorch makes its NCCL communicator at the group's first collective: run one, or give init_process_group a device_id")
        return address
    raise TypeError(f"a group is a {type(group).__name__}; an ncclComm_t's address, a Communicator or a torch ProcessGroup was expected")

"""One communicator of a mesh, as its collectives use it: its ranks and the checks of buffers. This
file also takes each call to the library, to an open group or to the thread of asynchronous
operations. communicator.py has the collectives."""

from __future__ import annotations

import contextlib
import ctypes
from functools import partial
from itertools import accumulate
from typing import Any, Callable, List, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union, cast

from . import _interrupt as interrupt
from ._beside import before_call
from ._library import Deadline, check, flag, int32, library, listed, sizes
from ._open_groups import opened
from ._queries import MeshQueries
from ._streams import current_stream, follow, keep, owner, stream_handle
from .buffers import Memory, changed, memory
from .constants import SIZES, DType
from .errors import DeviceMeshError, InvalidArgumentError
from .group import Queued, taken
from .work import DONE, Key, Work, after_earlier, queues, submit

__all__ = ["Operands"]


# The address of the first byte of a block, and the address after its last byte.
Range = Tuple[int, int]


class Blocks(NamedTuple):
    """A block of memory for each rank of a group."""

    # Displacements count from here.
    address: int
    # The number of elements of each block, a C array.
    counts: Any
    # How many elements after the address each block begins, a C array. None: one after the other.
    displacements: Any
    dtype: int

    def begin(self, rank: int) -> int:
        """The address of the block of that rank."""
        before = sum(self.counts[:rank]) if self.displacements is None else self.displacements[rank]
        return self.address + int(before) * SIZES[self.dtype]

    def ranges(self) -> List[Range]:
        """The blocks of all ranks."""
        counts, unit = list(self.counts), SIZES[self.dtype]
        begins = [0, *accumulate(counts)] if self.displacements is None else self.displacements
        return [(self.address + begin * unit, self.address + (begin + count) * unit) for begin, count in zip(begins, counts)]


class Operands:
    """This rank's group along one dimension of a mesh, without the collectives."""

    def __init__(self, mesh: MeshQueries, name: str) -> None:
        self._mesh = mesh
        self._name = name
        self._dim = name.encode()
        self._handle = mesh._handle
        self._end = mesh._end
        self._device = mesh.device_type
        rank = ctypes.c_int32()
        check(library.dm_get_local_rank(self._handle, self._dim, ctypes.byref(rank)))
        self._rank = rank.value
        self._ranks: Tuple[int, ...] = tuple(
            listed(ctypes.c_int32, lambda *out: int(library.dm_group_ranks(self._handle, self._dim, *out))))
        self._queue_key: Optional[Key] = None
        self._known_device: Union[None, int, str] = "not asked"

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self._ranks)

    @property
    def handle(self) -> int:
        """The raw ncclComm_t, for calls through ``mesh.get_proc``. Valid until the mesh is
        finalized or aborted; never destroy it."""
        comm = ctypes.c_void_p()
        check(interrupt.call(self._end, library.dm_get_comm, self._handle, self._dim, ctypes.byref(comm)))
        return comm.value or 0

    @property
    def _key(self) -> Key:
        """The key of the queue of asynchronous operations."""
        if self._queue_key is None:
            self._queue_key = (self.handle, self._name)
        return self._queue_key

    @property
    def _device_number(self) -> Optional[int]:
        """The number of the device on which the communicator is. None on cpu, and where nobody
        tells."""
        if isinstance(self._known_device, str):
            self._known_device = self._find_device()
        return self._known_device

    def _find_device(self) -> Optional[int]:
        if self._device == "cpu":
            return None
        with contextlib.suppress(DeviceMeshError):
            # Communicators that the mesh has adopted may be on another device than its world.
            if not getattr(self._mesh, "_adopted_groups", None) and self._mesh.world.device is not None:
                return self._mesh.world.device
        with contextlib.suppress(DeviceMeshError):
            address, number = ctypes.c_void_p(), ctypes.c_int()
            check(library.dm_get_proc(self._handle, b"ncclCommCuDevice", ctypes.byref(address)))
            ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(address.value or 0)
            if ask(self.handle, ctypes.byref(number)) == 0:
                return number.value
        return None

    def _run(self, async_op: bool, function: Any, *arguments: Any) -> Work:
        """Makes the call, queues it inside a group, or gives it to the thread of asynchronous
        operations. The buffers that were taken for it are kept until it is over."""
        later = async_op is not False and flag("async_op", async_op)
        call = partial(function, self._handle, self._dim, *arguments)
        if opened.groups:
            if later:
                self._refuse("async_op: an operation in a group runs when the group ends; make the group itself asynchronous: mesh.group(async_op=True)")
            group = opened.groups[-1]
            group.add(Queued(self, call, tuple(taken.memories)))
            taken.memories = []
            return cast(Work, group.work)
        if later and self._device == "cpu":
            for wait in before_call:
                wait()
            work = submit((self,), Work(f"{function.__name__[3:]} along {self._name}"), partial(finish, self._mesh, call, taken.memories))
            taken.memories = []
            return work
        if queues:
            after_earlier(self)
        if self._device == "cpu":
            check(interrupt.issue(self._end, call))
            return DONE
        kept, taken.memories = taken.memories, []
        try:
            check(interrupt.issue(self._end, call))
            joins = follow(kept, later)
        finally:
            keep(kept)
        if not later:
            return DONE
        work = Work(f"{function.__name__[3:]} along {self._name}")._on_streams(joins, [partial(self._pass, kept[0].stream)])
        work._finish()
        return work

    def _pass(self, stream: int, deadline: Deadline) -> None:
        """Waits until the work on a stream is done."""
        check(interrupt.call(self._end, library.dm_stream_wait, self._handle, self._dim, stream or None, deadline.milliseconds()))

    def _blocks(self, arrays: Any, counts: Optional[Sequence[int]], written: bool, stream: int, what: str) -> Blocks:
        """A buffer for each rank of the group: arrays in a list, or one array with as many elements
        for each rank as counts says."""
        if counts is None:
            return self._listed(arrays, written, stream, what)
        whole = self._one(arrays, written, stream, what)
        numbers = sizes("counts", counts)
        if len(numbers) != self.size or sum(numbers) != whole.count:
            self._refuse(f"the counts {tuple(numbers)} are for {len(numbers)} ranks and {sum(numbers)} elements, but dimension {self._name} has {self.size} ranks, "
                         f"and {what} {whole.count} elements")
        return Blocks(whole.address, numbers, None, whole.dtype)

    def _listed(self, arrays: Any, written: bool, stream: int, what: str) -> Blocks:
        if len(arrays) != self.size:
            self._refuse(f"{what} is a list of {len(arrays)} arrays, but dimension {self._name} has {self.size} ranks: one for each")
        blocks: List[Memory] = []
        for rank, array in enumerate(arrays):
            blocks.append(self._one(array, written, stream, f"{what}[{rank}]"))
            if blocks[rank].dtype != blocks[0].dtype:
                self._refuse(f"{what}[{rank}] has {DType(blocks[rank].dtype).name.lower()} elements, {what}[0] has {DType(blocks[0].dtype).name.lower()}")
        # The library counts from one address. An empty array may have none.
        base = min((each.address for each in blocks if each.count), default=0)
        unit = SIZES[blocks[0].dtype]
        away = [each.address - base if each.count else 0 for each in blocks]
        if any(distance % unit for distance in away):
            self._refuse(f"the arrays of {what} do not lie whole elements of {unit} bytes apart: let each begin at a multiple of {unit}")
        lengths = (ctypes.c_size_t * self.size)(*(each.count for each in blocks))
        return Blocks(base, lengths, (ctypes.c_size_t * self.size)(*(distance // unit for distance in away)), blocks[0].dtype)

    def _own_block(self, blocks: Blocks, its_name: str, array: Any, written: bool, stream: int, name: str) -> Memory:
        """The buffer with the elements of this rank's block."""
        own = self._one(array, written, stream, name)
        if own.dtype != blocks.dtype:
            self._refuse(f"{name} has {DType(own.dtype).name.lower()} elements, {its_name} has {DType(blocks.dtype).name.lower()}")
        if own.count != blocks.counts[self._rank]:
            self._refuse(f"{name} has {own.count} elements, but {its_name} has {blocks.counts[self._rank]} for this rank, {self._rank}")
        return own

    def _member(self, what: str, rank: Any) -> int:
        """A rank of the group."""
        number = int32(what, rank)
        if not 0 <= number < self.size:
            self._refuse(f"{what} is {number}, but dimension {self._name} has ranks 0 to {self.size - 1}")
        return number

    def _stream(self, stream: Any, *arrays: Any) -> int:
        """The stream of an operation with these arrays, the one that is written first."""
        if stream is not None or self._device == "cpu":
            return stream_handle(stream)
        return current_stream(arrays)

    def _one(self, array: Any, written: bool, stream: int, what: str = "buffer") -> Memory:
        """Takes the memory of an array. It is released when the operation fails or is over."""
        found = memory(array, what, stream)
        taken.memories.append(found)
        if found.device != self._device and found.device != "managed":
            self._refuse(f"{what} lies in {found.device} memory, but the mesh is on {self._device}")
        if stream and self._device == "cpu":
            self._refuse(f"stream is {stream:#x}, but device type cpu has no streams: pass None")
        if written and found.readonly:
            self._refuse(f"{what} is read-only, and the result would be written into it")
        if written and found.copied:
            self._refuse(f"{what} gives a copy of itself through __dlpack__, so the result that is written there would be lost")
        if self._device != "cpu":
            self._on_device(found, array, stream, what)
        if written:
            changed(array)
        return found

    def _on_device(self, found: Memory, array: Any, stream: int, what: str) -> None:
        """Orders the operation's stream behind the library of the array. Refuses memory of
        another device than the communicator's, where the array tells its device. The library
        asks the driver about the others."""
        device, ours = found.device_id, self._device_number
        if device is not None and ours is not None and device != ours:
            self._refuse(f"{what} lies on device {device}, but this rank's communicators are on device {ours}: move the array there, or choose device {device} with World(device=)")
        found.owner, found.stream = owner(array, ours), stream
        found.owner.before(array, stream)

    def _two(self, buffer: Any, out: Any, stream: Any, readonly_in_place: bool = False) -> Tuple[Memory, Memory, int]:
        on = self._stream(stream, out, buffer)
        if out is None or out is buffer:
            both = self._one(buffer, not readonly_in_place, on)
            return both, both, on
        send = self._one(buffer, False, on)
        receive = self._one(out, True, on, "out")
        if send.dtype != receive.dtype:
            self._refuse(f"buffer has {DType(send.dtype).name.lower()} elements, out has {DType(receive.dtype).name.lower()}")
        return send, receive, on

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidArgumentError(why)

    def _same_count(self, send: Memory, receive: Memory) -> None:
        if send.count != receive.count:
            self._refuse(f"buffer has {send.count} elements, out has {receive.count}")

    def _times(self, large: Memory, its_name: str, small: Memory, other_name: str) -> None:
        if large.count != small.count * self.size:
            self._refuse(
                f"{its_name} has {large.count} elements, but {self.size} ranks x {small.count} of {other_name} are {small.count * self.size}")

    def _share(self, whole: Memory, what: str) -> int:
        if whole.count % self.size:
            self._refuse(f"{what} has {whole.count} elements, which {self.size} ranks do not share evenly")
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
            self._refuse(f"{call}: buffer and out overlap, but are not in place exactly; let them lie apart")

    def _block_apart(self, call: str, blocks: Blocks, own: Optional[Memory], gathers: bool) -> None:
        """In a group: does what _apart does, for an operation with a block for each rank in one
        buffer, and this rank's block in the other. `own` is None where that block is in place.

        Outside a group the library does so, also for _blocks_apart.
        """
        if not opened.groups:
            return
        theirs = blocks.ranges()
        block = theirs[self._rank]
        mine = block if own is None else (own.address, own.address + own.nbytes)
        sent, received = ([mine], theirs) if gathers else (theirs, [mine])
        if mine == block:
            sent.remove(block)
        self._no_overlap(call, sent, received)

    def _blocks_apart(self, call: str, send: Blocks, receive: Blocks) -> None:
        """In a group: does what _apart does, for an operation with a block for each rank in both
        buffers. Only a rank that is alone may work in place."""
        if opened.groups and not (self.size == 1 and send.ranges() == receive.ranges()):
            self._no_overlap(call, send.ranges(), receive.ranges())

    def _no_overlap(self, call: str, sent: Sequence[Range], received: Sequence[Range]) -> None:
        """Refuses a block that is received and overlaps another block."""
        blocks = sorted([(*each, False) for each in sent] + [(*each, True) for each in received])
        # Where the blocks end that begin before the present one.
        read = written = 0
        for begin, end, is_written in blocks:
            if begin == end:
                continue
            if begin < written or (is_written and begin < read):
                self._refuse(f"{call}: blocks of buffer and out overlap, but are not in place exactly; let them lie apart")
            if is_written:
                written = max(written, end)
            else:
                read = max(read, end)


def finish(_mesh: MeshQueries, call: Callable[[], int], kept: Sequence[Memory]) -> None:
    """Makes a call and releases its buffers. The queue holds the mesh by this argument until then,
    because the call has only the number of the mesh's handle."""
    try:
        check(call())
    finally:
        for each in kept:
            each.release()

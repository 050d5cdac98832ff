"""The memory behind an array of any library, without copying: the buffer protocol, DLPack,
__cuda_array_interface__, __array_interface__."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_ssize_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, ContextManager, Dict, Optional, Sequence, Tuple, cast

from .constants import SIZES, SUPPORTED, DType
from .errors import InvalidArgumentError

__all__ = ["Memory", "memory"]


class PyBuffer(Structure):
    """Py_buffer of the buffer protocol (PEP 3118), part of the stable ABI since Python 3.11 and
    unchanged since 3.0."""

    _fields_ = [
        ("buf", c_void_p), ("obj", c_void_p), ("len", c_ssize_t), ("itemsize", c_ssize_t), ("readonly", c_int), ("ndim", c_int),
        ("format", c_char_p), ("shape", POINTER(c_ssize_t)), ("strides", POINTER(c_ssize_t)), ("suboffsets", POINTER(c_ssize_t)),
        ("internal", c_void_p)]


class DLTensor(Structure):
    """DLTensor of dlpack.h. There device and dtype are structs, with the layout of the fields
    here."""

    _fields_ = [
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8), ("bits", c_uint8),
        ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


class DLManagedTensorVersioned(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("tensor", DLTensor)]


PYBUF_STRIDED_WITH_FORMAT = 0x10 | 0x08 | 0x04
DLPACK_READ_ONLY, DLPACK_COPIED = 1, 2
HOST, CUDA = "cpu", "cuda"
ROCM = 10
# kDLCPU, kDLCUDAHost, kDLROCMHost; kDLCUDA, kDLROCM; kDLCUDAManaged is both.
DLPACK_DEVICES = {1: HOST, 3: HOST, 11: HOST, 2: CUDA, ROCM: CUDA, 13: "managed"}
DLPACK_TYPES = {
    (0, 8): DType.INT8, (1, 8): DType.UINT8, (0, 32): DType.INT32, (1, 32): DType.UINT32, (0, 64): DType.INT64, (1, 64): DType.UINT64,
    (2, 16): DType.FLOAT16, (2, 32): DType.FLOAT32, (2, 64): DType.FLOAT64, (4, 16): DType.BFLOAT16,
    (10, 8): DType.FLOAT8E4M3, (12, 8): DType.FLOAT8E5M2}
KINDS = {("i", 1): DType.INT8, ("u", 1): DType.UINT8, ("i", 4): DType.INT32, ("u", 4): DType.UINT32,
         ("i", 8): DType.INT64, ("u", 8): DType.UINT64, ("f", 2): DType.FLOAT16, ("f", 4): DType.FLOAT32,
         ("f", 8): DType.FLOAT64}
# The types that numpy does not have itself: those of ml_dtypes, by name and size.
NAMED = {("bfloat16", 2): DType.BFLOAT16, ("float8_e4m3fn", 1): DType.FLOAT8E4M3, ("float8_e5m2", 1): DType.FLOAT8E5M2}
# The kinds of the struct module's letters. The width comes from the buffer.
LETTERS = {**dict.fromkeys("bhilqn", "i"), **dict.fromkeys("BHILQN", "u"), **dict.fromkeys("efd", "f")}
FORMATS = {(letter.encode(), size): kind for letter, of in LETTERS.items() for (is_of, size), kind in KINDS.items() if is_of == of}

_python = ctypes.pythonapi
_is_buffer = _python.PyObject_CheckBuffer
_is_buffer.argtypes, _is_buffer.restype = [ctypes.py_object], c_int
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = [ctypes.py_object, POINTER(PyBuffer), c_int], c_int
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = [POINTER(PyBuffer)], None
_capsule_pointer = _python.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, c_char_p], c_void_p
_capsule_is = _python.PyCapsule_IsValid
_capsule_is.argtypes, _capsule_is.restype = [ctypes.py_object, c_char_p], c_int
_byref = ctypes.byref


class Memory:
    """Contiguous elements in memory. The address is valid until release()."""

    __slots__ = ("address", "count", "dtype", "readonly", "device", "device_id", "copied", "kept", "view", "owner", "stream")

    def __init__(
        self, address: int, count: int, dtype: int, readonly: bool, device: str, kept: Any = None, view: Any = None, copied: bool = False,
        device_id: Optional[int] = None,
    ) -> None:
        self.address, self.count, self.dtype, self.readonly, self.device = address, count, dtype, readonly, device
        # The number of the device. None for host memory, and where the producer does not say it.
        self.device_id = device_id
        # In an operation on cuda: the library of the array, and the stream of the operation.
        self.owner: Any = None
        self.stream = 0
        # Whether the producer gave a copy. Results that are written into a copy would be lost.
        self.copied = copied
        # The objects that keep the memory alive: the array, or the capsule whose destructor calls
        # the producer's deleter.
        self.kept, self.view = kept, view

    def release(self) -> None:
        """Gives the buffer back. Its owner may move or resize it from then on."""
        view, self.view, self.kept = self.view, None, None
        if view is not None:
            _release_buffer(_byref(view))

    def __del__(self) -> None:
        self.release()

    @property
    def nbytes(self) -> int:
        """The length of the memory."""
        return self.count * SIZES[self.dtype]

    def part(self, index: int, count: int) -> int:
        """The address of block index of count elements."""
        return self.address + index * count * SIZES[self.dtype]


def memory(array: Any, what: str = "buffer", stream: int = 0) -> Memory:
    """The memory of array. ``what`` names the array in errors. A producer with DLPack makes the
    stream wait for its own work on the array."""
    if id(type(array)) not in _lossless:
        _refuse_lossy(type(array), what)
    if _is_buffer(array):
        try:
            return _from_buffer(array, what)
        except (ValueError, BufferError) as error:
            # The buffer protocol cannot describe some elements (bfloat16 and float8 of numpy and
            # jax) and device memory (jax and CuPy). Another protocol may.
            if isinstance(error, InvalidArgumentError):
                raise
            if hasattr(array, "__array_interface__"):
                return _from_array_interface(array, what, HOST)
            if not hasattr(array, "__dlpack__"):
                raise
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, what, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _from_array_interface(array, what, CUDA)
    raise TypeError(
        f"{what} is a {type(array).__name__}, which has neither the buffer protocol nor __dlpack__ nor __cuda_array_interface__"
        + ("; an operator is passed as op=, a rank as root=" if what == "out" else "")
        + ("; its to_numpy() gives an array that has" if hasattr(array, "to_numpy") else ""))


# The types, by id, of arrays that are nothing more than their memory. Each type is examined once.
# The types are kept alive, so that no other type gets the id.
_lossless: Dict[int, type] = {}
LOSSES = {
    ("numpy.ma", "MaskedArray"): "a masked array, whose mask would be lost: pass array.filled(value), or array.data if the masked elements count too",
    ("torch.masked", "MaskedTensor"): "a MaskedTensor, whose mask would be lost: pass tensor.to_tensor(value)",
    ("torch.distributed.tensor", "DTensor"): "a DTensor, which is not this rank's memory alone: pass tensor.to_local()",
}


def _refuse_lossy(kind: type, what: str) -> None:
    for base in kind.__mro__:
        for (module, name), loss in LOSSES.items():
            if base.__name__ == name and base.__module__.startswith(module):
                raise InvalidArgumentError(f"{what} is {loss}")
    if len(_lossless) >= 1000:  # a program that makes classes all the time
        _lossless.clear()
    _lossless[id(kind)] = kind


def _from_buffer(array: Any, what: str) -> Memory:
    view = PyBuffer()
    try:
        _get_buffer(array, _byref(view), PYBUF_STRIDED_WITH_FORMAT)
    except TypeError as error:  # CuPy 14 says so that an array is device memory
        raise BufferError(str(error)) from error
    try:
        itemsize, count = view.itemsize, view.len // view.itemsize if view.itemsize else 0
        letter = view.format
        kind = FORMATS.get((letter, itemsize))
        if kind is None:
            kind = _odd_format(letter, itemsize, what)
        ndim = view.ndim
        if ndim > 1 or (ndim == 1 and count > 1 and view.strides and view.strides[0] != itemsize):
            _contiguous(what, view.shape[:ndim], view.strides[:ndim] if view.strides else None, itemsize)
        return Memory(view.buf or 0, count, kind, view.readonly != 0, HOST, array, view)
    except BaseException:
        _release_buffer(_byref(view))
        raise


def _odd_format(letter: Optional[bytes], itemsize: int, what: str) -> DType:
    """The type of a format that has more than one letter. Refuses a format that is not
    supported."""
    text = (letter or b"B").decode()
    if text[:1] in (">", "!") and itemsize > 1:
        raise TypeError(f"{what} has big-endian elements (format {text!r}); this machine is little-endian")
    found = FORMATS.get((text.lstrip("@=<>!").encode(), itemsize))
    if found is None:
        raise TypeError(f"{what} has elements of format {text!r} ({itemsize} bytes); supported are {SUPPORTED}")
    return found


def _contiguous(what: str, shape: Sequence[int], strides: Optional[Sequence[int]], unit: int) -> int:
    """Checks that elements lie row-major without gaps. ``strides`` count bytes or elements, and
    ``unit`` is the size of an element in that measure. Returns the number of elements."""
    count, expected = 1, unit
    packed = True
    if strides is not None:
        for length, stride in zip(reversed(shape), reversed(strides)):
            packed = packed and (length == 1 or stride == expected)
            expected *= length
    for length in shape:
        count *= length
    if not packed and count > 0 and strides is not None:
        elements = tuple(stride // unit for stride in strides)
        raise InvalidArgumentError(
            f"{what} is not contiguous: shape {tuple(shape)} has strides {elements} in elements; make a contiguous copy of it first")
    return count


def _from_dlpack(array: Any, what: str, stream: int) -> Memory:
    immutable = _of_jax(array, what)
    # A view of torch may be negated or conjugated by a bit of the tensor. The memory does not show
    # that bit, and DLPack cannot express it.
    for bit, name in (("is_neg", "negative"), ("is_conj", "conjugate")):
        if callable(getattr(array, bit, None)) and getattr(array, bit)():
            raise InvalidArgumentError(
                f"{what} is a view with torch's {name} bit, so its memory holds other values: pass a tensor that resolve_{bit[3:]}() has made of it")
    try:
        device_type, device_id = (int(number) for number in array.__dlpack_device__())
    except (RuntimeError, ValueError, TypeError, BufferError, NotImplementedError) as error:
        raise InvalidArgumentError(f"{what}: its __dlpack_device__ says: {error}") from error
    device = DLPACK_DEVICES.get(device_type)
    if device is None:
        raise InvalidArgumentError(f"{what} lies on DLPack device type {device_type}; cpu and cuda are supported")
    # DLPack's number of the default stream is 1 on CUDA and 0 on ROCm, where 1 and 2 are refused.
    options = {} if device == HOST else {"stream": stream or (0 if device_type == ROCM else 1)}
    try:
        with contextlib.nullcontext() if device == HOST else _its_device(array):
            try:
                capsule = array.__dlpack__(max_version=(1, 0), **options)
            except TypeError:  # a producer from before DLPack 1.0
                capsule = array.__dlpack__(**options)
    except (RuntimeError, ValueError, TypeError, BufferError, AssertionError) as error:
        raise InvalidArgumentError(f"{what}: its __dlpack__ says: {error}") from error
    # The capsule is not renamed to "used_dltensor", so its own destructor calls the deleter when
    # it is dropped.
    readonly = copied = False
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise InvalidArgumentError(f"{what} comes in DLPack {managed.major}.{managed.minor}; 1.x is understood")
        tensor, readonly, copied = managed.tensor, bool(managed.flags & DLPACK_READ_ONLY), bool(managed.flags & DLPACK_COPIED)
    elif _capsule_is(capsule, b"dltensor"):
        tensor = DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise TypeError(f"{what}: __dlpack__ of {type(array).__name__} gave no DLPack capsule")
    kind = DLPACK_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if kind is None:
        raise TypeError(f"{what} has elements of {_name(array, (tensor.code, tensor.bits))}; supported are {SUPPORTED}")
    ndim = tensor.ndim
    count = _contiguous(what, tensor.shape[:ndim], tensor.strides[:ndim] if tensor.strides else None, 1)
    if count > 0 and not tensor.data:
        raise InvalidArgumentError(
            f"{what} is a {type(array).__name__} of {count} elements without memory behind it (a fake, functional or wrapped tensor, or its storage was freed)")
    return Memory((tensor.data or 0) + tensor.byte_offset, count, kind, readonly or immutable, device, (array, capsule), copied=copied,
                  device_id=device_id if device == CUDA else None)


def _its_device(array: Any) -> ContextManager[Any]:
    """Makes the array's device current for torch and CuPy. They export arrays of their current
    device alone, and a new thread begins with device 0."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        here = torch.cuda.current_device() == array.device.index
        return contextlib.nullcontext() if here else cast(ContextManager[Any], torch.cuda.device(array.device))
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return cast(ContextManager[Any], cupy.cuda.Device(array.device.id))
    return contextlib.nullcontext()


def _of_jax(array: Any, what: str) -> bool:
    """Whether this is an array of JAX. Such arrays never change and others may share their memory,
    but their DLPack capsule does not say that they are read-only."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, getattr(jax, "Array", ())):
        return False
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{what} is a value inside jax.jit (or grad, vmap ...), which has no memory yet; the collectives of devicemesh_jax take it"
        )
    if array.is_deleted():
        raise InvalidArgumentError(f"{what} is an array of JAX that was deleted or donated")
    return True


def _name(array: Any, code: Tuple[int, int]) -> str:
    return f"type {getattr(array, 'dtype', f'DLPack code {code[0]}, {code[1]} bits')}"


def _from_array_interface(array: Any, what: str, device: str) -> Memory:
    interface = array.__cuda_array_interface__ if device == CUDA else array.__array_interface__
    described: str = interface["typestr"]
    # A unit of time may follow the size. No supported type has one.
    order, letter, size = described[0], described[1], int(described[2:]) if described[2:].isdigit() else 0
    name = str(getattr(array, "dtype", ""))
    kind = NAMED.get((name, size)) or KINDS.get((letter, size))
    if kind is None or (order == ">" and size > 1):
        raise TypeError(f"{what} has elements of type {name or described}; supported are {SUPPORTED}")
    if interface.get("mask") is not None:
        raise InvalidArgumentError(f"{what} is masked, and its mask would be lost: pass an array without one")
    shape: Tuple[int, ...] = tuple(interface["shape"])
    count = _contiguous(what, shape, interface.get("strides"), size)
    address, readonly = interface["data"]
    return Memory(int(address or 0), count, kind, bool(readonly), device, array)


def changed(array: Any) -> None:
    """Tells torch's autograd that the elements of a tensor change, so that a backward pass that
    needs the old ones fails instead of using the new ones."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and hasattr(torch.autograd.graph, "increment_version"):
        torch.autograd.graph.increment_version(array)

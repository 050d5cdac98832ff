"""Arguments that are refused, because they would give other numbers than were meant: operators,
integers and truth values of other kinds, and arrays that say more than their memory."""

import array
import ctypes
import datetime
import enum
import pickle
import sys
import types
import unittest
from unittest import mock

import numpy

from devicemesh import DeviceMesh, DimOptions, InvalidArgumentError, InvalidHandleError, ReduceOp, Shard, World, _library, buffers, init_device_mesh, stores
from devicemesh.constants import reduction

try:
    import torch
    import torch.distributed
except ImportError:
    torch = None


def offline(rank=0, shape=(2, 4), names=("dp", "tp"), **options):
    return init_device_mesh("cpu", shape, mesh_dim_names=names, world=World("cpu", world_size=8, rank=rank, offline=True), **options)


class RedOpType(enum.Enum):
    """torch.distributed's, whose numbers are not ours."""

    SUM, AVG, PRODUCT, MIN, MAX, BAND, PREMUL_SUM = range(7)

    def __index__(self):
        return self.value


class TorchsReduceOp:
    def __init__(self, op):
        self.op = op

    def __index__(self):
        return self.op.value


class Operators(unittest.TestCase):
    def test_by_name_and_number(self):
        for given, meant in (("sum", 0), ("Prod", 1), ("product", 1), ("MAX", 2), ("min", 3), ("avg", 4), (ReduceOp.AVG, 4), (3, 3)):
            self.assertEqual(reduction(given), meant)

    def test_torchs_by_name(self):
        for kind in (RedOpType, getattr(getattr(torch, "distributed", None), "ReduceOp", RedOpType)):
            for name, meant in (("SUM", ReduceOp.SUM), ("AVG", ReduceOp.AVG), ("PRODUCT", ReduceOp.PROD),
                                ("MIN", ReduceOp.MIN), ("MAX", ReduceOp.MAX)):
                self.assertEqual(reduction(getattr(kind, name)), meant, name)
                holder = TorchsReduceOp if kind is RedOpType else kind
                self.assertEqual(reduction(holder(getattr(kind, name))), meant, name)
            with self.assertRaisesRegex(InvalidArgumentError, "op is 'BAND' .*not one of sum, prod, max, min, avg, product, mean"):
                reduction(kind.BAND)
        with self.assertRaisesRegex(InvalidArgumentError, "PREMUL_SUM"):
            reduction(TorchsReduceOp(RedOpType.PREMUL_SUM))

    def test_mpi4pys_by_name(self):
        module = types.ModuleType("mpi4py.MPI")
        kind = type("Op", (), {"__module__": "mpi4py.MPI"})
        for name in ("SUM", "PROD", "MAX", "MIN", "LAND"):
            setattr(module, name, kind())
        with mock.patch.dict(sys.modules, {"mpi4py.MPI": module}):
            self.assertEqual([reduction(each) for each in (module.SUM, module.PROD, module.MAX, module.MIN)], [0, 1, 2, 3])
            with self.assertRaisesRegex(InvalidArgumentError, "mpi4py"):
                reduction(module.LAND)

    def test_what_is_not_known(self):
        class Theirs(enum.IntEnum):
            LAND = 1

        for op in (2.7, 2.0, True, None, 5, -1, "median", b"sum", max, numpy.add, [1], Theirs.LAND, float("nan"), ReduceOp):
            with self.assertRaisesRegex(InvalidArgumentError, "not one of sum, prod, max, min, avg, product, mean", msg=repr(op)):
                reduction(op)


class Numbers(unittest.TestCase):
    def refuses(self, kind, text, ask):
        with self.assertRaises(kind) as caught:
            ask()
        self.assertIn(text, str(caught.exception))

    def test_integers(self):
        mesh = offline()
        group, value = mesh.get_group("tp"), bytearray(4)
        self.assertEqual(mesh.size(numpy.int64(1)), 4)
        self.assertEqual(mesh.neighbor("tp", numpy.int8(1)), 1)
        for wrong in (True, 1.0, numpy.bool_(True), numpy.float64(1), "1", None):
            shown = "not an integer"
            self.refuses(TypeError, shown, lambda: group.broadcast(value, root=wrong))
            self.refuses(TypeError, shown, lambda: group.reduce(value, root=wrong))
            self.refuses(TypeError, shown, lambda: group.send(value, wrong))
            self.refuses(TypeError, shown, lambda: group.recv(value, wrong))
            self.refuses(TypeError, shown, lambda: mesh.neighbor("tp", wrong))
            self.refuses(TypeError, shown, lambda: mesh.translate_rank("tp", wrong))
            self.refuses(TypeError, shown, lambda: offline(shape=(wrong, 2)))
            self.refuses(TypeError, shown, lambda: offline(ranks=[wrong] * 8))
            self.refuses(TypeError, shown, lambda: mesh.local_shard((wrong,), (Shard(0), Shard(0))))
            if wrong is not None:
                self.refuses(TypeError, shown, lambda: mesh.local_shard((8,), (Shard(wrong), Shard(0))))
                self.refuses(TypeError, shown, lambda: mesh.local_shard((8,), (Shard(0), Shard(0)), rank=wrong))
                self.refuses(TypeError, shown, lambda: World("cpu", world_size=wrong, rank=0, offline=True))
                self.refuses(TypeError, shown, lambda: group.all_reduce(value, stream=wrong))
        self.refuses(TypeError, "not an integer", lambda: mesh.get_group(True))
        self.refuses(TypeError, "not an integer", lambda: DeviceMesh("cpu", [[True, False]]))
        self.refuses(ValueError, "offset is", lambda: mesh.neighbor("tp", 2**31))
        self.refuses(ValueError, "root is 4, but dimension tp has ranks 0 to 3", lambda: group.broadcast(value, root=4))
        self.refuses(ValueError, "peer is -1, but dimension tp has ranks 0 to 3", lambda: group.send(value, -1))
        self.refuses(ValueError, "device type cpu has no streams", lambda: group.all_reduce(value, stream=7))
        self.refuses(ValueError, "stream is -1", lambda: group.all_reduce(value, stream=-1))
        for wrong in (1, "max", ReduceOp.MAX, [value]):
            for call in (group.all_reduce, group.reduce, group.broadcast, group.all_gather, group.reduce_scatter, group.all_to_all):
                if isinstance(wrong, list) and call.__name__ in ("all_gather", "reduce_scatter", "all_to_all"):
                    continue  # a list for each rank
                # On every rank, as PyTorch's callers pass a rank or an operator there.
                self.refuses(TypeError, "an operator is passed as op=, a rank as root=", lambda: call(value, wrong))
                self.refuses(TypeError, "an operator is passed as op=, a rank as root=",
                             lambda: getattr(offline(rank=1).get_group("tp"), call.__name__)(value, wrong))
        self.refuses(TypeError, "a group is a bool", lambda: DeviceMesh.from_group(True, "cpu", [0]))
        self.refuses(ValueError, "group is 0", lambda: DeviceMesh.from_group(0, "cpu", [0]))

    def test_truth_values(self):
        mesh = offline()
        self.assertEqual(mesh.neighbor("tp", -1, wrap=numpy.bool_(True)), 3)
        for wrong in ("no", 0, 1, None, [False]):
            self.refuses(TypeError, "not True or False", lambda: mesh.neighbor("tp", 1, wrap=wrong))
            self.refuses(TypeError, "not True or False", lambda: offline(lazy=wrong))
            self.refuses(TypeError, "not True or False", lambda: World("cpu", world_size=2, rank=0, offline=wrong))
            self.refuses(TypeError, "not True or False", lambda: offline(dim_options=[DimOptions(own_comm=wrong), DimOptions()]))

    def test_timeouts(self):
        self.assertEqual([
            _library.milliseconds(given)
            for given in (None, 0.5, 3, numpy.float32(2), datetime.timedelta(minutes=1), numpy.timedelta64(1500, "ms"))
        ], [0, 500, 3000, 2000, 60000, 1500])
        for wrong in (0, -1, float("nan"), float("inf"), datetime.timedelta(0)):
            self.refuses(ValueError, "timeout is", lambda: _library.milliseconds(wrong))
        for endless in (float("inf"), 1e30):
            self.refuses(ValueError, "give 1e9 for 31 years", lambda: _library.milliseconds(endless))
        for wrong in (True, "3", b"3", [3], numpy.bool_(True), numpy.timedelta64(3, "ns")):
            self.refuses(TypeError, "timeout is", lambda: _library.milliseconds(wrong))

    def test_wrong_words_are_told_the_right_ones(self):
        mesh = offline()
        for wrong in (0, slice(0, 2), None, 1.5):
            self.refuses(TypeError, "write mesh['dp'] (this mesh has dp, tp), or mesh.slice_range", lambda: mesh[wrong])
        self.refuses(ValueError, "mesh_shape is (2, -1), and -1 is no size", lambda: offline(shape=(2, -1)))
        self.refuses(TypeError, "mesh_shape is None", lambda: offline(shape=None))
        self.refuses(TypeError, "expected: write (8,)", lambda: offline(shape=8, names=("dp",)))
        self.refuses(TypeError, "call init_device_mesh with a shape", lambda: DeviceMesh("cpu", None, world=mesh.world))
        with mesh:
            pass
        self.refuses(RuntimeError, "not this thread's current mesh", lambda: mesh.__exit__(None, None, None))
        other = offline()
        mesh.__enter__()
        self.refuses(RuntimeError, "not this thread's current mesh", lambda: other.__exit__(None, None, None))
        mesh.__exit__(None, None, None)
        other.close()
        self.refuses(InvalidHandleError, "so it cannot be pickled", lambda: pickle.dumps(other))

    def test_containers(self):
        self.refuses(TypeError, "a set, which has no order", lambda: offline(shape={2, 4}))
        self.refuses(TypeError, "a set, which has no order", lambda: offline(names={"dp", "tp"}))
        self.refuses(TypeError, "a set, which has no order", lambda: offline(ranks=set(range(8))))
        self.refuses(TypeError, "not a devicemesh.World", lambda: init_device_mesh("cpu", (2,), world=offline()))
        self.refuses(TypeError, "not a DeviceMesh", lambda: DeviceMesh.concatenate([offline().get_group("dp")]))
        self.refuses(TypeError, "mesh_shape is 8 (a int); a tuple or a list was expected", lambda: offline(shape=8))
        self.refuses(TypeError, "a tuple or a list was expected", lambda: DeviceMesh.concatenate(offline()))
        self.refuses(TypeError, "one DimOptions", lambda: offline(dim_options=DimOptions()))
        self.refuses(TypeError, "not a range", lambda: offline().slice_range("tp", [0, 1]))


    def test_what_a_store_answers(self):
        class Odd:
            answer = None

            def get(self, key, timeout):
                if isinstance(self.answer, Exception):
                    raise self.answer
                return self.answer

            def add(self, key, amount):
                return self.answer

        odd = Odd()
        callbacks = stores.Callbacks(odd)
        room, length, number = (ctypes.c_char * 8)(), ctypes.c_size_t(99), ctypes.c_int64()

        def get():
            return callbacks._get(None, b"key", ctypes.addressof(room), 8, ctypes.pointer(length), 1000)

        for odd.answer in ("text", 5, [1]):
            self.assertEqual((get(), length.value), (stores.BROKEN, 99), "what is not bytes ends the call")
            self.assertIsInstance(callbacks.failure, TypeError)
        callbacks.failure = None
        for odd.answer in (None, KeyError("key"), TimeoutError("late")):
            self.assertEqual((get(), callbacks.failure), (100, None), "the key did not come in time")
        odd.answer = OSError("broken")
        self.assertEqual((get(), callbacks.failure), (stores.BROKEN, odd.answer), "the service is broken")
        for odd.answer in ("1", 2.0, True, 2**63):
            self.assertEqual(callbacks._add(None, b"key", 1, ctypes.pointer(number)), stores.BROKEN)
        odd.answer = bytearray(b"longer than there is room")
        self.assertEqual((get(), length.value, room.raw), (0, 25, b"longer t"))
        odd.answer = -7
        self.assertEqual((callbacks._add(None, b"key", 1, ctypes.pointer(number)), number.value), (0, -7))


class Arrays(unittest.TestCase):
    def refuses(self, text, value, kind=(InvalidArgumentError, TypeError)):
        with self.assertRaises(kind, msg=repr(type(value))) as caught:
            buffers.memory(value)
        self.assertIn(text, str(caught.exception))

    def test_masks(self):
        masked = numpy.ma.masked_array([1.0, 2.0], [True, False])
        self.refuses("whose mask would be lost: pass array.filled(value)", masked)
        self.refuses("whose mask would be lost", type("Mine", (numpy.ma.MaskedArray,), {})([1.0]))
        self.assertEqual(buffers.memory(masked.data).count, 2)
        on_device = types.SimpleNamespace(__cuda_array_interface__={
            "shape": (4, ), "typestr": "<f4", "data": (4096, False), "version": 3, "mask": masked
        })
        self.refuses("its mask would be lost", on_device)

    def test_kinds_of_numpys(self):
        self.assertEqual(buffers.memory(numpy.zeros((2, 3)).view(numpy.matrix) if hasattr(numpy, "matrix") else numpy.zeros(6)).count, 6)
        self.assertEqual(buffers.memory(numpy.array(3.0)).count, 1)
        self.assertTrue(buffers.memory(numpy.float64(3)).readonly, "a scalar does not change")
        for odd in (numpy.zeros(3, "f4,f4"), numpy.zeros(3, "V8"), numpy.zeros(3, "O"), numpy.zeros(3, "?"),
                    numpy.zeros(3, "c8"), numpy.zeros(3, "U2"), numpy.zeros(3, "m8[s]"),
                    memoryview(bytearray(4)).cast("c"), (ctypes.c_bool * 3)()):
            self.refuses("supported are int8", odd, TypeError)
        for odd in (numpy.zeros(3, ">i4"), numpy.zeros(0, ">f8"), (ctypes.c_float.__ctype_be__ * 3)()):
            self.refuses("big-endian", odd, TypeError)
        wide = numpy.lib.stride_tricks.as_strided(numpy.zeros(1), (4,), (0,), writeable=True)
        self.refuses("strides (0,)", wide)
        self.refuses("not contiguous", numpy.broadcast_to(numpy.zeros(1), (4,)))

    def test_a_buffer_is_held(self):
        grows = bytearray(8)
        held = buffers.memory(grows)
        with self.assertRaises(BufferError):
            grows.extend(b"more")
        held.release()
        grows.extend(b"more")
        closed = memoryview(bytearray(3))
        closed.release()
        with self.assertRaises(ValueError):
            buffers.memory(closed)
        self.assertEqual(buffers.memory(array.array("d")).count, 0)

    def test_a_producer_that_copies(self):
        group = offline().get_group("tp")
        values = numpy.zeros(4)
        copies = types.SimpleNamespace(
            __dlpack_device__=lambda: (1, 0), __dlpack__=lambda **options: values.__dlpack__(max_version=(1, 0), copy=True))
        if numpy.lib.NumpyVersion(numpy.__version__) < "2.1.0":
            self.skipTest("this numpy's DLPack cannot say that it copied")
        with self.assertRaisesRegex(InvalidArgumentError, "a copy of itself"):
            group.all_reduce(copies)
        with self.assertRaisesRegex(InvalidArgumentError, "a copy of itself"):
            group.all_reduce(values, copies)
        self.assertEqual(buffers.memory(copies).count, 4, "as an input a copy will do")

    def test_a_buffer_that_is_refused(self):
        """CuPy 14 has the buffer protocol, and refuses it by a TypeError for device memory. DLPack
        gives the memory then."""
        values = numpy.zeros(4)

        class OnDevice(bytearray):  # a type with a buffer
            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, **options):
                return values.__dlpack__()

        with mock.patch.object(buffers, "_get_buffer", side_effect=TypeError("on CPU is not allowed")):
            self.assertEqual(buffers.memory(OnDevice()).address, values.ctypes.data)
            with self.assertRaisesRegex(BufferError, "on CPU is not allowed"):
                buffers.memory(bytearray(8))

    def test_bits_of_a_view(self):
        class View:
            def __init__(self, bit):
                self.bit = bit

            def is_neg(self):
                return self.bit == "neg"

            def is_conj(self):
                return self.bit == "conj"

            def __dlpack__(self, **_):
                raise AssertionError("its memory is not asked for")

        self.refuses("negative bit, so its memory holds other values: pass a tensor that resolve_neg() has made of it", View("neg"))
        self.refuses("resolve_conj()", View("conj"))

    def test_torchs(self):
        if torch is None:
            self.skipTest("no torch here")
        ones = torch.ones(4)
        self.assertEqual(buffers.memory(ones).address, ones.data_ptr())
        for tensor, says in ((torch._neg_view(ones), "negative bit"), (torch.ones(
                2, dtype=torch.complex64).conj(), "conjugate bit"), (torch.nn.Parameter(ones), "detach()"), (torch.ones(
                    2, 2).to_sparse(), "strided"), (torch.ones(
                        2, device="meta"), "meta"), (torch.ones(1).expand(4), "strides (0,)"), (torch.ones(
                            4, 4).T, "not contiguous"), (torch._efficientzerotensor(3), "without memory"), (torch.ones(
                                2, dtype=torch.bool), "torch.bool"), (torch.ones(2).to(
                                    torch.float8_e4m3fn), "float8"), (torch.ones(
                                        2, dtype=torch.complex64), "complex64"), (torch.ones(
                                            2, dtype=torch.int16), "int16"),
                             ):
            self.refuses(says, tensor)
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        self.refuses("without memory", freed)

    def test_torchs_autograd_notices(self):
        if torch is None:
            self.skipTest("no torch here")
        mesh = init_device_mesh("cpu", (1,), world=World("cpu", world_size=1, rank=0, init_method="env://"))
        weight, value = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
        loss = (weight * value).sum()
        mesh.get_group().all_reduce(value)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()


if __name__ == "__main__":
    unittest.main()

"""Tests that need one process: the memory behind the buffers that a program passes."""

import array
import ctypes
import gc
import unittest
import weakref

import numpy

from devicemesh import DType, InvalidArgumentError, UnsupportedError, World, init_device_mesh
from devicemesh import _streams, buffers


def offline(device="cpu"):
    return init_device_mesh(device, (2,), mesh_dim_names=("x",), world=World(device, world_size=2, rank=0, offline=True))


class OnlyDlpack:
    """An array that can be had through DLPack alone; it says when its capsule is gone."""

    def __init__(self, values, versioned, device=(1, 0)):
        self.values, self.versioned, self.device, self.asked = values, versioned, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.asked.append(options)
        if not self.versioned and "max_version" in options:
            raise TypeError("an old producer")
        return self.values.__dlpack__(**{name: value for name, value in options.items() if name != "stream"})


class OnCuda:
    def __init__(self, **changed):
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3, **changed}


class Memory(unittest.TestCase):
    def test_buffers(self):
        for letter, kind in zip("bBiIqQfd", (0, 1, 2, 3, 4, 5, 7, 8)):
            values = array.array(letter, [1, 2, 3])
            found = buffers.memory(values)
            self.assertEqual((found.address, found.count, found.dtype, found.readonly), (values.buffer_info()[0], 3, kind, False))
            with self.assertRaises(BufferError):
                values.append(1)
            found.release()
            values.append(1)
        self.assertTrue(buffers.memory(b"abc").readonly)
        self.assertEqual(buffers.memory(array.array("l", [1])).dtype, DType.INT64)
        self.assertEqual(buffers.memory((ctypes.c_float * 3)()).dtype, DType.FLOAT32)
        self.assertEqual(buffers.memory(ctypes.c_int32(3)).count, 1)

    def test_numpy(self):
        for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"):
            values = numpy.zeros((3, 2), name)
            found = buffers.memory(values)
            self.assertEqual((found.address, found.count, DType(found.dtype).name.lower()), (values.ctypes.data, 6, name))
        for shape in ((), (0,), (0, 3), (1, 5), (5, 1)):
            self.assertEqual(buffers.memory(numpy.zeros(shape)).count, numpy.prod(shape))
        self.assertEqual(buffers.memory(numpy.zeros((5, 4))[2:3, 1:3]).count, 2)
        self.assertEqual(buffers.memory(numpy.zeros(7)[::7]).count, 1)

    def test_types_of_ml_dtypes(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("no ml_dtypes here")
        values = numpy.zeros((2, 3), ml_dtypes.bfloat16)
        found = buffers.memory(values)
        self.assertEqual((found.address, found.count, found.dtype), (values.ctypes.data, 6, DType.BFLOAT16))
        with self.assertRaisesRegex(InvalidArgumentError, r"strides \(1, 3\) in elements"):
            buffers.memory(values.T)
        for name, kind in (("float8_e4m3fn", DType.FLOAT8E4M3), ("float8_e5m2", DType.FLOAT8E5M2)):
            values = numpy.zeros((2, 3), getattr(ml_dtypes, name))
            found = buffers.memory(values)
            self.assertEqual((found.address, found.count, found.dtype), (values.ctypes.data, 6, kind))
        with self.assertRaisesRegex(TypeError, "float8_e4m3b11fnuz"):
            buffers.memory(numpy.zeros(3, ml_dtypes.float8_e4m3b11fnuz))

    def test_jax(self):
        try:
            import jax.numpy
        except ImportError:
            self.skipTest("no jax here")
        for name in ("float32", "bfloat16", "float16", "int32"):
            values = jax.numpy.zeros((2, 3), name)
            found = buffers.memory(values)
            self.assertEqual((found.address, found.count, DType(found.dtype).name.lower()), (values.unsafe_buffer_pointer(), 6, name))
            self.assertTrue(found.readonly, "jax's arrays do not change")

    def test_what_is_not_contiguous_or_of_another_type(self):
        table = numpy.zeros((4, 6), "float32")
        for values, strides in ((table.T, "(1, 6)"), (table[:, :3], "(6, 1)"), (table[0, ::2], "(2,)"), (table[0, ::-1], "(-1,)")):
            for shown in (values, OnlyDlpack(values, True), OnlyDlpack(values, False)):
                with self.assertRaisesRegex(InvalidArgumentError, "not contiguous") as caught:
                    buffers.memory(shown, "out")
                self.assertIn(strides, str(caught.exception))
                self.assertTrue(str(caught.exception).startswith("out "))
        for name in ("bool", "int16", "uint16", "complex64", ">f4", "S3", "datetime64[s]", "object", "float128"):
            with self.assertRaises(TypeError, msg=name) as caught:
                buffers.memory(numpy.zeros(3, name))
            self.assertIn("big-endian" if name == ">f4" else "bfloat16", str(caught.exception))
        for other in (3, "text", [1.0], None, object()):
            with self.assertRaisesRegex(TypeError, "buffer protocol"):
                buffers.memory(other)

    def test_dlpack(self):
        for versioned in (True, False):
            values = numpy.arange(6, dtype="float32").reshape(2, 3)[1:]
            shown = OnlyDlpack(values, versioned)
            found = buffers.memory(shown)
            self.assertEqual((found.address, found.count, found.dtype, found.device), (values.ctypes.data, 3, DType.FLOAT32, "cpu"))
            held = weakref.ref(values)
            del values, shown
            gc.collect()
            self.assertIsNotNone(held(), "the producer lives as long as its memory is used")
            found.release()
            self.assertIsNone(held(), "the capsule's destructor called the deleter")
        values = numpy.zeros(3)
        values.flags.writeable = False
        try:
            self.assertTrue(buffers.memory(OnlyDlpack(values, True)).readonly)
        except InvalidArgumentError as error:  # numpy before 2.1, whose DLPack cannot say so
            self.assertIn("readonly", str(error))
        with self.assertRaisesRegex(TypeError, "16 bits"):
            buffers.memory(OnlyDlpack(numpy.zeros(3, "int16"), True))
        with self.assertRaisesRegex(InvalidArgumentError, "device type 7"):
            buffers.memory(OnlyDlpack(numpy.zeros(3), True, device=(7, 0)))
        on_device = OnlyDlpack(numpy.zeros(3), True, device=(2, 0))
        self.assertEqual(buffers.memory(on_device, stream=77).device, "cuda")
        self.assertEqual(buffers.memory(on_device).device, "cuda")
        self.assertEqual(list(dict.fromkeys(asked["stream"] for asked in on_device.asked)), [77, 1], "the producer waits for our stream")

    def test_cuda_array_interface(self):
        found = buffers.memory(OnCuda())
        self.assertEqual((found.address, found.count, found.dtype, found.device), (4096, 4, DType.FLOAT32, "cuda"))
        self.assertTrue(buffers.memory(OnCuda(data=(4096, True))).readonly)
        with self.assertRaisesRegex(InvalidArgumentError, "not contiguous"):
            buffers.memory(OnCuda(strides=(8,)))
        with self.assertRaisesRegex(TypeError, "f16"):
            buffers.memory(OnCuda(typestr="<f16"))

    def test_streams(self):
        class Torch:
            cuda_stream = 5

        class Cuda:
            def __cuda_stream__(self):
                return (0, 6)

        self.assertEqual([_streams.stream_handle(each) for each in (None, 3, Torch(), Cuda())], [0, 3, 5, 6])
        with self.assertRaises(TypeError):
            _streams.stream_handle("stream")

    def test_the_mesh_says_which_memory(self):
        on_cpu, on_cuda = offline().get_group(), offline("cuda").get_group()
        with self.assertRaisesRegex(InvalidArgumentError, "buffer lies in cuda memory, but the mesh is on cpu"):
            on_cpu.all_reduce(OnCuda())
        with self.assertRaisesRegex(InvalidArgumentError, "buffer lies in cpu memory, but the mesh is on cuda"):
            on_cuda.all_reduce(bytearray(4))
        with self.assertRaises(UnsupportedError):
            on_cuda.all_reduce(OnCuda())
        with self.assertRaisesRegex(InvalidArgumentError, "read-only"):
            on_cpu.all_reduce(b"abcd")
        with self.assertRaisesRegex(InvalidArgumentError, "out is read-only"):
            on_cpu.all_reduce(bytearray(4), b"abcd")


if __name__ == "__main__":
    unittest.main()

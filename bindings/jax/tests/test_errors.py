"""What goes wrong is a Python error with the library's message, on every rank, and after recover() the next call works."""

import unittest
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy
from devicemesh_jax import _devices as devices
from devicemesh_jax import _native
from jax.sharding import NamedSharding, PartitionSpec
from ranks import FLAT, MESH, RANK, SHAPE, WORLD, close, own_mesh


class Errors(unittest.TestCase):
    def tearDown(self):
        dmj.recover()
        self.assertIsNone(dmj.recover())
        self.assertEqual(float(dmj.all_reduce(jnp.float64(1), FLAT)), WORLD)

    def raises(self, kind, text, function, *arguments, **options):
        with self.assertRaisesRegex(kind, text):
            jax.block_until_ready(function(*arguments, **options))

    def test_unknown_dimension(self):
        for mesh in (MESH, "registered"):
            MESH.register("registered")
            self.raises(devicemesh.NotFoundError, "pp.*outer, inner", dmj.all_reduce, jnp.ones(3), mesh, "pp")
        self.raises(devicemesh.InvalidArgumentError, "dim", dmj.all_reduce, jnp.ones(3), MESH)
        self.raises(IndexError, "dim is 2, but there are 2 dimensions: outer, inner", dmj.all_reduce, jnp.ones(3), MESH, 2)
        for dim in (("outer", "inner"), 0.0, True):
            self.raises(TypeError, "dim .a name or an index of one dimension; flatten makes one of several. is a ",
                        dmj.all_reduce, jnp.ones(3), MESH, dim)

    def test_name_that_is_not_registered(self):
        self.raises(devicemesh.NotFoundError, 'no mesh is registered as "nobody"', dmj.all_reduce, jnp.ones(3), "nobody", "inner")
        self.raises(devicemesh.NotFoundError, 'no mesh is registered as "nobody"',
                    jax.jit(lambda x: dmj.all_reduce(x, "nobody", "inner")), jnp.ones(3))

    def test_name_that_is_gone_when_the_program_runs(self):
        for length in (3, 1_000_000):
            MESH.register("leaving")
            total = jax.jit(lambda x: dmj.all_reduce(x * 2, "leaving", "inner"))
            total(jnp.ones(length)).block_until_ready()
            devicemesh.unregister("leaving")
            for _ in range(2):
                self.raises(jax.errors.JaxRuntimeError,
                            'NOT_FOUND: .*DM_STATUS_NOT_FOUND: no mesh is registered as "leaving"', total,
                            jnp.ones(length))
            dmj.recover()
            MESH.register("leaving")
            self.assertEqual(float(total(jnp.ones(length))[-1]), 2 * SHAPE[1])

    def test_name_of_another_shape_when_the_program_runs(self):
        MESH.register("reshaped")
        total = jax.jit(lambda x: dmj.all_reduce(x, "reshaped", "inner"))
        total(jnp.ones(3)).block_until_ready()
        devicemesh.init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("outer", "inner")).register("reshaped")
        self.raises(
            jax.errors.JaxRuntimeError,
            f'dimension inner of mesh "reshaped" has {WORLD} ranks now and had {SHAPE[1]} when this was traced', total,
            jnp.ones(3))

    def test_a_function_goes_on_with_a_mesh_made_after_a_failure(self):
        mesh = own_mesh("again")
        program = jax.jit(lambda x: dmj.all_reduce(x, mesh, "again"))
        self.assertEqual(float(program(jnp.float64(1))), WORLD)
        if WORLD > 1:
            self.raises(jax.errors.JaxRuntimeError, "MISMATCH", program, jnp.ones(3 + RANK))
        anew = own_mesh("again")
        dmj.recover()
        self.assertEqual(float(program(jnp.float64(1))), WORLD)
        self.assertEqual(anew.size(), WORLD)

    def test_closed_and_finalized_mesh(self):
        mesh = own_mesh("closing")
        program = jax.jit(lambda x: dmj.all_reduce(x, mesh, "closing"))
        program(jnp.ones(3)).block_until_ready()
        mesh.finalize()
        self.raises(jax.errors.JaxRuntimeError, "ABORTED: .*DM_STATUS_ABORTED", program, jnp.ones(3))
        dmj.recover()
        mesh.close()
        self.raises(devicemesh.InvalidHandleError, "", dmj.all_reduce, jnp.ones(4), mesh, "closing")
        self.raises(jax.errors.JaxRuntimeError, "ABORTED: .*DM_STATUS_ABORTED", program, jnp.ones(3))

    def test_later_calls_fail_alike_until_recovered(self):
        MESH.register("leaving")
        total = jax.jit(lambda x: dmj.all_reduce(x * 2, "leaving", "inner"))
        x = jnp.ones(1_000_000)
        total(x).block_until_ready()
        devicemesh.unregister("leaving")
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, 'no mesh is registered as "leaving"'):
            # Not waited for, so the one behind it is under way when it fails.
            failing = total(x)
            jax.block_until_ready([dmj.all_reduce(x, FLAT), failing])
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, 'no mesh is registered as "leaving"'):
            FLAT.get_group().all_reduce(numpy.ones(3))
        # What makes and ends meshes belongs to the way out of an error.
        devicemesh.init_device_mesh("cpu", (WORLD,)).finalize()
        self.assertIsNotNone(dmj.recover())
        self.assertEqual(float(dmj.all_reduce(x, FLAT)[-1]), WORLD)

    def test_meshes_that_cannot_communicate_here(self):
        for device, text in (("cuda", "FAILED_PRECONDITION: mesh .* is on cuda, but this computation runs on cpu"),
                             ("cpu", "UNIMPLEMENTED: DM_STATUS_UNSUPPORTED")):
            world = devicemesh.World(device, world_size=WORLD, rank=RANK, offline=True)
            mesh = devicemesh.init_device_mesh(device, (WORLD,), mesh_dim_names=("dp",), world=world)
            mesh.register(f"offline {device}")
            self.raises(jax.errors.JaxRuntimeError, text, dmj.all_reduce, jnp.ones(3), f"offline {device}", "dp")
            dmj.recover()

    def test_ranks_that_call_differently(self):
        # The last rank makes another call. Each program goes on with a call that all ranks make
        # alike: it must not meet the other call.
        odd, x = RANK == WORLD - 1 > 0, jnp.ones(4)
        programs = {
            "no elements": lambda mesh, x: dmj.all_reduce(x[:0] if odd else x, mesh),
            "no elements of all but one": lambda mesh, x: dmj.all_gather(x if odd else x[:0], mesh),
            "no elements to the next": lambda mesh, x: dmj.shift(x[:0] if odd else x, mesh),
            "no elements gathered": lambda mesh, x: dmj.gather(x[:0] if odd else x, mesh),
            "fewer elements scattered": lambda mesh, x: dmj.scatter(jnp.stack([x[:2] if odd else x] * WORLD), mesh),
            "another branch": lambda mesh, x: jax.lax.cond(x[0] + odd > 1, lambda x: dmj.all_reduce(x[:2], mesh)[0] + x,
                                                           lambda x: dmj.all_reduce(x, mesh), x),
        }
        for what, program in programs.items():
            mesh = own_mesh()
            if WORLD > 1:
                with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "DM_STATUS_", msg=what) as raised:
                    jax.block_until_ready(jax.jit(lambda x: (program(mesh, x), dmj.all_reduce(x, mesh)))(x))
                self.assertIn("DM_STATUS_MISMATCH", str(raised.exception), what)
                dmj.recover()

    def test_several_devices_of_one_process(self):
        devices = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = NamedSharding(devices, PartitionSpec("d"))
        x, total = jnp.arange(8.0), lambda x: dmj.all_reduce(x, FLAT)
        said = r"all_reduce is in a computation over 2 devices of this process \(.*\), .*: start one process for each device"
        shards = jax.jit(jax.shard_map(total, mesh=devices, in_specs=rows.spec, out_specs=rows.spec, check_vma=False))
        self.raises(ValueError, said, shards, x)
        self.raises(ValueError, said, jax.jit(jax.grad(lambda x: jnp.sum(total(x) ** 2))), jax.device_put(x, rows))
        self.raises(ValueError, said, jax.jit(total), jax.device_put(x, NamedSharding(devices, PartitionSpec())))
        # JAX up to 0.7 refuses it by itself.
        self.raises(ValueError, f"{said}|Ordered effects not supported", jax.pmap(total), x.reshape(2, 4))
        # One device at a time is a rank's, whichever it is.
        for device in jax.devices():
            self.assertEqual(float(jax.jit(total)(jax.device_put(x, device))[7]), 7 * WORLD)

    def test_ends_without_beginnings(self):
        """They are ignored. A jitted collective would wait for ever for a number below 0 to become
        0."""
        _native.library.devicemesh_jax_group(-1)
        _native.library.devicemesh_jax_queued(FLAT.get_group().handle, b"all", -1)
        self.assertEqual(float(jax.jit(lambda x: dmj.all_reduce(x, FLAT))(jnp.float64(1))), WORLD)

    def test_inside_a_group(self):
        for length in (4, 1_000_000):
            x, program = jnp.ones(length), jax.jit(lambda x: dmj.all_reduce(x, FLAT))
            with self.assertRaisesRegex(
                    jax.errors.JaxRuntimeError,
                    "was called inside a group .* call the jitted function before the group or after it"):
                with FLAT.group():
                    failing = program(x)
                failing.block_until_ready()
            dmj.recover()
            self.assertEqual(float(program(x)[-1]), WORLD)

    def test_host_calls_inside_a_callback(self):
        # The program waits for its callback, so the callback cannot wait for the program.
        group = FLAT.get_group()

        def callback(x):
            group.all_reduce(numpy.ones(3))
            return x

        program = jax.jit(lambda x: dmj.all_reduce(x, FLAT) + jax.pure_callback(
            callback, jax.ShapeDtypeStruct(x.shape, x.dtype), dmj.all_reduce(x, FLAT)))
        for length in (4, 1_000_000):
            self.raises(
                jax.errors.JaxRuntimeError,
                "a callback of a jitted program .* while jitted collectives run: their order can be another one",
                program, jnp.ones(length))
            dmj.recover()
        # Without collectives it has nothing to wait for.
        alone = jax.jit(lambda x: jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
        self.assertEqual(alone(jnp.ones(4)).tolist(), [1] * 4)

    def test_errors_of_another_thread(self):
        MESH.register("leaving")
        total = jax.jit(lambda x: dmj.all_reduce(x * 2, "leaving", "inner"))
        x = jnp.ones(1_000_000)
        total(x).block_until_ready()
        devicemesh.unregister("leaving")
        with ThreadPoolExecutor(1) as other:
            failing = other.submit(total, x).result()
            for _ in range(2):
                with self.assertRaisesRegex(jax.errors.JaxRuntimeError, 'no mesh is registered as "leaving"'):
                    FLAT.get_group().all_reduce(numpy.ones(3))
                self.raises(jax.errors.JaxRuntimeError, 'no mesh is registered as "leaving"', dmj.all_reduce, x, FLAT)
            del failing
            self.assertIsNotNone(dmj.recover())
            self.assertEqual(float(other.submit(dmj.all_reduce, x, FLAT).result()[-1]), WORLD)

    def test_another_gpu_than_the_mesh(self):
        # Devices as JAX shows them; no program runs on them.
        gpus = [SimpleNamespace(platform="gpu", local_hardware_id=ordinal, process_index=jax.process_index()) for ordinal in range(4)]
        over = lambda *chosen: SimpleNamespace(module_context=SimpleNamespace(
            axis_context=SimpleNamespace(device_assignment=chosen)))  # noqa: E731
        elsewhere = SimpleNamespace(platform="gpu", local_hardware_id=2, process_index=jax.process_index() + 1)
        for ours in (0, 2, None):
            with mock.patch.object(devices, "device_of", lambda mesh: ours):
                for gpu in gpus:
                    if ours in (gpu.local_hardware_id, None):
                        devices.check_ordinal(over(gpu, elsewhere), "shift", "m")
                        continue
                    said = (rf"shift is in .* GPU {gpu.local_hardware_id} of .* mesh 'm' has its communicators on GPU {ours}\. .*CUDA_VISIBLE_DEVICES={ours} "
                            rf".*local_device_ids=\[{ours}\].*device={gpu.local_hardware_id}\), dm_world_options.device")
                    self.raises(ValueError, said, devices.check_ordinal, over(gpu, elsewhere), "shift", "m")
                devices.check_ordinal(over(*jax.local_devices()), "shift", "m")
        # The lowering for cuda asks. The mesh is on cpu, where nobody knows a device.
        asked = []
        with mock.patch.object(devices, "check_ordinal", lambda context, name, mesh: asked.append((name, devices.device_of(mesh)))):
            for platform in ("cuda", "cpu"):
                jax.jit(lambda x: dmj.all_reduce(x, FLAT)).trace(jnp.ones(3)).lower(lowering_platforms=(platform,))
        self.assertEqual(asked, [("all_reduce", None)])

    def test_not_a_mesh(self):
        self.raises(TypeError, "mesh is a int; a devicemesh.DeviceMesh or the name", dmj.all_reduce, jnp.ones(3), 3)

    def test_elements_that_cannot_be_reduced_or_moved(self):
        reductions = (dmj.all_reduce, dmj.reduce, dmj.reduce_scatter, dmj.scan)
        for function in reductions:
            for op in ("sum", "prod", "avg"):
                if (function, op) != (dmj.scan, "avg"):
                    said = f"{function.__name__} of bool elements with op '{op}': use 'max' .true on any rank. or 'min' .true on all., or count"
                    self.raises(TypeError, said, function, jnp.ones(WORLD, bool), FLAT, op=op)
            for dtype in ("complex64", "complex128"):
                for op in ("max", "min"):
                    self.raises(TypeError, f"of {dtype} elements with op '{op}': complex numbers have no order",
                                function, jnp.ones(WORLD, dtype), FLAT, op=op)
            self.raises(TypeError, "of float8_e4m3b11fnuz elements: it reduces int8, .*; convert with astype", function,
                        jnp.ones(WORLD).astype("float8_e4m3b11fnuz"), FLAT)
            self.raises(
                TypeError,
                r"of random keys \(key<fry>\): keys can be moved .* but not reduced; reduce jax.random.key_data",
                function, jax.random.key(0), FLAT)
        for function in (dmj.all_reduce, dmj.all_gather, dmj.shift):
            self.raises(TypeError, f"{function.__name__} of int4 elements: .*; convert with astype", function,
                        jnp.ones(WORLD).astype("int4"), FLAT)
        self.raises(ValueError, "op is 'avg', which scan does not have", dmj.scan, jnp.ones(3), FLAT, op="avg")

    def test_messages(self):
        x = jnp.ones(3)
        self.raises(ValueError, f"dest is {WORLD}; dimension all has ranks 0 to {WORLD - 1}", dmj.send, x, FLAT, dest=WORLD)
        self.raises(ValueError, "source is -1; dimension all has ranks", dmj.recv, x, FLAT, source=-1)
        self.raises(TypeError, "source is a NoneType, None; an integer was expected", dmj.recv, x, FLAT, source=None)
        self.raises(NotImplementedError, "send cannot be differentiated, .* use sendrecv or shift on both ranks",
                    jax.grad(lambda x: (dmj.send(x, FLAT, dest=0), jnp.sum(x))[1]), x)
        self.raises(ValueError, "transpose is 'none'; it is one of all_reduce, identity", dmj.all_reduce, x, FLAT, transpose="none")

    def test_numbers_that_are_not_integers(self):
        x = jnp.ones((2, 3))
        for value, kind in ((0.5, "a float, 0.5"), (True, "a bool, True"), ("1", "a str, '1'"),
                            (None, "a NoneType, None"), ((0, 1), r"a tuple, \(0, 1\)")):
            self.raises(TypeError, f"root is {kind}; an integer was expected", dmj.broadcast, x, FLAT, root=value)
            self.raises(TypeError, f"offset is {kind}; an integer was expected", dmj.shift, x, FLAT, offset=value)
            self.raises(TypeError, f"axis is {kind}; an integer was expected", dmj.all_gather, x, FLAT, axis=value)
        self.raises(TypeError, "root is a value inside jax.jit; an integer was expected",
                    jax.jit(lambda root: dmj.broadcast(x, FLAT, root=root)), 0)
        self.assertEqual(dmj.shift(x, FLAT, offset=numpy.int64(1)).tolist(), x.tolist())

    def test_arrays_of_jax_in_host_calls(self):
        group, here = FLAT.get_group(), numpy.ones(3)
        for dtype in ("float32", "bfloat16"):
            x = jnp.ones(3, dtype)
            self.raises(devicemesh.InvalidArgumentError, "read-only", group.all_reduce, x)
            self.assertEqual(x.tolist(), [1, 1, 1], "an array of JAX does not change")
            total = numpy.zeros(3, x.dtype)
            group.all_reduce(x + 1, total)
            self.assertEqual(total.tolist(), [2 * WORLD] * 3)
        self.raises(TypeError, "buffer is a value inside jax.jit .*; the collectives of devicemesh_jax take it",
                    jax.jit(lambda x: group.all_reduce(x, here)), here)
        gone = jnp.ones(3)
        gone.delete()
        self.raises(devicemesh.InvalidArgumentError, "buffer is an array of JAX that was deleted or donated", group.all_reduce, gone, here)

    def test_a_program_that_jax_calls_again_to_find_a_nan(self):
        # On one rank alone: were its collective made again, it would meet the next one of the
        # others.
        program = jax.jit(lambda x, sign: jnp.log(dmj.all_reduce(x, FLAT) * sign))
        x = jnp.full(4, 2.0)
        with jax.debug_nans(True):
            if RANK == 0:
                with self.assertRaisesRegex(
                        FloatingPointError,
                        "all_reduce is not made a second time, because the other ranks do not make it again"):
                    program(x, -1.0)
            else:
                close(self, program(x, 1.0), jnp.log(WORLD * x), "the other ranks")
            close(self, program(x * 3, 1.0), jnp.log(WORLD * 3 * x), "the program after it")

    def test_operators_roots_and_axes(self):
        x = jnp.ones((2, 3))
        self.raises(ValueError, "op is 'mean'; it is one of sum, prod, max, min, avg", dmj.all_reduce, x, FLAT, op="mean")
        self.raises(ValueError, f"root is {WORLD}; dimension all has ranks 0 to {WORLD - 1}", dmj.broadcast, x, FLAT, root=WORLD)
        self.raises(ValueError, "root is -1", dmj.reduce, x, FLAT, root=-1)
        self.raises(ValueError, "axis is 3, but there are 3 axes", dmj.all_gather, x, FLAT, axis=3)
        self.raises(ValueError, "axis is 2, but there are 2 axes", dmj.all_gather, x, FLAT, axis=2, tiled=True)
        self.raises(ValueError, f"is not as long as the dimension, {WORLD} ranks; tiled=True", dmj.reduce_scatter, jnp.ones((3, 3)), FLAT)
        self.raises(ValueError, f"is not a multiple of the dimension's {WORLD} ranks", dmj.all_to_all, jnp.ones((3, 3)), FLAT, tiled=True)
        self.raises(ValueError, "scatter_dimension is 0, but there are 0 axes", dmj.reduce_scatter, jnp.float64(1), FLAT)

    def test_derivatives_that_do_not_exist(self):
        for op in ("max", "min", "prod"):
            for function in (lambda x: dmj.all_reduce(x, FLAT, op=op), lambda x: dmj.reduce(x, FLAT, op=op),
                             lambda x: dmj.reduce_scatter(x, FLAT, op=op)):
                self.raises(NotImplementedError, f"with op '{op}' cannot be differentiated, only 'sum' and 'avg' can",
                            jax.grad(lambda x: jnp.sum(function(x))), jnp.ones(WORLD))

    def test_meshes_of_processes_with_several_devices(self):
        self.raises(
            ValueError,
            "process 0 of jax.distributed has more than one device, and a rank of .* has one; start one process per device",
            dmj.mesh_to_jax, MESH)


if __name__ == "__main__":
    unittest.main()

"""Every collective against jax.lax: values, and under jit, vmap, jvp and grad, also of each other."""

import copy
import os
import unittest

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy
from jax import lax

from ranks import FLAT, MESH, RANK, SHAPE, WORLD, close, operand, own_mesh, stacked


def ring(offset, wrap):
    def theirs(x, size):
        source = lax.axis_index("i") - offset
        around = lax.ppermute(x, "i", [(i, (i + offset) % size) for i in range(size)])
        return around if wrap else jnp.where((source >= 0) & (source < size), around, 0)
    return theirs


def at_root(root, op):
    return lambda x, size: jnp.where(lax.axis_index("i") == root % size, op(x, "i"), 0)


# name: ours(x, mesh, dim, size), theirs(x, size), the operand's shape for a dimension of that size
CASES = {
    "all_reduce": (lambda x, m, d, n: dmj.all_reduce(x, m, d), lambda x, n: lax.psum(x, "i"), lambda n: (3, 5)),
    "all_reduce avg": (lambda x, m, d, n: dmj.all_reduce(x, m, d, "avg"), lambda x, n: lax.pmean(x, "i"), lambda n: (4,)),
    "all_reduce of a scalar": (lambda x, m, d, n: dmj.all_reduce(x, m, d), lambda x, n: lax.psum(x, "i"), lambda n: ()),
    "all_gather": (lambda x, m, d, n: dmj.all_gather(x, m, d), lambda x, n: lax.all_gather(x, "i"), lambda n: (3, 2)),
    "all_gather axis 1": (lambda x, m, d, n: dmj.all_gather(x, m, d, axis=1), lambda x, n: lax.all_gather(x, "i", axis=1), lambda n: (3, 2)),
    "all_gather last": (lambda x, m, d, n: dmj.all_gather(x, m, d, axis=-1), lambda x, n: lax.all_gather(x, "i", axis=2), lambda n: (3, 2)),
    "all_gather tiled": (lambda x, m, d, n: dmj.all_gather(x, m, d, axis=1, tiled=True), lambda x, n: lax.all_gather(x, "i", axis=1, tiled=True), lambda n: (3, 2)),
    "reduce_scatter": (lambda x, m, d, n: dmj.reduce_scatter(x, m, d, scatter_dimension=1),
                       lambda x, n: lax.psum_scatter(x, "i", scatter_dimension=1), lambda n: (3, n)),
    "reduce_scatter tiled": (lambda x, m, d, n: dmj.reduce_scatter(x, m, d, tiled=True), lambda x, n: lax.psum_scatter(x, "i", tiled=True), lambda n: (2 * n, 3)),
    "reduce_scatter avg": (lambda x, m, d, n: dmj.reduce_scatter(x, m, d, "avg"), lambda x, n: lax.psum_scatter(x, "i") / n, lambda n: (n, 3)),
    "all_to_all": (lambda x, m, d, n: dmj.all_to_all(x, m, d, split_axis=1, concat_axis=0),
                   lambda x, n: lax.all_to_all(x, "i", split_axis=1, concat_axis=0), lambda n: (3, n)),
    "all_to_all to the end": (lambda x, m, d, n: dmj.all_to_all(x, m, d, split_axis=0, concat_axis=1),
                              lambda x, n: lax.all_to_all(x, "i", split_axis=0, concat_axis=1), lambda n: (n, 3)),
    "all_to_all tiled": (lambda x, m, d, n: dmj.all_to_all(x, m, d, split_axis=1, concat_axis=0, tiled=True),
                         lambda x, n: lax.all_to_all(x, "i", split_axis=1, concat_axis=0, tiled=True), lambda n: (3, 2 * n)),
    "all_to_all tiled in place": (lambda x, m, d, n: dmj.all_to_all(x, m, d, tiled=True),
                                  lambda x, n: lax.all_to_all(x, "i", split_axis=0, concat_axis=0, tiled=True), lambda n: (2 * n, 3)),
    "shift": (lambda x, m, d, n: dmj.shift(x, m, d), ring(1, True), lambda n: (3,)),
    "shift back by 3": (lambda x, m, d, n: dmj.shift(x, m, d, -3), ring(-3, True), lambda n: (3,)),
    "shift by a turn": (lambda x, m, d, n: dmj.shift(x, m, d, n), ring(0, True), lambda n: (3,)),
    "pipeline": (lambda x, m, d, n: dmj.shift(x, m, d, 1, wrap=False), ring(1, False), lambda n: (3, 2)),
    "pipeline back": (lambda x, m, d, n: dmj.shift(x, m, d, -1, wrap=False), ring(-1, False), lambda n: (3, 2)),
    "pipeline past the end": (lambda x, m, d, n: dmj.shift(x, m, d, 100, wrap=False), ring(100, False), lambda n: (3,)),
    "broadcast": (lambda x, m, d, n: dmj.broadcast(x, m, d, 1 % n), lambda x, n: lax.all_gather(x, "i")[1 % n], lambda n: (2, 3)),
    "reduce": (lambda x, m, d, n: dmj.reduce(x, m, d, 1 % n), at_root(1, lax.psum), lambda n: (2, 3)),
    "gather": (lambda x, m, d, n: dmj.gather(x, m, d, 1 % n), at_root(1, lax.all_gather), lambda n: (2, 3)),
    "gather tiled": (lambda x, m, d, n: dmj.gather(x, m, d, axis=1, tiled=True),
                     at_root(0, lambda x, i: lax.all_gather(x, i, axis=1, tiled=True)), lambda n: (2, 3)),
    "scatter": (lambda x, m, d, n: dmj.scatter(x, m, d, 1 % n, axis=1),
                lambda x, n: jnp.moveaxis(lax.all_gather(x, "i")[1 % n], 1, 0)[lax.axis_index("i")], lambda n: (3, n)),
    "scatter tiled": (lambda x, m, d, n: dmj.scatter(x, m, d, tiled=True),
                      lambda x, n: lax.all_gather(x, "i")[0].reshape(n, 2, 3)[lax.axis_index("i")], lambda n: (2 * n, 3)),
    "scan": (lambda x, m, d, n: dmj.scan(x, m, d), lambda x, n: jnp.cumsum(lax.all_gather(x, "i"), 0)[lax.axis_index("i")], lambda n: (3, 2)),
    "scan prod": (lambda x, m, d, n: dmj.scan(x, m, d, "prod"), lambda x, n: jnp.cumprod(lax.all_gather(x, "i"), 0)[lax.axis_index("i")], lambda n: (3,)),
    "scan max": (lambda x, m, d, n: dmj.scan(x, m, d, "max"), lambda x, n: lax.cummax(lax.all_gather(x, "i"), 0)[lax.axis_index("i")], lambda n: (3,)),
    "scan min": (lambda x, m, d, n: dmj.scan(x, m, d, "min"), lambda x, n: lax.cummin(lax.all_gather(x, "i"), 0)[lax.axis_index("i")], lambda n: (3,)),
    "sendrecv": (lambda x, m, d, n: dmj.sendrecv(x, m, d, dest=(m.get_local_rank(d) + 1) % n, source=(m.get_local_rank(d) - 1) % n), ring(1, True), lambda n: (3, 2)),
    "reduce avg": (lambda x, m, d, n: dmj.reduce(x, m, d, 1 % n, "avg"), at_root(1, lax.pmean), lambda n: (2, 3)),
}


class Against(unittest.TestCase):
    """One test per case, added below."""

    def judge(self, name, dim):
        mesh = FLAT if dim == "all" else MESH
        size = mesh.size(dim)
        ours_of, theirs_of, shape_of = CASES[name]
        shape = shape_of(size)
        ours = lambda x: ours_of(x, mesh, dim, size)  # noqa: E731
        theirs = jax.vmap(lambda x: theirs_of(x, size), axis_name="i")
        xs, place = stacked(dim, shape)
        directions, _ = stacked(dim, shape, 1)
        weights, _ = stacked(dim, jax.eval_shape(theirs, xs).shape[1:], 2)

        def everything(function, x, direction, weight, first):
            """Values and derivatives of function, whose operands have first more axes, at the front, than ours."""
            loss = lambda x: jnp.sum(weight * jnp.sin(function(x**2)))  # noqa: E731
            yield "value", function(x)
            yield "jvp", jax.jvp(function, (x,), (direction,))[1]
            yield "grad", jax.grad(loss)(x)
            # Of the sum over ranks of <gradient, direction>.
            yield "grad of grad", jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), direction))(x)
            for axis in range(first, x.ndim + 1):
                batch = jnp.stack([x, x + 1, x * 3], axis)
                yield f"vmap over axis {axis - first}", jax.vmap(function, in_axes=axis, out_axes=first)(batch)
                if axis == first:
                    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(function, in_axes=axis)(x))))
                    yield f"grad over vmap over axis {axis - first}", gradient(batch)
                    yield f"vmap over grad over axis {axis - first}", jax.vmap(jax.grad(loss), in_axes=axis, out_axes=axis)(batch)

        x = xs[place]
        before = numpy.array(x)
        program = jax.jit(lambda *operands: dict(everything(ours, *operands, 0)))
        judge = jax.jit(lambda *operands: dict(everything(theirs, *operands, 1)))
        # The first rank of a group judges for all of it, which saves the others most of the
        # tracing.
        judged = {what: numpy.asarray(value) for what, value in judge(xs, directions, weights).items()} if place == 0 else None
        expected = mesh.get_group(dim).broadcast_object(judged)
        mine = x, directions[place], weights[place]
        for what, value in program(*mine).items():
            close(self, value, expected[what][place], f"{name} along {dim}: {what}")
        close(self, ours(x), expected["value"][place], f"{name} along {dim}, outside jit")
        numpy.testing.assert_array_equal(x, before, f"{name}: the operand is as before")
        calls = [
            jax.jit(function).lower(x).as_text().count("stablehlo.custom_call @devicemesh_")
            for function, x in ((ours, x), (jax.vmap(ours), jnp.stack([x, x])))
        ]
        self.assertEqual(calls[0], calls[1], f"{name}: one call for the whole batch")
        self.assertTrue(calls[0] == 1 or name.startswith("scan"), calls)


def judged(name, dim):
    return lambda self: self.judge(name, dim)


for each in CASES:
    for dim in ("inner", "outer", "all"):
        # All cases over all ranks; the dimensions have the same code and other groups.
        if dim == "all" or each in ("all_reduce", "all_gather tiled", "all_to_all", "pipeline"):
            setattr(Against, f"test {each} along {dim}", judged(each, dim))


class Values(unittest.TestCase):
    def test_element_types(self):
        names = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn")
        # One program with all types takes less time to compile than one for each.
        xs = {dtype: jnp.asarray(numpy.arange(5) + RANK, dtype) for dtype in names}
        totals, everything = jax.jit(lambda xs: ({dtype: dmj.all_reduce(x, FLAT) for dtype, x in xs.items()},
                                                 {dtype: dmj.all_gather(x, FLAT) for dtype, x in xs.items()}))(xs)
        for dtype, x in xs.items():
            total, gathered = numpy.asarray(totals[dtype]), numpy.asarray(everything[dtype])
            self.assertEqual((total.dtype, total.tolist()), (x.dtype, [i * WORLD + sum(range(WORLD)) for i in range(5)]), dtype)
            self.assertEqual((gathered.dtype, gathered[WORLD - 1].tolist()), (x.dtype, [i + WORLD - 1 for i in range(5)]), dtype)

    def test_operators_without_derivative(self):
        x = jnp.arange(4.0) + RANK + 1
        close(self, dmj.all_reduce(x, FLAT, op=devicemesh.ReduceOp.MAX), jnp.arange(4.0) + WORLD, "by ReduceOp")
        for op, expected in (("max", jnp.arange(4.0) + WORLD), ("min", jnp.arange(4.0) + 1),
                             ("prod", jnp.prod(jnp.stack([jnp.arange(4.0) + rank + 1 for rank in range(WORLD)]), 0))):
            close(self, dmj.all_reduce(x, FLAT, op=op), expected, op)
            # Where nothing flows through it, a derivative may stand around it.
            gradient = jax.grad(lambda x: jnp.sum(x / dmj.all_reduce(lax.stop_gradient(x), FLAT, op=op)))(x)
            close(self, gradient, 1 / expected, f"around {op}")

    def test_elements_that_travel_as_others(self):
        whole = {
            "bool": numpy.array([[rank == 1, True, rank != 2] for rank in range(WORLD)]),
            "int16": numpy.array([[20_000, -rank, 7 + rank] for rank in range(WORLD)], "int16"),
            "uint16": numpy.array([[60_000, rank, 7 + rank] for rank in range(WORLD)], "uint16"),
            "complex64": numpy.array([[1 + 1j * rank, rank, 2j] for rank in range(WORLD)], "complex64"),
            "complex128": numpy.array([[1 - 1j * rank, rank, 2j] for rank in range(WORLD)], "complex128"),
        }
        truths = {"max": numpy.any, "min": numpy.all}
        integers = {"sum": numpy.sum, "prod": numpy.prod, "avg": lambda x, axis, dtype: numpy.trunc(numpy.mean(x, axis=axis)).astype(dtype)}
        integers.update(max=lambda x, axis, dtype: numpy.max(x, axis=axis), min=lambda x, axis, dtype: numpy.min(x, axis=axis))
        complexes = {"sum": numpy.sum, "prod": numpy.prod, "avg": lambda x, axis, dtype: numpy.mean(x, axis=axis).astype(dtype)}
        for dtype, rows in whole.items():
            x = jnp.asarray(rows[RANK])
            operators = truths if dtype == "bool" else complexes if "complex" in dtype else integers
            kept = {} if dtype == "bool" else {"dtype": rows.dtype}

            @jax.jit
            def everything(x):
                reduced = {op: dmj.all_reduce(x, FLAT, op=op) for op in operators}
                roots = {op: dmj.reduce(x, FLAT, root=1 % WORLD, op=op) for op in operators}
                parts = {op: dmj.reduce_scatter(jnp.stack([x] * WORLD), FLAT, op=op) for op in operators}
                scans = {op: dmj.scan(x, FLAT, op=op) for op in operators if op != "avg"}
                moved = [
                    dmj.all_gather(x, FLAT),
                    dmj.all_to_all(jnp.stack([x] * WORLD), FLAT),
                    dmj.broadcast(x, FLAT, root=WORLD - 1)[None],
                    dmj.shift(x, FLAT)[None],
                    dmj.gather(x, FLAT),
                    dmj.scatter(jnp.stack([x] * WORLD), FLAT, root=WORLD - 1)[None],
                    dmj.sendrecv(x, FLAT, dest=(RANK + 1) % WORLD, source=(RANK - 1) % WORLD)[None]
                ]
                return reduced, roots, parts, scans, moved

            reduced, roots, parts, scans, moved = everything(x)
            for op, function in operators.items():
                expected = function(rows, axis=0, **kept)
                for what, got, right in (("all_reduce", reduced, expected),
                                         ("reduce", roots, expected * (RANK == 1 % WORLD)), ("reduce_scatter", parts,
                                                                                             expected)):
                    self.assertEqual(got[op].dtype, x.dtype, f"{what} {op} of {dtype}")
                    close(self, got[op], right, f"{what} {op} of {dtype}")
                if op != "avg":
                    close(self, scans[op], function(rows[: RANK + 1], axis=0, **kept), f"scan {op} of {dtype}")
            expected = [rows, rows, rows[-1:], rows[RANK - 1][None], rows * (RANK == 0), rows[-1:], rows[RANK - 1][None]]
            for index, (got, right) in enumerate(zip(moved, expected)):
                self.assertEqual(got.dtype, x.dtype)
                numpy.testing.assert_array_equal(got, right, err_msg=f"movement {index} of {dtype}")
        byte = dmj.all_gather(jnp.asarray(RANK, "float8_e4m3fn"), FLAT)
        self.assertEqual((str(byte.dtype), byte.astype("int32").tolist()), ("float8_e4m3fn", list(range(WORLD))))

    def test_derivatives_of_complex_numbers(self):
        z, weight = RANK + 1j, RANK + 2j
        gradient = jax.grad(lambda z: jnp.abs(weight * dmj.all_reduce(z, FLAT)) ** 2)(jnp.complex128(z))
        total = sum(rank + 1j for rank in range(WORLD))
        # That of the sum of all ranks' losses, which JAX conjugates.
        close(self, gradient, numpy.asarray(2 * total.conjugate() * sum(abs(rank + 2j) ** 2 for rank in range(WORLD))), "gradient")

    def test_random_keys(self):
        keys = jax.random.split(jax.random.key(7), WORLD)
        mine = keys[RANK]
        moved = jax.jit(lambda key: (dmj.all_gather(key, FLAT), dmj.broadcast(key, FLAT, root=WORLD - 1),
                                     dmj.shift(key, FLAT), dmj.scatter(keys, FLAT),
                                     dmj.all_to_all(jnp.stack([key] * WORLD), FLAT),
                                     dmj.sendrecv(key, FLAT, dest=(RANK + 1) % WORLD, source=(RANK - 1) % WORLD)))(mine)
        for got, right in zip(moved, (keys, keys[WORLD - 1], keys[RANK - 1], mine, keys, keys[RANK - 1])):
            self.assertEqual(got.dtype, right.dtype)
            self.assertEqual(jax.random.key_data(got).tolist(), jax.random.key_data(right).tolist())

    def test_messages_between_two_ranks(self):
        x = jnp.arange(3.0) + 10 * RANK

        @jax.jit
        def star(x):
            # The first rank sends to each other one, and each of them answers in another shape and
            # type.
            if RANK:
                got = dmj.recv(jax.ShapeDtypeStruct((3,), "float64"), FLAT, source=0)
                dmj.send({"sum": jnp.sum(got, dtype="int32") + RANK}, FLAT, dest=0)
                return got
            for rank in range(1, WORLD):
                dmj.send(x + rank, FLAT, dest=rank)
            return [dmj.recv({"sum": jnp.zeros((), "int32")}, FLAT, source=rank)["sum"] for rank in range(1, WORLD)]

        expected = numpy.arange(3.0) + RANK if RANK else [3 + 4 * rank for rank in range(1, WORLD)]
        numpy.testing.assert_array_equal(star(x), expected)
        # A whole batch is one message, whose batch axis may stand elsewhere on each rank.
        pair = numpy.arange(6.0).reshape(2, 3)
        if RANK == 0:
            jax.vmap(lambda row: dmj.send(row, FLAT, dest=1 % WORLD), in_axes=1)(jnp.asarray(pair.T))
        if RANK == 1:
            numpy.testing.assert_array_equal(jax.vmap(lambda row: dmj.recv(row, FLAT, source=0))(jnp.zeros((2, 3))), pair)
        # A message has no derivative by the array that gives its shape.
        if RANK == 0:
            dmj.send(jnp.arange(3.0), FLAT, dest=1 % WORLD)
        if RANK == 1:
            close(self, jax.grad(lambda x: jnp.sum(dmj.recv(x, FLAT, source=0) * x))(x), jnp.arange(3.0), "the shape of a message")
        # At the ends of a line nobody is sent to, and nothing is received; the derivative goes
        # back along the line.
        line = jax.jit(
            jax.value_and_grad(lambda x: jnp.sum((RANK + 1) * dmj.sendrecv(
                x**2, FLAT, dest=RANK + 1 if RANK + 1 < WORLD else None, source=RANK - 1 if RANK else None))))
        value, gradient = line(x)
        close(self, value,
              numpy.asarray((RANK + 1) * float(numpy.sum((numpy.arange(3.0) + 10 * (RANK - 1))**2)) * (RANK > 0)),
              "along a line")
        close(self, gradient, 2 * x * (RANK + 2) * (RANK + 1 < WORLD), "back along a line")

    def test_both_conventions_of_derivatives(self):
        x = jnp.arange(3.0) + RANK
        for op, share in (("sum", 1), ("avg", WORLD)):
            loss = lambda x, **how: jnp.sum(jnp.sin(dmj.all_reduce(x**2, FLAT, op=op, **how)))  # noqa: E731
            total = sum((numpy.arange(3.0) + rank) ** 2 for rank in range(WORLD)) / share
            for how, factor in (({}, WORLD), ({"transpose": "all_reduce"}, WORLD), ({"transpose": "identity"}, 1)):
                close(self, jax.jit(jax.grad(lambda x: loss(x, **how)))(x), factor * numpy.cos(total) * 2 * x / share, f"{op} {how}")
        total = lambda x: dmj.all_reduce(x, FLAT, transpose="identity")  # noqa: E731
        once = lambda y: jax.linear_transpose(total, x)(y)[0]  # noqa: E731
        close(self, once(x), x, "transposed once")
        close(self, jax.jit(lambda y: jax.linear_transpose(once, x)(y)[0])(x), total(x), "transposed twice")
        close(self, jax.vmap(once)(jnp.stack([x, 2 * x])), jnp.stack([x, 2 * x]), "a batch")

    def test_barrier(self):
        self.assertIsNone(dmj.barrier(FLAT))
        text = jax.jit(lambda x: (dmj.barrier(MESH, "inner"), x * 2)[1]).lower(jnp.ones(3)).as_text()
        self.assertEqual(text.count("@devicemesh_all_reduce"), 1, "it stays, though nothing uses its result")

    def test_trees_in_the_order_of_their_leaves(self):
        tree = {"weights": [jnp.full((2, 2), RANK + 1.0), jnp.ones(3, "int32")], "loss": jnp.float32(RANK), "none": None}
        total = jax.jit(lambda tree: dmj.all_reduce(tree, FLAT))(tree)
        self.assertEqual(jax.tree.structure(total), jax.tree.structure(tree))
        self.assertEqual(float(total["weights"][0][0, 0]), WORLD * (WORLD + 1) / 2)
        self.assertEqual((total["weights"][1].dtype, int(total["weights"][1][2])), (jnp.int32, WORLD))

    def test_nothing_to_send(self):
        self.assertEqual(dmj.all_reduce(jnp.zeros((0, 3)), FLAT).shape, (0, 3))
        self.assertEqual(dmj.all_gather(jnp.zeros((2, 0)), FLAT).shape, (WORLD, 2, 0))

    def test_dimension_of_one_rank(self):
        mesh = devicemesh.init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("many", "one"))
        x = operand(RANK, (1, 3))
        for what, same in (("all_reduce", x), ("broadcast", x), ("reduce", x), ("shift", x), ("all_to_all", x),
                           ("all_gather", x[None]), ("reduce_scatter", x[0])):
            close(self, jax.jit(lambda x: getattr(dmj, what)(x, mesh, "one"))(x), same, what)

    def test_memory_of_an_operand_that_was_given_away(self):
        x = jnp.full(1 << 16, RANK + 1.0)
        address = x.unsafe_buffer_pointer()
        total = jax.jit(lambda x: dmj.all_reduce(x, FLAT), donate_argnums=0)(x)
        self.assertEqual(float(total[-1]), WORLD * (WORLD + 1) / 2)
        self.assertTrue(x.is_deleted())
        self.assertEqual(total.unsafe_buffer_pointer(), address, "reduced in place")

    def test_names_and_indices_of_dimensions_and_meshes(self):
        x = jnp.float64(1)
        MESH.register("by name")
        for mesh, dim, size in ((MESH, "inner", SHAPE[1]), (MESH, 0, SHAPE[0]), (MESH, -1, SHAPE[1]),
                                ("by name", "outer", SHAPE[0]), (MESH["inner"], None, SHAPE[1])):
            self.assertEqual(float(dmj.all_reduce(x, mesh, dim)), size, (mesh, dim))

    def test_a_name_means_the_mesh_that_has_it_now(self):
        MESH.register("changing")
        total = jax.jit(lambda x: dmj.all_reduce(x, "changing", "inner"))
        self.assertEqual(float(total(jnp.float64(RANK))), sum(MESH.group_ranks("inner")))
        turned = devicemesh.init_device_mesh("cpu", SHAPE, mesh_dim_names=("outer", "inner"), ranks=list(reversed(range(WORLD))))
        turned.register("changing")
        self.assertEqual(float(total(jnp.float64(RANK))), sum(turned.group_ranks("inner")))

    def test_equal_meshes_of_which_one_has_ended(self):
        x, total = jnp.float64(RANK), lambda x, mesh: dmj.all_reduce(x, mesh, "dp")
        first, second = own_mesh(), own_mesh()
        programs = [jax.jit(lambda x, mesh=mesh: total(x, mesh)) for mesh in (first, second)]
        chosen = jax.jit(total, static_argnums=1)
        expected = [sum(range(WORLD))] * 3
        self.assertEqual([float(program(x)) for program in (*programs, lambda x: chosen(x, first))], expected)
        second.finalize()
        self.assertEqual(float(programs[0](x)), expected[0], "the first one lives")
        ended = copy.copy(second)
        self.assertEqual(float(programs[0](x)), expected[0], "a copy of the second one has ended, too")
        ended.close()
        first.finalize()
        # JAX compares meshes by their contents, so this is the function that was traced with the
        # first one.
        third = own_mesh()
        self.assertEqual(float(chosen(x, third)), expected[0], "in place of the first one")

    def test_without_jit(self):
        x = jnp.arange(3.0) + RANK
        summed = jnp.arange(3.0) * WORLD + sum(range(WORLD))
        with jax.disable_jit():
            close(self, jax.jit(lambda x: dmj.all_reduce(x, FLAT))(x), summed, "disable_jit")
            close(self,
                  jax.grad(lambda x: jnp.sum(jax.vmap(lambda y: dmj.all_reduce(dmj.scan(y, FLAT), FLAT))(x)))(x),
                  jnp.full(3, WORLD * (WORLD - RANK)), "derivatives")
            carried, moved = lax.scan(
                lambda carry, y: (dmj.all_reduce(carry + y, FLAT, op="avg"), dmj.sendrecv(y, FLAT, dest=RANK, source=RANK)),
                0.0, jnp.arange(3.0))
            self.assertEqual((float(carried), moved.tolist()), (3, [0, 1, 2]))

    def test_all_ranks_compile_the_same_program(self):
        def program(x):
            return dmj.shift(dmj.reduce(dmj.all_reduce(x, MESH, "inner"), MESH, "outer"), FLAT, wrap=False)
        text = jax.jit(jax.value_and_grad(lambda x: jnp.sum(program(x)))).lower(jnp.ones(3)).as_text()
        digest = digest_of(text)
        self.assertEqual(int(dmj.all_reduce(digest, FLAT, op="max")), int(digest))
        self.assertEqual(int(dmj.all_reduce(digest, FLAT, op="min")), int(digest))

    def test_programs_for_cuda(self):
        traced = jax.jit(lambda x: dmj.shift(dmj.all_reduce(x, FLAT), FLAT, wrap=False)).trace(jnp.ones(3))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        self.assertEqual((text.count("@devicemesh_"), text.count('platform = "cuda"')), (2, 2), text)

    def test_replica_groups(self):
        rows = numpy.arange(WORLD).reshape(SHAPE)
        self.assertEqual(dmj.replica_groups(MESH, "inner"), rows.tolist())
        self.assertEqual(dmj.replica_groups(MESH, "outer"), rows.T.tolist())


class AcrossHosts(unittest.TestCase):
    def test_ranks_that_share_no_memory(self):
        """Each process is a host of its own, so all that the ranks exchange goes over the wire."""
        os.environ["DM_HOSTCCL_SHM"] = "0"
        self.addCleanup(os.environ.pop, "DM_HOSTCCL_SHM")
        world = devicemesh.World("cpu", timeout=120)
        mesh = devicemesh.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",), world=world)
        self.assertEqual(world.num_hosts, WORLD)

        def everything(x):
            weighted = lambda x: jnp.vdot(dmj.all_reduce(x, mesh) ** 2, x)  # noqa: E731
            return dmj.all_reduce(x, mesh), dmj.all_gather(x, mesh), dmj.shift(x, mesh), jax.grad(weighted)(x)

        for length in (3, 100_000):  # the meeting of the ranks has room for the short array alone
            xs = jnp.stack([jnp.arange(length) % 7 + rank for rank in range(WORLD)]).astype("float64")
            total = xs.sum(0)
            program = jax.jit(everything)
            # The gradient is that of the sum of all ranks' losses.
            expected = total, xs, xs[RANK - 1], 3 * total**2
            for ours, theirs, what in zip(program(xs[RANK]), expected, ("all_reduce", "all_gather", "shift", "grad")):
                close(self, ours, theirs, f"{what} of {length}")
            in_place = numpy.array(xs[RANK])
            mesh.get_group().all_reduce(in_place)
            numpy.testing.assert_array_equal(in_place, total)
        mesh.finalize()
        world.finalize()


def digest_of(text):
    import hashlib
    return jnp.asarray(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"), "int64")


if __name__ == "__main__":
    unittest.main()

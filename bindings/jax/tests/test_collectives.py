"""Every collective against jax.lax: values, and under jit, vmap, jvp and grad, also of each other."""

import unittest

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy
from jax import lax

from ranks import FLAT, MESH, RANK, SHAPE, WORLD, close, compiled, operand, own_mesh, stacked


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
        expected = compiled(judge, xs, directions, weights)(xs, directions, weights)
        mine = x, directions[place], weights[place]
        for what, value in compiled(program, *mine)(*mine).items():
            close(self, value, expected[what][place], f"{name} along {dim}: {what}")
        close(self, ours(x), expected["value"][place], f"{name} along {dim}, outside jit")
        numpy.testing.assert_array_equal(x, before, f"{name}: the operand is as before")
        calls = jax.jit(jax.vmap(ours)).lower(jnp.stack([x, x])).as_text().count("stablehlo.custom_call @devicemesh_")
        self.assertEqual(calls, 1, f"{name}: one call for the whole batch")


def judged(name, dim):
    return lambda self: self.judge(name, dim)


for each in CASES:
    for dim in ("inner", "outer", "all"):
        # All cases over all ranks; the dimensions have the same code and other groups.
        if dim == "all" or each in ("all_reduce", "all_gather tiled", "all_to_all", "pipeline"):
            setattr(Against, f"test {each} along {dim}", judged(each, dim))


class Values(unittest.TestCase):
    def test_element_types(self):
        for dtype in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn"):
            x = jnp.arange(5).astype(dtype) + jnp.asarray(RANK, dtype)
            total = jax.jit(lambda x: dmj.all_reduce(x, FLAT))(x)
            self.assertEqual((total.dtype, total.tolist()), (x.dtype, [i * WORLD + sum(range(WORLD)) for i in range(5)]), dtype)
            everything = dmj.all_gather(x, FLAT)
            self.assertEqual((everything.dtype, everything[WORLD - 1].tolist()), (x.dtype, [i + WORLD - 1 for i in range(5)]), dtype)

    def test_operators_without_derivative(self):
        x = jnp.arange(4.0) + RANK + 1
        close(self, dmj.all_reduce(x, FLAT, op=devicemesh.ReduceOp.MAX), jnp.arange(4.0) + WORLD, "by ReduceOp")
        for op, expected in (("max", jnp.arange(4.0) + WORLD), ("min", jnp.arange(4.0) + 1),
                             ("prod", jnp.prod(jnp.stack([jnp.arange(4.0) + rank + 1 for rank in range(WORLD)]), 0))):
            close(self, dmj.all_reduce(x, FLAT, op=op), expected, op)
            # Where nothing flows through it, a derivative may stand around it.
            gradient = jax.grad(lambda x: jnp.sum(x / dmj.all_reduce(lax.stop_gradient(x), FLAT, op=op)))(x)
            close(self, gradient, 1 / expected, f"around {op}")

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
        for what, same in (("all_reduce", x), ("broadcast", x), ("reduce", x), ("shift", x), ("all_to_all", x), ("all_gather", x[None]), ("reduce_scatter", x[0])):
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
        for mesh, dim, size in ((MESH, "inner", SHAPE[1]), (MESH, 0, SHAPE[0]), (MESH, -1, SHAPE[1]), ("by name", "outer", SHAPE[0]), (MESH["inner"], None, SHAPE[1])):
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
        first.finalize()
        # JAX compares meshes by their contents, so this is the function that was traced with the first one.
        third = own_mesh()
        self.assertEqual(float(chosen(x, third)), expected[0], "in place of the first one")

    def test_without_jit(self):
        x = jnp.arange(3.0) + RANK
        with jax.disable_jit():
            close(self, jax.jit(lambda x: dmj.all_reduce(x, FLAT))(x), jnp.arange(3.0) * WORLD + sum(range(WORLD)), "disable_jit")

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


def digest_of(text):
    import hashlib
    return jnp.asarray(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"), "int64")


if __name__ == "__main__":
    unittest.main()

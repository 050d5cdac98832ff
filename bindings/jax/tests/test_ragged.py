"""Blocks of another length on each rank, against numpy over all ranks' data, and their derivatives."""

import unittest

import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy
from ranks import FLAT, MESH, RANK, WORLD, close, group, operand


def matrix(size, salt=0):
    """How many rows rank i sends to rank k, with zeros among them."""
    return numpy.random.default_rng([size, salt]).integers(0, 4, (size, size))


def routed(counts, rows):
    """What each rank gets when rank i sends counts[i][k] of its rows to rank k, one rank's after the other's."""
    starts = numpy.cumsum(counts, axis=1) - counts
    return [
        numpy.concatenate([rows[i][starts[i][k] : starts[i][k] + counts[i][k]] for i in range(len(counts))])
        for k in range(len(counts))]


class Ragged(unittest.TestCase):
    def test_gathers_and_scatters_of_unequal_parts(self):
        for mesh, dim in ((MESH, "outer"), (FLAT, "all")):
            ranks = group(dim)
            me, counts = ranks.index(RANK), [(3 * index + 2) % 5 for index in range(len(ranks))]
            parts = [operand(rank, (counts[index], 2)) for index, rank in enumerate(ranks)]
            whole = jnp.concatenate(parts)
            gather = lambda x: dmj.all_gatherv(x, mesh, dim, counts=counts)  # noqa: E731
            scatter = lambda x, op="sum": dmj.reduce_scatterv(x, mesh, dim, op, counts=counts)  # noqa: E731
            close(self, jax.jit(gather)(parts[me]), whole, f"gather along {dim}")
            wholes = [operand(rank, (sum(counts), 2), 1) for rank in ranks]
            begin = sum(counts[:me])
            mine = slice(begin, begin + counts[me])
            for op, function in (("sum", sum), ("max", lambda each: jnp.max(jnp.stack(each), 0)),
                                 ("avg", lambda each: sum(each) / len(each))):
                close(self, jax.jit(scatter, static_argnums=1)(wholes[me], op), function(wholes)[mine], f"scatter {op} along {dim}")
        # The derivative of the sum of all ranks' losses.
        weights = [operand(rank, (sum(counts), 2), 2) for rank in ranks]
        loss = lambda x: jnp.sum(weights[me] * gather(x))  # noqa: E731
        close(self, jax.grad(loss)(parts[me]), sum(weights)[mine], "gradient of gather")
        shares = [operand(rank, (counts[index], 2), 3) for index, rank in enumerate(ranks)]
        loss = lambda x: jnp.sum(shares[me] * scatter(x, "avg"))  # noqa: E731
        close(self, jax.grad(loss)(wholes[me]), jnp.concatenate(shares) / len(ranks), "gradient of scatter")
        batch = jnp.stack([parts[me], 2 * parts[me]], axis=2)
        close(self, jax.vmap(gather, in_axes=2, out_axes=2)(batch), jnp.stack([whole, 2 * whole], axis=2), "vmap of gather")

    def test_exchanges(self):
        counts = matrix(WORLD)
        rows = [numpy.asarray(operand(rank, (counts[rank].sum(), 3))) for rank in range(WORLD)]
        expected = routed(counts, rows)[RANK]
        exchange = lambda x: dmj.all_to_allv(x, FLAT, send_counts=counts[RANK], recv_counts=counts[:, RANK])  # noqa: E731
        x = jnp.asarray(rows[RANK])
        close(self, jax.jit(exchange)(x), expected, "exchange")
        weights = [numpy.asarray(operand(rank, (counts[:, rank].sum(), 3), 4)) for rank in range(WORLD)]
        back = routed(counts.T, weights)[RANK]
        close(self, jax.jit(jax.grad(lambda x: jnp.sum(weights[RANK] * exchange(x))))(x), back, "gradient")
        close(self, jax.vmap(exchange)(jnp.stack([x, -x])), jnp.stack([expected, -expected]), "vmap")
        for dtype in ("bfloat16", "int16", "bool", "complex64"):
            got = exchange(x.astype(dtype))
            self.assertEqual((got.dtype, got.tolist()), (dtype, jnp.asarray(expected).astype(dtype).tolist()), dtype)

    def test_exchanges_whose_sizes_are_known_when_they_run(self):
        # As jax.lax.ragged_all_to_all says: each rank leaves a gap of one row before each block,
        # and keeps what nobody writes.
        counts = matrix(WORLD, 1)
        room = int(counts.sum(axis=0).max()) + WORLD
        places = numpy.cumsum(counts.T, axis=1) - counts.T + numpy.arange(1, WORLD + 1)  # of rank k: where rank i's rows begin

        @jax.jit
        def exchange(x, output, sent, received, theirs):
            return dmj.ragged_all_to_all(x, output, jnp.cumsum(sent) - sent, sent, theirs, received, FLAT)

        for turn, dtype in enumerate(("int32", "int64", "uint8")):
            rows = [numpy.asarray(operand(rank, (3 * WORLD, 2), turn)) for rank in range(WORLD)]
            outputs = [numpy.asarray(operand(rank, (room, 2), turn + 5)) for rank in range(WORLD)]
            starts = numpy.cumsum(counts, axis=1) - counts
            expected, written = outputs[RANK].copy(), numpy.zeros(room, bool)
            for i in range(WORLD):
                begin = places[RANK][i]
                expected[begin : begin + counts[i][RANK]] = rows[i][starts[i][RANK] : starts[i][RANK] + counts[i][RANK]]
                written[begin : begin + counts[i][RANK]] = True
            numbers = [jnp.asarray(each, dtype) for each in (counts[RANK], counts[:, RANK], places[:, RANK])]
            x, output = jnp.asarray(rows[RANK]), jnp.asarray(outputs[RANK])
            close(self, exchange(x, output, *numbers), expected, f"sizes as {dtype}")
            numpy.testing.assert_array_equal(output, outputs[RANK], err_msg="the given output is as before")
        weight = operand(RANK, (room, 2), 9)
        to_x, to_output = jax.grad(lambda x, output: jnp.sum(weight * exchange(x, output, *numbers)), argnums=(0, 1))(x, output)
        close(self, to_output, jnp.where(written[:, None], 0, weight), "gradient by the output")
        sent = numpy.zeros((3 * WORLD, 2))
        for k in range(WORLD):
            theirs = numpy.asarray(operand(k, (room, 2), 9))[places[k][RANK] : places[k][RANK] + counts[RANK][k]]
            sent[starts[RANK][k] : starts[RANK][k] + counts[RANK][k]] = theirs
        close(self, to_x, sent, "gradient by the operand")

    def test_wrong_arguments(self):
        x, ones = jnp.ones((WORLD, 2)), [1] * WORLD
        zeros = jnp.zeros(WORLD, "int32")

        def refused(kind, text, function, *arguments, **options):
            with self.assertRaisesRegex(kind, text):
                jax.block_until_ready(function(*arguments, **options))

        refused(
            ValueError,
            f"counts is .*; one number of rows, not negative, was expected for each of the dimension's {WORLD} ranks",
            dmj.all_gatherv, x, FLAT, counts=[1])
        refused(ValueError, f"x has {WORLD} rows, but counts has .* for this rank, {RANK} along all", dmj.all_gatherv,
                x, FLAT, counts=[WORLD + 1] * WORLD)
        refused(ValueError, "rows, but counts has", dmj.reduce_scatterv, x, FLAT, counts=[2] * WORLD)
        refused(ValueError, "rows, but send_counts has", dmj.all_to_allv, x, FLAT, send_counts=[2] * WORLD, recv_counts=ones)
        refused(TypeError, r"counts\[0\] is a float", dmj.all_gatherv, x, FLAT, counts=[1.0] * WORLD)
        refused(ValueError, "a scalar, which has no first axis", dmj.all_gatherv, jnp.float32(1), FLAT, counts=ones)
        refused(ValueError, "input_offsets is .*; integers in the shape", dmj.ragged_all_to_all, x, x, jnp.zeros(WORLD),
                zeros, zeros, zeros, FLAT)
        refused(ValueError, "operand has rows of", dmj.ragged_all_to_all, x, x.astype("int32"), zeros, zeros, zeros, zeros, FLAT)
        refused(NotImplementedError, "cannot be differentiated",
                jax.grad(lambda x: jnp.sum(dmj.reduce_scatterv(x, FLAT, op="max", counts=ones))), x)
        # A block that is not in its array is found when the program runs, on every rank alike.
        refused(jax.errors.JaxRuntimeError, f"the block of rank 0 has 1 rows from row {WORLD} on, but the operand has {WORLD} rows",
                dmj.ragged_all_to_all, x, x, zeros + WORLD, zeros + 1, zeros, zeros + 1, FLAT)
        dmj.recover()
        close(self, dmj.all_gatherv(x[:1], FLAT, counts=ones), jnp.ones((WORLD, 2)), "afterwards")


if __name__ == "__main__":
    unittest.main()

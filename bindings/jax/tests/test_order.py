"""The ranks issue their collectives in the order of the program, whatever XLA runs at the same time.

XLA's CPU runtime starts what is ready, on several threads; eight independent calls on large arrays
start in orders that differ between ranks unless a token goes from each to the next. Without one
(has_side_effect alone) 15 of 20 such runs on 4 ranks of a machine with 2 cores had sums of
different arrays.
"""

import os
import re
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy
from jax import lax
from ranks import FLAT, MESH, RANK, WORLD, own_mesh

# Three of four runs notice a wrong order (see above), so five runs together miss it once in a
# thousand times.
RUNS = 10 if WORLD <= 4 else 6
ROUNDS = int(os.environ.get("DM_JAX_ROUNDS", 20))
LENGTH = 1_000_000
OPERANDS = [jnp.full(100, index, "float32") for index in range(8)]


def large(index, x):
    """Made of several large pieces, on several threads; then index + 1 everywhere."""
    return jnp.concatenate([x * 0 + index + 1, jnp.full(LENGTH, index + 1, "float32") + x[0] * 0])


def wrong(results, factor):
    return [
        index for index, result in enumerate(results)
        if float(jnp.min(result)) != (index + 1) * factor or float(jnp.max(result)) != (index + 1) * factor
    ]


class Order(unittest.TestCase):
    def test_independent_calls(self):
        step = jax.jit(lambda xs: [dmj.all_reduce(large(index, x), FLAT) for index, x in enumerate(xs)])
        for run in range(RUNS):
            self.assertEqual(wrong(step(OPERANDS), WORLD), [], f"run {run}: sums of different arrays")

    def test_independent_calls_on_dimensions_that_share_ranks(self):
        dims = ("inner", "outer")
        step = jax.jit(lambda xs: [
            dmj.all_reduce(large(index, x), MESH, dims[index % 2]) / MESH.size(dims[index % 2])
            for index, x in enumerate(xs)
        ])
        for run in range(RUNS // 2):
            self.assertEqual(wrong(step(OPERANDS), 1), [], f"run {run}: sums of different arrays")

    def test_the_backward_pass_after_the_forward_pass(self):
        # The cotangents depend on no result of the forward pass, nor on each other.
        def loss(xs):
            return sum(jnp.sum((index + 1) * dmj.all_reduce(jnp.sin(x), FLAT)) for index, x in enumerate(xs))
        step = jax.jit(jax.value_and_grad(loss))
        zeros = [jnp.zeros(LENGTH, "float32")] * 8
        for run in range(RUNS // 2):
            _, gradients = step(zeros)
            self.assertEqual(wrong(gradients, WORLD), [], f"run {run}: cotangents of different arrays")

    def test_programs_that_follow_each_other_without_waiting(self):
        first = jax.jit(lambda x: dmj.all_reduce(large(0, jnp.sin(x)), FLAT))
        second = jax.jit(lambda x: dmj.all_reduce(large(1, x), FLAT))
        results = [(first(OPERANDS[0]), second(OPERANDS[1])) for _ in range(RUNS)]
        for run, pair in enumerate(results):
            self.assertEqual(wrong(pair, WORLD), [], f"run {run}: sums of different programs")

    def test_host_calls_after_what_jax_was_given(self):
        # Both reduce LENGTH elements of one type on one communicator, so nothing but their order
        # tells them apart.
        step = jax.jit(lambda x: dmj.all_reduce(dmj.all_reduce(x, FLAT) / WORLD, FLAT))
        ones, host = jnp.ones(LENGTH, "float32"), numpy.full(LENGTH, 100, "float32")
        summed = numpy.empty_like(host)
        for run in range(RUNS // 2):
            jitted = step(ones)
            FLAT.get_group().all_reduce(host, summed)
            self.assertEqual((set(numpy.unique(jitted)), set(numpy.unique(summed))), ({WORLD}, {100 * WORLD}),
                             f"run {run}: a host call met a jitted one")

    def test_host_calls_beside_a_running_program(self):
        # At any moment of the program, which ranks reach at different times; tests/test_jax.py has
        # more rounds, under load.
        step = jax.jit(lambda x: dmj.all_reduce(dmj.all_reduce(x, FLAT) / WORLD, FLAT))
        jitter, group = numpy.random.default_rng(RANK), FLAT.get_group()
        for turn in range(ROUNDS):
            length = (8, 100_000)[turn % 2]
            jitted = step(jnp.full(length, turn + 1, "float32"))
            time.sleep(jitter.uniform(0, 0.003) * (turn % 3))
            host = numpy.full(length, -turn, "float32")
            group.all_reduce(host)
            behind = step(jnp.full(length, turn + 2, "float32"))
            sums = [set(numpy.unique(array)) for array in (jitted, host, behind)]
            self.assertEqual(sums, [{(turn + 1) * WORLD}, {-turn * WORLD}, {(turn + 2) * WORLD}], f"round {turn}: sums of different arrays")

    def rounds(self, round_of):
        """Makes ROUNDS rounds. round_of(turn, length, pause) gives the pairs of an array and the
        value of its elements. Equal sizes and one communicator leave nothing but the order to tell
        the collectives of a round apart; pause() lets the ranks reach them at different times."""
        jitter = numpy.random.default_rng(RANK)
        for turn in range(ROUNDS):
            pairs = round_of(turn, (8, 100_000)[turn % 2], lambda: time.sleep(jitter.uniform(0, 0.003) * (turn % 3)))
            sums = [(set(numpy.unique(array)), {value * WORLD}) for array, value in pairs]
            self.assertEqual([got for got, _ in sums], [right for _, right in sums], f"round {turn}: sums of different arrays")

    def test_host_calls_of_another_thread_beside_a_running_program(self):
        step, group = jax.jit(lambda x: dmj.all_reduce(dmj.all_reduce(x, FLAT) / WORLD, FLAT)), FLAT.get_group()

        def one(turn, length, pause):
            jitted = step(jnp.full(length, turn + 1, "float32"))
            pause()
            host = numpy.full(length, -turn, "float32")
            other.submit(group.all_reduce, host).result()
            behind = other.submit(step, jnp.full(length, turn + 2, "float32")).result()
            pause()
            last = numpy.full(length, turn + 3, "float32")
            group.all_reduce(last)
            return (jitted, turn + 1), (host, -turn), (behind, turn + 2), (last, turn + 3)

        with ThreadPoolExecutor(1) as other:
            self.rounds(one)

    def test_programs_of_two_threads_beside_a_running_program(self):
        step = jax.jit(lambda x: dmj.all_reduce(dmj.all_reduce(x, FLAT) / WORLD, FLAT))

        def one(turn, length, pause):
            first = step(jnp.full(length, turn + 1, "float32"))
            pause()
            second = other.submit(step, jnp.full(length, -turn, "float32")).result()
            pause()
            return (first, turn + 1), (second, -turn), (step(jnp.full(length, turn + 2, "float32")), turn + 2)

        with ThreadPoolExecutor(1) as other:
            self.rounds(one)

    def test_asynchronous_host_calls_beside_a_running_program(self):
        step, group = jax.jit(lambda x: dmj.all_reduce(dmj.all_reduce(x, FLAT) / WORLD, FLAT)), FLAT.get_group()

        def one(turn, length, pause):
            host, inside = numpy.full(length, -turn, "float32"), numpy.full(length, turn + 4, "float32")
            works = [group.all_reduce(host, async_op=True)]
            jitted = step(jnp.full(length, turn + 1, "float32"))
            pause()
            with FLAT.group(async_op=True) as together:
                group.all_reduce(inside)
            behind = step(jnp.full(length, turn + 2, "float32"))
            for work in (*works, together.work):
                work.wait()
            return (host, -turn), (jitted, turn + 1), (inside, turn + 4), (behind, turn + 2)

        self.rounds(one)

    def test_meshes_made_and_ended_after_what_jax_was_given(self):
        # A flattening splits the communicator that the jitted collectives are on, and finalize
        # ends it.
        mesh = own_mesh()
        step = jax.jit(lambda x: [dmj.all_reduce(x * factor, mesh, "dp") for factor in (1, 2, 3)])
        ones = jnp.ones(LENGTH, "float32")
        results = [step(ones)]
        mesh.reshape((WORLD // 2, 2) if WORLD > 1 else (1, 1), ("a", "b"))
        results.append(step(ones))
        with mesh.group():
            pass
        results.append(step(ones))
        mesh.finalize()
        for result in results:
            self.assertEqual([set(numpy.unique(part)) for part in result], [{WORLD}, {2 * WORLD}, {3 * WORLD}])

    def test_the_token_goes_from_call_to_call(self):
        def program(x, ys):
            together = dmj.all_reduce(x, FLAT)
            kinds = [dmj.all_gather(ys[0], FLAT), dmj.shift(ys[1], FLAT, wrap=False), dmj.broadcast(ys[2], FLAT), dmj.reduce(ys[3], FLAT)]
            return jnp.sum(together) + sum(jnp.sum(kind) for kind in kinds)
        ys = [jnp.ones(4)] * 4
        for name, function, calls in (("forward", program, 5), ("value and gradient", jax.value_and_grad(program, argnums=(0, 1)), 10)):
            text = jax.jit(function).lower(jnp.ones(3), ys).as_text()
            found = re.findall(r"(%\w+):2 = stablehlo\.custom_call @devicemesh_\w+\(([^)]*)\)", text)
            self.assertEqual(len(found), calls, text)
            token = re.search(r"(%\w+): !stablehlo\.token", text).group(1)
            for result, operands in found:
                self.assertEqual(operands.split(", ")[-1], token, f"{name}: each call takes the token of the one before\n{text}")
                token = f"{result}#1"
            self.assertRegex(text, rf"return {token}, ", f"{name}: the last token leaves the program")

    def test_loops_and_branches(self):
        def step(carry, x):
            flag, value = carry
            value = lax.cond(flag, lambda v: dmj.all_reduce(v, FLAT, op="avg"), lambda v: dmj.shift(v, FLAT), value + x)
            return (~flag, value), dmj.all_reduce(x, FLAT)
        xs = jnp.arange(6.0)
        (_, value), sums = jax.jit(lambda xs: lax.scan(step, (True, jnp.float64(0)), xs))(xs)
        self.assertEqual((float(value), sums.tolist()), (15.0, (xs * WORLD).tolist()))
        doubled = jax.jit(lambda x: lax.while_loop(lambda v: v < 1000, lambda v: dmj.all_reduce(v, FLAT) + 1, x))(jnp.float64(1))
        expected = 1.0
        while expected < 1000:
            expected = expected * WORLD + 1
        self.assertEqual(float(doubled), expected)

    def test_derivatives_of_loops_and_recomputation(self):
        def through(reduce, wrap):
            def step(carry, x):
                carry = jnp.sin(reduce(carry) * x)
                return carry, carry
            return lambda x, xs: jnp.sum(lax.scan(wrap(step), x, xs)[1])
        x, xs = jnp.linspace(0.1, 0.9, 3), jnp.linspace(0.2, 0.7, 5)
        # All ranks hold the same, so the mean is the value itself, and so is the mean of the
        # cotangents.
        expected = jax.grad(through(lambda v: v, lambda step: step))(x, xs)
        for wrap in (lambda step: step, jax.checkpoint):
            gradient = jax.jit(jax.grad(through(lambda v: dmj.all_reduce(v, FLAT, op="avg"), wrap)))(x, xs)
            self.assertLess(float(jnp.max(jnp.abs(gradient - expected))), 1e-12)


if __name__ == "__main__":
    unittest.main()

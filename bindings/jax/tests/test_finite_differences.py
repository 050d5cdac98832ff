"""A derivative is that of the sum of all ranks' losses: what jax.grad gives on each rank is what
the sum changes by when that rank's parameters move."""

import unittest

import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
from ranks import FLAT, MESH, RANK, WORLD, operand

STEP = 1e-5


def loss(parameters, data):
    """All kinds of collectives, with something that is not linear between them."""
    inner = MESH.size("inner")
    hidden = jnp.tanh(dmj.all_gather(parameters["first"], MESH, "inner", axis=1, tiled=True))
    hidden = jnp.sin(dmj.all_reduce(data @ hidden, MESH, "outer", op="avg"))
    hidden = jnp.tanh(dmj.reduce_scatter(hidden, MESH, "inner", scatter_dimension=1, tiled=True))
    hidden = hidden * dmj.shift(parameters["second"], FLAT) + dmj.shift(hidden, MESH, "outer", wrap=False)
    hidden = jnp.cos(dmj.all_to_all(jnp.tile(hidden, (inner, 1)), MESH, "inner", tiled=True))
    hidden = hidden + dmj.broadcast(parameters["second"], MESH, "outer", root=-1 % MESH.size("outer"))
    return (RANK + 1) * jnp.mean(jnp.square(hidden)) + jnp.sum(dmj.reduce(jnp.sin(hidden), MESH, "inner"))


class FiniteDifferences(unittest.TestCase):
    def test_of_the_sum_of_all_losses(self):
        parameters = {"first": operand(RANK, (3, 2)), "second": operand(RANK, (2,), 1)}
        data = operand(RANK, (4, 3), 2)
        total = jax.jit(lambda parameters: dmj.all_reduce(loss(parameters, data), FLAT))
        gradients = jax.jit(jax.grad(loss))(parameters, data)
        for rank in range(WORLD):
            for name, index in (("first", (0, 1)), ("first", (2, 0)), ("second", (1,))):
                moved = []
                for step in (STEP, -STEP):
                    # Every rank takes part, one of them with a parameter that has moved.
                    changed = dict(parameters)
                    if RANK == rank:
                        changed[name] = changed[name].at[index].add(step)
                    moved.append(float(total(changed)))
                if RANK == rank:
                    self.assertAlmostEqual(float(gradients[name][index]), (moved[0] - moved[1]) / (2 * STEP),
                                           delta=1e-6, msg=f"rank {rank}, {name}{index}")


if __name__ == "__main__":
    unittest.main()

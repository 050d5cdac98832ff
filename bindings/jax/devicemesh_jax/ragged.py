"""The functions that programs call for blocks of another length on each rank: the exchange of a
mixture of experts, and gathers and scatters of unequal parts. Blocks are rows along the first axis.
"""

from __future__ import annotations

import itertools
from typing import Any, List, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy

from . import _ragged as primitives
from ._meshes import MeshOrName, along, named
from ._operators import PROD, WIDENED, check_moved, check_reduced, integer, is_key, operator
from .collectives import Dim, all_to_all

__all__ = ["all_gatherv", "all_to_allv", "ragged_all_to_all", "reduce_scatterv"]


def lengths(what: str, counts: Sequence[int], size: int) -> Tuple[int, ...]:
    """Counts of rows, one for each rank along a dimension, which are known when the call is
    traced."""
    numbers = tuple(integer(f"{what}[{rank}]", count) for rank, count in enumerate(counts))
    if len(numbers) != size or min(numbers) < 0:
        raise ValueError(f"{what} is {numbers}; one number of rows, not negative, was expected for each of the dimension's {size} ranks")
    return numbers


def rows(what: str, x: Any) -> Any:
    array = jnp.asarray(x)
    if is_key(array.dtype):
        raise TypeError(f"{what} of random keys ({array.dtype}): exchange jax.random.key_data(key)")
    if array.ndim == 0:
        raise ValueError(f"{what} of a scalar, which has no first axis to divide into rows")
    return array


def place(mesh: MeshOrName, label: str) -> int:
    return int(named(mesh)[0].get_local_rank(label))


def all_gatherv(x: Any, mesh: MeshOrName, dim: Dim = None, *, counts: Sequence[int]) -> Any:
    """Every rank's rows, one rank's after the other's. Rank i gives counts[i] rows; counts is the
    same on every rank."""
    name, label, size = along(mesh, dim)
    numbers, rank = lengths("counts", counts, size), place(mesh, label)

    def one(leaf: Any) -> Any:
        array = rows("all_gatherv", leaf)
        check_moved("all_gatherv", array.dtype)
        if array.shape[0] != numbers[rank]:
            raise ValueError(f"x has {array.shape[0]} rows, but counts has {numbers[rank]} for this rank, {rank} along {label}")
        return primitives.all_gatherv_p.bind(array, counts=numbers, rank=rank, mesh=name, dim=label, size=size)

    return jax.tree.map(one, x)


def reduce_scatterv(x: Any, mesh: MeshOrName, dim: Dim = None, op: str = "sum", *, counts: Sequence[int]) -> Any:
    """Reduces all ranks' arrays, and gives rank i counts[i] rows of the result, in the order of the
    ranks. counts is the same on every rank."""
    name, label, size = along(mesh, dim)
    code, numbers, rank = operator(op), lengths("counts", counts, size), place(mesh, label)

    def one(leaf: Any) -> Any:
        array = rows("reduce_scatterv", leaf)
        check_reduced("reduce_scatterv", array.dtype, code)
        if code == PROD and jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(f"reduce_scatterv of {array.dtype} elements with op 'prod': reduce_scatter has it")
        if array.shape[0] != sum(numbers):
            raise ValueError(f"x has {array.shape[0]} rows, but counts has {sum(numbers)} together, {numbers}")
        wide = WIDENED.get(array.dtype.name, array.dtype)
        where = {"counts": numbers, "rank": rank, "mesh": name, "dim": label, "size": size}
        return primitives.reduce_scatterv_p.bind(array.astype(wide), op=code, **where).astype(array.dtype)

    return jax.tree.map(one, x)


def all_to_allv(x: Any, mesh: MeshOrName, dim: Dim = None, *, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Any:
    """Sends send_counts[i] rows to rank i, and gives recv_counts[i] rows of each rank i, one rank's
    after the other's. What rank i sends to rank k is what k expects from i."""
    name, label, size = along(mesh, dim)
    sent, received = lengths("send_counts", send_counts, size), lengths("recv_counts", recv_counts, size)
    numbers: List[Any] = []
    for counts in (sent, received):
        numbers += [numpy.array([0, *itertools.accumulate(counts)][:-1], "int32"), numpy.array(counts, "int32")]

    def one(leaf: Any) -> Any:
        array = rows("all_to_allv", leaf)
        check_moved("all_to_allv", array.dtype)
        if array.shape[0] != sum(sent):
            raise ValueError(f"x has {array.shape[0]} rows, but send_counts has {sum(sent)} together, {sent}")
        output = jnp.zeros((sum(received), *array.shape[1:]), array.dtype)
        return primitives.all_to_allv_p.bind(array, output, *map(jnp.asarray, numbers), mesh=name, dim=label, size=size)

    return jax.tree.map(one, x)


def ragged_all_to_all(operand: Any, output: Any, input_offsets: Any, send_sizes: Any, output_offsets: Any,
                      recv_sizes: Any, mesh: MeshOrName, dim: Dim = None) -> Any:
    """jax.lax.ragged_all_to_all along a dimension of a mesh: sends send_sizes[i] rows of operand,
    from row input_offsets[i] on, to rank i, which writes them into its output from row
    output_offsets[i] on. Gives output with recv_sizes[i] rows of each rank i written over.

    Sizes and offsets are arrays of integers, one for each rank, that need not be known when the
    call is traced; the shapes of operand and output are. On cuda the call waits for them on the
    host.
    """
    name, label, size = along(mesh, dim)
    given, target = rows("ragged_all_to_all", operand), rows("ragged_all_to_all", output)
    check_moved("ragged_all_to_all", given.dtype)
    if (given.dtype, given.shape[1:]) != (target.dtype, target.shape[1:]):
        raise ValueError(f"operand has rows of {given.dtype}{given.shape[1:]}, but output of {target.dtype}{target.shape[1:]}")
    numbers = [jnp.asarray(each) for each in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    for what, each in zip(("input_offsets", "send_sizes", "output_offsets", "recv_sizes"), numbers):
        if each.shape != (size,) or not jnp.issubdtype(each.dtype, jnp.integer):
            raise ValueError(
                f"{what} is {each.dtype}{each.shape}; integers in the shape ({size},) were expected, one for each rank of the dimension"
            )
    starts, sent, theirs, received = (each if each.dtype.name in ("int32", "int64") else each.astype(int) for each in numbers)
    # Each rank says where its rows begin at the receiver, which needs to know.
    places = all_to_all(theirs, mesh, label)
    return primitives.all_to_allv_p.bind(given, target, starts, sent, places, received, mesh=name, dim=label, size=size)

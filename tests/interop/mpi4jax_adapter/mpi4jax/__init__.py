"""mpi4jax's functions over devicemesh_jax, for mpi4jax's own tests. tests/interop/test_mpi4jax.py
runs them.

It differs from mpi4jax in this: tags are not compared, because messages between two ranks pair in
the order of the programs, and a receiver names its sender.
"""

import functools

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from mpi4py import MPI

import devicemesh_jax as dmj

from ._src import xla_bridge

__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "bcast", "gather", "has_cuda_support", "has_sycl_support", "recv",
    "reduce", "scan", "scatter", "send", "sendrecv"
]


def logged(name):
    """Makes a function write the lines of mpi4jax's log before and after its call, while the log is
    on."""
    def around(function):
        @functools.wraps(function)
        def run(x, *arguments, **options):
            if not xla_bridge.get_logging():
                return function(x, *arguments, **options)
            before, after = xla_bridge.lines(MPI.COMM_WORLD.Get_rank(), name, jnp.size(x))
            shape = jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
            # The call takes what the first callback gives, and the last one takes its result.
            made = function(jax.pure_callback(before, shape, x), *arguments, **options)
            return jax.pure_callback(after, jax.ShapeDtypeStruct(made.shape, made.dtype), made)
        return run
    return around


def mesh_of(comm):
    return (comm or MPI.COMM_WORLD).mesh


def at(root, comm):
    return (comm or MPI.COMM_WORLD).Get_rank() == root


@logged("Allreduce")
def allreduce(x, op, *, comm=None):
    return dmj.all_reduce(x, mesh_of(comm), op=op, transpose="identity")


def allgather(x, *, comm=None):
    return dmj.all_gather(x, mesh_of(comm))


def alltoall(x, *, comm=None):
    size = mesh_of(comm).size()
    if jnp.shape(x)[:1] != (size,):
        raise ValueError(f"Alltoall input must have shape (nproc, ...): it has {jnp.shape(x)}, and nproc is {size}")
    return dmj.all_to_all(x, mesh_of(comm))


def barrier(*, comm=None):
    dmj.barrier(mesh_of(comm))


def bcast(x, root, *, comm=None):
    return dmj.broadcast(x, mesh_of(comm), root=root)


def gather(x, root, *, comm=None):
    gathered = dmj.gather(x, mesh_of(comm), root=root)
    return gathered if at(root, comm) else x


def reduce(x, op, root, *, comm=None):
    reduced = dmj.reduce(x, mesh_of(comm), root=root, op=op)
    return reduced if at(root, comm) else x


def scan(x, op, *, comm=None):
    return dmj.scan(x, mesh_of(comm), op=op)


def scatter(x, root, *, comm=None):
    size = mesh_of(comm).size()
    if not at(root, comm):
        # Ours takes an array of the root's shape on every rank.
        x = jnp.zeros((size, *jnp.shape(x)), jnp.result_type(x))
    elif jnp.shape(x)[:1] != (size,):
        raise ValueError(f"Scatter input must have shape (nproc, ...): it has {jnp.shape(x)}, and nproc is {size}")
    return dmj.scatter(x, mesh_of(comm), root=root)


def send(x, dest, tag=0, *, comm=None):
    try:
        dmj.send(x, mesh_of(comm), dest=dest)
    except ValueError as error:
        raise RuntimeError(f"r{MPI.COMM_WORLD.Get_rank()} | MPI_Send returned error code 6: {error}") from error


def recv(x, source, tag=MPI.ANY_TAG, *, comm=None, status=None):
    note(status, source)
    return dmj.recv(x, mesh_of(comm), source=source)


def sendrecv(sendbuf, recvbuf, source, dest, *, sendtag=0, recvtag=MPI.ANY_TAG, comm=None, status=None):
    note(status, source)
    mesh = mesh_of(comm)
    sent, received = (jax.ShapeDtypeStruct(jnp.shape(buffer), jnp.result_type(buffer)) for buffer in (sendbuf, recvbuf))

    @jax.custom_jvp
    def exchange(x):
        return dmj.sendrecv(x, mesh, dest=dest, source=source, like=received)

    @exchange.defjvp
    def jvp(primals, tangents):
        back = lambda cotangent: dmj.sendrecv(cotangent, mesh, dest=source, source=dest, like=sent)  # noqa: E731
        return exchange(*primals), backward_only_p.bind(*tangents, shape=received.shape, back=back)

    return exchange(jnp.asarray(sendbuf))


def note(status, source):
    if status is not None:
        status.source = source


def refuse(*_, **__):
    raise RuntimeError("sendrecv cannot be used with forward-mode autodiff")


# The tangent of sendrecv, which mpi4jax makes in a backward pass alone. Ours has both.
backward_only_p = Primitive("backward_only")
backward_only_p.def_impl(refuse)
backward_only_p.def_abstract_eval(lambda tangent, *, shape, back: ShapedArray(shape, tangent.dtype))
ad.primitive_transposes[backward_only_p] = lambda cotangent, _, *, shape, back: [back(ad.instantiate_zeros(cotangent))]
batching.primitive_batchers[backward_only_p] = refuse
mlir.register_lowering(backward_only_p, refuse)


def has_cuda_support():
    return False


def has_sycl_support():
    return False

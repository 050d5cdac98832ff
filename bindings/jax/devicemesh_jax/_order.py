"""Keeps the collectives of a process in the order of its program, which must be the same on every
rank.

XLA does not order two calls that share no data: has_side_effect keeps the calls, but does not
order them. So a token passes from each collective to the next. JAX passes it, because the
primitives have an ordered effect. JAX then runs one token through a jitted function, its loops and
branches, its derivative (where the backward pass follows the forward pass), and from one jitted
function to the next that the same thread calls. A user could not pass the token by hand, because
jax.grad inserts the transposed calls where the user's code has no place for it.

JAX has no public way to declare such an effect, so this file uses JAX's private names for it.
"""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any, Dict, NamedTuple, Optional, Set, Tuple

import devicemesh
from devicemesh import _beside as beside
from devicemesh.work import follow_queues

from . import _native

try:
    from jax._src import dispatch, effects
except ImportError as error:
    raise ImportError(f"devicemesh_jax does not know this version of JAX ({error}); it is tested with 0.7.2 to 0.10.2") from error

from jax.interpreters import mlir


class CollectiveEffect(effects.Effect):
    """The effect of taking part in collectives of libdevicemesh. All meshes have one effect,
    because ranks of different meshes can wait for each other too."""

    def __str__(self) -> str:
        return "DeviceMeshCollective"


collective = CollectiveEffect()
for allowed in (
    effects.ordered_effects,
    effects.shardable_ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    allowed.add_type(CollectiveEffect)


def take(context: Any) -> Any:
    """The token for which the next collective of this computation must wait."""
    return context.tokens_in.get(collective)


def give(context: Any, token: Any) -> None:
    """Sets the token for which the collective after this one will wait."""
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({collective: token})))


class Given(NamedTuple):
    """The last collective that one thread has given to JAX."""

    # JAX's dictionaries of tokens of that thread, by effect and by device. The first one also tells
    # threads apart, because a new thread can get the number of one that has ended.
    kept: Tuple[Dict[Any, Any], Dict[Any, Any]]
    # It is ready when that collective, and all that the thread gave to JAX before it, are over.
    token: Any


# For each thread whose collectives may still run, by the address of its first dictionary.
given: Dict[int, Given] = {}
# The threads that are giving a computation with collectives to JAX at this moment. On cpu it may
# run there and then, with its callbacks.
giving: Set[int] = set()


class Tokens(dispatch.RuntimeTokenSet):
    """JAX's tokens, of which each thread has its own, and the knowledge what other threads have
    given to JAX."""

    def get_token_input(self, effect: Any, devices: Any) -> Any:
        if effect is collective:
            # The tokens of this thread order the computation behind those of this thread alone.
            wait_for_given(except_of=self.current_tokens)
            giving.add(threading.get_ident())
        return super().get_token_input(effect, devices)

    def set_token_result(self, effect: Any, token: Any) -> None:
        super().set_token_result(effect, token)
        if effect is collective:
            giving.discard(threading.get_ident())
            given[id(self.current_tokens)] = Given((self.current_tokens, self.output_runtime_tokens), token)


# The object stays, because it holds the tokens that each thread has by now.
dispatch.runtime_tokens.__class__ = Tokens


def in_callback() -> bool:
    """Whether this thread runs a callback of a jitted program."""
    frame = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_name == "_wrapped_callback" and "jax" in frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def wait_for_given(except_of: Optional[Dict[Any, Any]] = None) -> None:
    """Returns when the collectives that any thread has given to JAX are over, but for those of the
    thread with these tokens. Raises the error of one that has failed."""
    for key, each in list(given.items()):
        if each.kept[0] is except_of:
            continue
        if not each.token._buf.is_ready():
            outside_callbacks()
        each.token.block_until_ready()
        if given.get(key) is each:
            del given[key]


def outside_callbacks() -> None:
    """Raises in a callback of a jitted program. A program that waits for its own callback would
    never end."""
    if in_callback():
        raise devicemesh.InvalidStateError(
            "a callback of a jitted program (jax.pure_callback, io_callback, debug.callback) makes a call that can wait for other ranks, while jitted collectives run: "
            "their order can be another one on each rank; call the function of devicemesh_jax inside the program instead, or make the call when the program is over")


def wait_for_jitted() -> None:
    """Returns when the collectives that this process has given to JAX are over; raises what went
    wrong in them.

    The package devicemesh runs it before each of its own calls that can wait for other ranks. So a
    host call comes after what JAX was given before it, on every rank and from every thread. When
    nothing was given to JAX it costs two looks into empty collections.
    """
    if giving:
        outside_callbacks()
        # A computation that JAX refused has left this thread's number there.
        giving.discard(threading.get_ident())
    if given:
        wait_for_given()


beside.before_call.append(wait_for_jitted)
# A jitted collective that runs while a group is open is refused: on the group's own thread it
# would be put off until the group ends, after XLA has read its result.
beside.follow_groups(_native.library.devicemesh_jax_group)
# A jitted collective waits for the asynchronous host calls along its dimension. None of them was
# issued after it, because those wait for it before they are queued.
follow_queues(lambda key, change: _native.library.devicemesh_jax_queued(key[0], key[1].encode(), change))


def recover() -> Optional[Exception]:
    """Lets this process's later collectives run although an earlier one failed. Waits for the
    collectives that still run. Returns the error, or None.

    A collective waits for the one before it, so after a failure all later ones fail with the first
    error. Call this function when the cause is removed, for example when there is a new mesh
    without the rank that was lost. Local: every rank calls it for itself.
    """
    failed: Optional[Exception] = None
    tokens = dispatch.runtime_tokens
    of_threads = [each.kept for each in given.values()]
    given.clear()
    giving.clear()
    for kept in {id(part): part for pair in (*of_threads, (tokens.current_tokens, tokens.output_runtime_tokens)) for part in pair}.values():
        for key, token in list(kept.items()):
            try:
                token.block_until_ready()
            except Exception as error:
                failed = failed or error
                kept.pop(key, None)
    return failed


def last_words() -> None:
    """When the process ends, prints an error for which nobody waited as one line. JAX would print
    a traceback for each of its tokens."""
    error = recover()
    if error is not None:
        print(f"devicemesh_jax: the last collectives of this process failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


# This is registered after JAX's own exit function, so it runs before that.
atexit.register(last_words)

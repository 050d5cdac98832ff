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
from typing import Any, Optional

from devicemesh import _beside as beside

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


def wait_for_jitted() -> None:
    """Returns when the collectives that this thread has given to JAX are over; raises what went
    wrong in them.

    The package devicemesh runs it before each of its own calls that can wait for other ranks. So a
    host call comes after what JAX was given before it, on every rank. When nothing was given to
    JAX it costs one look into a dictionary. JAX keeps tokens per thread, so this function does not
    see what other threads have given to JAX.
    """
    token = dispatch.runtime_tokens.current_tokens.get(collective)
    if token is not None:
        token.block_until_ready()


beside.before_call.append(wait_for_jitted)
# A jitted collective that runs while a group is open is refused: on the group's own thread it
# would be put off until the group ends, after XLA has read its result.
beside.group_changes.append(_native.library.devicemesh_jax_group)


def recover() -> Optional[Exception]:
    """Lets this thread's later collectives run although an earlier one failed. Waits for the
    collectives that still run. Returns the error, or None.

    A collective waits for the one before it, so after a failure all later ones fail with the first
    error. Call this function when the cause is removed, for example when there is a new mesh
    without the rank that was lost. Local: every rank calls it for itself.
    """
    failed: Optional[Exception] = None
    tokens = dispatch.runtime_tokens
    for kept in (tokens.current_tokens, tokens.output_runtime_tokens):
        for key, token in list(kept.items()):
            try:
                token.block_until_ready()
            except Exception as error:
                failed = failed or error
                del kept[key]
    return failed


def last_words() -> None:
    """When the process ends, prints an error for which nobody waited as one line. JAX would print
    a traceback for each of its tokens."""
    error = recover()
    if error is not None:
        print(f"devicemesh_jax: the last collectives of this process failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


# This is registered after JAX's own exit function, so it runs before that.
atexit.register(last_words)

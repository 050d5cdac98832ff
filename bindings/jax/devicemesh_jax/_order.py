"""What keeps the collectives of a process in the order of its program, which must be the same on every rank.

Nothing in XLA orders two calls that share no data: has_side_effect keeps them, it does not order them. So a token is threaded through ours, from each call
to the next, and JAX does the threading: the primitives have an ordered effect. JAX then runs one token through a jitted function, its loops and branches,
its derivative (where the backward pass follows the forward pass), and from one jitted function to the next that the same thread calls. A token in the
hands of the user could not do that: in jax.grad the transposed calls appear where no user threads anything.

JAX has no public way to declare such an effect; this file alone uses private names of it.
"""

from __future__ import annotations

from typing import Any

try:
    from jax._src import effects
except ImportError as error:
    raise ImportError(f"devicemesh_jax does not know this version of JAX ({error}); it is tested with 0.7.2 to 0.10.2") from error

from jax.interpreters import mlir


class CollectiveEffect(effects.Effect):
    """Takes part in collectives of libdevicemesh. One kind for all meshes: ranks of different meshes can wait for each other too."""

    __str__ = lambda self: "DeviceMeshCollective"  # noqa: E731


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
    """The token that the next collective of this computation has to wait for."""
    return context.tokens_in.get(collective)


def give(context: Any, token: Any) -> None:
    """The token that the one after it will wait for."""
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({collective: token})))

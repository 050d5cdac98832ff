"""The current mesh of this thread, which ``with mesh:`` sets."""

from __future__ import annotations

from .mesh import DeviceMesh, stack

__all__ = ["get_current_mesh"]


def get_current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:`` of this thread."""
    if not stack.meshes:
        raise RuntimeError("No device mesh is currently active!")
    return stack.meshes[-1]

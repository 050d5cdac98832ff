"""The mesh that is current in this thread: ``with mesh:``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, List

if TYPE_CHECKING:
    from .mesh import DeviceMesh

__all__ = ["get_current_mesh"]


class Stack(threading.local):
    def __init__(self) -> None:
        self.meshes: List["DeviceMesh"] = []


stack = Stack()


def get_current_mesh() -> "DeviceMesh":
    """The mesh of the innermost ``with mesh:`` of this thread."""
    if not stack.meshes:
        raise RuntimeError("No device mesh is currently active!")
    return stack.meshes[-1]

"""Options for the communicators of a mesh."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence, Union

from . import _declarations as declarations
from ._library import flag, is_bool, listing, optional_text, within
from .errors import InvalidArgumentError

__all__ = ["DimOptions"]


@dataclass(frozen=True)
class DimOptions:
    """Options for one dimension's communicator.

    Attributes:
        own_comm: never share the communicator with a dimension over the same ranks.
        comm_name: its name in the library's logs; None is "mesh_" and the dimension's name.
        nccl_config: the address of an ncclConfig_t, 0 for none; copied by the call. The fields
            other than names must be the same on every rank.
    """

    own_comm: bool = False
    comm_name: Optional[str] = None
    nccl_config: int = 0

    def struct(self) -> Any:
        """The C struct of these options."""
        return declarations.DimOptions(
            struct_size=ctypes.sizeof(declarations.DimOptions), flags=declarations.DIM_OWN_COMM if flag("own_comm", self.own_comm) else 0,
            nccl_config=within("nccl_config", self.nccl_config, 0, 2**64 - 1) or None, comm_name=optional_text("comm_name", self.comm_name))


DimOptionsLike = Union[None, Sequence[DimOptions], Mapping[Union[int, str], DimOptions]]


def dim_options(options: DimOptionsLike, ndim: int, names: Optional[Sequence[str]]) -> Any:
    """A C array with an element per dimension, from a list or from a dict by index or name. None
    when there are no options. The library refuses a list of another length."""
    if options is None:
        return None
    if isinstance(options, Mapping):
        chosen = [DimOptions() for _ in range(ndim)]
        for key, value in options.items():
            if isinstance(key, int) and not is_bool(key) and 0 <= key < ndim:
                chosen[key] = value
            elif names is not None and key in names:
                chosen[list(names).index(str(key))] = value
            else:
                raise InvalidArgumentError(
                    f"dim_options has the key {key!r}, but the dimensions are {', '.join(names or map(str, range(ndim)))}"
                )
    else:
        if isinstance(options, DimOptions):
            raise TypeError("dim_options is one DimOptions; pass a list with one for each dimension, or a dict of them by name or index")
        chosen = list(listing("dim_options", options))
    for option in chosen:
        if not isinstance(option, DimOptions):
            raise TypeError(f"dim_options has a {type(option).__name__}, not a DimOptions")
    return (declarations.DimOptions * len(chosen))(*(option.struct() for option in chosen))

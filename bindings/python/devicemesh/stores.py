"""A store of the program's own (PyTorch's, JAX's, etcd ...) as the place where the ranks meet."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any, Callable, Dict, Optional, Protocol

from . import _declarations as declarations
from . import _interrupt as interrupt
from ._library import within

__all__ = ["Store", "TorchStore"]


class Store(Protocol):
    """The functions of a key-value service. Keys are short printable ASCII, values at most 8 MiB.

    The methods are called from threads of the library, and from several at once. An exception says
    that the service is broken: it ends the call that needed the store at once, with a StoreError
    whose __cause__ is the exception where World() is the call. Only get may raise KeyError and
    TimeoutError for a key that did not come in time.

    A store may also have ``remove(key: str) -> None``, which removes a key. A key that does not
    exist is no error. Without this method the library's keys stay: some kilobytes for each
    collective call.

    A store may also have ``compare_set(key: str, expected: bytes, value: bytes) -> bytes``, on all
    ranks or on none. It stores value under key if the value there is the expected one (b"": the key
    is not there), atomically over all ranks, and returns the value that stands then. Only with it
    can a job recover from lost ranks (DeviceMesh.recover).
    """

    def set(self, key: str, value: bytes) -> None:
        """Stores value under key, replacing what was there."""

    def get(self, key: str, timeout: float) -> Optional[bytes]:
        """The value of key, for which it waits up to timeout seconds; 0 looks once. When the key
        did not come in time, get returns None, or raises KeyError or TimeoutError."""

    def add(self, key: str, amount: int) -> int:
        """Adds amount to the integer under key (0 when there is none), atomically over all ranks.
        Returns the sum. The integer is the value of the key, in decimal digits: get returns it,
        and remove removes it."""


class TorchStore:
    """Makes a Store from a torch.distributed.Store (TCPStore, PrefixStore ...):
    ``World(store=TorchStore(store), ...)``."""

    def __init__(self, store: Any, prefix: str = "devicemesh/") -> None:
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout: float) -> Optional[bytes]:
        if timeout <= 0:
            # For PyTorch a timeout of 0 is none.
            if not self._store.check([self._prefix + key]):
                return None
        else:
            try:
                self._store.wait([self._prefix + key], timedelta(seconds=timeout))
            except Exception as error:
                # PyTorch reports a missing key by DistStoreError, a RuntimeError. Any other error
                # means that the store has gone.
                if "timeout" in str(error).lower():
                    return None
                raise
        return bytes(self._store.get(self._prefix + key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        return bytes(self._store.compare_set(self._prefix + key, expected, value))

    def remove(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)


# A callback returns this when the store has raised. Any number but 0 and STORE_NOT_YET would do.
BROKEN = 1


class Callbacks:
    """A Store behind the C callbacks. This object lives until the library says that the world is
    gone."""

    alive: Dict[int, "Callbacks"] = {}

    def __init__(self, store: Store) -> None:
        self.store = store
        self.failure: Optional[BaseException] = None
        # Ends the join of the world, while it is under way.
        self.give_up: Callable[[], Any] = int
        self.struct = declarations.StoreCallbacks(
            struct_size=ctypes.sizeof(declarations.StoreCallbacks), user_data=None, set=declarations.StoreSet(self._set),
            get=declarations.StoreGet(self._get), add=declarations.StoreAdd(self._add), drop=declarations.StoreDrop(self._drop),
            remove=declarations.StoreRemove(self._remove))
        if hasattr(store, "compare_set"):
            self.struct.compare_set = declarations.StoreCompareSet(self._compare_set)

    def keep(self, give_up: Callable[[], Any]) -> None:
        """Keeps this object alive for the library. It is called before the world is joined, because
        the joining uses the callbacks already. give_up() ends the joining."""
        self.give_up = give_up
        Callbacks.alive[id(self)] = self
        interrupt.expect_callbacks()

    def _set(self, _: Any, key: bytes, value: int, length: int) -> int:
        try:
            with interrupt.breakable():
                self.store.set(key.decode(), ctypes.string_at(value, length))
        except BaseException as error:
            self.failure = error
            return BROKEN
        return 0

    def _get(self, _: Any, key: bytes, value: int, capacity: int, length_out: Any, timeout_ms: int) -> int:
        try:
            try:
                with interrupt.breakable():
                    found = self.store.get(key.decode(), timeout_ms / 1000)
            except (KeyError, TimeoutError, interrupt.Noted):  # the watch ends the call
                found = None
            if found is None:
                return declarations.STORE_NOT_YET
            self._give("get", found, value, capacity, length_out)
        except BaseException as error:
            self.failure = error
            return BROKEN
        return 0

    def _add(self, _: Any, key: bytes, amount: int, value_out: Any) -> int:
        try:
            with interrupt.breakable():
                sum_now = self.store.add(key.decode(), amount)
            value_out[0] = within("what the store's add returned", sum_now, -(2**63), 2**63 - 1)
        except BaseException as error:
            self.failure = error
            return BROKEN
        return 0

    def _compare_set(self, _: Any, key: bytes, expected: int, expected_length: int, value: int, length: int, stands: int, capacity: int,
                     length_out: Any) -> int:
        try:
            compare_set = getattr(self.store, "compare_set")
            with interrupt.breakable():
                found = compare_set(key.decode(), ctypes.string_at(expected, expected_length), ctypes.string_at(value, length))
            self._give("compare_set", found, stands, capacity, length_out)
        except BaseException as error:
            self.failure = error
            return BROKEN
        return 0

    def _give(self, method: str, found: Any, value: int, capacity: int, length_out: Any) -> None:
        if not isinstance(found, (bytes, bytearray, memoryview)):
            raise TypeError(f"{type(self.store).__name__}.{method} returned a {type(found).__name__}, not bytes")
        found = bytes(found)
        ctypes.memmove(value, found, min(capacity, len(found)))
        length_out[0] = len(found)

    def _remove(self, _: Any, key: bytes) -> int:
        # A key that stays does no harm, so a failure here does not fail the call.
        try:
            remove = getattr(self.store, "remove", None)
            if remove is not None:
                with interrupt.breakable():
                    remove(key.decode())
        except BaseException:
            return BROKEN
        return 0

    def _drop(self, _: Any) -> None:
        Callbacks.alive.pop(id(self), None)

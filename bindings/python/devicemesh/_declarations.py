"""Declares include/devicemesh.h for ctypes: structs, flags and the signature of every function.

tests/test_header.py compares this file with the header, so the test finds a function that only the
header has.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Tuple

WORLD_OFFLINE = 1
WORLD_DEVICE = 2
JOIN_AUTO = 0
JOIN_NEW = 1
JOIN_RUNNING = 2
JOINS = {"new": JOIN_NEW, "running": JOIN_RUNNING}
DIM_OWN_COMM = 1
INIT_LAZY = 1
INIT_OWN_COMMS = 2
RECOVER_HAS_STATE = 1
RECOVER_ANY_STATE = 2
RECOVER_GROW = 4
LOG_OFF = 0
LOG_ERROR = 1
LOG_WARN = 2
LOG_INFO = 3
LOG_DEBUG = 4
EVENT_NONE = 0
EVENT_JOINED = 1
EVENT_SLOW = 2
EVENT_LOST = 3
EVENT_ABORTED = 4
EVENT_RECOVERED = 5
REPLICATE = 0
SHARD = 1
PARTIAL = 2
STORE_NOT_YET = 100
RANK_NONE = -1


class ErrorInfo(Structure):
    _fields_ = [("struct_size", c_size_t), ("status", c_int32), ("ccl_result", c_int32), ("device_error", c_int32),
                ("os_error", c_int32), ("message", c_char_p), ("ranks", POINTER(c_int32)), ("num_ranks", c_size_t),
                ("lost_ranks", POINTER(c_int32)), ("num_lost", c_size_t), ("dim", c_char_p),
                ("waited_seconds", c_double), ("call", c_int64)]


StoreSet = ctypes.CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t)
StoreGet = ctypes.CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_size_t), c_int64)
StoreAdd = ctypes.CFUNCTYPE(c_int32, c_void_p, c_char_p, c_int64, POINTER(c_int64))
StoreDrop = ctypes.CFUNCTYPE(None, c_void_p)
StoreRemove = ctypes.CFUNCTYPE(c_int32, c_void_p, c_char_p)
StoreCompareSet = ctypes.CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_size_t,
                                   POINTER(c_size_t))


class StoreCallbacks(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("user_data", c_void_p), ("set", StoreSet), ("get", StoreGet), ("add", StoreAdd), ("drop", StoreDrop),
        ("remove", StoreRemove), ("compare_set", StoreCompareSet)]


class WorldOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("flags", c_uint32), ("world_size", c_int32), ("rank", c_int32),
                ("local_rank", c_int32), ("device", c_int32), ("join", c_uint32), ("timeout_ms", c_int64),
                ("init_method", c_char_p), ("ccl_library", c_char_p), ("store", POINTER(StoreCallbacks)),
                ("joining_out", POINTER(c_void_p))]


class WorldInfo(Structure):
    _fields_ = [("struct_size", c_size_t), ("rank", c_int32), ("size", c_int32), ("local_rank", c_int32),
                ("local_size", c_int32), ("host", c_int32), ("num_hosts", c_int32), ("device", c_int32),
                ("ccl_version", c_int32), ("device_type", c_char_p), ("library", c_char_p), ("epoch", c_int64),
                ("ticket", c_int64)]


class DimOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("flags", c_uint32), ("reserved", c_uint32), ("nccl_config", c_void_p), ("comm_name", c_char_p)]


class InitOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("flags", c_uint32), ("reserved", c_uint32), ("world", c_void_p), ("ranks", POINTER(c_int32)),
        ("num_ranks", c_size_t), ("dim_options", POINTER(DimOptions)), ("num_dim_options", c_size_t), ("timeout_ms", c_int64)]


class CallOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("flags", c_uint32), ("reserved", c_uint32), ("timeout_ms", c_int64),
                ("dim_options", POINTER(DimOptions)), ("num_dim_options", c_size_t)]


class RecoverOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("flags", c_uint32), ("min_size", c_int32), ("dim", c_char_p), ("timeout_ms", c_int64),
                ("replace_ms", c_int64), ("silent_ms", c_int64), ("dim_options", POINTER(DimOptions)), ("num_dim_options", c_size_t),
                ("max_size", c_int32), ("reserved", c_uint32)]


class Recovery(Structure):
    _fields_ = [("struct_size", c_size_t), ("epoch", c_int64), ("previous_epoch", c_int64), ("lost_ranks", POINTER(c_int32)),
                ("num_lost", c_size_t), ("joined_ranks", POINTER(c_int32)), ("num_joined", c_size_t),
                ("old_coordinate", POINTER(c_int32)), ("new_coordinate", POINTER(c_int32)), ("ndim", c_size_t),
                ("state_root", c_int32), ("has_joined", c_int32)]


class Event(Structure):
    _fields_ = [("struct_size", c_size_t), ("kind", c_int32), ("rank", c_int32), ("world_size", c_int32), ("reserved", c_uint32),
                ("epoch", c_int64), ("time_ns", c_int64), ("ranks", POINTER(c_int32)), ("num_ranks", c_size_t),
                ("group", c_char_p), ("dim", c_char_p), ("operation", c_char_p), ("call", c_int64),
                ("waited_seconds", c_double), ("dropped", c_uint64), ("message", c_char_p)]


class EventOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("flags", c_uint32), ("reserved", c_uint32), ("slow_ms", c_int64)]


class Placement(Structure):
    _fields_ = [("kind", c_int32), ("tensor_dim", c_int32), ("order", c_int32), ("reserved", c_uint32 * 5)]


class PlanOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("flags", c_uint32), ("world_size", c_int32),
                ("locations", POINTER(c_char_p)), ("shape", POINTER(c_int32)), ("ndim", c_size_t),
                ("traffic", POINTER(c_uint32))]


Log = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_char_p)
EventHandler = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Event))
CclResolver = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_char_p)
STATUS = c_int32
HANDLE = c_void_p
TEXT = c_char_p
NAMES = POINTER(c_char_p)
LENGTHS = POINTER(c_size_t)
RANKS = POINTER(c_int32)
HANDLE_OUT = POINTER(c_void_p)
MEMORY = c_void_p

# The result type and the argument types of each function.
FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "dm_status_name": (TEXT, [STATUS]),
    "dm_last_error": (TEXT, []),
    "dm_last_error_info": (STATUS, [POINTER(ErrorInfo)]),
    "dm_version": (c_uint32, []),
    "dm_set_log": (STATUS, [c_int32, Log, MEMORY]),
    "dm_world_init": (STATUS, [TEXT, POINTER(WorldOptions), HANDLE_OUT]),
    "dm_world_rank": (STATUS, [HANDLE, POINTER(c_int32)]),
    "dm_world_size": (STATUS, [HANDLE, POINTER(c_int32)]),
    "dm_get_world": (STATUS, [HANDLE, HANDLE_OUT]),
    "dm_default_world": (STATUS, [TEXT, c_int64, HANDLE_OUT]),
    "dm_world_get_info": (STATUS, [HANDLE, POINTER(WorldInfo)]),
    "dm_waiting": (STATUS, [HANDLE, POINTER(c_int32)]),
    "dm_world_barrier": (STATUS, [HANDLE, c_int64]),
    "dm_world_locations": (STATUS, [HANDLE, TEXT, c_int64, POINTER(NAMES)]),
    "dm_world_abort": (STATUS, [HANDLE]),
    "dm_default_world_abort": (STATUS, []),
    "dm_world_finalize": (STATUS, [HANDLE, c_int64]),
    "dm_default_world_finalize": (STATUS, [c_int64]),
    "dm_world_free": (None, [HANDLE]),
    "dm_init": (STATUS, [TEXT, RANKS, c_size_t, NAMES, POINTER(InitOptions), HANDLE_OUT]),
    "dm_from_comms": (STATUS, [TEXT, RANKS, c_size_t, NAMES, POINTER(c_void_p), POINTER(InitOptions), HANDLE_OUT]),
    "dm_serialize": (STATUS, [HANDLE, TEXT, c_size_t, LENGTHS]),
    "dm_deserialize": (STATUS, [TEXT, POINTER(InitOptions), HANDLE_OUT]),
    "dm_slice": (STATUS, [HANDLE, NAMES, c_size_t, HANDLE_OUT]),
    "dm_flatten": (STATUS, [HANDLE, TEXT, POINTER(CallOptions), HANDLE_OUT]),
    "dm_unflatten": (STATUS, [HANDLE, TEXT, RANKS, c_size_t, NAMES, POINTER(CallOptions), HANDLE_OUT]),
    "dm_reshape": (STATUS, [HANDLE, RANKS, c_size_t, NAMES, POINTER(CallOptions), HANDLE_OUT]),
    "dm_slice_range": (STATUS, [HANDLE, TEXT, c_int32, c_int32, c_int32, POINTER(CallOptions), HANDLE_OUT]),
    "dm_shrink": (STATUS, [HANDLE, TEXT, RANKS, c_size_t, POINTER(CallOptions), HANDLE_OUT]),
    "dm_recover": (STATUS, [HANDLE, POINTER(RecoverOptions), HANDLE_OUT, POINTER(Recovery)]),
    "dm_get_recovery": (STATUS, [HANDLE, POINTER(Recovery)]),
    "dm_concatenate": (STATUS, [POINTER(c_void_p), c_size_t, HANDLE_OUT]),
    "dm_root": (STATUS, [HANDLE, HANDLE_OUT]),
    "dm_submesh_count": (STATUS, [HANDLE, NAMES, c_size_t, RANKS]),
    "dm_submesh": (STATUS, [HANDLE, NAMES, c_size_t, c_int32, HANDLE_OUT]),
    "dm_clone": (STATUS, [HANDLE, HANDLE_OUT]),
    "dm_free": (None, [HANDLE]),
    "dm_ndim": (c_size_t, [HANDLE]),
    "dm_dim_name": (TEXT, [HANDLE, c_size_t]),
    "dm_shape": (STATUS, [HANDLE, RANKS, c_size_t, LENGTHS]),
    "dm_size": (STATUS, [HANDLE, TEXT, RANKS]),
    "dm_device_type": (TEXT, [HANDLE]),
    "dm_is_member": (STATUS, [HANDLE, POINTER(c_bool)]),
    "dm_rank": (STATUS, [HANDLE, RANKS]),
    "dm_get_local_rank": (STATUS, [HANDLE, TEXT, RANKS]),
    "dm_get_coordinate": (STATUS, [HANDLE, RANKS, c_size_t, LENGTHS]),
    "dm_coordinate_of": (STATUS, [HANDLE, c_int32, RANKS, c_size_t, LENGTHS]),
    "dm_ranks": (STATUS, [HANDLE, RANKS, c_size_t, LENGTHS]),
    "dm_group_ranks": (STATUS, [HANDLE, TEXT, RANKS, c_size_t, LENGTHS]),
    "dm_replica_groups": (STATUS, [HANDLE, TEXT, RANKS, c_size_t, LENGTHS]),
    "dm_equal": (STATUS, [HANDLE, HANDLE, POINTER(c_bool)]),
    "dm_hash": (STATUS, [HANDLE, POINTER(c_uint64)]),
    "dm_describe": (STATUS, [HANDLE, TEXT, c_size_t, LENGTHS]),
    "dm_translate_rank": (STATUS, [HANDLE, TEXT, c_int32, RANKS]),
    "dm_translate_world_rank": (STATUS, [HANDLE, TEXT, c_int32, RANKS]),
    "dm_neighbor": (STATUS, [HANDLE, TEXT, c_int32, c_bool, RANKS]),
    "dm_local_shard": (STATUS, [HANDLE, POINTER(Placement), c_size_t, LENGTHS, c_size_t, c_int32, LENGTHS, LENGTHS]),
    "dm_plan_ranks": (STATUS, [POINTER(PlanOptions), RANKS, TEXT, c_size_t, LENGTHS]),
    "dm_get_comm": (STATUS, [HANDLE, TEXT, HANDLE_OUT]),
    "dm_get_proc": (STATUS, [HANDLE, TEXT, HANDLE_OUT]),
    "dm_get_device_proc": (STATUS, [TEXT, TEXT, HANDLE_OUT]),
    "dm_set_ccl_resolver": (STATUS, [CclResolver, MEMORY]),
    "dm_all_reduce": (STATUS, [HANDLE, TEXT, MEMORY, MEMORY, c_size_t, c_int32, c_int32, MEMORY]),
    "dm_reduce": (STATUS, [HANDLE, TEXT, MEMORY, MEMORY, c_size_t, c_int32, c_int32, c_int32, MEMORY]),
    "dm_broadcast": (STATUS, [HANDLE, TEXT, MEMORY, MEMORY, c_size_t, c_int32, c_int32, MEMORY]),
    "dm_all_gather": (STATUS, [HANDLE, TEXT, MEMORY, MEMORY, c_size_t, c_int32, MEMORY]),
    "dm_reduce_scatter": (STATUS, [HANDLE, TEXT, MEMORY, MEMORY, c_size_t, c_int32, c_int32, MEMORY]),
    "dm_all_to_all": (STATUS, [HANDLE, TEXT, MEMORY, MEMORY, c_size_t, c_int32, MEMORY]),
    "dm_all_to_allv": (STATUS, [HANDLE, TEXT, MEMORY, LENGTHS, LENGTHS, MEMORY, LENGTHS, LENGTHS, c_int32, MEMORY]),
    "dm_all_gatherv": (STATUS, [HANDLE, TEXT, MEMORY, MEMORY, LENGTHS, LENGTHS, c_int32, MEMORY]),
    "dm_reduce_scatterv": (STATUS, [HANDLE, TEXT, MEMORY, LENGTHS, LENGTHS, MEMORY, c_int32, c_int32, MEMORY]),
    "dm_send": (STATUS, [HANDLE, TEXT, MEMORY, c_size_t, c_int32, c_int32, MEMORY]),
    "dm_recv": (STATUS, [HANDLE, TEXT, MEMORY, c_size_t, c_int32, c_int32, MEMORY]),
    "dm_group_start": (STATUS, [HANDLE]),
    "dm_group_end": (STATUS, [HANDLE]),
    "dm_barrier": (STATUS, [HANDLE, TEXT, c_int64]),
    "dm_all_gather_bytes": (STATUS, [HANDLE, TEXT, MEMORY, c_size_t, c_int64, HANDLE_OUT]),
    "dm_broadcast_bytes": (STATUS, [HANDLE, TEXT, MEMORY, c_size_t, c_int32, c_int64, HANDLE_OUT]),
    "dm_world_all_gather_bytes": (STATUS, [HANDLE, MEMORY, c_size_t, c_int64, HANDLE_OUT]),
    "dm_world_broadcast_bytes": (STATUS, [HANDLE, MEMORY, c_size_t, c_int32, c_int64, HANDLE_OUT]),
    "dm_buffers_count": (c_size_t, [HANDLE]),
    "dm_buffers_get": (STATUS, [HANDLE, c_size_t, HANDLE_OUT, LENGTHS]),
    "dm_buffers_free": (None, [HANDLE]),
    "dm_check": (STATUS, [HANDLE, TEXT]),
    "dm_stream_wait": (STATUS, [HANDLE, TEXT, MEMORY, c_int64]),
    "dm_abort": (STATUS, [HANDLE]),
    "dm_finalize": (STATUS, [HANDLE, POINTER(CallOptions)]),
    "dm_lost_ranks": (STATUS, [HANDLE, RANKS, c_size_t, LENGTHS]),
    "dm_register": (STATUS, [HANDLE, TEXT]),
    "dm_unregister": (STATUS, [TEXT]),
    "dm_lookup": (STATUS, [TEXT, HANDLE_OUT]),
    "dm_set_event_handler": (STATUS, [EventHandler, MEMORY, POINTER(EventOptions)]),
    "dm_events_open": (STATUS, [POINTER(EventOptions), HANDLE_OUT]),
    "dm_events_fd": (STATUS, [HANDLE, POINTER(c_int32)]),
    "dm_events_next": (STATUS, [HANDLE, c_int64, POINTER(Event)]),
    "dm_events_free": (None, [HANDLE]),
    "dm_metrics": (STATUS, [TEXT, c_size_t, LENGTHS]),
}

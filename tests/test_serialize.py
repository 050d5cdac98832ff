"""Python's json reads and writes the text of a mesh from the description of the format alone. The
results are compared with dm_ranks and dm_equal."""

import ctypes
import importlib.util
import itertools
import json

import pytest

from support.paths import LIBRARY, ROOT

OFFLINE = 1

lib = ctypes.CDLL(str(LIBRARY / "libdevicemesh.so"))
lib.dm_last_error.restype = ctypes.c_char_p


def declarations():
    """The package's declarations of the C structs, without the package, which would load a library
    of its own."""
    spec = importlib.util.spec_from_file_location("declarations", ROOT / "bindings/python/devicemesh/_declarations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DECLARED = declarations()
WorldOptions, InitOptions = DECLARED.WorldOptions, DECLARED.InitOptions


def check(status):
    assert status == 0, lib.dm_last_error().decode()


def names_of(names):
    return (ctypes.c_char_p * len(names))(*[name.encode() for name in names])


def world_options(size, rank):
    options = WorldOptions(struct_size=ctypes.sizeof(WorldOptions), flags=OFFLINE, world_size=size, rank=rank)
    world = ctypes.c_void_p()
    check(lib.dm_world_init(b"cuda", ctypes.byref(options), ctypes.byref(world)))
    return InitOptions(struct_size=ctypes.sizeof(InitOptions), world=world)


def mesh_of(options, shape, names, ranks=None):
    options = InitOptions(struct_size=options.struct_size, world=options.world)
    if ranks:
        options.ranks, options.num_ranks = (ctypes.c_int32 * len(ranks))(*ranks), len(ranks)
    mesh = ctypes.c_void_p()
    check(lib.dm_init(None, (ctypes.c_int32 * len(shape))(*shape), ctypes.c_size_t(len(shape)), names_of(names), ctypes.byref(options),
                      ctypes.byref(mesh)))
    return mesh


def view(function, mesh, *arguments):
    made = ctypes.c_void_p()
    check(function(mesh, *arguments, ctypes.byref(made)))
    return made


def sliced(mesh, *names):
    return view(lib.dm_slice, mesh, names_of(names), ctypes.c_size_t(len(names)))


def text_of(mesh):
    length = ctypes.c_size_t()
    assert lib.dm_serialize(mesh, None, ctypes.c_size_t(0), ctypes.byref(length)) == 5  # DM_STATUS_BUFFER_TOO_SMALL
    text = ctypes.create_string_buffer(length.value)
    check(lib.dm_serialize(mesh, text, length, ctypes.byref(length)))
    return text.value.decode()


def ranks_of(mesh):
    length = ctypes.c_size_t()
    lib.dm_ranks(mesh, None, ctypes.c_size_t(0), ctypes.byref(length))
    ranks = (ctypes.c_int32 * length.value)()
    check(lib.dm_ranks(mesh, ranks, length, ctypes.byref(length)))
    return list(ranks)


def read(text):
    """The ranks that a text says, row-major."""
    mesh = json.loads(text)
    assert mesh["devicemesh"] == 1
    listed = [first + index * (step[0] if step else 1) for first, count, *step in mesh["ranks"] for index in range(count)]
    places = [mesh["base"]]
    for size, stride in itertools.chain(*mesh["layout"]):
        places = [place + digit * stride for place in places for digit in range(size)]
    return [listed[place] for place in places]


def write(shape, names, ranks):
    """The plainest text there is: each rank a run, each dimension a pair, and the spaces of
    json.dumps."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return json.dumps({"ranks": [[rank, 1] for rank in ranks], "layout": [[pair] for pair in zip(shape, strides)], "base": 0,
                       "shape": shape, "names": names, "device_type": "cuda", "devicemesh": 1}, indent=2)


SHAPE, NAMES = (2, 3, 4), ["dp", "cp", "tp"]
DEALT = [(7 * index + 3) % 29 for index in range(24)]
# Views of a mesh of that shape, by name.
VIEWS = {
    "mesh": lambda mesh: mesh, "turned": lambda mesh: sliced(mesh, "tp", "dp"),
    "flat": lambda mesh: view(lib.dm_flatten, sliced(mesh, "tp", "dp"), b"flat", None),
    "halves": lambda mesh: view(lib.dm_unflatten, VIEWS["flat"](mesh), b"flat", (ctypes.c_int32 * 2)
                                (2, 4), ctypes.c_size_t(2), names_of(["far", "near"]), None),
    "copy": lambda mesh: view(lib.dm_submesh, mesh, names_of(["cp"]), ctypes.c_size_t(1), ctypes.c_int32(5)),
    "one dimension": lambda mesh: sliced(mesh, "cp"), "no dimension": lambda mesh: sliced(mesh),
}


@pytest.mark.parametrize("ranks", [None, DEALT], ids=["row-major", "dealt"])
@pytest.mark.parametrize("name", VIEWS)
def test_view_through_json(name, ranks):
    options = world_options(30, 17)
    assert 17 in DEALT
    mesh = VIEWS[name](mesh_of(options, SHAPE, NAMES, ranks))
    text, ranks = text_of(mesh), ranks_of(mesh)
    assert read(text) == ranks, text
    said = json.loads(text)
    for text in (text, write(said["shape"], said["names"], ranks)):
        again = ctypes.c_void_p()
        check(lib.dm_deserialize(text.encode(), ctypes.byref(options), ctypes.byref(again)))
        equal = ctypes.c_bool()
        check(lib.dm_equal(mesh, again, ctypes.byref(equal)))
        assert equal.value, text
        assert read(text_of(again)) == ranks


def test_a_million_ranks_are_a_short_text():
    million = text_of(mesh_of(world_options(1 << 20, 777777), (64, 32, 64, 8), ["pp", "dp", "cp", "tp"]))
    assert len(million) < 200 and read(million) == list(range(1 << 20)), million

"""The binding declares what include/devicemesh.h declares: every function with its types, every
struct, every number."""

import ctypes
import os
import re
import unittest
from pathlib import Path

from devicemesh import _declarations as declarations
from devicemesh import constants, errors

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parents[3]))
HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "include/devicemesh.h").read_text(), flags=re.S)
POINTER = ctypes.POINTER
VALUES = {
    "dm_status": ctypes.c_int32, "dm_dtype": ctypes.c_int32, "dm_op": ctypes.c_int32, "dm_log_level": ctypes.c_int32, "dm_event_kind": ctypes.c_int32,
    "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t, "bool": ctypes.c_bool, "ncclComm_t": ctypes.c_void_p, "double": ctypes.c_double,
    "void": None
}
STRUCTS = {
    "dm_error_info": declarations.ErrorInfo, "dm_store_callbacks": declarations.StoreCallbacks,
    "dm_world_options": declarations.WorldOptions, "dm_dim_options": declarations.DimOptions, "dm_init_options":
        declarations.InitOptions, "dm_call_options": declarations.CallOptions, "dm_world_info": declarations.WorldInfo,
    "dm_placement": declarations.Placement, "dm_plan_options": declarations.PlanOptions,
    "dm_recover_options": declarations.RecoverOptions, "dm_recovery": declarations.Recovery,
    "dm_event": declarations.Event, "dm_event_options": declarations.EventOptions
}


def ctype(text):
    """The ctypes type of a C type."""
    stars = text.count("*")
    word = " ".join(word for word in text.replace("*", " ").split() if word not in ("const", "struct"))
    if word == "char":
        base, stars = ctypes.c_char_p, stars - 1
    elif word in ("dm_mesh", "dm_world", "dm_buffers", "dm_events") or (word == "void" and stars):
        base, stars = ctypes.c_void_p, stars - 1
    else:
        base = STRUCTS.get(word) or VALUES[word]
    for _ in range(stars):
        base = POINTER(base)
    return base


def parameter(text):
    """The type of a declaration "type name", or of a function pointer."""
    callback = re.match(r"\s*(.*)\(\*\w+\)\((.*)\)$", text.strip(), re.S)
    if callback:
        return ctypes.CFUNCTYPE(ctype(callback.group(1)), *(parameter(part) for part in callback.group(2).split(",")))
    return ctype(re.sub(r"\w+$", "", text.strip()))


class Header(unittest.TestCase):
    def test_every_function_is_declared_with_its_types(self):
        found = {}
        for result, name, parameters in re.findall(r"^((?:const )?[\w]+ \*?)(dm_\w+)\(([^;]*)\);", HEADER, re.M):
            parts = [] if parameters.strip() == "void" else re.split(r",(?![^(]*\))", parameters)
            found[name] = (ctype(result), [parameter(part) for part in parts])
        self.assertEqual(len(found), len(re.findall(r"\bdm_\w+\([^;]*\);", HEADER)), "the pattern read the whole header")
        self.assertGreaterEqual(len(found), 69)
        for name, signature in found.items():
            self.assertEqual(declarations.FUNCTIONS.get(name), signature, name)
        self.assertEqual(set(declarations.FUNCTIONS), set(found))

    def test_every_function_is_called_somewhere(self):
        package = Path(declarations.__file__).parent
        source = "".join(path.read_text() for path in package.glob("*.py"))
        unused = [name for name in declarations.FUNCTIONS if not re.search(rf"(library|found)\.{name}\b", source)]
        self.assertEqual(unused, [])

    def test_every_struct_has_the_same_fields(self):
        found = re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", HEADER, re.S)
        self.assertEqual({name for name, _ in found}, set(STRUCTS))
        for name, body in found:
            fields = []
            for line in (line.strip() for line in body.split(";")):
                callback = re.match(r"(\w+) \(\*(\w+)\)\((.*)\)$", line, re.S)
                if callback:
                    result, field, parameters = callback.groups()
                    fields.append((field, ctypes.CFUNCTYPE(VALUES[result], *(parameter(part) for part in parameters.split(",")))))
                elif line.endswith("]"):
                    element, field, count = re.match(r"(\w+) (\w+)\[(\d+)\]$", line).groups()
                    fields.append((field, VALUES[element] * int(count)))
                elif line:
                    fields.append((re.search(r"\w+$", line).group(), parameter(line)))
            self.assertEqual(fields, STRUCTS[name]._fields_, name)

    def test_every_number_is_the_headers(self):
        numbers = {name: int(value) for name, value in re.findall(r"#define DM_(\w+) (\d+)", HEADER)}
        statuses = {name[len("STATUS_"):]: value for name, value in numbers.items() if name.startswith("STATUS_")}
        self.assertEqual(set(errors.BY_STATUS), set(statuses.values()) - {0})
        for name, value in statuses.items():
            if value:
                kind = errors.BY_STATUS[value].__name__.replace("MeshTimeout", "Timeout")
                self.assertEqual(kind.lower(), name.replace("_", "").lower() + "error")
        for kind in (constants.DType, constants.ReduceOp):
            for member in kind:
                self.assertEqual(numbers.pop(member.name), member)
        flags = {name: value for name, value in numbers.items() if not name.startswith("STATUS_")}
        self.assertEqual(flags, {name: getattr(declarations, name) for name in flags})


if __name__ == "__main__":
    unittest.main()

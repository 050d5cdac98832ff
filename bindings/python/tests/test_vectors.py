"""Asks this package what was asked of real PyTorch (2.15): tests/vectors/torch_device_mesh.jsonl,
and the deliberate differences.

The rules for those are the ones of tests/mesh_vectors.rs, which has the reason for each.
"""

import collections
import json
import os
import unittest
from pathlib import Path

import devicemesh
from devicemesh import DeviceMesh, DeviceMeshError, World, init_device_mesh

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parents[3]))
VECTORS = ROOT / "tests/vectors/torch_device_mesh.jsonl"
REFUSALS = (DeviceMeshError, IndexError, TypeError)


def flat(nested):
    if isinstance(nested, list):
        return [number for part in nested for number in flat(part)]
    return [nested]


class Replay:
    """One case: a world, a mesh, and what was done with it."""

    def __init__(self, case, seen):
        self.seen, self.label = seen, f"case {case['case']} root"
        self.meshes, self.flattened, self.unmade = {}, set(), set()
        self.failures = []
        constructor = case["ctor"]
        self.named = constructor.get("names") is not None
        ranks = flat(constructor.get("ranks", []))
        self.permuted = ranks != sorted(set(ranks))
        self.world = World("cpu", world_size=case["world"], rank=case["rank"], offline=True)
        device, names = constructor.get("device_type", "cpu"), constructor.get("names")
        try:
            if constructor["kind"] == "array":
                made = DeviceMesh(device, constructor["ranks"], mesh_dim_names=names, world=self.world)
            else:
                made = init_device_mesh(device, constructor["shape"], mesh_dim_names=names, world=self.world)
        except REFUSALS as error:
            if "ok" not in case["root"]:
                self.agree()
            elif "listed twice" in str(error):
                self.differ("a rank that is listed twice is refused")
            elif "is out of range" in str(error):
                self.differ("a rank outside the world is refused")
            else:
                self.fail(f"ours refuses: {error}")
        else:
            if "ok" in case["root"]:
                self.view(made, case["root"]["ok"])
                self.meshes["root"] = made
            else:
                self.fail(f"ours makes {made}, PyTorch says {case['root']}")
        for index, operation in enumerate(case["ops"]):
            self.label = f"case {case['case']} op {index} {({key: value for key, value in operation.items() if key != 'result'})}"
            self.operate(operation)

    def agree(self):
        self.seen["agree"] += 1

    def differ(self, why):
        self.seen[why] += 1

    def fail(self, what):
        self.failures.append(f"{self.label}: {what}")

    def operate(self, operation):
        kind, mesh = operation["op"], self.meshes.get(operation["on"])
        others = [self.meshes.get(name) for name in [*operation.get("others", []), *([operation["other"]] if "other" in operation else [])]]
        if mesh is None or None in others or kind == "from_group":
            self.seen["not of this layer"] += 1
            if mesh is None and operation.get("name"):
                self.unmade.add(operation["name"])
            return
        expected = operation["result"].get("ok")
        if kind == "eq":
            ours = mesh == others[0]
            if ours and hash(mesh) != hash(others[0]):
                self.fail("equal meshes have different hashes")
            self.agree() if ours == expected[0] else self.fail(f"equal {ours}")
        elif kind == "all_submeshes":
            self.compare(lambda: [list(each.ranks) for each in mesh._get_all_submeshes(operation["name"])],
                         [flat(each) for each in expected or []], operation)
        elif kind == "get_group":
            self.compare(lambda: list(mesh.get_group(operation["dim"]).ranks), expected, operation)
        elif kind == "get_local_rank":
            self.compare(lambda: mesh.get_local_rank(operation["dim"]), expected, operation)
        else:
            self.make(mesh, others, operation, expected)

    def compare(self, ask, expected, operation):
        try:
            ours = ask()
        except REFUSALS as error:
            if "ok" not in operation["result"]:
                self.agree()
            elif operation.get("dim") in self.flattened:
                self.differ("flattened names are known to every view that holds their dimensions, and to no other")
            else:
                self.fail(f"ours refuses ({error}), PyTorch gives {expected}")
            return
        if "ok" not in operation["result"]:
            if not self.named:
                self.differ("a mesh without names has dim_0, dim_1 ...")
            elif operation.get("dim") in self.flattened:
                self.differ("flattened names are known to every view that holds their dimensions, and to no other")
            else:
                self.fail(f"ours gives {ours}, PyTorch refuses")
        elif ours == expected:
            self.agree()
        elif self.is_permuted(self.meshes[operation["on"]]) and (not isinstance(ours, list) or sorted(ours) == sorted(expected)):
            self.differ("groups of permuted meshes keep coordinate order; PyTorch sorts them")
        else:
            self.fail(f"ours {ours}, PyTorch {expected}")

    def make(self, mesh, others, operation, expected):
        try:
            if operation["op"] == "slice":
                names = operation["names"]
                made = mesh[names[0]] if operation["as_str"] else mesh[tuple(names)]
            elif operation["op"] == "flatten":
                made = mesh._flatten(operation["name"])
            elif operation["op"] == "unflatten":
                made = mesh._unflatten(operation["dim"], operation["sizes"], operation["names"])
            else:
                made = DeviceMesh._concatenate([mesh, *others])
        except REFUSALS as error:
            if expected is None:
                self.agree()
            elif "is repeated in" in str(error) or any(f"dimension {name} does" in str(error) for name in self.unmade):
                self.differ("slice, unflatten and concatenate refuse repeated names")
            else:
                self.fail(f"ours refuses ({error}), PyTorch gives {expected['repr']}")
            return
        if expected is not None:
            self.view(made, expected)
            if operation["op"] == "flatten":
                self.flattened.update(made.mesh_dim_names or ())
            if operation.get("id"):
                self.meshes[operation["id"]] = made
            return
        message = operation["result"]["msg"]
        if not self.named:
            self.differ("a mesh without names has dim_0, dim_1 ...")
        elif "should be in ascending order" in message:
            self.differ("slices take names in any order")
        elif "Valid mesh_dim_names are" in message and self.flattened.intersection(operation.get("names", ())):
            self.differ("flattened names are known to every view that holds their dimensions, and to no other")
        else:
            self.fail(f"ours makes {made}, PyTorch refuses: {message}")

    def view(self, mesh, expected):
        wrong = []

        def expect(what, ours, theirs):
            if ours != theirs:
                wrong.append(f"{what}: ours {ours}, PyTorch {theirs}")

        expect("shape", list(mesh.shape), expected["shape"])
        expect("ndim", mesh.ndim, expected["ndim"])
        expect("size", mesh.size(), expected["size"])
        expect("repr", repr(mesh), expected["repr"])
        expect("names", None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names), expected["names"])
        coordinate = mesh.get_coordinate()
        expect("coordinate", None if coordinate is None else list(coordinate), expected["coordinate"])
        if expected["mesh"] is not None:
            expect("mesh", mesh.mesh.tolist(), expected["mesh"])
        if coordinate is not None and isinstance(expected.get("groups"), list):
            groups = [list(group.ranks) for group in mesh.get_all_groups()]
            theirs = expected["groups"]
            if groups != theirs and [sorted(group) for group in groups] == [sorted(group) for group in theirs] and self.is_permuted(mesh):
                self.differ("groups of permuted meshes keep coordinate order; PyTorch sorts them")
            else:
                expect("groups", groups, theirs)
                expect("local_ranks", [mesh.get_local_rank(index) for index in range(mesh.ndim)], expected["local_ranks"])
        self.fail("; ".join(wrong)) if wrong else self.agree()

    def is_permuted(self, mesh):
        return self.permuted or any(list(group.ranks) != sorted(group.ranks) for group in mesh.get_all_groups())


class Vectors(unittest.TestCase):
    def test_every_answer_is_pytorchs_or_a_listed_difference(self):
        seen, failures = collections.Counter(), []
        lines = VECTORS.read_text().splitlines()
        self.assertEqual(len(lines), 437)
        for line in lines:
            failures += Replay(json.loads(line), seen).failures
        self.assertFalse(failures, f"{len(failures)} answers differ; the first:\n" + "\n".join(failures[:12]))
        self.assertGreater(seen["agree"], 2000)
        self.assertEqual(len(seen), 9, f"a rule that no case needs is gone: {seen}")
        print(f"libdevicemesh {devicemesh.__version__}: {dict(seen)}")


if __name__ == "__main__":
    unittest.main()

"""Where the ranks of device type cpu are: which of them share memory, what dm_world_get_info and
dm_world_locations say of it, and that a job on one host needs no network of its own. The hosts are
names (DM_HOSTCCL_HOST) on the loopback device."""

import re
import sys

import pytest

from support.paths import LIBRARY, ROOT

OURS = {"PYTHONPATH": ROOT / "bindings/python", "DM_LIBRARY": LIBRARY / "libdevicemesh.so"}
# One rank: makes a mesh, sums, and says where it is and how many sockets of its own listen.
PROGRAM = """
import array, os, re
import devicemesh
size = int(os.environ["WORLD_SIZE"])
mesh = devicemesh.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
numbers = array.array("f", [mesh.get_rank() + 1.0] * 5)
mesh.get_group("x").all_reduce(numbers)
world = mesh.world
sockets = set()
for descriptor in os.listdir("/proc/self/fd"):
    try:
        sockets.update(re.findall(r"^socket:.(\\d+).$", os.readlink("/proc/self/fd/" + descriptor)))
    except OSError:
        pass
listening = [line.split() for table in ("tcp", "tcp6") for line in open("/proc/self/net/" + table).readlines()[1:]]
mine = sum(line[3] == "0A" and line[9] in sockets for line in listening)
print(f"sums {sorted(set(numbers))} host {world.host} of {world.num_hosts} local {world.local_rank} of {world.local_size} listens {mine}"
      f" locations {' '.join(world.locations())}")
mesh.finalize()
"""


def said(ranks):
    """(host, number of hosts, local rank, local size, listening sockets, locations) of each rank,
    whose sums are right."""
    outputs = ranks.outputs()
    size = len(outputs)
    line = rf"sums \[{size * (size + 1) / 2}\] host (\d+) of (\d+) local (\d+) of (\d+) listens (\d+) locations (.*)\n"
    found = [re.fullmatch(line, output) for output in outputs]
    assert all(found), "".join(outputs)
    return [(*map(int, match.groups()[:5]), match.group(6).split()) for match in found]


@pytest.fixture
def start(start_ranks):
    def start(hosts, **variables):
        """Starts a rank for each host that is named; "" names none, and "0" switches the shared
        memory off."""
        def each(rank):
            return {"": {}, "0": {"DM_HOSTCCL_SHM": "0"}}.get(hosts[rank], {"DM_HOSTCCL_HOST": hosts[rank]})
        return said(start_ranks([sys.executable, "-c", PROGRAM], len(hosts), variables={**OURS, **variables}, each=each))

    return start


def test_one_host(start):
    """Rank 0 listens for the store, and nobody else listens at all."""
    found = start(["", "", ""])
    assert [place[:5] for place in found] == [(0, 1, 0, 3, 1), (0, 1, 1, 3, 0), (0, 1, 2, 3, 0)]
    assert all(len(set(place[5])) == 1 for place in found), found


def test_named_hosts(start):
    """Ranks of one name share memory; all ranks listen, because they are on several hosts."""
    found = start(["alpha", "beta", "alpha", "beta"])
    assert [place[:2] for place in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert all(place[5] == ["alpha", "beta", "alpha", "beta"] for place in found), found
    assert all(place[4] >= 1 for place in found), f"a rank does not listen: {found}"


def test_no_shared_memory(start):
    """Each process is a host of its own, and their names differ."""
    found = start(["0", "0", "0"])
    assert [place[:2] for place in found] == [(0, 3), (1, 3), (2, 3)]
    first = found[0][5][0]
    assert all(place[5] == [first, f"{first}#2", f"{first}#3"] for place in found), found


def test_one_rank_shares_no_memory(start):
    """The others are on one host as always."""
    found = start(["", "0", ""])
    assert [place[:2] for place in found] == [(0, 2), (1, 2), (0, 2)]

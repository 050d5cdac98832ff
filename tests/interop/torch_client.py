"""Sends every operation of torch.distributed.TCPStore and PrefixStore to the store that
MASTER_ADDR and MASTER_PORT name, and checks the answers."""

import datetime
import os

import torch.distributed as dist
from ours import say

seconds = lambda number: datetime.timedelta(seconds=number)
rank = int(os.environ["RANK"])
base = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=seconds(30))


def raises(error, body):
    try:
        body()
    except error:
        return True
    return False


def everything(store):
    store.set("key", "value")
    assert store.get("key") == b"value"
    store.set("empty", "")
    assert store.get("empty") == b""
    large = "x" * (1 << 20)
    store.set("large", large)
    assert store.get("large") == large.encode()
    assert store.add("count", 5) == 5 and store.add("count", -1) == 4 and store.get("count") == b"4"
    assert store.compare_set("chosen", "", "a") == b"a"
    assert store.compare_set("chosen", "a", "b") == b"b"
    assert store.compare_set("chosen", "other", "c") == b"b"
    assert store.check(["key", "count"]) and not store.check(["key", "nothing"])
    store.append("list", "1")
    store.append("list", "23")
    assert store.get("list") == b"123"
    store.multi_set(["m1", "m2"], ["one", "two"])
    assert store.multi_get(["m1", "m2"]) == [b"one", b"two"]
    store.wait(["m1", "m2"], seconds(10))
    assert raises(dist.DistStoreError, lambda: store.wait(["nothing"], datetime.timedelta(milliseconds=200)))
    assert store.get("key") == b"value", "in step after a wait that ran out"
    assert store.delete_key("m1") and not store.delete_key("m1")
    store.queue_push("queue", "first")
    store.queue_push("queue", "second")
    assert store.queue_len("queue") == 2
    assert store.queue_pop("queue") == b"first" and store.queue_pop("queue") == b"second"
    assert raises(dist.QueueEmptyError, lambda: store.queue_pop("queue", block=False))
    if hasattr(store, "list_keys"):
        # Queues are listed too, and the plain store lists the other's keys.
        assert {"key", "empty", "large", "count", "chosen", "list", "m2"} <= set(store.list_keys()), store.list_keys()
    assert store.num_keys() >= 7


if rank == 0:
    everything(base)
    everything(dist.PrefixStore("outer", dist.PrefixStore("inner", base)))
    base.set("finished", "1")
base.wait(["finished"])
# A waiting pop, and a barrier of both ranks, where this PyTorch has one.
if rank == 0:
    assert base.queue_pop("handed over") == b"here"
else:
    base.queue_push("handed over", "here")
had = ["queues"]
if hasattr(base, "barrier"):
    base.barrier("gate", 2, seconds(20))
    had.append("barrier")
say(f"every operation fine: rank {rank}, with {' and '.join(had)}")

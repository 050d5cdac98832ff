"""Which copy of NCCL the programs of this folder use: for those that run beside PyTorch or JAX,
the copy that the framework has loaded, because a communicator is valid only in the copy that made
it."""

import os


def loaded():
    """The paths of every libnccl.so that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sorted({line.split(maxsplit=5)[5].strip() for line in maps if "/libnccl.so" in line})


def follow_loaded():
    """Names the loaded copy in DM_CCL_LIBRARY, and returns it; None where no copy is loaded."""
    copies = loaded()
    if copies:
        os.environ["DM_CCL_LIBRARY"] = copies[0]
    return copies[0] if copies else None


def seen(what, text):
    """One line of what was seen; run.sh puts it into results.md."""
    os.write(1, f"SEEN|{what}|rank {os.environ.get('RANK', '0')}: {' '.join(str(text).split())[:1000]}\n".encode())


def skip(why):
    os.write(1, f"WHY={why}\n".encode())
    os._exit(77)

"""A script in the place of ssh, and jobs of `devicemesh run --hosts` that start through it. Test
files import the fixtures `rsh` and `start`."""

import os
import subprocess

import pytest

from .paths import TOOL
from .processes import children, environment, kill_all, wait_until
from .tool import PATIENCE, SLEEP

# The script in the place of ssh. It notes its arguments. The hosts have none of the variables whose
# names begin with MINE, DM_ or NCCL_.
RSH = """\
#!/bin/sh
echo "$@" >> {folder}/started
host=$1; shift
case $host in
  ancient) echo "error: unrecognized subcommand 'agent'" >&2; exit 2;;
  denied|*@denied) echo "Warning: Permanently added '$host' (ED25519) to the list of known hosts." >&2; echo "Warning: noise" >&2; echo "$host: Permission denied (publickey)." >&2; exit 255;;
  lost) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255;;
  nologin) echo "This account is currently not available."; exit 1;;
  silent*) exec sleep 1000;;
  asking) echo "Welcome to $host!"; printf 'Press a key: '; exec sleep 1000;;
  through*) sleep 1000; exit 1;;
  flooding) yes | head -c 3000000; printf 'Have fun: ';;
  chatty) echo "Welcome to $host!"; echo "2 updates" >&2; printf 'Have fun: ';;
  master) setsid -f sh -c 'echo $$ > {folder}/master; exec sleep 1000' > /dev/null 2>&1 < /dev/null;;
  old) printf '\\037devicemesh-agent {{"hello":{{"version":"0.0.1","port":1}}}}\\n' >&2; exec sleep 1000;;
esac
unset $(env | sed -n 's/^\\(\\(MINE\\|DM_\\|NCCL_\\)[A-Z_]*\\)=.*/\\1/p')
case $host in
  secretive) export DM_STORE_SECRET=hush;;
esac
case $host in
  relay) echo $$ > {folder}/relay; sh -c "$*"; exit $?;;
  deaf) sh -c "$*"; read line < {folder}/heard; exit 1;;
  late) sh -c "$*" | {{ sleep 3; cat; }}; exit;;
  apart) exec unshare --user --map-root-user --net sh -c "$*";;
esac
exec sh -c "$*"
"""


@pytest.fixture
def rsh(tmp_path):
    path = tmp_path / "rsh"
    path.write_text(RSH.format(folder=tmp_path))
    path.chmod(0o755)
    return path


@pytest.fixture
def start(rsh, free_port, tmp_path):
    """Starts a job on several hosts, each of which is this machine."""
    started, terminals = [], []

    def one(hosts, script=SLEEP, *options, without=("DM_STORE_SECRET", "DM_RSH", "NCCL_"), grace=1, endpoint=None, inside=(), terminal=False, errors=subprocess.PIPE, rsh=rsh, **variables):
        command = [*inside, TOOL, "run", "--rsh-agent", rsh, "--hosts", hosts, "--rdzv-endpoint", endpoint or f"127.0.0.1:{free_port()}",
                   "--grace-period", grace, *options, "--", "/bin/sh", "-c", script]
        ours, theirs = os.openpty() if terminal else (None, errors)
        started.append(subprocess.Popen(list(map(str, command)), env=environment(without=without, **variables), cwd=tmp_path, text=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs))
        if terminal:
            os.close(theirs)
            terminals.append(ours)
            started[-1].terminal = ours
        return started[-1]

    yield one
    kill_all(started)
    for terminal in terminals:
        os.close(terminal)


def keeper_of(process):
    wait_until(lambda: children(process.pid), "dm-ranks runs", PATIENCE)
    return children(process.pid)[0]

"""Debian's sshd on the hosts of tests/netlab.py, with keys and a configuration of its own in a
folder of the test. Needs root, because sshd changes its user."""

import os
import shutil
import socket
import subprocess

from support.pinned import Unavailable
from support.processes import wait_until

PORT = 2222
SERVER = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
PrintMotd no
"""
CLIENT = """\
Host *
  Port {port}
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
"""


class Sshd:
    """Runs an sshd on each of these hosts of a lab. `agent` is the command that reaches them."""

    def __init__(self, lab, names, folder):
        server = shutil.which("sshd", path=f"/usr/sbin:{os.environ['PATH']}")
        if not server or not shutil.which("ssh"):
            raise Unavailable("no sshd here (Debian: apt-get install openssh-server)")
        if os.geteuid() != 0:
            raise Unavailable("sshd needs root")
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "sshd_config").write_text(SERVER.format(port=PORT, folder=folder))
        (folder / "ssh_config").write_text(CLIENT.format(port=PORT, folder=folder))
        self.agent, self.servers = f"ssh -F {folder}/ssh_config", {}
        # sshd wants the folder /run/sshd, which each host gets in a /run of its own.
        script = f"mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec {server} -D -e -f {folder}/sshd_config"
        for name in names:
            with open(folder / f"sshd.{name}.log", "wb") as log:
                self.servers[name] = lab.spawn(name, ["sh", "-c", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for name in names:
            wait_until(lambda name=name: self.is_there(lab, name, folder), f"the sshd of {name} listens")

    def is_there(self, lab, name, folder):
        assert self.servers[name].poll() is None, (folder / f"sshd.{name}.log").read_text()
        with lab.hosts[name].socket(socket.AF_INET) as attempt:
            return attempt.connect_ex(("127.0.0.1", PORT)) == 0

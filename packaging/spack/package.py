# Copyright 2026 The libdevicemesh authors. Licensed under Apache-2.0 or MIT.
"""A package for Spack 1.0 or later, for a repository of one's own. It builds the tarball of
`make dist`, which has all crates, so cargo needs no network. Spack looks for the tarball in
/var/cache/libdevicemesh.

    spack repo create ~/repo devicemesh
    mkdir -p ~/repo/spack_repo/devicemesh/packages/libdevicemesh
    cp packaging/spack/package.py ~/repo/spack_repo/devicemesh/packages/libdevicemesh/
    spack repo add ~/repo/spack_repo/devicemesh && spack install --no-checksum libdevicemesh

A package for Spack's own repository names the tarball's address and SHA-256 (SHA256SUMS)."""

from spack.package import *
from spack_repo.builtin.build_systems.makefile import MakefilePackage


class Libdevicemesh(MakefilePackage):
    """PyTorch's DeviceMesh without Python: ready communicators for every mesh dimension, behind a
    C ABI."""

    license("Apache-2.0 OR MIT")

    version("0.2.0")

    # Copy the tarball to this place. A release with a public address has this address here.
    url = "file:///var/cache/libdevicemesh/devicemesh-0.2.0.tar.gz"

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("rust@1.85:", type="build")
    depends_on("gmake", type="build")
    # NCCL is opened when a program asks for device type cuda, so nothing is linked to it.

    conflicts("platform=darwin", msg="libdevicemesh runs on Linux")

    def setup_build_environment(self, env):
        env.set("CARGO_NET_OFFLINE", "true")
        # Spack's own compiler wrapper is the linker.
        env.set("CC", spack_cc)

    def build(self, spec, prefix):
        cargo = which("cargo", required=True)
        cargo("build", "--release", "--locked", "--quiet")

    def install(self, spec, prefix):
        make("install", f"PREFIX={prefix}")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_install(self):
        Executable(self.prefix.bin.devicemesh)("show", "2,4", "replicate,shard", "--rank", "6")

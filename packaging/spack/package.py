# Copyright 2026 The libdevicemesh authors. Licensed under Apache-2.0 or MIT.
"""A package for Spack, for a repository of one's own or for Spack's. It builds the tarball of
`make dist`, which has all crates, so cargo needs no network.

    spack repo create ~/repo && mkdir -p ~/repo/packages/libdevicemesh
    cp packaging/spack/package.py ~/repo/packages/libdevicemesh/
    spack repo add ~/repo && spack install libdevicemesh

The file in Spack's own repository has the address of the tarball, and its SHA-256 (SHA256SUMS)."""

from spack.package import *


class Libdevicemesh(MakefilePackage):
    """PyTorch's DeviceMesh without Python: ready communicators for every mesh dimension, behind a
    C ABI."""

    license("Apache-2.0 OR MIT")

    version("0.2.0")

    # A folder with the tarballs. A release at a public place has its address here.
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

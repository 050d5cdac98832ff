# Copyright 2026 The libdevicemesh authors. Licensed under Apache-2.0 or MIT.
"""A package for Spack 1.0 or later, for a repository of one's own. It builds the tarball of
`make dist`, which has all crates, so cargo needs no network. Spack looks for the tarball in
/var/cache/libdevicemesh. A user who may not write there puts the tarball into a mirror, as
MIRROR/libdevicemesh/libdevicemesh-0.2.0.tar.gz, and tells Spack of the mirror:
`spack mirror add mine file://MIRROR`.

    spack repo create ~/repo devicemesh
    mkdir -p ~/repo/spack_repo/devicemesh/packages/libdevicemesh
    cp packaging/spack/package.py ~/repo/spack_repo/devicemesh/packages/libdevicemesh/
    spack repo add ~/repo/spack_repo/devicemesh && spack install --no-checksum libdevicemesh

A package for Spack's own repository names the tarball's address and SHA-256 (SHA256SUMS)."""

from spack_repo.builtin.build_systems.makefile import MakefilePackage

from spack.package import *


class Libdevicemesh(MakefilePackage):
    """PyTorch's DeviceMesh without Python: ready communicators for every mesh dimension, behind a
    C ABI."""

    license("Apache-2.0 OR MIT")

    version("0.2.0")

    # Copy the tarball to this place. A release with a public address has this address here.
    url = "file:///var/cache/libdevicemesh/devicemesh-0.2.0.tar.gz"

    depends_on("c", type="build")  # the linker
    depends_on("rust@1.85:", type="build")
    depends_on("gmake", type="build")
    # NCCL is opened when a program asks for device type cuda, so nothing is linked to it.

    conflicts("platform=darwin", msg="libdevicemesh runs on Linux")

    # `spack install --test` must not run `make test` and `make check`, which are for developers.
    build_time_test_callbacks = []

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        env.set("CARGO_NET_OFFLINE", "true")
        # Line tables make the installation four times as large.
        env.set("CARGO_PROFILE_RELEASE_DEBUG", "false")

    def build(self, spec, prefix):
        # The linker is cc, and the first cc of PATH is Spack's own compiler wrapper.
        cargo("build", "--release", "--locked", "--quiet", "--jobs", str(make_jobs))

    def install(self, spec, prefix):
        make("install", f"PREFIX={prefix}")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_install(self):
        Executable(self.prefix.bin.devicemesh)("show", "2,4", "replicate,shard", "--rank", "6")

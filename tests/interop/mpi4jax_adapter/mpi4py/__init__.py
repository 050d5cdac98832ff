"""The part of mpi4py that the tests of mpi4jax use, over libdevicemesh."""

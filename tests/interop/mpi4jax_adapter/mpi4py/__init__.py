"""As much of mpi4py as the tests of mpi4jax use, over libdevicemesh."""

"""The names behind mpi4jax's public functions that its tests use."""

"""What mpi4jax's tests reach for behind its public functions."""

"""mpi4jax's log: a line before each call and a line after it."""

import os
import secrets
import time

logging = os.environ.get("MPI4JAX_DEBUG", "").lower() in ("1", "true", "on")


def set_logging(enable):
    global logging
    logging = enable


def get_logging():
    return logging


def lines(rank, name, items):
    """Two functions that give their operand. They write the line before and the line after a
    call."""
    call, began = secrets.token_hex(4), []

    def before(x):
        began.append(time.monotonic())
        print(f"r{rank} | {call} | MPI_{name} with {items} items")
        return x

    def after(x):
        print(f"r{rank} | {call} | MPI_{name} done with code 0 ({time.monotonic() - began[-1]:.2e}s)")
        return x

    return before, after

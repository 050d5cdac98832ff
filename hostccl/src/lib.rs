//! NCCL's C API over host memory on one machine.

//! libhostccl.so: the host engine under its NCCL names.

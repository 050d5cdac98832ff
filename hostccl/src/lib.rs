//! NCCL's C API over host memory on one machine.

mod functions;
pub mod reduce;
pub mod types;

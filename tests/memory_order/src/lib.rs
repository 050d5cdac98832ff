//! The lock-free protocols under loom, with weak memory, from the sources of the product.
//!
//! The programs src/engine/main.rs and src/handles/main.rs include files of the product by
//! `#[path]`. In these files
//! `crate::sync`, `crate::futex` and `crate::plain` lead to the modules of this crate, and not to
//! the product's modules of these names. So the atomics are loom's, the kernel's futexes are a
//! model, and each plain access to shared memory is checked for data races.
//!
//! [`sync`] knows the place in the source of each memory order, and can weaken one of them for a
//! run. [`check::main`] runs each model as it stands, and then runs the models with each order
//! weakened, until one of them fails.

pub mod check;
pub mod futex;
mod places;
pub mod plain;
pub mod sync;
mod weak;

//! The bodies of the C functions. They check the arguments, and leave the work to the layers below.

// The functions have NCCL's names and parameter lists.
#![allow(non_snake_case, non_upper_case_globals, clippy::too_many_arguments)]

mod arguments;
mod communicators;
mod growth;
pub(crate) mod interrupt;
mod library;
mod operations;
mod ragged;

pub(crate) use self::communicators::*;
pub(crate) use self::growth::*;
pub(crate) use self::interrupt::hostcclCommSetInterrupt;
pub(crate) use self::library::*;
pub(crate) use self::operations::*;
pub(crate) use self::ragged::*;

//! The boundary to a communicator library: NCCL's C API as a table of function pointers.
//!
//! libnccl, librccl, a library named by the caller, and the embedded host engine all fill the same
//! [`Library`] table, so everything above this module is one code path. Results stay integers,
//! because an enum would be undefined behaviour for a code that only a newer library has. Every
//! symbol is optional, except those of the core (see `Library::from_lookup`).

mod blame;
mod call_name;
mod capture;
mod communicators;
mod config;
mod cuda;
mod current_device;
mod driver;
mod functions;
mod groups;
mod hip;
mod host_engine;
mod library;
mod load;
mod loaded;
pub(crate) mod nvtx;
mod operations;
mod pointers;
mod profiler;
mod ragged;
mod resolver;
mod stream;
mod stream_query;
mod types;
mod wheel;

pub(crate) use call_name::CallName;
pub use config::{CommConfig, NotAConfig};
pub(crate) use config::{config_digest, copied_config, lasting};
pub(crate) use driver::{Device, DeviceChoice, check_devices, select_device};
pub use driver::{device_addresses, devices, has_device};
pub use functions::RawComm;
pub use library::Library;
pub use load::{LIBRARY_VARIABLE, describe_wire, for_device, named_or_usual, open};
pub(crate) use load::{device_type, set_resolver};
pub(crate) use loaded::to_adopt;
pub(crate) use profiler::{Expected, expect, records_its_calls};
pub(crate) use resolver::Resolver;
pub(crate) use stream::Stream;
pub(crate) use stream_query::StreamQuery;
pub use types::{DATA_TYPES, NcclResult, element_size, result};
pub(crate) use types::{NO_COLOR, REDUCTIONS, UniqueId};

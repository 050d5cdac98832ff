//! Where the ranks meet: the launcher's environment, the key-value store, and the agreement between
//! ranks.
//!
//! - [`launcher`]: rank, size and the store's address from the environment of a launcher.
//! - [`store`]: the key-value service in which the ranks meet.
//! - [`World`]: this process's place in the job, joined once.
//! - `Scope`, `Round`: the agreement before and at the end of every collective call of the library.

mod agreement;
mod equipment;
mod handshake;
mod host;
mod init_method;
mod join_attempt;
mod joining;
pub mod launcher;
mod listeners;
mod locations;
mod losses;
mod one_host;
mod options;
mod serve;
pub mod store;
mod world;

pub(crate) use agreement::ranges;
#[doc(hidden)]
pub use agreement::{Round, Scope};
#[doc(hidden)]
pub use equipment::Equipment;
pub use host::{HostIdentity, host_name};
pub use options::{DEFAULT_TIMEOUT, JoinOptions};
pub use world::World;

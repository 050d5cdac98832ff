//! Where am I, the key-value store, and the agreement between ranks.
//!
//! - [`launcher`]: rank, size and the store's address from the environment of a launcher.
//! - [`store`]: the key-value service in which the ranks meet.
//! - [`World`]: this process's place in the job, joined once.
//! - [`Scope`], [`Round`]: the agreement before (and at the end of) every collective call of the library.

mod agreement;
mod equipment;
mod handshake;
mod hosts;
pub mod launcher;
mod locations;
mod losses;
pub mod store;
mod world;

pub use agreement::{Round, Scope};
pub use equipment::Equipment;
pub use hosts::{HostIdentity, host_name};
pub use world::{DEFAULT_TIMEOUT, JoinOptions, World};

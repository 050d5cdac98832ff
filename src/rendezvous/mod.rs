//! Where the ranks meet: the launcher's environment, the key-value store, and the agreement between
//! ranks.
//!
//! - [`launcher`]: rank, size and the store's address from the environment of a launcher.
//! - [`store`]: the key-value service in which the ranks meet.
//! - [`World`]: this process's place in the job, joined once.
//! - `Scope`, `Round`: the agreement before and at the end of every collective call of the library.

mod agreement;
mod come_in;
mod current_epoch;
mod door_watch;
mod engine_place;
mod equipment;
mod handshake;
mod host;
mod incarnation;
mod init_method;
mod join_attempt;
mod joining;
pub mod launcher;
mod listeners;
mod local_place;
mod locations;
mod loss_watch;
mod losses;
mod newcomer;
mod open_wait;
mod options;
mod running;
mod serve;
pub mod store;
mod turn_watch;
mod turns;
mod world;

#[doc(hidden)]
pub use agreement::{AgreedLosses, Departures, Round, Scope, TakenForLost};
#[doc(hidden)]
pub use agreement::{
    Arrival, Decision, Decisions, Epoch, Failure, Knock, Made, Outcome, Passed, Recovery, Replicas, Request, Seen,
    Terms, Why, mesh_text,
};
pub(crate) use agreement::{begun_by_this_thread, check_len, check_order, note_begun_by_this_thread};
#[doc(hidden)]
pub use equipment::Equipment;
pub use host::{HostIdentity, host_name};
#[doc(hidden)]
pub use incarnation::Incarnation;
pub use local_place::LocalPlace;
pub use options::{DEFAULT_TIMEOUT, Join, JoinOptions};
pub use world::World;

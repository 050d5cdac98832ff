//! The ranks that one rank takes for lost, though the store does not know it.

use std::time::Duration;

/// How long a rank that is suspected may stay silent once all others are here.
pub(super) const SUSPECTED: Duration = Duration::from_secs(1);

/// The ranks that one rank takes for lost by other means than the store.
#[derive(Debug, Clone, Copy, Default)]
pub struct TakenForLost<'a> {
    /// The ranks that are lost for certain: for example, their processes have ended.
    pub lost: &'a [i32],
    /// The ranks that a communicator blames. A suspected rank that comes is not lost.
    pub suspects: &'a [i32],
}

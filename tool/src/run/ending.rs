//! The options of `devicemesh run` on how long ranks have to end.

use std::time::Duration;

use clap::Args;

use crate::duration::{duration, limit};

/// How long a rank has between SIGTERM and SIGKILL when another one has failed.
pub const TERM_TO_KILL: Duration = Duration::from_secs(5);

/// How long the tool still serves the store after the time that other nodes need to end their
/// ranks.
pub const STAY: Duration = Duration::from_secs(10);

/// How long the ranks have to end, for each kind of end. The comments of the fields are their help.
#[derive(Args)]
pub struct Ending {
    /// How long the ranks have to end after --timeout, or after a signal that this tool got and
    /// passed on (Ctrl-C, SIGTERM); then they are killed
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, allow_negative_numbers = true)]
    pub grace_period: Duration,
    /// After the first failure, how long the other ranks have to notice and end by themselves; then
    /// they get SIGTERM, and 5 seconds later they are killed
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = duration, allow_negative_numbers = true)]
    pub failure_grace: Duration,
    /// End the whole job after this time: seconds, or 90s, 10m, 2h, 1d, as all times here
    #[arg(long, value_name = "TIME", value_parser = limit, allow_negative_numbers = true)]
    pub timeout: Option<Duration>,
}

impl Ending {
    /// The longest time from the cause of an end until all ranks of a node have got SIGKILL.
    pub fn longest(&self) -> Duration {
        self.grace_period.max(self.failure_grace + TERM_TO_KILL)
    }
}

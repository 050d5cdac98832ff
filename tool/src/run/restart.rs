//! Starts again what has failed: all ranks of the job (`--restart job`, see [`attempts`]), or one
//! rank alone (`--restart rank`, see [`single`]).
//!
//! | `--restart` | who decides | what runs meanwhile |
//! |---|---|---|
//! | `job` | all nodes, by the cause in the store, which is the same for all | nothing: every node ends its ranks, and the nodes meet anew |
//! | `rank` | the node of the rank, alone | all other ranks. No cause is written |

mod attempts;
mod options;
mod single;
mod state;
mod told;

pub use self::options::{RestartOptions, Standing, Unit};
pub use self::state::{Restarts, after, pause};

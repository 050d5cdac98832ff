//! The options of `devicemesh run` on restarts and spares.

use std::fmt::{self, Display, Formatter};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::words::count;

/// What is started again when a rank fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// The rank alone. The others go on
    Rank,
    /// All ranks of all nodes
    Job,
}

/// The comments of the fields are their help.
#[derive(Args)]
pub struct RestartOptions {
    /// What to start again when a rank fails. "job": all ranks end and start again, as with
    /// torchrun. "rank": the rank starts again alone, with DM_JOIN=running, and the others go on
    /// [default with --max-restarts: job]
    #[arg(long, value_name = "WHAT", requires = "max_restarts", hide_possible_values = true)]
    pub restart: Option<Unit>,
    /// How often the job, or each rank, is started again. After that a failure ends the job
    #[arg(long, alias = "max_restarts", value_name = "N", value_parser = most, allow_negative_numbers = true)]
    pub max_restarts: Option<u32>,
    /// With --restart rank: start N more ranks on this node, beyond -n. They get the last ranks of
    /// the world, and DM_MESH_SIZE is the number of ranks without them
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, requires = "restart")]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=65536), allow_negative_numbers = true)]
    pub spares: u32,
}

fn most(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|most| *most <= 1_000_000).ok_or_else(|| "0 to 1000000".to_owned())
}

impl RestartOptions {
    /// Checks what clap cannot. `has_number` says whether the user gave the number of ranks as a
    /// number.
    pub fn check(&self, has_number: bool) -> Result<(), Failure> {
        let wrong = |message: &str| Err(Failure::new(2, message));
        match (self.spares, self.restart, has_number) {
            (0, ..) => Ok(()),
            (_, Some(Unit::Job), _) => wrong(
                "--spares does not go with --restart job, which starts all ranks again: leave --spares out, or say --restart rank",
            ),
            (_, _, true) => Ok(()),
            (spares, ..) => {
                wrong(&format!("--spares {spares} needs the number of the other ranks: -n N, where N is a number"))
            }
        }
    }

    /// What this node tells the others about restarts.
    pub fn standing(&self) -> Standing {
        let most = self.max_restarts.unwrap_or(0);
        // torchrun's `--max-restarts 0` means the same as no option.
        let unit = self.max_restarts.map(|_| self.restart.unwrap_or(Unit::Job));
        let unit = unit.filter(|unit| most > 0 || *unit == Unit::Rank);
        Standing { unit, most, restarts: 0, spares: self.spares }
    }
}

/// A node's options on restarts, and how often it has seen the job start again. The nodes tell this
/// each other when they meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Standing {
    /// What is started again, the same on all nodes. `None` without `--max-restarts`.
    pub unit: Option<Unit>,
    /// `--max-restarts`, the same on all nodes.
    pub most: u32,
    /// How often the whole job was started again, as far as this node knows. A node whose tool was
    /// started anew in between knows of none.
    pub restarts: u32,
    /// The number of spares on this node.
    pub spares: u32,
}

impl Standing {
    /// Says for `--dry-run` what is started again. `None` where nothing is.
    pub fn describe(&self) -> Option<String> {
        let times = count(self.most, "time");
        Some(match self.unit.filter(|_| self.most > 0)? {
            Unit::Job => format!("all ranks, up to {times}, when a rank has failed and all others have ended"),
            Unit::Rank => format!("a rank that fails, alone and with DM_JOIN=running; each rank up to {times}"),
        })
    }

    /// When a failure ends the job, for `--dry-run`.
    pub fn when_it_ends(&self) -> String {
        match self.unit.filter(|_| self.most > 0) {
            Some(Unit::Job) => format!("when a rank fails after {} of the job", count(self.most, "restart")),
            Some(Unit::Rank) => format!("when a rank fails after its {}", count(self.most, "restart")),
            None => "when a rank fails".to_owned(),
        }
    }

    /// The words for the spares among the ranks of a node, behind their number, or nothing.
    pub fn told_spares(&self) -> String {
        if self.spares == 0 { String::new() } else { format!(" ({})", count(self.spares, "spare")) }
    }

    /// Whether both have the same options, except for the number of spares.
    pub fn fits(&self, other: &Standing) -> bool {
        (self.unit, self.most) == (other.unit, other.most)
    }
}

impl Display for Standing {
    /// Writes the options as a command line has them.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.unit {
            Some(unit) => write!(f, "--restart {unit} --max-restarts {}", self.most),
            None => f.write_str("no --restart"),
        }
    }
}

impl Display for Unit {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Unit::Rank { "rank" } else { "job" })
    }
}

#[cfg(test)]
mod tests {
    use super::{RestartOptions, Unit};

    fn options(restart: Option<Unit>, max_restarts: Option<u32>, spares: u32) -> RestartOptions {
        RestartOptions { restart, max_restarts, spares }
    }

    #[test]
    fn a_number_alone_restarts_the_job() {
        assert_eq!(options(None, Some(3), 0).standing().to_string(), "--restart job --max-restarts 3");
        assert_eq!(options(Some(Unit::Rank), Some(5), 1).standing().to_string(), "--restart rank --max-restarts 5");
        assert_eq!(options(None, None, 0).standing().to_string(), "no --restart");
        assert_eq!(options(None, Some(0), 0).standing(), options(None, None, 0).standing());
    }

    #[test]
    fn spares_are_for_single_ranks_and_a_known_number() {
        let with = |unit: Unit, has_number| options(Some(unit), Some(1), 1).check(has_number).map_err(|e| e.message);
        assert_eq!(with(Unit::Rank, true), Ok(()));
        assert!(with(Unit::Rank, false).is_err_and(|message| message.contains("--spares 1 needs")));
        assert!(with(Unit::Job, true).is_err_and(|message| message.contains("--restart job")));
    }
}

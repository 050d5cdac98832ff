//! `devicemesh run`: starts n local ranks, watches them, and leaves none behind.
//!
//! Like torchrun's agent it serves the store that the ranks meet in, so the port is known to be free and the store outlives every rank.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use clap::Args;
use devicemesh::rendezvous::store::{Secret, Server};

use crate::output::Output;
use crate::ranks::{Ended, Failure, Ranks};
use crate::signals::Signals;

/// After SIGTERM, how long a rank has before SIGKILL.
const TERM_TO_KILL: Duration = Duration::from_secs(5);
/// After the last rank has ended, how long its output may still come.
const DRAIN: Duration = Duration::from_secs(1);
/// `--timeout` passed: as timeout(1).
const TIMED_OUT: u8 = 124;

#[derive(Args)]
pub struct Options {
    /// Number of ranks to start
    #[arg(short = 'n', long = "nproc-per-node", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub ranks: u32,
    /// Put "[rank R] " before every line that a rank writes
    #[arg(long)]
    pub prefix: bool,
    /// After the first failure, seconds that the other ranks have to notice and end by themselves
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = seconds)]
    pub grace_period: f64,
    /// End the whole job after that many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<f64>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..1e9).contains(&seconds) => Ok(seconds),
        _ => Err("not a number of seconds".to_owned()),
    }
}

/// How far the end of the job has come.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Running,
    /// SIGTERM follows at that moment.
    Grace(Instant),
    /// SIGKILL follows at that moment.
    Terminating(Instant),
    Killed,
}

/// Runs the job and gives its exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    // Signals are blocked before any thread starts, so that all threads leave them to the loop below.
    let mut signals = Signals::catch()?;
    let server = Server::guarded(("127.0.0.1", 0), Secret::from_environment())
        .map_err(|error| Failure::new(1, error.message()))?;
    let mut output = Output::new(options.prefix);
    let mut ranks = Ranks::start(options.ranks, &options.command, server.local_addr().port(), &mut output)?;

    let grace = Duration::from_secs_f64(options.grace_period);
    let mut job_end = options.timeout.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let mut phase = Phase::Running;
    let mut code = 0;
    while ranks.running() > 0 {
        let now = Instant::now();
        match phase {
            Phase::Running if job_end.is_some_and(|end| now >= end) => {
                let seconds = options.timeout.unwrap_or_default();
                eprintln!("devicemesh run: not done after {seconds} s (--timeout); ending {} ranks", ranks.running());
                (job_end, code) = (None, TIMED_OUT);
                phase = Phase::Grace(now);
            }
            Phase::Grace(until) if now >= until => {
                ranks.signal(libc::SIGTERM);
                phase = Phase::Terminating(now + TERM_TO_KILL);
            }
            Phase::Terminating(until) if now >= until => {
                ranks.signal(libc::SIGKILL);
                phase = Phase::Killed;
            }
            _ => {}
        }
        let next = match phase {
            Phase::Running => job_end,
            Phase::Grace(until) | Phase::Terminating(until) => Some(until),
            Phase::Killed => None,
        };
        for signal in signals.wait(next, &mut output) {
            match signal {
                libc::SIGCHLD => {}
                libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT => {
                    ranks.signal(signal);
                    if phase == Phase::Running {
                        eprintln!("devicemesh run: got signal {signal}, passed on to {} ranks", ranks.running());
                        code = 128 + signal as u8;
                        phase = Phase::Terminating(Instant::now() + grace.max(Duration::from_secs(1)));
                    }
                }
                other => ranks.signal(other),
            }
        }
        for ended in ranks.reap() {
            if ended.failed() && phase == Phase::Running {
                report(&ended, &ranks, grace);
                code = ended.code();
                phase = Phase::Grace(Instant::now() + grace);
            }
        }
    }
    ranks.end_orphans();
    output.drain(Instant::now() + DRAIN);
    ranks.summarise();
    Ok(code)
}

fn report(ended: &Ended, ranks: &Ranks, grace: Duration) {
    let rest = match ranks.running() {
        0 => String::new(),
        1 => format!("; ending the other rank, in {} s if it does not end itself", grace.as_secs_f64()),
        n => format!("; ending the other {n} ranks, in {} s if they do not end themselves", grace.as_secs_f64()),
    };
    eprintln!("devicemesh run: {ended}{rest}");
}

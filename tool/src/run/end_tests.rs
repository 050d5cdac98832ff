//! When the phases of the end of a job begin and end.

use clap::Parser;

use super::*;
use crate::run::binding::Binding;
use crate::run::options::Options;
use crate::run::output::Output;
use crate::run::signals::Signals;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

/// The options of a job of one rank.
fn options(more: &[&str]) -> Options {
    let line = ["devicemesh", "--bind", "none", "-n", "1"].iter().chain(more).chain(&["--", "true"]);
    Line::try_parse_from(line).expect("the options are right").options
}

fn job(options: &Options) -> Job<'_> {
    let made = || {
        let rendezvous = options.meeting.rendezvous(1, &options.command, &options.hosts)?;
        let binding = Binding::choose(&options.binding, 1)?;
        let output = Output::new(options.output.route(false, options.color));
        Ok(Job::new(options, &rendezvous, binding, output, Signals::catch_none()?))
    };
    made().unwrap_or_else(|failure: crate::failure::Failure| panic!("{}", failure.message))
}

/// With `--max-restarts`, the next attempt has the rest of the time.
#[test]
fn the_timeout_outlives_an_attempt_whose_ranks_were_killed() {
    let options = options(&["--timeout", "2h"]);
    let mut job = job(&options);
    let timeout = job.next_moment();
    assert!(timeout.is_some());
    job.kill();
    assert_ne!(job.next_moment(), timeout);
    job.phase = Phase::Running;
    assert_eq!(job.next_moment(), timeout);
}

#[test]
fn the_tool_ends_at_a_signal_without_a_rank_that_sigkill_does_not_end() {
    let options = options(&[]);
    let mut job = job(&options);
    job.ranks = Some(Ranks::without_end(3));
    job.cause = Some(Cause::Ordered);
    job.kill();
    assert!(job.next_moment().is_some_and(|moment| moment > Instant::now()));
    job.obey_the_clock();
    assert!(!job.unended_is_told);
    job.next_look = Some(Instant::now());
    job.obey_the_clock();
    assert!(job.unended_is_told && job.is_busy() && job.next_moment().is_none());
    // Another node may order the same once more, and the user is told only once.
    job.kill();
    assert!(job.next_moment().is_none());
    job.handle_signal(Signal::INT.as_raw());
    assert!(!job.is_busy());
    // A tool that has given up does not serve the store any longer, either.
    job.ranks = None;
    job.watch();
    assert!(job.deadline.is_none());
}

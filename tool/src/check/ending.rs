//! Ends a check that has no report, because there was an error or the time has passed.

use std::io;
use std::time::Duration;

use devicemesh::error::{Error, Status};
use devicemesh::printable::printable;
use devicemesh::rendezvous::{JoinOptions, World, host_name};

use super::exit_code::{NOT_MADE, TIMED_OUT, WRONG_COMMAND};
use super::options::Options;
use super::progress::CLEAR;
use super::report;
use super::team::{Clock, JOINING};
use crate::stdio::{print, say};

/// How much longer the other ranks run than the rank that failed.
const AFTER_FAILED: Duration = Duration::from_millis(300);

/// The advice to a user whose check did not end in time, while it did that step.
fn more_time(doing: &str) -> &'static str {
    match doing {
        JOINING => "start devicemesh check on every rank, and allow more with --timeout if some ranks start late",
        _ => "allow more with --timeout, or look at this step with a smaller world",
    }
}

/// The thread of the clock calls this when the time has passed. Reports the current step on rank
/// 0, and returns the exit code.
pub fn when_late(rank: usize, options: &Options) -> impl FnOnce(&str) -> u8 + Send + 'static {
    let (json, limit) = (options.json, options.timeout.as_secs_f64());
    move |doing| {
        if rank == 0 {
            tell(
                json,
                "TIMEOUT",
                &format!("not done after {limit} s (--timeout), while {doing}; {}", more_time(doing)),
            );
        }
        TIMED_OUT
    }
}

/// How long a rank with a wrong command line waits for the others. If rank 0 has the same command
/// line, rank 0 has reported it, and does not join.
const OTHERS: Duration = Duration::from_secs(2);

/// Refuses the command line of a rank other than rank 0, which reports nothing itself. If the
/// others have a better one, they join the world of that device type. There they learn of it, and
/// rank 0 reports it.
pub fn refuse(message: &str, device_type: &str) -> u8 {
    let error = Error::new(Status::InvalidArgument, format!("wrong command line on {}: {message}", host_name()));
    let joining = JoinOptions::default().timeout(OTHERS);
    let _ = World::join_with(device_type, &joining, |_| Err::<(), _>(error), |(), _| Ok(None));
    std::thread::sleep(AFTER_FAILED);
    WRONG_COMMAND
}

/// Reports an error on one rank, and returns the exit code.
pub fn end(error: &Error, rank: usize, device_type: &str, options: &Options, clock: &Clock) -> u8 {
    // Near the end of the time every wait ends, whatever it waits for.
    let is_late = clock.is_over();
    if rank == 0 || rank == 1 && may_miss_rank_0(error) {
        let (json, limit) = (options.json && rank == 0, options.timeout.as_secs_f64());
        let (what, next) = (error.message(), advice(error, device_type));
        match is_late {
            true => {
                let doing = clock.doing();
                let message =
                    format!("not done after {limit} s (--timeout), while {doing}: {what}; {}", more_time(&doing));
                tell(json, "TIMEOUT", &message);
            }
            false => tell(json, error.status().name().trim_start_matches("DM_STATUS_"), &format!("{what}{next}")),
        }
    }
    // `devicemesh run` names the rank that ends first, so the rank that failed must end first. A
    // rank that was lost or did not arrive has ended already, or ends by itself.
    let has_failed = ![Status::PeerLost, Status::Timeout].contains(&error.status());
    if has_failed && !error.ranks().is_empty() && !error.ranks().contains(&(rank as i32)) {
        std::thread::sleep(AFTER_FAILED.min(clock.left() / 2));
    }
    if is_late { TIMED_OUT } else { NOT_MADE }
}

/// Whether rank 0 may be unable to report this error, because rank 0 itself may be lost or late.
/// Then rank 1 reports it too.
fn may_miss_rank_0(error: &Error) -> bool {
    let is_loss = [Status::PeerLost, Status::Store, Status::Timeout].contains(&error.status());
    is_loss && (error.ranks().is_empty() || error.ranks().contains(&0))
}

/// Reports an error that ends the check.
fn tell(json: bool, status: &str, message: &str) {
    // On a terminal the current line may hold the progress, so it is cleared.
    let clear = if io::IsTerminal::is_terminal(&io::stderr()) { CLEAR } else { "" };
    say(&format!("{clear}devicemesh check: {}", printable(message)));
    if json {
        let _ = print(report::failure(status, message) + "\n");
    }
}

/// Says what the user can do next, where the message does not say it. `device_type` is that of the
/// mesh.
fn advice(error: &Error, device_type: &str) -> &'static str {
    match error.status() {
        // The host engine has no such variable, and its messages say what to do.
        Status::Ccl if device_type == "cpu" => "",
        Status::Timeout if device_type == "cpu" => {
            "; next: see what the ranks named are doing (gdb -p on their hosts), and check again without these hosts"
        }
        Status::PeerLost => {
            "; next: look at that rank's own output and its host's kernel log, and check again without that host"
        }
        Status::Timeout => {
            "; next: see what the ranks named are doing (gdb -p, nvidia-smi on their hosts), and check again without these hosts"
        }
        Status::Ccl => "; next: run again with NCCL_DEBUG=INFO, which says what the library met",
        Status::Mismatch => "; next: start every rank with the same command line and the same version",
        Status::Library => "; devicemesh info says what is found here",
        _ => "",
    }
}

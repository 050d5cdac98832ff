//! Finds the job in the store of a service (`devicemesh store`), or begins it there (`--store`).
//!
//! The service has one job after the other. The node that writes the key `first` of the next number
//! has begun that job, and the others join it. A job has left the store when the tools of all nodes
//! that came to it have gone, so a job that was killed keeps nobody waiting. Each start of a job
//! that starts again (`--restart job`) is a job of its own here.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use devicemesh::error::{Error, Result, Status};
use devicemesh::rendezvous::store::{Secret, Store, TcpStore};
use devicemesh::wait::{Deadline, Wait};

use super::attempt::{SECRET, TRY, locked_out, why};
use super::board::{Board, of_job};
use super::entry::{Entry, LastWord};
use super::keys::{self, FIRST, JOBS, NODES, OVER, SERVED};
use super::place::Place;
use super::progress::Progress;
use super::shared::Reached;
use crate::run::rendezvous::Rendezvous;

/// How long the node that begins a job may take until it says who it is.
const BEGINS: Duration = Duration::from_secs(10);
/// If the job in the store does not take a node, the node waits this long until it is refused. The
/// store notices within moments that the nodes of a job were killed.
const LEAVES: Duration = Duration::from_secs(2);
/// The pause before a node looks again whether the job before has left the store.
const PAUSE: Duration = Duration::from_millis(50);

/// The most jobs of a service, and the most nodes that come to one job. Without DM_STORE_SECRET
/// anybody may write any number into the store. This node counts jobs from the first number, and
/// makes a list as long as the second one.
const MOST_JOBS: u64 = 1 << 48;
const MOST_ARRIVALS: u32 = 1 << 16;

/// What a node finds of the newest job in the store.
enum Found {
    /// It runs, or its nodes meet. The number is how many of them have come.
    Current(u32),
    /// A node begins it, and has not said yet who it is.
    Begins,
    /// It is over, and some of its nodes are still there.
    IsEnding,
    /// All its nodes have gone.
    HasLeft,
}

/// Reaches the service. Joins the job that is there, or begins this one.
pub fn enter(rendezvous: &Rendezvous, place: Place, wait: &Wait, progress: &mut Progress<'_>) -> Result<Reached> {
    let store = connect(rendezvous, &place, wait, progress)?;
    if store.try_get(SERVED, wait)?.is_some() {
        return Err(Error::invalid(format!(
            "{} is the store of a devicemesh run, which ends with it: --store must name a `devicemesh store`",
            rendezvous.store()
        )));
    }
    let hint = store.try_get(JOBS, wait)?.and_then(|text| number(&text)).unwrap_or(0);
    if hint > MOST_JOBS {
        return Err(Error::store(format!("{} says that it has had {hint} jobs, which cannot be", store.name())));
    }
    let (mut job, mut begins_since): (u64, Option<Instant>) = (hint, None);
    let (me, began) = (unique(), Instant::now());
    loop {
        wait.look_around()?;
        while store.try_get(&of_job(job + 1, FIRST), wait)?.is_some() {
            (job, begins_since) = (job + 1, None);
        }
        let found = if job == 0 { Found::HasLeft } else { look(&store, job, wait)? };
        match found {
            Found::Current(arrived) => {
                if began.elapsed() > LEAVES || takes(&store, job, arrived, rendezvous, wait)? {
                    break;
                }
            }
            Found::Begins if begins_since.get_or_insert_with(Instant::now).elapsed() < BEGINS => {}
            Found::IsEnding => progress.tell(|| match rendezvous.restart.restarts {
                0 => format!("the job before this one to leave {}", place.at),
                _ => "the other nodes to end their ranks before the restart".to_owned(),
            }),
            Found::Begins | Found::HasLeft => {
                job += 1;
                if store.set_once(&of_job(job, FIRST), &me, wait)? == me {
                    store.set(JOBS, job.to_string().as_bytes(), wait)?;
                    return Ok(Reached { store: Board::new(store, Some(job)), place, server: None, begins: true });
                }
                continue;
            }
        }
        if wait.deadline.passed() {
            return Err(Error::timeout(format!(
                "the job before this one has not left {}: end its nodes, or give each job a `devicemesh store` of its own",
                place.at
            )));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(Reached { store: Board::new(store, Some(job)), place, server: None, begins: false })
}

/// Connects to the service, which may be started later than this node.
fn connect(rendezvous: &Rendezvous, place: &Place, wait: &Wait, progress: &mut Progress<'_>) -> Result<TcpStore> {
    let secret = Secret::from_environment()?;
    loop {
        wait.look_around()?;
        let limited = progress.pause(TRY);
        match TcpStore::connect_with_secret(&rendezvous.host, rendezvous.port, secret.clone(), &limited) {
            Ok(store) if store.knows_losses() => return Ok(store),
            Ok(_) => return Err(no_service(rendezvous)),
            // Only a try with enough time shows that there is no store.
            Err(error) if limited.deadline.passed() && !wait.deadline.passed() => {
                progress.tell(|| format!("a `devicemesh store` to serve {} ({})", place.at, why(&error)));
            }
            Err(error) if wait.deadline.passed() => {
                return Err(Error::timeout(format!(
                    "nobody serves {} after {} s: start `devicemesh store --listen` there, and open its port to the nodes ({}){}",
                    place.at,
                    rendezvous.timeout.as_secs_f64(),
                    why(&error),
                    place.remark
                )));
            }
            Err(error) if error.message().contains(SECRET) => return Err(locked_out(rendezvous, error)),
            Err(error) if error.status() == Status::Store => return Err(no_service(rendezvous)),
            Err(error) => return Err(error),
        }
    }
}

fn no_service(rendezvous: &Rendezvous) -> Error {
    Error::invalid(format!(
        "what listens at {} is no store of libdevicemesh: --store must name a `devicemesh store`",
        rendezvous.store()
    ))
}

/// Looks at the newest job in the store.
fn look(store: &TcpStore, job: u64, wait: &Wait) -> Result<Found> {
    let key = |key: &str| of_job(job, key.strip_prefix(keys::PREFIX).unwrap_or(key));
    let wait = &wait.with_deadline(Deadline::after(wait.deadline.left()));
    let arrived = store.try_get(&key(NODES), wait)?.and_then(|text| number(&text));
    let Some(arrived) = arrived else { return Ok(Found::Begins) };
    let Some(arrived) = u32::try_from(arrived).ok().filter(|arrived| *arrived <= MOST_ARRIVALS) else {
        let name = store.name();
        return Err(Error::store(format!("{name} says that {arrived} nodes came to job {job}, which cannot be")));
    };
    let (mut gone, mut words) = (HashSet::new(), 0);
    while let Some(word) = store.try_get(&key(&keys::gone(words + 1)), wait)? {
        words += 1;
        gone.extend(LastWord::read(&word).map(|word| word.arrival));
    }
    // A node leaves its last word with the store before it says who it is. So a tool that has no
    // entry has gone, too, or is about to find out that it comes too late.
    let left: Vec<u32> = (1..=arrived).filter(|arrival| !gone.contains(arrival)).collect();
    let entries: Vec<String> = left.iter().map(|arrival| key(&keys::node(arrival))).collect();
    let is_there = store.present(&entries, wait)?.contains(&true);
    Ok(match (is_there, gone.is_empty()) {
        (false, true) => Found::Begins,
        (false, false) => Found::HasLeft,
        (true, _) if store.try_get(&key(OVER), wait)?.is_some() => Found::IsEnding,
        (true, _) => Found::Current(arrived),
    })
}

/// The number in a value of the store. `None` where the value is no number.
fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// Whether the job there takes this node: it is the same job, and not all of its nodes have come.
fn takes(store: &TcpStore, job: u64, arrived: u32, rendezvous: &Rendezvous, wait: &Wait) -> Result<bool> {
    let first = store.get(&of_job(job, &keys::node(1)[keys::PREFIX.len()..]), wait)?;
    // The node finds later what is wrong with an entry that cannot be read.
    let Ok(first) = Entry::read(&first) else { return Ok(true) };
    let is_full = arrived >= first.nodes && !rendezvous.heals;
    Ok(!is_full && Entry::of_this_node(rendezvous).strangeness(&first, rendezvous).is_none())
}

/// A value that no other tool has.
fn unique() -> Vec<u8> {
    let random = std::fs::read("/proc/sys/kernel/random/uuid").unwrap_or_default();
    let host = devicemesh::rendezvous::host_name();
    [format!("{host} {} ", std::process::id()).into_bytes(), random].concat()
}

#[cfg(test)]
mod tests {
    use devicemesh::rendezvous::store::Server;

    use super::*;

    #[test]
    fn a_number_of_nodes_that_no_job_has_is_an_error_and_takes_no_memory() {
        let server = Server::at("127.0.0.1", 0, None).unwrap();
        let wait = Wait::after(Duration::from_secs(10));
        let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), &wait).unwrap();
        let nodes = of_job(1, NODES.strip_prefix(keys::PREFIX).unwrap());
        for arrived in ["4294967295", "18446744073709551615", "65537"] {
            store.set(&nodes, arrived.as_bytes(), &wait).unwrap();
            let error = look(&store, 1, &wait).err().unwrap();
            assert!(error.message().contains(&format!("{arrived} nodes came to job 1")), "{}", error.message());
        }
        store.set(&nodes, b"2", &wait).unwrap();
        assert!(matches!(look(&store, 1, &wait), Ok(Found::Begins)));
    }
}

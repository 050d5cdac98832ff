//! NCCL's RAS: what NCCL itself knows of its communicators, with the mesh's names for their hashes.
//!
//! Since NCCL 2.24 a thread of each process answers at localhost:28028 (NCCL_RAS_ADDR names another
//! place), for all processes of its job. Since 2.28.7 it can answer in JSON (src/ras/client.cc and
//! client_support.cc of NCCL's sources, Apache-2.0). Requests and replies are lines:
//!
//! ```text
//! -> CLIENT PROTOCOL 2     <- SERVER PROTOCOL 2
//! -> TIMEOUT 1             <- OK
//! -> SET FORMAT json       <- OK
//! -> STATUS                <- the document, and the end of the connection
//! ```
//!
//! RAS gives a communicator no name. It gives a hash, and for each rank the number of its process.
//! So the communicator belongs to the group of a mesh whose members are these processes in this
//! order.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use devicemesh::printable::printable;
use serde::{Deserialize, Serialize};

use super::groups::Group;
use super::judge::Verdict;
use crate::columns::table;
use crate::proc;
use crate::style::Style;
use crate::words::{listed, ranges};

/// Where RAS answers unless NCCL_RAS_ADDR says something else.
const ADDRESS: &str = "localhost:28028";
/// The variable that names another place.
const VARIABLE: &str = "NCCL_RAS_ADDR";
/// How long RAS waits for other processes, in seconds, and how long this tool waits for RAS.
const SECONDS: u32 = 1;
const PATIENCE: Duration = Duration::from_millis(2500);
/// The most bytes of the document.
const MOST_BYTES: u64 = 64 << 20;
/// The most rows of the table, and ranges of ranks in a row.
const MOST_ROWS: usize = 40;
const MOST_RANGES: usize = 8;

/// RAS's document. Fields that are not used here are left out.
#[derive(Deserialize)]
pub struct Status {
    nccl_version: String,
    communicators: Vec<Communicator>,
}

#[derive(Deserialize)]
struct Communicator {
    hash: String,
    size: usize,
    ranks: Vec<Rank>,
    #[serde(default)]
    missing_ranks: Vec<Missing>,
}

#[derive(Deserialize)]
struct Rank {
    rank: usize,
    pid: i64,
    status: RankStatus,
    /// How many collectives of each kind NCCL has begun.
    collective_counts: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct RankStatus {
    init_state: i64,
    async_error: i64,
    #[serde(default)]
    finalize_called: bool,
    #[serde(default)]
    destroy_flag: bool,
    abort_flag: bool,
}

#[derive(Deserialize)]
struct Missing {
    rank: usize,
    pid: i64,
    status: MissingStatus,
}

#[derive(Deserialize)]
struct MissingStatus {
    considered_dead: bool,
}

/// A communicator of the job, as RAS and the recordings have it.
#[derive(Serialize)]
pub struct Known {
    /// NCCL's hash of the communicator.
    hash: String,
    /// The groups that have its processes in its order: "mesh/tp". It is empty where none has.
    names: Vec<String>,
    /// Its ranks in rows of equal counts.
    rows: Vec<Row>,
}

/// Ranks of a communicator for which RAS says the same.
#[derive(Serialize)]
struct Row {
    /// The ranks of the job. A rank whose process is not seen is left out.
    ranks: Vec<u32>,
    /// How many collectives of each kind NCCL has begun: "AllReduce 6".
    counts: String,
    /// NCCL's words for the ranks: "running", "aborted", "error 3", "dead", "no answer".
    state: String,
}

impl Status {
    /// Asks the RAS of a job: at the place that its processes name, or at the usual one. `None`
    /// where there are no processes, and where nothing listens there. Fails where something listens
    /// that does not answer as RAS within [`PATIENCE`].
    pub fn of(pids: impl Iterator<Item = u32>) -> Option<Result<Status, String>> {
        let pids: Vec<u32> = pids.take(8).collect();
        let named = |pid: u32| {
            let environment = proc::words(pid, "environ")?;
            environment
                .iter()
                .find_map(|word| word.to_str()?.strip_prefix(VARIABLE)?.strip_prefix('=').map(str::to_owned))
        };
        let address =
            pids.first().map(|_| pids.iter().copied().find_map(named).unwrap_or_else(|| ADDRESS.to_owned()))?;
        let silence = Err(format!("NCCL's RAS at {address}: no answer within {} s", PATIENCE.as_secs_f64()));
        // A resolver has no limit of its own, so a thread asks. The thread is left alone when the
        // time is over.
        let (sender, receiver) = mpsc::channel();
        let ask = move || {
            // If nobody waits any more, nobody misses the answer.
            let _ = sender.send(asked_at(&address, Instant::now() + PATIENCE));
        };
        // Without a thread, RAS is not asked: a job may hang because the user may start no more
        // threads, and the rest of the answer is needed then.
        thread::Builder::new().spawn(ask).ok()?;
        receiver.recv_timeout(PATIENCE).unwrap_or(Some(silence))
    }

    /// The communicators that have processes of the job.
    pub fn known(&self, verdict: &Verdict<'_>) -> Vec<Known> {
        let known = |communicator: &Communicator| {
            let pids: BTreeMap<usize, i64> = communicator.pids().collect();
            let fits =
                |group: &&Group<'_>| !group.is_scope && group.members.len() == communicator.size && fits(group, &pids);
            let groups: Vec<&Group<'_>> = verdict.groups.iter().filter(fits).collect();
            let mut names: Vec<String> = groups.iter().map(|group| group.name.to_owned()).collect();
            names.dedup();
            let number = |rank: usize| match groups.first() {
                Some(group) => group.member(rank)?.rank.map(|at| verdict.job.ranks[at].number),
                None => {
                    let of = |number: &&super::job::Rank| recorded_pid(number) == pids.get(&rank).copied();
                    verdict.job.ranks.iter().find(of).map(|rank| rank.number)
                }
            };
            let rows = communicator.rows(number);
            let is_own = rows.iter().any(|row| !row.ranks.is_empty());
            is_own.then(|| Known { hash: communicator.hash.clone(), names, rows })
        };
        self.communicators.iter().filter_map(known).collect()
    }

    /// The table for people.
    pub fn text(&self, known: &[Known], width: Option<usize>, style: Style) -> String {
        let rows = known.iter().flat_map(|known| known.rows.iter().map(move |row| (known, row)));
        let cells = |(known, row): (&Known, &Row)| {
            let name = if known.names.is_empty() { "-".to_owned() } else { known.names.join(" or ") };
            let ranks = listed(ranges(row.ranks.iter().map(|rank| *rank as usize)), MOST_RANGES);
            let all = [name, ranks, row.counts.clone(), row.state.clone(), known.hash.clone()];
            all.map(|cell| printable(&cell).into_owned())
        };
        let cells: Vec<[String; 5]> = rows.take(MOST_ROWS).map(cells).collect();
        if cells.is_empty() {
            return String::new();
        }
        let heads = ["NCCL", "ranks", "collectives", "state", "communicator"];
        let version = printable(&self.nccl_version).into_owned();
        format!("\nNCCL {version} says:\n{}", table(&heads, &cells, |_| false, 2, width, |head| style.dim(head)))
    }
}

/// Whether the members of a group are these processes in this order, as far as both are known.
fn fits(group: &Group<'_>, pids: &BTreeMap<usize, i64>) -> bool {
    let member = |member: &super::groups::Member<'_>| {
        let own = i64::from(member.seat?.process.snapshot.process.pid);
        pids.get(&(member.in_group as usize)).filter(|pid| **pid > 0).map(|pid| *pid == own)
    };
    let known: Vec<bool> = group.members.iter().filter_map(member).collect();
    !known.is_empty() && known.iter().all(|is_same| *is_same)
}

fn recorded_pid(rank: &super::job::Rank) -> Option<i64> {
    rank.process().map(|process| i64::from(process.snapshot.process.pid))
}

impl Communicator {
    /// The ranks and their processes.
    fn pids(&self) -> impl Iterator<Item = (usize, i64)> + '_ {
        let missing = self.missing_ranks.iter().map(|missing| (missing.rank, missing.pid));
        self.ranks.iter().map(|rank| (rank.rank, rank.pid)).chain(missing)
    }

    /// The ranks in rows. `number` gives a rank's number in the job.
    fn rows(&self, number: impl Fn(usize) -> Option<u32>) -> Vec<Row> {
        let mut found: BTreeMap<(String, String), Vec<u32>> = BTreeMap::new();
        for rank in &self.ranks {
            let counts = rank.collective_counts.iter().filter(|(_, count)| **count > 0);
            let counts = listed(counts.map(|(name, count)| format!("{name} {count}")), 8);
            found.entry((counts, rank.status.word())).or_default().extend(number(rank.rank));
        }
        for missing in &self.missing_ranks {
            let state = if missing.status.considered_dead { "dead" } else { "no answer" };
            found.entry((String::new(), state.to_owned())).or_default().extend(number(missing.rank));
        }
        let row = |((counts, state), mut ranks): ((String, String), Vec<u32>)| {
            ranks.sort_unstable();
            Row { ranks, counts, state }
        };
        let mut rows: Vec<Row> = found.into_iter().map(row).collect();
        rows.sort_by_key(|row| row.ranks.len());
        rows
    }
}

impl RankStatus {
    fn word(&self) -> String {
        match self {
            RankStatus { abort_flag: true, .. } => "aborted".to_owned(),
            RankStatus { destroy_flag: true, .. } => "destroyed".to_owned(),
            RankStatus { finalize_called: true, .. } => "finalized".to_owned(),
            // ncclInProgress (7) is no error.
            RankStatus { async_error, .. } if ![0, 7].contains(async_error) => format!("error {async_error}"),
            RankStatus { init_state, .. } if *init_state != 0 => "in init".to_owned(),
            _ => "running".to_owned(),
        }
    }
}

/// The answers, which have to come by one moment together: a timeout of the socket alone would
/// begin anew with each byte.
struct Answers {
    stream: TcpStream,
    until: Instant,
}

impl Read for Answers {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(buffer) {
                // The kernel counts the timeout in ticks, so it may end up to a tick early.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}

/// Asks at an address. `None` where nothing listens there.
fn asked_at(address: &str, until: Instant) -> Option<Result<Status, String>> {
    let mut places = address.to_socket_addrs().ok()?;
    let stream = places.find_map(|place| TcpStream::connect_timeout(&place, PATIENCE / 5).ok())?;
    Some(asked(stream, until).map_err(|why| format!("NCCL's RAS at {address}: {why}")))
}

fn asked(mut stream: TcpStream, until: Instant) -> Result<Status, String> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("no answer within {} s", PATIENCE.as_secs_f64())
        }
        _ => error.to_string(),
    };
    stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
    let answers = Answers { stream: stream.try_clone().map_err(failed)?, until };
    let mut answers = BufReader::new(answers.take(MOST_BYTES));
    let requests = [
        ("CLIENT PROTOCOL 2".to_owned(), "SERVER PROTOCOL "),
        (format!("TIMEOUT {SECONDS}"), "OK"),
        ("SET FORMAT json".to_owned(), "OK"),
    ];
    for (request, expected) in requests {
        stream.write_all(format!("{request}\n").as_bytes()).map_err(failed)?;
        let mut answer = Vec::new();
        answers.by_ref().take(4096).read_until(b'\n', &mut answer).map_err(failed)?;
        if !answer.to_ascii_uppercase().starts_with(expected.as_bytes()) {
            let answer = String::from_utf8_lossy(&answer).trim().to_owned();
            return Err(format!("it answered {answer:?} to {request} (it knows JSON since NCCL 2.28.7)"));
        }
    }
    stream.write_all(b"STATUS\n").map_err(failed)?;
    let mut document = Vec::new();
    answers.read_to_end(&mut document).map_err(failed)?;
    serde_json::from_slice(&document).map_err(|error| format!("the document cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_that_sends_a_byte_now_and_then_has_one_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let dripping = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // The write fails when the other side has gone.
            while stream.write_all(b"S").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let (began, patience) = (Instant::now(), Duration::from_millis(300));
        let why = asked_at(&address, began + patience).unwrap().err().unwrap();
        assert!(why.ends_with(": no answer within 2.5 s") && began.elapsed() >= patience, "{why}");
        dripping.join().unwrap();
    }
}

//! The answer of a host about its processes when another host asks.
//!
//! ```text
//! devicemesh why         asks: Request, as JSON
//!      ^    |
//!      |    v            the job's store (devicemesh run), or the store of srun's `devicemesh why`
//!      |  devicemesh answer, or `devicemesh why` on the other host
//!      +--- answers: the length of the header, the header as JSON, the packed recordings
//! ```
//!
//! Nothing that comes back is trusted: every length has a limit, recordings are checked as those
//! in files are, and characters that act on a terminal are removed from texts.

use std::io::{Read, stdin};
use std::thread::sleep;
use std::time::Duration;

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::launcher::Place;
use recording::Snapshot;
use recording::packed::{pack, unpack};
use recording::place::recordings_of;
use rustix::process::getppid;
use serde::{Deserialize, Serialize};

use super::find::{Found, Started, live, place};
use super::process::{Origin, Process};
use super::stack::{Thread, threads_of};
use crate::failure::{Failure, advice_on_limits};
use crate::proc::descends;
use crate::run::from_a_peer;
use crate::stdio::print;

/// The version of requests and answers.
const FORMAT: u32 = 1;
/// The most bytes of an answer. A value of the store has 8 MiB at most.
pub const MOST_BYTES: usize = 4 << 20;
/// How many calls of each group an answer has: the first number with which the answer is short
/// enough.
const CALLS: [usize; 4] = [256, 64, 16, 4];
/// The most processes of an answer, and the most whose stacks are asked for.
const MOST_PROCESSES: usize = 4096;
const MOST_STACKS: usize = 64;
/// The longest time that `devicemesh answer` takes. A file of /proc may block for ever.
const LONGEST: Duration = Duration::from_secs(20);

/// The question.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Request {
    /// [`FORMAT`].
    format: u32,
    /// The processes whose stacks are asked for. Without any, the recordings are asked for.
    stacks: Vec<u32>,
}

/// The text at the beginning of an answer.
#[derive(Default, Serialize, Deserialize)]
struct Header {
    format: u32,
    host: String,
    processes: Vec<Told>,
    started: Vec<(u32, Seat)>,
    /// How many processes are left out because the answer would be too long.
    left_out: usize,
    unreadable: Vec<String>,
    stacks: Vec<(u32, Vec<Thread>)>,
    refusal: String,
}

/// A process with a recording.
#[derive(Serialize, Deserialize)]
struct Told {
    pid: u32,
    seat: Option<Seat>,
    /// The name of its program. The hosts of a job may have tools of different versions, and older
    /// ones do not send it.
    #[serde(default)]
    program: String,
    /// The number of bytes of its packed recording, which stand behind the header.
    bytes: usize,
}

/// A place that a launcher has given.
#[derive(Clone, Serialize, Deserialize)]
struct Seat {
    rank: usize,
    size: usize,
    local_rank: Option<usize>,
    local_size: Option<usize>,
    address: Option<(String, u16)>,
}

/// An answer.
pub struct Answer {
    /// The name of the host.
    pub host: String,
    /// The findings on the host.
    pub found: Found,
    /// The threads of the processes whose stacks were asked for.
    pub stacks: Vec<(u32, Vec<Thread>)>,
    /// Why stacks could not be read; empty where they were.
    pub refusal: String,
}

impl Request {
    /// Asks for the recordings.
    pub fn recordings() -> Request {
        Request { format: FORMAT, ..Request::default() }
    }

    /// Asks for the stacks of these processes.
    pub fn stacks(pids: Vec<u32>) -> Request {
        Request { format: FORMAT, stacks: pids }
    }

    /// The request as text.
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// `devicemesh answer`: answers the request on standard input for the job of the parent of this
/// process. `address` is where the ranks of that job meet.
pub fn answer_for_parent(address: &str) -> Result<u8, Failure> {
    let cannot = |error: std::io::Error| {
        let advice = advice_on_limits(&error);
        Failure::new(1, format!("cannot answer: {error}{advice}"))
    };
    let limit = || {
        sleep(LONGEST);
        std::process::exit(1);
    };
    std::thread::Builder::new().spawn(limit).map_err(cannot)?;
    let mut request = Vec::new();
    stdin().take(MOST_BYTES as u64).read_to_end(&mut request).map_err(cannot)?;
    let address = address.rsplit_once(':').and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
    let tool = getppid().map_or(0, |parent| parent.as_raw_nonzero().get().unsigned_abs());
    let is_of_job = |pid: u32, place: Option<&Place>| {
        place.is_some_and(|place| place.address.is_some() && place.address == address) || descends(pid, tool)
    };
    print(answer(&request, &is_of_job))?;
    Ok(0)
}

/// Answers a request. `is_of_job` says which processes are meant.
pub fn answer(request: &[u8], is_of_job: &dyn Fn(u32, Option<&Place>) -> bool) -> Vec<u8> {
    let mut header = Header { format: FORMAT, host: host_name(), ..Header::default() };
    let request: Request = match serde_json::from_slice(request) {
        Ok(request) => request,
        // The version tells the other side what is wrong.
        Err(_) => return framed(&header, &[]),
    };
    if request.format != FORMAT {
        return framed(&header, &[]);
    }
    if !request.stacks.is_empty() {
        for pid in request.stacks.into_iter().take(MOST_STACKS) {
            // Reading stacks stops a process for a moment, so only processes of the job that have a
            // recording are looked at.
            if is_of_job(pid, place(pid).as_ref()) && recordings_of(pid).next().is_some() {
                header.stacks.push((pid, threads_of(pid, true, &mut header.refusal)));
            }
        }
        return framed(&header, &[]);
    }
    framed_found(header, &live(), is_of_job, MOST_BYTES / 2)
}

/// The answer with what was found. The recordings have `most` bytes at most.
fn framed_found(
    mut header: Header,
    found: &Found,
    is_of_job: &dyn Fn(u32, Option<&Place>) -> bool,
    most: usize,
) -> Vec<u8> {
    header.unreadable = found.unreadable.iter().take(MOST_STACKS).cloned().collect();
    let started = found.started.iter().filter(|started| is_of_job(started.pid, Some(&started.place)));
    header.started = started.map(|started| (started.pid, Seat::of(&started.place))).take(MOST_PROCESSES).collect();
    // Each host sends the recordings of its own processes, also those in a folder that the hosts
    // share.
    let is_meant =
        |process: &&Process| process.origin == Origin::Here && is_of_job(process.pid, process.place.as_ref());
    let mut processes: Vec<&Process> = found.processes.iter().filter(is_meant).collect();
    let all = processes.len();
    processes.truncate(MOST_PROCESSES);
    let copies =
        |calls: usize| -> Vec<Vec<u8>> { processes.iter().map(|process| pack(&process.copy(calls))).collect() };
    let is_short = |packed: &Vec<Vec<u8>>| packed.iter().map(Vec::len).sum::<usize>() <= most;
    let mut packed = CALLS.iter().map(|calls| copies(*calls)).find(is_short).unwrap_or_else(|| copies(CALLS[3]));
    while !is_short(&packed) {
        packed.pop();
    }
    header.left_out = all - packed.len();
    let told = |(process, packed): (&&Process, &Vec<u8>)| {
        let seat = process.place.as_ref().map(Seat::of);
        Told { pid: process.pid, seat, program: process.program.clone(), bytes: packed.len() }
    };
    header.processes = processes.iter().zip(&packed).map(told).collect();
    framed(&header, &packed)
}

fn framed(header: &Header, packed: &[Vec<u8>]) -> Vec<u8> {
    let header = serde_json::to_vec(header).unwrap_or_default();
    let length = (header.len() as u32).to_le_bytes();
    [&length[..], &header, &packed.concat()].concat()
}

impl Answer {
    /// Reads an answer. Fails with the reason. `origin` is what is noted for its processes.
    pub fn read(bytes: &[u8], origin: Origin) -> Result<Answer, String> {
        let wrong = || "sent an answer that cannot be read".to_owned();
        if bytes.len() > MOST_BYTES {
            return Err(format!("sent an answer of {} bytes; the most are {MOST_BYTES}", bytes.len()));
        }
        let (length, rest) = bytes.split_at_checked(4).ok_or_else(wrong)?;
        let length = u32::from_le_bytes(length.try_into().map_err(|_| wrong())?) as usize;
        let (header, mut packed) = rest.split_at_checked(length).ok_or_else(wrong)?;
        let header: Header =
            from_a_peer(header).map_err(|error| format!("sent an answer that cannot be read: {error}"))?;
        if header.format != FORMAT {
            return Err("runs another version of devicemesh, which answers in another way".to_owned());
        }
        if header.processes.len() > MOST_PROCESSES || header.started.len() > MOST_PROCESSES {
            return Err(format!("sent more than {MOST_PROCESSES} processes"));
        }
        let (mut found, host) = (Found::default(), &header.host);
        found.unreadable = header.unreadable.iter().map(|line| format!("{host}: {line}")).collect();
        if header.left_out > 0 {
            found.unreadable.push(format!("{host} has {} more processes than fit into its answer", header.left_out));
        }
        for Told { pid, seat, program, bytes } in &header.processes {
            let (own, rest) = packed.split_at_checked(*bytes).ok_or_else(wrong)?;
            packed = rest;
            match unpack(own).and_then(|memory| Snapshot::of_bytes(&memory, &memory, &memory)) {
                Ok(snapshot) => match Process::of_copy(snapshot, Vec::new(), origin) {
                    Some(process) => {
                        let (place, program) = (seat.as_ref().map(Seat::place), program.clone());
                        found.processes.push(Process { pid: *pid, place, program, ..process });
                    }
                    // Older tools send this for a process that ended while they looked at it.
                    None => found.unreadable.push(format!("{host}: process {pid} has ended meanwhile")),
                },
                Err(error) => found.unreadable.push(format!("{host}: the recording of process {pid}: {error}")),
            }
        }
        let started = |(pid, seat): &(u32, Seat)| Started { pid: *pid, host: Some(host.clone()), place: seat.place() };
        found.started = header.started.iter().map(started).collect();
        Ok(Answer { host: header.host.clone(), found, stacks: header.stacks, refusal: header.refusal })
    }
}

impl Seat {
    fn of(place: &Place) -> Seat {
        let Place { rank, size, local_rank, local_size, address, .. } = place.clone();
        Seat { rank, size, local_rank, local_size, address }
    }

    fn place(&self) -> Place {
        let mut place = Place::new("another host", self.rank, self.size, self.local_rank);
        (place.local_size, place.address) = (self.local_size, self.address.clone());
        place
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;

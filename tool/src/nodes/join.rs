//! Reaching the job's store, and finding out who is which node.

use std::fmt;
use std::time::Duration;

use devicemesh::error::{Error, Status};
use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::{Secret, Server, Store, TcpStore};
use devicemesh::wait::{Deadline, Wait};
use serde::{Deserialize, Serialize};

use super::{Meeting, NODES, OVER, Reached, Shared, TELL, from_a_peer, read_cause};
use crate::cause::Cause;
use crate::ranks::Plan;

/// Set where a `devicemesh run` serves the store for other nodes.
const SERVED: &str = "run/served";
/// After that, whoever could serve the store itself looks whether its port is free by now.
const TRY: Duration = Duration::from_secs(1);
/// How long whoever serves the store may take to say so.
const SAY_SO: Duration = Duration::from_secs(10);
/// Between two looks whether the server of a job that is over has gone.
const PAUSE: Duration = Duration::from_millis(50);

/// What a node says of itself.
#[derive(Serialize, Deserialize)]
struct Entry {
    host: String,
    pid: u32,
    nodes: u32,
    node: Option<u32>,
    ranks: u32,
    id: Option<String>,
    version: String,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.host, self.pid)
    }
}

/// Meets the other nodes. What is wrong with one of them ends the job for all, unless it is one too many.
pub(super) fn join(shared: &Shared, meeting: &Meeting) -> Result<Plan, Cause> {
    let refused = |error: Error| Cause::Refused { message: error.message().to_owned() };
    let wait = shared.wait(meeting.timeout);
    let reached = reach(meeting, &wait).map_err(refused)?;
    let Reached { store, server } = shared.reached.get_or_init(|| reached);
    let me = Entry {
        host: host_name(),
        pid: std::process::id(),
        nodes: meeting.nodes,
        node: meeting.node,
        ranks: meeting.ranks,
        id: meeting.id.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let number = register(store, &me, server.is_some(), &wait).map_err(refused)?;
    let _ = shared.number.set(number);
    let mut entries = Vec::new();
    let came = collect(shared, meeting, store, &me, number, &mut entries, &wait);
    // The job of those that were there before goes on.
    let too_many = entries.first().is_some_and(|first| number > first.nodes);
    match came {
        Ok(()) if too_many => Err(one_too_many(meeting, &entries)),
        Ok(()) => {
            let _ = shared.serving.set(format!("node {} ({})", ranks(&entries)[0], entries[0].host));
            plan(meeting, &entries, number)
        }
        Err(cause) if too_many || shared.cancel.is_raised() => Err(cause),
        Err(cause) => Err(shared.end(cause)),
    }
}

/// The store of this job, and its server where this is the node that serves it.
fn reach(meeting: &Meeting, wait: &Wait) -> Result<Reached, Error> {
    let may_serve = meeting.node.is_none_or(|node| node == 0);
    let secret = Secret::from_environment()?;
    loop {
        wait.look_around()?;
        let server = match may_serve.then(|| Server::at(&meeting.host, meeting.port, secret.clone())) {
            Some(Ok(server)) => Some(server),
            // Another node 0 may serve there, or the job before this one: it is asked. But this must be the host that is named.
            Some(Err(error)) if meeting.node == Some(0) && error.os_error() != libc::EADDRINUSE => return Err(error),
            _ => None,
        };
        let short = Deadline::after(wait.deadline.left().min(TRY));
        let limited = if may_serve { wait.with_deadline(short) } else { wait.clone() };
        let store = match TcpStore::connect_with_secret(&meeting.host, meeting.port, secret.clone(), &limited) {
            Ok(store) => store,
            Err(_) if limited.deadline.passed() && !wait.deadline.passed() => continue,
            Err(error) if wait.deadline.passed() => return Err(nobody_serves(meeting, &error)),
            Err(error) => return Err(error),
        };
        if server.is_some() {
            return Ok(Reached { store, server });
        }
        match fresh(&store, meeting, wait) {
            Ok(true) => return Ok(Reached { store, server }),
            // It is just going away.
            Ok(false) => std::thread::sleep(PAUSE),
            Err(error) if error.status() == Status::Store && !wait.deadline.passed() => std::thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
        if wait.deadline.passed() {
            let store = meeting.store();
            return Err(Error::timeout(format!(
                "the job that {store} was served for is over, but its server is still there: end it, or choose another port with --rdzv-endpoint"
            )));
        }
    }
}

fn nobody_serves(meeting: &Meeting, error: &Error) -> Error {
    let who = if meeting.node.is_none() { "one of the nodes" } else { "node 0" };
    Error::timeout(format!(
        "nobody serves {} after {} s; {who} must run on the host that --rdzv-endpoint names, and its port be open to the others ({})",
        meeting.store(),
        meeting.timeout.as_secs_f64(),
        error.message()
    ))
}

/// Whether the job of this store is still to begin, or has begun.
fn fresh(store: &TcpStore, meeting: &Meeting, wait: &Wait) -> Result<bool, Error> {
    let soon = wait.with_deadline(Deadline::after(wait.deadline.left().min(SAY_SO)));
    match store.get_any(&[OVER, SERVED], &soon) {
        Ok((found, _)) => Ok(found != 0),
        Err(error) if error.status() == Status::Timeout => Err(Error::invalid(format!(
            "what listens at {} is a store, but none of a devicemesh run for several nodes: choose another port with --rdzv-endpoint",
            meeting.store()
        ))),
        Err(error) => Err(error),
    }
}

/// The how-manieth to come this node is. The one that serves is the first.
fn register(store: &TcpStore, me: &Entry, serves: bool, wait: &Wait) -> Result<u32, Error> {
    let number = store.add(NODES, 1, wait)?;
    if !store.leave_last_word("run/gone", number.to_string().as_bytes(), wait)? {
        return Err(Error::store(format!("{} is not served by a devicemesh run", store.name())));
    }
    let text = serde_json::to_vec(me).map_err(|error| Error::internal(error.to_string()))?;
    store.set(&entry(number), &text, wait)?;
    if serves {
        store.set(SERVED, b"1", wait)?;
    }
    u32::try_from(number).map_err(|_| Error::store(format!("{} nodes came to {}", number, store.name())))
}

fn entry(number: impl fmt::Display) -> String {
    format!("run/node/{number}")
}

fn read_entry(text: &[u8]) -> Result<Entry, Cause> {
    from_a_peer(text).map_err(|error| {
        let message = format!("a node says {:?} of itself: {error}", String::from_utf8_lossy(text));
        Cause::Refused { message }
    })
}

/// All entries of the job, each compared with what this node says.
fn collect(
    shared: &Shared,
    meeting: &Meeting,
    store: &TcpStore,
    me: &Entry,
    number: u32,
    entries: &mut Vec<Entry>,
    wait: &Wait,
) -> Result<(), Cause> {
    let mut gone = 0;
    while entries.len() < meeting.nodes as usize {
        let (next, lost) = (entry(entries.len() + 1), format!("run/gone/{}", gone + 1));
        match store.get_any(&[OVER, &next, &lost], wait) {
            Ok((0, text)) => return Err(read_cause(&text)),
            Ok((1, text)) => {
                let their = read_entry(&text)?;
                let itself = entries.len() + 1 == number as usize;
                if let Some(message) = (!itself).then(|| disagree(me, &their)).flatten() {
                    entries.push(their);
                    return Err(Cause::Refused { message });
                }
                entries.push(their);
            }
            Ok((_, word)) => {
                gone += 1;
                let number: usize = String::from_utf8_lossy(&word).parse().unwrap_or_default();
                if (1..=entries.len()).contains(&number) {
                    let node = format!("the node on {}", entries[number - 1]);
                    return Err(Cause::Gone { node });
                }
            }
            Err(error) if error.status() == Status::Timeout => {
                return Err(Cause::Refused { message: missing(meeting, entries) });
            }
            Err(error) => {
                let message = shared.server_gone(&error);
                return Err(Cause::Lost { message });
            }
        }
    }
    Ok(())
}

/// Why these two are not nodes of one job.
fn disagree(me: &Entry, their: &Entry) -> Option<String> {
    let id = |entry: &Entry| entry.id.as_ref().map_or("none".to_owned(), |id| format!("{id:?}"));
    if me.version != their.version {
        return Some(format!(
            "{me} has devicemesh {}, {their} has {}: install the same on all nodes",
            me.version, their.version
        ));
    }
    if me.id != their.id {
        return Some(format!(
            "{me} has --rdzv-id {}, {their} has {}: two jobs need two ports in --rdzv-endpoint",
            id(me),
            id(their)
        ));
    }
    if me.nodes != their.nodes {
        return Some(format!(
            "{me} has --nnodes {}, {their} has --nnodes {}: say the same on all nodes",
            me.nodes, their.nodes
        ));
    }
    match (me.node, their.node) {
        (Some(mine), Some(theirs)) if mine == theirs => Some(format!(
            "{me} and {their} both have --node-rank {mine}: number the nodes 0 to {}, or leave --node-rank out",
            me.nodes - 1
        )),
        _ => None,
    }
}

fn missing(meeting: &Meeting, entries: &[Entry]) -> String {
    let (nodes, came) = (meeting.nodes, entries.len());
    let claimed: Vec<u32> = entries.iter().filter_map(|entry| entry.node).collect();
    let who = if claimed.len() == came {
        let missing: Vec<u32> = (0..nodes).filter(|node| !claimed.contains(node)).collect();
        let some: Vec<String> = missing.iter().take(8).map(u32::to_string).collect();
        let rest = if missing.len() > 8 { format!(" and {} more", missing.len() - 8) } else { String::new() };
        format!("node{} {}{rest} of {nodes}", if missing.len() > 1 { "s" } else { "" }, some.join(", "))
    } else {
        format!("{} of {nodes} nodes", nodes as usize - came)
    };
    format!(
        "{who} did not come to {} within {} s (--rdzv-timeout); there {} {}: start the same devicemesh run on every node",
        meeting.store(),
        meeting.timeout.as_secs_f64(),
        if came == 1 { "is" } else { "are" },
        there(entries)
    )
}

/// Up to eight of them, with the ranks they gave themselves.
fn there(entries: &[Entry]) -> String {
    let text = |entry: &Entry| match entry.node {
        Some(node) => format!("node {node} on {entry}"),
        None => format!("one on {entry}"),
    };
    let mut names: Vec<String> = entries.iter().take(8).map(text).collect();
    if entries.len() > 8 {
        names.push(format!("{} more", entries.len() - 8));
    }
    names.join(", ")
}

fn one_too_many(meeting: &Meeting, entries: &[Entry]) -> Cause {
    let message = format!(
        "the job at {} has its {} already ({}): for another job choose another port with --rdzv-endpoint",
        meeting.store(),
        if entries.len() == 1 { "node".to_owned() } else { format!("{} nodes", entries.len()) },
        there(entries)
    );
    Cause::Refused { message }
}

/// Each node's rank, in the order of arrival: what it says, and the others fill the gaps.
fn ranks(entries: &[Entry]) -> Vec<u32> {
    let claimed: Vec<u32> = entries.iter().filter_map(|entry| entry.node).collect();
    let mut free = (0..).filter(|node| !claimed.contains(node));
    entries.iter().map(|entry| entry.node.or_else(|| free.next()).unwrap_or_default()).collect()
}

fn plan(meeting: &Meeting, entries: &[Entry], number: u32) -> Result<Plan, Cause> {
    let order = ranks(entries);
    let index = number as usize - 1;
    let sum = |of: &dyn Fn(u32) -> bool| -> u64 {
        entries.iter().zip(&order).filter(|(_, node)| of(**node)).map(|(entry, _)| u64::from(entry.ranks)).sum()
    };
    let node = order[index];
    let (first, world) = (sum(&|other| other < node), sum(&|_| true));
    let Some(world) = u32::try_from(world).ok().filter(|world| *world <= i32::MAX as u32) else {
        return Err(Cause::Refused { message: format!("{world} ranks are more than a world can have") });
    };
    let id = meeting.id.clone().unwrap_or_else(|| format!("devicemesh-{}-{}", entries[0].host, entries[0].pid));
    Ok(Plan {
        node,
        nodes: meeting.nodes,
        first: first as u32,
        count: meeting.ranks,
        world,
        host: meeting.host.clone(),
        port: meeting.port,
        id,
        called: (meeting.nodes > 1).then(|| entries[index].host.clone()),
    })
}

/// "node 1 (beta)", of the n-th that came.
pub(super) fn name(store: &TcpStore, nodes: u32, number: u32) -> String {
    let read = |number: u32| {
        let text = store.try_get(&entry(number), &Wait::after(TELL)).ok().flatten()?;
        read_entry(&text).ok()
    };
    let entries: Option<Vec<Entry>> = (1..=nodes).map(read).collect();
    match entries {
        Some(entries) => {
            let index = number as usize - 1;
            format!("node {} ({})", ranks(&entries)[index], entries[index].host)
        }
        None => format!("the {number}. node that came"),
    }
}

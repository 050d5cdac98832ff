//! Brings a node to the job's store, where it finds the other nodes and learns its share of the
//! ranks.

use std::time::Duration;

use devicemesh::error::{Error, Status};
use devicemesh::rendezvous::store::{Secret, Server, Store, TcpStore};
use devicemesh::wait::{Deadline, Wait};
use rustix::io::Errno;

use super::entry::{Entry, list, numbers};
use super::keys::{self, GONE, NODES, OVER, SERVED};
use super::peer::read_cause;
use super::shared::{Reached, Shared};
use crate::run::assignment::Assignment;
use crate::run::cause::Cause;
use crate::run::rendezvous::Rendezvous;

/// How long a node that could serve the store itself tries to connect. After that it checks
/// whether its port is free now.
const TRY: Duration = Duration::from_secs(1);
/// How long the tool that serves the store may take to mark it as served.
const MARKED: Duration = Duration::from_secs(10);
/// The pause before a node looks again whether the server of a job that is over has gone.
const PAUSE: Duration = Duration::from_millis(50);

/// Meets the other nodes. An error of any node ends the job for all nodes, except an error of a
/// node that came when the job was complete.
pub fn join(shared: &Shared, rendezvous: &Rendezvous) -> Result<Assignment, Cause> {
    let refused = |error: Error| Cause::Refused { message: error.message().to_owned() };
    let wait = shared.wait(rendezvous.timeout);
    let reached = reach(rendezvous, &wait).map_err(refused)?;
    let Reached { store, server } = shared.reached.get_or_init(|| reached);
    let me = Entry::of_this_node(rendezvous);
    let arrival = register(store, &me, server.is_some(), &wait).map_err(refused)?;
    let _ = shared.arrival.set(arrival);
    let mut entries = Vec::new();
    let collected = collect(shared, rendezvous, store, &me, arrival, &mut entries, &wait);
    // The job of the nodes that were there before goes on.
    let too_many = entries.first().is_some_and(|first| arrival > first.nodes);
    match collected {
        Ok(()) if too_many => Err(one_too_many(rendezvous, &entries)),
        Ok(()) => {
            let _ = shared.serving.set(format!("node {} ({})", numbers(&entries)[0], entries[0].host));
            assign(rendezvous, &entries, arrival)
        }
        Err(cause) if too_many || shared.is_cancelled() => Err(cause),
        Err(cause) => Err(shared.end(cause)),
    }
}

/// Connects to the job's store. Serves it where this node may and nobody else does.
fn reach(rendezvous: &Rendezvous, wait: &Wait) -> Result<Reached, Error> {
    let Rendezvous { host, port, node, .. } = rendezvous;
    let may_serve = node.is_none_or(|node| node == 0);
    let in_use = |error: &Error| error.os_error() == Errno::ADDRINUSE.raw_os_error();
    let secret = Secret::from_environment()?;
    loop {
        wait.look_around()?;
        let server = match may_serve.then(|| Server::at(host, *port, secret.clone())) {
            Some(Ok(server)) => Some(server),
            // The named host must be node 0's. If the port is in use, another node 0 or the job
            // before this one may serve a store there. The content of that store shows which.
            Some(Err(error)) if *node == Some(0) && !in_use(&error) => return Err(error),
            _ => None,
        };
        let short = Deadline::after(wait.deadline.left().min(TRY));
        let limited = if may_serve { wait.with_deadline(short) } else { wait.clone() };
        let store = match TcpStore::connect_with_secret(host, *port, secret.clone(), &limited) {
            Ok(store) => store,
            Err(_) if limited.deadline.passed() && !wait.deadline.passed() => continue,
            Err(error) if wait.deadline.passed() => return Err(nobody_serves(rendezvous, &error)),
            Err(error) => return Err(error),
        };
        if server.is_some() {
            return Ok(Reached { store, server });
        }
        match is_current(&store, rendezvous, wait) {
            Ok(true) => return Ok(Reached { store, server }),
            // The server of the job before this one is just ending.
            Ok(false) => std::thread::sleep(PAUSE),
            Err(error) if error.status() == Status::Store && !wait.deadline.passed() => std::thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
        if wait.deadline.passed() {
            let store = rendezvous.store();
            return Err(Error::timeout(format!(
                "the job that {store} was served for is over, but its server is still there: end it, or choose another port with --rdzv-endpoint"
            )));
        }
    }
}

fn nobody_serves(rendezvous: &Rendezvous, error: &Error) -> Error {
    let who = if rendezvous.node.is_none() { "one of the nodes" } else { "node 0" };
    Error::timeout(format!(
        "nobody serves {} after {} s; {who} must run on the host that --rdzv-endpoint names, and its port be open to the others ({})",
        rendezvous.store(),
        rendezvous.timeout.as_secs_f64(),
        error.message()
    ))
}

/// Whether the job of this store is not over.
fn is_current(store: &TcpStore, rendezvous: &Rendezvous, wait: &Wait) -> Result<bool, Error> {
    let soon = wait.with_deadline(Deadline::after(wait.deadline.left().min(MARKED)));
    match store.get_any(&[OVER, SERVED], &soon) {
        Ok((found, _)) => Ok(found != 0),
        Err(error) if error.status() == Status::Timeout => Err(Error::invalid(format!(
            "what listens at {} is a store, but none of a devicemesh run for several nodes: choose another port with --rdzv-endpoint",
            rendezvous.store()
        ))),
        Err(error) => Err(error),
    }
}

/// Leaves this node's entry in the store. Returns its arrival number, which is 1 for the node that
/// serves the store.
fn register(store: &TcpStore, me: &Entry, serves: bool, wait: &Wait) -> Result<u32, Error> {
    let arrival = store.add(NODES, 1, wait)?;
    if !store.leave_last_word(GONE, arrival.to_string().as_bytes(), wait)? {
        return Err(Error::store(format!("{} is not served by a devicemesh run", store.name())));
    }
    let text = serde_json::to_vec(me).map_err(|error| Error::internal(error.to_string()))?;
    store.set(&keys::node(arrival), &text, wait)?;
    if serves {
        store.set(SERVED, b"1", wait)?;
    }
    u32::try_from(arrival).map_err(|_| Error::store(format!("{arrival} nodes came to {}", store.name())))
}

/// Reads the entries of all nodes in the order of arrival, and compares each with this node's.
/// `entries` holds those that were read, also after an error.
fn collect(
    shared: &Shared,
    rendezvous: &Rendezvous,
    store: &TcpStore,
    me: &Entry,
    arrival: u32,
    entries: &mut Vec<Entry>,
    wait: &Wait,
) -> Result<(), Cause> {
    let mut gone = 0;
    while entries.len() < rendezvous.nodes as usize {
        let (next, lost) = (keys::node(entries.len() + 1), keys::gone(gone + 1));
        match store.get_any(&[OVER, &next, &lost], wait) {
            Ok((0, text)) => return Err(read_cause(&text)),
            Ok((1, text)) => {
                let their = Entry::read(&text)?;
                let is_mine = entries.len() + 1 == arrival as usize;
                let disagreement = if is_mine { None } else { me.disagreement(&their) };
                entries.push(their);
                if let Some(message) = disagreement {
                    return Err(Cause::Refused { message });
                }
            }
            Ok((_, word)) => {
                gone += 1;
                let arrival: usize = String::from_utf8_lossy(&word).parse().unwrap_or_default();
                if (1..=entries.len()).contains(&arrival) {
                    let node = format!("the node on {}", entries[arrival - 1]);
                    return Err(Cause::Gone { node });
                }
            }
            Err(error) if error.status() == Status::Timeout => {
                return Err(Cause::Refused { message: missing(rendezvous, entries) });
            }
            Err(error) => {
                let message = shared.store_lost(&error);
                return Err(Cause::Lost { message });
            }
        }
    }
    Ok(())
}

/// Says which nodes have not arrived. Where all that have arrived claim a number, the numbers of
/// the others are known.
fn missing(rendezvous: &Rendezvous, entries: &[Entry]) -> String {
    let (nodes, arrived) = (rendezvous.nodes, entries.len());
    let claimed: Vec<u32> = entries.iter().filter_map(|entry| entry.node).collect();
    let who = if claimed.len() == arrived {
        let missing: Vec<u32> = (0..nodes).filter(|node| !claimed.contains(node)).collect();
        let some: Vec<String> = missing.iter().take(8).map(u32::to_string).collect();
        let rest = if missing.len() > 8 { format!(" and {} more", missing.len() - 8) } else { String::new() };
        format!("node{} {}{rest} of {nodes}", if missing.len() > 1 { "s" } else { "" }, some.join(", "))
    } else {
        format!("{} of {nodes} nodes", nodes as usize - arrived)
    };
    format!(
        "{who} did not come to {} within {} s (--rdzv-timeout); there {} {}: start the same devicemesh run on every node",
        rendezvous.store(),
        rendezvous.timeout.as_secs_f64(),
        if arrived == 1 { "is" } else { "are" },
        list(entries)
    )
}

fn one_too_many(rendezvous: &Rendezvous, entries: &[Entry]) -> Cause {
    let message = format!(
        "the job at {} has its {} already ({}): for another job choose another port with --rdzv-endpoint",
        rendezvous.store(),
        if entries.len() == 1 { "node".to_owned() } else { format!("{} nodes", entries.len()) },
        list(entries)
    );
    Cause::Refused { message }
}

/// This node's share of the ranks. Node 0 has the first ranks.
fn assign(rendezvous: &Rendezvous, entries: &[Entry], arrival: u32) -> Result<Assignment, Cause> {
    let numbers = numbers(entries);
    let index = arrival as usize - 1;
    let node = numbers[index];
    let ranks_of = |counts: &dyn Fn(u32) -> bool| -> u64 {
        let counted = entries.iter().zip(&numbers).filter(|(_, number)| counts(**number));
        counted.map(|(entry, _)| u64::from(entry.ranks)).sum()
    };
    let (first_rank, world_size) = (ranks_of(&|number| number < node), ranks_of(&|_| true));
    let Some(world_size) = u32::try_from(world_size).ok().filter(|size| *size <= i32::MAX as u32) else {
        return Err(Cause::Refused { message: format!("{world_size} ranks are more than a world can have") });
    };
    let id = rendezvous.id.clone().unwrap_or_else(|| format!("devicemesh-{}-{}", entries[0].host, entries[0].pid));
    Ok(Assignment {
        node,
        nodes: rendezvous.nodes,
        first_rank: first_rank as u32,
        ranks: rendezvous.ranks,
        world_size,
        host: rendezvous.host.clone(),
        port: rendezvous.port,
        id,
        host_name: (rendezvous.nodes > 1).then(|| entries[index].host.clone()),
    })
}

//! Finds the job's store, or serves it.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use devicemesh::error::{Error, Status};
use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::{Secret, Server, Store, TcpStore};
use devicemesh::wait::{Deadline, Wait};
use rustix::io::Errno;

use super::attempt::{SECRET, TRY, locked_out, why};
use super::board::Board;
use super::keys::{OVER, SERVED};
use super::name::wait_for_name;
use super::place::Place;
use super::port::{is_taken_by_a_stranger, listener};
use super::progress::Progress;
use super::service;
use super::shared::Reached;
use crate::run::rendezvous::{Origin, Rendezvous, is_here, is_loopback};

/// How long the tool that serves the store may take to mark it as served, and how long the port may
/// be in use by a process of another user that gives no answer as a store.
const MARKED: Duration = Duration::from_secs(10);
/// How long node 0 looks for a store at an endpoint that is at another host.
const ELSEWHERE: Duration = Duration::from_secs(3);
/// The pause before a node looks again whether the server of a job that is over has gone.
const PAUSE: Duration = Duration::from_millis(50);

/// Connects to the job's store. Serves it where this node may and nobody else does.
pub fn reach(rendezvous: &Rendezvous, wait: &Wait, progress: &mut Progress<'_>) -> Result<Reached, Error> {
    let Rendezvous { host, port, node, .. } = rendezvous;
    let may_serve = node.is_none_or(|node| node == 0);
    let must_serve = *node == Some(0);
    let in_use = |error: &Error| error.os_error() == Errno::ADDRINUSE.raw_os_error();
    let secret = Secret::from_environment()?;
    let addresses = wait_for_name(rendezvous, wait, progress)?;
    let place = Place::new(rendezvous, &addresses);
    progress.remark(place.remark.clone());
    if rendezvous.has_service() {
        return service::enter(rendezvous, place, wait, progress);
    }
    let began = Instant::now();
    loop {
        wait.look_around()?;
        let (server, is_taken) = match may_serve.then(|| Server::at(host, *port, secret.clone())) {
            Some(Ok(server)) => (Some(server), false),
            // The named host must be the host of node 0. If the port is in use, another node 0 or
            // an earlier job may serve a store there. The content of that store shows which of the
            // two.
            Some(Err(error)) if must_serve && !in_use(&error) => {
                let store = store_elsewhere(rendezvous, secret, &error, wait)?;
                return match store {
                    Some(store) => Ok(Reached { store: Board::new(store, None), place, server: None, begins: false }),
                    None => Err(cannot_serve(rendezvous, &place, &error)),
                };
            }
            // Another program has the port, so no node can serve the store there. (If a devicemesh
            // has the port, it may serve this job, or it may be about to end.)
            Some(Err(error)) if in_use(&error) && is_taken_by_a_stranger(*port) => {
                return Err(port_in_use(rendezvous, "that is no devicemesh run"));
            }
            Some(Err(error)) => (None, in_use(&error)),
            None => (None, false),
        };
        let limited = if server.is_some() { wait.clone() } else { progress.pause(TRY) };
        let store = match TcpStore::connect_with_secret(host, *port, secret.clone(), &limited) {
            Ok(store) => store,
            // Only a try with enough time shows that there is no store.
            Err(error) if limited.deadline.passed() && !wait.deadline.passed() => {
                if is_taken && began.elapsed() > MARKED && (must_serve || listener(*port).is_empty()) {
                    return Err(port_in_use(rendezvous, "what listens there gives no answer as a store"));
                }
                progress.tell(|| waiting(rendezvous, &place, &error));
                continue;
            }
            Err(error) if wait.deadline.passed() => {
                return Err(match is_taken {
                    true => port_in_use(rendezvous, &why(&error)),
                    false => nobody_serves(rendezvous, &place, &error),
                });
            }
            // A store that wants a secret is a store.
            Err(error) if error.message().contains(SECRET) => return Err(locked_out(rendezvous, error)),
            Err(error) if error.status() == Status::Store => {
                return Err(match is_taken {
                    true => port_in_use(rendezvous, "what listens there is no store"),
                    false => no_store(rendezvous),
                });
            }
            Err(error) => return Err(error),
        };
        if server.is_some() {
            if let Some(warning) = unreachable_name(rendezvous, &addresses) {
                // This is no error without a list of hosts, because all nodes may be on this host.
                if rendezvous.hosts.iter().any(|host| !is_here(host)) {
                    return Err(Error::invalid(warning));
                }
                progress.say(warning);
            }
            return Ok(Reached { store: Board::new(store, None), place, server, begins: true });
        }
        match is_current(&store, rendezvous, wait) {
            Ok(true) => return Ok(Reached { store: Board::new(store, None), place, server: None, begins: false }),
            // The server of an earlier job is just ending.
            Ok(false) => std::thread::sleep(PAUSE),
            Err(error) if error.status() == Status::Store && !wait.deadline.passed() => std::thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
        progress.tell(|| match rendezvous.restart.restarts {
            0 => format!("the job before this one to leave {}", place.at),
            _ => "the other nodes to end their ranks before the restart".to_owned(),
        });
        if wait.deadline.passed() {
            let store = &place.at;
            return Err(Error::timeout(format!(
                "the job that {store} was served for is over, but its server is still there: end it, or choose another port with --rdzv-endpoint"
            )));
        }
    }
}

/// Returns a warning if the endpoint's name, which is neither an address nor localhost, means only
/// loopback addresses on this host. Debian's /etc/hosts gives a host's own name such an address.
fn unreachable_name(rendezvous: &Rendezvous, addresses: &[IpAddr]) -> Option<String> {
    let (host, port) = (&rendezvous.host, rendezvous.port);
    if rendezvous.nodes < 2 || is_loopback(host) {
        return None;
    }
    let first = addresses.first().filter(|_| addresses.iter().all(IpAddr::is_loopback))?;
    Some(format!(
        "the name {host} is {first} on {} (see /etc/hosts), which no other host can reach: name an address of this host by --rdzv-endpoint, as 10.0.0.5:{port}",
        host_name()
    ))
}

/// Who must serve the store, for messages.
fn server_of(rendezvous: &Rendezvous) -> &'static str {
    if rendezvous.node.is_none() { "one of the nodes" } else { "node 0" }
}

fn waiting(rendezvous: &Rendezvous, place: &Place, error: &Error) -> String {
    format!("{} to serve {} ({})", server_of(rendezvous), place.at, why(error))
}

fn nobody_serves(rendezvous: &Rendezvous, place: &Place, error: &Error) -> Error {
    let host = match rendezvous.origin {
        Origin::Endpoint => "the host that --rdzv-endpoint names".to_owned(),
        Origin::Hosts(option) => format!("the first host of {option}"),
        Origin::Launcher | Origin::Service => rendezvous.host.clone(),
    };
    Error::timeout(format!(
        "nobody serves {} after {} s; {} must run on {host}, and its port be open to the others ({}){}",
        place.at,
        rendezvous.timeout.as_secs_f64(),
        server_of(rendezvous),
        why(error),
        place.remark
    ))
}

/// Returns the store of a job at the endpoint, where node 0 cannot serve it because of that error:
/// the endpoint is at another host, where a node with the same number serves it. Both nodes learn
/// of each other in that store. Fails if the store wants another secret.
fn store_elsewhere(
    rendezvous: &Rendezvous,
    secret: Option<Secret>,
    error: &Error,
    wait: &Wait,
) -> Result<Option<TcpStore>, Error> {
    // In a list of hosts each node has a number of its own.
    if !rendezvous.hosts.is_empty() || error.os_error() != Errno::ADDRNOTAVAIL.raw_os_error() {
        return Ok(None);
    }
    let limited = wait.with_deadline(Deadline::after(wait.deadline.left().min(ELSEWHERE)));
    match TcpStore::connect_with_secret(&rendezvous.host, rendezvous.port, secret, &limited) {
        Ok(store) => Ok(is_current(&store, rendezvous, &limited).is_ok_and(|current| current).then_some(store)),
        Err(error) if error.message().contains(SECRET) => Err(locked_out(rendezvous, error)),
        Err(_) => Ok(None),
    }
}

/// The error of node 0 where the kernel does not let it serve the store at the endpoint.
fn cannot_serve(rendezvous: &Rendezvous, place: &Place, error: &Error) -> Error {
    let (here, at) = (host_name(), &place.at);
    // In a list of hosts each node has the number of its host.
    let or = if rendezvous.hosts.is_empty() { ", or this node needs another --node-rank" } else { "" };
    Error::store(match error.os_error() == Errno::ADDRNOTAVAIL.raw_os_error() {
        true => format!(
            "node 0 is on {here}, and {at} is at another host: --rdzv-endpoint must name the host of node 0{or}"
        ),
        false => format!("node 0 on {here}: {}", error.message()),
    })
}

/// The error of a node that cannot serve the store, because something else listens at its port.
fn port_in_use(rendezvous: &Rendezvous, why: &str) -> Error {
    let port = rendezvous.port;
    Error::invalid(format!(
        "port {port} of {} is in use{}, so the job's store cannot be served at {} ({why}): choose another port with --rdzv-endpoint",
        host_name(),
        listener(port),
        rendezvous.store()
    ))
}

fn no_store(rendezvous: &Rendezvous) -> Error {
    Error::invalid(format!(
        "what listens at {} is no store: choose another port with --rdzv-endpoint",
        rendezvous.store()
    ))
}

/// Whether the job of this store is not over.
fn is_current(store: &TcpStore, rendezvous: &Rendezvous, wait: &Wait) -> Result<bool, Error> {
    let soon = wait.with_deadline(Deadline::after(wait.deadline.left().min(MARKED)));
    match store.get_any(&[OVER, SERVED], &soon) {
        Ok((found, _)) => Ok(found != 0),
        Err(error) if error.status() == Status::Timeout => Err(Error::invalid(format!(
            "what listens at {} is a store, but none of a devicemesh run with --rdzv-endpoint: choose another port, or name it by --store if it is a `devicemesh store`",
            rendezvous.store()
        ))),
        Err(error) => Err(error),
    }
}

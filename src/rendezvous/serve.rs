//! Runs the server of the store on behalf of rank 0.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use once_cell::sync::Lazy;

use super::listeners::{anybody_listens, listens};
use super::store::{NotListening, NotResolved, Secret, Server, not_resolved, resolve_in_time};
use crate::error::{Error, Result};
use crate::wait::{Deadline, Wait};

/// How long a service that listens at the port already may take to end. Such a service may be the
/// server of an earlier job, which is about to end.
const GOING: Duration = Duration::from_secs(1);
/// The pause between two tries. Looking for a listener reads the list of all sockets of the host,
/// which may be long.
const PAUSE: Duration = Duration::from_millis(50);

/// The host and the port at which a server was asked for.
type At = (String, u16);

/// The servers of this process.
static SERVERS: Lazy<Mutex<HashMap<At, Weak<Server>>>> = Lazy::new(Mutex::default);

/// Returns this process's server at that address. A second world at that address uses the server
/// that runs already. Returns `None` when another library of this process serves there, as
/// PyTorch's rank 0 does in a program that called init_process_group before. That store is no older
/// than this process, so it is as good as ours.
///
/// A port that only a connection of this host holds (the kernel gives free ports to outgoing
/// connections) is tried again until the deadline. A port at which somebody else listens is an
/// error after [`GOING`]. The server is told how many ranks will connect to it.
pub(super) fn serve(
    (host, port): (&str, u16),
    ranks: usize,
    secret: Option<&Secret>,
    wait: &Wait,
) -> Result<Option<Arc<Server>>> {
    let at = (host.to_owned(), port);
    if let Some(running) = running(&servers(), &at) {
        running.expect_ranks(ranks);
        return Ok(Some(running));
    }
    // The lock is not held here, because the system's resolver may take long, and other threads of
    // this process may join worlds at other addresses meanwhile.
    let addresses = addresses(host, port, wait)?;
    let going = Deadline::after(GOING);
    loop {
        let (not_listening, ours_ended) = match start(&at, &addresses, secret)? {
            Ok(server) => {
                server.expect_ranks(ranks);
                return Ok(Some(server));
            }
            Err((not_listening, _)) if not_listening.cause.kind() != ErrorKind::AddrInUse => {
                return Err(not_listening.explained(None));
            }
            Err(taken) => taken,
        };
        // A server of this process that another thread is dropping still listens for a moment.
        if listens(port) && (!ours_ended || going.passed()) {
            return Ok(None);
        }
        if anybody_listens(port) && going.passed() {
            return Err(not_listening.explained(None));
        }
        if wait.deadline.passed() {
            let held = format!(
                "no process listens there, but a connection of this host has held the port for {} ms; the kernel gives connections the ports of net.ipv4.ip_local_port_range",
                wait.deadline.timeout().as_millis()
            );
            return Err(not_listening.explained(Some(&held)));
        }
        wait.cancel.check()?;
        std::thread::sleep(wait.deadline.left().min(PAUSE));
    }
}

/// A server, or why it cannot listen and whether an earlier server of this process was at the same
/// address.
type Started = std::result::Result<Arc<Server>, (NotListening, bool)>;

/// Returns the server that runs at that address, or a new one that listens on `addresses`.
fn start(at: &At, addresses: &[SocketAddr], secret: Option<&Secret>) -> Result<Started> {
    let mut servers = servers();
    if let Some(running) = running(&servers, at) {
        return Ok(Ok(running));
    }
    let server = match Server::try_on(addresses, secret.cloned())? {
        Ok(server) => Arc::new(server),
        Err(not_listening) => return Ok(Err((not_listening, servers.contains_key(at)))),
    };
    servers.retain(|_, known| known.strong_count() > 0);
    servers.insert(at.clone(), Arc::downgrade(&server));
    Ok(Ok(server))
}

fn servers() -> MutexGuard<'static, HashMap<At, Weak<Server>>> {
    SERVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn running(servers: &HashMap<At, Weak<Server>>, at: &At) -> Option<Arc<Server>> {
    servers.get(at).and_then(Weak::upgrade)
}

/// Returns the addresses of the host at which the store is to be served.
fn addresses(host: &str, port: u16, wait: &Wait) -> Result<Vec<SocketAddr>> {
    resolve_in_time(host, port, wait).map_err(|why| match why {
        NotResolved::Failed(error) => not_resolved(host, &error),
        NotResolved::NoThread(error) => Error::no_thread(&error).within("cannot set up the store's server"),
        NotResolved::Late => Error::timeout(format!(
            "{host}, where the store is to be served, was not resolved within {} ms",
            wait.deadline.timeout().as_millis()
        )),
        NotResolved::Cancelled(error) => error,
    })
}

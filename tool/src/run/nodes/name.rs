//! Waits until the endpoint's name has an address. A wrong name never gets one, so a node does not
//! wait for it as long as for other nodes.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use devicemesh::error::Error;
use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::resolve;
use devicemesh::wait::Wait;

use super::progress::Progress;
use crate::run::identity::span;
use crate::run::rendezvous::{Origin, Rendezvous};

/// How long a name may be unknown, so that a name server has time to learn it.
const UNKNOWN: Duration = Duration::from_secs(10);
/// How long the name of the first host may be unknown in a job that `--hosts` has started. The
/// starter has just reached the hosts by their names, so no name server has to learn them.
const REACHED: Duration = Duration::from_secs(2);
/// How long the resolver may give no answer, for example while the network starts.
const TEMPORARY: Duration = Duration::from_secs(60);
/// The kind of the error of a try in which the resolver gave no answer.
const NO_ANSWER: io::ErrorKind = io::ErrorKind::TimedOut;
/// The pause before the next try.
const PAUSE: Duration = Duration::from_secs(1);

/// Waits until the name of the store's host has addresses, and returns them. Fails when the name
/// has none for too long.
pub fn wait_for_name(rendezvous: &Rendezvous, wait: &Wait, progress: &mut Progress<'_>) -> Result<Vec<IpAddr>, Error> {
    let (host, port) = (&rendezvous.host, rendezvous.port);
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    let began = Instant::now();
    let (mut tries, mut answer) = (0, None);
    loop {
        tries += 1;
        let error = match ask(host, port, wait)? {
            Ok(addresses) => return Ok(addresses.iter().map(SocketAddr::ip).collect()),
            // The end of the wait may cut off the last try. The answer of an earlier try says more.
            Err(error) if error.kind() == NO_ANSWER => answer.take().unwrap_or(error),
            Err(error) => error,
        };
        let patience = match rendezvous.origin {
            _ if rendezvous.name_comes_late => rendezvous.timeout,
            _ if is_temporary(&error) => TEMPORARY,
            Origin::Hosts(_) => REACHED,
            _ => UNKNOWN,
        };
        if began.elapsed() + PAUSE > patience || wait.deadline.passed() {
            let time = span(began.elapsed());
            return Err(Error::store(format!(
                "the name {host} has no address on {} ({error}; {tries} tries in {time}): {}",
                host_name(),
                rendezvous.advice_on_name()
            )));
        }
        let until = Instant::now() + PAUSE;
        while Instant::now() < until {
            wait.cancel.check()?;
            progress.tell_until(began + patience, || format!("the name {host} to get an address ({error})"));
            std::thread::sleep(progress.pause(until.saturating_duration_since(Instant::now())).deadline.slice());
        }
        answer = Some(error);
    }
}

/// Asks the resolver, on a thread of its own, because the resolver knows no deadline.
fn ask(host: &str, port: u16, wait: &Wait) -> Result<io::Result<Vec<SocketAddr>>, Error> {
    let (sender, receiver) = channel();
    let owned = host.to_owned();
    let work = move || drop(sender.send(resolve(&owned, port)));
    if let Err(error) = std::thread::Builder::new().name("dm-resolve".to_owned()).spawn(work) {
        return Ok(Err(error));
    }
    loop {
        match receiver.recv_timeout(wait.deadline.slice()) {
            Ok(resolved) => return Ok(resolved),
            Err(RecvTimeoutError::Timeout) if !wait.deadline.passed() => wait.cancel.check()?,
            Err(_) => return Ok(Err(io::Error::new(NO_ANSWER, "the resolver gives no answer"))),
        }
    }
}

/// Whether the resolver got no answer (EAI_AGAIN). The text is compared, because the standard
/// library gives no code.
fn is_temporary(error: &io::Error) -> bool {
    let text = error.to_string().to_lowercase();
    ["temporary", "try again", "no answer"].iter().any(|word| text.contains(word))
}

//! `devicemesh store`: serves the store in which ranks meet, as a service of its own. A job whose
//! store is in a rank, or in the `devicemesh run` of a node, ends with that process.

use clap::Args;
use devicemesh::error::Error;
use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::{Secret, Server};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::endpoint::endpoint;
use crate::failure::{Failure, advice_on_limits};
use crate::run::{is_ignored, listener, signal_name};
use crate::stdio::{print, say};
use crate::words::count;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Examples:
  # a store for the ranks of one job, which other hosts reach
  devicemesh store --listen 0.0.0.0:29400
  # a rank that meets the others there
  RANK=0 WORLD_SIZE=8 MASTER_ADDR=head MASTER_PORT=29400 TORCHELASTIC_USE_AGENT_STORE=True ./train

Exit codes:
  0  SIGTERM, SIGINT or SIGHUP ended it
  1  it cannot listen at the address
  2  wrong command line

Environment:
  DM_STORE_SECRET  only clients with this secret get in, and the traffic is encrypted";

#[derive(Args)]
pub struct Options {
    /// Where to listen: a name or an address of this host, and a port [port: 29400]. 0.0.0.0 or
    /// [::] means all addresses of this host
    #[arg(long, value_name = "HOST[:PORT]", value_parser = endpoint)]
    pub listen: (String, u16),
}

/// Serves the store until a signal comes.
pub fn store(options: &Options) -> Result<u8, Failure> {
    let (host, port) = &options.listen;
    // The signals are caught before anybody learns that the store is there.
    let caught = [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal));
    let mut signals = Signals::new(caught).map_err(|error| {
        let advice = advice_on_limits(&error);
        Failure::new(1, format!("cannot catch signals: {error}{advice}"))
    })?;
    let secret = Secret::from_environment().map_err(|error| Failure::new(1, error.message()))?;
    let for_whom = match secret {
        Some(_) => "for clients that have the secret of DM_STORE_SECRET",
        None => "for all clients that reach it (DM_STORE_SECRET is not set)",
    };
    let server = Server::at(host, *port, secret).map_err(|error| cannot_listen(host, *port, &error))?;
    let reach = if server.local_addr().ip().is_loopback() { ", which this host alone reaches" } else { "" };
    let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    print(format!("serving tcp://{host}:{port}{reach}, {for_whom}\n"))?;
    let signal = signals.forever().next().unwrap_or(SIGTERM);
    let name = signal_name(signal);
    let connections = count(server.clients(), "connection");
    say(&format!("devicemesh store: got signal {signal} ({name}), with {connections} open"));
    Ok(0)
}

/// The failure of a store that cannot listen. The library's own message is for rank 0 of a job.
fn cannot_listen(host: &str, port: u16, error: &Error) -> Failure {
    let os_error = |errno: Errno| error.os_error() == errno.raw_os_error();
    let message = match () {
        () if os_error(Errno::ADDRINUSE) => {
            format!("port {port} of {} is in use{}: choose another port with --listen", host_name(), listener(port))
        }
        () if os_error(Errno::ADDRNOTAVAIL) => format!(
            "{host} is no address of {}: --listen needs a name or an address of this host, or 0.0.0.0 for all of its addresses",
            host_name()
        ),
        () => error.message().to_owned(),
    };
    Failure::new(1, message)
}

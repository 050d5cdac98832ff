//! `devicemesh agent`: what `devicemesh run --hosts` starts on each host. It becomes the node that
//! its orders describe.

use std::convert::Infallible;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::words::{BEGINS, Orders, Said};
use crate::failure::Failure;
use crate::run::rendezvous::network;

/// The largest size of the orders in bytes. Linux allows no longer command line and environment.
const MOST: usize = 16 << 20;

/// Says hello, reads the orders and becomes `devicemesh run`. Returns only if this fails.
pub fn agent() -> Result<u8, Failure> {
    // The job's store takes this port a moment later, if this is the first host.
    let port = TcpListener::bind(("::", 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    let port = port.and_then(|listener| listener.local_addr()).map_or(0, |address| address.port());
    Said::Hello { version: env!("CARGO_PKG_VERSION").to_owned(), port, network: network() }.say();
    let Some(orders) = read_orders()? else { return Ok(1) };
    let Err(message) = obey(orders);
    Said::Cannot { message }.say();
    Ok(1)
}

/// Reads one line from standard input, byte by byte, because what follows is for the program that
/// this process becomes. `None` where the starter has gone.
fn read_orders() -> Result<Option<Orders>, Failure> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    // The buffer of the standard library would keep what follows the line.
    let input = rustix::io::dup(std::io::stdin())
        .map_err(|error| Failure::new(1, format!("cannot read the orders: {error}")))?;
    let mut input = std::fs::File::from(input);
    loop {
        match input.read(&mut byte) {
            Ok(0) => return Ok(None),
            Ok(_) if byte[0] == b'\n' => break,
            Ok(_) if line.len() < MOST => line.push(byte[0]),
            Ok(_) => return Err(Failure::new(1, format!("orders of more than {MOST} bytes"))),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::new(1, format!("cannot read the orders: {error}"))),
        }
    }
    let orders = serde_json::from_slice(&line).map_err(|error| {
        Failure::new(
            2,
            format!("devicemesh run --hosts starts this command and sends it orders; this is none: {error}"),
        )
    })?;
    Ok(Some(orders))
}

fn obey(orders: Orders) -> Result<Infallible, String> {
    let folder = orders.directory.to_string_lossy();
    std::env::set_current_dir(&orders.directory).map_err(|error| {
        format!("cannot enter {folder}, where the job was started: {error}; every host needs this folder")
    })?;
    let tool = std::env::current_exe().map_err(|error| format!("cannot find devicemesh: {error}"))?;
    let share = serde_json::to_string(&orders.share).map_err(|error| error.to_string())?;
    // The text that the login shell has printed comes before this mark.
    let mut out = std::io::stdout();
    let _ = out.write_all(BEGINS.as_bytes()).and_then(|()| out.flush());
    let mut command = Command::new(&tool);
    command.args(["run", "--agent", &share]).args(&orders.arguments).envs(orders.environment);
    Err(format!("cannot start {}: {}", tool.display(), command.exec()))
}

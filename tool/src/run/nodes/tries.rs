//! One try to connect to the store: how long it lasts, and what its errors mean.

use std::io;
use std::time::Duration;

use devicemesh::error::Error;

use crate::run::rendezvous::Rendezvous;

/// How long one attempt to connect lasts. After that a node that could serve the store itself
/// checks whether its port is free now.
pub const TRY: Duration = Duration::from_secs(1);
/// The variable that the errors about a secret name.
pub const SECRET: &str = "DM_STORE_SECRET";

/// The error of a node that the store refuses because of its secret. Where one terminal shows all
/// nodes, the error names the node. The name stands behind a semicolon, so that a starter of
/// hundreds of such nodes shows the error once.
pub fn locked_out(rendezvous: &Rendezvous, error: Error) -> Error {
    let host = |node: u32| Some((node, rendezvous.hosts.get(node as usize)?));
    match rendezvous.node.and_then(host) {
        Some((node, host)) => Error::store(format!("{}; node {node} ({host}) was refused", error.message())),
        None => error,
    }
}

/// Returns why a connection failed, because the error's own message has only the time of the last
/// try.
pub fn why(error: &Error) -> String {
    match error.os_error() {
        0 => error.message().to_owned(),
        code => io::Error::from_raw_os_error(code).to_string(),
    }
}

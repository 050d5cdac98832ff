//! Which host a process runs on, as far as shared memory cares.

use std::fs;
use std::io::{self, ErrorKind};

use rustix::system::uname;

use crate::printable::printable;

/// What must be equal for two ranks to share memory, with a name for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostIdentity {
    /// The host's name.
    pub name: String,
    /// The kernel's boot id and this process's pid namespace: the engine finds its peers through /proc.
    pub boot: String,
}

impl HostIdentity {
    /// Of this process. What `/proc` does not show here is left out of `boot`. Fails when it cannot be asked, as when this process can open no more
    /// files.
    pub fn here() -> io::Result<HostIdentity> {
        let namespace = known(fs::read_link("/proc/self/ns/pid").map(|link| link.display().to_string()))?;
        let boot = known(fs::read_to_string("/proc/sys/kernel/random/boot_id"))?;
        Ok(HostIdentity { name: host_name(), boot: format!("{} {namespace}", boot.trim()) })
    }

    /// As one line, to compare and to publish.
    pub fn line(&self) -> String {
        format!("{} {}", self.name, self.boot)
    }
}

/// What was found, or nothing where this machine does not show it.
fn known(found: io::Result<String>) -> io::Result<String> {
    found.or_else(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => Ok(String::new()),
        _ => Err(error),
    })
}

/// The name of this host, as the kernel has it and a terminal may show it.
pub fn host_name() -> String {
    printable(&uname().nodename().to_string_lossy()).into_owned()
}

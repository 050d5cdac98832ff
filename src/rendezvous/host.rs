//! Tells on which host a process runs, and with which other processes it may share memory.

use std::fs;
use std::io::{self, ErrorKind};

use rustix::process::geteuid;
use rustix::system::uname;

use crate::printable::printable;

/// With the value 0, the host engine shares no memory between processes.
const SHARED_MEMORY_VARIABLE: &str = "DM_HOSTCCL_SHM";

/// The name of this process's host for the host engine. Processes with different names share no
/// memory, also on one machine.
const NAME_VARIABLE: &str = "DM_HOSTCCL_HOST";

/// The host of a process, with a name for messages. Two processes with equal identities see each
/// other by their process numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostIdentity {
    /// The host's name.
    pub name: String,
    /// The kernel's boot id and the pid namespace of this process, because the engine finds its
    /// peers through /proc.
    pub boot: String,
}

impl HostIdentity {
    /// Returns the identity of this process's host. `boot` lacks the parts that `/proc` does not
    /// show. Fails when the question itself fails, for example because this process can open no
    /// more files.
    pub fn here() -> io::Result<HostIdentity> {
        let namespace = known(fs::read_link("/proc/self/ns/pid").map(|link| link.display().to_string()))?;
        let boot = known(fs::read_to_string("/proc/sys/kernel/random/boot_id"))?;
        Ok(HostIdentity { name: host_name(), boot: format!("{} {namespace}", boot.trim()) })
    }

    /// Returns the identity of the running kernel: its boot id, or the host's name where this
    /// machine does not show the boot id. This identity is equal for all containers of one
    /// machine.
    pub fn kernel(&self) -> &str {
        self.boot.split(' ').next().filter(|boot| !boot.is_empty()).unwrap_or(&self.name)
    }

    /// Returns the identity as one line, for comparing and publishing.
    pub fn line(&self) -> String {
        format!("{} {}", self.name, self.boot)
    }

    /// Returns the host of this process as the host engine counts hosts: a set of processes that
    /// share memory. These processes are on one machine, in one process-id namespace, and belong
    /// to one user.
    pub(super) fn of_memory() -> io::Result<MemoryHost> {
        let here = HostIdentity::here()?;
        let users = known(fs::read_link("/proc/self/ns/user").map(|link| link.display().to_string()))?;
        let mut id = format!("{} {} {users}", here.line(), geteuid().as_raw());
        let variable = |name| std::env::var_os(name).map(|value| value.to_string_lossy().trim().to_owned());
        let named = variable(NAME_VARIABLE).filter(|name| !name.is_empty());
        if let Some(name) = &named {
            id = format!("{id} {}", printable(name));
        }
        if variable(SHARED_MEMORY_VARIABLE).is_some_and(|value| value == "0") {
            id = format!("{id} process {}", std::process::id());
        }
        let name = named.map_or(here.name, |name| printable(&name).into_owned());
        Ok(MemoryHost { name, id: id.replace(' ', ",") })
    }
}

/// A set of processes that share memory.
pub(super) struct MemoryHost {
    /// The name for messages.
    pub(super) name: String,
    /// A text without spaces that is equal on two processes only if they may share memory.
    pub(super) id: String,
}

/// Returns the text that was found, or an empty text where this machine does not show it.
fn known(found: io::Result<String>) -> io::Result<String> {
    found.or_else(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => Ok(String::new()),
        _ => Err(error),
    })
}

/// Returns the name of this host as the kernel has it, escaped for a terminal.
pub fn host_name() -> String {
    printable(&uname().nodename().to_string_lossy()).into_owned()
}

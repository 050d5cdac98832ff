//! The host of this process: which processes may share memory with it.
//!
//! Two variables of the environment change what counts as one host. `DM_HOSTCCL_SHM=0` makes each
//! process a host of its own. `DM_HOSTCCL_HOST` gives the host another name: processes with
//! different names are on different hosts, even on one machine. With both, one machine can stand
//! for several hosts, for tests.

use std::env;
use std::fs;
use std::io::{self, ErrorKind};
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// The variable that forbids shared memory between processes.
const SHARE: &str = "DM_HOSTCCL_SHM";
/// The variable that names the host.
const NAME: &str = "DM_HOSTCCL_HOST";

/// The host of a process, as far as other processes can compare it with their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Host {
    /// The hash of the kernel's boot id, which tells machines and reboots apart; 0 where `/proc`
    /// does not show it.
    pub(crate) machine: u64,
    /// The hash of the boot id and the name of `DM_HOSTCCL_HOST`; 0 where neither is known.
    pub(crate) number: u64,
    /// The process-id namespace: process numbers mean nothing outside it. It is 0 where `/proc`
    /// does not show it.
    pub(crate) namespace: u64,
    /// Whether the process shares memory with other processes.
    pub(crate) shares: bool,
}

impl Host {
    /// Returns the host of this process. Fails when a variable has no valid value.
    pub(crate) fn current() -> Result<Host> {
        let machine = boot_hash()?;
        let name = env::var_os(NAME).unwrap_or_default();
        // libdevicemesh trims the name, too (src/rendezvous/host.rs).
        let name = name.to_string_lossy();
        let number = match name.trim() {
            "" => machine,
            name => checksum(&[&machine.to_le_bytes(), name.as_bytes()].concat()),
        };
        Ok(Host { machine, number, namespace: pid_namespace()?, shares: shares()? })
    }

    /// Whether a process with these numbers may be on the host of this process. A number that is 0
    /// is unknown, and so excludes nothing.
    pub(crate) fn may_reach(&self, number: u64, namespace: u64) -> bool {
        !differ(self.number, number) && !differ(self.namespace, namespace)
    }
}

/// Whether this process shares memory with other processes.
fn shares() -> Result<bool> {
    let value = env::var_os(SHARE).unwrap_or_default();
    match value.to_string_lossy().trim() {
        "" | "1" => Ok(true),
        "0" => Ok(false),
        _ => Err(Error::argument(format!("{SHARE} is {value:?}: it must be 1 (the default) or 0"))),
    }
}

/// Whether two numbers are both known, and are not equal. The number 0 is unknown.
pub(crate) fn differ(theirs: u64, mine: u64) -> bool {
    theirs != 0 && mine != 0 && theirs != mine
}

/// Returns the number that was read, and 0 where this machine hides it. Other errors are passed on,
/// because they say nothing about the machine. For example, the process may have no file left.
fn known(answer: io::Result<u64>) -> Result<u64> {
    match answer {
        Err(reason) if !matches!(reason.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            Err(Error::system("finding out which machine this is", reason))
        }
        answer => Ok(answer.unwrap_or(0)),
    }
}

/// Returns the hash of the kernel's boot id, or 0 where `/proc` does not show it.
fn boot_hash() -> Result<u64> {
    static HASH: OnceLock<u64> = OnceLock::new();
    if let Some(hash) = HASH.get() {
        return Ok(*hash);
    }
    let hash = known(fs::read("/proc/sys/kernel/random/boot_id").map(|boot| checksum(&boot)))?;
    Ok(*HASH.get_or_init(|| hash))
}

/// Returns the number of this process's process-id namespace, or 0 where `/proc` does not show it.
/// It is read anew each time, because `unshare` and `fork` can put a process into another
/// namespace.
fn pid_namespace() -> Result<u64> {
    known(fs::metadata("/proc/self/ns/pid").map(|meta| std::os::linux::fs::MetadataExt::st_ino(&meta)))
}

/// Returns the FNV-1a hash of the bytes.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

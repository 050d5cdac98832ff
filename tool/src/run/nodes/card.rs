//! The card by which a node's tool tells other processes of its user, and of root, on this host
//! where the job's store is.
//! This text, the card, is in anonymous memory that has a name in /proc/PID/fd, as the ranks'
//! recordings are.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use devicemesh::rendezvous::store::Secret;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use crate::proc;

/// The name of the memory.
const NAME: &str = "devicemesh-node";
/// The names of the processes that may have a card: the keeper, and a tool that has no keeper.
const TOOLS: [&str; 2] = ["dm-ranks", "devicemesh"];
/// The most bytes of a card.
const MOST_BYTES: usize = 64 << 10;
const SECRET: &str = "DM_STORE_SECRET=";

/// A node of a job on several nodes.
#[derive(Clone, Serialize, Deserialize)]
pub struct Card {
    /// The host of the job's store, in which the ranks meet, too.
    pub host: String,
    /// The port of the store.
    pub port: u16,
    /// The number of the job in the store of a service.
    pub job: Option<u64>,
    /// The number of nodes.
    pub nodes: u32,
    /// The node's arrival number.
    pub arrival: u32,
    /// The job's name, as `devicemesh ps` has it.
    pub name: String,
}

impl Card {
    /// Makes the memory, which stays as long as the descriptor.
    pub fn show(&self) -> io::Result<OwnedFd> {
        let memory = memfd_create(NAME, MemfdFlags::CLOEXEC)?;
        File::from(memory.try_clone()?).write_all(&serde_json::to_vec(self)?)?;
        Ok(memory)
    }

    /// Where the ranks meet, as text.
    pub fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// The cards of the tools on this host, this user's or for root those of all users. Each one comes
/// with the number of its process.
pub fn cards() -> Vec<(u32, Card)> {
    let name = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let tools = proc::readable_pids().filter(|pid| TOOLS.contains(&name(pid).trim()));
    tools.filter_map(|pid| Some((pid, card_of(pid)?))).collect()
}

fn card_of(pid: u32) -> Option<Card> {
    let wanted = format!("/memfd:{NAME}");
    let is_card = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with(&wanted))
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let path = entries.filter_map(|entry| Some(entry.ok()?.path())).find(is_card)?;
    let mut text = vec![0; MOST_BYTES];
    let length = File::open(path).ok()?.read_at(&mut text, 0).ok()?;
    serde_json::from_slice(&text[..length]).ok()
}

/// The secret of the store that a tool has in its environment.
pub fn secret_of(pid: u32) -> Option<Secret> {
    use std::os::unix::ffi::OsStrExt;
    let environment = proc::words(pid, "environ")?;
    environment.iter().find_map(|entry| Secret::new(entry.as_bytes().strip_prefix(SECRET.as_bytes())?))
}

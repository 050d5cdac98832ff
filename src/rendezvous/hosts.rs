//! Which machine a rank runs on, as far as shared memory cares, and who listens there.

use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind};

use hostccl::machine;

use super::agreement::{Round, ranges};
use super::store::Store;
use crate::error::{Error, Result};
use crate::printable::printable;
use crate::wait::Wait;

/// Ranks whose hosts are looked up for the message, and hosts that it names.
const ASKED: usize = 1024;
const NAMED: usize = 4;

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
    let mut name = [0; 65];
    // SAFETY: the buffer is as long as said, and its last byte stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    printable(&String::from_utf8_lossy(&name[..end])).into_owned()
}

/// The host engine's ranks share memory, so they must share a machine: everybody compares with rank 0, and the first to differ says who is
/// where. A constant number of store operations per rank, but for that one. `prefix` is this world's.
pub(super) fn share_one(round: &Round, store: &dyn Store, prefix: &str, me: (usize, usize), wait: &Wait) -> Result<()> {
    let (rank, size) = me;
    let key = |rank: usize| format!("host/{rank}");
    if let Some(why) = machine::broken_proc() {
        return Err(Error::unsupported(why));
    }
    let mine = HostIdentity::here().map_err(|error| unasked(&error))?.line();
    round.publish(&key(rank), mine.as_bytes(), wait)?;
    if rank == 0 || round.fetch(&key(0), 0, wait)? == mine.as_bytes() {
        return Ok(());
    }
    let name = rank.to_string();
    if store.set_once(&format!("{prefix}/elsewhere"), name.as_bytes(), wait)? != name.as_bytes() {
        return Ok(()); // The one that was first ends the call for all.
    }
    let line =
        |rank| round.fetch(&key(rank), rank as i32, wait).map(|line| String::from_utf8_lossy(&line).into_owned());
    let lines: Vec<String> = (0..size.min(ASKED)).map(line).collect::<Result<_>>()?;
    Err(Error::unsupported(format!(
        "device type cpu works within one host, but {}: use device type cuda across hosts, or start all ranks on one",
        spread(&lines, size)
    )))
}

fn unasked(error: &io::Error) -> Error {
    let message = format!("finding out which machine this is: {}", machine::explained(error));
    Error::unsupported(message).with_os_error(error.raw_os_error().unwrap_or(0))
}

/// Who is where: "ranks 0-3 are on alpha, ranks 4-7 on beta". `lines` are those of the first ranks of so many.
fn spread(lines: &[String], size: usize) -> String {
    let mut hosts: Vec<(&str, Vec<i32>)> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    for (rank, line) in lines.iter().enumerate() {
        let at = *known.entry(line).or_insert(hosts.len());
        if at == hosts.len() {
            hosts.push((line, Vec::new()));
        }
        hosts[at].1.push(rank as i32);
    }
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    let place = |(at, (line, ranks)): (usize, &(&str, Vec<i32>))| {
        let verb = if at > 0 {
            ""
        } else if ranks.len() == 1 {
            " is"
        } else {
            " are"
        };
        // Same name: a container with processes of its own, or a second host that is called the same.
        let again = hosts[..at].iter().any(|(other, _)| name(other) == name(line));
        format!(
            "{}{verb} on {}{}",
            ranges(ranks),
            name(line),
            if again { " too, but in another container" } else { "" }
        )
    };
    let mut places: Vec<String> = hosts.iter().enumerate().take(NAMED).map(place).collect();
    if hosts.len() > NAMED {
        places.push(format!("others on {} more", hosts.len() - NAMED));
    }
    if size > lines.len() {
        places.push(format!("and so on to rank {}", size - 1));
    }
    places.join(", ")
}

/// Whether this process itself listens on that TCP port: a listening socket there is among its descriptors.
pub(super) fn listens(port: u16) -> bool {
    let listening: Vec<String> = listeners(port).iter().map(|inode| format!("socket:[{inode}]")).collect();
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let mut links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|link| listening.iter().any(|socket| link.as_os_str() == socket.as_str()))
}

/// Whether any process of this host (of this network namespace) listens on that TCP port, as far as can be seen: where nothing can be seen, yes.
pub(super) fn anybody_listens(port: u16) -> bool {
    !fs::exists("/proc/self/net/tcp").unwrap_or(false) || !listeners(port).is_empty()
}

/// The inodes of the sockets that listen on that TCP port (proc_net(5): state 0A).
fn listeners(port: u16) -> Vec<String> {
    let tables = ["tcp", "tcp6"].map(|name| fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default());
    let ends = format!(":{port:04X}");
    tables
        .iter()
        .flat_map(|table| table.lines())
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.len() > 9 && fields[1].ends_with(&ends) && fields[3] == "0A")
        .map(|fields| fields[9].to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(hosts: &[&str], size: usize) -> String {
        let lines: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        spread(&lines, size)
    }

    #[test]
    fn ranks_are_named_by_host() {
        assert_eq!(said(&["a 1 p", "a 1 p", "b 2 p", "b 2 p", "b 2 p"], 5), "ranks 0, 1 are on a, ranks 2-4 on b");
        assert_eq!(said(&["b 2 p", "a 1 p", "b 2 p", "a 1 p"], 4), "ranks 0, 2 are on b, ranks 1, 3 on a");
        assert_eq!(said(&["a 1 p", "a 1 q"], 2), "rank 0 is on a, rank 1 on a too, but in another container");
        assert_eq!(
            said(&["a 1 p", "b 2 p", "c 3 p", "d 4 p", "e 5 p", "f 6 p"], 2000),
            "rank 0 is on a, rank 1 on b, rank 2 on c, rank 3 on d, others on 2 more, and so on to rank 1999"
        );
    }
}

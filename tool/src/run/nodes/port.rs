//! Finds the process that listens at a port of this host, for messages.

use std::collections::HashSet;
use std::path::PathBuf;
use std::{fs, io};

use devicemesh::printable::printable;

use crate::proc::{pids, words};
use crate::run::identity::shell_line;
use crate::words::cut;

/// The state of a socket that listens (TCP_LISTEN), as /proc/net/tcp has it.
const LISTENS: &str = "0A";
/// The most characters of a command that a message quotes.
const QUOTED: usize = 80;

/// The process that listens at this port, as " by `nc -l 80` (pid 4711)". Empty where it belongs to
/// another user, because only root can look at the sockets of another user.
pub fn listener(port: u16) -> String {
    let sockets = sockets(port);
    let pid = pids().find(|pid| !sockets.is_empty() && !held(*pid, &sockets).is_empty());
    pid.map_or(String::new(), |pid| format!(" by `{}` (pid {pid})", command(pid)))
}

/// Whether programs listen at this port, of which none is a devicemesh. False where this cannot be
/// known, because a process of another user listens there.
pub fn is_taken_by_a_stranger(port: u16) -> bool {
    let sockets = sockets(port);
    let mut known = HashSet::new();
    for pid in pids() {
        let held = held(pid, &sockets);
        if !held.is_empty() && is_devicemesh(pid) {
            return false;
        }
        known.extend(held);
    }
    !sockets.is_empty() && known == sockets
}

/// Whether a process runs this program, or another version of it. A process whose program cannot be
/// read counts as one.
fn is_devicemesh(pid: u32) -> bool {
    let name = |program: io::Result<PathBuf>| {
        let name = program.ok()?.file_name()?.to_string_lossy().into_owned();
        Some(name.trim_end_matches(" (deleted)").to_owned())
    };
    let (theirs, ours) = (name(fs::read_link(format!("/proc/{pid}/exe"))), name(std::env::current_exe()));
    theirs.is_none_or(|theirs| theirs.starts_with("devicemesh") || Some(theirs) == ours)
}

/// The sockets that listen at this port of this host.
fn sockets(port: u16) -> HashSet<String> {
    let tables = ["tcp", "tcp6"].iter().filter_map(|table| fs::read_to_string(format!("/proc/net/{table}")).ok());
    tables
        .flat_map(|table| table.lines().skip(1).filter_map(|line| listening(line, port)).collect::<Vec<_>>())
        .collect()
}

/// The socket of a line of /proc/net/tcp, as a link in /proc/PID/fd names it, where the socket
/// listens at this port.
fn listening(line: &str, port: u16) -> Option<String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, local) = fields.get(1)?.rsplit_once(':')?;
    let is_it = u16::from_str_radix(local, 16) == Ok(port) && fields.get(3) == Some(&LISTENS);
    is_it.then(|| fields.get(9).map(|inode| format!("socket:[{inode}]")))?
}

/// Those of these sockets that the process has open.
fn held(pid: u32, sockets: &HashSet<String>) -> Vec<String> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).ok().into_iter().flatten();
    let links = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok()?.into_os_string().into_string().ok());
    links.filter(|link| sockets.contains(link)).collect()
}

/// The command line of a process.
fn command(pid: u32) -> String {
    let line = shell_line(&words(pid, "cmdline").unwrap_or_default());
    printable(&cut(&line, QUOTED)).into_owned()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::{is_taken_by_a_stranger, listener, listening};

    #[test]
    fn this_process_listens() {
        let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let said = listener(socket.local_addr().unwrap().port());
        assert!(said.starts_with(" by `") && said.ends_with(&format!("(pid {})", std::process::id())), "{said}");
    }

    #[test]
    fn a_devicemesh_is_no_stranger() {
        let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert!(!is_taken_by_a_stranger(port));
        drop(socket);
        assert!(!is_taken_by_a_stranger(port), "nobody listens");
    }

    #[test]
    fn only_sockets_that_listen_count() {
        let line = |local: &str, state: &str| {
            format!(
                "   1: 00000000:{local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0"
            )
        };
        assert_eq!(listening(&line("72D8", "0A"), 29400), Some("socket:[4711]".to_owned()));
        assert_eq!(listening(&line("72D8", "01"), 29400), None);
        assert_eq!(listening(&line("0050", "0A"), 29400), None);
        assert_eq!(listening("", 29400), None);
    }
}

//! Finds out who listens on a TCP port of this host.

use std::fs;

/// Whether this process itself listens on that TCP port, which is so when one of its descriptors is
/// a listening socket there.
pub(super) fn listens(port: u16) -> bool {
    let listening: Vec<String> = listeners(port).iter().map(|inode| format!("socket:[{inode}]")).collect();
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let mut links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|link| listening.iter().any(|socket| link.as_os_str() == socket.as_str()))
}

/// Whether any process of this host (of this network namespace) listens on that TCP port. The
/// answer is yes where the sockets cannot be seen.
pub(super) fn anybody_listens(port: u16) -> bool {
    !fs::exists("/proc/self/net/tcp").unwrap_or(false) || !listeners(port).is_empty()
}

/// Returns the inodes of the sockets that listen on that TCP port (proc_net(5): state 0A).
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

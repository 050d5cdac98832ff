//! Slurm's compressed lists of hosts (scontrol show hostnames).

use crate::error::{Error, Result};

/// Returns the first host of Slurm's compressed list.
///
/// ```
/// use devicemesh::rendezvous::launcher::first_host;
/// assert_eq!(first_host("node[001-004,7],gpu-a").unwrap(), "node001");
/// assert_eq!(first_host("rack2-n[08,10-12]").unwrap(), "rack2-n08");
/// assert_eq!(first_host("gpu-a,node[1-2]").unwrap(), "gpu-a");
/// assert_eq!(first_host("r[1-2]n[3-4]").unwrap(), "r1n3");
/// ```
pub fn first_host(list: &str) -> Result<String> {
    let broken = || Error::invalid(format!("{list:?} is no list of hosts as Slurm writes them"));
    let (mut host, mut rest) = (String::new(), list.trim());
    while let Some(at) = rest.find(['[', ',']) {
        host.push_str(&rest[..at]);
        if rest.as_bytes()[at] == b',' {
            rest = "";
            break;
        }
        let (inside, after) = rest[at + 1..].split_once(']').ok_or_else(broken)?;
        let first = inside.split([',', '-']).next().unwrap_or_default();
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(broken());
        }
        host.push_str(first);
        rest = after;
    }
    host.push_str(rest);
    if host.is_empty() || host.contains(']') { Err(broken()) } else { Ok(host) }
}

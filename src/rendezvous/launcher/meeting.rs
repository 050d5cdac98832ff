//! Finds where the ranks meet when MASTER_ADDR is not set: a host that all ranks know, and a port
//! that is made from the job's identity.
//!
//! The port is 61440 + digest % 4096, so it is from 61440 to 65535. Linux gives ports from 32768 to
//! 60999 to outgoing connections. JAX takes its port from these 4096 ports, too, and computes the
//! port from the job's id alone. The port of this library comes from a digest, so one job can use
//! both.

use std::fs;

use super::family::{Family, SLURM, partial};
use super::nodelist::first_host;
use super::variables::Variables;
use crate::digest::Fnv1a;
use crate::error::Result;

/// The first port, and the number of ports.
const PORTS: (u64, u64) = (61_440, 4096);

/// Returns the address, and the digest of the job's identity; `None` when the first host of the
/// ranks or the job's identity cannot be known.
pub(super) fn address(env: &Variables, family: &Family, one_host: bool) -> Result<Option<((String, u16), u64)>> {
    let host = match env.text("SLURM_STEP_NODELIST") {
        // The address is the loopback address in Slurm too, because a node's name in Slurm need not
        // resolve.
        _ if one_host => "127.0.0.1".to_owned(),
        Some(nodes) if family.rank == SLURM.rank => first_host(&nodes)?,
        _ => return Ok(None),
    };
    if family.rank == SLURM.rank {
        // Only these variables name a step on all of its hosts.
        if let Some(missing) = SLURM.job.iter().find(|name| env.text(name).is_none()) {
            return Err(partial(&SLURM, SLURM.rank, missing, env));
        }
    }
    Ok(job(env, family).map(|job| ((host, (PORTS.0 + job % PORTS.1) as u16), job)))
}

/// Returns a digest of the job's identity: the launcher's variables, or else the process that
/// started the ranks of this host.
fn job(env: &Variables, family: &Family) -> Option<u64> {
    let mut digest = Fnv1a::default().text(family.launcher);
    let ids: Vec<String> = family.job.iter().filter_map(|name| env.text(name)).collect();
    if ids.is_empty() {
        let (process, started) = launcher_process(family.rank)?;
        digest = digest.number(process).number(started);
    }
    Some(ids.iter().fold(digest, |digest, id| digest.text(id)).value())
}

/// Returns the pid of the nearest ancestor without that variable, and its start time in clock ticks
/// after boot, because pids are used again. Such an ancestor is MPICH's proxy, for example; a shell
/// or a debugger around a rank has the variable. Returns `None` where an ancestor cannot be read,
/// for example when each rank has a container of its own.
fn launcher_process(variable: &str) -> Option<(u64, u64)> {
    let wanted = format!("{variable}=").into_bytes();
    let (mut process, _) = parent_and_start("self")?;
    while process > 0 {
        let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
        let (parent, started) = parent_and_start(&process.to_string())?;
        if !environment.split(|byte| *byte == 0).any(|entry| entry.starts_with(&wanted)) {
            return Some((process, started));
        }
        process = parent;
    }
    None
}

/// Reads fields 4 and 22 of /proc/PID/stat (proc_pid_stat(5)). Field 2 is in brackets, and may
/// contain spaces and brackets itself.
fn parent_and_start(process: &str) -> Option<(u64, u64)> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some((fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

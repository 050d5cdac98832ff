//! Checks that all ranks of a world run on one host, because the host engine's ranks share memory.

use std::collections::HashMap;
use std::io;

use hostccl::machine;

use super::agreement::{Round, ranges};
use super::host::HostIdentity;
use super::store::Store;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// The most ranks whose hosts are looked up for the message.
const ASKED: usize = 1024;

/// The most hosts that the message names.
const NAMED: usize = 4;

/// Checks that all ranks share a machine, because the ranks of the host engine share memory. Every
/// rank compares its host with that of rank 0, and the first rank that differs reports where the
/// ranks are. Each other rank needs a constant number of store operations. The world's keys begin
/// with `prefix`.
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
        return Ok(()); // The first rank that differs ends the call for all ranks.
    }
    let line =
        |rank| round.fetch(&key(rank), rank as i32, wait).map(|line| String::from_utf8_lossy(&line).into_owned());
    let lines: Vec<String> = (0..size.min(ASKED)).map(line).collect::<Result<_>>()?;
    Err(Error::unsupported(format!(
        "device type cpu works within one host, but {}: use device type cuda across hosts, or start all ranks on one",
        spread(&lines, size)
    )))
}

/// Returns the error that this process cannot find out on which machine it is.
fn unasked(error: &io::Error) -> Error {
    let message = format!("finding out which machine this is: {}", machine::explained(error));
    Error::unsupported(message).with_os_error(error.raw_os_error().unwrap_or(0))
}

/// Says which rank is where: "ranks 0-3 are on alpha, ranks 4-7 on beta". `lines` are the hosts of
/// the first ranks, and `size` is the number of all ranks.
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
        // A host of the same name is a container with processes of its own, or a second host that
        // is called the same.
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

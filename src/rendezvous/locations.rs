//! Collects where the ranks of a world are. Each rank says where it is, and reads the locations of
//! all.

use std::collections::HashMap;
use std::io;

use super::host::HostIdentity;
use super::world::World;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// The longest location that a rank may give, in bytes. An all-gather has room for the locations
/// of 16,000 ranks.
const LONGEST: usize = 4096;

impl World {
    /// Returns the location of every rank: the one that it gave, or its host. The location of a
    /// rank that takes no part in calls since a recovery is empty. **Collective over the world**.
    pub fn locations(&self, mine: Option<&str>, wait: &Wait) -> Result<Vec<String>> {
        if let Some(mine) = mine.filter(|mine| mine.len() > LONGEST) {
            return Err(Error::invalid(format!("the location has {} bytes; it has at most {LONGEST}", mine.len())));
        }
        let said = match mine {
            Some(mine) => Stated::Path(mine).encode(),
            None => {
                let here = self.host().map_err(|error| Error::store_io("finding out which host this is", &error))?;
                Stated::Host(here).encode()
            }
        };
        let scope = self.scope()?;
        let round = scope.agree("dm_world_locations()", wait)?;
        let all = round.all_gather(said.as_bytes(), wait);
        let all = round.end(all, wait)?;
        let said: Vec<String> = all.iter().map(|said| String::from_utf8_lossy(said).into_owned()).collect();
        Ok(resolve(&scope.by_rank(said, self.size())))
    }

    /// Returns the name of this rank's host, and what tells the host from others, in one line. On
    /// device type cpu a host is a set of ranks that share memory. On other device types it is a
    /// running kernel, whose containers share its devices.
    fn host(&self) -> io::Result<String> {
        if self.shares_memory().is_some() {
            let here = HostIdentity::of_memory()?;
            return Ok(format!("{} {}", here.name, here.id));
        }
        let here = HostIdentity::here()?;
        Ok(format!("{} {}", here.name, here.kernel()))
    }
}

/// The place that a rank states.
enum Stated<'a> {
    /// The caller gave this path.
    Path(&'a str),
    /// The caller gave no path, and the process runs on this host.
    Host(String),
}

impl Stated<'_> {
    fn encode(&self) -> String {
        match self {
            Stated::Path(path) => format!("={path}"),
            Stated::Host(host) => format!("@{host}"),
        }
    }
}

/// Returns the paths that were stated. A rank that stated none gets the name of its host. Two hosts
/// get two names, also where both hosts have one name.
fn resolve(said: &[String]) -> Vec<String> {
    let mut names: HashMap<&str, String> = HashMap::new();
    let mut taken: HashMap<&str, usize> = HashMap::new();
    said.iter()
        .map(|said| {
            let Some(line) = said.strip_prefix('@') else { return said[1.min(said.len())..].to_owned() };
            let (host, id) = line.rsplit_once(' ').unwrap_or((line, line));
            let name = names.entry(id).or_insert_with(|| {
                let times = taken.entry(host).or_default();
                *times += 1;
                // A slash would begin a new level.
                let host = host.replace('/', "_");
                if *times == 1 { host } else { format!("{host}#{times}") }
            });
            name.clone()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_apart_by_their_id_and_called_by_name() {
        let said = ["@a 1", "@b 2", "=rack1/c", "@a 3", "@pod 1", "@a/x 4"].map(str::to_owned);
        assert_eq!(resolve(&said), ["a", "b", "rack1/c", "a#2", "a", "a_x"]);
    }
}

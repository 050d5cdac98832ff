//! Collects where the ranks of a world are. Each rank says where it is, and reads what all say.

use std::collections::HashMap;

use super::host::HostIdentity;
use super::world::World;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// The longest location that a rank may give, in bytes. Those of 16,000 ranks are within what an
/// all-gather takes.
const LONGEST: usize = 4096;

impl World {
    /// Returns the location of every rank: what it gave, or its host. **Collective over the
    /// world**.
    pub fn locations(&self, mine: Option<&str>, wait: &Wait) -> Result<Vec<String>> {
        if let Some(mine) = mine.filter(|mine| mine.len() > LONGEST) {
            return Err(Error::invalid(format!("the location has {} bytes; it has at most {LONGEST}", mine.len())));
        }
        let here = || HostIdentity::here().map_err(|error| Error::store_io("finding out which host this is", &error));
        let said = match mine {
            Some(mine) => Stated::Path(mine).encode(),
            None => Stated::Nothing(here()?).encode(),
        };
        let round = self.scope()?.agree("dm_world_locations()", wait)?;
        let all = round.all_gather(said.as_bytes(), wait).inspect_err(|error| _ = round.fail(error, wait))?;
        round.finish(wait)?;
        let said: Vec<String> = all.iter().map(|said| String::from_utf8_lossy(said).into_owned()).collect();
        Ok(resolve(&said))
    }
}

/// The place that a rank states.
enum Stated<'a> {
    /// The caller gave this path.
    Path(&'a str),
    /// The caller gave no path, and the process runs on this host.
    Nothing(HostIdentity),
}

impl Stated<'_> {
    fn encode(&self) -> String {
        match self {
            Stated::Path(path) => format!("={path}"),
            Stated::Nothing(host) => format!("@{}", host.line()),
        }
    }
}

/// Returns the paths that were stated. A rank that stated none gets the name of its host: one name
/// for each running kernel, whatever its containers are called.
fn resolve(said: &[String]) -> Vec<String> {
    let mut names: HashMap<&str, String> = HashMap::new();
    let mut taken: HashMap<&str, usize> = HashMap::new();
    said.iter()
        .map(|said| {
            let Some(line) = said.strip_prefix('@') else { return said[1.min(said.len())..].to_owned() };
            let mut parts = line.split(' ');
            let (host, boot) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            let key = if boot.is_empty() { host } else { boot };
            let name = names.entry(key).or_insert_with(|| {
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
    fn hosts_are_told_apart_by_their_kernel_and_called_by_name() {
        let said = ["@a 1 p", "@b 2 p", "=rack1/c", "@a 3 p", "@pod 1 q", "@a/x  p"].map(str::to_owned);
        assert_eq!(resolve(&said), ["a", "b", "rack1/c", "a#2", "a", "a_x"]);
    }
}

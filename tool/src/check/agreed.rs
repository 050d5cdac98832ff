//! Compares the options of the ranks. An error names the ranks that were started with other options
//! than rank 0, and the options that differ.

use std::collections::BTreeMap;

use devicemesh::error::{Error, Result, Status};
use devicemesh::mesh::Mesh;

use super::options::{Asked, Options};
use super::team::Team;
use super::words::runs;
use crate::words::listed_with;

/// The most differences that a message lists.
const TOLD: usize = 4;

/// Fails on every rank if the ranks ask for different checks. **Collective over the world.**
pub fn compare(options: &Options, mesh: &Mesh, team: &Team) -> Result<()> {
    // These types can always become JSON.
    let mine = serde_json::to_vec(&options.asked(mesh, team.world().device_type())).unwrap_or_default();
    let told = team.step("comparing the command lines", |exchange| {
        let all = exchange.gather("options", mine)?;
        let message = all.map(|all| {
            let all: Vec<Asked> = all.iter().map(|asked| serde_json::from_slice(asked).unwrap_or_default()).collect();
            different(&all, &team.hosts).into_bytes()
        });
        exchange.share("different", message)
    })?;
    match String::from_utf8_lossy(&told).into_owned() {
        equal if equal.is_empty() => Ok(()),
        message => Err(Error::new(Status::Mismatch, message)),
    }
}

/// Says which ranks differ from rank 0, and in which options. The text is empty where no rank does.
fn different(all: &[Asked], hosts: &[String]) -> String {
    let Some((first, others)) = all.split_first() else { return String::new() };
    // The key has the options that differ, as these ranks have them and as rank 0 has them.
    let mut ranks: BTreeMap<(String, String), Vec<usize>> = BTreeMap::new();
    for (rank, asked) in (1..).zip(others) {
        let differs = |at: &usize| asked.get(*at) != first.get(*at);
        let places: Vec<usize> = (0..first.len().max(asked.len())).filter(differs).collect();
        if !places.is_empty() {
            ranks.entry((words(asked, &places), words(first, &places))).or_default().push(rank);
        }
    }
    let one = |((theirs, ours), ranks): ((String, String), Vec<usize>)| {
        let host = match ranks[..] {
            [rank] => hosts.get(rank).map_or(String::new(), |host| format!(" on {host}")),
            _ => String::new(),
        };
        let has = if ranks.len() == 1 { "has" } else { "have" };
        format!("{}{host} {has} {theirs}, and rank 0 has {ours}", runs(&ranks))
    };
    let told = listed_with(ranks.into_iter().map(one), TOLD, "; ", |more| format!("; and {more} more differences"));
    if told.is_empty() { told } else { format!("the ranks were started with different options: {told}") }
}

/// The options at these indices, as on a command line.
fn words(asked: &Asked, places: &[usize]) -> String {
    let word = |(name, value): &(String, Option<String>)| match value {
        None => format!("no {name}"),
        Some(value) if value.is_empty() => name.clone(),
        Some(value) => format!("{name} {value}"),
    };
    places.iter().filter_map(|place| asked.get(*place)).map(word).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::super::options::Asked;
    use super::different;

    fn asked(warmup: &str, saves: bool) -> Asked {
        let save = saves.then(String::new);
        vec![("--warmup".to_owned(), Some(warmup.to_owned())), ("--save".to_owned(), save)]
    }

    #[test]
    fn ranks_are_told_with_what_they_ask_for() {
        let hosts = ["a", "a", "b", "b"].map(str::to_owned);
        let told = |all: &[Asked]| different(all, &hosts);
        let usual = || asked("2", false);
        assert_eq!(told(&[usual(), usual()]), "");
        assert_eq!(
            told(&[usual(), usual(), asked("7", true)]),
            "the ranks were started with different options: rank 2 on b has --warmup 7 and --save, and rank 0 has --warmup 2 and no --save"
        );
        let two = told(&[usual(), asked("7", false), asked("9", false), asked("7", false)]);
        assert!(two.contains("ranks 1, 3 have --warmup 7, and rank 0 has --warmup 2; rank 2 on b has"), "{two}");
    }
}

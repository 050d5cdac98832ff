//! The hosts that cannot take part. One message names all of them, because a user who repairs one
//! host after the other starts the job again for each.

use std::time::{Duration, Instant};

use devicemesh::printable::printable;

use crate::words::{listed, listed_with};

/// How long the starter waits for the other hosts, when one host has turned out to be unable to
/// take part.
const OTHERS: Duration = Duration::from_secs(5);
/// How many hosts a message names in one list, and how many reasons it gives.
pub const LISTED: usize = 8;

/// The hosts that cannot take part, each with its place in the list of hosts, its name and the
/// reason.
#[derive(Default)]
pub struct Failures {
    found: Vec<(usize, String, String)>,
    until: Option<Instant>,
}

impl Failures {
    pub fn add(&mut self, index: usize, host: &str, why: String) {
        let place = self.found.partition_point(|(other, ..)| *other < index);
        self.found.insert(place, (index, host.to_owned(), why));
        self.until.get_or_insert(Instant::now() + OTHERS);
    }

    /// Until when the starter waits for the other hosts. `None` while no host has failed.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// The message, in a job of that many hosts. Hosts with one reason share a line. `untried` are
    /// the hosts whose agents were not started.
    pub fn message(&self, hosts: usize, untried: &[&str]) -> String {
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for (_, host, why) in &self.found {
            match reasons.iter_mut().find(|(known, _)| known == why) {
                Some((_, names)) => names.push(host),
                None => reasons.push((why, vec![host])),
            }
        }
        let line =
            |(why, names): &(&str, Vec<&str>)| printable(&format!("{}: {why}", listed(names, LISTED))).into_owned();
        if let ([reason], []) = (reasons.as_slice(), untried) {
            return line(reason);
        }
        let rest = |more| format!("\n  and {more} more reasons");
        let lines = listed_with(reasons.iter().map(line), LISTED, "\n  ", rest);
        let untried = match untried {
            [] => String::new(),
            names => printable(&format!("not tried: {}", listed(names, LISTED))).into_owned(),
        };
        let gap = if untried.is_empty() { "" } else { "\n  " };
        format!("{} of {hosts} hosts cannot take part:\n  {lines}{gap}{untried}", self.found.len())
    }
}

#[cfg(test)]
mod tests {
    use super::Failures;

    fn message(found: &[(&str, &str)], untried: &[&str]) -> String {
        let mut failures = Failures::default();
        // The hosts fail in any order, and the message has the order of the list.
        let all = found.iter().enumerate().rev();
        all.for_each(|(index, (host, why))| failures.add(index, host, (*why).to_owned()));
        failures.message(20, untried)
    }

    #[test]
    fn one_reason_is_one_line() {
        assert_eq!(message(&[("a", "denied")], &[]), "a: denied");
        assert_eq!(message(&[("a", "no ssh"), ("b", "no ssh")], &[]), "a, b: no ssh");
    }

    #[test]
    fn each_reason_has_a_line() {
        assert_eq!(
            message(&[("a", "denied"), ("b", "no \x1broute"), ("c", "denied")], &["d", "e"]),
            "3 of 20 hosts cannot take part:\n  a, c: denied\n  b: no \\x1broute\n  not tried: d, e"
        );
        let names: Vec<String> = (0..12).map(|n| format!("n{n}")).collect();
        let found: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
        let text = message(&found, &[]);
        assert!(text.starts_with("12 of 20 hosts cannot take part:\n  n0: n0\n"), "{text}");
        assert!(text.ends_with("\n  n7: n7\n  and 4 more reasons"), "{text}");
    }
}

//! The lines in which a node that waits says for which nodes it waits.

use std::time::{Duration, Instant};

use devicemesh::wait::{Deadline, Wait};

use super::entry::{Entry, list};
use super::shared::{News, Shared};
use crate::run::identity::span;
use crate::run::rendezvous::Rendezvous;
use crate::words::listed;

/// How long a node waits without a line. The nodes of most jobs have met by then.
const FIRST: Duration = Duration::from_millis(500);
/// The time between two lines.
const AGAIN: Duration = Duration::from_secs(10);
/// How many missing nodes a message lists.
const LISTED: usize = 8;

/// When the next line is due.
pub struct Progress<'a> {
    shared: &'a Shared,
    /// The end of the whole wait.
    wait: &'a Wait,
    next: Instant,
    /// The end of each line, where something is wrong with the endpoint. It is empty where
    /// nothing is wrong.
    remark: String,
}

impl<'a> Progress<'a> {
    /// Begins to wait. With `is_silent` the first line is due later, because another node reports
    /// the wait.
    pub fn new(shared: &'a Shared, wait: &'a Wait, is_silent: bool) -> Progress<'a> {
        Progress { shared, wait, next: Instant::now() + if is_silent { AGAIN } else { FIRST }, remark: String::new() }
    }

    /// Returns a wait that ends when the next line is due, at that time, or at the end of the
    /// whole wait.
    pub fn pause(&self, limit: Duration) -> Wait {
        let due = self.next.saturating_duration_since(Instant::now());
        self.wait.with_deadline(Deadline::after(due.min(limit).min(self.wait.deadline.left())))
    }

    /// Whether the whole wait has ended.
    pub fn is_over(&self) -> bool {
        self.wait.deadline.passed()
    }

    /// Says a line at once.
    pub fn say(&self, text: String) {
        self.shared.tell(News::Note(text));
    }

    /// Ends each line with this text.
    pub fn remark(&mut self, text: String) {
        self.remark = text;
    }

    /// Says the line if it is due.
    pub fn tell(&mut self, whom: impl FnOnce() -> String) {
        self.tell_for(self.wait.deadline.left(), whom);
    }

    /// Says the line if it is due, or leaves it to another node.
    pub fn tell_unless(&mut self, is_silent: bool, whom: impl FnOnce() -> String) {
        match is_silent {
            // Without a later time, `pause` would end at once again and again.
            true if Instant::now() >= self.next => self.next = Instant::now() + AGAIN,
            true => {}
            false => self.tell(whom),
        }
    }

    /// Says the line if it is due. The time left in the line is that until `end`, or until the end
    /// of the whole wait where that is sooner.
    pub fn tell_until(&mut self, end: Instant, whom: impl FnOnce() -> String) {
        self.tell_for(end.saturating_duration_since(Instant::now()), whom);
    }

    fn tell_for(&mut self, left: Duration, whom: impl FnOnce() -> String) {
        if Instant::now() >= self.next && !self.is_over() {
            let whole = self.wait.deadline.left();
            let option = if left < whole { "" } else { " (--rdzv-timeout)" };
            let (left, remark) = (span(left.min(whole)), &self.remark);
            self.shared.tell(News::Note(format!("waiting for {}; {left} left{option}{remark}", whom())));
            self.next = Instant::now() + AGAIN;
        }
    }
}

/// The nodes that have not arrived: "nodes 1 (beta), 3 (delta) of 4", or "2 of 4 nodes" where the
/// numbers of those that have arrived are not known.
pub fn absent(rendezvous: &Rendezvous, entries: &[Entry]) -> String {
    let (nodes, arrived) = (rendezvous.nodes, entries.len());
    let claimed: Vec<u32> = entries.iter().filter_map(|entry| entry.node).collect();
    if claimed.len() < arrived {
        return format!("{} of {nodes} nodes", nodes as usize - arrived);
    }
    let missing: Vec<u32> = (0..nodes).filter(|node| !claimed.contains(node)).collect();
    let name = |node: &u32| match rendezvous.hosts.get(*node as usize) {
        Some(host) => format!("{node} ({host})"),
        None => node.to_string(),
    };
    let word = if missing.len() > 1 { "nodes" } else { "node" };
    format!("{word} {} of {nodes}", listed(missing.iter().map(name), LISTED))
}

/// The nodes that have arrived: "there are node 0 on alpha (pid 1), node 2 on gamma (pid 2)".
pub fn present(entries: &[Entry]) -> String {
    format!("there {} {}", if entries.len() == 1 { "is" } else { "are" }, list(entries))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_silent_node_pauses_after_a_line_that_it_does_not_say() {
        let (sender, news) = channel();
        let (shared, wait) = (Shared::new(2, false, sender).unwrap(), Wait::after(Duration::from_secs(600)));
        let mut progress = Progress::new(&shared, &wait, true);
        progress.next = Instant::now();
        progress.tell_unless(true, || "the others".to_owned());
        assert!(progress.pause(Duration::from_secs(600)).deadline.left() > AGAIN / 2);
        assert!(news.try_recv().is_err());
        progress.next = Instant::now();
        progress.tell_unless(false, || "the others".to_owned());
        assert!(matches!(news.try_recv(), Ok(News::Note(line)) if line.starts_with("waiting for the others; ")));
    }
}

//! The hosts that the job has lost. The connection to a host and the other nodes both notice that a
//! host has gone, so the starter sees to it that the user is told once.

use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How long the starter holds back what one node says about the loss of another. In this time the
/// lost host's own message or the end of its connection may come, which tell the reason.
const REASON: Duration = Duration::from_secs(2);

/// How long the starter waits where the node runs on the starter's own host: the kernel then tells
/// how the process has ended, but a busy machine may take a while for that.
const REASON_HERE: Duration = Duration::from_secs(10);

/// A node's message that another node is lost.
pub struct Held {
    /// The node that says it.
    pub from: usize,
    /// The node that is said to be lost.
    pub node: usize,
    pub text: String,
    /// When it is told.
    due: Instant,
}

/// The losses of the job.
#[derive(Default)]
pub struct Losses {
    /// The nodes whose loss the user knows.
    told: HashSet<usize>,
    /// What other nodes say of losses, until it is told.
    held: Vec<Held>,
    /// The nodes of which another node has said that they have gone. Such a node may be there all
    /// the same, behind a network that is split.
    missed: HashSet<usize>,
    /// The nodes that have said themselves that they have gone.
    own: HashSet<usize>,
    /// The exit code of the first of these.
    code: Option<u8>,
}

impl Losses {
    /// Notes that the user learns of this loss now. Returns false where the user knows it already.
    pub fn tell(&mut self, node: usize) -> bool {
        self.held.retain(|held| held.node != node);
        self.told.insert(node)
    }

    /// The number of nodes whose loss the starter has told the user.
    pub fn count(&self) -> usize {
        self.told.len()
    }

    /// Keeps what the node `from` says of the loss of another one. Where the network is split, each
    /// part misses the other part. The part whose word comes first is believed. Otherwise the user
    /// would read that all hosts are lost. `is_here` says that the node runs on the starter's own
    /// host and that its process has not ended yet.
    pub fn hold(&mut self, from: usize, node: usize, text: String, is_here: bool) {
        if self.missed.contains(&from) {
            return;
        }
        self.missed.insert(node);
        if !self.told.contains(&node) {
            let due = Instant::now() + if is_here { REASON_HERE } else { REASON };
            self.held.push(Held { from, node, text, due });
        }
    }

    /// When the next held message is due.
    pub fn due(&self) -> Option<Instant> {
        self.held.iter().map(|held| held.due).min()
    }

    /// Takes the first held message whose moment has come. With `all`, takes the first one in any
    /// case.
    pub fn take(&mut self, all: bool) -> Option<Held> {
        let now = Instant::now();
        let next = self.held.iter().position(|held| all || now >= held.due)?;
        Some(self.held.remove(next))
    }

    /// Forgets the losses of a node that is back.
    pub fn forget(&mut self, node: usize) {
        self.held.retain(|held| held.node != node);
        self.told.remove(&node);
        self.missed.remove(&node);
        self.own.remove(&node);
    }

    /// Notes that a node says itself that it has gone.
    pub fn own(&mut self, node: usize) {
        self.own.insert(node);
    }

    /// Whether a node has said itself that it has gone. Then its ranks have ended.
    pub fn is_own(&self, node: usize) -> bool {
        self.own.contains(&node)
    }

    /// Notes the exit code of a node.
    pub fn ended(&mut self, node: usize, code: u8) {
        if self.is_own(node) {
            self.code.get_or_insert(code);
        }
    }

    /// The exit code of the job, where a node has said why it has gone. The other nodes know only
    /// that it has gone.
    pub fn code(&self) -> Option<u8> {
        self.code
    }
}

#[cfg(test)]
mod tests {
    use super::Losses;

    /// The node that is told as lost now, and the text.
    fn taken(losses: &mut Losses) -> Option<(usize, String)> {
        losses.take(true).map(|held| (held.node, held.text))
    }

    #[test]
    fn a_loss_is_told_once() {
        let mut losses = Losses::default();
        losses.hold(0, 1, "gone".to_owned(), false);
        assert!(losses.take(false).is_none() && losses.due().is_some());
        // The reason comes in time.
        assert!(losses.tell(1));
        assert!(taken(&mut losses).is_none() && !losses.tell(1));
        losses.hold(0, 1, "gone".to_owned(), false);
        assert!(taken(&mut losses).is_none());
        // No reason comes.
        losses.hold(0, 2, "gone".to_owned(), false);
        assert_eq!(taken(&mut losses), Some((2, "gone".to_owned())));
    }

    #[test]
    fn a_node_that_is_back_may_be_lost_again() {
        let mut losses = Losses::default();
        losses.hold(0, 1, "gone".to_owned(), false);
        assert!(losses.tell(1) && !losses.tell(1));
        losses.own(1);
        losses.forget(1);
        assert!(!losses.is_own(1));
        losses.hold(1, 0, "gone".to_owned(), false);
        assert_eq!(taken(&mut losses), Some((0, "gone".to_owned())));
        assert!(losses.tell(1));
    }

    #[test]
    fn the_end_of_a_process_here_is_awaited_longer() {
        let mut losses = Losses::default();
        losses.hold(0, 1, "gone".to_owned(), true);
        losses.hold(0, 2, "gone".to_owned(), false);
        let both = losses.due().unwrap();
        assert!(losses.tell(2));
        assert!(losses.due().unwrap() > both + super::REASON);
    }

    #[test]
    fn one_part_of_a_split_network_is_lost_and_not_both() {
        let mut losses = Losses::default();
        losses.hold(0, 2, "2 is out of reach".to_owned(), false);
        losses.hold(2, 0, "0 is out of reach".to_owned(), false);
        assert_eq!(taken(&mut losses), Some((2, "2 is out of reach".to_owned())));
        assert!(losses.tell(2));
        losses.hold(2, 0, "0 is out of reach".to_owned(), false);
        assert_eq!(taken(&mut losses), None);
        losses.hold(1, 3, "3 is out of reach".to_owned(), false);
        assert_eq!(taken(&mut losses), Some((3, "3 is out of reach".to_owned())));
    }

    #[test]
    fn the_code_is_that_of_a_node_that_said_why() {
        let mut losses = Losses::default();
        losses.ended(0, 1);
        assert_eq!(losses.code(), None);
        losses.own(2);
        losses.ended(2, 137);
        losses.ended(0, 1);
        assert_eq!(losses.code(), Some(137));
    }
}

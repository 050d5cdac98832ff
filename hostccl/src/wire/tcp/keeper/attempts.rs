//! The peers to which the wire's thread tries to connect.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The pause between two tries.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// A peer to which this process tries to connect.
#[derive(Debug)]
pub(super) struct Attempt {
    /// When the first try began. The time in which this process or the peer's process is stopped
    /// does not count.
    pub(super) since: Instant,
    /// When the next try may begin. This time counts only while no try is under way.
    pub(super) next: Instant,
    /// The number of the connection of the present try, among the wire's strangers.
    pub(super) stranger: Option<u64>,
    /// Why the last try failed.
    pub(super) why: String,
    /// The number of tries that have failed. Each try uses another token, the newest first.
    pub(super) tokens: usize,
}

impl Attempt {
    /// Notes that a try has failed. The peer has `known` tokens.
    pub(super) fn fail(&mut self, known: usize, why: String) {
        self.tokens += 1;
        // The peer may know another token, so the next one is tried at once. After all of them have
        // failed, a pause gives the peer time to learn one.
        let pause = if self.tokens % known.max(1) == 0 { PAUSE } else { Duration::ZERO };
        (self.stranger, self.next, self.why) = (None, Instant::now() + pause, why);
    }
}

/// The attempts, by the numbers of the peers.
#[derive(Debug, Default)]
pub(super) struct Attempts(HashMap<u32, Attempt>);

impl Attempts {
    /// Adds a peer, unless the list has it.
    pub(super) fn begin(&mut self, peer: u32, now: Instant) {
        let begun = || Attempt { since: now, next: now, stranger: None, why: String::new(), tokens: 0 };
        self.0.entry(peer).or_insert_with(begun);
    }

    pub(super) fn get(&self, peer: u32) -> Option<&Attempt> {
        self.0.get(&peer)
    }

    pub(super) fn get_mut(&mut self, peer: u32) -> Option<&mut Attempt> {
        self.0.get_mut(&peer)
    }

    pub(super) fn remove(&mut self, peer: u32) -> Option<Attempt> {
        self.0.remove(&peer)
    }

    /// Moves the start of every try later by `pause`, because this process did not run for that
    /// long.
    pub(super) fn excuse(&mut self, pause: Duration, now: Instant) {
        self.0.values_mut().for_each(|attempt| attempt.since = (attempt.since + pause).min(now));
    }

    /// When the next tries may begin.
    pub(super) fn next(&self) -> impl Iterator<Item = Instant> + '_ {
        self.0.values().filter(|attempt| attempt.stranger.is_none()).map(|attempt| attempt.next)
    }

    /// The peers whose next try may begin.
    pub(super) fn due(&self, now: Instant) -> Vec<u32> {
        self.filter(|attempt| attempt.stranger.is_none() && attempt.next <= now)
    }

    /// The peers that were tried for longer than `tries`.
    pub(super) fn late(&self, now: Instant, tries: Duration) -> Vec<u32> {
        self.filter(|attempt| now.duration_since(attempt.since) > tries)
    }

    fn filter(&self, is_wanted: impl Fn(&Attempt) -> bool) -> Vec<u32> {
        self.0.iter().filter(|(_, attempt)| is_wanted(attempt)).map(|(peer, _)| *peer).collect()
    }
}

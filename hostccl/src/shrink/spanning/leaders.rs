//! The letters that the leaders of the hosts exchange. The first letter greets the root, and in
//! the last letter the root says that all ranks have joined.

use std::time::{Duration, Instant};

use super::letter::{Letter, Post};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::gathering::span_of;
use crate::token::random_token;

/// The pause before a leader greets the root again: the first one, and the longest one.
const GREET_AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// The role of this rank among the leaders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// This rank leads its host, and chooses the number of the new communicator.
    Root,
    /// This rank leads its host.
    Leader,
    /// This rank waits for the leader of its host, and writes no letters.
    Follower,
}

/// The meeting of the leaders, as one of them sees it.
pub(super) struct Leaders {
    /// The role of this rank.
    pub(super) role: Role,
    /// The leaders with which this rank exchanges letters: all leaders of other hosts for the root,
    /// the root for another leader, and none for other ranks.
    posts: Vec<Post>,
    /// The random number of this attempt.
    nonce: u64,
    /// The number of the new communicator, once it is known.
    number: Option<u64>,
    /// The time of this leader's next greeting, and the pause after that greeting.
    greets: (Instant, Duration),
    /// When the last letter with news came. For the root, that is a leader's first greeting or
    /// confirmation; for another leader, the root's welcome.
    pub(super) heard: Instant,
}

/// Returns a random number.
fn random_number() -> Result<u64> {
    Ok(u64::from_le_bytes(*random_token()?.first_chunk().expect("a token has 16 bytes")))
}

impl Leaders {
    /// Returns a meeting of `leaders`, the first remaining rank of each host in ascending order.
    /// `parent` is the communicator that shrinks, and `digest` the checksum of the excluded ranks.
    pub(super) fn new(parent: &Comm, leaders: &[usize], digest: u64) -> Result<Leaders> {
        let span = span_of(parent);
        let (role, others) = match leaders.iter().position(|leader| *leader == span.rank) {
            Some(0) => (Role::Root, &leaders[1..]),
            Some(_) => (Role::Leader, &leaders[..1]),
            None => (Role::Follower, &[][..]),
        };
        let posts = others.iter().map(|leader| Post::new(parent, *leader, digest)).collect();
        let now = Instant::now();
        Ok(Leaders { role, posts, nonce: random_number()?, number: None, greets: (now, GREET_AGAIN.0), heard: now })
    }

    /// Writes the letters that are due before the number is known, and reads those that have come.
    /// Returns the number of the new communicator once it is known.
    pub(super) fn meet(&mut self) -> Result<Option<u64>> {
        let (due, pause) = self.greets;
        if self.role == Role::Leader && self.number.is_none() && Instant::now() >= due {
            self.greets = (Instant::now() + pause, (pause * 2).min(GREET_AGAIN.1));
            self.posts[0].send(Letter::Hello { nonce: self.nonce });
        }
        for at in 0..self.posts.len() {
            let mut taken = Ok(());
            loop {
                let letter = match self.posts[at].read() {
                    Ok(Some(letter)) => letter,
                    Ok(None) => break,
                    // If the last letter already told the outcome (a failure, or that all have
                    // joined), the loss of the leader right after it does not count.
                    Err(_) if taken.is_err() || self.posts[at].confirmed => break,
                    Err(lost) => return Err(lost),
                };
                // A greeting begins another attempt of the leader. While the root has welcomed
                // nobody, the failure of an earlier attempt does not concern the root any more.
                if self.number.is_none() && matches!(letter, Letter::Hello { .. }) {
                    taken = Ok(());
                }
                taken = taken.and(match self.role {
                    Role::Root => self.take_as_root(at, letter),
                    _ => self.take_as_leader(letter),
                });
            }
            taken?;
        }
        let is_root = self.role == Role::Root;
        if is_root && self.number.is_none() && self.posts.iter().all(|post| post.greeted.is_some()) {
            let number = random_number()?;
            self.number = Some(number);
            for post in &mut self.posts {
                let nonce = post.greeted.unwrap_or_default();
                post.send(Letter::Welcome { nonce, number });
            }
        }
        Ok(self.number)
    }

    /// Handles a letter of the leader with index `at` in `posts`.
    ///
    /// A leader that greets again has not read its welcome. A receive that an earlier attempt of
    /// the leader has cancelled may have taken the welcome, as the wire over TCP does. So each
    /// greeting gets an answer. A leader that has the number ignores further answers.
    fn take_as_root(&mut self, at: usize, letter: Letter) -> Result<()> {
        let post = &mut self.posts[at];
        match letter {
            Letter::Hello { nonce } => {
                if post.greeted != Some(nonce) {
                    (post.greeted, self.heard) = (Some(nonce), Instant::now());
                }
                if let Some(number) = self.number {
                    post.send(Letter::Welcome { nonce, number });
                }
            }
            Letter::Confirm { number } if Some(number) == self.number && !post.confirmed => {
                (post.confirmed, self.heard) = (true, Instant::now());
            }
            Letter::Failed { attempt, error } if Some(attempt) == post.greeted => return Err(error),
            _ => {}
        }
        Ok(())
    }

    /// Handles a letter of the root.
    fn take_as_leader(&mut self, letter: Letter) -> Result<()> {
        match letter {
            Letter::Welcome { nonce, number } if nonce == self.nonce && self.number.is_none() => {
                (self.number, self.heard) = (Some(number), Instant::now());
            }
            Letter::Go { number } if Some(number) == self.number => self.posts[0].confirmed = true,
            Letter::Failed { attempt, error } if attempt == self.nonce => return Err(error),
            _ => {}
        }
        Ok(())
    }

    /// Tells the root that all ranks of this host have joined.
    pub(super) fn confirm(&mut self) {
        if let (Role::Leader, Some(number)) = (self.role, self.number) {
            self.posts[0].send(Letter::Confirm { number });
        }
    }

    /// Whether all ranks of all hosts have joined, as far as this rank knows. The root knows this
    /// once all leaders have confirmed that the ranks of their hosts have joined, and then tells
    /// the other leaders. Another leader knows this once the root has told that leader.
    pub(super) fn all_confirmed(&mut self) -> Result<bool> {
        let number = self.meet()?.unwrap_or_default();
        if !self.posts.iter().all(|post| post.confirmed) {
            return Ok(false);
        }
        if self.role == Role::Root {
            self.posts.iter_mut().for_each(|post| post.send(Letter::Go { number }));
        }
        Ok(true)
    }

    /// Returns the leaders for which the root waits, or the root for another leader.
    pub(super) fn missing(&self) -> Vec<usize> {
        let is_missing = |post: &&Post| match (self.role, self.number) {
            (Role::Root, None) => post.greeted.is_none(),
            (Role::Root, Some(_)) => !post.confirmed,
            _ => true,
        };
        self.posts.iter().filter(is_missing).map(|post| post.rank).collect()
    }

    /// Tells the other leaders that the shrink has failed.
    pub(super) fn tell(&mut self, error: &Error) {
        for post in &mut self.posts {
            if let Some(attempt) = if self.role == Role::Root { post.greeted } else { Some(self.nonce) } {
                post.send(Letter::Failed { attempt, error: error.clone() });
                post.flush();
            }
        }
    }

    /// Whether all letters have gone. While some letters have not gone, the drop of this value
    /// would cancel them.
    pub(super) fn has_sent(&mut self) -> bool {
        self.posts.iter_mut().all(Post::has_sent)
    }
}

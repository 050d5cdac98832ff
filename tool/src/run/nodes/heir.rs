//! A node that joins a running job in the place of one that is lost (`--restart rank`).

use std::time::{Duration, Instant};

use devicemesh::error::{Error, Status};
use devicemesh::wait::Wait;

use super::board::Board;
use super::entry::{Entry, numbers};
use super::keys::{self, OVER};
use super::peer::read_cause;
use super::posts::{Post, posts};
use super::progress::Progress;
use super::shared::{News, Shared, TELL};
use crate::run::assignment::Assignment;
use crate::run::cause::Cause;
use crate::run::rendezvous::Rendezvous;

/// How long a node that has its number waits until the job knows that the node of that number is
/// lost. A host that falls silent is missed within half a minute.
const IS_MISSED: Duration = Duration::from_secs(60);

/// The node that wants to join.
pub struct Heir<'a> {
    pub shared: &'a Shared,
    pub rendezvous: &'a Rendezvous,
    pub store: &'a Board,
    /// Its arrival number, which is higher than the number of nodes.
    pub arrival: u32,
}

/// The post that a node has taken.
pub struct Taken {
    pub post: Post,
    /// The entries of the nodes that came first.
    pub entries: Vec<Entry>,
}

impl Heir<'_> {
    /// Takes a post whose holder is lost. `Ok(Err(_))` has the entries of the nodes where there is
    /// no such post.
    pub fn take(&self, progress: &mut Progress<'_>) -> Result<Result<Taken, Vec<Entry>>, Cause> {
        let refused = |error: Error| Cause::Refused { message: error.message().to_owned() };
        let (entries, wait) = (self.entries().map_err(refused)?, self.shared.wait(IS_MISSED));
        let me = Entry { node: None, ..Entry::of_this_node(self.rendezvous) };
        let entries: Vec<Entry> = entries.iter().map(|text| Entry::read(text)).collect::<Result<_, _>>()?;
        if let Some(message) = entries.iter().find_map(|entry| me.disagreement(entry)) {
            return Err(Cause::Refused { message });
        }
        let numbers = numbers(&entries);
        let began = Instant::now();
        loop {
            if let Some(text) = self.store.try_get(OVER, &Wait::after(TELL)).map_err(refused)? {
                return Err(read_cause(&text));
            }
            let (posts, gone) = posts(self.store, self.rendezvous.nodes, TELL).map_err(refused)?;
            let number = |post: &Post| numbers[post.first as usize - 1];
            let is_mine = |post: &Post| self.rendezvous.node.is_none_or(|node| node == number(post));
            for post in posts.into_iter().filter(|post| post.is_vacant() && is_mine(post)) {
                let entry = &entries[post.first as usize - 1];
                if (me.ranks, me.restart.spares) != (entry.ranks, entry.restart.spares) {
                    return Err(Cause::Refused { message: other_size(&me, entry, number(&post)) });
                }
                let mine = self.arrival.to_string().into_bytes();
                let heir = self.store.set_once(&keys::heir(post.holder), &mine, &Wait::after(TELL));
                if heir.map_err(refused)? == mine {
                    return Ok(Ok(Taken { post, entries }));
                }
            }
            // A node that serves the store is not lost, because the job would have ended with it.
            let may_be_lost = |node: &u32| self.rendezvous.has_service() || *node != numbers[0];
            let Some(node) = self.rendezvous.node.filter(may_be_lost) else { return Ok(Err(entries)) };
            // A node with a number may come before the job has missed the one that it replaces.
            match self.store.get_any(&[OVER, &keys::gone(gone + 1)], &progress.pause(IS_MISSED)) {
                Ok(_) => {}
                Err(error) if error.status() == Status::Timeout => {}
                Err(error) => return Err(self.shared.store_lost(&error)),
            }
            if wait.deadline.passed() || self.shared.is_cancelled() {
                return Ok(Err(entries));
            }
            progress.tell_until(began + IS_MISSED, || {
                format!("the job to miss its node {node}, whose place this one is to take")
            });
        }
    }

    /// Returns the entries of the nodes that came first.
    fn entries(&self) -> Result<Vec<Vec<u8>>, Error> {
        (1..=self.rendezvous.nodes).map(|arrival| self.store.get(&keys::node(arrival), &Wait::after(TELL))).collect()
    }
}

impl Taken {
    /// Completes the share of the job that the post has, for the node that has taken it.
    pub fn complete(&self, mut assignment: Assignment, shared: &Shared, host: String) -> Assignment {
        let entry = &self.entries[self.post.first as usize - 1];
        shared.tell(News::Note(format!(
            "takes the place of node {} ({}): its ranks join the running job",
            assignment.node, entry.host
        )));
        assignment.rejoins = self.post.before + 1;
        // The files of the node before may be in the same folder.
        assignment.run = format!("{}.again-{}", assignment.run, assignment.rejoins);
        assignment.host_name = Some(host);
        assignment
    }
}

/// Why a node cannot take the post of a node with another number of ranks.
fn other_size(me: &Entry, entry: &Entry, number: u32) -> String {
    let size = |entry: &Entry| {
        let spares = entry.restart.spares;
        format!("-n {} and --spares {spares}", entry.ranks.saturating_sub(spares))
    };
    format!(
        "{me} has {}, and node {number} of the job, whose place it is to take, had {}: say the same",
        size(me),
        size(entry)
    )
}

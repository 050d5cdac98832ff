//! The nodes of a job, for `devicemesh why`.

use std::time::Duration;

use devicemesh::error::Result;
use devicemesh::rendezvous::store::TcpStore;
use devicemesh::wait::Wait;

use super::board::Board;
use super::card::{Card, secret_of};
use super::entry::{Entry, numbers};
use super::keys;
use super::posts::posts;
use super::questions::Peer;

/// The most ranks of a job whose nodes are looked at. The entries of the nodes may say any number.
const MOST_RANKS: u64 = 1 << 20;

/// The store of a job, and its nodes in the order of their numbers.
pub struct Roster {
    pub board: Board,
    pub peers: Vec<Peer>,
}

/// Reads the nodes of a job from its store. `tool` is the process that has shown the card. Each
/// question to the store takes `patience` at most.
pub fn roster(card: &Card, tool: u32, patience: Duration) -> Result<Roster> {
    let store = TcpStore::connect_with_secret(&card.host, card.port, secret_of(tool), &Wait::after(patience))?;
    let board = Board::new(store, card.job);
    let (posts, _) = posts(&board, card.nodes, patience)?;
    let mut entries = Vec::new();
    for post in &posts {
        let text = board.try_get(&keys::node(post.first), &Wait::after(patience))?.unwrap_or_default();
        entries.push(Entry::read(&text).ok());
    }
    let known: Vec<Entry> = entries.into_iter().flatten().collect();
    let all_known = known.len() == posts.len();
    let (numbers, ranks) = (numbers(&known), ranks(&known));
    let peer = |at: usize| {
        let post = &posts[at];
        let name = match all_known {
            true => format!("node {} ({})", numbers[at], known[at].host),
            false => format!("the node that arrived as number {}", post.first),
        };
        let lost = post.is_gone.then(|| "has gone".to_owned());
        Peer { arrival: post.holder, name, ranks: if all_known { ranks[at].clone() } else { Vec::new() }, lost }
    };
    let mut peers: Vec<Peer> = (0..posts.len()).map(peer).collect();
    if all_known {
        let mut order: Vec<usize> = (0..peers.len()).collect();
        order.sort_by_key(|at| numbers[*at]);
        peers = order.iter().map(|at| peers[*at].clone()).collect();
    }
    Ok(Roster { board, peers })
}

/// The ranks of each node. Node 0 has the first ranks, and the spares of all nodes come last.
fn ranks(entries: &[Entry]) -> Vec<Vec<u32>> {
    let numbers = numbers(entries);
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|at| numbers[*at]);
    let spares = |entry: &Entry| u64::from(entry.restart.spares);
    let others = |entry: &Entry| u64::from(entry.ranks).saturating_sub(spares(entry));
    let mut ranks = vec![Vec::new(); entries.len()];
    let mut next = 0u64;
    for count in [&others as &dyn Fn(&Entry) -> u64, &spares] {
        for at in &order {
            let end = next.saturating_add(count(&entries[*at])).min(MOST_RANKS);
            ranks[*at].extend((next..end).map(|rank| rank as u32));
            next = end;
        }
    }
    ranks
}

//! Waits in the store for the end of the job, then for a node that ends it at once, and where this
//! node serves the store, for the other nodes to leave.

use std::sync::Arc;
use std::time::Duration;

use devicemesh::error::Status;
use devicemesh::wait::Wait;

use super::answering::Answering;
use super::board::Board;
use super::entry::{LastWord, gone};
use super::keys::{self, AT_ONCE, NODES, OVER};
use super::peer::read_cause;
use super::posts::posts;
use super::shared::{News, Reached, Shared, TELL};

/// Longer than any job lasts.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Returns when this node has nothing more to wait for. `over` tells whether the job has ended
/// already.
pub fn watch(shared: &Arc<Shared>, mut over: bool) {
    let Some(Reached { store, server, .. }) = shared.reached.get() else { return };
    // How many tools have gone, this one aside.
    let mut departed = 0;
    // Whether the job ends at once.
    let mut at_once = false;
    let answering = Answering::default();
    let card = shared.card.get().map(|(card, _)| card);
    let question = card.map(|card| keys::question(card.arrival));
    loop {
        if at_once && server.is_none() {
            return;
        }
        if over && server.is_some() && departed + 1 >= arrived(store) {
            return shared.tell(News::StoreUnused);
        }
        let next = keys::gone(departed + 1);
        let mut wanted = vec![if over { AT_ONCE } else { OVER }, &next];
        // A question waits while another one is answered. The ranks of a job that is over may still
        // hang, until the end of `--failure-grace`.
        let is_busy = answering.is_busy();
        wanted.extend(question.as_deref().filter(|_| !at_once && !is_busy));
        answering.remove_old(store);
        let again = answering.again(is_busy);
        let wait = shared.wait(again.unwrap_or(FOREVER));
        match store.get_any(&wanted[usize::from(at_once)..], &wait) {
            Ok((0, text)) if !over => {
                over = true;
                shared.tell(News::Over(read_cause(&text)));
            }
            Ok((0, _)) if !at_once => {
                at_once = true;
                shared.tell(News::AtOnce);
            }
            Ok((2, text)) => {
                if let Some(card) = card {
                    answering.answer(shared, card.arrival, &text, card.address());
                }
            }
            Ok((_, word)) => {
                departed += 1;
                if let Some(word) = LastWord::read(&word).filter(|_| !over) {
                    tool_has_gone(shared, store, word);
                }
            }
            Err(error) if again.is_some() && error.status() == Status::Timeout => {}
            Err(_) if over || shared.is_cancelled() => return,
            Err(error) => {
                let cause = shared.store_lost(&error);
                return shared.tell(News::Over(cause));
            }
        }
    }
}

/// Ends the job where the tool that has gone had not finished.
fn tool_has_gone(shared: &Shared, store: &Board, word: LastWord) {
    let Some(post) = post_of(shared, store, word.arrival) else { return };
    match store.try_get(&keys::finished(post), &Wait::after(TELL)) {
        Ok(Some(_)) => {
            shared.end_if_all_have_finished(TELL);
        }
        Ok(None) if shared.heals => {
            let lost = gone(store, shared.nodes, LastWord { arrival: post, ..word }, TELL);
            shared.tell(News::Missed { node: lost.lost_node(), arrival: word.arrival, text: lost.to_string() });
            shared.end_if_all_have_finished(TELL);
        }
        Ok(None) => {
            shared.end(gone(store, shared.nodes, word, TELL));
        }
        // The store has gone too. The next wait finds that.
        Err(_) => {}
    }
}

/// The post of a tool that has gone. `None` where it was never part of the job, because all nodes
/// were there when it arrived, or because it has not taken the place of one that was lost.
fn post_of(shared: &Shared, store: &Board, arrival: u32) -> Option<u32> {
    if arrival <= shared.nodes {
        return Some(arrival);
    }
    let (posts, _) = posts(store, shared.nodes, TELL).ok().filter(|_| shared.heals)?;
    posts.iter().find(|post| post.holder == arrival).map(|post| post.first)
}

/// How many nodes have arrived so far.
fn arrived(store: &Board) -> usize {
    let count = store.try_get(NODES, &Wait::after(TELL)).ok().flatten();
    count.and_then(|text| String::from_utf8_lossy(&text).trim().parse().ok()).unwrap_or(1)
}

//! The posts of a job whose ranks start again alone (`--restart rank`). A post is a node's number
//! with its ranks. When the node that holds it is lost, a node that joins takes the post.
//!
//! A post is known by the arrival number of its first holder. Each holder that is lost has one
//! heir: the node whose arrival number stands under the heir key of the lost one ([`keys::heir`]).

use std::collections::HashSet;
use std::time::Duration;

use devicemesh::error::Result;
use devicemesh::wait::Wait;

use super::board::Board;
use super::entry::LastWord;
use super::keys;

/// A post, as the store has it now.
pub struct Post {
    /// The arrival number of the first holder.
    pub first: u32,
    /// The arrival number of the last holder.
    pub holder: u32,
    /// The number of holders before the last one.
    pub before: u32,
    /// Whether the tool of the last holder has ended.
    pub is_gone: bool,
    /// Whether all ranks of the post have ended well.
    pub is_finished: bool,
}

impl Post {
    /// Whether a node may take the post.
    pub fn is_vacant(&self) -> bool {
        self.is_gone && !self.is_finished
    }
}

/// Reads all posts, and how many tools have gone. Each question to the store takes `timeout` at
/// most.
pub fn posts(store: &Board, nodes: u32, timeout: Duration) -> Result<(Vec<Post>, usize)> {
    let ask = |key: &str| store.try_get(key, &Wait::after(timeout));
    let (mut gone, mut words) = (HashSet::new(), 0);
    while let Some(word) = ask(&keys::gone(words + 1))? {
        words += 1;
        gone.extend(LastWord::read(&word).map(|word| word.arrival));
    }
    let finished: Vec<String> = (1..=nodes).map(keys::finished).collect();
    let finished = store.present(&finished, &Wait::after(timeout))?;
    let mut posts = Vec::new();
    for (first, is_finished) in (1..=nodes).zip(finished) {
        let (mut holder, mut before) = (first, 0);
        // Only a holder that is gone has an heir, and each heir has come after it.
        while gone.contains(&holder) {
            let heir = ask(&keys::heir(holder))?.and_then(|text| std::str::from_utf8(&text).ok()?.parse().ok());
            let Some(heir) = heir.filter(|heir| *heir > holder) else { break };
            (holder, before) = (heir, before + 1);
        }
        posts.push(Post { first, holder, before, is_gone: gone.contains(&holder), is_finished });
    }
    Ok((posts, words))
}

//! The part that all views of a root share: its dimensions, and the world rank at each of its
//! positions.

use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ndarray::Array1;
use once_cell::race::OnceBox;

use crate::digest::Fnv1a;
use crate::error::Result;
use crate::layout::{Dim, Subrange};

/// A dimension with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedDim {
    /// The name.
    pub(super) name: Arc<str>,
    /// The layout over the root's positions.
    pub(super) dim: Dim,
    /// Whether the caller gave the name. A name that nobody gave is dim_0, dim_1 ... and is not
    /// printed.
    pub(super) named: bool,
}

/// The part that all views of one root share.
#[derive(Debug)]
pub(crate) struct Root {
    /// The device type, for example "cuda".
    pub(super) device_type: String,
    /// The number of positions.
    pub(super) size: usize,
    /// The world rank at each position.
    pub(super) ranks: RankMap,
    /// The dimensions of the root itself.
    pub(super) dims: Arc<[NamedDim]>,
    /// This process's rank in the world.
    pub(super) rank: i32,
    /// This process's position. It is `None` when this process is not in the mesh.
    pub(super) position: Option<usize>,
    /// Flattened dimensions. Every view that holds their digits knows them by name.
    pub(super) flattened: Appended,
    /// Dimensions that reshape made. Only the reshaped views know them by name, but no flattened
    /// dimension may have such a name for other groups.
    pub(super) reshaped: Appended,
}

/// Dimensions that are only ever added. Reading takes no lock, because a forked child also reads,
/// and a thread of the parent may have held the lock (src/ffi/guard.rs).
#[derive(Debug, Default)]
pub(super) struct Appended {
    /// The first dimension, from which the others follow.
    first: Link,
    /// Held by the thread that adds a dimension.
    adding: Mutex<()>,
}

type Link = OnceLock<Box<Node>>;

#[derive(Debug)]
struct Node {
    dim: NamedDim,
    next: Link,
}

impl Appended {
    /// Returns the dimensions, in the order in which they were added.
    pub(super) fn all(&self) -> Vec<NamedDim> {
        let nodes = std::iter::successors(self.first.get(), |node| node.next.get());
        nodes.map(|node| node.dim.clone()).collect()
    }

    /// Adds the dimensions that are not there. `check` gets the dimensions that are there.
    pub(super) fn add(&self, dims: &[NamedDim], check: impl FnOnce(&[NamedDim]) -> Result<()>) -> Result<()> {
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.all();
        check(&known)?;
        let mut end = &self.first;
        while let Some(node) = end.get() {
            end = &node.next;
        }
        for dim in dims.iter().filter(|dim| !known.contains(dim)) {
            // The lock is held, so nobody else fills the end.
            end = &end.get_or_init(|| Box::new(Node { dim: dim.clone(), next: Link::new() })).next;
        }
        Ok(())
    }
}

impl Drop for Appended {
    /// Drops the nodes one after the other. Otherwise each node would drop the next one inside its
    /// own drop, and a long list could overflow the stack.
    fn drop(&mut self) {
        let mut next = self.first.take();
        while let Some(mut node) = next {
            next = node.next.take();
        }
    }
}

/// The world rank at each position. It is cheap to clone, and equal maps give the same ranks.
#[derive(Debug, Clone)]
pub(crate) enum RankMap {
    /// Position and rank are equal.
    Identity,
    /// The caller listed the ranks.
    Listed(Arc<Listed>),
    /// The positions are some positions of another root.
    Within(Arc<Root>, Arc<Subrange>),
}

/// Distinct world ranks, row-major. Several threads that need the digest or the order for the first
/// time may each make it. So no thread waits for another one, which a forked child may not have.
#[derive(Debug)]
pub(crate) struct Listed {
    /// The world rank at each position.
    ranks: Array1<i32>,
    /// A digest of the ranks, by which maps are told apart. It is made when two maps are compared.
    digest: OnceBox<u64>,
    /// The positions ordered by their ranks. The order is made for the first question about the
    /// rank of another process.
    by_rank: OnceBox<Vec<u32>>,
}

impl Listed {
    pub(super) fn new(ranks: Array1<i32>) -> Listed {
        Listed { ranks, digest: OnceBox::new(), by_rank: OnceBox::new() }
    }

    pub(super) fn ranks(&self) -> &Array1<i32> {
        &self.ranks
    }

    fn digest(&self) -> u64 {
        let bytes = || self.ranks.iter().flat_map(|rank| rank.to_le_bytes());
        *self.digest.get_or_init(|| Box::new(Fnv1a::default().bytes(bytes()).value()))
    }

    fn position(&self, rank: i32) -> Option<usize> {
        let by_rank = self.by_rank.get_or_init(|| {
            // A root has at most i32::MAX positions.
            let mut order: Vec<u32> = (0..self.ranks.len() as u32).collect();
            order.sort_unstable_by_key(|position| self.ranks[*position as usize]);
            Box::new(order)
        });
        let at = by_rank.binary_search_by_key(&rank, |position| self.ranks[*position as usize]).ok()?;
        Some(by_rank[at] as usize)
    }
}

impl RankMap {
    /// Returns the rank at a position.
    #[inline]
    pub(super) fn rank(&self, position: usize) -> i32 {
        match self {
            // A root has at most i32::MAX positions.
            RankMap::Identity => position as i32,
            RankMap::Listed(listed) => listed.ranks[position],
            RankMap::Within(root, range) => root.ranks.rank(range.outer(position)),
        }
    }

    /// Returns the largest rank at `size` positions; `None` where there are none. Looks at
    /// each rank only where the ranks were listed.
    pub(super) fn largest(&self, size: usize) -> Option<i32> {
        match self {
            RankMap::Identity => size.checked_sub(1).map(|position| position as i32),
            RankMap::Listed(listed) => listed.ranks.iter().copied().max(),
            RankMap::Within(..) => (0..size).map(|position| self.rank(position)).max(),
        }
    }

    /// Returns the position of a rank among `size` positions.
    pub(super) fn position(&self, rank: i32, size: usize) -> Option<usize> {
        match self {
            RankMap::Identity => usize::try_from(rank).ok().filter(|position| *position < size),
            RankMap::Listed(listed) => listed.position(rank),
            RankMap::Within(root, range) => range.inner(root.ranks.position(rank, root.size)?),
        }
    }
}

impl PartialEq for RankMap {
    fn eq(&self, other: &RankMap) -> bool {
        match (self, other) {
            (RankMap::Identity, RankMap::Identity) => true,
            (RankMap::Listed(ours), RankMap::Listed(theirs)) => {
                Arc::ptr_eq(ours, theirs) || (ours.digest() == theirs.digest() && ours.ranks == theirs.ranks)
            }
            (RankMap::Within(ours, our_range), RankMap::Within(theirs, their_range)) => {
                our_range == their_range && ours.size == theirs.size && ours.ranks == theirs.ranks
            }
            _ => false,
        }
    }
}

impl Eq for RankMap {}

impl Hash for RankMap {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            RankMap::Identity => 0.hash(state),
            RankMap::Listed(listed) => listed.digest().hash(state),
            RankMap::Within(root, range) => {
                root.ranks.hash(state);
                range.hash(state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> NamedDim {
        NamedDim { name: name.into(), dim: Dim::known(&[(2, 1)]), named: true }
    }

    /// A forked child reads while a thread that it does not have holds the lock of the parent.
    #[test]
    fn added_dimensions_are_read_while_another_thread_adds() {
        let list = Appended::default();
        for some in [["a", "b"], ["b", "c"]] {
            list.add(&some.map(named), |_| Ok(())).unwrap();
        }
        let _adding = list.adding.lock().unwrap();
        assert_eq!(list.all(), ["a", "b", "c"].map(named));
    }

    #[test]
    fn a_long_list_is_dropped_on_a_small_stack() {
        let dims: Vec<NamedDim> = (0..100_000).map(|number| named(&number.to_string())).collect();
        let list = Appended::default();
        list.add(&dims, |_| Ok(())).unwrap();
        let small = std::thread::Builder::new().stack_size(64 * 1024);
        small.spawn(move || drop(list)).unwrap().join().unwrap();
    }
}

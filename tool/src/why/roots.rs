//! Finds the ranks for which all others wait in the end, where ranks wait for ranks that wait.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::waits::Edge;

/// Who waits for whom, without the edges that do not matter.
pub struct Graph<'a> {
    edges: Vec<&'a Edge>,
    /// The edges that end at a rank.
    into: BTreeMap<usize, Vec<&'a Edge>>,
    /// The ranks that wait.
    waiting: BTreeSet<usize>,
}

impl<'a> Graph<'a> {
    /// The graph of these edges. `ends` are ranks that do not go on, even if those for which they
    /// wait came.
    pub fn new(edges: impl Iterator<Item = &'a Edge>, ends: &BTreeSet<usize>) -> Graph<'a> {
        let edges: Vec<&Edge> = edges.filter(|edge| !ends.contains(&edge.from)).collect();
        let mut into: BTreeMap<usize, Vec<&Edge>> = BTreeMap::new();
        edges.iter().for_each(|edge| into.entry(edge.to).or_default().push(edge));
        let waiting = edges.iter().map(|edge| edge.from).collect();
        Graph { edges, into, waiting }
    }

    /// The ranks for which others wait and that wait for nobody.
    pub fn roots(&self) -> BTreeSet<usize> {
        self.into.keys().filter(|rank| !self.waiting.contains(rank)).copied().collect()
    }

    /// The edges that end at a rank.
    pub fn into(&self, rank: usize) -> &[&'a Edge] {
        self.into.get(&rank).map_or(&[], |edges| edges)
    }

    /// The ranks that wait for these ones, directly or for ranks that wait. These are among them.
    pub fn behind(&self, roots: impl IntoIterator<Item = usize>) -> BTreeSet<usize> {
        let mut reached: BTreeSet<usize> = roots.into_iter().collect();
        let mut open: VecDeque<usize> = reached.iter().copied().collect();
        while let Some(rank) = open.pop_front() {
            open.extend(self.into(rank).iter().map(|edge| edge.from).filter(|from| reached.insert(*from)));
        }
        reached
    }

    /// A circle of ranks that wait for each other, among those that are not in `explained`. It is
    /// a shortest one through some rank.
    pub fn circle(&self, explained: &BTreeSet<usize>) -> Option<Vec<&'a Edge>> {
        let mut out: BTreeMap<usize, Vec<&Edge>> = BTreeMap::new();
        for edge in self.edges.iter().filter(|edge| !explained.contains(&edge.from) && !explained.contains(&edge.to)) {
            out.entry(edge.from).or_default().push(edge);
        }
        // A walk that never leaves these ranks comes to a rank twice.
        let mut rank = *out.keys().next()?;
        let mut seen = BTreeSet::new();
        while seen.insert(rank) {
            rank = out.get(&rank)?.first()?.to;
        }
        // The shortest way from that rank to itself.
        let mut before: BTreeMap<usize, &Edge> = BTreeMap::new();
        let mut open = VecDeque::from([rank]);
        while let Some(at) = open.pop_front() {
            for edge in out.get(&at).into_iter().flatten() {
                if before.contains_key(&edge.to) {
                    continue;
                }
                before.insert(edge.to, edge);
                open.push_back(edge.to);
            }
            if before.contains_key(&rank) {
                break;
            }
        }
        let mut circle = vec![*before.get(&rank)?];
        while circle.last()?.from != rank {
            circle.push(before.get(&circle.last()?.from)?);
        }
        circle.reverse();
        Some(circle)
    }
}

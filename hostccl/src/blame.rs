//! The ranks that an error is about.

/// The ranks of one communicator that an error is about, and those of them that are lost.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Blame {
    /// The ranks that died, aborted, left, did not arrive, or made a call that differs.
    pub(crate) ranks: Vec<usize>,
    /// The ranks among `ranks` whose processes have ended.
    pub(crate) lost: Vec<usize>,
}

impl Blame {
    /// Blames no rank.
    pub(crate) fn none() -> Blame {
        Blame::default()
    }

    /// Blames ranks whose processes may live.
    pub(crate) fn of(ranks: impl IntoIterator<Item = usize>) -> Blame {
        let mut ranks: Vec<usize> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        Blame { ranks, lost: Vec::new() }
    }

    /// Blames ranks whose processes have ended.
    pub(crate) fn of_lost(ranks: impl IntoIterator<Item = usize>) -> Blame {
        let Blame { ranks, .. } = Blame::of(ranks);
        Blame { lost: ranks.clone(), ranks }
    }

    /// Returns the blame with other numbers for its ranks. A rank for which `number` has none is
    /// left out.
    pub(crate) fn renumbered(&self, number: impl Fn(usize) -> Option<usize>) -> Blame {
        let renumber = |ranks: &[usize]| Blame::of(ranks.iter().filter_map(|rank| number(*rank))).ranks;
        Blame { ranks: renumber(&self.ranks), lost: renumber(&self.lost) }
    }

    /// Returns the ranks to blame where the ranks gave different values. `given` has the value of
    /// each rank, in the order of the ranks. If more than half of all ranks gave one value, the
    /// other ranks are to blame. Otherwise all ranks are to blame.
    pub(crate) fn of_minority<T: PartialEq>(given: &[T]) -> Blame {
        let is_right = |thing: &T| 2 * given.iter().filter(|other| *other == thing).count() > given.len();
        Blame::of((0..given.len()).filter(|rank| !is_right(&given[*rank])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minority_is_to_blame_and_all_ranks_where_there_is_none() {
        assert_eq!(Blame::of_minority(&[4, 4, 2, 4]).ranks, [2]);
        assert_eq!(Blame::of_minority(&[2, 4, 4, 4, 1]).ranks, [0, 4]);
        assert_eq!(Blame::of_minority(&[2, 4]).ranks, [0, 1]);
    }
}

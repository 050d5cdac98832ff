//! Which processors the ranks of a machine may use, and whether there is one for each rank.

use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering};

/// The number of words in a set of processors: enough for 1024 processors.
const WORDS: usize = 16;

/// The processors on which a rank may run, as bits, in shared memory. The set is empty where the
/// kernel refuses to report them, and where the kernel has more than 1024 processors.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Processors([AtomicU64; WORDS]);

impl Processors {
    /// Writes the processors on which the calling thread may run.
    pub(crate) fn set_own(&self) {
        for (word, bits) in self.0.iter().zip(own_mask()) {
            word.store(bits, Ordering::Relaxed);
        }
    }
}

/// How many ranks are known to share this machine, and how many processors they have together. Both
/// numbers are about one communicator, or about the larger communicator from which it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Crowd {
    /// The number of ranks.
    pub(crate) ranks: usize,
    /// The number of processors, without regard to a quota; 0 where it is not known yet.
    pub(crate) processors: usize,
}

impl Crowd {
    /// Whether the ranks outnumber the processors.
    ///
    /// A launcher that binds each rank to a processor of its own leaves this process one processor,
    /// but the ranks together have one each. So the processors of all ranks count.
    pub(crate) fn is_crowded(self) -> bool {
        let masked = masked_number();
        // A quota lowers the number of processors. The quota is looked up only where it matters.
        masked > 0 && self.ranks > self.processors.max(masked)
            || self.ranks > within_quota(self.processors).max(own_number())
    }

    /// Returns the crowd with the processors of all these ranks together. Where the set of any rank
    /// is unknown, returns the crowd unchanged.
    pub(crate) fn with_processors<'a>(self, sets: impl Iterator<Item = &'a Processors>) -> Crowd {
        let mut all = [0; WORDS];
        for set in sets {
            let words = set.0.each_ref().map(|word| word.load(Ordering::Relaxed));
            if words == [0; WORDS] {
                return self;
            }
            all.iter_mut().zip(words).for_each(|(all, word)| *all |= word);
        }
        let together = all.iter().map(|word| word.count_ones() as usize).sum();
        Crowd { processors: self.processors.max(together), ..self }
    }
}

/// Returns the number of processors that this process may use. A quota of the process's control
/// group lowers this number.
fn own_number() -> usize {
    own_numbers().0
}

/// Returns how many processors the ranks can use, if their masks together have `together`
/// processors. Where a quota leaves this process fewer processors than its mask has, the other
/// ranks most likely share the quota.
fn within_quota(together: usize) -> usize {
    let (available, masked) = own_numbers();
    if available < masked { together.min(available) } else { together }
}

/// Returns how many processors this process may use, and how many its mask has. Both numbers come
/// from one thread at one moment, because threads may be bound to different processors. The numbers
/// are found once, because the quota must be read from files.
fn own_numbers() -> (usize, usize) {
    static NUMBERS: OnceLock<(usize, usize)> = OnceLock::new();
    *NUMBERS.get_or_init(|| (std::thread::available_parallelism().map_or(1, usize::from), count_own_mask()))
}

/// Returns how many processors were in the mask of the first thread that asked; 0 where the kernel
/// refuses to report the mask.
fn masked_number() -> usize {
    static NUMBER: OnceLock<usize> = OnceLock::new();
    *NUMBER.get_or_init(count_own_mask)
}

fn count_own_mask() -> usize {
    own_mask().iter().map(|word| word.count_ones() as usize).sum()
}

/// Returns the processors on which the calling thread may run, or an empty set where the kernel
/// refuses to report them.
fn own_mask() -> [u64; WORDS] {
    let mut mask = [0_u64; WORDS];
    // SAFETY: the mask is valid for its size. The kernel refuses a size that is too small.
    let done = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    if done == 0 { mask } else { [0; WORDS] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(bits: &[usize]) -> Processors {
        let set = Processors::default();
        for bit in bits {
            set.0[bit / 64].fetch_or(1 << (bit % 64), Ordering::Relaxed);
        }
        set
    }

    #[test]
    fn the_processors_of_all_ranks_count_together() {
        let crowd = Crowd { ranks: 4, processors: 0 };
        let bound = [set(&[0]), set(&[1]), set(&[70]), set(&[1023])];
        let free = own_number() == own_mask().iter().map(|word| word.count_ones() as usize).sum::<usize>();
        if free {
            assert_eq!(crowd.with_processors(bound.iter()).processors, 4);
            assert!(!crowd.with_processors(bound.iter()).is_crowded());
        }
        let ranks = own_number() + 5;
        let doubly = (0..ranks).map(|_| set(&[0, 1])).collect::<Vec<_>>();
        assert!(Crowd { ranks, processors: 0 }.with_processors(doubly.iter()).is_crowded());
    }

    #[test]
    fn an_unknown_set_leaves_what_is_known() {
        let crowd = Crowd { ranks: 2, processors: 7 };
        assert_eq!(crowd.with_processors([set(&[0]), set(&[])].iter()), crowd);
        assert_eq!(crowd.with_processors([set(&[0])].iter()), crowd, "a part of a split knows what its parent knew");
    }

    #[test]
    fn a_bound_thread_writes_its_processor() {
        let whole = own_mask();
        let first = whole.iter().position(|word| *word != 0).unwrap();
        let mut one = [0; WORDS];
        one[first] = 1 << whole[first].trailing_zeros();
        std::thread::spawn(move || {
            // SAFETY: the mask is valid for its size, and only this thread is bound.
            assert_eq!(unsafe { libc::sched_setaffinity(0, size_of_val(&one), one.as_ptr().cast()) }, 0);
            let set = Processors::default();
            set.set_own();
            assert_eq!(set.0.each_ref().map(|word| word.load(Ordering::Relaxed)), one);
        })
        .join()
        .unwrap();
    }
}

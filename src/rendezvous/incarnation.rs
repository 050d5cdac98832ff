//! The processes that join the world under a rank, one after the other.
//!
//! A rank that is lost may come back as another process. The store counts the processes of each
//! rank, so each of them has a ticket: 0 for the first one, 1 for the process that replaces it.
//! The store notes the loss of each process by itself.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use std::sync::Arc;

/// One process that has joined the world under a rank. Its text is `5` for the first process of
/// rank 5, and `5:1` for the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation {
    /// The rank in the world, which the process keeps for its life.
    pub rank: i32,
    /// How many processes have joined under this rank before.
    pub ticket: u32,
}

impl Incarnation {
    /// Returns the first process of that rank.
    pub fn first(rank: i32) -> Incarnation {
        Incarnation { rank, ticket: 0 }
    }
}

impl Display for Incarnation {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self.ticket {
            0 => write!(out, "{}", self.rank),
            ticket => write!(out, "{}:{ticket}", self.rank),
        }
    }
}

impl FromStr for Incarnation {
    type Err = ();

    /// Reads a text that [`Display`] has written. Any other text is an error, also one that means a
    /// number, such as `05` or `5:0`.
    fn from_str(text: &str) -> Result<Incarnation, ()> {
        let (rank, ticket) = text.split_once(':').unwrap_or((text, "0"));
        let (rank, ticket) = (rank.parse::<i32>().map_err(drop)?, ticket.parse::<u32>().map_err(drop)?);
        let read = Incarnation { rank, ticket };
        if rank >= 0 && read.to_string() == text { Ok(read) } else { Err(()) }
    }
}

/// Which process holds each rank, as far as one set of ranks is concerned. Every rank that is not
/// listed is held by its first process. Clones share the list.
#[derive(Debug, Clone, Default)]
pub(super) struct Tickets(Arc<BTreeMap<i32, u32>>);

impl Tickets {
    /// Returns the process that holds this rank.
    pub(super) fn holder(&self, rank: i32) -> Incarnation {
        Incarnation { rank, ticket: self.0.get(&rank).copied().unwrap_or(0) }
    }

    /// Whether this process holds its rank.
    pub(super) fn are_of(&self, process: Incarnation) -> bool {
        self.holder(process.rank) == process
    }
}

impl FromIterator<Incarnation> for Tickets {
    fn from_iter<T: IntoIterator<Item = Incarnation>>(holders: T) -> Tickets {
        let later = holders.into_iter().filter(|holder| holder.ticket > 0);
        Tickets(Arc::new(later.map(|holder| (holder.rank, holder.ticket)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_as_it_is_written() {
        for (text, rank, ticket) in
            [("0", 0, 0), ("5", 5, 0), ("5:1", 5, 1), ("2147483647:4294967295", i32::MAX, u32::MAX)]
        {
            let read: Incarnation = text.parse().unwrap();
            assert_eq!((read, read.to_string().as_str()), (Incarnation { rank, ticket }, text));
        }
        for text in ["", "-", "-1", "05", "+5", "5:", "5:0", "5:01", ":1", "5:1:1", "5 ", "2147483648", "5:4294967296"]
        {
            assert_eq!(text.parse::<Incarnation>(), Err(()), "{text:?}");
        }
    }

    #[test]
    fn a_rank_that_is_not_listed_is_held_by_its_first_process() {
        let tickets: Tickets = [Incarnation { rank: 5, ticket: 2 }, Incarnation::first(3)].into_iter().collect();
        assert_eq!(tickets.holder(5).to_string(), "5:2");
        assert_eq!(tickets.holder(3).to_string(), "3");
        assert!(tickets.are_of(Incarnation::first(4)) && !tickets.are_of(Incarnation::first(5)));
    }
}

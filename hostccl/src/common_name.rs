//! The agreement of several hosts on whose turn it is.
//!
//! The seats 0 of the hosts gather the tags under which all ranks of their hosts have a call. The
//! next turn goes to a tag that every host has. If there are several, it goes to the one that comes
//! first among rank 0's tags. If there is none, the hosts gather again as soon as one of them has
//! other tags to tell.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::call_name::Name;
use crate::collective::{Descriptor, Kind};
use crate::comm::Comm;
use crate::error::Result;
use crate::gathering::{Content, MOST_TAGS, Records, span_of};
use crate::poll::{Blocker, Poll};
use crate::turn;

/// The tags that the seats of a host have shown since their calls were withdrawn. A call that was
/// withdrawn waits until its turn comes, so a tag that was shown once stays wanted.
struct Shown(Vec<HashSet<u64>>);

impl Shown {
    /// Returns the tags under which all seats of this host have a call, in the order of this seat's
    /// calls.
    fn by_all(&mut self, comm: &Comm) -> Vec<u64> {
        for (shown, seat) in self.0.iter_mut().zip(1..) {
            let cells = comm.segment.seat(seat).wanted.iter().map(|cell| cell.load(Ordering::SeqCst));
            shown.extend(cells.filter(|tag| *tag != 0));
        }
        let mut tags = turn::collectives(comm);
        tags.retain(|tag| self.0.iter().all(|shown| shown.contains(tag)));
        tags.truncate(MOST_TAGS);
        tags
    }
}

/// Returns a tag under which every rank of every host has a call. Seat 0 of each host calls this
/// function. `posted` is the step in which the host's seats posted the calls that were withdrawn,
/// and `name` is the name of this rank's call.
pub(crate) async fn agree(comm: Arc<Comm>, posted: u64, name: Name) -> Result<u64> {
    let span = span_of(&comm);
    let mut shown = Shown(vec![HashSet::new(); comm.nranks - 1]);
    let mut records = Records::new(&comm, false);
    let mut told: Option<Vec<u64>> = None;
    loop {
        let tags = shown.by_all(&comm);
        let bytes: Vec<u8> = tags.iter().flat_map(|tag| tag.to_ne_bytes()).collect();
        records.write_payload(&bytes);
        let may_begin = || {
            let (seen, moved) = (comm.segment.header().wants.value(), span.wire.moved().value());
            if told.as_ref() != Some(&tags) || shown.by_all(&comm) != tags {
                return None;
            }
            turn::show_others(&comm);
            Some(Poll::Blocked { seen, blocker: Blocker::HostNames { step: posted, moved } })
        };
        records.gather_in_ring(Content::Tags, Descriptor::making(Kind::Split, name), bytes.len(), may_begin).await?;
        let others: Vec<HashSet<u64>> =
            (1..span.hosts.len()).map(|host| records.tags(host).into_iter().collect()).collect();
        let wanted = |tag: &u64| others.iter().all(|tags| tags.contains(tag));
        if let Some(tag) = records.tags(0).into_iter().find(wanted) {
            return Ok(tag);
        }
        told = Some(tags);
    }
}

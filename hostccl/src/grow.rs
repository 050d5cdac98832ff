//! `ncclCommGrow` on the ranks of the communicator that grows.
//!
//! One of them has made an id by `ncclCommGetUniqueId`, and the program has given it to the new
//! ranks. The ranks of the communicator exchange what they know in one small all-gather, so all of
//! them learn the id. Then all ranks, old and new, join the new communicator by the id, as they
//! would by an id of `ncclGetUniqueId`. The old ranks keep their numbers.

use std::collections::HashSet;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::blame::Blame;
use crate::call_name::Name;
use crate::collective::Kind;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::hosts::SmallGather;
use crate::id::Id;
use crate::join::{Join, Source};
use crate::labels::GlobalRanks;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::setup::InitOperation;
use crate::turn::Pass;
use crate::types::*;

/// The data that each rank gives to the others in the exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Given {
    /// The number of ranks that the rank's program passed.
    nranks: u32,
    /// The id that the rank has: the one that it made, or the one that its program passed.
    id: Option<Id>,
    /// Whether the rank has made the id.
    is_maker: bool,
}

/// The length of [`Given`] in bytes.
const GIVEN_BYTES: usize = 8 + NCCL_UNIQUE_ID_BYTES;

impl Given {
    fn to_bytes(self) -> [u8; GIVEN_BYTES] {
        let mut bytes = [0; GIVEN_BYTES];
        bytes[..4].copy_from_slice(&self.nranks.to_le_bytes());
        bytes[4..6].copy_from_slice(&[u8::from(self.id.is_some()), u8::from(self.is_maker)]);
        if let Some(id) = self.id {
            let raw = id.to_raw().internal;
            bytes[8..].iter_mut().zip(raw).for_each(|(to, from)| *to = from as u8);
        }
        bytes
    }

    /// Reads what a rank gave. Missing bytes count as 0.
    fn of(bytes: &[u8]) -> Result<Given> {
        let mut whole = [0; GIVEN_BYTES];
        whole.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        let mut raw = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
        raw.internal.iter_mut().zip(&whole[8..]).for_each(|(to, from)| *to = *from as _);
        let nranks = u32::from_le_bytes([whole[0], whole[1], whole[2], whole[3]]);
        let id = (whole[4] != 0).then(|| Id::parse(&raw)).transpose()?;
        Ok(Given { nranks, id, is_maker: whole[5] != 0 })
    }
}

/// The stages of a growth.
enum Stage {
    /// The ranks exchange what they know.
    Exchanging(SmallGather),
    /// This rank joins the new communicator.
    Joining(Box<Join>),
}

/// A growth under way, on a rank of the communicator that grows.
pub(crate) struct Grow {
    /// The communicator that grows.
    parent: Arc<Comm>,
    /// The number of ranks of the new communicator.
    nranks: u32,
    /// The name of the new communicator.
    name: String,
    /// The flag that `ncclCommAbort` raises on the new communicator's handle.
    aborted: Arc<AtomicBool>,
    /// The numbers by which messages name the ranks of the new communicator.
    global_ranks: GlobalRanks,
    /// The name of the call.
    call: Name,
    /// The stage that the growth has reached.
    stage: Stage,
    /// Whether the growth has begun and has not ended. Other ranks may wait for this one then.
    is_under_way: bool,
}

impl Grow {
    /// Returns a growth to `nranks` ranks that has not begun. `id` is the one that the program
    /// passed. Fails when the parent takes no more calls.
    pub(crate) fn new(
        parent: Arc<Comm>,
        nranks: u32,
        id: Option<Id>,
        name: String,
        aborted: Arc<AtomicBool>,
        global_ranks: &GlobalRanks,
        call: Name,
    ) -> Result<Grow> {
        let made = parent.offered_growth();
        if let (Some(made), Some(id)) = (made, id) {
            if made != id {
                return Err(Error::argument(format!(
                    "unique_id is not the one that ncclCommGetUniqueId made on {}",
                    parent.own_label()
                )));
            }
        }
        let given = Given { nranks, id: made.or(id), is_maker: made.is_some() };
        let gather = SmallGather::new(parent.clone(), Kind::Grow, &given.to_bytes(), call);
        // The new ranks have the id, and wait for this growth.
        let gather = gather.inspect_err(|error| parent.end_growth(error))?;
        Ok(Grow {
            parent,
            nranks,
            name,
            aborted,
            global_ranks: Arc::clone(global_ranks),
            call,
            stage: Stage::Exchanging(gather),
            is_under_way: false,
        })
    }

    /// Returns the id by which all ranks join. Fails when the ranks' arguments do not fit together.
    /// Every rank gets the same error, so the parent stays usable.
    fn agree(&self, gather: &SmallGather) -> Result<Id> {
        let size = self.parent.whole().1;
        let given: Vec<Given> = (0..size).map(|rank| Given::of(gather.of(rank))).collect::<Result<_>>()?;
        let label = |rank: usize| self.parent.labels.rank(rank, None);
        let sizes: Vec<u32> = given.iter().map(|given| given.nranks).collect();
        if let Some(other) = sizes.iter().position(|nranks| *nranks != sizes[0]) {
            let message = format!(
                "the ranks do not agree on the size: {} asks for {} ranks, {} for {}",
                label(0),
                sizes[0],
                label(other),
                sizes[other]
            );
            return Err(Error::usage(message).by(Blame::of_minority(&sizes)));
        }
        let with_id: Vec<(usize, Id)> =
            given.iter().enumerate().filter_map(|(rank, given)| Some((rank, given.id?))).collect();
        let Some((first, id)) = with_id.first().copied() else {
            return Err(Error::usage(
                "no rank has a unique id for the new ranks: one rank of the communicator calls ncclCommGetUniqueId first",
            ));
        };
        let ids: HashSet<[u8; 16]> = with_id.iter().map(|(_, id)| id.token).collect();
        if ids.len() > 1 {
            let ranks: Vec<usize> = with_id.iter().map(|(rank, _)| *rank).collect();
            let message = format!(
                "{} have different unique ids: one rank of the communicator calls ncclCommGetUniqueId for each growth",
                self.parent.labels.ranks(&ranks)
            );
            return Err(Error::usage(message).by(Blame::of(ranks)));
        }
        if !given.iter().any(|given| given.is_maker) {
            let message =
                format!("{} passes a unique id that no rank of {} has made", label(first), self.parent.name());
            return Err(Error::usage(message).by(Blame::of([first])));
        }
        Ok(id)
    }

    /// Begins to join the new communicator.
    fn begin_to_join(&mut self, id: Id) {
        let me = self.parent.whole().0 as u32;
        let join = Join::new(Source::Id(id), self.nranks, me, self.name.clone(), self.aborted.clone());
        // From now on the join tells the new ranks when this rank gives up.
        self.parent.take_growth();
        self.stage = Stage::Joining(Box::new(join.with_global_ranks(&self.global_ranks)));
    }

    /// Does as much of the exchange as is possible without waiting.
    fn exchange(&mut self) -> Result<Poll> {
        let Stage::Exchanging(gather) = &mut self.stage else { return Ok(Poll::Done) };
        if self.aborted.load(Ordering::Acquire) {
            // The other ranks wait for this one in the exchange.
            self.parent.end_calls("gave up growing");
            return Err(Error::aborted());
        }
        self.is_under_way = true;
        let polled = gather.poll()?;
        if polled == Poll::Done {
            gather.pass().leave(&self.parent)?;
            let Stage::Exchanging(gather) = &self.stage else { return Ok(polled) };
            let id = self.agree(gather)?;
            self.begin_to_join(id);
        }
        Ok(polled)
    }
}

impl Operation for Grow {
    fn poll(&mut self) -> Result<Poll> {
        let polled = self.exchange().inspect_err(|error| {
            self.is_under_way = false;
            self.parent.end_growth(error);
        })?;
        let Stage::Joining(join) = &mut self.stage else { return Ok(polled) };
        let mut polled = join.poll()?;
        // The maker learns of each rank that ends once all ranks have registered. So where this
        // rank waits for the maker's verdict alone, the parent does not count: another rank may
        // have the verdict already, and may have ended the parent.
        if polled != Poll::Done && !join.waits_for_verdict() {
            // A rank of the parent that died before it joined is known to the parent only.
            if let Err(error) = self.parent.check_peers(None, &|| format!("ncclCommGrow to {} ranks", self.nranks)) {
                // That rank may have joined before it died, or before the parent failed.
                polled = join.poll()?;
                if polled != Poll::Done && !join.waits_for_verdict() {
                    join.fail(&error);
                    return Err(error);
                }
            }
        }
        if polled == Poll::Done {
            self.is_under_way = false;
        }
        Ok(polled)
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        match &self.stage {
            Stage::Exchanging(_) => Some(&self.parent),
            Stage::Joining(join) => join.comm(),
        }
    }

    fn connection(&self) -> Option<(RawFd, bool)> {
        match &self.stage {
            Stage::Exchanging(_) => None,
            Stage::Joining(join) => join.connection(),
        }
    }

    /// Returns the parent's timeout, because nobody may have set one for the new communicator.
    fn timeout(&self) -> Option<Duration> {
        self.parent.timeout()
    }

    fn is_matched(&self) -> bool {
        match &self.stage {
            Stage::Exchanging(gather) => gather.is_matched(),
            Stage::Joining(_) => true,
        }
    }

    fn describe(&self) -> String {
        format!("ncclCommGrow to {} ranks on {}", self.nranks, self.parent.own_label())
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        match &mut self.stage {
            Stage::Exchanging(gather) => Some(gather.pass()),
            Stage::Joining(_) => None,
        }
    }
}

impl InitOperation for Grow {
    fn joined(&self) -> Option<Arc<Comm>> {
        match &self.stage {
            Stage::Exchanging(_) => None,
            Stage::Joining(join) => join.joined(),
        }
    }

    fn wait_at_most(&mut self, timeout: Option<Duration>) {
        if let Stage::Joining(join) = &mut self.stage {
            join.wait_at_most(timeout.or(self.parent.timeout()));
        }
    }

    fn describe_for(&self, _: &Error) -> String {
        self.describe()
    }

    fn refuse(&mut self, error: &Error) {
        self.parent.end_calls("cannot grow");
        self.parent.end_growth(error);
    }

    fn leave(&mut self) {
        let failure = |comm: &Arc<Comm>| comm.check().err();
        let why = |error: Option<Error>| error.unwrap_or_else(|| Error::usage("the growth was given up"));
        let was_under_way = std::mem::take(&mut self.is_under_way);
        match &mut self.stage {
            Stage::Exchanging(gather) => {
                // A failure of the parent has been reported already.
                let _ = gather.pass().leave(&self.parent);
                if was_under_way {
                    self.parent.end_growth(&why(failure(&self.parent)));
                }
            }
            Stage::Joining(join) => {
                if was_under_way {
                    let error = join.comm().and_then(failure).or_else(|| failure(&self.parent));
                    join.fail(&why(error));
                }
                join.leave();
            }
        }
    }

    fn lane(&self) -> Option<(&Arc<Comm>, Name)> {
        Some((&self.parent, self.call))
    }
}

impl Drop for Grow {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::bootstrap::tests::client::Maker;
    use crate::bootstrap::{Member, Message};
    use crate::hosts_of_threads;

    /// The first rank of a growth that has its verdict may end the parent, and another rank may
    /// hear of that before it has its own verdict.
    #[test]
    fn an_end_of_the_parent_does_not_overtake_the_verdict_of_the_maker() {
        let (ends, _wires) = hosts_of_threads::communicators(&[&[0], &[1]]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut id = Id::create(Some(true)).unwrap();
        id.address = Some(listener.local_addr().unwrap());
        let mut grow = Grow {
            parent: ends[0].clone(),
            nranks: 2,
            name: "grown".to_owned(),
            aborted: Arc::default(),
            global_ranks: GlobalRanks::default(),
            call: Name::NONE,
            stage: Stage::Joining(Box::new(Join::new(Source::Id(id), 2, 0, "grown".to_owned(), Arc::default()))),
            is_under_way: true,
        };
        std::thread::scope(|threads| {
            let maker = threads.spawn(move || {
                let mut maker = Maker::accept(&listener, id.token);
                let Message::Register(own) = maker.read() else { panic!("no registration") };
                let other = Member { rank: 1, ..own.clone() };
                maker.send(&Message::Table { comm: 1, members: vec![own, other] });
                assert_eq!(maker.read(), Message::Opened(0));
                maker.send(&Message::Groups(vec![0, 0]));
                assert_eq!(maker.read(), Message::Mapped);
                maker
            });
            let mut poll_until = |is_over: &mut dyn FnMut(Poll) -> bool| {
                let began = std::time::Instant::now();
                while !is_over(grow.poll().unwrap()) {
                    assert!(began.elapsed() < Duration::from_secs(60), "the growth stands still");
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            poll_until(&mut |_| maker.is_finished());
            ends[0].end_calls("aborted");
            assert!(ends[0].check().is_err());
            poll_until(&mut |polled| polled == Poll::Outside);
            maker.join().unwrap().send(&Message::Go);
            poll_until(&mut |polled| polled == Poll::Done);
        });
        assert!(grow.joined().is_some());
    }

    #[test]
    fn what_a_rank_gives_is_read_as_it_was_written() {
        let id = Id::create(Some(false)).unwrap().for_growth_from(3);
        for given in [
            Given { nranks: 1024, id: None, is_maker: false },
            Given { nranks: 4, id: Some(id), is_maker: false },
            Given { nranks: 4, id: Some(id), is_maker: true },
        ] {
            let bytes = given.to_bytes();
            assert_eq!(Given::of(&bytes).unwrap(), given);
        }
        let mut damaged = Given { nranks: 4, id: Some(id), is_maker: true }.to_bytes();
        damaged[8 + 100] ^= 1;
        assert_eq!(Given::of(&damaged).unwrap_err().code(), ncclInvalidArgument);
        assert_eq!(Given::of(&[]).unwrap(), Given { nranks: 0, id: None, is_maker: false });
        id.close(None);
    }
}

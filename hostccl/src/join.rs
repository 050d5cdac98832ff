//! The join of a new communicator. A rank maps the segment, takes its seat, and waits until all
//! ranks have arrived.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::blame::Blame;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::id::Id;
use crate::labels::{GlobalRanks, Labels};
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::process::{Process, ProcessId};
use crate::segment::{self, Segment};
use crate::types::*;

/// Where the segment is found.
pub(crate) enum Source {
    /// A unique id says where.
    Id(Id),
    /// The new communicator is split or shrunk from another one.
    Child {
        /// The process of the new communicator's rank 0, which holds the segment open.
        owner: ProcessId,
        /// The segment's descriptor in that process.
        fd: RawFd,
        /// The segment's token, which tells it from another segment at that descriptor.
        token: [u8; 16],
    },
}

impl Source {
    /// Opens the segment. `labels` names the ranks of the new communicator.
    fn open(&self, labels: &Labels) -> Result<Private<OwnedFd>> {
        let opened = match self {
            Source::Id(id) => id.open(),
            Source::Child { owner, fd, token } => segment::open(owner.pid, *fd, *token).and_then(|found| {
                found.ok_or_else(|| {
                    let message = format!("{} gave up before all ranks had joined", labels.process(0, owner.pid));
                    Error::new(ncclRemoteError, message).by(Blame::of([0]))
                })
            }),
        };
        opened.map_err(|error| self.orphaned(labels).unwrap_or(error))
    }

    /// Returns the error that the segment is gone because the process that held it has ended.
    /// Returns `None` while that process lives. A unique id does not say which rank made it.
    fn orphaned(&self, labels: &Labels) -> Option<Error> {
        let (maker, who, rank) = match self {
            Source::Id(Id { creator, .. }) => {
                (creator, format!("the process that made the unique id (pid {})", creator.pid), None)
            }
            Source::Child { owner, .. } => (owner, labels.process(0, owner.pid), Some(0)),
        };
        let message = format!("{who} has gone before all ranks had joined");
        maker.is_ending().then(|| Error::new(ncclRemoteError, message).by(Blame::of_lost(rank)))
    }
}

/// The join of one rank, until all ranks have arrived.
pub(crate) struct Join {
    /// Where the segment is found.
    source: Source,
    /// The number of ranks of the new communicator.
    nranks: u32,
    /// This rank's number in the new communicator.
    rank: u32,
    /// [`Comm::ranks_on_machine`] of the communicator from which the new one is made; 0 where it is
    /// made by a unique id.
    ranks_on_machine: usize,
    /// The communicator's name in messages.
    name: String,
    /// The numbers by which messages name the ranks.
    global_ranks: GlobalRanks,
    /// Raised by `ncclCommAbort`, which may come before there is a communicator.
    aborted: Arc<AtomicBool>,
    /// The communicator, once this rank has arrived.
    comm: Option<Arc<Comm>>,
    /// Whether the id was given up because this rank could not arrive.
    gave_up: bool,
    /// The process that made the id, if it is another one. This rank watches it, because it keeps
    /// the segment open for the ranks that have not arrived.
    creator: Option<Arc<Process>>,
}

impl Join {
    pub(crate) fn new(source: Source, nranks: u32, rank: u32, name: String, aborted: Arc<AtomicBool>) -> Join {
        Join {
            source,
            nranks,
            rank,
            ranks_on_machine: 0,
            name,
            global_ranks: GlobalRanks::default(),
            aborted,
            comm: None,
            gave_up: false,
            creator: None,
        }
    }

    /// Returns this join for a communicator that consists of the ranks `members` of `parent`, in
    /// this order.
    pub(crate) fn out_of(mut self, parent: &Comm, members: &[usize]) -> Join {
        self.ranks_on_machine = parent.ranks_on_machine;
        self.global_ranks = parent.labels.global_ranks_of(members);
        self
    }

    /// Returns this join for a communicator whose messages use these global ranks, which may be set
    /// later.
    pub(crate) fn with_global_ranks(mut self, global_ranks: &GlobalRanks) -> Join {
        self.global_ranks = Arc::clone(global_ranks);
        self
    }

    /// Gives up before this rank has arrived, because `error` keeps it from joining. The other ranks
    /// read the reason.
    pub(crate) fn refuse(&mut self, error: &Error) {
        let labels = Labels {
            comm_name: self.name.clone(),
            global_ranks: Arc::clone(&self.global_ranks),
            seats: Box::default(),
        };
        if let (Source::Id(id), None, false) = (&self.source, &self.comm, self.gave_up) {
            id.give_up(self.rank, &labels.refused(self.rank as usize, error.clone()));
            self.gave_up = true;
        }
    }

    /// Returns the communicator once all ranks have arrived.
    pub(crate) fn joined(&self) -> Option<Arc<Comm>> {
        self.comm.clone()
    }

    /// Describes this join in front of `error`. An error about another rank does not get the number
    /// of this rank too, because a reader would take this rank for the one to blame.
    pub(crate) fn describe_for(&self, error: &Error) -> String {
        match error.lost() {
            Some(lost) if lost != self.rank as usize => format!("joining {}", self.name),
            _ => self.describe(),
        }
    }

    /// Opens and maps the segment, takes this rank's seat, and counts this rank in.
    fn arrive(&self) -> Result<Arc<Comm>> {
        let labels = Labels {
            comm_name: self.name.clone(),
            global_ranks: Arc::clone(&self.global_ranks),
            seats: Box::default(),
        };
        let fd = self.source.open(&labels).map_err(|error| labels.refused(self.rank as usize, error))?;
        let segment = Segment::map(&fd, self.nranks, self.rank, &labels)?;
        let me = ProcessId::current();
        let seat = segment.seat(self.rank as usize);
        if seat.claim.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            let message = format!(
                "rank {} was taken twice: by pid {} and by pid {}",
                self.rank,
                seat.pid.load(Ordering::Relaxed),
                me.pid
            );
            segment.header().fail(ncclInvalidUsage, &Blame::of([self.rank as usize]), &message, "");
            return Err(segment.header().failure.error().unwrap_or_else(|| Error::usage(message)));
        }
        seat.pid.store(me.pid, Ordering::Relaxed);
        seat.start.store(me.start, Ordering::Relaxed);
        seat.claim.store(2, Ordering::Release);
        let (rank, aborted) = (self.rank as usize, self.aborted.clone());
        let comm = Arc::new(Comm::new(segment, rank, self.ranks_on_machine, labels, aborted, me, None));
        let arrived = &comm.segment.header().arrived;
        if arrived.count() == self.nranks {
            arrived.wake();
        }
        Ok(comm)
    }
}

impl Operation for Join {
    fn poll(&mut self) -> Result<Poll> {
        let comm = match &self.comm {
            Some(comm) => comm,
            None => {
                if self.aborted.load(Ordering::Acquire) {
                    return Err(Error::aborted());
                }
                let comm = self.arrive().inspect_err(|error| {
                    if let Source::Id(id) = &self.source {
                        id.give_up(self.rank, error);
                        self.gave_up = true;
                    }
                })?;
                if let Source::Id(id) = &self.source {
                    if id.creator.pid != std::process::id() {
                        self.creator = Some(Process::watch(id.creator));
                    }
                }
                self.comm.insert(comm)
            }
        };
        let seen = comm.segment.header().arrived.value();
        if seen == self.nranks {
            if let Source::Id(id) = &self.source {
                id.close();
            }
            return Ok(Poll::Done);
        }
        comm.check()?;
        if let Some(creator) = &self.creator {
            if Process::first_dead(std::slice::from_ref(creator)).is_some()
                && comm.segment.header().arrived.value() == seen
            {
                if let Some(error) = self.source.orphaned(&comm.labels) {
                    let seat = (0..comm.nranks).find(|&rank| comm.segment.process(rank) == Some(creator.id()));
                    return Err(comm.fail(ncclRemoteError, Blame::of_lost(seat), error.message()));
                }
            }
        }
        Ok(Poll::Blocked { seen, blocker: Blocker::Arrivals })
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.as_ref()
    }

    fn describe(&self) -> String {
        format!("joining {} as rank {} of {}", self.name, self.rank, self.nranks)
    }
}

impl Drop for Join {
    fn drop(&mut self) {
        match &self.comm {
            Some(comm) if comm.segment.header().arrived.value() == self.nranks => return,
            Some(comm) => {
                let message = format!("{} gave up joining", comm.describe(comm.rank));
                comm.fail(ncclRemoteError, Blame::of([comm.rank]), &message);
            }
            None => {}
        }
        // This rank gives up, perhaps before it has arrived. Nobody may wait for it, so the id
        // counts as used up.
        if let (Source::Id(id), false) = (&self.source, self.gave_up) {
            id.close();
        }
    }
}

//! The join of a new communicator. A rank maps the segment, takes its seat, and waits until all
//! ranks have arrived. Where ranks may be on several hosts, the rank first registers with the maker
//! of the unique id (module `registration`).

mod registration;
mod seat;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::registration::{Limit, Registration};
use self::seat::{Context, take_seat};

use crate::blame::Blame;
use crate::bootstrap::Message;
use crate::bootstrap::client::Client;
use crate::comm::Comm;
use crate::crowd::Crowd;
use crate::error::{Error, Result};
use crate::id::{Id, Way};
use crate::labels::{GlobalRanks, Labels};
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::process::{Process, ProcessId};
use crate::segment;
use crate::span::Span;
use crate::timeout::{self, DEFAULT_TIMEOUT};
use crate::types::*;

/// Where a rank finds the segment of the new communicator.
pub(crate) enum Source {
    /// A unique id names the segment.
    Id(Id),
    /// The new communicator is split or shrunk from another one.
    Child {
        /// The process that holds the segment open: that of the lowest rank on this host.
        owner: ProcessId,
        /// The number of that rank in the new communicator.
        owner_rank: usize,
        /// The segment's descriptor in that process.
        fd: RawFd,
        /// The segment's token, which tells it from another segment at that descriptor.
        token: [u8; 16],
    },
}

impl Source {
    /// Opens the segment. `labels` names the ranks of the new communicator.
    fn open(&self, labels: &Labels) -> Result<Way> {
        let opened = match self {
            Source::Id(id) => id.open(),
            Source::Child { owner, owner_rank, fd, token } => segment::open(owner.pid, *fd, *token)
                .and_then(|found| {
                    found.ok_or_else(|| {
                        let message =
                            format!("{} gave up before all ranks had joined", labels.process(*owner_rank, owner.pid));
                        Error::new(ncclRemoteError, message).by(Blame::of([*owner_rank]))
                    })
                })
                .map(Way::Segment),
        };
        opened.map_err(|error| self.orphaned(labels).unwrap_or(error))
    }

    /// Returns the error that the segment is gone because the process that held it open has ended.
    /// Returns `None` while that process lives. The error about a unique id blames no rank, because
    /// the id does not say which rank made it.
    fn orphaned(&self, labels: &Labels) -> Option<Error> {
        let (maker, who, rank) = match self {
            Source::Id(Id { creator, .. }) => {
                (creator, format!("the process that made the unique id (pid {})", creator.pid), None)
            }
            Source::Child { owner, owner_rank, .. } => {
                (owner, labels.process(*owner_rank, owner.pid), Some(*owner_rank))
            }
        };
        let message = format!("{who} has gone before all ranks had joined");
        maker.is_ending().then(|| Error::new(ncclRemoteError, message).by(Blame::of_lost(rank)))
    }
}

/// The state of a rank's join.
#[derive(Debug)]
enum State {
    /// The rank has not opened anything.
    NotStarted,
    /// The rank has its seat in the segment of the source, and waits there for the other ranks.
    InSegment,
    /// The rank joins through the maker of the unique id.
    AtMaker(Box<Registration>),
    /// The rank cannot join, for this reason. Until this time it tries to tell the maker of the
    /// unique id.
    Refusing(Box<Client>, Error, Instant),
}

/// How long a rank that cannot join tries to report this to the maker of the unique id.
const REFUSAL_TIME: Duration = Duration::from_secs(5);

/// The join of one rank, until all ranks have arrived.
pub(crate) struct Join {
    /// Where the rank finds the segment.
    source: Source,
    /// The facts that the rank brings to its join.
    context: Context,
    /// The state of the join.
    state: State,
    /// Where the ranks of the new communicator are, if it is made from one over several hosts. The
    /// new communicator takes it when this rank arrives.
    span: Option<Box<Span>>,
    /// The seat that this rank takes in the segment, and the number of seats.
    seats: (usize, usize),
    /// How long the rank waits for the maker and the other ranks, where it joins through the maker.
    limit: Limit,
    /// The communicator, once this rank has arrived.
    comm: Option<Arc<Comm>>,
    /// Whether all ranks have arrived.
    is_done: bool,
    /// Whether this rank has told the others, through the id, that it cannot arrive.
    gave_up: bool,
    /// The process that made the id, if it is another process than this one. This rank watches that
    /// process, because it keeps the segment open for the ranks that have not arrived.
    creator: Option<Arc<Process>>,
}

impl Join {
    pub(crate) fn new(source: Source, nranks: u32, rank: u32, name: String, aborted: Arc<AtomicBool>) -> Join {
        let global_ranks = GlobalRanks::default();
        Join {
            source,
            context: Context { nranks, rank, crowd: Crowd::default(), name, global_ranks, aborted },
            state: State::NotStarted,
            span: None,
            seats: (rank as usize, nranks as usize),
            limit: Limit { time: DEFAULT_TIMEOUT, is_total: false },
            comm: None,
            is_done: false,
            gave_up: false,
            creator: None,
        }
    }

    /// Returns this join for a communicator that consists of the ranks `members` of `parent`, in
    /// this order.
    pub(crate) fn out_of(mut self, parent: &Comm, members: &[usize]) -> Join {
        self.context.crowd = parent.crowd();
        self.context.global_ranks = parent.labels.global_ranks_of(members);
        self
    }

    /// Returns this join for a communicator that has ranks on other hosts.
    pub(crate) fn over(mut self, span: Span) -> Join {
        let seat = span.seat_of(span.rank).unwrap_or(0);
        self.seats = (seat, span.here().len());
        self.span = Some(Box::new(span));
        self
    }

    /// Returns this join for a communicator whose messages use these global ranks, which may be set
    /// later.
    pub(crate) fn with_global_ranks(mut self, global_ranks: &GlobalRanks) -> Join {
        self.context.global_ranks = Arc::clone(global_ranks);
        self
    }

    /// Sets how long the rank waits. `timeout` is the time of the handle, where its caller has set
    /// one. Such a caller gives up at that time. So the time limits the whole join, because the
    /// error that names the missing ranks must come before the caller gives up.
    pub(crate) fn wait_at_most(&mut self, timeout: Option<Duration>) {
        let time = timeout.or_else(timeout::from_environment).unwrap_or(DEFAULT_TIMEOUT);
        self.limit = Limit { time, is_total: timeout.is_some() };
    }

    /// Gives up before this rank has arrived, because `error` keeps it from joining. The other
    /// ranks read the reason.
    pub(crate) fn refuse(&mut self, error: &Error) {
        let labels = self.context.labels();
        if let (Source::Id(id), None, false) = (&self.source, &self.comm, self.gave_up) {
            id.give_up(self.context.rank, &labels.refused(self.context.rank as usize, error.clone()));
            self.gave_up = true;
        }
    }

    /// Ends the join for all ranks, also for those that come later, because of `error`.
    pub(crate) fn fail(&mut self, error: &Error) {
        match (&mut self.state, &self.comm) {
            (State::AtMaker(registration), _) => registration.give_up(error),
            (_, Some(comm)) => {
                comm.fail_whole(error.code(), error.blame().clone(), error.message(), "");
            }
            (_, None) => {}
        }
        if let (Source::Id(id), false) = (&self.source, self.gave_up) {
            id.give_up(self.context.rank, error);
            self.gave_up = true;
        }
    }

    /// Returns the communicator once this rank has its seat. All ranks have arrived only when
    /// `poll` has answered [`Poll::Done`].
    pub(crate) fn joined(&self) -> Option<Arc<Comm>> {
        self.comm.clone()
    }

    /// Whether this rank has done its part, so that only the maker of the unique id knows whether
    /// all ranks have joined.
    pub(crate) fn waits_for_verdict(&self) -> bool {
        matches!(&self.state, State::AtMaker(registration) if registration.has_mapped())
    }

    /// Returns the words that stand before `error` in a message. Where `error` names a lost rank,
    /// they do not name this rank, because a reader would take this rank for the one to blame.
    pub(crate) fn describe_for(&self, error: &Error) -> String {
        match error.lost() {
            Some(lost) if lost != self.context.rank as usize => format!("joining {}", self.context.name),
            _ => self.describe(),
        }
    }

    /// Starts the join: takes a seat in the segment, or begins to register with the maker.
    fn start(&mut self) -> Result<()> {
        let mut labels = self.context.labels();
        let me = self.context.rank as usize;
        match self.source.open(&labels).map_err(|error| labels.refused(me, error))? {
            Way::Segment(fd) => {
                let span = self.span.take().map(|span| *span);
                if let Some(span) = &span {
                    labels.seats = span.here().into();
                }
                let (seats, crowd) = (self.seats, self.context.crowd);
                let comm = take_seat(&fd, seats, crowd, labels, &self.context, span)?;
                if let Source::Id(id) = &self.source {
                    if id.creator.pid != std::process::id() {
                        self.creator = Some(Process::watch(id.creator));
                    }
                }
                self.comm = Some(comm);
                self.state = State::InSegment;
            }
            Way::Connection(address) => self.register(address, None),
        }
        Ok(())
    }

    /// Begins to register with the maker of the unique id. `lobby` is the communicator in the
    /// segment of the id, where this rank has waited so far.
    fn register(&mut self, address: SocketAddr, lobby: Option<Arc<Comm>>) {
        if let Source::Id(id) = &self.source {
            let labels = self.context.labels();
            let registration = Registration::new(address, id.token, &self.context, lobby.clone());
            self.state = match registration {
                Ok(registration) => State::AtMaker(Box::new(registration)),
                Err(error) => {
                    let me = self.context.rank as usize;
                    let error = labels.refused(me, error);
                    let told = Error::new(error.code(), format!("{}: {}", labels.rank(me, None), error.message()));
                    let told = if error.lost().is_some() { error.clone() } else { told.by(Blame::of([me])) };
                    let client = Client::new(address, id.token, Message::Failed(told));
                    State::Refusing(Box::new(client), error, Instant::now() + REFUSAL_TIME)
                }
            };
        }
    }

    /// Checks whether all ranks have arrived in the segment. Where the maker has moved the join to
    /// its server, because a rank is on another host, begins to register there.
    fn poll_segment(&mut self) -> Result<Poll> {
        let Some(comm) = &self.comm else { return Ok(Poll::Done) };
        let header = comm.segment.header();
        let seen = header.arrived.value();
        if seen as usize == self.seats.1 {
            self.is_done = true;
            if let Source::Id(id) = &self.source {
                id.close();
            }
            return Ok(Poll::Done);
        }
        let blocked = comm.check_waiting(Poll::Blocked { seen, blocker: Blocker::Arrivals })?;
        if let Source::Id(Id { address: Some(address), .. }) = &self.source {
            if header.is_moved() {
                let (address, lobby) = (*address, self.comm.take());
                self.register(address, lobby);
                return Ok(Poll::Outside);
            }
        }
        if let Some(creator) = &self.creator {
            if Process::first_dead(std::slice::from_ref(creator)).is_some() && header.arrived.value() == seen {
                if let Some(error) = self.source.orphaned(&comm.labels) {
                    let seat = (0..comm.nranks).find(|&rank| comm.segment.process(rank) == Some(creator.id()));
                    return Err(comm.fail(ncclRemoteError, Blame::of_lost(seat), error.message()));
                }
            }
        }
        Ok(blocked)
    }
}

impl Operation for Join {
    fn poll(&mut self) -> Result<Poll> {
        if matches!(self.state, State::NotStarted) {
            if self.context.aborted.load(Ordering::Acquire) {
                return Err(Error::aborted());
            }
            self.start().inspect_err(|error| {
                if let Source::Id(id) = &self.source {
                    id.give_up(self.context.rank, error);
                    self.gave_up = true;
                }
            })?;
        }
        if matches!(self.state, State::InSegment) {
            let polled = self.poll_segment()?;
            if matches!(self.state, State::InSegment) {
                return Ok(polled);
            }
        }
        if let State::Refusing(client, error, until) = &mut self.state {
            let told = client.poll().is_err() || client.has_sent_first();
            return if told || Instant::now() >= *until { Err(error.clone()) } else { Ok(Poll::Outside) };
        }
        let State::AtMaker(registration) = &mut self.state else { return Ok(Poll::Done) };
        if self.context.aborted.load(Ordering::Acquire) {
            return Err(Error::aborted());
        }
        match registration.poll(&self.context, self.limit)? {
            None => Ok(Poll::Outside),
            Some(comm) => {
                self.comm = Some(comm);
                self.is_done = true;
                if let Source::Id(id) = &self.source {
                    id.close();
                }
                Ok(Poll::Done)
            }
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.as_ref()
    }

    fn connection(&self) -> Option<(RawFd, bool)> {
        match &self.state {
            State::AtMaker(registration) => registration.connection(),
            State::Refusing(client, ..) => client.waits_for(),
            State::NotStarted | State::InSegment => None,
        }
    }

    fn describe(&self) -> String {
        format!("joining {} as rank {} of {}", self.context.name, self.context.rank, self.context.nranks)
    }
}

impl Drop for Join {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let me = self.context.rank as usize;
        match (&mut self.state, &self.comm) {
            (State::AtMaker(registration), _) => {
                let message = format!("{} gave up joining", self.context.labels().rank(me, Some(std::process::id())));
                registration.give_up(&Error::new(ncclRemoteError, message).by(Blame::of([me])));
            }
            // All ranks may have arrived meanwhile. The other ranks then take the communicator for
            // made, and this rank is not in it.
            (_, Some(comm)) => {
                let message = format!("{} gave up joining", comm.describe(comm.rank));
                comm.fail(ncclRemoteError, Blame::of([comm.rank]), &message);
            }
            (_, None) => {}
        }
        // This rank gives up, perhaps before it has arrived. No rank may wait for it from now on,
        // so the id is closed.
        if let (Source::Id(id), false) = (&self.source, self.gave_up) {
            id.close();
        }
    }
}

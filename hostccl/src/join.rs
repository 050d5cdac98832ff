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
use crate::wire::Token;

/// Where a rank finds the segment of the new communicator.
pub(crate) enum Source {
    /// A unique id names the segment.
    Id(Id),
    /// The new communicator is split or shrunk from another one.
    Child {
        /// The process of the lowest rank on this host, which holds the segment open.
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
        let message = format!("{who} ended before all ranks had joined");
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
    /// The rank cannot join, and tries to tell the maker of the unique id.
    Refusing(Box<Refusal>),
}

/// The report of a rank that cannot join to the maker of the unique id.
#[derive(Debug)]
struct Refusal {
    /// The connection to the maker.
    client: Client,
    /// The reason, as the other ranks read it.
    told: Error,
    /// The reason, as this rank's caller reads it.
    error: Error,
    /// When this rank gives up the attempt to tell the maker.
    until: Instant,
}

impl Refusal {
    /// Tells the maker where it does not know yet that this rank cannot join. Waits as
    /// [`LEAVING_TIME`] says.
    fn leave(&mut self) {
        if !self.client.has_sent_first() {
            self.client.refuse(&self.told, LEAVING_TIME);
        }
    }
}

/// How long a rank that cannot join tries to report this to the maker of the unique id.
const REFUSAL_TIME: Duration = Duration::from_secs(5);
/// How long a rank that leaves before it is connected tries to tell the maker of the unique id. The
/// caller of `ncclCommAbort` or `ncclGroupEnd` waits meanwhile. If the maker does not learn of the
/// end, the other ranks wait for their whole timeout. So [`Client::refuse`] tries for ten times as
/// long where the maker's host has taken the connection, and only the maker's answer is missing:
/// the maker may wait for a processor.
const LEAVING_TIME: Duration = Duration::from_millis(500);

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
    /// Why this rank's join failed, where it failed after it had begun. The others have been told.
    failure: Option<Error>,
    /// Whether this rank has left the join, so that the drop has nothing more to do.
    has_left: bool,
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
            limit: Limit { time: DEFAULT_TIMEOUT, is_total: false, began: Instant::now() },
            comm: None,
            is_done: false,
            gave_up: false,
            failure: None,
            has_left: false,
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
        self.limit = Limit { time, is_total: timeout.is_some(), ..self.limit };
    }

    /// Gives up before this rank has arrived, because `error` keeps it from joining. The other
    /// ranks read the reason.
    pub(crate) fn refuse(&mut self, error: &Error) {
        if let (Source::Id(_), None, false) = (&self.source, &self.comm, self.gave_up) {
            let me = self.context.rank as usize;
            self.tell(&self.context.labels().refused(me, error.clone()));
        }
    }

    /// Tells the other ranks that this rank, which has not begun its join, gives it up because of
    /// `error`.
    fn tell(&mut self, error: &Error) {
        self.gave_up = true;
        let Source::Id(id) = &self.source else { return };
        if let Some(maker) = id.give_up(self.context.rank, error) {
            let refusal = Message::Failed(error.clone());
            Client::new(maker, id.token, refusal).refuse(error, LEAVING_TIME);
        }
    }

    /// Ends the join for all ranks, also for those that come later, because of `error`.
    pub(crate) fn fail(&mut self, error: &Error) {
        let was_told = self.failure.is_some();
        let error = &self.failure.get_or_insert_with(|| error.clone()).clone();
        match (&mut self.state, &self.comm) {
            (State::AtMaker(_) | State::Refusing(_), _) if was_told => {}
            (State::AtMaker(registration), _) => registration.leave(error, LEAVING_TIME),
            (State::Refusing(refusal), _) => refusal.leave(),
            (_, Some(comm)) => {
                comm.fail_whole(error.code(), error.blame().clone(), error.message(), "");
            }
            (_, None) if !self.gave_up => {
                self.tell(error);
            }
            (_, None) => {}
        }
        if let (Source::Id(id), false) = (&self.source, self.gave_up) {
            // Where the ranks meet at the maker, the maker has been told above.
            let _ = id.give_up(self.context.rank, error);
            self.gave_up = true;
        }
    }

    /// Ends the join of a rank that has not joined, and tells the others. The drop does so, too,
    /// unless it was done before.
    pub(crate) fn leave(&mut self) {
        if self.is_done || std::mem::replace(&mut self.has_left, true) {
            return;
        }
        let me = self.context.rank as usize;
        let message = format!("{} gave up joining", self.context.labels().rank(me, Some(std::process::id())));
        let error = Error::new(ncclRemoteError, message).by(Blame::of([me]));
        match (&mut self.state, &self.comm) {
            // The reason came from the maker, or `registration.poll` has sent it if it was
            // connected.
            (State::AtMaker(_) | State::Refusing(_), _) if self.failure.is_some() => {}
            (State::AtMaker(registration), _) => registration.leave(&error, LEAVING_TIME),
            (State::Refusing(refusal), _) => {
                refusal.leave();
                self.failure = Some(refusal.told.clone());
            }
            // If all ranks have arrived meanwhile, the other ranks already use the communicator. So
            // this rank ends it for them.
            (_, Some(comm)) => {
                let message = format!("{} gave up joining", comm.describe(comm.rank));
                comm.fail(ncclRemoteError, Blame::of([comm.rank]), &message);
            }
            // A rank that was not aborted may try again, for example after its group failed because
            // of another call. The others must be told in two cases: this rank was aborted, or this
            // process made the id, which nobody can use any more.
            (State::NotStarted, None) if !self.gave_up => {
                let Source::Id(id) = &self.source else { return };
                if id.creator.pid == std::process::id() || self.context.aborted.load(Ordering::Acquire) {
                    self.tell(&error);
                }
            }
            (_, None) => {}
        }
        // This rank gives up, perhaps before it has arrived. No rank may wait for it from now on,
        // so the id is closed.
        if let (Source::Id(id), false) = (&self.source, self.gave_up) {
            id.close(Some(self.failure.as_ref().unwrap_or(&error)));
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
        self.limit.began = Instant::now();
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
            let registration = Registration::new(address, id.token, &self.context, lobby.clone());
            self.state = match registration {
                Ok(registration) => State::AtMaker(Box::new(registration)),
                Err(error) => self.refusing(address, id.token, error),
            };
        }
    }

    /// Returns the state of a rank that cannot join because of `error`, and has to tell the maker.
    fn refusing(&self, address: SocketAddr, token: Token, error: Error) -> State {
        let (me, labels) = (self.context.rank as usize, self.context.labels());
        let error = labels.refused(me, error);
        let told = Error::new(error.code(), format!("{}: {}", labels.rank(me, None), error.message()));
        let told = if error.lost().is_some() { error.clone() } else { told.by(Blame::of([me])) };
        let client = Client::new(address, token, Message::Failed(told.clone()));
        State::Refusing(Box::new(Refusal { client, told, error, until: Instant::now() + REFUSAL_TIME }))
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
                id.close(None);
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
        // The general wait restarts its time at each arrival. So a limit of the whole join is
        // checked here.
        if self.limit.is_total && self.limit.is_over(Instant::now()) {
            let missing = comm.missing(Blocker::Arrivals);
            if missing.is_empty() && header.arrived.value() != seen {
                // The last ranks have arrived just now, so this join is polled again.
                return Ok(blocked);
            }
            let message = comm.did_not_come(&missing, self.limit.time.as_millis());
            let error = comm.fail_whole(ncclTimeout, Blame::of(missing), &message, &self.describe());
            return Err(comm.add_missing(error, Blocker::Arrivals));
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
            if let Err(error) = self.start() {
                self.tell(&error);
                return Err(error);
            }
        }
        if matches!(self.state, State::InSegment) {
            let polled = self.poll_segment()?;
            if matches!(self.state, State::InSegment) {
                return Ok(polled);
            }
        }
        if let State::Refusing(refusal) = &mut self.state {
            let told = refusal.client.poll().is_err() || refusal.client.has_sent_first();
            if !told && Instant::now() < refusal.until {
                return Ok(Poll::Outside);
            }
            self.failure = Some(refusal.told.clone());
            return Err(refusal.error.clone());
        }
        let State::AtMaker(registration) = &mut self.state else { return Ok(Poll::Done) };
        if self.context.aborted.load(Ordering::Acquire) {
            return Err(Error::aborted());
        }
        match registration.poll(&self.context, self.limit).inspect_err(|error| self.failure = Some(error.clone()))? {
            None => Ok(Poll::Outside),
            Some(comm) => {
                self.comm = Some(comm);
                self.is_done = true;
                if let Source::Id(id) = &self.source {
                    id.close(None);
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
            State::Refusing(refusal) => refusal.client.waits_for(),
            State::NotStarted | State::InSegment => None,
        }
    }

    fn describe(&self) -> String {
        format!("joining {} as rank {} of {}", self.context.name, self.context.rank, self.context.nranks)
    }
}

impl Drop for Join {
    fn drop(&mut self) {
        self.leave();
    }
}

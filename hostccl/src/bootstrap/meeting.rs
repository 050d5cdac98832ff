//! The state of one join at the maker of the unique id. It does no input or output: the server's
//! thread hands it the messages that have come, and sends the messages that it returns.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link;
use super::message::{Member, Message, Stage};
use crate::blame::Blame;
use crate::error::Error;
use crate::labels;
use crate::process::ProcessId;
use crate::segment::{Lobby, MAX_RANKS};
use crate::types::*;

/// How long the join waits for a third rank after two ranks have passed different values of
/// `nranks`. The third rank shows which of the two is wrong.
const THIRD_RANK: Duration = Duration::from_millis(250);
/// When a rank has ended, the join waits until no further rank has ended for this time. Then it
/// fails, and names all ranks that have ended.
const QUIET: Duration = Duration::from_millis(50);
/// How often the ranks learn which ranks have done their part in the stage.
const PACE: Duration = Duration::from_millis(100);

/// The number of a connection of the maker.
pub(super) type ConnectionId = u64;

/// A rank that has registered.
#[derive(Debug)]
struct Registered {
    /// The rank's connection.
    connection: ConnectionId,
    /// The address from which the rank has connected.
    from: IpAddr,
    /// The facts that the rank has told the maker about itself.
    member: Member,
    /// The rank whose segment this rank has opened, once this rank has said so.
    opened: Option<u32>,
    /// Whether the rank has mapped the segment of its host.
    mapped: bool,
}

impl Registered {
    /// Whether the rank has done its part in the stage.
    fn has_done(&self, stage: Stage) -> bool {
        match stage {
            Stage::Registering => true,
            Stage::Opening => self.opened.is_some(),
            Stage::Mapping | Stage::Over => self.mapped,
        }
    }
}

/// A message to send.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// The connections to which the message goes.
    pub(super) to: Vec<ConnectionId>,
    /// The message in its frame.
    pub(super) frame: Arc<[u8]>,
    /// Whether the server closes the connections once the message is sent.
    pub(super) last: bool,
}

/// The state of one join.
#[derive(Debug)]
pub(super) struct Meeting {
    /// The header of the id's segment, in which ranks of the maker's host may wait.
    lobby: Lobby,
    /// The number of the new communicator, which its tags on the wire carry.
    comm: u64,
    /// The stage in which the join is.
    stage: Stage,
    /// The ranks that have registered, by their numbers. The list is empty until the first rank has
    /// registered. The first rank decides the length of the list.
    ranks: Vec<Option<Registered>>,
    /// How many ranks have done their part in the stage.
    done: usize,
    /// The value of `done` that the maker last sent to the ranks.
    told: usize,
    /// When the maker last looked whether to send `done` to the ranks.
    told_at: Instant,
    /// The ranks that passed another `nranks` than the first rank. Each stands with its connection
    /// and the time at which it tried to register.
    differ: Vec<(Member, ConnectionId, Instant)>,
    /// The ranks whose connections have ended, and when each ended.
    gone: Vec<(usize, Instant)>,
    /// The failure that ended the join.
    failure: Option<Error>,
    /// The messages that are to be sent.
    outgoing: Vec<Outgoing>,
}

impl Meeting {
    pub(super) fn new(lobby: Lobby, comm: u64) -> Meeting {
        Meeting {
            lobby,
            comm,
            stage: Stage::Registering,
            ranks: Vec::new(),
            done: 0,
            told: 0,
            told_at: Instant::now(),
            differ: Vec::new(),
            gone: Vec::new(),
            failure: None,
            outgoing: Vec::new(),
        }
    }

    /// Whether all ranks have joined.
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Whether no rank can register any more, because the id has started a communicator in its
    /// segment.
    pub(super) fn is_spent(&self) -> bool {
        self.ranks.is_empty() && self.lobby.started().is_some()
    }

    /// Whether ranks have registered and wait.
    pub(super) fn is_busy(&self) -> bool {
        !self.ranks.is_empty() && !self.is_over() && self.failure.is_none()
    }

    /// Whether further ranks may register. The ranks that have registered wait for them at this
    /// server, or in the segment of the id where they are on the maker's host.
    pub(super) fn is_open(&self) -> bool {
        self.stage == Stage::Registering && self.failure.is_none() && self.lobby.started().is_none()
    }

    /// Returns the messages to send, and forgets them.
    pub(super) fn outgoing(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outgoing)
    }

    /// Handles a message from a connection. `rank` is the rank that has registered on it, if any.
    /// Returns the rank of the connection from now on. Fails for a message at the wrong time.
    pub(super) fn take(
        &mut self,
        connection: ConnectionId,
        rank: Option<usize>,
        from: IpAddr,
        message: Message,
    ) -> Result<Option<usize>, String> {
        match (message, rank) {
            (Message::Register(member), None) => Ok(self.register(connection, from, member)),
            (Message::Failed(error), _) => {
                let most = if self.ranks.is_empty() { MAX_RANKS as usize } else { self.ranks.len() };
                self.fail(error.of_ranks_below(most));
                Ok(rank)
            }
            (Message::Opened(opened), Some(rank))
                if self.stage == Stage::Opening && (opened as usize) < self.ranks.len() =>
            {
                if let Some(entry) = self.ranks[rank].as_mut().filter(|entry| entry.opened.is_none()) {
                    entry.opened = Some(opened);
                    self.advance();
                }
                Ok(Some(rank))
            }
            (Message::Mapped, Some(rank)) if self.stage == Stage::Mapping => {
                if let Some(entry) = self.ranks[rank].as_mut().filter(|entry| !entry.mapped) {
                    entry.mapped = true;
                    self.advance();
                }
                Ok(Some(rank))
            }
            _ if self.failure.is_some() => Ok(rank),
            _ => Err("a message came at the wrong time".to_owned()),
        }
    }

    /// Notes that the connection of a rank has ended.
    pub(super) fn lose(&mut self, rank: usize) {
        if self.stage != Stage::Over && self.failure.is_none() {
            self.gone.push((rank, Instant::now()));
        }
    }

    /// Ends the join for all ranks. The first failure counts.
    pub(super) fn fail(&mut self, error: Error) {
        if self.failure.is_some() || self.stage == Stage::Over {
            return;
        }
        // A communicator that the ranks have started in the segment must not learn of this failure.
        if self.lobby.started().is_none() {
            self.lobby.fail(&error);
        }
        let frame = link::frame(&Message::Failed(error.clone()));
        let differing: Vec<ConnectionId> = self.differ.iter().map(|(_, connection, _)| *connection).collect();
        let to = self.connections().into_iter().chain(differing).collect();
        self.outgoing.push(Outgoing { to, frame, last: true });
        self.failure = Some(error);
    }

    /// Ends the join because its id is closed. `why` is the reason, where it is known. If the id's
    /// segment holds a failure, that failure is the reason.
    pub(super) fn close(&mut self, why: Option<Error>) {
        if self.is_busy() {
            let closed = || Error::usage("the unique id was closed before all ranks had joined");
            self.fail(self.lobby.failure().or(why).unwrap_or_else(closed));
        }
    }

    /// Does the work that is due. Returns when the next work is due, or `None` where only a message
    /// causes more work.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Instant> {
        if self.failure.is_some() || self.stage == Stage::Over {
            return None;
        }
        if let Some(error) = self.lobby.failure().filter(|_| !self.ranks.is_empty()) {
            self.fail(error);
            return None;
        }
        if let Some(due) = self.gone.last().map(|(_, last)| *last + QUIET) {
            if now < due {
                return Some(due);
            }
            self.fail_gone();
            return None;
        }
        if let Some((_, _, since)) = self.differ.first() {
            let due = *since + THIRD_RANK;
            if now < due && self.count() == self.differ.len() {
                return Some(due);
            }
            self.fail_differing();
            return None;
        }
        if self.ranks.is_empty() {
            return None;
        }
        // The join looks for a failure in the lobby as often as it sends `StageDone`, because no
        // descriptor becomes readable when the lobby fails.
        let due = self.told_at + PACE;
        if now < due {
            return Some(due);
        }
        self.told_at = now;
        if self.told != self.done {
            self.told = self.done;
            let came = (0..self.ranks.len() as u32)
                .filter(|rank| self.ranks[*rank as usize].as_ref().is_some_and(|entry| entry.has_done(self.stage)));
            let frame = link::frame(&Message::StageDone(self.stage, came.collect()));
            self.outgoing.push(Outgoing { to: self.connections(), frame, last: false });
        }
        Some(now + PACE)
    }

    /// Registers a rank. Returns the rank, or `None` where the rank cannot join: it is refused, or
    /// it passed another `nranks` than the first rank.
    fn register(&mut self, connection: ConnectionId, from: IpAddr, member: Member) -> Option<usize> {
        let refuse = |meeting: &mut Meeting, error: Error| {
            let frame = link::frame(&Message::Failed(error));
            meeting.outgoing.push(Outgoing { to: vec![connection], frame, last: true });
            None
        };
        if let Some(error) = self.failure.clone().or_else(|| self.lobby.failure()) {
            return refuse(self, error);
        }
        let started = self.lobby.started().or((self.stage > Stage::Registering).then_some(self.ranks.len() as u32));
        if let Some(nranks) = started {
            return refuse(
                self,
                Error::usage(format!(
                    "the unique id has started a communicator of {nranks} ranks already; make one id for each communicator"
                )),
            );
        }
        if self.ranks.is_empty() {
            self.ranks.resize_with(member.nranks as usize, || None);
            self.lobby.move_ranks();
        }
        if member.nranks as usize != self.ranks.len() {
            self.differ.push((member, connection, Instant::now()));
            return None;
        }
        let rank = member.rank as usize;
        if let Some(entry) = &self.ranks[rank] {
            let message = format!(
                "rank {rank} was taken twice: by pid {} and by pid {}",
                entry.member.process.pid, member.process.pid
            );
            let error = Error::usage(message).by(Blame::of([rank]));
            self.fail(error.clone());
            return refuse(self, error);
        }
        self.ranks[rank] = Some(Registered { connection, from, member, opened: None, mapped: false });
        self.advance();
        Some(rank)
    }

    /// Counts one more rank that has done its part in the stage. The last one begins the next
    /// stage.
    fn advance(&mut self) {
        self.done += 1;
        if self.done < self.ranks.len() || self.failure.is_some() {
            return;
        }
        (self.done, self.told) = (0, 0);
        let registered = || self.ranks.iter().flatten();
        let (stage, message) = match self.stage {
            Stage::Registering => {
                let members = registered().map(|entry| entry.member.clone()).collect();
                (Stage::Opening, Message::Table { comm: self.comm, members })
            }
            Stage::Opening => {
                (Stage::Mapping, Message::Groups(registered().filter_map(|entry| entry.opened).collect()))
            }
            Stage::Mapping | Stage::Over => (Stage::Over, Message::Go),
        };
        self.stage = stage;
        if stage == Stage::Over {
            self.lobby.close();
        }
        let last = stage == Stage::Over;
        // This process may end as soon as its own rank has joined. So the messages to all other
        // ranks are sent before the one to its own rank.
        let is_here = |entry: &&Registered| entry.member.process == ProcessId::current();
        let (here, elsewhere): (Vec<&Registered>, Vec<&Registered>) = self.ranks.iter().flatten().partition(is_here);
        let to = elsewhere.into_iter().chain(here).map(|entry| entry.connection).collect();
        self.outgoing.push(Outgoing { to, frame: link::frame(&message), last });
    }

    /// Ends the join with an error, because ranks have ended.
    fn fail_gone(&mut self) {
        let gone: Vec<usize> = self.gone.iter().map(|(rank, _)| *rank).collect();
        let describe = |rank: &usize| match &self.ranks[*rank] {
            Some(entry) => format!("rank {rank} (pid {} at {})", entry.member.process.pid, entry.from),
            None => format!("rank {rank}"),
        };
        let message = match gone.as_slice() {
            [rank] => format!("{} ended or lost its connection before all ranks had joined", describe(rank)),
            _ => format!(
                "{} ended or lost their connections before all ranks had joined; the first was {}",
                labels::list(gone.iter().map(|rank| *rank as i32)),
                describe(&gone[0])
            ),
        };
        self.fail(Error::new(ncclRemoteError, message).by(Blame::of_lost(gone)));
    }

    /// Ends the join because ranks passed different values of `nranks`. The failure blames the
    /// smaller group of ranks, or the ranks of both groups where these have the same size.
    fn fail_differing(&mut self) {
        let (agreed, came) = (self.ranks.len(), self.registered());
        let differing: Vec<usize> = self.differ.iter().map(|(member, ..)| member.rank as usize).collect();
        let to_blame = match came.len().cmp(&differing.len()) {
            std::cmp::Ordering::Less => came.clone(),
            std::cmp::Ordering::Equal => [&came[..], &differing].concat(),
            std::cmp::Ordering::Greater => differing,
        };
        let first = &self.differ[0].0;
        let message = format!(
            "rank {} (pid {}) passed nranks {}, but {} passed {agreed}",
            first.rank,
            first.process.pid,
            first.nranks,
            labels::list(came.iter().map(|rank| *rank as i32))
        );
        self.fail(Error::usage(message).by(Blame::of(to_blame)));
    }

    /// The ranks that have registered.
    fn registered(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| self.ranks[*rank].is_some()).collect()
    }

    /// How many ranks have registered.
    fn count(&self) -> usize {
        self.ranks.iter().flatten().count()
    }

    /// The connections of the ranks that have registered.
    fn connections(&self) -> Vec<ConnectionId> {
        self.ranks.iter().flatten().map(|entry| entry.connection).collect()
    }
}

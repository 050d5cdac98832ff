//! The state of one join at the maker of the unique id. It does no input or output: it takes the
//! messages that have come, and returns those to send.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link;
use super::message::{Member, Message, Stage};
use crate::blame::Blame;
use crate::error::Error;
use crate::labels;
use crate::process::ProcessId;
use crate::segment::Lobby;
use crate::types::*;

/// How long a rank that came with another number of ranks than the first waits for a third rank.
const THIRD_RANK: Duration = Duration::from_millis(250);
/// When ranks have ended, the join waits until no further rank has ended for so long. Then it
/// fails, and names all of them together.
const QUIET: Duration = Duration::from_millis(50);
/// How often the ranks learn who has come.
const PACE: Duration = Duration::from_millis(100);

/// The number of a connection of the maker.
pub(super) type Connection = u64;

/// A rank that has registered.
#[derive(Debug)]
struct Seat {
    /// The rank's connection.
    connection: Connection,
    /// The address from which the rank has connected.
    from: IpAddr,
    /// The facts that the rank has told about itself.
    member: Member,
    /// The rank whose segment this rank has opened, once it has said so.
    took: Option<u32>,
    /// Whether the rank has mapped the segment of its host.
    mapped: bool,
}

impl Seat {
    /// Whether the rank has done its part in the stage.
    fn has_done(&self, stage: Stage) -> bool {
        match stage {
            Stage::Registering => true,
            Stage::Taking => self.took.is_some(),
            Stage::Mapping | Stage::Over => self.mapped,
        }
    }
}

/// Something to send.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// The connections to which it goes.
    pub(super) to: Vec<Connection>,
    /// The message in its frame.
    pub(super) frame: Arc<[u8]>,
    /// Whether the connections are closed once the message has gone.
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
    /// The ranks. The list is empty until the first rank has registered. That rank decides how many
    /// ranks there are.
    seats: Vec<Option<Seat>>,
    /// How many ranks have done their part in the stage.
    done: usize,
    /// The value of `done` when the maker told the ranks last.
    told: usize,
    /// When the ranks were told last.
    told_at: Instant,
    /// The ranks that came with another number of ranks, and when the first of them came.
    differ: Vec<(Member, Connection, Instant)>,
    /// The ranks whose connections have ended, and when the last one ended.
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
            seats: Vec::new(),
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
        self.seats.is_empty() && self.lobby.started().is_some()
    }

    /// Whether ranks have registered and wait.
    pub(super) fn is_busy(&self) -> bool {
        !self.seats.is_empty() && !self.is_over() && self.failure.is_none()
    }

    /// Takes what is to be sent.
    pub(super) fn outgoing(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outgoing)
    }

    /// Takes a message from a connection on which `rank` has registered; `None` for one on which
    /// nobody has. Returns the rank of the connection from now on. Fails for a message that is out
    /// of place.
    pub(super) fn take(
        &mut self,
        connection: Connection,
        rank: Option<usize>,
        from: IpAddr,
        message: Message,
    ) -> Result<Option<usize>, String> {
        match (message, rank) {
            (Message::Register(member), None) => Ok(self.register(connection, from, member)),
            (Message::Failed(error), _) => {
                self.fail(error);
                Ok(rank)
            }
            (Message::Took(took), Some(rank)) if self.stage == Stage::Taking && (took as usize) < self.seats.len() => {
                if let Some(seat) = self.seats[rank].as_mut().filter(|seat| seat.took.is_none()) {
                    seat.took = Some(took);
                    self.advance();
                }
                Ok(Some(rank))
            }
            (Message::Mapped, Some(rank)) if self.stage == Stage::Mapping => {
                if let Some(seat) = self.seats[rank].as_mut().filter(|seat| !seat.mapped) {
                    seat.mapped = true;
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
        // The ranks may have started a communicator in the segment, which goes on.
        if self.lobby.started().is_none() {
            self.lobby.fail(&error);
        }
        let frame = link::frame(&Message::Failed(error.clone()));
        let differing: Vec<Connection> = self.differ.iter().map(|(_, connection, _)| *connection).collect();
        let to = self.connections().into_iter().chain(differing).collect();
        self.outgoing.push(Outgoing { to, frame, last: true });
        self.failure = Some(error);
    }

    /// Does what is due, and returns when something is due again.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Instant> {
        if self.failure.is_some() || self.stage == Stage::Over {
            return None;
        }
        if let Some(error) = self.lobby.failure().filter(|_| !self.seats.is_empty()) {
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
        if self.seats.is_empty() {
            return None;
        }
        // The join looks at the lobby as often as it tells the ranks.
        let due = self.told_at + PACE;
        if now < due {
            return Some(due);
        }
        self.told_at = now;
        if self.told != self.done {
            self.told = self.done;
            let came = (0..self.seats.len() as u32)
                .filter(|rank| self.seats[*rank as usize].as_ref().is_some_and(|seat| seat.has_done(self.stage)));
            let frame = link::frame(&Message::Came(self.stage, came.collect()));
            self.outgoing.push(Outgoing { to: self.connections(), frame, last: false });
        }
        Some(now + PACE)
    }

    /// Registers a rank. Returns the rank, or `None` where the rank gets an answer of its own.
    fn register(&mut self, connection: Connection, from: IpAddr, member: Member) -> Option<usize> {
        let refuse = |meeting: &mut Meeting, error: Error| {
            let frame = link::frame(&Message::Failed(error));
            meeting.outgoing.push(Outgoing { to: vec![connection], frame, last: true });
            None
        };
        if let Some(error) = self.failure.clone().or_else(|| self.lobby.failure()) {
            return refuse(self, error);
        }
        let started = self.lobby.started().or((self.stage > Stage::Registering).then_some(self.seats.len() as u32));
        if let Some(nranks) = started {
            return refuse(
                self,
                Error::usage(format!(
                    "the unique id has started a communicator of {nranks} ranks already; make one id for each communicator"
                )),
            );
        }
        if self.seats.is_empty() {
            self.seats.resize_with(member.nranks as usize, || None);
            self.lobby.move_ranks();
        }
        if member.nranks as usize != self.seats.len() {
            self.differ.push((member, connection, Instant::now()));
            return None;
        }
        let rank = member.rank as usize;
        if let Some(seat) = &self.seats[rank] {
            let message = format!(
                "rank {rank} was taken twice: by pid {} and by pid {}",
                seat.member.process.pid, member.process.pid
            );
            let error = Error::usage(message).by(Blame::of([rank]));
            self.fail(error.clone());
            return refuse(self, error);
        }
        self.seats[rank] = Some(Seat { connection, from, member, took: None, mapped: false });
        self.advance();
        Some(rank)
    }

    /// Counts one more rank that has done its part in the stage. The last one begins the next
    /// stage.
    fn advance(&mut self) {
        self.done += 1;
        if self.done < self.seats.len() || self.failure.is_some() {
            return;
        }
        (self.done, self.told) = (0, 0);
        let seats = || self.seats.iter().flatten();
        let (stage, message) = match self.stage {
            Stage::Registering => {
                let members = seats().map(|seat| seat.member.clone()).collect();
                (Stage::Taking, Message::Table { comm: self.comm, members })
            }
            Stage::Taking => (Stage::Mapping, Message::Groups(seats().filter_map(|seat| seat.took).collect())),
            Stage::Mapping | Stage::Over => (Stage::Over, Message::Go),
        };
        self.stage = stage;
        if stage == Stage::Over {
            self.lobby.close();
        }
        let last = stage == Stage::Over;
        // This process may end as soon as its own rank has joined, so that rank learns of it last.
        let is_here = |seat: &&Seat| seat.member.process == ProcessId::current();
        let (here, elsewhere): (Vec<&Seat>, Vec<&Seat>) = self.seats.iter().flatten().partition(is_here);
        let to = elsewhere.into_iter().chain(here).map(|seat| seat.connection).collect();
        self.outgoing.push(Outgoing { to, frame: link::frame(&message), last });
    }

    fn fail_gone(&mut self) {
        let gone: Vec<usize> = self.gone.iter().map(|(rank, _)| *rank).collect();
        let describe = |rank: &usize| match &self.seats[*rank] {
            Some(seat) => format!("rank {rank} (pid {} at {})", seat.member.process.pid, seat.from),
            None => format!("rank {rank}"),
        };
        let message = match gone.as_slice() {
            [rank] => format!("{} has gone before all ranks had joined", describe(rank)),
            _ => format!(
                "{} have gone before all ranks had joined, first {}",
                labels::list(gone.iter().map(|rank| *rank as i32)),
                describe(&gone[0])
            ),
        };
        self.fail(Error::new(ncclRemoteError, message).by(Blame::of_lost(gone)));
    }

    /// Ends the join because ranks came with different numbers of ranks. The smaller part of the
    /// ranks is to blame. Both parts are to blame where they have one size.
    fn fail_differing(&mut self) {
        let (agreed, came) = (self.seats.len(), self.ranks());
        let differing: Vec<usize> = self.differ.iter().map(|(member, ..)| member.rank as usize).collect();
        let to_blame = match came.len().cmp(&differing.len()) {
            std::cmp::Ordering::Less => came.clone(),
            std::cmp::Ordering::Equal => [&came[..], &differing].concat(),
            std::cmp::Ordering::Greater => differing,
        };
        let first = &self.differ[0].0;
        let message = format!(
            "rank {} (pid {}) came with nranks {}, {} with {agreed}",
            first.rank,
            first.process.pid,
            first.nranks,
            labels::list(came.iter().map(|rank| *rank as i32))
        );
        self.fail(Error::usage(message).by(Blame::of(to_blame)));
    }

    /// The ranks that have registered.
    fn ranks(&self) -> Vec<usize> {
        (0..self.seats.len()).filter(|rank| self.seats[*rank].is_some()).collect()
    }

    fn count(&self) -> usize {
        self.seats.iter().flatten().count()
    }

    fn connections(&self) -> Vec<Connection> {
        self.seats.iter().flatten().map(|seat| seat.connection).collect()
    }
}

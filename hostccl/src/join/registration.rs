//! The join of one rank through the maker of the unique id, where ranks may be on several hosts.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::seat::{Context, take_seat};
use crate::blame::Blame;
use crate::bootstrap::client::Client;
use crate::bootstrap::{Member, Message, Stage, wire_token};
use crate::comm::Comm;
use crate::crowd::Crowd;
use crate::desk;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::host::Host;
use crate::poll::Blocker;
use crate::process::ProcessId;
use crate::segment;
use crate::span::Span;
use crate::token::random_token;
use crate::types::*;
use crate::wire::{Token, Wire, here};

/// After more than this many failed attempts to open segments of other ranks, a rank opens its own
/// segment.
const MOST_TRIES: usize = 64;

/// How long a rank waits for the maker and for the other ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    /// The time.
    pub(super) time: Duration,
    /// Whether `time` limits the whole join. Otherwise it limits each wait: it starts anew whenever
    /// other ranks make progress.
    pub(super) is_total: bool,
    /// When the rank began its join.
    pub(super) began: Instant,
}

impl Limit {
    /// Whether the time of the join is up. `since` is when other ranks last made progress.
    pub(super) fn is_over(&self, since: Instant) -> bool {
        let since = if self.is_total { self.began } else { since };
        since.elapsed() >= self.time
    }
}

/// The join of one rank through the maker.
#[derive(Debug)]
pub(super) struct Registration {
    /// The connection to the maker.
    client: Client,
    /// The token of the id.
    token: Token,
    /// The wire of this process. The join holds it until the communicator holds it.
    wire: Arc<dyn Wire>,
    /// The host of this process.
    host: Host,
    /// The segment that this rank offers. It stays open until all ranks have mapped theirs.
    _offer: Private<OwnedFd>,
    /// The stage in which this rank is.
    stage: Stage,
    /// The ranks that have done their part in the stage, as the maker last reported them.
    done: Vec<u32>,
    /// When this rank last learned that another rank made progress.
    since: Instant,
    /// The number of the communicator, and its ranks, once all ranks have registered.
    table: Option<(u64, Vec<Member>)>,
    /// The rank whose segment this rank has opened, and that segment.
    opened: Option<(usize, Private<OwnedFd>)>,
    /// The communicator, once this rank has mapped the segment of its host.
    comm: Option<Arc<Comm>>,
    /// The communicator in the segment of the id, where this rank waited first.
    lobby: Option<Arc<Comm>>,
}

impl Registration {
    /// Returns the join of a rank that has not connected yet.
    pub(super) fn new(
        address: std::net::SocketAddr,
        token: Token,
        context: &Context,
        lobby: Option<Arc<Comm>>,
    ) -> Result<Registration> {
        here::on_tick(desk::tick);
        let (wire, host, offered) = (here::here()?, Host::current()?, random_token()?);
        let offer = Private::of(segment::create(offered)?);
        let member = Member {
            rank: context.rank,
            nranks: context.nranks,
            process: ProcessId::current(),
            machine: host.machine,
            host: host.number,
            namespace: host.namespace,
            shares: host.shares,
            fd: offer.as_raw_fd(),
            token: offered,
            contact: wire.contact(),
        };
        Ok(Registration {
            client: Client::new(address, token, Message::Register(member)),
            token,
            wire,
            host,
            _offer: offer,
            stage: Stage::Registering,
            done: Vec::new(),
            since: Instant::now(),
            table: None,
            opened: None,
            comm: None,
            lobby,
        })
    }

    /// Whether the maker has this rank's registration and has answered.
    #[cfg(test)]
    pub(super) fn is_registered(&self) -> bool {
        self.done.contains(&1)
    }

    /// The descriptor for which this rank waits, and whether it waits to write there.
    pub(super) fn connection(&self) -> Option<(RawFd, bool)> {
        self.client.waits_for()
    }

    /// Whether this rank has told the maker that it has its seat. The maker decides then whether
    /// all ranks have joined.
    pub(super) fn has_mapped(&self) -> bool {
        self.stage == Stage::Mapping
    }

    /// Does all that can be done without waiting. Returns the communicator once all ranks have
    /// joined. An error ends the join for all ranks.
    pub(super) fn poll(&mut self, context: &Context, limit: Limit) -> Result<Option<Arc<Comm>>> {
        loop {
            let outcome = match self.client.poll() {
                // Such an error comes from the maker, or from the connection to it. So this rank
                // need not tell the maker.
                Err(error) | Ok(Some(Message::Failed(error))) => {
                    let error = error.of_ranks_below(context.nranks as usize);
                    self.end(&error);
                    return Err(error);
                }
                Ok(Some(Message::Go)) if self.stage == Stage::Mapping => return Ok(self.comm.take()),
                Ok(Some(message)) => self.take(context, message),
                Ok(None) => self.check(context, limit).map(|()| false),
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) => {
                    self.give_up(&error);
                    return Err(error);
                }
            }
        }
    }

    /// Ends the join for all ranks.
    pub(super) fn give_up(&mut self, error: &Error) {
        self.client.send(&Message::Failed(error.clone()));
        self.end(error);
    }

    /// Ends the join for all ranks, because this rank leaves it. Where this rank has not registered
    /// yet, this function waits for the connection to the maker, as [`Client::refuse`] does.
    pub(super) fn leave(&mut self, error: &Error, longest: Duration) {
        self.client.refuse(error, longest);
        self.end(error);
    }

    /// Fails the communicators that this rank has made or waited in so far.
    fn end(&mut self, error: &Error) {
        for comm in self.comm.iter().chain(&self.lobby) {
            comm.fail_whole(error.code(), error.blame().clone(), error.message(), "");
        }
    }

    /// Handles a message of the maker. Returns whether another message may be handled at once.
    fn take(&mut self, context: &Context, message: Message) -> Result<bool> {
        match message {
            Message::StageDone(stage, ranks) => {
                if stage == self.stage {
                    (self.done, self.since) = (ranks, Instant::now());
                }
            }
            Message::Table { comm, members } if self.stage == Stage::Registering => {
                if members.len() != context.nranks as usize {
                    return Err(garbled());
                }
                let opened =
                    self.open(&members).map_err(|error| context.labels().refused(self.rank(context), error))?;
                self.client.send(&Message::Opened(opened.0 as u32));
                (self.table, self.opened) = (Some((comm, members)), Some(opened));
                self.next(Stage::Opening);
            }
            Message::Groups(opened) if self.stage == Stage::Opening => {
                self.comm = Some(self.map(context, &opened)?);
                self.client.send(&Message::Mapped);
                self.next(Stage::Mapping);
            }
            _ => return Err(garbled()),
        }
        Ok(true)
    }

    fn rank(&self, context: &Context) -> usize {
        context.rank as usize
    }

    fn next(&mut self, stage: Stage) {
        (self.stage, self.since) = (stage, Instant::now());
        self.done.clear();
    }

    /// Opens the segment of the lowest rank whose segment this process can open. Returns the rank
    /// and the segment.
    fn open(&self, members: &[Member]) -> Result<(usize, Private<OwnedFd>)> {
        let mine = self.wire.contact().id;
        let mut refused = 0;
        for (rank, member) in members.iter().enumerate() {
            let is_here = member.contact.id == mine && member.process == ProcessId::current();
            let may_share = self.host.shares && member.shares && self.host.may_reach(member.host, member.namespace);
            if !is_here && (!may_share || refused > MOST_TRIES) {
                continue;
            }
            match segment::open(member.process.pid, member.fd, member.token) {
                Ok(Some(fd)) => return Ok((rank, fd)),
                Err(error) if is_here => return Err(error),
                // The rank belongs to another user, or is in a container whose numbers are hidden.
                Ok(None) | Err(_) => refused += 1,
            }
        }
        Err(Error::new(ncclInternalError, "this rank's own segment cannot be opened"))
    }

    /// Maps the segment of this rank's host.
    fn map(&mut self, context: &Context, opened: &[u32]) -> Result<Arc<Comm>> {
        let me = context.rank as usize;
        let (Some((number, members)), Some((leader, fd))) = (&self.table, &self.opened) else { return Err(garbled()) };
        if opened.len() != members.len() || opened[me] as usize != *leader {
            return Err(garbled());
        }
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        let mut host_of_leader: Vec<Option<usize>> = vec![None; members.len()];
        let mut host_of = Vec::with_capacity(members.len());
        for (rank, leader) in opened.iter().enumerate() {
            let host = host_of_leader.get_mut(*leader as usize).ok_or_else(garbled)?;
            let host = *host.get_or_insert_with(|| {
                hosts.push(Vec::new());
                hosts.len() - 1
            });
            hosts[host].push(rank);
            host_of.push(host);
        }
        let here = hosts[host_of[me]].clone();
        let seat = here.iter().position(|rank| *rank == me).unwrap_or(0);
        let on_machine = members.iter().filter(|member| member.machine == self.host.machine).count();
        let on_machine = if self.host.machine == 0 { here.len() } else { on_machine };
        let mut labels = context.labels();
        let span = (hosts.len() > 1).then(|| {
            labels.seats = here.clone().into();
            let (wire, token) = (self.wire.clone(), wire_token(&self.token));
            let contacts = members.iter().map(|member| member.contact.clone()).collect();
            Span::new(me, hosts, host_of, *number, wire, token, contacts)
        });
        let crowd = Crowd { ranks: on_machine, processors: 0 };
        take_seat(fd, (seat, here.len()), crowd, labels, context, span)
    }

    /// Fails when the time is up, or when a rank that waited in the segment of the id has ended.
    fn check(&self, context: &Context, limit: Limit) -> Result<()> {
        if let (Some(lobby), Stage::Registering) = (&self.lobby, self.stage) {
            let seen = lobby.segment.header().arrived.value();
            lobby.check_peers(Some((Blocker::Arrivals, seen)), &String::new)?;
        }
        if !limit.is_over(self.since) {
            return Ok(());
        }
        let millis = limit.time.as_millis();
        if !self.client.is_ready() {
            let why = self.client.last_failure().unwrap_or("it does not answer");
            let address = self.client.address();
            return Err(Error::new(
                ncclTimeout,
                format!("the maker of the unique id could not be reached at {address} within {millis} ms: {why}"),
            ));
        }
        let missing: Vec<usize> =
            (0..context.nranks).filter(|rank| !self.done.contains(rank)).map(|rank| rank as usize).collect();
        if missing.is_empty() {
            let message = format!("the maker of the unique id did not complete the join within {millis} ms");
            return Err(Error::new(ncclTimeout, message));
        }
        let message = format!("{} did not come within {millis} ms", context.labels().ranks(&missing));
        Err(Error::new(ncclTimeout, message).by(Blame::of(missing)))
    }
}

fn garbled() -> Error {
    Error::new(ncclRemoteError, "the maker of the unique id sent a message that does not fit this join")
}

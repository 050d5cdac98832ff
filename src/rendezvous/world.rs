//! This process's place in the job.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hostccl::fork::Own;

use super::agreement::{Left, Leftovers, Members, Party, Scope};
use super::equipment::{self, Equipment};
use super::handshake::{self, Host};
use super::hosts;
use super::joins::{self, Join};
use super::launcher::{Place, detect, given};
use super::losses::Losses;
use super::serve::serve;
use super::store::{FileStore, MemoryStore, Secret, Server, Store, TcpStore};
use crate::error::{Error, Result, Status};
use crate::wait::{Cancel, Deadline, Wait};

/// How long a wait lasts where nobody says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// How long a rank that cannot take part tries to tell the others.
const TELL: Duration = Duration::from_secs(5);

/// How to join a world.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct JoinOptions {
    /// No rendezvous: for layouts and planning only.
    pub offline: bool,
    /// Number of ranks; `None`: size, rank and local rank come from the launcher's environment.
    pub world_size: Option<usize>,
    /// This process's rank, when the size is given.
    pub rank: usize,
    /// This process's device index in its host, when the size is given.
    pub local_rank: usize,
    /// How long each wait lasts; `None`: [`DEFAULT_TIMEOUT`].
    pub timeout: Option<Duration>,
    /// When the joining itself must be done; `None`: after `timeout`.
    pub deadline: Option<Deadline>,
    /// `env://`, `tcp://host:port` or `file:///path`; `None` is `env://`.
    pub init_method: Option<String>,
    /// The caller's store instead.
    pub store: Option<Arc<dyn Store>>,
    /// Ends the joining early.
    pub cancel: Cancel,
}

/// A job as one of its ranks sees it.
pub struct World {
    device_type: String,
    place: Place,
    timeout: Duration,
    offline: bool,
    session: Option<Own<Session>>,
}

/// What joined ranks share; a forked child never drops it. Fields drop in order: the store's connections before the server that they may lead to.
struct Session {
    scope: Arc<Scope>,
    losses: Arc<Losses>,
    leftovers: Arc<Leftovers>,
    store: Arc<dyn Store>,
    prefix: String,
    /// How many ranks rank 0 takes the world to have, where it said so.
    size_there: Option<usize>,
    served: bool,
    server: Option<Arc<Server>>,
}

impl World {
    /// Finds out who this process is, reaches the store and agrees with the other ranks on world size, device type and library version.
    /// **Collective over the world** unless offline.
    pub fn join(device_type: &str, options: &JoinOptions) -> Result<World> {
        World::join_with(device_type, options, |_, _| Ok(((), None))).map(|(world, ())| world)
    }

    /// The same, with what this process needs for it (given its rank in the host and the world's size), which is prepared before anybody is
    /// waited for, and what of it the other ranks must know. A rank that fails in that tells the others, so that they do not wait for it.
    #[doc(hidden)]
    pub fn join_with<T>(
        device_type: &str,
        options: &JoinOptions,
        prepare: impl FnOnce(usize, usize) -> Result<(T, Option<Equipment>)>,
    ) -> Result<(World, T)> {
        Error::check_fork()?;
        let timeout = options.timeout.unwrap_or(DEFAULT_TIMEOUT);
        let method = Method::parse(options.init_method.as_deref())?;
        let place = place(options, &method)?;
        let mut world =
            World { device_type: device_type.to_owned(), place, timeout, offline: options.offline, session: None };
        let (prepared, equipment) = match prepare(world.place.local_rank, world.place.size) {
            Ok((prepared, equipment)) => (Ok(prepared), equipment),
            Err(error) => (Err(error), None),
        };
        if options.offline {
            return Ok((world, prepared?));
        }
        let failure = prepared.as_ref().err().cloned();
        let mut deadline = options.deadline.unwrap_or(Deadline::after(timeout));
        if failure.is_some() && deadline.left() > TELL {
            deadline = Deadline::after(TELL);
        }
        let wait = Wait { cancel: options.cancel.clone(), ..Wait::after(timeout) }.with_deadline(deadline);
        let mut server = None;
        let joined = world.meet(method, options.store.clone(), &wait).and_then(|(session, join, host)| {
            server = session.server.clone();
            world.session = Some(Own::new(session));
            let agree = || world.agree_on_join(failure.as_ref(), equipment.as_ref(), &wait);
            let agreed = match host {
                Some(host) => host.while_others_come(&wait, agree),
                None => agree(),
            };
            agreed.map(|()| join.keep())
        });
        let joined = joined.map_err(|error| explain(server.as_ref(), error));
        match (prepared, joined) {
            // That the ranks want different things says more than that this one cannot have its own.
            (Err(_), Err(error)) if error.status() == Status::Mismatch => Err(error),
            (Err(error), _) => Err(error),
            (Ok(_), Err(error)) => Err(world.with_reach(error)),
            (Ok(prepared), Ok(())) => Ok((world, prepared)),
        }
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.place.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.place.size
    }

    /// Rank in this host.
    pub fn local_rank(&self) -> usize {
        self.place.local_rank
    }

    /// How long each wait lasts.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether there is no rendezvous by choice.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// "cuda" or "cpu".
    pub fn device_type(&self) -> &str {
        &self.device_type
    }

    /// Who started this process, for messages.
    pub fn launcher(&self) -> &'static str {
        self.place.launcher
    }

    /// All ranks as a set that makes collective calls.
    pub fn scope(&self) -> Result<&Arc<Scope>> {
        Ok(&self.session()?.scope)
    }

    /// Some of the ranks, in an order of their own, as such a set; `id` is the same on all of them and used once.
    pub fn subscope(&self, id: &str, ranks: Arc<[i32]>, position: usize) -> Result<Scope> {
        let session = self.session()?;
        let serving = session.served && self.place.rank == 0;
        let prefix = format!("{}/{id}", session.prefix);
        let (store, losses) = (Arc::clone(&session.store), Arc::clone(&session.losses));
        let members = Members::Listed(ranks);
        let left = Left::new(&members, &session.leftovers);
        let party = Party { store, losses, members, me: position, served: session.served, serving, left };
        Ok(Scope::new(party, prefix))
    }

    /// Tells the other ranks that this one takes no further part: to them it has gone.
    pub fn leave(&self) {
        if let Some(session) = self.session().ok().filter(|_| self.place.size > 1) {
            session.losses.announce(self.place.rank as i32);
        }
    }

    /// Returns when every rank has called it. **Collective over the world**.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<()> {
        self.barrier_by(&Wait::after(timeout.unwrap_or(self.timeout)))
    }

    /// The same, where part of the wait may be over.
    pub fn barrier_by(&self, wait: &Wait) -> Result<()> {
        self.scope()?.agree("dm_world_barrier()", wait)?.finish(wait)
    }

    /// Beside the error of a join to which others did not come: that they could not, where a name means this host alone.
    fn with_reach(&self, error: Error) -> Error {
        let error = match self.session.as_ref().and_then(|session| session.size_there) {
            Some(there) if there != self.place.size && error.status() == Status::Timeout => Error::timeout(format!(
                "{} (rank 0 there has a world of {there} ranks and this rank one of {}: another job may be at this address)",
                error.message(),
                self.place.size
            ))
            .with_os_error(error.os_error()),
            _ => error,
        };
        let server = self.session.as_ref().and_then(|session| session.server.as_ref());
        let Some((server, (host, _))) = server.zip(self.place.address.as_ref()) else { return error };
        let is_plain = host.parse::<std::net::IpAddr>().is_ok() || host.eq_ignore_ascii_case("localhost");
        if error.status() != Status::Timeout || is_plain || !server.is_local() {
            return error;
        }
        let address = server.local_addr().ip();
        Error::timeout(format!(
            "{} (the store listens on {address} alone, which {host} means on this host: ranks on other hosts cannot reach it; name an address that they can, or mend /etc/hosts)",
            error.message()
        ))
        .with_os_error(error.os_error())
    }

    fn session(&self) -> Result<&Session> {
        Error::check_fork()?;
        self.session
            .as_deref()
            .ok_or_else(|| Error::unsupported("this world was joined with DM_WORLD_OFFLINE: it talks to no other rank"))
    }

    /// Reaches the store, and agrees with rank 0 on a prefix for the keys that no earlier run has used.
    fn meet(
        &self,
        method: Method,
        store: Option<Arc<dyn Store>>,
        wait: &Wait,
    ) -> Result<(Session, Join, Option<Host>)> {
        let Place { rank, size, .. } = self.place;
        // Also where nobody is asked for it: an empty one is a mistake that is better found in a world of one rank.
        let secret = Secret::from_environment()?;
        let mut connect: Option<Box<dyn Fn() -> Result<TcpStore>>> = None;
        let (mut store, server, fresh): (Arc<dyn Store>, _, _) = match (store, method) {
            (None, _) if size == 1 => (Arc::new(MemoryStore::new()), None, true),
            (Some(store), _) => {
                Secret::refuse_for("the caller's store (dm_world_options.store)")?;
                (store, None, false)
            }
            (None, Method::File(path)) => {
                Secret::refuse_for(&format!("the folder that file://{path} names"))?;
                (Arc::new(FileStore::open(Path::new(&path))?), None, false)
            }
            (None, Method::Tcp(..) | Method::Env) => {
                let (host, port) = self.place.address.clone().ok_or_else(|| {
                    Error::invalid(format!(
                        "{} gives rank {rank} of {size} ranks, but no address to meet at: {}",
                        self.place.launcher, self.place.advice
                    ))
                })?;
                let serves = rank == 0 && !self.place.agent;
                let server = if serves {
                    serve((&host, port), size, secret.as_ref(), wait).map_err(|error| self.place.taken(error))?
                } else {
                    None
                };
                let wait = wait.clone();
                let reach = move || TcpStore::connect_with_secret(&host, port, secret.clone(), &wait);
                let store = reach().map_err(|error| explain(server.as_ref(), error))?;
                connect = Some(Box::new(reach));
                (Arc::new(store), server, !self.place.agent)
            }
        };
        let mut host = None;
        let (join, handshake::Session { prefix, size: size_there }) = loop {
            let join = Join::begin(&store, self.place.job, rank, wait);
            let found = join.as_ref().map_err(Error::clone).and_then(|join| match (fresh, rank) {
                (true, 0) => handshake::lead(&*store, &join.prefix, size, wait),
                (true, _) => handshake::follow(&*store, &join.prefix, &join.tried, wait),
                (false, 0) => Ok(host.insert(Host::new(Arc::clone(&store), &join.prefix, size)).session()),
                (false, _) => handshake::ask(&*store, &join.prefix, &join.tried, wait),
            });
            match (found, &connect) {
                // The server of a world before this one, which rank 0 has just freed; it is still to come to this one.
                (Err(error), Some(connect))
                    if fresh && rank > 0 && error.status() == Status::Store && !wait.deadline.passed() =>
                {
                    let _ = join.map(Join::keep);
                    std::thread::sleep(wait.deadline.slice());
                    store = Arc::new(connect()?);
                }
                (found, _) => {
                    let (mut join, found) = (join?, found?);
                    join.meets_under(&found.prefix);
                    break (join, found);
                }
            }
        };
        let (members, leftovers) = (Members::All(size), Arc::new(joins::leftovers(&*store, (rank, size), &prefix)));
        let losses = Arc::new(Losses::begin(Arc::clone(&store), &prefix, &leftovers, (rank, size), wait)?);
        let served = size > 1 && fresh;
        leftovers.note(format!("{prefix}/rank/{rank}"));
        if rank == 0 {
            leftovers.note(format!("{}/session", join.prefix));
            leftovers.note(format!("{}/tokens", join.prefix));
        }
        let party = Party {
            store: Arc::clone(&store),
            losses: Arc::clone(&losses),
            left: Left::new(&members, &leftovers),
            members,
            me: rank,
            served,
            serving: served && rank == 0,
        };
        let scope = Arc::new(Scope::new(party, format!("{prefix}/world")));
        let session = Session { scope, losses, leftovers, store, prefix, size_there, served, server };
        Ok((session, join, host))
    }

    /// `failure`: why this rank cannot take part after all.
    fn agree_on_join(&self, failure: Option<&Error>, equipment: Option<&Equipment>, wait: &Wait) -> Result<()> {
        let session = self.session()?;
        let Place { rank, size, .. } = self.place;
        if size == 1 {
            return session.scope.agree("dm_world_init()", wait).map(drop);
        }
        if session.store.add(&format!("{}/rank/{rank}", session.prefix), 1, wait)? != 1 {
            let name = session.store.name();
            let twice = match session.size_there {
                Some(there) if there != size => format!(
                    "rank {rank} of {size} joined {name}, where rank {rank} of another job with {there} ranks is: give each job an address of its own"
                ),
                _ => format!(
                    "two processes joined {name} as rank {rank} of {size}: a rank was started twice, or another job is there"
                ),
            };
            let error = Error::new(Status::Mismatch, twice);
            session.scope.refuse(&error, wait);
            return Err(error);
        }
        let call = format!(
            "dm_world_init(device_type={}, world_size={size}, version={})",
            self.device_type,
            env!("CARGO_PKG_VERSION")
        );
        let round = match failure {
            Some(failure) => session.scope.agree_in_vain(&call, failure, wait)?,
            None => session.scope.agree(&call, wait)?,
        };
        let store = &*session.store;
        let outcome = match (failure, equipment) {
            (Some(failure), _) => Err(failure.clone()),
            (None, Some(mine)) => {
                equipment::check(&round, store, &session.prefix, &session.leftovers, rank, mine, wait)
            }
            (None, None) if self.device_type == "cpu" => {
                hosts::share_one(&round, store, &session.prefix, (rank, size), wait)
            }
            (None, None) => Ok(()),
        };
        if let Err(error) = &outcome {
            round.fail(error, wait);
        }
        let finished = round.finish(wait);
        outcome.and(finished)?;
        // Trouble with it is none of the join, and the next join tries again.
        let _ = joins::clean_up(store, rank, wait);
        Ok(())
    }
}

/// The error of a wait for other ranks, with the reason where this process's own server could not take them.
fn explain(server: Option<&Arc<Server>>, error: Error) -> Error {
    match server {
        Some(server) => server.explain(error),
        None => error,
    }
}

/// Where the ranks meet.
enum Method {
    Env,
    Tcp(String, u16),
    File(String),
}

impl Method {
    fn parse(text: Option<&str>) -> Result<Method> {
        let text = text.unwrap_or("env://");
        let broken = |why: &str| {
            Error::invalid(format!("init_method is {text:?}: {why}; it is env://, tcp://host:port or file:///path"))
        };
        if text == "env://" {
            return Ok(Method::Env);
        }
        if let Some(path) = text.strip_prefix("file://") {
            return match path.starts_with('/') && path.len() > 1 {
                true => Ok(Method::File(path.to_owned())),
                false => Err(broken("the path is not absolute")),
            };
        }
        let Some(address) = text.strip_prefix("tcp://") else { return Err(broken("no such method")) };
        let (host, port) = address.rsplit_once(':').ok_or_else(|| broken("there is no port"))?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse::<u16>() {
            _ if host.is_empty() => Err(broken("there is no host")),
            Ok(0) => Err(broken("port 0 is none that the other ranks could know")),
            Ok(port) => Ok(Method::Tcp(host.to_owned(), port)),
            Err(_) => Err(broken("the port is not a number up to 65535")),
        }
    }
}

fn place(options: &JoinOptions, method: &Method) -> Result<Place> {
    let env = |name: &str| std::env::var(name).ok();
    let mut place = match options.world_size {
        None => detect(&env)?,
        // Only a meeting at the environment's address has to find one.
        Some(size) if size > 1 && matches!(method, Method::Env) && options.store.is_none() && !options.offline => {
            given(&env, options.rank, size, options.local_rank)?
        }
        Some(size) => Place::new("dm_world_options", options.rank, size, options.local_rank),
    };
    if let Method::Tcp(host, port) = method {
        place.address = Some((host.clone(), *port));
        place.agent = false;
    }
    if !matches!(method, Method::Env) || options.store.is_some() {
        // The port, or the store, is the caller's.
        place.job = 0;
    }
    if place.size > i32::MAX as usize || place.rank >= place.size {
        return Err(Error::invalid(format!("rank {} is not in a world of {} ranks", place.rank, place.size)));
    }
    Ok(place)
}

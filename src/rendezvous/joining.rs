//! Joins a world: reaches the store, and agrees with the other ranks on what the world is.

use std::fmt::{self, Display, Formatter};
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hostccl::fork::Own;

use super::agreement::{Members, Membership, Scope, ScopeKeys};
use super::current_epoch::CurrentEpoch;
use super::door_watch::DoorWatch;
use super::engine_place::EnginePlace;
use super::equipment::{self, Equipment};
use super::handshake::{self, NonceServer};
use super::host::HostIdentity;
use super::incarnation::{Incarnation, Tickets};
use super::init_method::Method;
use super::join_attempt::{self, JoinAttempt};
use super::launcher::{self, Place};
use super::local_place::LocalPlace;
use super::loss_watch::{Looking, LossWatch};
use super::losses::Losses;
use super::newcomer::Newcomer;
use super::options::{DEFAULT_TIMEOUT, Join, JoinOptions, checks_collectives, place};
use super::running::{self, Running};
use super::serve::serve;
use super::store::{FileStore, MemoryStore, Secret, Server, Store, TcpStore};
use super::turn_watch::TurnWatch;
use super::world::{Session, World};
use crate::digest::Fnv1a;
use crate::error::{Error, Result, Status};
use crate::events;
use crate::logging::{Me, set_rank};
use crate::recorder::{self, Group, Kind, Operation, RecordedAgreement};
use crate::wait::{Deadline, Wait};

/// The things that a process can meet where it joins.
enum Met {
    /// The process is rank 0 of a new world, and hands out the nonce.
    AsRankZero(NonceServer),
    /// Rank 0 of a new world, which may be this process.
    RankZero,
    /// A job that runs, in which the process is a newcomer.
    Running(Running),
}

impl Display for Met {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Met::AsRankZero(_) | Met::RankZero => write!(out, "rank 0"),
            Met::Running(running) => write!(out, "a running job of {} ranks", running.size),
        }
    }
}

/// How long a rank that cannot take part tries to tell the others.
const TELL: Duration = Duration::from_secs(5);

impl World {
    /// Finds out which rank this process is, reaches the store, and agrees with the other ranks on
    /// world size, device type and library version. **Collective over the world** unless offline.
    pub fn join(device_type: &str, options: &JoinOptions) -> Result<World> {
        World::join_with(device_type, options, |_| Ok(()), |(), _| Ok(None)).map(|(world, ())| world)
    }

    /// Does what [`World::join`] does. `prepare` makes what this process needs for the world,
    /// before any other rank is waited for. `prepare` gets the size of the world. `equip`
    /// completes what `prepare` has made once the rank's place on its host is known, and returns
    /// what the other ranks must know of it. When `prepare` or `equip` fails, the other ranks are
    /// told, so they do not wait for this one. In an offline world `equip` is not called.
    #[doc(hidden)]
    pub fn join_with<T>(
        device_type: &str,
        options: &JoinOptions,
        prepare: impl FnOnce(usize) -> Result<T>,
        equip: impl FnOnce(&mut T, LocalPlace) -> Result<Option<Equipment>>,
    ) -> Result<(World, T)> {
        Error::check_fork()?;
        let timeout = options.timeout.unwrap_or(DEFAULT_TIMEOUT);
        let method = Method::parse(options.init_method.as_deref())?;
        let (place, how) = (place(options, &method)?, options.join.or_environment()?);
        let checks_collectives = checks_collectives()?;
        set_rank(place.rank);
        log::debug!(
            "{Me}: rank {} of {} and {} come from {}; it joins within {} ms",
            place.rank,
            place.size,
            place.local_rank.map_or_else(|| "no local rank".to_owned(), |local| format!("local rank {local}")),
            place.launcher,
            timeout.as_millis()
        );
        let local = LocalPlace::on_one_host(&place);
        let (device_type, offline) = (device_type.to_owned(), options.offline);
        let mut world = World { device_type, place, local, timeout, offline, checks_collectives, session: None };
        let mut prepared = recorder::open().and_then(|()| prepare(world.place.size));
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
        let joining = world.record_joining();
        let joined = world.meet((method, how), options.store.clone(), &wait).and_then(|(session, join, met)| {
            server = session.server.clone();
            let serves = if server.is_some() { " and serves it" } else { "" };
            log::debug!("{Me}: has met {met} in {}{serves}", session.store.name());
            world.session = Some(Own::new(session));
            let equip = |local| prepared.as_mut().map_or(Ok(None), |prepared| equip(prepared, local));
            let agree = |equip| world.agree_on_join(&join.prefix, failure.as_ref(), equip, &wait);
            let agreed = match met {
                Met::AsRankZero(host) => host.while_others_come(&wait, || agree(equip)),
                Met::RankZero => agree(equip),
                Met::Running(running) => world.join_running(&running, failure.as_ref(), equip),
            };
            world.local = agreed?;
            join.keep();
            Ok(())
        });
        let joined = joined.map_err(|error| explain(server.as_ref(), error));
        joining.0.set_ends_well(joined.is_ok());
        match (prepared, joined) {
            // A mismatch between the ranks says more than a failure of this rank alone.
            (Err(_), Err(error)) if error.status() == Status::Mismatch => Err(error),
            (Err(error), _) => Err(error),
            (Ok(_), Err(error)) => Err(world.with_reach(error)),
            (Ok(prepared), Ok(())) => {
                if let Some(watch) = world.loss_watch() {
                    let watch: Arc<dyn events::Source> = Arc::clone(watch) as _;
                    events::announce(Arc::downgrade(&watch));
                }
                Ok((world, prepared))
            }
        }
    }

    /// Records that this process begins to join. The world has no name yet, so the ranks that join
    /// are known by the address where they meet.
    fn record_joining(&self) -> (RecordedAgreement, Group) {
        let Place { rank, size, address, job, launcher, .. } = &self.place;
        let address = address.as_ref().map_or_else(String::new, |(host, port)| format!("{host}:{port}"));
        let key = Fnv1a::default().text("join").text(&address).number(*job).number(*size as u64);
        let ranks = recorder::members(*size, |rank| rank as i32);
        let group = Group::open(Kind::Scope, &recorder::World::default(), key, (*rank, *size), &ranks, "the join");
        let text = format!("dm_world_init({launcher}, {address})");
        let recorded = group.begin_agreement(Operation::Agreement, &text);
        (recorded, group)
    }

    /// Returns the error of a join to which some ranks did not come. The message says why they may
    /// have missed the join, when rank 0 has a world of another size, or the store's name means
    /// this host alone.
    fn with_reach(&self, error: Error) -> Error {
        let error = match self.session.as_ref().and_then(|session| session.size_there) {
            Some(there) if there != self.place.size && error.status() == Status::Timeout => Error::timeout(format!(
                "{} (rank 0 there has a world of {there} ranks and this rank one of {}: another job may be at this address)",
                error.message(),
                self.place.size
            ))
            .with_os_error(error.os_error())
            .with_facts_of(&error),
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
            "{} (the store listens on {address} alone, which {host} means on this host: ranks on other hosts cannot reach it; name an address that they can, or correct /etc/hosts)",
            error.message()
        ))
        .with_os_error(error.os_error())
        .with_facts_of(&error)
    }

    /// Reaches the store, and agrees with rank 0 on a prefix for the keys, which no earlier run has
    /// used.
    fn meet(
        &self,
        (method, how): (Method, Join),
        store: Option<Arc<dyn Store>>,
        wait: &Wait,
    ) -> Result<(Session, JoinAttempt, Met)> {
        let Place { rank, size, .. } = self.place;
        // This check is made also where no store asks for the secret, because a mistake is better
        // found in a world of one rank.
        let secret = Secret::from_environment()?;
        let mut connect: Option<Box<dyn Fn() -> Result<TcpStore>>> = None;
        let has_own_name = store.is_none() && size > 1;
        let (mut store, server, fresh): (Arc<dyn Store>, _, _) = match (store, method) {
            (None, _) if size == 1 => (Arc::new(MemoryStore::new()), None, true),
            (Some(store), _) => {
                Secret::refuse_for("the caller's store (dm_world_options.store)")?;
                (store, None, false)
            }
            (None, Method::File(path)) => {
                Secret::refuse_for(&format!("the folder that file://{path} names"))?;
                (Arc::new(FileStore::open_as(Path::new(&path), rank as i32)?), None, false)
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
        let (join, met, handshake::Session { prefix, size: size_there }) = loop {
            let join = JoinAttempt::begin(&store, self.place.job, rank, has_own_name, wait);
            let found = join.as_ref().map_err(Error::clone).and_then(|join| {
                // No job runs in a store that this process has just begun to serve.
                let serves = (fresh, rank) == (true, 0);
                let how = if serves || size == 1 { Join::New } else { how };
                let running = running::find(&store, &join.prefix, how, (rank, size), &self.device_type, wait)?;
                if let Some(running::Found { running, prefix }) = running {
                    let size = Some(running.size);
                    return Ok((Met::Running(running), handshake::Session { prefix, size }));
                }
                let with_rank_zero = |session: Result<handshake::Session>| Ok((Met::RankZero, session?));
                match (fresh, rank) {
                    (true, 0) => with_rank_zero(handshake::lead(&*store, &join.prefix, size, wait)),
                    (true, _) => with_rank_zero(handshake::follow(&*store, &join.prefix, &join.tried, wait)),
                    (false, 0) => {
                        let host = NonceServer::new(Arc::clone(&store), &join.prefix, size);
                        let session = host.session();
                        Ok((Met::AsRankZero(host), session))
                    }
                    (false, _) => with_rank_zero(handshake::ask(&*store, &join.prefix, &join.tried, wait)),
                }
            });
            match (found, &connect) {
                // This was the server of an earlier world, which rank 0 has just freed. The server
                // of this world is still to come.
                (Err(error), Some(connect))
                    if fresh && rank > 0 && error.status() == Status::Store && !wait.deadline.passed() =>
                {
                    let _ = join.map(JoinAttempt::keep);
                    std::thread::sleep(wait.deadline.slice());
                    store = Arc::new(connect()?);
                }
                (found, _) => {
                    let (mut join, (met, session)) = (join?, found?);
                    join.meets_under(&session.prefix);
                    break (join, met, session);
                }
            }
        };
        let running = if let Met::Running(running) = &met { Some(running.clone()) } else { None };
        let leaves_of = Arc::new(AtomicUsize::new(if running.is_none() { size } else { 0 }));
        let leftovers = join_attempt::leftovers(&store, rank, &prefix, &join.counter, Arc::clone(&leaves_of));
        let (members, leftovers) = (Members::All(size), Arc::new(leftovers));
        let mut me = Incarnation::first(rank as i32);
        if size > 1 {
            me.ticket = running::take_ticket(&*store, &prefix, rank, running.as_ref(), wait)?;
        }
        let losses = Arc::new(Losses::begin(Arc::clone(&store), &prefix, &leftovers, (me, size), wait)?);
        let served = size > 1 && fresh;
        if running.is_none() {
            // The tickets of a rank go on counting for as long as the world lives, so a newcomer
            // leaves the key.
            leftovers.note(format!("{prefix}/rank/{rank}"));
        }
        if rank == 0 && running.is_none() {
            leftovers.note(format!("{}/session", join.prefix));
            leftovers.note(format!("{}/tokens", join.prefix));
        }
        let names = [&*launcher::job_name(), store.name(), self.place.launcher];
        let record = recorder::World::open(&prefix, rank, size, names);
        let membership = Membership {
            store: Arc::clone(&store),
            losses: Arc::clone(&losses),
            left: ScopeKeys::new(&members, &leftovers, Some(0)),
            members,
            tickets: Tickets::default(),
            epoch: 0,
            me: rank,
            served,
            serving: served && rank == 0,
            record: record.clone(),
        };
        let epoch = match running {
            None => CurrentEpoch::first(&prefix, Scope::new(membership, format!("{prefix}/world"))),
            Some(_) => CurrentEpoch::at_door(&prefix, size),
        };
        let epoch = Arc::new(epoch);
        let loss_watch = Arc::new(LossWatch {
            me,
            size,
            launcher: self.place.launcher,
            met_in: store.name().to_owned(),
            served,
            state: AtomicU8::default(),
            epoch: Mutex::new(Some(Arc::clone(&epoch))),
            looking: Mutex::new(Some(Looking::new(Arc::clone(&store), Arc::clone(&losses), Arc::clone(&epoch)))),
        });
        let newcomer = running.map(Newcomer::new);
        let door = DoorWatch::default();
        let turn_watch = Arc::new(TurnWatch::new(Arc::clone(&store), Arc::clone(&losses)));
        let session = Session {
            me,
            epoch,
            losses,
            loss_watch,
            leftovers,
            leaves_of,
            door,
            turn_watch,
            newcomer,
            store,
            prefix,
            size_there,
            served,
            server,
            record,
        };
        Ok((session, join, met))
    }

    /// Agrees with the other ranks on the world. `failure` says why this rank cannot take part, if
    /// it cannot. `equip` makes what the ranks compare, once the rank's place on its host is known.
    /// `join` is the prefix of this join. Returns the place.
    fn agree_on_join(
        &self,
        join: &str,
        failure: Option<&Error>,
        equip: impl FnOnce(LocalPlace) -> Result<Option<Equipment>>,
        wait: &Wait,
    ) -> Result<LocalPlace> {
        let session = self.session()?;
        let Place { rank, size, .. } = self.place;
        if size == 1 {
            let local = LocalPlace::on_one_host(&self.place);
            self.scope()?.agree("dm_world_init()", wait)?;
            return equip(local).map(|_| local);
        }
        if session.me.ticket > 0 {
            let name = session.store.name();
            // The ranks of a world of another size belong to another job, which this rank leaves
            // alone.
            if let Some(there) = session.size_there.filter(|there| *there != size) {
                let message = format!(
                    "rank {rank} of {size} joined {name}, where rank {rank} of another job with {there} ranks is: give each job an address of its own"
                );
                return Err(Error::new(Status::Mismatch, message));
            }
            let twice = format!(
                "two processes joined {name} as rank {rank} of {size}: a rank was started twice, or another job is there"
            );
            let error = Error::new(Status::Mismatch, twice);
            self.scope()?.refuse(&error, wait);
            return Err(error);
        }
        // A rank that announces its collectives waits for the others to announce theirs.
        let checks = if self.checks_collectives { ", DM_CHECK_COLLECTIVES=1" } else { "" };
        let call = format!(
            "dm_world_init(device_type={}, world_size={size}, version={}{checks})",
            self.device_type,
            env!("CARGO_PKG_VERSION")
        );
        let store = &*session.store;
        // The host engine must know which ranks share memory.
        let engine = match (failure, self.device_type.as_str()) {
            (Some(failure), _) => Err(failure.clone()),
            (None, "cpu") => EnginePlace::here(store, session.server.as_deref()).map(Some),
            (None, _) => Ok(None),
        };
        let offers = engine.iter().flatten().flat_map(EnginePlace::offers).collect::<Vec<_>>();
        let (round, shared) = self.scope()?.agree_to_join(&call, &offers, engine.as_ref().err(), wait)?;
        let nonce = session.prefix.rsplit('/').next().unwrap_or_default();
        let mut running = Running::new(nonce, size, &self.device_type);
        let find_places = || {
            let local = match engine.as_ref().map_err(Error::clone)? {
                Some(_) if shared[0] => {
                    let local = LocalPlace::on_one_host(&self.place);
                    return equip(local).map(|mine| (local, mine.unwrap_or_default().library));
                }
                Some(engine) => {
                    engine.introduce(shared[1])?;
                    LocalPlace::find(&round, &self.place, engine.host(), wait)?
                }
                None => LocalPlace::find(&round, &self.place, &kernel()?, wait)?,
            };
            let mine = equip(local)?;
            if let Some(mine) = &mine {
                equipment::check(&round, store, &session.prefix, &session.leftovers, rank, mine, wait)?;
            }
            Ok((local, mine.unwrap_or_default().library))
        };
        let outcome = find_places().and_then(|(local, library)| {
            if rank == 0 {
                running.num_hosts = local.num_hosts;
                let engine = engine.as_ref().ok().and_then(Option::as_ref);
                running.memory = engine.filter(|_| shared[0]).map(|engine| engine.host().to_owned());
                running.is_one_network = shared.get(1) == Some(&true);
                running.library = library;
                store.set(&running::key(join), running.to_string().as_bytes(), wait)?;
            }
            Ok(local)
        });
        let joined = round.end(outcome, wait);
        if rank == 0 && joined.is_err() {
            store.forget(vec![running::key(join)], wait);
        }
        let local = joined?;
        // The join has succeeded even if the clean-up fails, and the next join tries the clean-up
        // again.
        let _ = join_attempt::clean_up(store, rank, wait);
        Ok(local)
    }
}

/// Returns the identity of the kernel on which this process runs. Containers of one machine share a
/// kernel, and so its devices.
fn kernel() -> Result<String> {
    let here = HostIdentity::here().map_err(|error| Error::store_io("finding out which host this is", &error))?;
    Ok(here.kernel().to_owned())
}

/// Returns the error of a wait for other ranks, with the reason if this process's own server could
/// not take their connections.
fn explain(server: Option<&Arc<Server>>, error: Error) -> Error {
    match server {
        Some(server) => server.explain(error),
        None => error,
    }
}

//! A world with its communicators: its library, its communicators, and whose turn it is to make a
//! collective call.

use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::background::wait_for_handed_over;
use super::communicator::Communicator;
use super::ending::abort_all;
use super::groups::{self, refuse_inside};
use super::recovering::Recovering;
use super::refusal::tell_if_refused;
use super::sharing::CommTable;
use super::turn::{Turn, Turns};
use super::world_device::{check_even_hosts, check_reaches_hosts, exclusive_device, log_join, takes_device};
use super::world_options::WorldOptions;
use crate::ccl::{self, Device, DeviceChoice, Library};
use crate::digest::Fnv1a;
use crate::error::{Error, Result};
use crate::events::{self, Event, publish};
use crate::logging::Me;
use crate::rendezvous::{self, Equipment, LocalPlace};
use crate::wait::{Cancel, Wait};

/// How long a join waits for the end of an earlier world whose last handle was freed.
const FREEING: Duration = Duration::from_secs(1);

/// A root mesh, as its world sees it when the world is aborted.
pub(super) trait EndsWithWorld: Send + Sync {
    /// Marks the root mesh as aborted on this rank, and returns its communicators, which the world
    /// then aborts.
    fn end_with_world(&self) -> Vec<Arc<Communicator>>;

    /// Whether the root mesh is in use on this rank.
    fn is_in_use(&self) -> bool;

    /// The number of ranks of the root mesh, where the mesh is in use on this rank or a recovery
    /// has ended it.
    fn num_seats(&self) -> Option<usize>;

    /// Begins to watch for ranks that end the root mesh, for the events of this process.
    fn watch_departures(&self);

    /// Marks the root mesh as finalized on this rank, unless it has ended before, and returns all
    /// its communicators, which the world then finalizes.
    fn finalize_with_world(&self) -> Vec<Arc<Communicator>>;

    /// The other ranks that have noted that they have ended the root mesh, as far as the store
    /// knows by now, if the root mesh has one of these communicators.
    fn departed_from(&self, communicators: &[Arc<Communicator>], wait: &Wait) -> Result<Vec<i32>>;

    /// Marks the root mesh as ended by a recovery on this rank, unless it has ended before, ends
    /// its calls, and returns its communicators, which the world then aborts.
    fn end_with_epoch(&self) -> Vec<Arc<Communicator>>;
}

/// Something that C callers borrow from a world.
struct Lent {
    /// The question of the callers. Equal questions get the same answer.
    key: Vec<String>,
    /// The answer that the callers get.
    thing: Box<dyn Any + Send + Sync>,
    /// Owns the memory to which `thing` points.
    _owner: Box<dyn Any + Send + Sync>,
}

/// A world with its communicators.
pub struct World {
    /// The communicators of this rank. This field is dropped first, while the rest of the world
    /// still exists.
    comms: CommTable,
    /// How this rank recovers. The value uses the store, so this field is dropped before the
    /// rendezvous.
    recovering: Recovering,
    /// Who the ranks are, and where they meet.
    rendezvous: rendezvous::World,
    /// The library that makes the communicators; `None` in an offline world.
    library: Option<Arc<Library>>,
    /// The device on which communicators are made when the calling thread has chosen none; `None`
    /// where this library selects no device.
    device: Option<Device>,
    /// The device's number for those who ask. Beside RCCL it is the number that the program gave.
    device_number: Option<usize>,
    /// The turns of the threads that make collective calls of this world.
    calls: Turns,
    /// How many meshes over existing communicators were made, by their ranks.
    adopted: Mutex<(u64, HashMap<Vec<i32>, u64>)>,
    /// Raised by [`abort`](World::abort). The flags of the root meshes are its children.
    cancel: Cancel,
    /// Whether the world was finalized.
    is_finalized: AtomicBool,
    /// Whether dm_world_finalize has done its work. Before that, an abort still ends its waits.
    pub(super) is_over: AtomicBool,
    /// Whether the other ranks were told that this one takes no further part.
    is_departure_told: AtomicBool,
    /// The root meshes of this world, which its abort ends.
    roots: Mutex<Vec<Weak<dyn EndsWithWorld>>>,
    /// The turns of the threads that make the communicator of this rank alone.
    singles: Turns,
    /// The thread that has made the first collective that the ranks have compared, and whether
    /// another thread has made one.
    collective_threads: Mutex<(Option<ThreadId>, bool)>,
    /// The memory that C callers borrow for as long as the world lives.
    lent: Mutex<Vec<Lent>>,
}

impl World {
    /// Joins the world of `device_type`. **Collective over the world** unless it is offline.
    ///
    /// The library and the driver are found before anybody is waited for. The device is chosen when
    /// the ranks have told each other their hosts. A rank that fails in either tells the others.
    pub fn join(device_type: &str, options: &WorldOptions) -> Result<World> {
        options.join.cancel.check()?;
        let began = Instant::now();
        // An earlier world may be about to end, and with it a server at the same address.
        wait_for_handed_over(FREEING);
        let ranks = Cell::new(0);
        let prepare = |world_size| {
            ranks.set(world_size);
            if options.join.offline {
                return Ok((None, None));
            }
            if let Some(device) = options.device.filter(|_| device_type == "cpu") {
                return Err(Error::invalid(format!("the options name device {device}, but device type cpu has none")));
            }
            // SAFETY: whoever named the library vouches for it.
            let library = unsafe { ccl::named_or_usual(device_type, options.library.as_deref()) }?;
            if takes_device(&library) {
                ccl::check_devices(options.device, world_size)?;
            }
            Ok((Some(library), None))
        };
        let equip = |prepared: &mut (Option<Arc<Library>>, Option<Device>), local: LocalPlace| {
            let Some(library) = prepared.0.as_ref() else { return Ok(None) };
            if device_type == "cpu" {
                check_reaches_hosts(library, local)?;
            }
            if library.is_host_engine() {
                return Ok(None);
            }
            if takes_device(library) {
                let choice = options.device.map_or(DeviceChoice::LocalRank(local.local_rank), DeviceChoice::Named);
                let device = ccl::select_device(choice)?;
                log::debug!("{Me}: takes device {} of {} on this host", device.number, device.count);
                prepared.1 = Some(device);
            }
            check_even_hosts(library, ranks.get(), local)?;
            let device = prepared.1.as_ref().and_then(exclusive_device);
            Ok(Some(Equipment { library: library.release(), device }))
        };
        let (rendezvous, (library, device)) = rendezvous::World::join_with(device_type, &options.join, prepare, equip)?;
        let is_rccl = library.as_ref().is_some_and(|library| library.is_rccl());
        let device_number = device.as_ref().map(|device| device.number).or(options.device.filter(|_| is_rccl));
        log_join(&rendezvous, library.as_deref(), device_number, began);
        Ok(World {
            device_number,
            comms: CommTable::default(),
            recovering: Recovering::default(),
            rendezvous,
            library,
            device,
            calls: Turns::default(),
            adopted: Mutex::default(),
            cancel: options.join.cancel.clone(),
            is_finalized: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            is_departure_told: AtomicBool::new(false),
            roots: Mutex::default(),
            singles: Turns::default(),
            collective_threads: Mutex::default(),
            lent: Mutex::default(),
        })
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rendezvous.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.rendezvous.size()
    }

    /// The number of this rank's device among the devices that this process sees. `None` on cpu,
    /// on the host engine, in an offline world, and with RCCL where the options name no device.
    pub fn device(&self) -> Option<usize> {
        self.device_number
    }

    /// Where this rank is among the ranks of its host, and its host among the hosts.
    pub fn local_place(&self) -> LocalPlace {
        self.rendezvous.local_place()
    }

    /// The device type, "cuda" or "cpu".
    pub fn device_type(&self) -> &str {
        self.rendezvous.device_type()
    }

    /// This process's place in the job, without communicators.
    pub fn rendezvous(&self) -> &rendezvous::World {
        &self.rendezvous
    }

    /// The library that makes this world's communicators. An offline world has none.
    pub fn library(&self) -> Result<&Arc<Library>> {
        self.library.as_ref().ok_or_else(|| {
            Error::unsupported(
                "this world was joined with DM_WORLD_OFFLINE: it has layouts and ranks, but no communicators",
            )
        })
    }

    /// Returns how many processes have joined the world under this rank before this one.
    pub fn ticket(&self) -> u32 {
        self.rendezvous.ticket().unwrap_or(0)
    }

    /// Returns how many processes wait to join the world, as far as this process knows. The next
    /// recovery lets them in where there is a place. Local, and cheap enough for every step.
    pub fn num_waiting(&self) -> Result<i32> {
        self.alive()?;
        self.rendezvous.num_waiting_for(&|| self.seats_at_start())
    }

    /// The number of seats of the mesh that the first recovery takes, as far as this rank knows.
    fn seats_at_start(&self) -> Option<usize> {
        let roots = self.living_roots();
        // The world may have several root meshes then. After a first recovery that has failed, all
        // of them have ended, and the next try is about one of them.
        let most = |in_use| roots.iter().filter(|it| it.is_in_use() == in_use).filter_map(|it| it.num_seats()).max();
        most(true).or_else(|| most(false))
    }

    /// Returns when every rank of the world has called this function. **Collective over the
    /// world**.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<()> {
        self.alive()?;
        self.tell_if_refused("dm_world_barrier", || refuse_inside("dm_world_barrier", self.library.as_ref()))?;
        let wait = self.wait(timeout.unwrap_or(self.rendezvous.timeout()));
        let _turn = self.take_turn_alive(&wait)?;
        wait.outcome(self.rendezvous.barrier_by(&wait))
    }

    /// Returns the location of every rank, in rank order. **Collective over the world**. `timeout`
    /// bounds the call; `None` stands for the world's timeout.
    pub fn locations(&self, mine: Option<&str>, timeout: Option<Duration>) -> Result<Vec<String>> {
        self.alive()?;
        self.tell_if_refused("dm_world_locations", || {
            refuse_inside("dm_world_locations", self.library.as_ref())?;
            let wait = self.wait(timeout.unwrap_or(self.rendezvous.timeout()));
            let _turn = self.take_turn_alive(&wait)?;
            wait.outcome(self.rendezvous.locations(mine, &wait))
        })
    }

    /// Something that callers borrow for as long as the world lives. `make` makes it, with what
    /// owns its memory, at the first call for `key`. Later calls for an equal key return the thing
    /// that the first call made, so repeated calls need no further memory.
    pub(crate) fn lend<T>(&self, key: &[String], make: impl FnOnce() -> (T, Box<dyn Any + Send + Sync>)) -> T
    where
        T: Clone + Any + Send + Sync,
    {
        let mut lent = lock(&self.lent);
        let known = lent.iter().find(|known| known.key == key).and_then(|known| known.thing.downcast_ref::<T>());
        if let Some(known) = known {
            return known.clone();
        }
        let (thing, owner) = make();
        lent.push(Lent { key: key.to_vec(), thing: Box::new(thing.clone()), _owner: owner });
        thing
    }

    /// Ends this rank's part in the world: every call that is blocked in it, its root meshes, and
    /// all its communicators. Local, from any thread; takes no lock that a blocked call holds. The
    /// other ranks learn of the abort when they wait for this rank.
    pub fn abort(&self) -> Result<()> {
        let message = || format!("rank {}: dm_world_abort ends the world of {} ranks here", self.rank(), self.size());
        // A world that was finalized has nothing left that an abort could end.
        let is_over = self.is_over.load(Ordering::SeqCst);
        if !self.cancel.is_raised() && !is_over {
            log::warn!("{}", message());
        }
        self.cancel.raise();
        // The others are told first, because NCCL's abort waits until the ranks of this host have
        // ended their communicators as well.
        let is_first = !self.is_departure_told.swap(true, Ordering::SeqCst);
        if is_first {
            self.rendezvous.loss_watch().into_iter().for_each(|watch| watch.end());
            if !is_over {
                publish(|| self.event(events::Kind::Aborted, message()).about(vec![self.rank() as i32]));
            }
            self.rendezvous.leave();
        }
        let mut ended: Vec<_> = self.living_roots().iter().flat_map(|root| root.end_with_world()).collect();
        for made in self.comms.take_living() {
            if !ended.iter().any(|known| Arc::ptr_eq(known, &made)) {
                ended.push(made);
            }
        }
        let outcome = abort_all(&ended);
        if is_first {
            self.library.iter().for_each(|library| groups::abandon(library, "dm_world_abort"));
        }
        self.comms.share_nothing();
        self.rendezvous.record().end();
        outcome
    }

    /// An event about this world.
    pub(super) fn event(&self, kind: events::Kind, message: String) -> Event {
        Event::new(kind, (self.rank(), self.size()), self.rendezvous.epoch(), message)
    }

    /// Notes that a root mesh was finalized. If no other root mesh is alive on this rank, the ends
    /// of other ranks are no events until the next mesh is registered.
    pub(super) fn note_finalized(&self) {
        let is_quiet = !self.living_roots().iter().any(|root| root.is_in_use());
        self.rendezvous.loss_watch().into_iter().for_each(|watch| watch.set_quiet(is_quiet));
    }

    /// Ends all root meshes of this world on this rank, and their communicators, because a recovery
    /// begins or the mesh that it made is of no use. Local; takes no lock that a blocked call
    /// holds. The communicator that holds this rank alone stays.
    pub(super) fn end_epoch(&self) {
        let mut ended: Vec<_> = self.living_roots().iter().flat_map(|root| root.end_with_epoch()).collect();
        let living = self.comms.take_living();
        let (alone, others): (Vec<_>, Vec<_>) = living.into_iter().partition(|made| self.comms.is_single(made));
        alone.iter().for_each(|made| self.comms.add_living(made));
        ended.extend(others);
        // An abort that is not done by its deadline continues in the background.
        let _ = abort_all(&ended);
        self.library.iter().for_each(|library| groups::abandon(library, "dm_recover"));
        self.comms.share_nothing();
    }

    /// The root meshes that this rank has not freed. Some of them may have ended.
    fn living_roots(&self) -> Vec<Arc<dyn EndsWithWorld>> {
        lock(&self.roots).iter().filter_map(Weak::upgrade).collect()
    }

    /// How this rank recovers.
    pub(super) fn recovering(&self) -> &Recovering {
        &self.recovering
    }

    pub(super) fn comms(&self) -> &CommTable {
        &self.comms
    }

    /// Fails with `DM_STATUS_ABORTED` after [`abort`](World::abort) and
    /// [`finalize`](World::finalize).
    pub(super) fn alive(&self) -> Result<()> {
        if self.is_finalized.load(Ordering::SeqCst) {
            return Err(Error::aborted("the world was finalized by dm_world_finalize: join a new one"));
        }
        self.cancel.check()
    }

    /// Marks the world and its root meshes as finalized on this rank. Returns their communicators,
    /// the last made first, so that children come before the communicator from which they were
    /// split.
    pub(super) fn take_to_finalize(&self) -> Vec<Arc<Communicator>> {
        self.is_finalized.store(true, Ordering::SeqCst);
        self.rendezvous.loss_watch().into_iter().for_each(|watch| watch.end());
        let roots = self.living_roots();
        let mut taken = self.comms.take_living();
        for known in roots.iter().flat_map(|root| root.finalize_with_world()) {
            if !taken.iter().any(|other| Arc::ptr_eq(other, &known)) {
                taken.push(known);
            }
        }
        taken.retain(|communicator| !communicator.raw().is_null());
        taken.reverse();
        taken
    }

    /// A flag for a root mesh, which counts as raised also when the world's flag is.
    pub(super) fn cancel(&self) -> Cancel {
        self.cancel.child()
    }

    /// Runs `call`, which is a call of `function` that is collective over this world. If this rank
    /// refuses the call, the other ranks are told.
    pub(crate) fn tell_if_refused<T>(&self, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.rendezvous.is_offline() {
            return call();
        }
        let scope = self.rendezvous.scope().ok().filter(|_| self.alive().is_ok());
        tell_if_refused(scope.as_deref(), self.cancel(), function, call)
    }

    /// A wait of at most `timeout`, which the world's abort ends.
    pub(super) fn wait(&self, timeout: Duration) -> Wait {
        Wait { cancel: self.cancel(), ..Wait::after(timeout) }
    }

    /// Notes a root mesh, so that aborting the world ends the root mesh too.
    pub(super) fn register(&self, root: Weak<dyn EndsWithWorld>) {
        let mut roots = lock(&self.roots);
        // The list is cleaned before it would grow, so the cost of a mesh does not grow with the
        // number of meshes before it.
        if roots.len() == roots.capacity() {
            roots.retain(|known| known.strong_count() > 0);
        }
        roots.push(Weak::clone(&root));
        drop(roots);
        root.upgrade().iter().for_each(|root| root.watch_departures());
        self.rendezvous.loss_watch().into_iter().for_each(|watch| watch.set_quiet(false));
    }

    /// The other ranks that have ended a mesh which has one of these communicators, as far as the
    /// store knows by now. A mesh that was freed on this rank is left out.
    pub(super) fn departed_from(&self, communicators: &[Arc<Communicator>], wait: &Wait) -> Result<Vec<i32>> {
        let mut departed = Vec::new();
        for root in self.living_roots() {
            departed.extend(root.departed_from(communicators, wait)?);
        }
        Ok(departed)
    }

    /// Makes this world's device the calling thread's device, where that thread has none or the
    /// program has named the world's device.
    pub(super) fn select_device(&self) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), Device::select)
    }

    /// Waits for the calling thread's turn, and checks that the world is alive, because the call
    /// that had the turn before may have ended the world.
    fn take_turn_alive(&self, wait: &Wait) -> Result<Turn<'_>> {
        let turn = self.take_turn(wait)?;
        self.alive().map(|()| turn)
    }

    /// Waits for the calling thread's turn to make a collective call, because the calls of one
    /// world happen one after another.
    pub(super) fn take_turn(&self, wait: &Wait) -> Result<Turn<'_>> {
        let busy = || format!("another thread of rank {} was inside a collective call of this world", self.rank());
        self.calls.take(wait, busy)
    }

    /// Waits for the calling thread's turn to make the communicator of this rank alone. Making it
    /// waits for no other rank, so it does not wait for its turn behind collective calls.
    pub(super) fn take_single_turn(&self, wait: &Wait) -> Result<Turn<'_>> {
        let busy = || format!("another thread of rank {} was making the communicator of this rank alone", self.rank());
        self.singles.take(wait, busy)
    }

    /// Notes that the calling thread makes a collective that the ranks compare. Returns whether
    /// several threads have made such collectives.
    pub(super) fn note_collective_thread(&self) -> bool {
        let mut threads = lock(&self.collective_threads);
        let this = std::thread::current().id();
        threads.1 |= *threads.0.get_or_insert(this) != this;
        threads.1
    }

    /// The name of the next mesh over existing communicators of these ranks, equal on all of them.
    /// No mesh of other ranks has this name.
    pub(super) fn next_adopted(&self, ranks: &[i32]) -> String {
        let mut adopted = lock(&self.adopted);
        // The epoch is read under the lock, so no thread counts in an earlier epoch than the thread
        // before.
        let epoch = self.rendezvous.epoch();
        // A newcomer begins with no such mesh, so all ranks count anew in each epoch. A recovery
        // that fails leaves the ranks in the epoch, and the names of its meshes stay in use.
        if adopted.0 != epoch {
            *adopted = (epoch, HashMap::new());
        }
        let count = adopted.1.entry(ranks.to_vec()).or_default();
        *count += 1;
        let digest = Fnv1a::default().bytes(ranks.iter().flat_map(|rank| rank.to_le_bytes())).value();
        let epoch = match epoch {
            0 => String::new(),
            epoch => format!("e{epoch}-"),
        };
        format!("adopted{epoch}{count}-{}-{digest:016x}", ranks.len())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::view::View;
    use crate::error::Status;

    /// A thread waits for its turn while another thread finalizes the world.
    #[test]
    fn a_turn_in_a_world_that_has_ended_is_an_error() {
        let world = World::join("cpu", &WorldOptions::new(rendezvous::JoinOptions::ranked(0, 1))).unwrap();
        let wait = Wait::after(Duration::from_secs(60));
        drop(world.take_turn_alive(&wait).unwrap());
        world.take_to_finalize();
        assert_eq!(world.take_turn_alive(&wait).map(drop).unwrap_err().status(), Status::Aborted);
        // The turn was given back.
        assert!(world.take_turn(&wait).is_ok());
    }

    /// The keys of the meshes that were there before the recovery stay in the store.
    #[test]
    fn a_recovery_that_fails_gives_no_name_of_an_adopted_mesh_again() {
        let world = World::join("cpu", &WorldOptions::new(rendezvous::JoinOptions::ranked(0, 1))).unwrap();
        let names = [0, 1].map(|_| world.next_adopted(&[0]));
        world.end_epoch();
        assert!(!names.contains(&world.next_adopted(&[0])), "{names:?}");
    }

    /// dm_recover counts the newcomers that wait by the seats of the mesh in each try.
    #[test]
    fn a_first_recovery_that_fails_leaves_the_number_of_seats() {
        let join = rendezvous::JoinOptions::ranked(0, 1);
        let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
        assert_eq!(world.seats_at_start(), None);
        let mesh = View::init(&world, &[1], &["dp"]).unwrap();
        assert_eq!(world.seats_at_start(), Some(1));
        world.end_epoch();
        assert_eq!(world.seats_at_start(), Some(1));
        drop(mesh);
        let mesh = View::init(&world, &[1], &["dp"]).unwrap();
        mesh.root_comms().end_with_world();
        assert_eq!(world.seats_at_start(), None);
    }
}

//! Waits for the work on a stream, against a deadline, and says which rank is to blame when the
//! work cannot be done.
//!
//! A kernel of NCCL that waits for a lost peer spins until its communicator is aborted, and
//! cudaStreamSynchronize waits with it. So this wait asks the stream again and again. Meanwhile it
//! asks the communicators for their asynchronous errors, and the store for lost ranks and for a
//! recovery that another rank has begun, because over NVLink and shared memory NCCL does not notice
//! the end of a peer.
//!
//! Work that is done may still be wrong: a kernel that another rank aborts stops waiting for data
//! and goes through its remaining steps, so over NVLink and shared memory its peers go on with what
//! lies in their buffers, and end without an error. (It was seen on an H100 with four ranks:
//! docs/gpu-results.md.) dm_abort, dm_recover and dm_shrink therefore note in the store that they
//! end the mesh before they abort, and this wait asks the store once more when the work is done.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use super::background::Worker;
use super::communicator::{Communicator, State};
use super::groups::refuse_inside;
use super::view::View;
use crate::ccl::StreamQuery;
use crate::error::{Error, Result, Status};
use crate::events::{Event, Kind, Waiting};
use crate::rank_list::ranges;
use crate::recorder::{self, Group};
use crate::wait::{Deadline, Wait};

/// The shortest pause between two questions to the stream.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
/// The longest pause between two questions to the stream.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// A pause lasts the time that has passed divided by this number. So the wait ends about 3 % late.
const PART_OF_WAIT: u32 = 32;
/// The pause between two questions to the communicators while the stream has work. The questions
/// run on a thread of the wait, because NCCL may not answer them.
const CHECK_AGAIN: Duration = Duration::from_millis(100);
/// After this time a wait is noted for events of slow calls.
const NOTED: Duration = Duration::from_millis(20);
/// The store is asked for the first time after this long, because most waits are shorter.
const FIRST_LOOK: Duration = Duration::from_millis(250);
/// The longest time between two questions to the store. All ranks of a world ask one server.
const LONGEST_LOOK: Duration = Duration::from_secs(2);
/// How long the work may go on after a rank is known to be lost. Work that does not need that
/// rank may end in this time, and the ranks that were lost with it become known.
const GRACE: Duration = Duration::from_secs(1);
/// How long the store may take to answer whether the results are right, also where the deadline
/// comes before that.
const LAST_LOOK: Duration = Duration::from_secs(2);
/// The pause between two questions to the store while a loss is known or suspected.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// The message where the work is done, and the store does not say whether a rank has ended the
/// mesh.
const UNVERIFIED: &str = "the work on the stream is done, but its results may be wrong, because the store does not say whether a rank has ended the mesh";
/// How long the thread of the events looks for ranks that are behind, over all dimensions.
const MOST_SEARCHED: Duration = Duration::from_millis(500);

impl View {
    /// Returns when all work on `stream` is done and no communicator along `dim` has failed.
    /// `None` as `dim` stands for all communicators of the mesh that exist, and `None` as
    /// `timeout` for the mesh's timeout. **Local**: it makes no communicator, and may be called
    /// from several threads.
    ///
    /// `stream` is a `cudaStream_t` or `CUstream` of the program. On the host engine, which has no
    /// streams, it is NULL, and the call returns after one check of the communicators.
    ///
    /// Fails with `DM_STATUS_PEER_LOST` and the ranks when a rank is lost and the work is not done
    /// a second later, and when another rank is in dm_recover and the work is not done. Fails with
    /// `DM_STATUS_TIMEOUT` at the deadline, and with `DM_STATUS_DEVICE` when work on the stream has
    /// failed. The work then stays on the stream until the mesh is aborted.
    /// Fails with `DM_STATUS_PEER_LOST` also when the work is done and a rank is lost or has ended
    /// the mesh by `dm_abort`, `dm_recover` or `dm_shrink`, because the work may have ended by that
    /// abort with wrong results. Fails with `DM_STATUS_STORE` or `DM_STATUS_TIMEOUT` when the work
    /// is done and the store does not say whether a rank has ended the mesh.
    ///
    /// # Safety
    /// `stream` is NULL or a live stream of the communicators' device.
    pub unsafe fn stream_wait(&self, dim: Option<&str>, stream: *mut c_void, timeout: Option<Duration>) -> Result<()> {
        let began = Instant::now();
        let outcome = self.waited_for(dim).and_then(|waited_for| {
            // SAFETY: the caller's contract.
            unsafe { waited_for.wait(stream, timeout) }.map_err(|error| waited_for.explained(error))
        });
        outcome.map_err(|error| error.within("dm_stream_wait").after_waiting(began.elapsed()))
    }

    fn waited_for(&self, dim: Option<&str>) -> Result<WaitedFor<'_>> {
        self.root_comms().alive()?;
        refuse_inside("dm_stream_wait", Some(self.library()?))?;
        if !self.mesh().is_member() {
            return Err(Error::not_member(format!(
                "rank {} is not in {}, so it has no work there",
                self.mesh().rank(),
                self.mesh().describe()
            )));
        }
        let Some(name) = dim else {
            let (communicators, ranks) = (self.communicators_inside(), self.mesh().ranks());
            return Ok(WaitedFor { view: self, dim: None, group: None, communicators, ranks });
        };
        let (mesh, index) = self.mesh().along(Some(name))?;
        let issued = self.space().issued(mesh.dim_name(index), mesh.dim_layout(index));
        let (group, planned) = issued.map(|issued| (issued.group, issued.communicator)).unzip();
        Ok(WaitedFor {
            view: self,
            dim: Some(name.to_owned()),
            group,
            communicators: Vec::from_iter(planned),
            ranks: mesh.group_ranks(index)?.to_vec(),
        })
    }
}

/// Whether a stream is one of the default streams: NULL, `CU_STREAM_LEGACY` or
/// `CU_STREAM_PER_THREAD`.
fn is_default(stream: *mut c_void) -> bool {
    stream.addr() <= 2
}

/// The communicators whose work a stream may hold, and their ranks.
struct WaitedFor<'a> {
    view: &'a View,
    /// The name of the dimension, where the caller gave one.
    dim: Option<String>,
    /// The group along that dimension in the recording.
    group: Option<Arc<Group>>,
    /// The communicators that are asked for their asynchronous errors.
    communicators: Vec<Arc<Communicator>>,
    /// The ranks of the world whose loss ends the wait.
    ranks: Vec<i32>,
}

impl WaitedFor<'_> {
    /// Waits for the stream.
    ///
    /// # Safety
    /// `stream` is NULL or a live stream.
    unsafe fn wait(&self, stream: *mut c_void, timeout: Option<Duration>) -> Result<()> {
        let library = self.view.library()?;
        if library.is_host_engine() {
            return match stream.is_null() {
                true => self.check(None).map(drop),
                false => Err(Error::invalid(format!(
                    "stream is {stream:p}, but device type cpu has no streams: pass NULL (a collective is done when it returns)"
                ))),
            };
        }
        let query = StreamQuery::of(library)?;
        // The default streams are those of the thread's current device.
        if let (true, Some(world)) = (is_default(stream) || !query.has_device()?, self.view.root_comms().world()) {
            world.select_device()?;
        }
        // SAFETY: the caller's contract.
        unsafe { query.check_not_captured(stream)? };
        let (began, deadline) = (Instant::now(), self.view.root_comms().wait(timeout).deadline);
        // SAFETY: the caller's contract.
        let is_done = || unsafe { query.is_done(stream) };
        let worker = Worker::new(library, "dm-background");
        let check = || self.check(Some((&worker, &deadline)));
        let mut look = Look::default();
        let mut next_check = Duration::ZERO;
        let mut slow = None;
        loop {
            let waited = began.elapsed();
            if slow.is_none() && waited >= NOTED {
                slow = Some(Waiting::since(began, self.slow()));
            }
            if is_done()? || waited >= next_check {
                next_check = waited + CHECK_AGAIN;
                let is_issued = check().or_else(|error| self.name_lost(error, &deadline))?;
                // The stream is asked after the communicators: an operation that is not on the
                // stream yet leaves its communicator in progress.
                if is_issued && is_done()? {
                    check()?;
                    return self.is_whole();
                }
                if waited >= FIRST_LOOK {
                    self.check_recovery(waited)?;
                }
            }
            if look.is_due(waited) {
                look.note(self.lost(&deadline), waited);
            }
            if let Some(lost) = look.lost_for(GRACE, waited) {
                return Err(self.peer_lost(lost, waited));
            }
            if deadline.passed() {
                return Err(self.late(&look.lost, &deadline));
            }
            let pause = (waited / PART_OF_WAIT).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            sleep(pause.min(deadline.left()));
        }
    }

    /// Returns the groups for which the wait waits: that of its dimension, or those of the
    /// dimensions of the view for whose number `concerns` is true.
    fn groups(&self, concerns: impl Fn(usize) -> bool) -> Vec<&Arc<Group>> {
        match &self.group {
            Some(group) => vec![group],
            None => (0..self.view.mesh().ndim())
                .filter(|index| concerns(*index))
                .filter_map(|index| self.view.recorded_group(index))
                .collect(),
        }
    }

    /// Describes a wait that lasts for long, on the thread of the events.
    fn slow(&self) -> impl Fn(Duration) -> Option<Event> + Send + Sync + use<> {
        let (root, mesh) = (self.view.root_comms(), self.view.mesh());
        let groups: Vec<Arc<Group>> = self.groups(|_| true).into_iter().cloned().collect();
        let (event, dim, me) = (root.event(Kind::Slow, String::new()), self.dim.clone(), mesh.rank());
        move |waited| {
            let along = dim.as_ref().map_or_else(String::new, |dim| format!(" along {dim}"));
            // The first dimension along which ranks are behind counts, as in the error at the
            // deadline. The search ends after half a second, because other events wait for it.
            let began = Instant::now();
            let groups_in_time = groups.iter().take_while(|_| began.elapsed() < MOST_SEARCHED);
            let mut found = groups_in_time.map(|group| (group, recorder::behind(group)));
            let found = found.find(|(_, (ranks, _))| !ranks.is_empty());
            let group = found.as_ref().map_or_else(|| groups.first(), |(group, _)| Some(*group));
            let (ranks, places) = found.map(|(_, behind)| behind).unwrap_or_default();
            let whom = match &ranks[..] {
                [] => "no rank of this host is behind".to_owned(),
                [_] => format!("{} is behind", ranges(&ranks)),
                _ => format!("{} are behind", ranges(&ranks)),
            };
            let said: Vec<String> = std::iter::once(whom).chain(places).collect();
            let message = format!(
                "rank {me} has waited in dm_stream_wait{along} for {:.1} s: {}",
                waited.as_secs_f64(),
                said.join("; ")
            );
            Some(Event {
                time: SystemTime::now(),
                group: group.map(|group| group.name().to_owned()),
                dimension: dim.clone(),
                operation: Some("dm_stream_wait".to_owned()),
                waited: Some(waited),
                message,
                ..event.clone().about(ranks)
            })
        }
    }

    /// The error of the wait, with its dimension and what the recordings say of the ranks that are
    /// behind along it. A wait without a dimension takes the first dimension of the view along
    /// which ranks are behind.
    fn explained(&self, error: Error) -> Error {
        // All dimensions together have one deadline.
        let reports = self.view.root_comms().reports();
        let explained = |group: &Arc<Group>| match &reports {
            Some(reports) => recorder::explained_with(error.clone(), group, reports),
            None => recorder::explained(error.clone(), group),
        };
        let concerns = |index: usize| {
            let group = self.view.mesh().group_ranks(index);
            error.ranks().is_empty() || group.is_ok_and(|group| error.ranks().iter().any(|rank| group.contains(rank)))
        };
        let said = self.groups(concerns).into_iter().map(explained).find(|said| said.message() != error.message());
        let error = said.unwrap_or(error);
        match &self.dim {
            Some(dim) => error.along(dim),
            None => error,
        }
    }

    /// Fails when the mesh has ended or a communicator has failed. Returns false when an operation
    /// is not on its stream yet. The questions to a library with streams run on the worker, and end
    /// a moment after the deadline at the latest.
    fn check(&self, on: Option<(&Worker, &Deadline)>) -> Result<bool> {
        self.view.root_comms().alive()?;
        let mut is_issued = true;
        for communicator in &self.communicators {
            if matches!(communicator.state(), State::Unmade | State::Absent) {
                continue;
            }
            let left = on.map_or(Duration::MAX, |(_, deadline)| deadline.left());
            // An answer takes a moment, also when the deadline has passed.
            let wait = Wait::after(communicator.patience().min(left.max(CHECK_AGAIN)));
            is_issued &= communicator.poll_by(&wait, on.map(|(worker, _)| worker))?;
        }
        Ok(is_issued)
    }

    /// Fails where a rank is lost or has ended the mesh by dm_abort, dm_recover or dm_shrink, so
    /// that work which is done may have wrong results. A rank notes that in the store before it
    /// aborts its communicators. Fails also where the store does not say whether there is a note,
    /// because nobody knows then whether the results are right.
    fn is_whole(&self) -> Result<()> {
        let root = self.view.root_comms();
        let Some(world) = root.world().filter(|world| !world.rendezvous().is_offline()) else { return Ok(()) };
        let wait = Wait { deadline: Deadline::after(LAST_LOOK), ..root.wait(None) };
        let lost = self.lost(&wait.deadline);
        if !lost.is_empty() {
            let message =
                format!("{} before the work on the stream was done, so its results may be wrong", said(&lost));
            return Err(Error::new(Status::PeerLost, message).with_lost(&lost));
        }
        let departed = world.departed_from(&self.communicators, &wait);
        let mut departed = departed.map_err(|error| match error.status() {
            Status::Aborted => error,
            _ => error.within(UNVERIFIED),
        })?;
        departed.retain(|rank| self.ranks.contains(rank));
        departed.sort_unstable();
        departed.dedup();
        if departed.is_empty() {
            return Ok(());
        }
        let have = if departed.len() == 1 { "has" } else { "have" };
        let message = format!(
            "{} {have} ended the mesh by dm_abort, dm_recover or dm_shrink, so the results of the work on the stream may be wrong",
            ranges(&departed)
        );
        Err(Error::new(Status::PeerLost, message).with_ranks(&departed))
    }

    /// Returns the ranks that are lost as far as the store knows. Where the store does not answer,
    /// returns no rank.
    fn lost(&self, deadline: &Deadline) -> Vec<i32> {
        let world = self.view.root_comms().world().filter(|world| !world.rendezvous().is_offline());
        let wait = Wait { deadline: *deadline, ..self.view.root_comms().wait(None) };
        let mut lost = world.and_then(|world| world.rendezvous().lost_ranks(&wait).ok()).unwrap_or_default();
        lost.retain(|rank| self.ranks.contains(rank));
        lost.sort_unstable();
        lost
    }

    /// The error of a communicator that has failed because a rank is lost, with the rank. NCCL does
    /// not say which rank it is, and the store may hear of the loss a moment later than NCCL.
    fn name_lost<T>(&self, error: Error, deadline: &Deadline) -> Result<T> {
        if error.status() != Status::PeerLost || !error.ranks().is_empty() {
            return Err(error);
        }
        let patience = Deadline::after(GRACE.min(deadline.left()));
        loop {
            let lost = self.lost(&patience);
            if !lost.is_empty() {
                return Err(error.within(&said(&lost)).with_lost(&lost));
            }
            if patience.passed() {
                return Err(error);
            }
            sleep(LOOK_AGAIN.min(patience.left()));
        }
    }

    fn peer_lost(&self, lost: &[i32], waited: Duration) -> Error {
        let message = format!(
            "{}, and the work on the stream was not done after {:.1} s: dm_abort ends the work, dm_shrink makes a mesh of the ranks that are left",
            said(lost),
            waited.as_secs_f64()
        );
        Error::new(Status::PeerLost, message).with_lost(lost)
    }

    /// Fails where another rank has begun a recovery, as far as this rank knows. A rank that the
    /// work needs may then never make its call.
    fn check_recovery(&self, waited: Duration) -> Result<()> {
        let world = self.view.root_comms().world();
        let Some((reason, rank)) = world.and_then(|world| world.rendezvous().begun_recovery()) else { return Ok(()) };
        let message = format!(
            "{reason}, and the work on the stream was not done after {:.1} s: dm_recover ends the work",
            waited.as_secs_f64()
        );
        Err(Error::new(Status::PeerLost, message).with_ranks(&[rank]))
    }

    fn late(&self, lost: &[i32], deadline: &Deadline) -> Error {
        if !lost.is_empty() {
            return self.peer_lost(lost, deadline.timeout());
        }
        let of_dim = self.dim.as_ref().map_or_else(String::new, |dim| format!(" (dimension {dim})"));
        Error::timeout(format!(
            "the work on the stream{of_dim} was not done after {} ms; no rank is known to be lost and no communicator has failed: wait again, or end the work with dm_abort",
            deadline.timeout().as_millis()
        ))
    }
}

/// Says which ranks were lost.
fn said(lost: &[i32]) -> String {
    format!("{} {} lost", ranges(lost), if lost.len() == 1 { "was" } else { "were" })
}

/// When the store is asked, and what it has said.
struct Look {
    /// How long the wait has lasted when the store is asked next.
    next: Duration,
    /// The lost ranks that the store named last.
    lost: Vec<i32>,
    /// How long the wait had lasted when the first loss became known.
    since: Option<Duration>,
}

impl Default for Look {
    fn default() -> Look {
        Look { next: FIRST_LOOK, lost: Vec::new(), since: None }
    }
}

impl Look {
    fn is_due(&self, waited: Duration) -> bool {
        waited >= self.next
    }

    fn note(&mut self, lost: Vec<i32>, waited: Duration) {
        if !lost.is_empty() {
            self.since.get_or_insert(waited);
            self.lost = lost;
        }
        self.next = waited + if self.since.is_some() { LOOK_AGAIN } else { (waited / 2).min(LONGEST_LOOK) };
    }

    /// Returns the lost ranks, when the first of them has been known for `grace`.
    fn lost_for(&self, grace: Duration, waited: Duration) -> Option<&[i32]> {
        self.since.filter(|since| waited >= *since + grace).map(|_| &self.lost[..])
    }
}

//! Groups: the calls of a thread between `ncclGroupStart` and `ncclGroupEnd` are collected, then
//! driven together in lanes.
//!
//! The collectives of one communicator under one name share a lane. So do the messages to one peer,
//! and the messages from one peer. Calls in different lanes make progress side by side, so no order
//! of sends and receives in a group can deadlock. A lane waits for its turn behind other threads'
//! calls by itself, while it holds no other turn, so no circle of waiting threads can arise.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::blame::Blame;
use crate::call_name::NO_TAG;
use crate::error::{Error, Result};
use crate::fork;
use crate::handle::{DrivenHere, Handle, WithoutThread};
use crate::machine;
use crate::message::{Message, Side};
use crate::places::Place;
use crate::progress::{self, Drive, Holder, Lane};
use crate::raw_record::RawRecord;
use crate::recorder;
use crate::task::Task;
use crate::thread;
use crate::timeout;
use crate::types::*;

/// The open group of a thread.
#[derive(Default)]
struct Group {
    /// How many groups are open, one inside the other; 0 outside a group.
    depth: usize,
    /// The calls that were collected, in their order.
    tasks: Vec<Task>,
    /// The error of the first call that could not be made.
    error: Option<Error>,
    /// The calls without a name, in the recording of this process.
    recorded: Vec<RawRecord>,
}

impl Drop for Group {
    /// Fails the communicators of the collected calls when the thread ends inside a group, because
    /// peers wait for these calls.
    fn drop(&mut self) {
        if self.depth == 0 {
            return;
        }
        // A forked child has none of the shared memory that the calls use. The parent still has the
        // calls.
        if fork::is_child() {
            let tasks = Box::new(std::mem::take(&mut self.tasks));
            return OF_PARENT.store(Box::into_raw(tasks), Ordering::Relaxed);
        }
        for task in &mut self.tasks {
            if let Task::Init(init) = task {
                init.forget_place();
            }
        }
        let describe = |task: &Task| {
            let comm = match task {
                // Other ranks wait for the call in the communicator of its lane.
                Task::Init(init) => init.lane()?.0,
                Task::Child(child) => child.name().map(|_| child.parent()).filter(|parent| !parent.is_revoked())?,
                task => task.operation().comm()?,
            };
            Some((Arc::clone(comm), task.operation().describe()))
        };
        let queued: Vec<_> = self.tasks.iter().filter_map(describe).collect();
        for (comm, call) in &queued {
            let message = format!(
                "a thread of {} ended inside a group, with {} operations queued and not done, among them {call}: every ncclGroupStart or dm_group_start needs its end",
                comm.describe(comm.rank),
                queued.len()
            );
            comm.fail(ncclInvalidUsage, Blame::of([comm.rank]), &message);
        }
    }
}

/// In a forked child: the calls of a group that the parent had open. They must not be dropped
/// there, because the drop would use memory that the child has not mapped. They stay reachable, so
/// that tools that look for leaks do not report them. Nobody reads them, so without `used` the
/// compiler leaves them out.
#[used]
static OF_PARENT: AtomicPtr<Vec<Task>> = AtomicPtr::new(null_mut());

/// The note in the error of a group that performed no call.
const NOTHING_DONE: &str = "nothing of this group was performed";
/// The note in the error of a group that failed on one of its communicators.
const OTHERS_DONE: &str = "the calls of this group on other communicators were performed, unless they failed, too";

thread_local! {
    static GROUP: RefCell<Group> = RefCell::new(Group::default());
    /// Whether calls that end in the background get no thread of their own.
    static WITHOUT_THREADS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `begin`. The function `begin` makes one call, outside a group, that starts the making of a
/// non-blocking communicator. The engine starts no thread for this call. The call makes progress
/// only while a thread waits by [`hostcclCommWait`](crate::hostcclCommWait) on the communicator, or
/// on the parent of a split or shrink. The other ranks wait meanwhile. Therefore the waiting thread
/// must do nothing else for long.
pub fn without_thread<T>(begin: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            WITHOUT_THREADS.set(self.0);
        }
    }
    let _before = Before(WITHOUT_THREADS.replace(true));
    begin()
}

/// Starts a group. Where a group is open, the new group is inside it.
pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Ends a group. The end of the outermost group performs its calls.
pub(crate) fn end() -> Result<ncclResult_t> {
    let whole = GROUP.with_borrow_mut(|group| {
        match group.depth {
            0 => return Err(Error::usage("there is no ncclGroupStart before this ncclGroupEnd")),
            1 => {}
            _ => {
                group.depth -= 1;
                return Ok(None);
            }
        }
        group.depth = 0;
        Ok(Some(std::mem::take(group)))
    })?;
    match whole {
        None => Ok(ncclSuccess),
        Some(mut group) => match group.error.take() {
            Some(error) => Err(error.noting(NOTHING_DONE)),
            None => {
                RawRecord::start_all(&group.recorded);
                let done = perform(std::mem::take(&mut group.tasks))?;
                // A call with a name is recorded by the library, which asks later whether it
                // waited.
                if !group.recorded.is_empty() {
                    let wait = recorder::take_wait();
                    group.recorded.drain(..).for_each(|recorded| recorded.done(wait));
                }
                Ok(done)
            }
        },
    }
}

/// Whether the calling thread has begun a group and not ended it.
pub(crate) fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// Ends the recording of a call that was submitted with that outcome. In a group (`is_queued`) the
/// end of the group does so. `recorded` is `None` for a call that is not recorded here.
#[inline]
pub(crate) fn settle(
    recorded: Option<RawRecord>,
    is_queued: bool,
    outcome: Result<ncclResult_t>,
) -> Result<ncclResult_t> {
    let Some(recorded) = recorded else { return outcome };
    let done = outcome?;
    match is_queued {
        true => GROUP.with_borrow_mut(|group| group.recorded.push(recorded)),
        false => recorded.done(recorder::take_wait()),
    }
    Ok(done)
}

/// Makes the open group fail at its end with `error`. Does nothing when no group is open.
pub(crate) fn fail(error: Error) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.error.get_or_insert(error);
        }
    });
}

/// Performs calls at once, or collects them inside a group. A call that cannot be made fails the
/// group.
pub(crate) fn submit(make: impl FnOnce() -> Result<Vec<Task>>) -> Result<ncclResult_t> {
    let timeout = timeout::take_next();
    let mut made = make();
    made.iter_mut().flatten().for_each(|task| task.set_timeout(timeout));
    if !is_open() {
        return perform(made?);
    }
    match made {
        Ok(tasks) => tasks.into_iter().try_fold(ncclSuccess, |_, task| collect(Ok(task))),
        Err(error) => collect(Err(error)),
    }
}

/// Adds a call to the open group. If the call could not be made, its error becomes the group's
/// error, unless the group has one.
// Calls outside of groups are quicker without this code in them.
#[inline(never)]
fn collect(made: Result<Task>) -> Result<ncclResult_t> {
    GROUP.with_borrow_mut(|group| {
        debug_assert!(group.depth > 0, "a call is collected, and no group is open");
        match made {
            Ok(task) => {
                group.tasks.push(task);
                Ok(ncclSuccess)
            }
            Err(error) => {
                group.error.get_or_insert_with(|| error.clone());
                Err(error)
            }
        }
    })
}

/// Does what [`submit`] does for one collective or message. Outside a group (`is_queued` is
/// `false`) it makes no lists and no lanes.
#[inline]
pub(crate) fn submit_one(is_queued: bool, make: impl FnOnce() -> Result<Task>) -> Result<ncclResult_t> {
    let timeout = timeout::take_next();
    let mut made = make();
    if let (Some(_), Ok(task)) = (timeout, &mut made) {
        task.set_timeout(timeout);
    }
    if is_queued {
        return collect(made);
    }
    // A task is large, so it stays where it was made.
    let task = match &mut made {
        Ok(task) => task,
        Err(_) => return made.map(|_| ncclSuccess),
    };
    match task {
        Task::Collective(collective) => progress::run(collective)?,
        Task::Spanning(collective) => {
            // The clocks of two hosts are compared by the times of such calls.
            recorder::note_begun();
            progress::run(&mut **collective)?;
        }
        Task::Message(message) if !is_to_self(message) => progress::run(message)?,
        Task::Remote(message) => progress::run(message)?,
        // Outside a group, a message of a rank to itself meets no other call. `perform` reports
        // this error.
        Task::Message(_) | Task::Init(_) | Task::Child(_) => return perform(vec![made?]),
    }
    Ok(ncclSuccess)
}

/// Performs calls. A call that does not block is left to a thread in the background, or gets no
/// thread ([`without_thread`]). The other calls are performed here. A split that shares its lane
/// with a collective is performed here, because two threads may not be in one lane.
fn perform(tasks: Vec<Task>) -> Result<ncclResult_t> {
    check_to_self(&tasks)?;
    if tasks.iter().all(Task::blocks) {
        return drive(tasks).map(|()| ncclSuccess);
    }
    let lanes_here: Vec<_> = tasks.iter().filter(|task| task.blocks()).filter_map(Task::lane).collect();
    let (tasks, mut background): (Vec<Task>, Vec<Task>) =
        tasks.into_iter().partition(|task| task.blocks() || task.lane().is_some_and(|lane| lanes_here.contains(&lane)));
    let in_progress = !background.is_empty();
    let mut started = Ok(());
    if in_progress {
        for task in &mut background {
            if let Task::Child(child) = task {
                child.begin();
            }
        }
        if tasks.is_empty() && background.len() == 1 && WITHOUT_THREADS.get() {
            background = background.into_iter().filter_map(keep_without_thread).collect();
            if background.is_empty() {
                return Ok(ncclInProgress);
            }
        }
        // The tasks are left here when there is no thread for them.
        let background = Arc::new(Mutex::new(background));
        let theirs = Arc::clone(&background);
        // The handles keep the outcomes of the tasks.
        let work = move || {
            let tasks = std::mem::take(&mut *theirs.lock().unwrap_or_else(PoisonError::into_inner));
            let _here = DrivenHere::new(tasks.iter().flat_map(handles));
            drop(drive(tasks));
        };
        started = thread::spawn("dm-make-comm", work).map(drop).map_err(|reason| {
            let error = Error::new(ncclSystemError, machine::no_thread(&reason));
            let mut refused = background.lock().unwrap_or_else(PoisonError::into_inner);
            let failed: BTreeSet<usize> = refused.iter().filter_map(Task::lane).map(|(comm, ..)| comm).collect();
            for task in refused.iter_mut() {
                match task {
                    Task::Init(init) => init.refuse(&error),
                    Task::Child(child) => child.refuse(&error),
                    Task::Collective(_) | Task::Spanning(_) | Task::Message(_) | Task::Remote(_) => {}
                }
            }
            let is_other = |task: &Task| task.lane().is_none_or(|(comm, ..)| !failed.contains(&comm));
            if tasks.iter().any(is_other) { error.noting(OTHERS_DONE) } else { error }
        });
    }
    let driven = drive(tasks);
    started.and(driven)?;
    Ok(if in_progress { ncclInProgress } else { ncclSuccess })
}

/// The handles that get the outcome of a task in the background. A thread that waits for the task
/// waits on the first of these handles.
fn handles(task: &Task) -> Vec<&Arc<Handle>> {
    match task {
        Task::Init(init) => vec![init.handle()],
        Task::Child(child) => child.handles().into(),
        Task::Collective(_) | Task::Spanning(_) | Task::Message(_) | Task::Remote(_) => Vec::new(),
    }
}

/// A task in the background that has no thread of its own.
struct TaskWithoutThread {
    task: Task,
    drive: Drive,
}

impl WithoutThread for TaskWithoutThread {
    fn drive_until(
        mut self: Box<Self>,
        end: Instant,
        is_unwanted: &dyn Fn() -> bool,
    ) -> Option<Box<dyn WithoutThread>> {
        let handles: Vec<Arc<Handle>> = handles(&self.task).into_iter().map(Arc::clone).collect();
        let _here = DrivenHere::new(handles.iter());
        match self.drive.until(end, self.task.operation_mut()) {
            Ok(false) if !is_unwanted() => Some(self),
            // Where the wait itself fails, the communicator has failed. The handles get that
            // failure when the task is dropped.
            _ => {
                drop(self);
                None
            }
        }
    }
}

/// Gives a task to its first handle, which keeps the task until it is over. Returns the task if
/// that handle does not take it.
fn keep_without_thread(task: Task) -> Option<Task> {
    let Some(handle) = handles(&task).first().map(|handle| Arc::clone(handle)) else { return Some(task) };
    let kept = handle.without_thread.keep(TaskWithoutThread { task, drive: Drive::default() });
    kept.err().map(|refused| refused.task)
}

/// Sorts calls into lanes and drives the lanes to their ends. When a message of a rank to itself
/// fails, the other lanes are driven before this function returns that failure.
fn drive(tasks: Vec<Task>) -> Result<()> {
    let mut tasks: Vec<Option<Task>> = tasks.into_iter().map(Some).collect();
    let to_self = take_to_self(&mut tasks);
    let delivered = deliver_to_self(&to_self);
    let mut lanes: Vec<Lane<'_, Task>> = Vec::new();
    let mut lane_of: BTreeMap<(usize, Place, u64), usize> = BTreeMap::new();
    for slot in &mut tasks {
        let Some(task) = slot.as_ref() else { continue };
        let (key, next) = (task.lane(), lanes.len());
        let lane = key.map_or(next, |key| *lane_of.entry(key).or_insert(next));
        match lanes.get_mut(lane) {
            Some(lane) => lane.push(slot),
            // A shrink does not need the ranks for which another shrink of the parent waits.
            None if matches!(key, Some((.., NO_TAG))) => lanes.push(Lane::new(slot).going_on_after_failure()),
            None => lanes.push(Lane::new(slot)),
        }
    }
    let driven = progress::run_all(&mut lanes);
    delivered.and(driven).map_err(|error| {
        let to_self = to_self.into_keys().map(|(comm, _)| comm);
        let comms: BTreeSet<usize> = lane_of.keys().map(|(comm, ..)| *comm).chain(to_self).collect();
        if comms.len() > 1 { error.noting(OTHERS_DONE) } else { error }
    })
}

/// Whether a rank sends the message to itself, or receives it from itself.
fn is_to_self(message: &Message) -> bool {
    message.peer() == message.communicator().rank
}

/// The address of a message's communicator, and the tag of the message's name. Messages of one name
/// belong together.
type Pairing = (usize, u64);

fn pairing(message: &Message) -> Pairing {
    (Arc::as_ptr(message.communicator()).addr(), message.name().tag)
}

/// The messages that ranks send to themselves: the sends and the receives.
type ToSelf = BTreeMap<Pairing, (Vec<Message>, Vec<Message>)>;

/// Fails if, on some communicator and under some name, a rank sends itself more or fewer messages
/// than it receives from itself. Runs before any call of the group begins.
fn check_to_self(tasks: &[Task]) -> Result<()> {
    let mut counts: BTreeMap<Pairing, (&Message, [usize; 2])> = BTreeMap::new();
    for task in tasks {
        let Task::Message(message) = task else { continue };
        if is_to_self(message) {
            let (_, counts) = counts.entry(pairing(message)).or_insert((message, [0; 2]));
            counts[usize::from(matches!(message.side(), Side::Recv(_)))] += 1;
        }
    }
    let Some((any, [sent, received])) = counts.values().find(|(_, [sent, received])| sent != received) else {
        return Ok(());
    };
    let error = Error::usage(format!(
        "messages of {} to itself{} in one group: {sent} sent and {received} received; each send and its receive belong in one group",
        any.communicator().own_label(),
        any.name().along(),
    ));
    Err(if tasks.len() > 1 { error.noting(NOTHING_DONE) } else { error })
}

/// Removes the messages that ranks send to themselves from the list.
fn take_to_self(tasks: &mut [Option<Task>]) -> ToSelf {
    let mut to_self = ToSelf::new();
    for slot in tasks {
        let own = slot.take_if(|task| matches!(task, Task::Message(message) if is_to_self(message)));
        if let Some(Task::Message(message)) = own {
            let (sends, receives) = to_self.entry(pairing(&message)).or_default();
            if matches!(message.side(), Side::Send(_)) { sends.push(message) } else { receives.push(message) }
        }
    }
    to_self
}

/// Delivers the messages that ranks send to themselves. On each communicator and under each name,
/// the n-th send belongs to the n-th receive. Returns the first failure, after the messages of the
/// other communicators and names.
fn deliver_to_self(to_self: &ToSelf) -> Result<()> {
    let mut delivered = Ok(());
    for (sends, receives) in to_self.values() {
        let mut pairs = sends.iter().zip(receives);
        delivered = delivered.and(pairs.try_for_each(|(send, receive)| send.deliver(receive)));
    }
    delivered
}

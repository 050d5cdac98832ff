//! Groups: the calls of a thread between `ncclGroupStart` and `ncclGroupEnd` are collected, then
//! driven together in lanes.
//!
//! The collectives of one communicator under one name share a lane. So do the messages to one peer,
//! and the messages from one peer. Calls in different lanes make progress side by side, so no order
//! of sends and receives in a group can deadlock. A lane waits for its turn behind other threads'
//! calls by itself, while it holds no other turn, so no circle of waiting threads can arise.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::blame::Blame;
use crate::call_name::Name;
use crate::collective::{Call, Collective, Ragged};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::handle;
use crate::hosts::Spanning;
use crate::machine;
use crate::message::{Message, Side};
use crate::operation::Operation;
use crate::places::Place;
use crate::poll::Poll;
use crate::progress::{self, Lane};
use crate::raw_record::RawRecord;
use crate::recorder;
use crate::remote_message::RemoteMessage;
use crate::setup::{ChildInit, Init};
use crate::thread;
use crate::turn::Pass;
use crate::types::*;

/// One call of a group.
#[allow(clippy::large_enum_variant, reason = "the larger ones are common, and outside a group they live on the stack")]
pub(crate) enum Task {
    /// The call joins a communicator by a unique id, or grows one.
    Init(Init),
    /// The call makes a communicator of ranks of another one.
    Child(ChildInit),
    /// The call is a collective among ranks that share a segment.
    Collective(Collective),
    /// The call is a collective over several hosts.
    Spanning(Box<Spanning>),
    /// The call is a send or a receive.
    Message(Message),
    /// The call is a send to a rank of another host, or a receive from one.
    Remote(RemoteMessage),
}

impl Task {
    /// Returns a collective that has not begun. `ragged` has the counts where each rank has its
    /// own. Fails when the communicator takes no more calls.
    ///
    /// # Safety
    /// The buffers hold what the call says, and stay valid until the collective is dropped.
    #[inline]
    pub(crate) unsafe fn collective(comm: Arc<Comm>, call: Call, ragged: Option<Ragged>, name: Name) -> Result<Task> {
        // SAFETY: the caller's contract.
        unsafe {
            match comm.span {
                None => Ok(Task::Collective(Collective::new(comm, call, ragged.map(Box::new), name)?)),
                Some(_) => Ok(Task::Spanning(Box::new(Spanning::new(comm, call, ragged, name)?))),
            }
        }
    }

    /// The lane in which the call takes place. Calls with the same lane take place one after
    /// another. `None` for a call that depends on no other one.
    fn lane(&self) -> Option<(usize, Place, u64)> {
        let (comm, place, name) = match self {
            Task::Init(init) => init.lane().map(|(comm, name)| (comm, Place::Collectives, name))?,
            Task::Child(child) => (child.parent(), Place::Collectives, child.name()?),
            Task::Collective(collective) => (collective.comm()?, Place::Collectives, *collective.name()),
            Task::Spanning(collective) => (collective.comm()?, Place::Collectives, *collective.name()),
            Task::Message(message) => (message.communicator(), message.place(), *message.name()),
            Task::Remote(message) => {
                // These places only sort calls into lanes. Ranks of other hosts come after the
                // seats of this one.
                let (comm, peer) = (message.communicator(), message.communicator().nranks + message.peer());
                let place = if matches!(message.side(), Side::Send(_)) { Place::To(peer) } else { Place::From(peer) };
                (comm, place, *message.name())
            }
        };
        Some((Arc::as_ptr(comm).addr(), place, name.tag))
    }

    /// Whether the call takes place in the thread that ends the group. The others take place in the
    /// background.
    fn blocks(&self) -> bool {
        match self {
            Task::Init(init) => init.blocking(),
            Task::Child(child) => child.blocking(),
            Task::Collective(_) | Task::Spanning(_) | Task::Message(_) | Task::Remote(_) => true,
        }
    }

    fn operation(&self) -> &dyn Operation {
        match self {
            Task::Init(init) => init,
            Task::Child(child) => child,
            Task::Collective(collective) => collective,
            Task::Spanning(collective) => &**collective,
            Task::Message(message) => message,
            Task::Remote(message) => message,
        }
    }

    fn operation_mut(&mut self) -> &mut dyn Operation {
        match self {
            Task::Init(init) => init,
            Task::Child(child) => child,
            Task::Collective(collective) => collective,
            Task::Spanning(collective) => &mut **collective,
            Task::Message(message) => message,
            Task::Remote(message) => message,
        }
    }
}

impl Operation for Task {
    fn poll(&mut self) -> Result<Poll> {
        self.operation_mut().poll()
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.operation().comm()
    }

    fn connection(&self) -> Option<(RawFd, bool)> {
        self.operation().connection()
    }

    fn timeout(&self) -> Option<Duration> {
        self.operation().timeout()
    }

    fn default_timeout(&self) -> Option<Duration> {
        self.operation().default_timeout()
    }

    fn describe(&self) -> String {
        self.operation().describe()
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        self.operation_mut().pass()
    }

    fn end(&mut self) -> Result<()> {
        self.operation_mut().end()
    }
}

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
        for task in &mut self.tasks {
            if let Task::Init(init) = task {
                init.forget_place();
            }
        }
        let describe = |task: &Task| match task {
            Task::Collective(collective) => Some((Arc::clone(collective.comm()?), collective.describe())),
            Task::Spanning(collective) => Some((Arc::clone(collective.comm()?), collective.describe())),
            Task::Message(message) => Some((Arc::clone(message.communicator()), message.describe())),
            Task::Remote(message) => Some((Arc::clone(message.communicator()), message.describe())),
            Task::Init(_) | Task::Child(_) => None,
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

thread_local! {
    static GROUP: RefCell<Group> = RefCell::new(Group::default());
}

/// Starts a group, or one inside the open group.
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
            Some(error) => Err(error),
            None => {
                group.recorded.iter().for_each(RawRecord::start);
                let done = perform(std::mem::take(&mut group.tasks))?;
                // A call with a name is recorded by the library, which asks later whether it waited.
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
/// end of the group does so.
pub(crate) fn settle(recorded: RawRecord, is_queued: bool, outcome: Result<ncclResult_t>) -> Result<ncclResult_t> {
    let done = outcome?;
    match is_queued {
        _ if recorded.is_none() => {}
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
    if !is_open() {
        return perform(make()?);
    }
    match make() {
        Ok(tasks) => tasks.into_iter().try_fold(ncclSuccess, |_, task| collect(Ok(task))),
        Err(error) => collect(Err(error)),
    }
}

/// Adds a call to the open group, or the error of one that cannot be made.
#[inline(never)]
fn collect(made: Result<Task>) -> Result<ncclResult_t> {
    GROUP.with_borrow_mut(|group| match made {
        Ok(task) => {
            group.tasks.push(task);
            Ok(ncclSuccess)
        }
        Err(error) => {
            group.error.get_or_insert_with(|| error.clone());
            Err(error)
        }
    })
}

/// Does what [`submit`] does for one collective or message. Outside a group (`is_queued` is
/// `false`) it makes no lists and no lanes.
#[inline]
pub(crate) fn submit_one(is_queued: bool, make: impl FnOnce() -> Result<Task>) -> Result<ncclResult_t> {
    let made = make();
    if is_queued {
        return collect(made);
    }
    match made? {
        Task::Collective(mut collective) => progress::run(&mut collective)?,
        Task::Spanning(mut collective) => {
            // The clocks of two hosts are compared by the times of such calls.
            recorder::note_begun();
            progress::run(&mut *collective)?;
        }
        Task::Message(mut message) if !is_to_self(&message) => progress::run(&mut message)?,
        Task::Remote(mut message) => progress::run(&mut message)?,
        // A message to its own rank meets no other call outside a group, which is an error.
        task @ (Task::Message(_) | Task::Init(_) | Task::Child(_)) => return perform(vec![task]),
    }
    Ok(ncclSuccess)
}

/// Performs calls: those that do not block in a thread in the background, the others here. A split
/// that shares its lane with a collective is performed here, because two threads may not be in one
/// lane.
fn perform(tasks: Vec<Task>) -> Result<ncclResult_t> {
    if tasks.iter().all(Task::blocks) {
        return drive(tasks).map(|()| ncclSuccess);
    }
    let lanes_here: Vec<_> = tasks.iter().filter(|task| task.blocks()).filter_map(Task::lane).collect();
    let (tasks, mut background): (Vec<Task>, Vec<Task>) =
        tasks.into_iter().partition(|task| task.blocks() || task.lane().is_some_and(|lane| lanes_here.contains(&lane)));
    let in_progress = !background.is_empty();
    if in_progress {
        for task in &mut background {
            if let Task::Child(child) = task {
                child.begin();
            }
        }
        // The tasks are left here when there is no thread for them.
        let background = Arc::new(Mutex::new(background));
        let theirs = Arc::clone(&background);
        // The handles keep the outcomes of the tasks.
        let work = move || {
            let tasks = std::mem::take(&mut *theirs.lock().unwrap_or_else(PoisonError::into_inner));
            let handles = tasks.iter().flat_map(|task| match task {
                Task::Init(init) => vec![init.handle()],
                Task::Child(child) => child.handles().into(),
                Task::Collective(_) | Task::Spanning(_) | Task::Message(_) | Task::Remote(_) => Vec::new(),
            });
            handle::drive_here(handles);
            drop(drive(tasks));
        };
        thread::spawn("dm-make-comm", work).map_err(|reason| {
            let error = Error::new(ncclSystemError, machine::no_thread(&reason));
            for task in background.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
                if let Task::Init(init) = task {
                    init.refuse(&error);
                }
            }
            error
        })?;
    }
    drive(tasks)?;
    Ok(if in_progress { ncclInProgress } else { ncclSuccess })
}

/// Sorts calls into lanes and drives the lanes to their ends.
fn drive(tasks: Vec<Task>) -> Result<()> {
    let mut tasks: Vec<Option<Task>> = tasks.into_iter().map(Some).collect();
    deliver_to_self(&mut tasks)?;
    let mut lanes: Vec<Lane<'_, Task>> = Vec::new();
    let mut lane_of: BTreeMap<(usize, Place, u64), usize> = BTreeMap::new();
    for slot in &mut tasks {
        let Some(task) = slot.as_ref() else { continue };
        let next = lanes.len();
        let lane = task.lane().map_or(next, |lane| *lane_of.entry(lane).or_insert(next));
        match lanes.get_mut(lane) {
            Some(lane) => lane.push(slot),
            None => lanes.push(Lane::new(slot)),
        }
    }
    progress::run_all(&mut lanes)
}

/// Whether a rank sends the message to itself, or receives it from itself.
fn is_to_self(message: &Message) -> bool {
    message.peer() == message.communicator().rank
}

/// Performs the messages of ranks to themselves, and takes them out of the list. The first send
/// belongs to the first receive, and so on.
fn deliver_to_self(tasks: &mut [Option<Task>]) -> Result<()> {
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for slot in tasks {
        match slot.take_if(|task| matches!(task, Task::Message(message) if is_to_self(message))) {
            Some(Task::Message(message)) if matches!(message.side(), Side::Send(_)) => sends.push(message),
            Some(Task::Message(message)) => receives.push(message),
            _ => {}
        }
    }
    // The sorts keep the order of the messages of one communicator.
    let comm = |message: &Message| Arc::as_ptr(message.communicator()).addr();
    sends.sort_by_key(comm);
    receives.sort_by_key(comm);
    if !sends.iter().map(comm).eq(receives.iter().map(comm)) {
        let all = sends.iter().chain(&receives).map(comm);
        let of = |list: &[Message], wanted| list.iter().filter(|message| comm(message) == wanted).count();
        let counts =
            all.map(|wanted| (of(&sends, wanted), of(&receives, wanted))).find(|(sends, receives)| sends != receives);
        let (sends, receives) = counts.unwrap_or((sends.len(), receives.len()));
        return Err(Error::usage(format!(
            "this rank's messages to itself on one communicator do not match, {sends} sent and {receives} received: a send and its receive belong in one group"
        )));
    }
    for (send, receive) in sends.iter().zip(&receives) {
        send.deliver(receive)?;
    }
    Ok(())
}

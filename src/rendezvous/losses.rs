//! The processes of the world that are lost, as far as this rank knows. The store tells who is lost
//! where the store can know it. Otherwise the ranks of each host watch each other's processes.
//!
//! A rank that is lost may come back as another process (incarnation.rs). So the list has
//! processes, and whoever asks says which process of a rank is meant.
//!
//! The key `<prefix>/lost` counts the lost processes, and `<prefix>/lost/<k>` holds the k-th one
//! (agreement/notes.rs). A server of this library writes these keys when the connections of a rank
//! end. It also fills the gap that a rank may leave when the rank ends while it announces a loss. A
//! rank that adds a note fills all other gaps. The list also has the notes that a rank has come to
//! a turn (turns.rs). On any other store each rank leaves its process number under the name of its
//! host, and a rank that waits for long looks whether the processes of its own host live.

mod local_ranks;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::local_ranks::LocalRanks;
use super::agreement::{WorldKeys, add_note, fill_gaps, note_key};
use super::incarnation::Incarnation;
use super::store::{Store, split_last_word};
use super::turns::{Turn, Turns};
use crate::error::{Result, Status};
use crate::wait::{Deadline, Wait};

/// How long it may take to write or read a note of a lost rank.
const SHORT: Duration = Duration::from_millis(500);

/// How long after a failed announcement of a loss the next attempt follows.
const AGAIN: Duration = Duration::from_secs(2);

/// When no further loss follows for this long, no more losses are expected.
const QUIET: Duration = Duration::from_millis(50);

/// The longest time for which a call that has found a loss waits for further losses.
const LONGEST_WAIT_FOR_QUIET: Duration = Duration::from_millis(250);

/// The processes of one world that are lost, as far as this rank knows.
pub(super) struct Losses {
    /// The store that has the notes.
    store: Arc<dyn Store>,
    /// The keys of the world begin with this prefix.
    prefix: String,
    /// This process.
    me: Incarnation,
    /// The losses that were read so far.
    known: Mutex<Known>,
    /// The ranks of this host; `None` where the store itself knows who is lost, and where this
    /// process cannot see the processes of its host.
    local_ranks: Option<LocalRanks>,
    /// The turns of the world, of which notes in the same list tell.
    turns: Turns,
    /// The last deadlocks between calls of this world of which this rank's caller was told. The
    /// list is kept here, because every scope of the world has this value.
    told_deadlocks: Mutex<VecDeque<String>>,
}

/// How many deadlocks are remembered. A rank that makes this many further calls that end in a
/// deadlock is told of an older one twice.
const DEADLOCKS: usize = 64;

/// The losses that this rank knows of.
#[derive(Default)]
struct Known {
    /// The lost processes, in the order in which this rank has learned of them.
    processes: Vec<Incarnation>,
    /// How many of the notes in the store were read. This number may differ from the number of
    /// processes, because this rank learns of some losses without a note.
    read: usize,
    /// How this rank has noticed the losses of which no note in the store told it.
    noticed: HashMap<Incarnation, &'static str>,
    /// The processes of whose loss the log has told.
    logged: HashSet<Incarnation>,
    /// The moment at which this rank learned of the last loss, which tells whether further losses
    /// may follow.
    last: Option<Instant>,
    /// The processes whose loss this rank could not announce, because the store failed.
    unannounced: Vec<Incarnation>,
    /// The moment at which the last announcement failed.
    failed: Option<Instant>,
}

impl Known {
    fn add(&mut self, process: Option<Incarnation>) {
        self.processes.extend(process);
        self.last = Some(Instant::now());
    }
}

impl Losses {
    /// Begins to watch the world whose keys begin with `prefix`. From now on the others learn when
    /// this process, which is `me`, ends.
    pub(super) fn begin(
        store: Arc<dyn Store>,
        prefix: &str,
        leftovers: &WorldKeys,
        (me, size): (Incarnation, usize),
        wait: &Wait,
    ) -> Result<Losses> {
        let store_knows = size == 1 || store.leave_last_word(&list(prefix), me.to_string().as_bytes(), wait)?;
        let local_ranks = match store_knows {
            true => None,
            false => LocalRanks::join(&*store, prefix, leftovers, me, wait)?,
        };
        Ok(Losses {
            store,
            prefix: prefix.to_owned(),
            me,
            known: Mutex::default(),
            local_ranks,
            turns: Turns::default(),
            told_deadlocks: Mutex::default(),
        })
    }

    /// Makes the losses of a world in which no rank can be lost.
    #[cfg(test)]
    pub(super) fn none(store: Arc<dyn Store>, prefix: &str) -> Losses {
        Losses {
            store,
            prefix: prefix.to_owned(),
            me: Incarnation::first(0),
            known: Mutex::default(),
            local_ranks: None,
            turns: Turns::default(),
            told_deadlocks: Mutex::default(),
        }
    }

    /// Returns the prefix of all keys of the world.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns what this process knows of the turns of its world.
    pub(super) fn turns(&self) -> &Turns {
        &self.turns
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the key of the next note, and its number.
    pub(super) fn next(&self) -> (usize, String) {
        let number = self.known().read + 1;
        (number, note_key(&self.list(), number))
    }

    /// Notes `value`, which the store had under the key of note `number`.
    pub(super) fn note(&self, number: usize, value: &[u8]) {
        let (word, is_silent) = split_last_word(value);
        let text = std::str::from_utf8(word).unwrap_or_default();
        let mut known = self.known();
        // Another thread may have noted this value meanwhile. A value that cannot be read is
        // counted, so the next note is found.
        if known.read + 1 == number {
            known.read = number;
            match text.parse() {
                Ok(turn) => self.turns.note(turn),
                Err(()) => {
                    let process: Option<Incarnation> = text.parse().ok();
                    if let Some(process) = process.filter(|_| is_silent) {
                        known.noticed.entry(process).or_insert("the store says so: its host is down or out of reach");
                    }
                    known.add(process);
                }
            }
        }
    }

    /// Keeps, for the log, how this rank has noticed a loss. Only the first way is kept for each
    /// loss.
    pub(super) fn noticed(&self, process: Incarnation, how: &'static str) {
        self.known().noticed.entry(process).or_insert(how);
    }

    /// Returns how this rank has noticed a loss.
    pub(super) fn how(&self, process: Incarnation) -> &'static str {
        let how = self.known().noticed.get(&process).copied();
        how.unwrap_or("the store says so: its connections have ended, or it has left")
    }

    /// Warns in the log, once for each process, that these processes are lost. A rank that ends in
    /// order is among the losses, too, so only those are logged that a call of this rank has
    /// missed.
    pub(super) fn warn_of(&self, lost: impl IntoIterator<Item = Incarnation>) {
        for process in lost.into_iter().filter(|process| *process != self.me) {
            // The lock is given back first, because a callback may ask for the lost ranks.
            let is_new = self.known().logged.insert(process);
            if is_new {
                log::warn!("rank {}: rank {} is lost ({})", self.me.rank, process.rank, self.how(process));
            }
        }
    }

    /// Notes that this rank's caller is told of that deadlock. Returns whether this is the first
    /// time.
    pub(super) fn tell_deadlock(&self, id: &str) -> bool {
        let mut told = self.told_deadlocks.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = told.iter().all(|known| known != id);
        if is_new {
            told.truncate(DEADLOCKS - 1);
            told.push_front(id.to_owned());
        }
        is_new
    }

    /// Whether a process is known to be lost for which `is_missed` holds.
    pub(super) fn any(&self, is_missed: impl Fn(Incarnation) -> bool) -> bool {
        self.known().processes.iter().any(|process| is_missed(*process))
    }

    /// Returns all processes that are known to be lost and for which `is_missed` holds.
    pub(super) fn all(&self, is_missed: impl Fn(Incarnation) -> bool) -> BTreeSet<Incarnation> {
        self.known().processes.iter().copied().filter(|process| is_missed(*process)).collect()
    }

    /// Reads all notes, and returns once no further rank was lost for a moment. Ranks whose host or
    /// launcher has ended are lost one right after the other.
    pub(super) fn wait_until_quiet(&self, of_caller: &Wait) {
        let end = Deadline::after(LONGEST_WAIT_FOR_QUIET);
        let wait = Wait { watch: None, ..of_caller.clone() };
        loop {
            // A rank tells of losses before it comes to a call. So whoever has seen that it came
            // must read the list again.
            if self.refresh(&wait).is_err() {
                return;
            }
            let last = self.known().last;
            let left = last.map_or(Duration::ZERO, |last| QUIET.saturating_sub(last.elapsed()));
            if left.is_zero() || end.passed() || wait.cancel.is_raised() {
                return;
            }
            let (number, key) = self.next();
            match self.store.get(&key, &wait.with_deadline(Deadline::after(left))) {
                Ok(value) => self.note(number, &value),
                Err(error) if error.status() == Status::Timeout => {}
                Err(_) => return,
            }
        }
    }

    /// Reads the notes of losses that are in the store by now. Fails when the store does not
    /// answer.
    pub(super) fn refresh(&self, of_caller: &Wait) -> Result<()> {
        let deadline = Deadline::after(SHORT.min(of_caller.deadline.left()));
        let wait = Wait { watch: None, ..of_caller.with_deadline(deadline) };
        self.look_within(&wait);
        self.read_notes(&wait)
    }

    /// Reads the notes that are in the store by now, up to the first gap.
    fn read_notes(&self, wait: &Wait) -> Result<()> {
        while !wait.deadline.passed() {
            let (number, key) = self.next();
            let Some(value) = self.store.try_get(&key, wait)? else { break };
            self.note(number, &value);
        }
        Ok(())
    }

    /// Returns the key that counts the notes.
    fn list(&self) -> String {
        list(&self.prefix)
    }

    /// Looks at the processes of this host, where the store does not know who is lost. Announces
    /// the losses that it finds to all ranks, and those that it could not announce before.
    /// Takes [`SHORT`] at most, also where the caller's deadline has passed.
    pub(super) fn look(&self, of_caller: &Wait) {
        self.look_within(&of_caller.with_deadline(Deadline::after(SHORT)));
    }

    /// Does what [`look`](Losses::look) does, until the deadline at most.
    fn look_within(&self, wait: &Wait) {
        self.announce_again(wait.deadline);
        let Some(local_ranks) = &self.local_ranks else { return };
        for process in local_ranks.newly_dead(&*self.store, wait) {
            self.noticed(process, "its process on this host has ended");
            self.announce_by(process, wait.deadline);
        }
    }

    /// Announces to all ranks, through the store, that a process is lost. Where the store fails,
    /// this rank knows of the loss all the same, and announces it later ([`look`](Losses::look)).
    pub(super) fn announce(&self, process: Incarnation) {
        self.announce_by(process, Deadline::after(SHORT));
    }

    /// Does what [`announce`](Losses::announce) does, until the deadline at most.
    fn announce_by(&self, process: Incarnation, deadline: Deadline) {
        let wait = Wait::after(deadline.left());
        if deadline.passed() || self.add(&process.to_string(), &wait).is_err() {
            let mut known = self.known();
            // The store may have ended with that process.
            if !known.processes.contains(&process) {
                known.add(Some(process));
            }
            known.unannounced.push(process);
            known.failed = Some(Instant::now());
        }
    }

    /// Tells all ranks that a rank has come to a turn.
    pub(super) fn announce_turn(&self, turn: Turn, wait: &Wait) -> Result<()> {
        self.add(&turn.to_string(), wait)
    }

    /// Adds a note to the list in the store.
    fn add(&self, note: &str, wait: &Wait) -> Result<()> {
        let (list, wrote) = (self.list(), |_| {});
        let number = add_note(&*self.store, &list, note.as_bytes(), wait, &wrote)?;
        // Notes are read in order, so nobody asks the store about gaps among those that were read.
        // A server of this library fills the gap of a rank that has died, and not the gap of a
        // rank that lives and could not write its note.
        let has_unread = || usize::try_from(number).is_ok_and(|number| self.known().read + 1 < number);
        // Others may have added notes since this rank has read the list.
        if has_unread() && self.read_notes(wait).is_ok() && has_unread() {
            // The next rank that adds a note fills the gaps where this rank cannot.
            let _ = fill_gaps(&*self.store, &list, number, wait, &wrote);
        }
        Ok(())
    }

    /// Announces the losses of which the store could not be told before.
    fn announce_again(&self, deadline: Deadline) {
        let mut known = self.known();
        if known.failed.is_none_or(|failed| failed.elapsed() < AGAIN) {
            return;
        }
        known.failed = None;
        let processes = std::mem::take(&mut known.unannounced);
        drop(known);
        processes.into_iter().for_each(|process| self.announce_by(process, deadline));
    }
}

/// Returns the processes in the list of the world whose keys begin with `prefix`.
pub(super) fn read_all(store: &dyn Store, prefix: &str, wait: &Wait) -> Result<BTreeSet<Incarnation>> {
    let mut lost = BTreeSet::new();
    for number in 1_usize.. {
        let Some(value) = store.try_get(&note_key(&list(prefix), number), wait)? else { break };
        let (word, _) = split_last_word(&value);
        lost.extend(String::from_utf8_lossy(word).parse::<Incarnation>().ok());
    }
    Ok(lost)
}

/// Returns the key that counts the notes of the world whose keys begin with `prefix`.
fn list(prefix: &str) -> String {
    format!("{prefix}/lost")
}

#[cfg(test)]
mod tests;

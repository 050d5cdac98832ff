//! Numbered notes in the store, which every rank reads in order.
//!
//! The key `<list>` counts the notes, and `<list>/<k>` holds the k-th one. A rank takes the next
//! number, and then writes its note under that number. A rank that dies in between leaves a gap,
//! and nobody would read the later notes. So each rank fills the gaps ([`GAP`]) among the last
//! [`LOOKED_BACK`] numbers before its own. A slow rank that finds its own number filled takes a new
//! number.

use std::fmt::Display;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::rendezvous::store::{GAP, LOOKED_BACK, Store};
use crate::wait::{Deadline, Wait};

/// How long a rank that has a number may take to write its note before others take it for dead.
const MOMENT: Duration = Duration::from_millis(250);

/// Returns the key of note `number` of the list.
pub(in crate::rendezvous) fn note_key(list: &str, number: impl Display) -> String {
    format!("{list}/{number}")
}

/// Writes a note under the next free number of a list, and returns the number. `wrote` gets each
/// key that this rank has written or may have written.
pub(in crate::rendezvous) fn add_note(
    store: &dyn Store,
    list: &str,
    note: &[u8],
    wait: &Wait,
    wrote: &dyn Fn(String),
) -> Result<i64> {
    while !wait.deadline.passed() {
        let number = store.add(list, 1, wait)?;
        if number == 1 {
            wrote(list.to_owned());
        }
        let key = note_key(list, number);
        let stands = store.set_once(&key, note, wait);
        if stands.as_ref().is_ok_and(|stands| stands != note) {
            // Another rank has filled this number, because it took this rank for dead.
            continue;
        }
        // A store that fails may have stored the note all the same.
        wrote(key);
        return stands.map(|_| number);
    }
    Err(Error::timeout(format!("the store at {} gave no number for a note under {list} in time", store.name())))
}

/// Fills the gaps among the [`LOOKED_BACK`] notes before note `number`, so that the note is read.
/// `wrote` gets each key that this rank has written.
pub(in crate::rendezvous) fn fill_gaps(
    store: &dyn Store,
    list: &str,
    number: i64,
    wait: &Wait,
    wrote: &dyn Fn(String),
) -> Result<()> {
    let earlier: Vec<String> = ((number - LOOKED_BACK).max(1)..number).map(|number| note_key(list, number)).collect();
    if earlier.is_empty() {
        return Ok(());
    }
    let present = store.present(&earlier, wait)?;
    let moment = wait.with_deadline(Deadline::after(MOMENT.min(wait.deadline.left())));
    for (key, _) in earlier.into_iter().zip(present).filter(|(_, is_there)| !is_there) {
        if store.get(&key, &moment).is_err() && store.set_once(&key, GAP, wait)? == GAP {
            wrote(key);
        }
    }
    Ok(())
}

//! The models of the table of handles. A thread may make up a token that another thread gets at the
//! same moment, so nothing but the table orders the two threads.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use memory_order::check::{Kept, Model};

use crate::epoch;
use crate::handles::Table;

pub(crate) const MODELS: &[Model] = &[
    Model { name: "handles: looked up while it is made", preemptions: Some(3), waitv: true, run: looked_up_while_made },
    Model {
        name: "handles: looked up while it is freed",
        preemptions: Some(3),
        waitv: true,
        run: looked_up_while_freed,
    },
    Model { name: "handles: freed twice", preemptions: Some(3), waitv: true, run: freed_twice },
    Model { name: "handles: a slot is used again", preemptions: Some(3), waitv: true, run: used_again },
];

/// The orders that no model needs.
pub(crate) const KEPT: &[Kept] = &[];

/// The models that need none of the orders.
pub(crate) const STURDY: &[(&str, &str)] = &[
    (
        "handles: looked up while it is freed",
        "the entry is made before there are threads; it checks the epochs, and the exchange that unlinks the entry",
    ),
    ("handles: freed twice", "it checks that one exchange alone unlinks the entry, which needs no order"),
];

const KIND: u16 = 0xd301;

/// Returns the token of slot 0 in that generation.
fn token(generation: usize) -> usize {
    (KIND as usize) << 48 | generation << 24
}

/// The part of an entry that is read in place. loom checks that nobody reads it before it is made,
/// or after it is destroyed.
struct Fast(UnsafeCell<u32>);

// SAFETY: loom runs all threads of a model in turn, and reports accesses that nothing orders.
unsafe impl Send for Fast {}
// SAFETY: as above.
unsafe impl Sync for Fast {}

impl Fast {
    fn new(value: u32) -> Fast {
        Fast(UnsafeCell::new(value))
    }

    fn get(&self) -> u32 {
        // SAFETY: loom reports a write at the same time.
        self.0.with(|place| unsafe { *place })
    }
}

impl Drop for Fast {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: loom reports another access at the same time.
            self.0.with_mut(|place| unsafe { *place = 0 });
        }
    }
}

type Things = Table<Fast, u32>;

/// Returns an empty table, whose first chunk and lock loom knows.
fn table() -> Arc<Things> {
    epoch::begin();
    let table = Arc::new(Things::new(KIND, "thing"));
    assert!(table.with(token(0), |_| ()).is_err());
    table
}

fn insert(table: &Things, value: u32) -> usize {
    table.insert(Fast::new(value), Arc::new(value)).unwrap()
}

/// Looks a token up in both ways. Returns whether it is live.
fn look_up(table: &Things, token: usize, value: u32) {
    if let Ok(fast) = table.with(token, Fast::get) {
        assert_eq!(fast, value);
    }
    if let Ok(found) = table.get(token) {
        assert_eq!(*found, value);
    }
}

fn looked_up_while_made() {
    let table = table();
    let other = table.clone();
    let thread = loom::thread::spawn(move || assert_eq!(insert(&other, 7), token(0)));
    look_up(&table, token(0), 7);
    thread.join().unwrap();
    assert!(table.remove(token(0)).is_ok());
}

fn looked_up_while_freed() {
    let table = table();
    insert(&table, 7);
    let other = table.clone();
    let thread = loom::thread::spawn(move || assert_eq!(*other.remove(token(0)).unwrap(), 7));
    look_up(&table, token(0), 7);
    thread.join().unwrap();
    assert!(table.get(token(0)).is_err());
}

fn freed_twice() {
    let table = table();
    insert(&table, 7);
    let other = table.clone();
    let thread = loom::thread::spawn(move || usize::from(other.remove(token(0)).is_ok()));
    let mine = usize::from(table.remove(token(0)).is_ok());
    assert_eq!(mine + thread.join().unwrap(), 1, "threads that freed it");
}

fn used_again() {
    let table = table();
    insert(&table, 7);
    let other = table.clone();
    let thread = loom::thread::spawn(move || {
        other.remove(token(0)).unwrap();
        assert_eq!(insert(&other, 8), token(1));
    });
    look_up(&table, token(0), 7);
    look_up(&table, token(1), 8);
    thread.join().unwrap();
    assert!(table.remove(token(1)).is_ok());
}

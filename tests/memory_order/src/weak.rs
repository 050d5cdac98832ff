//! Which memory order is weakened in this run, and which accesses the run has met.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::ptr;
use std::str::FromStr;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A half of a memory order that can be weakened alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Half {
    /// Later accesses of the thread stay after this read.
    Acquire,
    /// Earlier accesses of the thread stay before this write.
    Release,
    /// The read of a compare-and-exchange that fails.
    FailureAcquire,
    /// The place of a fence in the one order of all sequentially consistent fences.
    Total,
    /// Nothing: the order is relaxed.
    Nothing,
}

impl Half {
    const ALL: [(Half, &str); 5] = [
        (Half::Acquire, "acquire"),
        (Half::Release, "release"),
        (Half::FailureAcquire, "acquire on failure"),
        (Half::Total, "total order"),
        (Half::Nothing, "relaxed"),
    ];

    pub(crate) fn name(self) -> &'static str {
        Half::ALL.iter().find(|(half, _)| *half == self).map_or("", |(_, name)| name)
    }
}

/// A half of the memory order at one place of the source.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    /// The source file, as the compiler names it.
    pub(crate) file: String,
    pub(crate) line: u32,
    pub(crate) column: u32,
    pub(crate) half: Half,
}

impl Point {
    /// Returns the text from which [`Point::from_str`] makes the point again.
    pub(crate) fn key(&self) -> String {
        format!("{}|{}|{}|{}", self.file, self.line, self.column, self.half.name())
    }
}

impl FromStr for Point {
    type Err = ();

    fn from_str(text: &str) -> Result<Point, ()> {
        let parts: Vec<&str> = text.split('|').collect();
        let &[file, line, column, name] = &parts[..] else { return Err(()) };
        let half = Half::ALL.iter().find(|(_, other)| *other == name).ok_or(())?.0;
        let number = |text: &str| text.parse().map_err(|_| ());
        Ok(Point { file: file.to_owned(), line: number(line)?, column: number(column)?, half })
    }
}

static WEAKENED: OnceLock<Point> = OnceLock::new();
/// The accesses that this process has met, by the address of the place.
static MET: Mutex<BTreeMap<(usize, Half), &'static Location<'static>>> = Mutex::new(BTreeMap::new());

/// Weakens one order for the rest of the process.
pub(crate) fn weaken(point: Point) {
    WEAKENED.set(point).expect("one order at a time is weakened");
}

/// Returns the accesses that this process has met, with the halves of their orders.
pub(crate) fn met() -> BTreeSet<Point> {
    let met = MET.lock().unwrap_or_else(PoisonError::into_inner);
    let point = |(&(_, half), place): (&(usize, Half), &&'static Location<'static>)| Point {
        file: place.file().to_owned(),
        line: place.line(),
        column: place.column(),
        half,
    };
    met.iter().map(point).collect()
}

/// Notes that the access at the caller's place has this half.
#[track_caller]
fn meet(half: Half) {
    let place = Location::caller();
    let mut met = MET.lock().unwrap_or_else(PoisonError::into_inner);
    met.insert((ptr::from_ref(place).addr(), half), place);
}

/// Whether this half of the order at the caller's place holds in this run.
#[track_caller]
fn holds(half: Half) -> bool {
    let place = Location::caller();
    match WEAKENED.get() {
        // Nobody asks for the accesses of a run with a weakened order.
        Some(point) => {
            (place.file(), place.line(), place.column(), half) != (&point.file, point.line, point.column, point.half)
        }
        None => {
            meet(half);
            true
        }
    }
}

/// Whether the order is relaxed, so that it has no half.
#[track_caller]
fn is_relaxed(order: Ordering) -> bool {
    let is_relaxed = order == Relaxed;
    if is_relaxed && WEAKENED.get().is_none() {
        meet(Half::Nothing);
    }
    is_relaxed
}

#[track_caller]
pub(crate) fn load(order: Ordering) -> Ordering {
    if is_relaxed(order) || holds(Half::Acquire) { order } else { Relaxed }
}

#[track_caller]
pub(crate) fn store(order: Ordering) -> Ordering {
    if is_relaxed(order) || holds(Half::Release) { order } else { Relaxed }
}

#[track_caller]
pub(crate) fn change(order: Ordering) -> Ordering {
    if is_relaxed(order) {
        return order;
    }
    let acquires = matches!(order, Acquire | AcqRel | SeqCst) && holds(Half::Acquire);
    let releases = matches!(order, Release | AcqRel | SeqCst) && holds(Half::Release);
    match (acquires, releases) {
        (true, true) => order,
        (true, false) => Acquire,
        (false, true) => Release,
        (false, false) => Relaxed,
    }
}

#[track_caller]
pub(crate) fn failure(order: Ordering) -> Ordering {
    if is_relaxed(order) || holds(Half::FailureAcquire) { order } else { Relaxed }
}

/// Returns the order of a fence; `None` where no fence is left.
#[track_caller]
pub(crate) fn fence(order: Ordering) -> Option<Ordering> {
    let acquires = matches!(order, Acquire | AcqRel) && holds(Half::Acquire);
    let releases = matches!(order, Release | AcqRel) && holds(Half::Release);
    match (order, acquires, releases) {
        (SeqCst, ..) => Some(if holds(Half::Total) { SeqCst } else { AcqRel }),
        (_, true, true) => Some(AcqRel),
        (_, true, false) => Some(Acquire),
        (_, false, true) => Some(Release),
        (_, false, false) => None,
    }
}

//! Which memory order is weakened in this run, and which orders the run has met.

use std::collections::BTreeSet;
use std::panic::Location;
use std::str::FromStr;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A half of a memory order that can be weakened alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Half {
    /// What comes later in the thread stays after this read.
    Acquire,
    /// What came before in the thread stays before this write.
    Release,
    /// The read of a compare-and-exchange that fails.
    FailureAcquire,
    /// The place of a fence in the one order of all sequentially consistent fences.
    Total,
}

impl Half {
    const ALL: [(Half, &str); 4] = [
        (Half::Acquire, "acquire"),
        (Half::Release, "release"),
        (Half::FailureAcquire, "acquire on failure"),
        (Half::Total, "total order"),
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
static MET: Mutex<BTreeSet<(&str, u32, u32, Half)>> = Mutex::new(BTreeSet::new());

/// Weakens one order for the rest of the process.
pub(crate) fn weaken(point: Point) {
    WEAKENED.set(point).expect("one order at a time is weakened");
}

/// Returns the orders that this process has met, which are stronger than relaxed.
pub(crate) fn met() -> Vec<Point> {
    let met = MET.lock().unwrap_or_else(PoisonError::into_inner);
    met.iter().map(|&(file, line, column, half)| Point { file: file.to_owned(), line, column, half }).collect()
}

/// Whether this half of the order at the caller's place holds in this run.
#[track_caller]
fn holds(half: Half) -> bool {
    let place = Location::caller();
    match WEAKENED.get() {
        // Nobody asks for the orders of a run with a weakened one.
        Some(point) => {
            (place.file(), place.line(), place.column(), half) != (&point.file, point.line, point.column, point.half)
        }
        None => {
            let mut met = MET.lock().unwrap_or_else(PoisonError::into_inner);
            met.insert((place.file(), place.line(), place.column(), half));
            true
        }
    }
}

#[track_caller]
pub(crate) fn load(order: Ordering) -> Ordering {
    if order == Relaxed || holds(Half::Acquire) { order } else { Relaxed }
}

#[track_caller]
pub(crate) fn store(order: Ordering) -> Ordering {
    if order == Relaxed || holds(Half::Release) { order } else { Relaxed }
}

#[track_caller]
pub(crate) fn change(order: Ordering) -> Ordering {
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
    if order == Relaxed || holds(Half::FailureAcquire) { order } else { Relaxed }
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

//! This file has the type that gives a group's members to the reader of a recording.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The world ranks of a group's members, as a slice. All groups of a recording share one table,
/// because each of them may name the same long part of it.
#[derive(Clone)]
pub struct Members {
    table: Arc<[u32]>,
    /// The group's part of the table, which lies inside the table.
    part: Range<usize>,
}

impl Members {
    /// Returns the members in that part of the table. The result is empty where the part does not
    /// lie inside the table.
    pub(crate) fn new(table: &Arc<[u32]>, part: Range<usize>) -> Members {
        let part = if table.get(part.clone()).is_some() { part } else { 0..0 };
        Members { table: Arc::clone(table), part }
    }
}

impl Deref for Members {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.table[self.part.clone()]
    }
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl PartialEq for Members {
    fn eq(&self, other: &Members) -> bool {
        **self == **other
    }
}

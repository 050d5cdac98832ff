//! Where the result of a reduction goes.

/// A place for the result of a reduction.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The first byte of the result.
    pub at: *mut u8,
    /// Whether the result is written with stores that bypass the caches.
    pub stream: bool,
}

impl Target {
    /// Returns a place that is written with ordinary stores.
    #[inline]
    pub fn cached(at: *mut u8) -> Target {
        Target { at, stream: false }
    }
}

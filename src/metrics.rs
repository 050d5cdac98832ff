//! The counters of this process as text for Prometheus.

use recording::metrics::{Source, text as text_of};

use crate::error::{Error, Result};
use crate::recorder;

/// Returns the counters of this process in Prometheus' text format (version 0.0.4), from its
/// recording: the worlds, and for each group how many calls were begun and have ended, and for how
/// long the oldest call runs. docs/events.md lists them. **Local**.
///
/// Fails with `DM_STATUS_UNSUPPORTED` where the process has no recording (`DM_RECORDER=0`).
///
/// ```
/// let text = devicemesh::metrics::text()?;
/// assert!(text.contains("# TYPE devicemesh_calls_begun_total counter\n"), "{text}");
/// # Ok::<(), devicemesh::error::Error>(())
/// ```
pub fn text() -> Result<String> {
    Error::check_fork()?;
    recorder::open()?;
    let snapshot = hostccl::recorder::get().map(|recorder| recorder.snapshot()).ok_or_else(|| {
        Error::unsupported("this process has no recording (DM_RECORDER=0, or no memory for it), so it counts nothing")
    })?;
    let snapshot = snapshot.map_err(|error| Error::internal(format!("the recording of this process: {error}")))?;
    let now = Some(snapshot.process.clock.moment());
    Ok(text_of(&[Source { snapshot: &snapshot, pid: std::process::id(), now }]))
}

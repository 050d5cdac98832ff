//! How long a wait without any progress may last: `HOSTCCL_TIMEOUT_MS`, and the timeout that a
//! caller hands over with its next call (`hostcclNextCallTimeout`).

use std::cell::Cell;
use std::ffi::OsStr;
use std::sync::OnceLock;
use std::time::Duration;

use crate::error::{Error, Result};

/// The longest time that `HOSTCCL_TIMEOUT_MS` may give: 100 years.
const MOST_MILLIS: u64 = 100 * 365 * 86_400_000;

/// How long ranks wait for each other to make a communicator, where no other timeout is set.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

thread_local! {
    /// The timeout of this thread's next call in milliseconds; 0 where the caller set none.
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// Sets the timeout of the calling thread's next call in milliseconds; 0 for none of its own.
#[inline]
pub(crate) fn set_next(millis: u64) {
    NEXT.set(millis);
}

/// Returns the timeout of the call that the calling thread is about to begin; `None` where it has
/// none of its own. The call after that has none unless it gets one.
#[inline]
pub(crate) fn take_next() -> Option<Duration> {
    from_millis(NEXT.replace(0))
}

/// Returns the value of `HOSTCCL_TIMEOUT_MS`. `None` stands for no limit: the variable is unset, 0
/// or invalid.
pub(crate) fn from_environment() -> Option<Duration> {
    read_once().as_ref().ok().copied().flatten()
}

/// Fails where `HOSTCCL_TIMEOUT_MS` is no valid time. This function is called before a
/// communicator is made.
pub(crate) fn check_environment() -> Result<()> {
    read_once().as_ref().map(drop).map_err(Clone::clone)
}

/// Returns the duration of a time in milliseconds, where 0 stands for a time that is not set.
pub(crate) fn from_millis(millis: u64) -> Option<Duration> {
    (millis > 0).then(|| Duration::from_millis(millis))
}

fn read_once() -> &'static Result<Option<Duration>> {
    static TIMEOUT: OnceLock<Result<Option<Duration>>> = OnceLock::new();
    TIMEOUT.get_or_init(|| parse(std::env::var_os("HOSTCCL_TIMEOUT_MS").as_deref()))
}

/// Parses the variable's value. An empty value counts as unset.
fn parse(value: Option<&OsStr>) -> Result<Option<Duration>> {
    let text = value.unwrap_or_default().to_string_lossy();
    let digits = text.trim();
    if digits.is_empty() {
        return Ok(None);
    }
    let millis: u64 = digits.parse().ok().filter(|millis| *millis <= MOST_MILLIS).ok_or_else(|| {
        Error::argument(format!(
            "HOSTCCL_TIMEOUT_MS is {text:?}: it must be a whole number of milliseconds from 0 (as without the variable) to {MOST_MILLIS}"
        ))
    })?;
    Ok(from_millis(millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_that_is_no_time_is_refused_with_its_value() {
        for (text, millis) in
            [(None, 0), (Some(""), 0), (Some("0"), 0), (Some(" 300 "), 300), (Some("3153600000000"), MOST_MILLIS)]
        {
            let read = parse(text.map(OsStr::new)).unwrap();
            assert_eq!(read, (millis > 0).then(|| Duration::from_millis(millis)), "{text:?}");
        }
        for text in ["abc", "-1", "1.5", "30s", "3153600000001", "99999999999999999999"] {
            let error = parse(Some(OsStr::new(text))).unwrap_err();
            assert_eq!(error.code(), crate::types::ncclInvalidArgument);
            assert!(error.message().contains(&format!("HOSTCCL_TIMEOUT_MS is {text:?}")), "{}", error.message());
        }
    }
}

//! The log of the library: where its records go, and what a line of it is.
//!
//! The library writes its records with the macros of the crate `log`. A Rust program that has
//! installed a logger of its own gets them there, with targets that begin with `devicemesh` or
//! `hostccl`. The C ABI installs the sink of this module, which writes lines to stderr or calls the
//! program's callback. `DM_LOG` or `dm_set_log` chooses the level. A Rust program that has no
//! logger gets the sink by [`init_from_environment`].
//!
//! A record is written where no lock is held that a call back into the library could need, because
//! the callback may call functions such as `dm_abort`.

mod line;
mod rank;
mod sink;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;

pub use log::{Level, LevelFilter};

pub use self::line::utc;
pub(crate) use self::rank::{Me, set_rank};
pub(crate) use self::sink::Callback;
use self::sink::SINK;
use crate::error::{Error, Result};

/// The environment variable that chooses the level of the lines on stderr.
pub const LOG_VARIABLE: &str = "DM_LOG";

/// How long [`set`] waits for calls of earlier callbacks on other threads.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether the sink is the logger of this process, once it was tried.
static IS_INSTALLED: OnceCell<bool> = OnceCell::new();

/// Keeps the level and the callback of one call of [`set`] together.
static SETTING: Mutex<()> = Mutex::new(());

/// Writes the library's records to stderr as `DM_LOG` says (`error`, `warn`, `info` or `debug`),
/// unless this process has a logger of the crate `log` already. Returns `false` where the process
/// has such a logger. The C ABI calls this function by itself. A Rust program that wants `DM_LOG`
/// calls this function once at its start.
///
/// Another logger cannot be installed afterwards: `log::set_logger` works once in a process.
pub fn init_from_environment() -> bool {
    *IS_INSTALLED.get_or_init(|| {
        if log::set_logger(&SINK).is_err() {
            return false;
        }
        let value = std::env::var_os(LOG_VARIABLE).unwrap_or_default();
        match level_named(&value.to_string_lossy()) {
            Some(level) => log::set_max_level(level),
            None => {
                log::set_max_level(LevelFilter::Warn);
                log::warn!(
                    "{Me}: {LOG_VARIABLE} is {:?}, not error, warn, info, debug or off: nothing more is logged",
                    value.to_string_lossy()
                );
                log::set_max_level(LevelFilter::Off);
            }
        }
        true
    })
}

/// Sets the level, and the callback that gets the records in place of stderr. Waits for the calls
/// of all earlier callbacks on other threads, so that the caller may free afterwards what these
/// callbacks use.
pub(crate) fn set(level: LevelFilter, callback: Option<Callback>) -> Result<()> {
    if !init_from_environment() {
        return Err(Error::unsupported(
            "dm_set_log: this program has installed a logger of Rust's crate log, which gets the records: set the level there",
        ));
    }
    {
        let _setting = SETTING.lock().unwrap_or_else(PoisonError::into_inner);
        SINK.replace(callback);
        log::set_max_level(level);
    }
    match SINK.wait_until_unused(PATIENCE) {
        true => Ok(()),
        false => Err(Error::timeout(format!(
            "dm_set_log: an earlier callback was still running on another thread after {} ms: it gets no new records, but keep what it uses until a later call returns DM_STATUS_OK",
            PATIENCE.as_millis()
        ))),
    }
}

/// The level of that name in `DM_LOG`. An empty name stands for "off".
fn level_named(name: &str) -> Option<LevelFilter> {
    Some(match name {
        "" | "off" => LevelFilter::Off,
        "error" => LevelFilter::Error,
        "warn" => LevelFilter::Warn,
        "info" => LevelFilter::Info,
        "debug" => LevelFilter::Debug,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_variable_are_levels() {
        let words = ["", "off", "error", "warn", "info", "debug"];
        let levels = words.map(|word| level_named(word).unwrap());
        use LevelFilter::{Debug, Error, Info, Off, Warn};
        assert_eq!(levels, [Off, Off, Error, Warn, Info, Debug]);
        for wrong in ["trace", "DEBUG", "1", " info"] {
            assert_eq!(level_named(wrong), None, "{wrong:?}");
        }
    }
}

//! The part of the caller's `ncclConfig_t` that the engine uses.

use std::ffi::CStr;

use crate::error::{Error, Result};
use crate::nccl_config::CommConfig;
use crate::types::ncclConfig_t;

/// The fields of a configuration that the engine uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// Whether init, split, shrink and grow return only when they are done.
    pub(crate) blocking: bool,
    /// The communicator's name in messages. `None` where the caller gave none.
    pub(crate) name: Option<String>,
}

impl Default for Config {
    fn default() -> Config {
        Config { blocking: true, name: None }
    }
}

impl Config {
    /// Reads a configuration. An unset field gets its value from `inherited`. NULL counts as a
    /// configuration in which all fields are unset.
    ///
    /// # Safety
    /// `raw` is NULL or points to `raw->size` readable bytes.
    pub(crate) unsafe fn read(raw: *const ncclConfig_t, inherited: &Config) -> Result<Config> {
        let mut config = inherited.clone();
        if raw.is_null() {
            return Ok(config);
        }
        // SAFETY: the caller's contract.
        let given =
            unsafe { CommConfig::copy_of(raw.cast()) }.map_err(|error| Error::argument(format!("config: {error}")))?;
        let flag = |name| {
            let wrong = |value| Error::argument(format!("config.{name} is {value}, not 0 or 1"));
            given.flag(name).map_err(wrong)
        };
        config.blocking = flag("blocking")?.unwrap_or(config.blocking);
        flag("splitShare")?;
        if let Some(name) = given.name().filter(|name| !name.is_null()) {
            // SAFETY: the caller's contract says that `commName` is a C string.
            config.name = Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::*;

    fn raw(size: usize, version: u32) -> ncclConfig_t {
        ncclConfig_t { size, version, blocking: 0, commName: c"tp".as_ptr(), ..NCCL_CONFIG_INITIALIZER }
    }

    fn read(raw: &ncclConfig_t) -> Result<Config> {
        // SAFETY: the structure is whole, and a size that is larger is refused before the copy.
        unsafe { Config::read(raw, &Config::default()) }
    }

    /// The structure of a later release, which has more fields.
    #[repr(C)]
    struct Longer {
        /// The fields that this release knows.
        known: ncclConfig_t,
        /// The fields that it does not know.
        rest: [u64; 8],
    }

    #[test]
    fn fields_that_the_callers_header_lacks_are_not_read() {
        assert_eq!(read(&raw(56, 22_707)).unwrap(), Config { blocking: false, name: Some("tp".into()) });
        let longer = Longer { known: raw(size_of::<Longer>(), 23_200), rest: [7; 8] };
        // SAFETY: the structure has as many bytes as it says.
        let later = unsafe { Config::read((&raw const longer).cast(), &Config::default()) };
        assert_eq!(later.unwrap().name.as_deref(), Some("tp"));
        assert_eq!(read(&raw(40, 21_700)).unwrap(), Config { blocking: false, name: None });
        assert_eq!(read(&raw(56, 22_600)).unwrap().name, None);
    }

    #[test]
    fn what_is_not_set_is_inherited() {
        let parent = Config { blocking: false, name: Some("world".into()) };
        let mut unset = raw(56, 22_707);
        unset.blocking = NCCL_CONFIG_UNDEF_INT;
        unset.commName = std::ptr::null();
        // SAFETY: NULL is allowed, and the other structure is whole.
        unsafe {
            assert_eq!(Config::read(std::ptr::null(), &parent).unwrap(), parent);
            assert_eq!(Config::read(&unset, &parent).unwrap(), parent);
        }
    }

    #[test]
    fn garbage_is_refused() {
        let mut garbage = raw(56, 22_707);
        garbage.magic = 1;
        assert_eq!(read(&garbage).unwrap_err().code(), ncclInvalidArgument);
        for size in [8, 16, 5000] {
            assert_eq!(read(&raw(size, 22_707)).unwrap_err().code(), ncclInvalidArgument, "size {size}");
        }
        let mut blocking = raw(56, 22_707);
        blocking.blocking = 2;
        assert!(read(&blocking).unwrap_err().message().contains("blocking is 2"));
    }
}

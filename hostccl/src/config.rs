//! The caller's `ncclConfig_t`, read no further than its own size says.

use std::ffi::{CStr, c_char, c_int};
use std::mem::offset_of;

use crate::error::{Error, Result};
use crate::types::*;

/// What of a configuration matters here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) blocking: bool,
    pub(crate) name: Option<String>,
}

impl Default for Config {
    fn default() -> Config {
        Config { blocking: true, name: None }
    }
}

/// Versions of the header that brought the fields.
const HAS_SPLIT_SHARE: u32 = 21_800;
const HAS_NAME: u32 = 22_700;

impl Config {
    /// Reads a configuration; NULL, and what it leaves unset, give `inherited`.
    ///
    /// # Safety
    /// `raw` is NULL or points to `raw->size` readable bytes.
    pub(crate) unsafe fn read(raw: *const ncclConfig_t, inherited: &Config) -> Result<Config> {
        let mut config = inherited.clone();
        if raw.is_null() {
            return Ok(config);
        }
        // SAFETY: every configuration has at least size, magic and version; later fields are read only where the size
        // says that they are there.
        unsafe {
            let (size, magic, version) =
                ((&raw const (*raw).size).read(), (&raw const (*raw).magic).read(), (&raw const (*raw).version).read());
            if magic != NCCL_CONFIG_MAGIC || size < offset_of!(ncclConfig_t, blocking) {
                return Err(Error::argument(format!(
                    "the configuration has size {size} and magic {magic:#x}, not {NCCL_CONFIG_MAGIC:#x}: start from NCCL_CONFIG_INITIALIZER"
                )));
            }
            let has = |offset: usize, bytes: usize, since: u32| size >= offset + bytes && version >= since;
            let flag = |name: &str, value: c_int| match value {
                NCCL_CONFIG_UNDEF_INT => Ok(None),
                0 | 1 => Ok(Some(value == 1)),
                _ => Err(Error::argument(format!("config.{name} is {value}, not 0 or 1"))),
            };
            if has(offset_of!(ncclConfig_t, blocking), size_of::<c_int>(), 0) {
                let blocking = flag("blocking", (&raw const (*raw).blocking).read())?;
                config.blocking = blocking.unwrap_or(config.blocking);
            }
            if has(offset_of!(ncclConfig_t, splitShare), size_of::<c_int>(), HAS_SPLIT_SHARE) {
                flag("splitShare", (&raw const (*raw).splitShare).read())?;
            }
            if has(offset_of!(ncclConfig_t, commName), size_of::<*const c_char>(), HAS_NAME) {
                let name = (&raw const (*raw).commName).read();
                if !name.is_null() {
                    config.name = Some(CStr::from_ptr(name).to_string_lossy().into_owned());
                }
            }
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(size: usize, version: u32) -> ncclConfig_t {
        ncclConfig_t {
            size,
            magic: NCCL_CONFIG_MAGIC,
            version,
            blocking: 0,
            cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
            minCTAs: NCCL_CONFIG_UNDEF_INT,
            maxCTAs: NCCL_CONFIG_UNDEF_INT,
            netName: std::ptr::null(),
            splitShare: NCCL_CONFIG_UNDEF_INT,
            trafficClass: NCCL_CONFIG_UNDEF_INT,
            commName: c"tp".as_ptr(),
        }
    }

    fn read(raw: &ncclConfig_t) -> Result<Config> {
        // SAFETY: the structure is whole, whatever size it claims up to that.
        unsafe { Config::read(raw, &Config::default()) }
    }

    #[test]
    fn fields_that_the_callers_header_lacks_are_not_read() {
        assert_eq!(read(&raw(56, 22_707)).unwrap(), Config { blocking: false, name: Some("tp".into()) });
        assert_eq!(read(&raw(120, 23_200)).unwrap().name.as_deref(), Some("tp"));
        assert_eq!(read(&raw(40, 21_700)).unwrap(), Config { blocking: false, name: None });
        assert_eq!(read(&raw(56, 22_600)).unwrap().name, None);
        assert_eq!(read(&raw(16, 22_707)).unwrap(), Config::default());
    }

    #[test]
    fn what_is_not_set_is_inherited() {
        let parent = Config { blocking: false, name: Some("world".into()) };
        let mut unset = raw(56, 22_707);
        unset.blocking = NCCL_CONFIG_UNDEF_INT;
        unset.commName = std::ptr::null();
        // SAFETY: NULL and a whole structure.
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
        assert_eq!(read(&raw(8, 22_707)).unwrap_err().code(), ncclInvalidArgument);
        let mut blocking = raw(56, 22_707);
        blocking.blocking = 2;
        assert!(read(&blocking).unwrap_err().message().contains("blocking is 2"));
    }
}

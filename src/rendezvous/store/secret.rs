//! The secret that keeps strangers out of a store. A client and a server that both have it encrypt
//! what they send to each other (records.rs). The secret never crosses the wire.

use crate::error::{Error, Result};

/// The environment variable that holds the secret.
pub const VARIABLE: &str = "DM_STORE_SECRET";

/// The secret that a client and a server must both have.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Makes a secret of these bytes; `None` when there are none.
    pub fn new(bytes: &[u8]) -> Option<Secret> {
        (!bytes.is_empty()).then(|| Secret(bytes.to_vec()))
    }

    /// Returns the secret that `DM_STORE_SECRET` holds; `None` where it is not set. A variable that
    /// is set but empty is an error, because the user does not want an open store.
    pub fn from_environment() -> Result<Option<Secret>> {
        use std::os::unix::ffi::OsStrExt;
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
        Secret::new(value.as_bytes()).map(Some).ok_or_else(|| {
            Error::invalid(format!(
                "{VARIABLE} is set but empty, and an empty secret keeps nobody out: give it a value, the same on all ranks, or unset it"
            ))
        })
    }

    /// Returns the secret itself.
    pub(in crate::rendezvous) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Fails where `DM_STORE_SECRET` is set, because `store` cannot ask anybody for the secret,
    /// although the user expects that it does.
    pub(crate) fn refuse_for(store: &str) -> Result<()> {
        match Secret::from_environment()? {
            None => Ok(()),
            Some(_) => Err(Error::invalid(format!(
                "{VARIABLE} is set, but {store} does not ask for it: unset it, or meet in a store that does (env:// or tcp://host:port)"
            ))),
        }
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}
